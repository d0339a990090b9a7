"""Cases of the log-sum-exp: its gradient, its base, empty values, and merging by it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    INF,
    MLA,
    causally,
    check,
    everything,
    formula,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    rounding,
    run,
    spoiled,
    visibility,
)
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget


def partial(backend: str, mask: tw.Mask | None = None, **options: Any) -> Any:
    mask = tw.full() if mask is None else mask
    return lambda **x: tw.attention_partial(**x, mask=mask, backend=backend, **options)


@on_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_c073_gradient_through_the_lse_alone(
    backend: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    """loss = mean of lse: dq = scale sum_n P k, dk = scale P^T q, dv = 0."""
    x = qkv(2, 96, 130, heads, 64, dtype=dtype)
    dlse = torch.full((2, heads[0], 96), 1.0 / (2 * heads[0] * 96))
    dout = torch.zeros(2, 96, heads[0], 64, dtype=dtype)
    got = run(partial(backend, deterministic=True), x, dout, dlse)
    exact, eager = (
        run(
            lambda **x: formula(**x, visible=visibility(everything, 96, 130)),
            {n: t.to(wide) for n, t in x.items()},
            dout.to(wide),
            dlse.to(torch.promote_types(wide, dlse.dtype)),
        )
        for wide in (torch.float64, dtype)
    )
    assert is_zero(got.grads["v"]) and not is_zero(exact.grads["q"])
    for name in "qk":
        assert_within_budget(got.grads[name], exact.grads[name], eager.grads[name], name=name)

    # With out left out of the loss altogether, the gradient is the same.
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    lse = partial(backend, deterministic=True)(**leaves).lse
    alone = torch.autograd.grad(lse, (leaves["q"], leaves["k"]), dlse)
    assert torch.equal(alone[0], got.grads["q"]) and torch.equal(alone[1], got.grads["k"])


@on_backends
@pytest.mark.parametrize("dims", [MLA, pytest.param((64, 64), id="equal")])
def test_c077_one_lse_whatever_the_layout(backend: str, dims: tuple[int, int]) -> None:
    """Four requests of one query as a batch and packed: natural log in both."""
    x = qkv(4, 1, 256, (8, 1), *dims, dtype=torch.bfloat16)
    dense = check(partial(backend), lambda **x: formula(**x, visible=torch.tensor(True)), x)
    bounds = {"cu_seqlens_q": torch.arange(5), "cu_seqlens_k": torch.arange(5) * 256}
    flat = {name: t.flatten(0, 1) for name, t in x.items()}
    packed = tw.attention_varlen_partial(**flat, **bounds, backend=backend)
    scores = torch.einsum("bmhd,bngd->bhmn", x["q"].double(), x["k"].double()) * dims[0] ** -0.5
    exact = torch.logsumexp(scores, dim=-1)
    assert dense.lse is not None
    assert_lse_within_budget(dense.lse, exact, torch.bfloat16)
    assert_lse_within_budget(packed.lse.T, exact[..., 0], torch.bfloat16)


@on_backends
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_c078_lse_is_torch_logsumexp(backend: str, is_causal: bool, heads: tuple[int, int]) -> None:
    x = qkv(1, 1024, 1024, heads, 32, dtype=torch.float16)
    mask = tw.causal() if is_causal else tw.full()
    got = partial(backend, mask)(**x)
    k = x["k"].double().repeat_interleave(heads[0] // heads[1], dim=2)
    scores = torch.einsum("bmhd,bnhd->bhmn", x["q"].double(), k) * 32**-0.5
    visible = visibility(causally if is_causal else everything, 1024, 1024)
    exact = torch.logsumexp(scores.masked_fill(~visible, -INF), dim=-1)
    assert_lse_within_budget(got.lse, exact, torch.float16)


def states(count: int, dtype: torch.dtype = torch.float32) -> list[tw.Partial]:
    """Partials `[2, 3, 4, 8]`, each with rows of its own that are empty."""
    parts = []
    for index in range(count):
        out, lse = normal(2, 3, 4, 8, dtype=dtype, seed=index), normal(2, 4, 3, seed=50 + index)
        empty = torch.arange(3) == index
        out[:, empty], lse[..., empty] = 0.0, -INF
        parts.append(tw.Partial(out, lse))
    return parts


@pytest.mark.parametrize("garbage", [0.0, float("nan")])
def test_c079_merging_empty_states(garbage: float) -> None:
    nothing = tw.Partial(
        torch.full((1, 1, 1, 64), garbage, dtype=torch.float16), torch.full((1, 1, 1), -INF)
    )
    something = tw.Partial(normal(1, 1, 1, 64, dtype=torch.float16), normal(1, 1, 1))
    none = tw.merge([nothing, nothing])
    assert is_zero(none.out) and bool(none.lse.isneginf().all())
    for order in ([nothing, something], [something, nothing], [nothing, something, nothing]):
        merged = tw.merge(order)
        assert torch.equal(merged.out, something.out) and torch.equal(merged.lse, something.lse)


def test_c079_merge_is_associative_and_differentiable() -> None:
    a, b, c = states(3)
    flat = [t for part in (a, b, c) for t in part]

    def together(*ts: Tensor) -> tw.Partial:
        return tw.merge([tw.Partial(*ts[i : i + 2]) for i in (0, 2, 4)])

    def by_definition(*ts: Tensor) -> tw.Partial:
        outs, lses = torch.stack(ts[::2]), torch.stack(ts[1::2])
        lse = torch.logsumexp(lses, dim=0)
        shares = torch.exp(lses - lse).transpose(-1, -2).unsqueeze(-1)
        return tw.Partial((shares * outs).sum(0), lse)

    exact, eager = by_definition(*(t.double() for t in flat)), by_definition(*flat)
    left, right = tw.merge([tw.merge([a, b]), c]), tw.merge([a, tw.merge([b, c])])
    for got in (together(*flat), left, right):
        assert_within_budget(got.out, exact.out, eager.out)
        assert_lse_within_budget(got.lse, exact.lse, torch.float32)

    def gradients(fn: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in flat]
        upstream = [normal(*t.shape, dtype=dtype, seed=7) for t in exact]
        return torch.autograd.grad(fn(*leaves), leaves, upstream)

    # The gradient of an lse is a share times dO . (part - out), which cancels.
    upstream = normal(*a.out.shape, seed=7)
    floor = rounding({"v": torch.stack([a.out, b.out, c.out])}, upstream, torch.zeros(1), "lse")
    for got, want, plain in zip(
        gradients(together, torch.float32),
        gradients(by_definition, torch.float64),
        gradients(by_definition, torch.float32),
        strict=True,
    ):
        # Where a part is empty the definition differentiates -inf - finite; ours says 0.
        want, plain = (torch.nan_to_num(t, nan=0.0) for t in (want, plain))
        assert_within_budget(got, want, plain, floor=floor)


@on_backends
def test_c081_empty_sequences_touch_only_their_own_lse(backend: str) -> None:
    lengths = torch.randint(50, 61, (64,))
    lengths[[7, 40]] = 0
    used, cu_k = lengths.tolist(), torch.arange(65) * 64
    x = packed_qkv(64, 64 * 64, (8, 2), 16, dtype=torch.bfloat16)
    slack = (torch.arange(64) >= lengths.view(-1, 1)).flatten()
    x |= {name: spoiled(x[name], slack) for name in "kv"}
    got = check(
        lambda **x: tw.attention_varlen_partial(
            **x,
            cu_seqlens_q=torch.arange(65),
            cu_seqlens_k=cu_k,
            seqused_k=lengths,
            backend=backend,
        ),
        lambda **x: packed_formula(
            **x, cu_q=list(range(65)), cu_k=cu_k.tolist(), rule=everything, used_k=used
        ),
        x,
    )
    assert got.lse is not None
    assert torch.equal(got.lse.isneginf(), (lengths == 0).expand_as(got.lse))


@on_backends
@pytest.mark.parametrize("sink", [0.5, -30.0])
def test_c082_sink_alone(backend: str, sink: float) -> None:
    """128 keys are stored, none is used: lse is the sink, out is 0."""
    x = packed_qkv(1, 128, (4, 2), 16)
    x |= {name: spoiled(x[name], ...) for name in "kv"}
    x["sinks"] = torch.full((4,), sink)
    got = run(
        lambda **x: tw.attention_varlen_partial(
            **x,
            cu_seqlens_q=torch.tensor([0, 1]),
            cu_seqlens_k=torch.tensor([0, 128]),
            seqused_k=torch.tensor([0]),
            backend=backend,
        ),
        x,
    )
    assert got.lse is not None
    assert is_zero(got.out) and all(is_zero(got.grads[name]) for name in "qkv")
    assert_lse_within_budget(got.lse, torch.full((4, 1), sink).double(), torch.float32)


@on_backends
@pytest.mark.parametrize("sink", [100.0, -100.0, 3e4])
def test_c082_sink_far_above_and_below_the_scores(backend: str, sink: float) -> None:
    x = qkv(2, 9, 70, (4, 2), 16)
    x["sinks"] = torch.full((4,), sink)
    visible = visibility(causally, 9, 70)
    got = check(partial(backend, tw.causal()), lambda **x: formula(**x, visible=visible), x)
    assert got.lse is not None
    if sink > 0:
        assert_lse_within_budget(got.lse, torch.full((2, 4, 9), sink).double(), torch.float32)
