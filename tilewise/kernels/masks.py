"""Which tiles a program visits, and which keys a row of a tile sees.

A *band* needs nothing but a sequence's bounds: its keys [low, high), and of them those between
m + left and m + right (full, causal, window, padding, lengths and their intersections). Other
masks come with lists of tiles (see `lists.py`) and a test: *intervals* for each row, or *bits*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .structs import decode

BAND, INTERVALS, BITS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BIT_TILE = tl.constexpr(128)


class Span(NamedTuple):
    """The tiles that a program visits: n_whole of them need no test, n_partial do.

    A band's are neighbours: `head` partial ones from `begin` on, the whole ones, and the rest.
    stop: the first row or key of the other axis that the band does not reach; start: the last
    before it. Others are listed from `list_at` on.
    """

    begin: Any
    head: Any
    n_whole: Any
    n_partial: Any
    start: Any
    stop: Any
    list_at: Any


@triton.jit
def _band_span(start, stop, whole_start, whole_stop, BLOCK: tl.constexpr):
    """Tiles of [start, stop), of which those inside [whole_start, whole_stop) are whole."""
    stop = tl.maximum(start, stop)
    begin = start // BLOCK
    end = tl.where(stop > start, tl.cdiv(stop, BLOCK), begin)
    whole_begin = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(whole_start, 0), BLOCK), begin), end)
    whole_end = tl.minimum(tl.maximum(whole_stop, 0) // BLOCK, end)
    n_whole = tl.maximum(whole_end - whole_begin, 0)
    return Span(begin, whole_begin - begin, n_whole, end - begin - n_whole, start, stop, begin * 0)


@triton.jit
def key_span(mask, seq, h, tile, list_tile, BUILD: tl.constexpr):
    """The key tiles that a query tile visits."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    if BUILD.mask == BAND:
        first = tile * BLOCK_M
        last = tl.minimum(first + BLOCK_M, seq.q_used) - 1
        start = tl.maximum(seq.low, first + seq.left)
        stop = tl.minimum(seq.high, last + seq.right + 1)
        # No row in use: nothing to visit.
        stop = tl.where(last >= first, stop, start)
        whole_start = tl.maximum(seq.low, last + seq.left)
        whole_stop = tl.minimum(seq.high, first + seq.right + 1)
        return _band_span(start, stop, whole_start, whole_stop, BUILD.block_n)
    else:
        return _listed_span(mask, h, list_tile, seq.low, seq.high)


