"""Cases of rows that see nothing, of -inf, and of NaN that must stay where nobody looks."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    INF,
    MLA,
    NAN,
    Form,
    assert_copied,
    check,
    formula,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    spoiled,
    visibility,
    windowed,
)
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget


def form(visible: Tensor, **terms: Any) -> Form:
    return lambda **x: formula(**x, visible=visible, **terms)


def partial(backend: str, mask: tw.Mask | None = None, **options: Any) -> Any:
    mask = tw.full() if mask is None else mask
    return lambda **x: tw.attention_partial(**x, mask=mask, backend=backend, **options)


@on_backends
def test_c043_boolean_mask_with_rows_all_false(backend: str) -> None:
    visible = torch.zeros(8, 8, dtype=torch.bool)
    visible[:4, :4] = True
    mask = tw.from_function(lambda b, h, m, n: visible[m, n])
    x = qkv(2, 8, 8, (2, 1), 8)
    x |= {name: spoiled(x[name], (slice(None), slice(4, None))) for name in "qkv"}
    dout = spoiled(normal(2, 8, 2, 8), (slice(None), slice(4, None)))
    got = check(partial(backend, mask), form(visible), x, dout=dout)
    assert is_zero(got.out[:, 4:]) and all(is_zero(got.grads[n][:, 4:]) for n in "qkv")


@on_backends
@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e10])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_c044_content_of_a_masked_key(backend: str, poison: float, heads: tuple[int, int]) -> None:
    x = qkv(2, 2, 2, heads, 4)
    x |= {name: spoiled(x[name], (slice(None), 1), poison) for name in "kv"}
    visible = torch.tensor([True, False])
    for mask in (tw.key_padding(1), tw.from_function(lambda b, h, m, n: n < 1)):
        got = check(partial(backend, mask), form(visible), x)
        assert is_zero(got.grads["k"][:, 1]) and is_zero(got.grads["v"][:, 1])
        first = x["v"][:, :1].repeat_interleave(heads[0] // heads[1], dim=2)
        assert_copied(got.out, first.expand_as(got.out))


@on_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c045_columns_of_the_least_finite_bias(backend: str, dtype: torch.dtype) -> None:
    """The first 128 of 441 keys get the dtype's minimum: attention over the others."""
    x = qkv(2, 40, 441, (4, 2), 64, dtype=dtype)
    bias = torch.zeros(1, 1, 1, 441, dtype=dtype)
    bias[..., :128] = torch.finfo(dtype).min
    check(partial(backend, bias=bias), form(torch.arange(441) >= 128), x)


