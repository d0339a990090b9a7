"""Attention over the keys in pieces, merged, is attention over all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise import Partial
from tilewise.core.mask import Mask
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

B, M, N, H, G, D, E = 2, 37, 61, 4, 2, 16, 8

MASKS: dict[str, Callable[[], Mask]] = {
    "full": tw.full,
    # A piece has no alignment of its own, so the pieces carry it in q_start.
    "causal": tw.causal,
    "window": lambda: tw.window(9, 3),
    # Empty in some pieces for all queries, in all pieces for some.
    "padding": lambda: tw.key_padding([5, 40]) & tw.chunked(16),
}


class Result(NamedTuple):
    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def run(attend: Callable[..., Partial], dtype: torch.dtype, out_dtype: torch.dtype) -> Result:
    """Forward and backward of `attend(q, k, v)` through both outputs, from the same inputs."""
    torch.manual_seed(0)
    shapes = ((B, M, H, D), (B, N, G, D), (B, N, G, E))
    # Values that every dtype holds, so that all runs see the same inputs.
    q, k, v = (torch.randn(s).bfloat16().to(dtype).requires_grad_() for s in shapes)
    dout, dlse = torch.randn(B, M, H, E), torch.randn(B, H, M)
    out, lse = attend(q, k, v)
    upstream = [dout.bfloat16().to(out_dtype), dlse.to(lse.dtype)]
    gradients = torch.autograd.grad([out.to(out_dtype), lse], [q, k, v], upstream)
    return Result(out.detach(), lse.detach(), *gradients)


def eager(mask: Mask, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Plain torch, products in the input dtype; a row that sees nothing is 0."""
    visible = mask.dense(B, H, M, N)
    k, v = (x.repeat_interleave(H // G, dim=2) for x in (k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k).float() * D**-0.5
    scores = scores.masked_fill(~visible, -1e30)
    p = torch.where(visible, torch.softmax(scores, -1), 0.0).to(v.dtype)
    lse = torch.logsumexp(scores, -1).masked_fill(~visible.any(-1), float("-inf"))
    return Partial(torch.einsum("bhmn,bnhe->bmhe", p, v), lse)


def in_pieces(count: int, **options: Any) -> Callable[[Tensor, Tensor, Tensor], Partial]:
    """Attention over `count` pieces of the keys, as even as they can be, merged."""
    edges = [round(i * N / count) for i in range(count + 1)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return tw.merge(
            [
                tw.attention_partial(
                    q, k[:, n0:n1], v[:, n0:n1], q_start=N - M, k_start=n0, **options
                )
                for n0, n1 in itertools.pairwise(edges)
            ]
        )

    return attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 8])
@pytest.mark.parametrize("name", MASKS)
def test_pieces_of_the_keys_merge_to_one_pass(name: str, count: int, dtype: torch.dtype) -> None:
    mask = MASKS[name]()
    check_pieces(mask, mask, count, dtype)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_pieces_under_a_predicate(count: int) -> None:
    def sees(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (m * 5 + n * 3 + h + b) % 4 == 0

    # The pieces number their queries from N - M on, the whole call from 0.
    shifted = tw.from_function(lambda b, h, m, n: sees(b, h, m - (N - M), n))
    check_pieces(tw.from_function(sees), shifted, count, torch.float32)


def check_pieces(whole: Mask, piecewise: Mask, count: int, dtype: torch.dtype) -> None:
    got = run(in_pieces(count, mask=piecewise, out_dtype=torch.float32), dtype, torch.float32)
    exact = run(
        lambda q, k, v: tw.attention_partial(
            q, k, v, mask=whole, backend="reference", out_dtype=torch.float64
        ),
        torch.float64,
        torch.float64,
    )
    plain = run(lambda q, k, v: eager(whole, q, k, v), dtype, dtype)
    assert got.out.dtype == torch.float32
    for field in ("out", "dq", "dk", "dv"):
        assert_within_budget(*(getattr(x, field) for x in (got, exact, plain)), name=field)
    assert_lse_within_budget(got.lse, exact.lse, dtype)
