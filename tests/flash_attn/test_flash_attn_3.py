"""FlashAttention-3's interface: its arguments, those that have no meaning here, and combine."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core.case import Case
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense.budget import eager
from tilewise.flash_attn import flash_attn_3 as fa3

SHARED: dict[str, Any] = {
    "softmax_scale": None,
    "causal": False,
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
USED = {"seqused_q": None, "seqused_k": None}
PACKED = {n: d for n, d in SHARED.items() if n not in ("qv", "num_splits", "pack_gqa", "sm_margin")}
PACKED |= {"num_heads_q": None, "sm_margin": 0}
PACKED["return_attn_probs"] = PACKED.pop("return_attn_probs")
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], SHARED),
    "flash_attn_varlen_func": (["q", "k", "v", *LENGTHS], USED | SHARED),
    "flash_attn_qkvpacked_func": (["qkv"], PACKED),
    "flash_attn_combine": (["out_partial", "lse_partial"], {"out": None, "out_dtype": None}),
}
CU = torch.tensor([0, 5, 5, 13], dtype=torch.int32)


def qkv(dtype: torch.dtype = torch.bfloat16, n: int = 17) -> list[Tensor]:
    shapes = ((2, 13, 6, 16), (2, n, 2, 16), (2, n, 2, 16))
    return [torch.randn(s).to(dtype).requires_grad_(dtype.itemsize > 1) for s in shapes]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_documented_one(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters
    required, defaults = SIGNATURES[name]
    assert list(parameters) == [*required, *defaults]
    assert [p.default for p in parameters.values()][len(required) :] == list(defaults.values())


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, tw.full()),
        ({"causal": True, "deterministic": True}, tw.causal()),
        ({"window_size": (4, 2)}, tw.window(4, 2)),
        ({"attention_chunk": 5}, tw.chunked(5)),
        ({"attention_chunk": 5, "causal": True}, tw.chunked(5) & tw.causal()),
        ({"attention_chunk": 8, "causal": True, "window_size": (2, -1)},
         tw.chunked(8) & tw.window(2, 0)),
    ],
)  # fmt: skip
def test_masks_are_the_librarys(given: dict[str, Any], mask: tw.Mask) -> None:
    """Bitwise, gradients too, and with every hint about how to spread the work."""
    q, k, v = qkv()
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, softcap=3.0, **given)
    expected = tw.attention_partial(q, k, v, mask=mask, softcap=3.0)
    assert torch.equal(out, expected.out) and torch.equal(lse, expected.lse)
    got, want = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected.out))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    for hint in ({"num_splits": 3}, {"pack_gqa": True}, {"sm_margin": 4}):
        assert torch.equal(fa3.flash_attn_func(q, k, v, softcap=3.0, **given, **hint), out)


def test_used_lengths_of_packed_sequences() -> None:
    q, k, v = (x[0].detach() for x in qkv(n=13))
    used_q, used_k = torch.tensor([3, 0, 8]), torch.tensor([5, 0, 6])
    given = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "seqused_q": used_q, "seqused_k": used_k}
    got = fa3.flash_attn_varlen_func(q, k, v, CU, CU, 8, 8, used_q, used_k, causal=True)
    expected = tw.attention_varlen(q, k, v, mask=tw.causal(), **given)
    assert torch.equal(got, expected)


def test_packed_projections_of_grouped_heads() -> None:
    packed = torch.randn(2, 13, 6 + 2 * 2, 16, requires_grad=True)
    out = fa3.flash_attn_qkvpacked_func(packed, causal=True, num_heads_q=6)
    q, k, v = packed.split([6, 2, 2], 2)
    assert torch.equal(out, tw.attention(q, k, v, mask=tw.causal()))
    (gradient,) = torch.autograd.grad(out.sum(), packed)
    assert gradient.shape == packed.shape
    three = torch.randn(2, 13, 3, 6, 16)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(three), tw.attention(*three.unbind(2)))


@pytest.mark.parametrize("is_packed", [False, True])
def test_float8_with_descales(is_packed: bool) -> None:
    """Exact is fp64 on the dequantised inputs, eager the formula on them in bf16."""
    q, k, v = qkv(torch.float8_e4m3fn, 13)
    B = 3 if is_packed else 2
    descales = [torch.rand(B, 2) + 0.5 for _ in range(3)]
    row = torch.tensor([0] * 5 + [2] * 8) if is_packed else torch.arange(2)
    wide = []
    for x, descale, repeats in zip((q, k, v), descales, (3, 1, 1), strict=True):
        factor = descale.double().repeat_interleave(repeats, -1)[row].unsqueeze(-1)
        wide.append(x[0].double() * factor if is_packed else x.double() * factor.unsqueeze(1))
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales, strict=True))
    if is_packed:
        got = fa3.flash_attn_varlen_func(q[0], k[0], v[0], CU, CU, 8, 8, causal=True, **given)
        mask = tw.causal() & tw.documents(CU)
    else:
        got, mask = fa3.flash_attn_func(q, k, v, causal=True, **given), tw.causal()
    wide = [x.reshape(-1, *x.shape[-3:]) for x in wide]
    narrow = [x.bfloat16() for x in wide]
    exact = tw.attention(*wide, mask=mask, backend="reference")
    named = dict(zip("qkv", narrow, strict=True))
    plain = eager(Case("attention", "test", named, {"mask": mask}), named)["out"]
    assert got.dtype == torch.bfloat16
    assert_within_budget(got.reshape(exact.shape), exact, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(dtype: torch.dtype) -> None:
    """Three parts of the keys, one of them empty for the first rows."""
    q, k, v = qkv(torch.float32)
    mask = tw.causal(offset=0)
    parts = [
        tw.attention_partial(q, k[:, a:b], v[:, a:b], mask=mask, q_start=0, k_start=a)
        for a, b in ((0, 4), (4, 9), (9, 17))
    ]
    outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
    out, lse = fa3.flash_attn_combine(outs, lses.transpose(-1, -2), out_dtype=dtype)
    wide = [x.detach().double() for x in (q, k, v)]
    exact = tw.attention_partial(*wide, mask=mask, backend="reference")
    whole = tw.attention_partial(q, k, v, mask=mask)
    assert out.dtype == dtype
    assert_within_budget(out, exact.out, whole.out.to(dtype))
    assert_lse_within_budget(lse.transpose(-1, -2), exact.lse, torch.float32)
    got, want = (torch.autograd.grad(x.float().sum(), (q, k, v)) for x in (out, whole.out))
    assert all(
        torch.isfinite(x).all() and x.shape == y.shape for x, y in zip(got, want, strict=True)
    )
    place = torch.full_like(out, torch.nan).detach()
    again, _ = fa3.flash_attn_combine(outs.detach(), lses.detach().transpose(-1, -2), place)
    assert again is place and torch.equal(place, out)
    packed, packed_lse = fa3.flash_attn_combine(outs[:, 0], lses[:, 0].mT, out_dtype=dtype)
    assert torch.equal(packed, out[0]) and torch.equal(packed_lse, lse[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"qv": torch.zeros(1)}, NotImplementedError, "qv is not there yet; concatenate"),
        ({"q_descale": torch.ones(2, 2)}, ValueError, "q_descale must be None unless q is"),
        ({"attention_chunk": -1}, ValueError, "attention_chunk must be an int >= 0"),
        ({"num_splits": -1}, ValueError, "num_splits must be an int >= 0"),
        ({"sm_margin": 1.5}, ValueError, "sm_margin must be an int"),
        ({"pack_gqa": "yes"}, ValueError, "pack_gqa must be a bool or None"),
    ],
)
def test_what_cannot_be_raises(given: dict[str, Any], error: Any, message: str) -> None:
    q, k, v = qkv()
    with pytest.raises(error, match=message):
        fa3.flash_attn_func(q, k, v, **given)


def test_shapes_that_do_not_fit_raise() -> None:
    q, k, v = qkv(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"k_descale must be \[B, G\] = \[2, 2\], got \[1, 2\]"):
        fa3.flash_attn_func(q, k, v, k_descale=torch.ones(1, 2))
    with pytest.raises(ValueError, match="lse_partial must be"):
        fa3.flash_attn_combine(torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 4, 3))
    with pytest.raises(ValueError, match="num_heads_q query heads"):
        fa3.flash_attn_qkvpacked_func(torch.zeros(1, 3, 9, 8), num_heads_q=6)
    with pytest.raises(ValueError, match="out_dtype must be out's"):
        parts = torch.zeros(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
        fa3.flash_attn_combine(*parts, torch.zeros(1, 3, 4, 8), torch.float16)
