"""Lists of tiles for masks that are not a band: what each tile of one axis meets on the other.

Grid: (tiles of all sequences, heads the mask knows). A program takes the tiles of the other axis
    `STRIP` at a time, sorts them into hidden, whole and partial, and appends those it keeps.
Cost: M N / (BLOCK_M BLOCK_N) entries of 4 bytes a head; no synchronisation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .masks import INTERVALS, bit_kind
from .placement import FIRST_K_TILE, FIRST_Q_TILE, locate
from .structs import decode


@triton.jit
def list_key_tiles(
    place, mask, PLACE: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """The key tiles that each query tile visits."""
    seq, h, tile, list_tile = locate(place, tl.program_id(0), PLACE, FIRST_Q_TILE, False)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    owned = m < seq.q_used
    n_whole = 0
    n_partial = 0
    start = seq.low // BLOCK_N
    stop = tl.where(tile * BLOCK_M < seq.q_used, tl.cdiv(seq.high, BLOCK_N), start)
    for first in range(start, stop, STRIP):
        tiles = first + tl.arange(0, STRIP)
        n0 = tiles * BLOCK_N
        if MASK == INTERVALS:
            covered = _covered(mask, seq, h, m[:, None], n0[None, :], BLOCK_N)
            some = tl.max(tl.where(owned[:, None], covered, 0), 0) > 0
            whole = tl.min(tl.where(owned[:, None], covered, BLOCK_N), 0) == BLOCK_N
        else:
            kind = bit_kind(mask, seq, h, tile * BLOCK_M, n0)
            some = (kind > 0) & (n0 + BLOCK_N > seq.low) & (n0 < seq.high)
            whole = (kind == 1) & (n0 >= seq.low) & (n0 + BLOCK_N <= seq.high)
        n_whole, n_partial = _append(mask, h, list_tile, tiles, some, whole, n_whole, n_partial)
    _finish(mask, h, list_tile, n_whole, n_partial)


@triton.jit
def list_query_tiles(
    place, mask, PLACE: tl.constexpr, MASK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """The query tiles that each key tile is visited by. Heads are query heads here too."""
    seq, h, tile, list_tile = locate(place, tl.program_id(0), PLACE, FIRST_K_TILE, False)
    n0 = tile * BLOCK_N
    n_whole = 0
    n_partial = 0
    stop = tl.where((n0 < seq.high) & (n0 + BLOCK_N > seq.low), tl.cdiv(seq.q_used, BLOCK_M), 0)
    for first in range(0, stop, STRIP):
        tiles = first + tl.arange(0, STRIP)
        if MASK == INTERVALS:
            m = first * BLOCK_M + tl.arange(0, STRIP * BLOCK_M)
            covered = _covered(mask, seq, h, m, n0, BLOCK_N)
            covered = tl.where(m < seq.q_used, covered, 0).reshape(STRIP, BLOCK_M)
            some = tl.max(covered, 1) > 0
            whole = tl.min(covered, 1) == BLOCK_N
        else:
            kind = bit_kind(mask, seq, h, tiles * BLOCK_M, n0)
            some = (kind > 0) & (tiles * BLOCK_M < seq.q_used)
            whole = (kind == 1) & ((tiles + 1) * BLOCK_M <= seq.q_used)
            whole = whole & (n0 >= seq.low) & (n0 + BLOCK_N <= seq.high)
        n_whole, n_partial = _append(mask, h, list_tile, tiles, some, whole, n_whole, n_partial)
    _finish(mask, h, list_tile, n_whole, n_partial)


@triton.jit
def _covered(mask, seq, h, m, n0, BLOCK_N: tl.constexpr):
    """How many keys of [n0, n0 + BLOCK_N) row m sees, of those a sequence has."""
    count = decode(mask.extent)
    row = tl.minimum(seq.q_first + m, decode(mask.rows) - 1).to(tl.int64) * count
    base = decode(mask.stride_b) * seq.batch.to(tl.int64) + tl.cast(h, tl.int64) * decode(
        mask.stride_h
    )
    covered = (m + n0) * 0
    for t in range(0, count):
        start = tl.load(mask.first + base + row + t) - seq.k_first
        stop = tl.load(mask.second + base + row + t) - seq.k_first
        start = tl.maximum(tl.maximum(start, seq.low), n0)
        stop = tl.minimum(tl.minimum(stop, seq.high), n0 + BLOCK_N)
        covered += tl.maximum(stop - start, 0)
    return covered


@triton.jit
def _append(mask, h, list_tile, tiles, some, whole, n_whole, n_partial):
    width = decode(mask.width)
    base = mask.lists + (tl.cast(h, tl.int64) * decode(mask.list_stride_h) + list_tile) * width
    is_whole = (some & whole).to(tl.int32)
    is_partial = (some & (whole == 0)).to(tl.int32)
    front = n_whole + tl.cumsum(is_whole, 0) - is_whole
    back = width - 1 - (n_partial + tl.cumsum(is_partial, 0) - is_partial)
    tl.store(base + front, tiles, mask=is_whole > 0)
    tl.store(base + back, tiles, mask=is_partial > 0)
    return n_whole + tl.sum(is_whole, 0), n_partial + tl.sum(is_partial, 0)


@triton.jit
def _finish(mask, h, list_tile, n_whole, n_partial):
    at = mask.counts + (tl.cast(h, tl.int64) * decode(mask.list_stride_h) + list_tile) * 2
    tl.store(at, n_whole)
    tl.store(at + 1, n_partial)
