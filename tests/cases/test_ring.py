"""Cases of context parallelism: what rings are made of, pieces and merges, on one machine.

A rank is a loop index here: every query chunk meets every key chunk as a piece, forward pieces are
merged in fp32, and the backward adds the pieces' gradients into fp32 buffers.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    NAN,
    Outcome,
    causally,
    check,
    formula,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    rounding,
    run,
    same,
    spoiled,
    visibility,
)
from tests.helpers import backends
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

Tensors = dict[str, Tensor]
(BACKEND,) = backends("tiled")


def edges(S: int, chunks: int) -> list[tuple[int, int]]:
    return list(pairwise([S * c // chunks for c in range(chunks + 1)]))


def ring_forward(x: Tensors, chunks: int) -> tw.Partial:
    """Causal attention in `chunks` chunks of queries and of keys; out stays fp32."""
    rows = []
    for m0, m1 in edges(x["q"].shape[1], chunks):
        pieces = [
            tw.attention_partial(
                x["q"][:, m0:m1],
                x["k"][:, n0:n1],
                x["v"][:, n0:n1],
                mask=tw.causal(),
                q_start=m0,
                k_start=n0,
                out_dtype=torch.float32,
                backend=BACKEND,
            )
            for n0, n1 in edges(x["k"].shape[1], chunks)
        ]
        rows.append(tw.merge(pieces))
    return tw.Partial(torch.cat([r.out for r in rows], 1), torch.cat([r.lse for r in rows], 2))


def ring(x: Tensors, chunks: int, dout: Tensor) -> Outcome:
    """Forward and backward from pieces; out and gradients in fp32."""
    out, lse = ring_forward(x, chunks)
    delta = (dout.float() * out).sum(-1).transpose(1, 2)
    grads = {name: torch.zeros(t.shape) for name, t in x.items()}
    for m0, m1 in edges(x["q"].shape[1], chunks):
        for n0, n1 in edges(x["k"].shape[1], chunks):
            tw.attention_partial_backward(
                dout[:, m0:m1],
                x["q"][:, m0:m1],
                x["k"][:, n0:n1],
                x["v"][:, n0:n1],
                lse[..., m0:m1],
                delta[..., m0:m1],
                dq=grads["q"][:, m0:m1],
                dk=grads["k"][:, n0:n1],
                dv=grads["v"][:, n0:n1],
                mask=tw.causal(),
                q_start=m0,
                k_start=n0,
                backend=BACKEND,
            )
    return Outcome(out, lse, grads)


def exact_and_eager(x: Tensors, dout: Tensor) -> tuple[Outcome, Outcome]:
    S = x["q"].shape[1]
    return tuple(
        run(
            lambda **x: formula(**x, visible=visibility(causally, S, S))[0],
            {name: t.to(dtype) for name, t in x.items()},
            dout.to(dtype),
        )
        for dtype in (torch.float64, x["q"].dtype)
    )


def check_ring(x: Tensors, chunks: int) -> None:
    S = x["q"].shape[1]
    dout = normal(*x["q"].shape[:-1], x["v"].shape[-1], dtype=x["q"].dtype)
    got = ring(x, chunks, dout)
    exact, eager = exact_and_eager(x, dout)
    _, lse = formula(*(t.double() for t in x.values()), visibility(causally, S, S))
    assert got.lse is not None
    assert_within_budget(got.out, exact.out, eager.out)
    assert_lse_within_budget(got.lse, lse, x["q"].dtype)
    for name, grad in got.grads.items():
        least = rounding(x, dout, lse, name)
        assert_within_budget(grad, exact.grads[name], eager.grads[name], name=name, floor=least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_c219_error_does_not_grow_with_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    """The measure is the error of one rank in fp32, not that of 16-bit products."""
    x = qkv(2, 192, 192, (4, 2), 32, dtype=dtype)
    dout = normal(2, 192, 4, 32, dtype=dtype)
    one, many = ring(x, 1, dout), ring(x, ranks, dout)
    exact, _ = exact_and_eager(x, dout)
    assert many.out.dtype == torch.float32
    assert_within_budget(many.out, exact.out, one.out)
    for name in "qkv":
        assert_within_budget(many.grads[name], exact.grads[name], one.grads[name], name=name)


@on_backends
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_c221_replicated_keys_count_once(backend: str, ranks: int) -> None:
    """Text keys are on every rank, image keys are sharded: text is one piece of the merge."""
    text, image = 11, 30
    x = qkv(2, 9, text + image, (4, 2), 16)
    parts = [(0, text), *((text + a, text + b) for a, b in edges(image, ranks))]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tw.Partial:
        return tw.merge(
            [tw.attention_partial(q, k[:, n0:n1], v[:, n0:n1], backend=backend) for n0, n1 in parts]
        )

    got = check(call, lambda **x: formula(**x, visible=torch.tensor(True)), x)
    # As a ring would do that rotates the text too.
    twice = tw.merge([call(**x), tw.attention_partial(x["q"], x["k"][:, :text], x["v"][:, :text])])
    assert got.lse is not None and bool((twice.lse - got.lse > 1e-3).all())


@on_backends
@pytest.mark.parametrize("ranks", [2, 4])
def test_c223_tail_padding_of_packed_documents(backend: str, ranks: int) -> None:
    """Stored lengths are multiples of 2 ranks, real ones are not: chunk c of every document."""
    chunks, stored, used = 2 * ranks, [24, 8, 40], [21, 1, 33]
    cu = torch.tensor([0, *stored]).cumsum(0)
    docs = torch.arange(3).repeat_interleave(torch.tensor(stored))
    index = torch.arange(72) - cu[docs]
    padding = index >= torch.tensor(used)[docs]
    chunk_of = index * chunks // torch.tensor(stored)[docs]
    x = {name: spoiled(t, padding) for name, t in packed_qkv(72, 72, (4, 2), 16).items()}
    sizes = torch.tensor(stored) // chunks
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])

    def used_of(c: int) -> Tensor:
        return (torch.tensor(used) - c * sizes).clamp(min=0).minimum(sizes)

    def call(q: Tensor, k: Tensor, v: Tensor) -> tw.Partial:
        outs, lses = torch.zeros(72, 4, 16), torch.zeros(4, 72)
        for c in range(chunks):
            pieces = [
                tw.attention_varlen_partial(
                    q[chunk_of == c],
                    k[chunk_of == d],
                    v[chunk_of == d],
                    cu_seqlens_q=bounds,
                    seqused_q=used_of(c),
                    seqused_k=used_of(d),
                    q_start=c * sizes,
                    k_start=d * sizes,
                    mask=tw.causal(),
                    deterministic=True,
                    backend=backend,
                )
                for d in range(chunks)
            ]
            out, lse = tw.merge(pieces)
            rows = (chunk_of == c).nonzero().squeeze(-1)
            outs, lses = outs.index_copy(0, rows, out), lses.index_copy(1, rows, lse)
        return tw.Partial(outs, lses)

    def form(**x: Tensor) -> tuple[Tensor, Tensor]:
        at = cu.tolist()
        return packed_formula(**x, cu_q=at, cu_k=at, rule=causally, used_q=used, used_k=used)

    got = check(call, form, x)
    assert is_zero(got.out[padding]) and all(is_zero(g[padding]) for g in got.grads.values())
    same(run(call, x), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 4])
def test_c224_gradients_of_a_ring_equal_one_device(ranks: int, dtype: torch.dtype) -> None:
    check_ring(qkv(2, 130, 130, (4, 2), 16, 8, dtype=dtype), 2 * ranks)


@pytest.mark.parametrize("S", [1, 3, 4, 7])
def test_c226_fewer_tokens_than_chunks(S: int) -> None:
    """Four ranks, eight chunks, some of them empty."""
    check_ring(qkv(2, S, S, (4, 2), 16), 8)


@on_backends
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c228_gradients_have_the_dtype_of_their_input(
    backend: str, dtype: torch.dtype, out_dtype: torch.dtype | None
) -> None:
    x = qkv(2, 9, 20, (4, 2), 16, dtype=dtype)
    x |= {"bias": normal(1, 4, 9, 20, seed=4), "sinks": normal(4, dtype=dtype, seed=5)}
    got = check(
        lambda **x: tw.attention_partial(**x, out_dtype=out_dtype, backend=backend),
        lambda **x: formula(**x, visible=torch.tensor(True)),
        x,
    )
    assert got.out.dtype == (out_dtype or dtype)
    assert [g.dtype for g in got.grads.values()] == [t.dtype for t in x.values()]


@on_backends
@pytest.mark.parametrize("op", ["attention", "attention_partial"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_c229_one_gradient_for_every_argument(backend: str, op: str, packed: bool) -> None:
    """Each differentiable argument alone, and all together, through every public op."""
    options: dict[str, object] = {"mask": tw.causal(), "softcap": 5.0, "backend": backend}
    options["deterministic"] = True
    x = packed_qkv(20, 20, (4, 2), 8) if packed else qkv(2, 20, 20, (4, 2), 8)
    if packed:
        options["cu_seqlens_q"] = torch.tensor([0, 8, 20])
        op = op.replace("attention", "attention_varlen")
    x |= {"bias": normal(1, 4, 20, 20, seed=4), "sinks": normal(4, seed=5)}
    x["alibi_slopes"] = normal(4, seed=6).abs()
    together = run(lambda **x: getattr(tw, op)(**x, **options), x)
    for name, t in x.items():
        rest = {other: y for other, y in x.items() if other != name}
        alone = run(lambda rest=rest, **one: getattr(tw, op)(**rest, **one, **options), {name: t})
        assert torch.equal(alone.grads[name], together.grads[name]), name


def test_c229_buffers_are_added_to() -> None:
    """The backward of a piece returns nothing: what its buffers held before stays in the sum."""
    x, dout = qkv(2, 9, 9, (4, 2), 8), normal(2, 9, 4, 8)
    lse = ring_forward(x, 1).lse
    totals = []
    for start in (0.0, 2.0):
        buffers = {f"d{name}": torch.full(t.shape, start) for name, t in x.items()}
        delta = torch.zeros_like(lse)
        result = tw.attention_partial_backward(
            dout, *x.values(), lse, delta, **buffers, backend=BACKEND
        )
        assert result is None
        totals.append(buffers)
    for name in totals[0]:
        exact = totals[0][name].double() + 2.0
        assert_within_budget(totals[1][name], exact, exact.float())
    with pytest.raises(NotImplementedError, match="use backend='tiled'"):
        nan = {f"d{name}": torch.full(t.shape, NAN) for name, t in x.items()}
        tw.attention_partial_backward(dout, *x.values(), lse, delta, **nan, backend="reference")
