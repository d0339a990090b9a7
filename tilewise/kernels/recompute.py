"""The backward's common step: P and dS of a tile, recomputed from the LSE."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .scores import add_terms, keep_tile
from .softmax import probabilities
from .structs import decode
from .tiles import dot_rows


class Upstream(NamedTuple):
    """What comes from above: dO as an operand, and the numbers of each row.

    rows: fp32 `[B, H, M, 4]`: lse (+inf where a row has none, so that P is 0), delta (0 there), the
    share that P of a row is multiplied by (1, unless lse lost the sum), and nothing. They lie
    together so that one load is as wide as a program's threads: Triton then copies it to shared
    memory beside the tiles. A narrower one it repeats in every thread that needs a number.
    """

    dout: Any
    rows: Any


_COLUMNS = tl.constexpr(4)


@triton.jit
def _row_pointers(rows, batch, row, h, BLOCK_M: tl.constexpr):
    base = batch.to(tl.int64) * decode(rows.stride_b) + tl.cast(h, tl.int64) * decode(rows.stride_h)
    columns = tl.arange(0, _COLUMNS)[None, :]
    return rows.ptr + (base + row) * _COLUMNS + tl.arange(0, BLOCK_M)[:, None] * _COLUMNS + columns


@triton.jit
def load_rows(rows, seq, m0, h, mask_m, IS_PARTIAL: tl.constexpr, BLOCK_M: tl.constexpr):
    """lse, delta and share of a tile's rows."""
    ptrs = _row_pointers(rows, seq.batch, seq.q_first + m0, h, BLOCK_M)
    if IS_PARTIAL:
        numbers = tl.load(ptrs, mask=mask_m[:, None], other=0.0)
    else:
        numbers = tl.load(ptrs)
    column = tl.arange(0, _COLUMNS)[None, :]
    lse = tl.sum(tl.where(column == 0, numbers, 0.0), 1)
    delta = tl.sum(tl.where(column == 1, numbers, 0.0), 1)
    share = tl.sum(tl.where(column == 2, numbers, 0.0), 1)
    return lse, delta, share


@triton.jit
def store_rows(rows, batch, row, h, lse, delta, share, mask_m, BLOCK_M: tl.constexpr):
    """Write them; lse as the forward left it."""
    is_empty = lse == float("-inf")
    lse = tl.where(is_empty, float("inf"), lse)[:, None]
    delta = tl.where(is_empty, 0.0, delta)[:, None]
    column = tl.arange(0, _COLUMNS)[None, :]
    last = tl.where(column == 2, share[:, None], 0.0)
    numbers = tl.where(column == 0, lse, tl.where(column == 1, delta, last))
    tl.store(_row_pointers(rows, batch, row, h, BLOCK_M), numbers, mask=mask_m[:, None])


@triton.jit
def recompute(
    q_tile, k_tile, v_tile, do_tile, statistics, seen, call, seq, h, m0, n0,
    IS_PARTIAL: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_SHARES: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """P, P as dropout leaves it, dS, and dS on its way to q . k.

    All `[m, n]`, or `[n, m]` where TRANSPOSED. seen: who sees whom, where IS_PARTIAL. dV still
    lacks dropout's 1 / (1 - p).
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
    if IS_PARTIAL:
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
        if IS_PARTIAL:
            ds_inner = tl.where(seen, ds_inner, 0.0)
    return p, kept, ds, ds_inner
