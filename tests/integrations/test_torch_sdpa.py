"""SDPA's flash ops by Tilewise. On the CPU ATen has no kernels of theirs, so they show alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import attention as torch_attention
from torch.nn import functional as F

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense.choice import torch_mode_unheeded
from tilewise.integrations import torch_sdpa

aten = torch.ops.aten
IS_CUDA = UNDER_TEST.device == "cuda"
CU = torch.tensor([0, 4, 4, 9], dtype=torch.int32)


@pytest.fixture
def overrides() -> Iterator[None]:
    if IS_CUDA:
        torch_sdpa.activate()
        yield
        torch_sdpa.restore()
    else:
        made = torch_sdpa.Overrides("CPU")
        yield
        made.remove()


# The tiles keep O as it was summed for the backward, and ATen's ops keep what they return.
EXACT = torch.float16 if IS_CUDA else torch.float32


def qkv(M: int = 9, N: int = 9, D: int = 16, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    shapes = ((2, 4, M, D), (2, 2, N, D), (2, 2, N, D))
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


def sdpa(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """Through the public function on CUDA, through the op under it elsewhere."""
    if not IS_CUDA:
        return aten._scaled_dot_product_flash_attention(q, k, v, **given)[0]
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **given)


def plain(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **given: Any) -> Tensor:
    """SDPA's own formula in the dtype of its inputs."""
    with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **given)


def results(form: Any, tensors: list[Tensor], **given: Any) -> list[Tensor]:
    out = form(*tensors, **given)
    upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, upstream)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [{}, {"is_causal": True}, {"scale": 0.3, "is_causal": True}])