@triton.jit
def row_span(mask, seq, h, tile, list_tile, BUILD: tl.constexpr):
    """The query tiles that a key tile visits."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    if BUILD.mask == BAND:
        first = tl.maximum(tile * BLOCK_N, seq.low)
        last = tl.minimum((tile + 1) * BLOCK_N, seq.high) - 1
        start = tl.maximum(first - seq.right, 0)
        stop = tl.minimum(last - seq.left + 1, seq.q_used)
        stop = tl.where(last >= first, stop, start)
        # Whole: every key of the tile is one that may be seen.
        is_inside = (tile * BLOCK_N >= seq.low) & ((tile + 1) * BLOCK_N <= seq.high)
        whole_start = last - seq.right
        whole_stop = tl.where(is_inside, tl.minimum(first - seq.left + 1, seq.q_used), 0)
        return _band_span(start, stop, whole_start, whole_stop, BUILD.block_m)
    else:
        return _listed_span(mask, h, list_tile, 0, seq.q_used)


@triton.jit
def _listed_span(mask, h, list_tile, start, stop):
    at = tl.cast(h, tl.int64) * decode(mask.list_stride_h) + list_tile
    n_whole = tl.load(mask.counts + at * 2)
    n_partial = tl.load(mask.counts + at * 2 + 1)
    zero = n_whole * 0
    return Span(zero, zero, n_whole, n_partial, zero + start, zero + stop, at * decode(mask.width))


@triton.jit
def in_one_loop(span, BUILD: tl.constexpr):
    """The same tiles, all as partial ones where they are few and a band's.

    Each of the two loops waits for its first loads: for a short sequence that may take longer than
    to test tiles which need no test. Where none needs one, one loop is there as it is.
    """
    if BUILD.few_tiles > 0 and BUILD.mask == BAND:
        n_tiles = span.n_whole + span.n_partial
        is_few = (span.n_partial > 0) & (n_tiles <= BUILD.few_tiles)
        n_whole = tl.where(is_few, 0, span.n_whole)
        n_partial = tl.where(is_few, n_tiles, span.n_partial)
        return Span(span.begin, span.head, n_whole, n_partial, span.start, span.stop, span.list_at)
    else:
        return span


@triton.jit
def whole_tile(mask, span, i, MASK: tl.constexpr):
    """The i-th tile that needs no test."""
    if MASK == BAND:
        return span.begin + span.head + i
    else:
        return tl.load(mask.lists + span.list_at + i)


@triton.jit
def partial_tile(mask, span, i, MASK: tl.constexpr):
    """The i-th tile that needs one."""
    if MASK == BAND:
        return span.begin + i + tl.where(i >= span.head, span.n_whole, 0)
    else:
        return tl.load(mask.lists + span.list_at + decode(mask.width) - 1 - i)


@triton.jit
def visible(mask, seq, h, m, n, m0, n0, BUILD: tl.constexpr):
    """bool: does query m see key n? Local indices that broadcast against each other.

    m0, n0: the first of each; no tile crosses a bit tile.
    """
    # One comparison an element and side: the bounds belong to the rows.
    if BUILD.mask == BAND:
        start = tl.maximum(m + seq.left, seq.low)
        stop = tl.where(m < seq.q_used, tl.minimum(m + seq.right + 1, seq.high), 0)
        seen = (n >= start) & (n < stop)
    else:
        seen = (n >= seq.low) & (n < tl.where(m < seq.q_used, seq.high, 0))
        if BUILD.mask == INTERVALS:
            seen = seen & _in_intervals(mask, seq, h, m, n, BUILD.n_intervals)
        else:
            seen = seen & _bit(mask, seq, h, m, n, m0, n0)
    return seen


@triton.jit
def _in_intervals(mask, seq, h, m, n, N_INTERVALS: tl.constexpr):
    row = tl.minimum(seq.q_first + m, decode(mask.rows) - 1).to(tl.int64) * decode(mask.extent)
    base = decode(mask.stride_b) * seq.batch.to(tl.int64)
    at = base + tl.cast(h, tl.int64) * decode(mask.stride_h) + row
    if N_INTERVALS > 0:
        seen = _in_interval(mask, seq, at, n)
        for t in tl.static_range(1, N_INTERVALS):
            seen = seen | _in_interval(mask, seq, at + t, n)
    else:
        seen = (m + n) < 0
        for t in range(0, decode(mask.extent)):
            seen = seen | _in_interval(mask, seq, at + t, n)
    return seen


@triton.jit
def _in_interval(mask, seq, at, n):
    start = tl.load(mask.first + at) - seq.k_first
    stop = tl.load(mask.second + at) - seq.k_first
    return (n >= start) & (n < stop)


@triton.jit
def bit_kind(mask, seq, h, m, n):
    """What the bit tile of (m, n) is: 0 hidden (also outside), 1 visible, 2 + t mixed."""
    cols = decode(mask.extent)
    x = m // BIT_TILE
    y = n // BIT_TILE
    base = decode(mask.stride_b) * seq.index.to(tl.int64) + tl.cast(h, tl.int64) * decode(
        mask.stride_h
    )
    inside = (x < decode(mask.rows)) & (y < cols)
    return tl.load(mask.first + base + x.to(tl.int64) * cols + y, mask=inside, other=0)


@triton.jit
def _bit(mask, seq, h, m, n, m0, n0):
    kind = bit_kind(mask, seq, h, m0, n0)
    words = mask.second + (kind - 2).to(tl.int64) * (BIT_TILE * BIT_TILE // 32)
    column = n % BIT_TILE
    at = (m % BIT_TILE) * (BIT_TILE // 32) + column // 32
    word = tl.load(words + at, mask=(at >= 0) & (kind > 1), other=0)
    return ((word >> (column % 32)) & 1 == 1) | (kind == 1)