def least_bias_rows(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    x = qkv(2, 6, 40, (4, 2), 16, dtype=dtype)
    bias = torch.zeros(2, 1, 6, 1, dtype=dtype)
    bias[:, :, 2:4] = torch.finfo(dtype).min
    return x, bias


# In fp32 and bf16 every logit of such a row rounds to the one number, so that the row is the mean
# of V; the -65,504 of fp16 leaves the logits apart. A finite bias never makes a row empty.
least_bias_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@on_backends
@least_bias_dtypes
def test_c045_rows_of_the_least_finite_bias(backend: str, dtype: torch.dtype) -> None:
    x, bias = least_bias_rows(dtype)
    visible = torch.tensor(True)
    got = partial(backend, bias=bias)(**x)
    exact, lse = formula(*(t.double() for t in x.values()), visible, bias=bias)
    eager, _ = formula(*x.values(), visible, bias=bias)
    assert_within_budget(got.out, exact, eager)
    assert_lse_within_budget(got.lse, lse, dtype)


@on_backends
@least_bias_dtypes
def test_c045_gradients_of_such_rows(backend: str, dtype: torch.dtype) -> None:
    x, bias = least_bias_rows(dtype)
    floor = None if dtype == torch.float16 else 0.0
    call = partial(backend, bias=bias)
    visible = torch.tensor(True)
    check(lambda **x: call(**x).out, form(visible, bias=bias), x, floor=floor)


@on_backends
def test_c046_one_head_fully_masked_in_every_form(backend: str) -> None:
    x = qkv(2, 5, 5, (3, 3), 1)
    mask = tw.from_function(lambda b, h, m, n: h != 1)
    visible = torch.tensor([True, False, True]).view(1, 3, 1, 1)
    got = check(partial(backend, mask), form(visible), x)
    assert is_zero(got.out[:, :, 1]) and all(is_zero(got.grads[n][:, :, 1]) for n in "qkv")

    assert torch.equal(tw.attention(**x, mask=mask, backend=backend), got.out)

    def flat_form(**x: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = form(visible)(**{name: t.unflatten(0, (2, 5)) for name, t in x.items()})
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    flat = {name: t.flatten(0, 1) for name, t in x.items()}
    cu = torch.tensor([0, 5, 10])
    packed = check(
        lambda **x: tw.attention_varlen_partial(**x, cu_seqlens_q=cu, mask=mask, backend=backend),
        flat_form,
        flat,
    )
    assert is_zero(packed.out[:, 1])


@on_backends
def test_c047_parameters_of_a_layer_with_an_empty_row(backend: str) -> None:
    """Padding and a band leave rows empty; they are not in the loss, and 0 * NaN must not be."""
    lengths = torch.tensor([4, 1])
    mask = tw.window(0, 1) & tw.key_padding(lengths)
    band = visibility(windowed(0, 1), 4, 4)
    visible = (band & (torch.arange(4) < lengths.view(2, 1, 1))).unsqueeze(1)
    in_loss = visible[:, 0].any(-1)
    assert not bool(in_loss.all())

    def gradients(attend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        tokens = normal(2, 4, 1, dtype=dtype)
        w_in, w_out = (normal(n, 1, dtype=dtype, seed=n).requires_grad_() for n in (3, 1))
        heads = zip("qkv", (tokens @ w_in.T).unflatten(-1, (3, 1, 1)).unbind(2), strict=True)
        out = attend(**dict(heads)).squeeze(-1) @ w_out
        return torch.autograd.grad(out[in_loss].square().sum(), (w_in, w_out))

    def plain(**x: Tensor) -> Tensor:
        return form(visible)(**x)[0]

    got = gradients(lambda **x: tw.attention(**x, mask=mask, backend=backend), torch.float32)
    exact, eager = gradients(plain, torch.float64), gradients(plain, torch.float32)
    for name, *three in zip(("w_in", "w_out"), got, exact, eager, strict=True):
        assert_within_budget(*three, name=name)


@on_backends
@pytest.mark.parametrize("way", ["bias", "mask"])
@pytest.mark.parametrize("hidden", [600, 1024])
def test_c048_first_key_tiles_hidden_for_some_rows(backend: str, way: str, hidden: int) -> None:
    """The running maximum is -inf until a later tile; the other rows see the first one."""
    M, N = 20, 1100
    x = qkv(2, M, N, (4, 2), 16)
    visible = (torch.arange(N) >= hidden) | (torch.arange(M).view(-1, 1) % 3 == 0)
    if way == "bias":
        call = partial(backend, bias=torch.zeros(1, 1, M, N).masked_fill(~visible, -INF))
    else:
        call = partial(backend, tw.from_function(lambda b, h, m, n: visible[m, n]))
    check(call, form(visible), x)


@on_backends
@pytest.mark.parametrize("S", [1, 37, 130])
def test_c049_mask_longer_than_the_sequence(backend: str, S: int) -> None:
    """Causal over blocks of 128, written for 1024 positions; exp(lse) is in the loss."""
    x = qkv(2, S, S, (4, 2), 64)
    blocks = torch.ones(8, 8, dtype=torch.bool).tril()
    starts = torch.zeros(1024, 1, dtype=torch.int64)
    stops = torch.arange(1, 1025).view(-1, 1)

    def with_exp_lse(out: Tensor, lse: Tensor) -> Tensor:
        return out + lse.exp().transpose(1, 2).unsqueeze(-1).to(out.dtype)

    visible = visibility(lambda p, j: j <= p, S, S)
    for mask in (tw.blocks(blocks) & tw.causal(), tw.intervals(starts, stops)):
        check(
            lambda mask=mask, **x: with_exp_lse(*partial(backend, mask)(**x)),
            lambda **x: (with_exp_lse(*form(visible)(**x)), form(visible)(**x)[1]),
            x,
        )


@on_backends
def test_c052_an_empty_attention_is_defined_and_merges(backend: str) -> None:
    x = qkv(2, 7, 9, (4, 2), 16)
    nothing = spoiled(x["k"], ...), spoiled(x["v"], ...)
    whole = partial(backend)(**x)
    for empty in (
        tw.attention_partial(x["q"], *nothing, mask=tw.key_padding(0), backend=backend),
        tw.attention_partial(x["q"], x["k"][:, :0], x["v"][:, :0], backend=backend),
        tw.attention_partial(x["q"], *nothing, mask=~tw.full(), backend=backend),
    ):
        assert is_zero(empty.out) and bool(empty.lse.isneginf().all())
        merged = tw.merge([empty, whole])
        assert_within_budget(merged.out, whole.out.double(), whole.out)
        assert_lse_within_budget(merged.lse, whole.lse.double(), torch.float32)


@on_backends
@pytest.mark.parametrize("row_stride", [43, 48])
def test_c054_bias_of_an_unaligned_width(backend: str, row_stride: int) -> None:
    """43 keys; a row stride of 48 leaves NaN between the rows of the bias."""
    x = qkv(3, 43, 43, (4, 4), 8)
    storage = torch.full((3, 4, 43, row_stride), NAN)
    storage[..., :43] = normal(3, 4, 43, 43)
    x["bias"] = storage[..., :43]
    visible = torch.tensor(True)
    check(partial(backend), lambda bias, **x: formula(**x, visible=visible, bias=bias), x)


@on_backends
@pytest.mark.parametrize("poison", [NAN, INF])
@pytest.mark.parametrize("used", [[32, 64, 96, 48], [0, 1, 128, 127]])
@pytest.mark.parametrize("queries", [1, 3])
def test_c058_cache_slack_in_decode(
    backend: str, poison: float, used: list[int], queries: int
) -> None:
    x = packed_qkv(4 * queries, 4 * 128, (8, 2), 64, dtype=torch.bfloat16)
    slack = (torch.arange(128) >= torch.tensor(used).view(4, 1)).flatten()
    x |= {name: spoiled(x[name], slack, poison) for name in "kv"}
    cu_q, cu_k = torch.arange(5) * queries, torch.arange(5) * 128
    got = check(
        lambda **x: tw.attention_varlen_partial(
            **x,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            seqused_k=torch.tensor(used),
            mask=tw.causal(),
            backend=backend,
        ),
        lambda **x: packed_formula(
            **x, cu_q=cu_q.tolist(), cu_k=cu_k.tolist(), rule=lambda p, j: j <= p, used_k=used
        ),
        x,
    )
    assert is_zero(got.grads["k"][slack]) and is_zero(got.grads["v"][slack])


@on_backends
@pytest.mark.parametrize("dims", [MLA, pytest.param((64, 32), id="small")])
def test_c060_nan_in_another_request_of_the_batch(backend: str, dims: tuple[int, int]) -> None:
    """The second request is broken from end to end; the others are as if alone."""
    x = qkv(3, 1, 70, (8, 1), *dims)
    broken = {name: torch.full_like(t[1:2], NAN) for name, t in x.items()}
    lengths = torch.tensor([5, 70, 33])

    def among(**x: Tensor) -> tw.Partial:
        whole = {n: torch.cat([t[:1], broken[n], t[1:]]) for n, t in x.items()}
        out, lse = partial(backend, tw.key_padding(lengths))(**whole)
        return tw.Partial(out[[0, 2]], lse[[0, 2]])

    healthy = {name: t[[0, 2]] for name, t in x.items()}
    visible = torch.arange(70) < lengths[[0, 2]].view(2, 1, 1, 1)
    check(among, form(visible), healthy)
