"""Where a program's sequence stands: the way from a program id to rows of storage.

A call whose lengths are plain ints has one row of fields, passed as arguments. Where lengths are
device tensors, `place_sequences` writes one row per sequence first, so that no attention kernel
knows what the lengths came from. Packed storage that belongs to no document is one more sequence
with nothing in use: its rows of out and of the gradients have to be written too.

Units: rows of storage and local indices, int32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .structs import Sequence, decode

UNIFORM, PADDED, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Columns of the table: q_first .. j_base of `Sequence`, then the first query and the first key
# tile of the sequence when the tiles of all are counted through.
FIELDS = tl.constexpr(16)
FIRST_Q_TILE, FIRST_K_TILE = tl.constexpr(13), tl.constexpr(14)
# Beyond every index, with room to be added to one, and to be coded, in int32.
FAR = tl.constexpr(1 << 28)
_UNBOUNDED = tl.constexpr(1 << 40)
_SEARCH = tl.constexpr(1024)


@triton.jit
def locate(place, pid, PLACE: tl.constexpr, COLUMN: tl.constexpr, REVERSED: tl.constexpr):
    """The sequence, head and tile of a program.

    COLUMN: whether tiles are of queries (FIRST_Q_TILE) or of keys. REVERSED: late tiles first,
    which see most under a causal mask. pid counts tiles fastest, so that programs that run
    together read the same keys.
    Returns: the sequence, the head, the tile in its sequence, the tile among all of the head.
    """
    n_tiles = decode(place.n_tiles)
    tile = pid % n_tiles
    if REVERSED:
        tile = n_tiles - 1 - tile
    h = pid // n_tiles
    if PLACE == PACKED:
        index = _find(place, tile, COLUMN)
        first = tl.load(place.table + index.to(tl.int64) * FIELDS + COLUMN)
        return sequence_at(place, index, PLACE), h, tile - first, tile
    else:
        H = decode(place.H)
        if COLUMN == FIRST_K_TILE:
            H = H // decode(place.group)
        index = h // H
        return sequence_at(place, index, PLACE), h % H, tile, index * n_tiles + tile


@triton.jit
def sequence_at(place, index, PLACE: tl.constexpr):
    """Sequence number `index`."""
    if PLACE == PACKED:
        return _load_fields(place.table, index, index * 0)
    elif PLACE == PADDED:
        return _load_fields(place.table, index, index)
    else:
        return _decode_fields(place.fields, index)


@triton.jit
def _find(place, tile, COLUMN: tl.constexpr):
    """The last sequence whose first tile is at or before this one."""
    n_sequences = decode(place.n_sequences)
    found = -1
    for start in range(0, n_sequences, _SEARCH):
        rows = start + tl.arange(0, _SEARCH)
        first = tl.load(
            place.table + rows.to(tl.int64) * FIELDS + COLUMN, mask=rows < n_sequences, other=FAR
        )
        found += tl.sum((first <= tile).to(tl.int32), 0)
    return found


@triton.jit
def _load_fields(table, index, batch):
    row = table + index.to(tl.int64) * FIELDS
    return Sequence(
        index,
        batch,
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        tl.load(row + 7),
        tl.load(row + 8),
        tl.load(row + 9),
        tl.load(row + 10),
        tl.load(row + 11),
        tl.load(row + 12),
    )


@triton.jit
def _decode_fields(fields, index):
    """Fields of the one row that all sequences share: storage starts at 0, all of it in use."""
    M = decode(fields[0])
    N = decode(fields[1])
    zero = index * 0
    return Sequence(
        index,
        index,
        zero,
        M,
        M,
        zero,
        N,
        N,
        decode(fields[2]),
        decode(fields[3]),
        decode(fields[4]),
        decode(fields[5]),
        decode(fields[6]),
        decode(fields[7]),
        decode(fields[8]),
    )


@triton.jit(
    do_not_specialize=[
        "n_sequences", "M", "N", "q_start", "k_start", "left", "right", "mask_offset"
    ]
)  # fmt: skip
def place_sequences(
    table, lengths, n_sequences, M, N, q_start, k_start, left, right, mask_offset,
    IS_PIECE: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of a call. One program. What lengths claim is cut to what is stored.

    left, right: a window's bounds. mask_offset: its own offset where HAS_OFFSET. ONE: bits 1, 2
    and 4 say that offsets, lows or highs have one entry.
    """
    q_tiles = 0
    k_tiles = 0
    for start in range(0, n_sequences, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = rows < n_sequences
        if lengths.cu_q is not None:
            # The last sequence is what no document owns.
            own = rows < n_sequences - 1
            at = tl.minimum(rows, n_sequences - 1)
            q_first = _clamp(tl.load(lengths.cu_q + at, mask=live, other=0), 0, M)
            k_first = _clamp(tl.load(lengths.cu_k + at, mask=live, other=0), 0, N)
            q_end = _clamp(tl.load(lengths.cu_q + at + 1, mask=own, other=M), q_first, M)
            k_end = _clamp(tl.load(lengths.cu_k + at + 1, mask=own, other=N), k_first, N)
            q_stored = q_end - q_first
            k_stored = k_end - k_first
        else:
            own = live
            q_first = tl.zeros((BLOCK,), tl.int32)
            k_first = q_first
            q_stored = q_first + M
            k_stored = q_first + N
        q_used = _used(lengths.used_q, rows, own, q_stored)
        k_used = _used(lengths.used_k, rows, own, k_stored)
        i_base = _at(lengths.q_starts, rows, own, q_start)
        j_base = _at(lengths.k_starts, rows, own, k_start)
        if IS_PIECE:
            shift = i_base - j_base
        else:
            shift = k_used - q_used
        # 64-bit up to the last clamp: offsets and bounds may be anything.
        position = shift.to(tl.int64)
        if HAS_OFFSET:
            position = (i_base - j_base).to(tl.int64) + mask_offset
        if lengths.offsets is not None:
            own_offset = _one_or_each(lengths.offsets, rows, own, ONE & 1)
            position = (i_base - j_base).to(tl.int64) + own_offset
        low = tl.zeros((BLOCK,), tl.int32)
        high = k_used
        if lengths.lows is not None:
            lows = _one_or_each(lengths.lows, rows, own, ONE & 2) - j_base
            highs = _one_or_each(lengths.highs, rows, own, ONE & 4) - j_base
            low = _clamp(lows, 0, FAR)
            high = tl.minimum(high, _clamp(highs, 0, FAR))
        low = tl.minimum(low, k_stored)
        high = tl.where(own, tl.maximum(high, low), low)
        row = table + rows.to(tl.int64) * FIELDS
        tl.store(row, q_first, mask=live)
        tl.store(row + 1, q_stored, mask=live)
        tl.store(row + 2, tl.where(own, q_used, 0), mask=live)
        tl.store(row + 3, k_first, mask=live)
        tl.store(row + 4, k_stored, mask=live)
        tl.store(row + 5, tl.where(own, k_used, 0), mask=live)
        tl.store(row + 6, low, mask=live)
        tl.store(row + 7, high, mask=live)
        tl.store(row + 8, _clamp(position - left, -FAR, FAR), mask=live)
        tl.store(row + 9, _clamp(position + right, -FAR, FAR), mask=live)
        tl.store(row + 10, shift, mask=live)
        tl.store(row + 11, i_base, mask=live)
        tl.store(row + 12, j_base, mask=live)
        q_count = tl.where(live, tl.cdiv(q_stored, BLOCK_Q), 0)
        k_count = tl.where(live, tl.cdiv(k_stored, BLOCK_K), 0)
        tl.store(row + FIRST_Q_TILE, q_tiles + tl.cumsum(q_count, 0) - q_count, mask=live)
        tl.store(row + FIRST_K_TILE, k_tiles + tl.cumsum(k_count, 0) - k_count, mask=live)
        q_tiles += tl.sum(q_count, 0)
        k_tiles += tl.sum(k_count, 0)


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x.to(tl.int64), low), high).to(tl.int32)


@triton.jit
def _used(used, rows, own, stored):
    if used is None:
        return stored
    else:
        return _clamp(tl.load(used + rows, mask=own, other=0), 0, stored)


@triton.jit
def _at(starts, rows, own, start):
    if starts is None:
        return tl.zeros_like(rows) + start
    else:
        return _clamp(tl.load(starts + rows, mask=own, other=0), -FAR, FAR)


@triton.jit
def _one_or_each(values, rows, own, IS_ONE: tl.constexpr):
    """int64, and no larger than what sums of a few can hold."""
    if IS_ONE:
        value = tl.load(values).to(tl.int64)
    else:
        value = tl.load(values + rows, mask=own, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(value, -_UNBOUNDED), _UNBOUNDED)
