"""The backward's common step: P and dS of a tile, recomputed from the LSE."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .masks import visible
from .scores import add_terms, keep_tile
from .softmax import probabilities
from .tiles import dot_rows, statistics_base


class Upstream(NamedTuple):
    """What comes from above: dO as an operand; lse and delta as statistics; and, where a bias may
    have made lse too large to hold the log of a row's sum, 1 / sum(exp(S - lse)), else None."""

    dout: Any
    lse: Any
    delta: Any
    shares: Any


@triton.jit
def load_statistics(upstream, seq, m0, h, mask_m, BLOCK_M: tl.constexpr):
    """lse (+inf where a row has none, so that P is 0), delta and 1 / sum of a tile's rows."""
    rows = tl.arange(0, BLOCK_M)
    row = seq.q_first + m0
    lse_base = statistics_base(upstream.lse, seq.batch, row, h)
    lse = tl.load(lse_base + rows, mask=mask_m, other=float("-inf"))
    is_empty = lse == float("-inf")
    delta_base = statistics_base(upstream.delta, seq.batch, row, h)
    # No load's mask may hang on another load, or the loads around it are not pipelined.
    delta = tl.where(is_empty, 0.0, tl.load(delta_base + rows, mask=mask_m, other=0.0))
    share = delta
    if upstream.shares.ptr is not None:
        share_base = statistics_base(upstream.shares, seq.batch, row, h)
        share = tl.load(share_base + rows, mask=mask_m, other=0.0)
    return tl.where(is_empty, float("inf"), lse), delta, share


@triton.jit
def recompute(
    q_tile, k_tile, v_tile, do_tile, statistics, call, seq, h, m0, n0,
    IS_PARTIAL: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_SHARES: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """P, P as dropout leaves it, dS, dS on its way to q . k, and who sees whom.

    All `[m, n]`, or `[n, m]` where TRANSPOSED. dV still lacks dropout's 1 / (1 - p).
    """
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    terms = call.terms
    m = m0 + tl.arange(0, BLOCK_M)
    n = n0 + tl.arange(0, BLOCK_N)
    lse, delta, share = statistics
    if TRANSPOSED:
        m, n = m[None, :], n[:, None]
        lse, delta, share = lse[None, :], delta[None, :], share[None, :]
        s = dot_rows(k_tile, q_tile, DIMS, BUILD)
        dp = dot_rows(v_tile, do_tile, VALUE_DIMS, BUILD)
    else:
        m, n = m[:, None], n[None, :]
        lse, delta, share = lse[:, None], delta[:, None], share[:, None]
        s = dot_rows(q_tile, k_tile, DIMS, BUILD)
        dp = dot_rows(do_tile, v_tile, VALUE_DIMS, BUILD)
    capped = s
    if not BUILD.is_folded:
        s, capped = add_terms(s, terms, seq, h, m, n, BUILD)
    seen = s
    if IS_PARTIAL:
        seen = visible(call.mask, seq, h, m, n, m0, n0, BUILD.mask)
        s = tl.where(seen, s, float("-inf"))
    p = probabilities(s, lse, terms.scale, BUILD.is_folded)
    if HAS_SHARES:
        p *= share
    kept = p
    if terms.rng is not None:
        keep = keep_tile(call, seq, h, m0, n0, TRANSPOSED, BUILD)
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * terms.keep_scale, 0.0)
    ds = p * (dp - delta)
    if IS_PARTIAL:
        # P is 0 there, but what it multiplies may be NaN.
        ds = tl.where(seen, ds, 0.0)
    ds_inner = ds
    if BUILD.is_capped:
        ds_inner = ds - ds * capped * capped
    return p, kept, ds, ds_inner, seen