def test_values_and_gradients(overrides: None, given: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = qkv(dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact, eager = results(plain, wide, **given), results(plain, tensors, **given)
    for got, want, near in zip(results(sdpa, tensors, **given), exact, eager, strict=True):
        assert got.dtype == dtype
        assert_within_budget(got, want, near)


@pytest.mark.parametrize(("M", "N"), [(5, 9), (9, 5)])
def test_causal_is_top_left(overrides: None, M: int, N: int) -> None:
    """Asked of the op, since SDPA does not choose flash for causal of unequal lengths."""
    tensors = qkv(M, N)
    wide = [x.detach().double() for x in tensors]
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)
    assert_within_budget(out, plain(*wide, True), plain(*tensors, True))
    heads_last = [x.transpose(1, 2) for x in wide]
    exact = tw.attention_partial(*heads_last, mask=tw.causal(offset=0), backend="reference")
    assert_lse_within_budget(lse, exact.lse, torch.float16)


def test_layout_is_the_querys(overrides: None) -> None:
    """As PyTorch's compiler expects it: contiguous stays so, transposed stays so."""
    q, k, v = (x.detach() for x in qkv())
    assert sdpa(q, k, v).is_contiguous()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    out = sdpa(*turned)
    assert out.stride() == turned[0].stride()
    assert torch.equal(out, sdpa(q, k, v))


def test_dropout_is_the_librarys(overrides: None) -> None:
    tensors = qkv(33, 33, dtype=EXACT)
    torch.manual_seed(5)
    got = results(sdpa, tensors, dropout_p=0.4)
    heads_last = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    torch.manual_seed(5)
    out = tw.attention(*heads_last, dropout_p=0.4)
    upstream = torch.linspace(-1, 1, got[0].numel()).reshape(got[0].shape).to(out.dtype)
    gradients = torch.autograd.grad(out, heads_last, upstream.transpose(1, 2))
    for a, b in zip(got, [out.detach(), *gradients], strict=True):
        assert torch.equal(a, b.transpose(1, 2))


@pytest.mark.parametrize("given", [{}, {"window_size_left": 2, "window_size_right": 1}])
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(overrides: None, given: dict[str, Any], is_causal: bool) -> None:
    """The op under `varlen_attn`: bitwise the library's, backward too."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(dtype=EXACT))
    sizes = (CU, CU, 5, 5, 0.0, is_causal)
    out, lse, state, unused, _ = aten._flash_attention_forward(q, k, v, *sizes, False, **given)
    right = 0 if is_causal else given.get("window_size_right")
    mask = tw.window(given.get("window_size_left"), right)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    lengths = {"cu_seqlens_q": CU, "cu_seqlens_k": CU}
    expected = tw.attention_varlen_partial(*leaves, mask=mask, **lengths)
    assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)
    upstream = torch.randn_like(out)
    got = aten._flash_attention_backward(
        upstream, q, k, v, out, lse, *sizes, state, unused, **given
    )
    want = torch.autograd.grad(expected.out, leaves, upstream)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_torchs_deterministic_mode_is_heeded() -> None:
    """Also of calls that PyTorch makes, which say nothing of it."""
    q, k, v = (x.detach() for x in qkv())

    def is_deterministic() -> bool:
        return torch_sdpa._arguments(q, k, v, tw.full(), 0.0, None, {}).is_deterministic

    assert not is_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        assert is_deterministic()
        with torch_mode_unheeded():
            assert not is_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_is_not_there_raises(overrides: None) -> None:
    q, k, v = (x[0].transpose(0, 1).detach() for x in qkv())
    is_paged = "block_table" in str(aten._flash_attention_forward.default._schema)
    # Torch 2.11 has no pages.
    with pytest.raises(NotImplementedError if is_paged else RuntimeError, match="block_table"):
        aten._flash_attention_forward(
            q, k, v, CU, CU, 5, 5, 0.0, False, False, block_table=torch.zeros(3, 1).int()
        )
    with pytest.raises(NotImplementedError, match="return_debug_mask"):
        aten._scaled_dot_product_flash_attention(*qkv(), 0.0, False, True)


def test_removed_overrides_leave_nothing() -> None:
    if IS_CUDA:
        before = torch_attention.current_flash_attention_impl()
        tensors = qkv(64, 64)
        own = sdpa(*tensors)
        torch_sdpa.activate()
        assert torch_attention.current_flash_attention_impl() == torch_sdpa.NAME
        torch_sdpa.activate()
        torch_sdpa.restore()
        torch_sdpa.restore()
        assert torch_attention.current_flash_attention_impl() == before
        assert torch.equal(sdpa(*tensors), own)
        return
    torch_sdpa.Overrides("CPU").remove()
    with pytest.raises(NotImplementedError, match="Could not run"):
        sdpa(*qkv())


# ---------------------------------------------------------------- the function in its place

SHAPES = {
    "heads": ((2, 4, 9, 16), (2, 4, 11, 16), (2, 4, 11, 8)),
    "no heads": ((2, 9, 16), (2, 11, 16), (2, 11, 16)),
    "two batch dims": ((2, 3, 4, 9, 16), (2, 3, 4, 11, 16), (2, 3, 4, 11, 16)),
}


@pytest.mark.parametrize("mask", [None, "causal", "bool", "floating", "by row"])
@pytest.mark.parametrize("name", SHAPES)
def test_function_in_pytorchs_place(name: str, mask: str | None) -> None:
    tensors = [torch.randn(shape).requires_grad_() for shape in SHAPES[name]]
    given: dict[str, Any] = {"scale": 0.3}
    if mask == "causal":
        given["is_causal"] = True
    elif mask is not None:
        seen = torch.rand(9, 11) > 0.3
        seen[:, 0] = True
        given["attn_mask"] = torch.randn(9, 11) if mask == "floating" else seen
        if mask == "by row":
            given["attn_mask"] = seen.expand(*SHAPES[name][0][:-2], 9, 11)

    def run(form: Any, dtype: torch.dtype) -> list[Tensor]:
        cast = {n: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
                for n, x in given.items()}  # fmt: skip
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        with torch_attention.sdpa_kernel(torch_attention.SDPBackend.MATH):
            return results(form, leaves, **cast)

    got = run(torch_sdpa.scaled_dot_product_attention, torch.float32)
    own = F.scaled_dot_product_attention
    for a, b, c in zip(got, run(own, torch.float64), run(own, torch.float32), strict=True):
        # dS = P (dP - delta): the fp32 rounding of what is subtracted.
        floor = 16 * torch.finfo(torch.float32).eps
        assert_within_budget(a, b, c, floor=floor)


def test_function_with_grouped_heads() -> None:
    q, k, v = (x.detach().float() for x in qkv())
    got = torch_sdpa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert_within_budget(got, plain(q.double(), k.double(), v.double()), plain(q, k, v))
    with pytest.raises(ValueError, match="enable_gqa must be True where 4 query heads read 2"):
        torch_sdpa.scaled_dot_product_attention(q, k, v)
    with pytest.raises(ValueError, match="attn_mask must be None where is_causal"):
        mask = torch.ones(9, 9, dtype=torch.bool)
        torch_sdpa.scaled_dot_product_attention(q, q, q, mask, is_causal=True)
    with pytest.raises(ValueError, match="key must be a tensor, got list"):
        torch_sdpa.scaled_dot_product_attention(q, [0.0], v)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="query, key and value must be"):
        torch_sdpa.scaled_dot_product_attention(q, k[0], v[0])
    with pytest.raises(ValueError, match="attn_mask must be a tensor, got str"):
        torch_sdpa.scaled_dot_product_attention(q, q, q, "causal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"attn_mask must broadcast to .* got \[2, 1\]"):
        torch_sdpa.scaled_dot_product_attention(q[None], q[None], q[None], torch.ones(2, 1))


def test_without_cuda_it_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="on CUDA only"):
        torch_sdpa.activate()
    assert torch_attention.current_flash_attention_impl() is None
    torch_sdpa.restore()
