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

UNIFORM, PADDED = tl.constexpr(0), tl.constexpr(1)
# Sequences of any length, counted through: packed documents, or documents inside batch rows.
PACKED, DOCUMENTS = tl.constexpr(2), tl.constexpr(3)

# Columns of the table: q_first .. j_base of `Sequence`, then the first query and the first key
# tile of the sequence when the tiles of all are counted through, then the batch row (DOCUMENTS).
FIELDS = tl.constexpr(16)
FIRST_Q_TILE, FIRST_K_TILE, BATCH = tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)
# Beyond every index, with room to be added to one, and to be coded, in int32.
FAR = tl.constexpr(1 << 28)
_SEARCH = tl.constexpr(128)
_BEYOND = tl.constexpr(1 << 60)


@triton.jit
def locate(place, pid, PLACE: tl.constexpr, COLUMN: tl.constexpr, REVERSED: tl.constexpr):
    """The sequence, head and tile of a program.

    COLUMN: whether tiles are of queries (FIRST_Q_TILE) or of keys. REVERSED: late tiles first,
    which see most under a causal mask.
    Returns: the sequence, the head, the tile in its sequence, the tile among all of the head.

    Heads take turns in groups, tile by tile: programs that start late then own the tiles of all of
    a group's heads that see least, and the last ones end together. Head by head, the last head's
    largest tiles would start when little else is left to run beside them. Programs that run
    together read keys of no more heads than a group has, so these stay in the L2 cache.
    """
    n_tiles = decode(place.n_tiles)
    H = decode(place.H)
    if COLUMN == FIRST_K_TILE:
        H = H // decode(place.group)
    n_heads = H
    if PLACE < PACKED:
        n_heads = H * decode(place.n_sequences)
    together = decode(place.together)
    first_head = pid // (together * n_tiles) * together
    size = tl.minimum(n_heads - first_head, together)
    turn = pid - first_head * n_tiles
    h = first_head + turn % size
    tile = turn // size
    if REVERSED:
        tile = n_tiles - 1 - tile
    if PLACE >= PACKED:
        index = _find(place, tile, COLUMN)
        first = tl.load(place.table + index.to(tl.int64) * FIELDS + COLUMN)
        return sequence_at(place, index, PLACE), h, tile - first, tile
    else:
        index = h // H
        return sequence_at(place, index, PLACE), h % H, tile, index * n_tiles + tile


@triton.jit
def sequence_at(place, index, PLACE: tl.constexpr):
    """Sequence number `index`."""
    if PLACE == PACKED:
        return _load_fields(place.table, index, index, index * 0)
    elif PLACE == DOCUMENTS:
        batch = tl.load(place.table + index.to(tl.int64) * FIELDS + BATCH)
        return _load_fields(place.table, index, batch, batch)
    elif PLACE == PADDED:
        return _load_fields(place.table, index, index, index)
    else:
        return _decode_fields(place.fields, index)


@triton.jit
def _find(place, tile, COLUMN: tl.constexpr):
    """The last sequence whose first tile is at or before this one."""
    n_sequences = decode(place.n_sequences)
    block = 0
    # First tiles ascend: of many sequences every _SEARCH-th tells which of them to look at.
    if n_sequences > _SEARCH:
        block -= 1
        for start in range(0, n_sequences, _SEARCH * _SEARCH):
            block += _count_begun(place.table, start, _SEARCH, n_sequences, tile, COLUMN)
    start = block * _SEARCH
    return start + _count_begun(place.table, start, 1, n_sequences, tile, COLUMN) - 1


@triton.jit
def _count_begun(table, start, STEP: tl.constexpr, n_sequences, tile, COLUMN: tl.constexpr):
    """Of _SEARCH sequences, STEP apart, those whose first tile is at or before this one."""
    rows = start + STEP * tl.arange(0, _SEARCH)
    first = tl.load(table + rows.to(tl.int64) * FIELDS + COLUMN, mask=rows < n_sequences, other=FAR)
    return tl.sum((first <= tile).to(tl.int32), 0)


@triton.jit
def _load_fields(table, number, index, batch):
    row = table + number.to(tl.int64) * FIELDS
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
        "n_sequences", "M", "N", "q_start", "k_start", "left", "right"
    ]
)  # fmt: skip
def place_sequences(
    table, lengths, n_sequences, M, N, q_start, k_start, left, right,
    IS_PIECE: tl.constexpr, HAS_OFFSET: tl.constexpr, ONE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the table of a call. One program. What lengths claim is cut to what is stored.

    left, right: a window's edges for a query at position 0, with HAS_OFFSET at its own offset. ONE:
    bits 1, 2 and 4 say that offsets, lows or highs have one entry.
    """
    q_tiles = 0
    k_tiles = 0
    for start in range(0, n_sequences, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = rows < n_sequences
        if lengths.cu_q is not None:
            # The last sequence is what no document owns. The first starts where storage does, also
            # where cu_seqlens lie: each row has an owner.
            own = rows < n_sequences - 1
            at = tl.minimum(rows, n_sequences - 1)
            known = live & (rows > 0)
            q_first = _clamp(tl.load(lengths.cu_q + at, mask=known, other=0), 0, M)
            k_first = _clamp(tl.load(lengths.cu_k + at, mask=known, other=0), 0, N)
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
        # Starts may lie beyond int32; how far apart they are decides who sees whom.
        apart = i_base - j_base
        if IS_PIECE:
            shift = _clamp(apart, -FAR, FAR)
        else:
            shift = k_used - q_used
        position = shift.to(tl.int64)
        if HAS_OFFSET:
            position = apart
        if lengths.offsets is not None:
            position = apart + _one_or_each(lengths.offsets, rows, own, ONE & 1)
        low = tl.zeros((BLOCK,), tl.int32)
        high = k_used
        if lengths.lows is not None:
            lows = _one_or_each(lengths.lows, rows, own, ONE & 2) - j_base
            highs = _one_or_each(lengths.highs, rows, own, ONE & 4) - j_base
            low = _clamp(lows, 0, FAR)
            high = tl.minimum(high, _clamp(highs, 0, FAR))
        low = tl.minimum(low, k_stored)
        high = tl.where(own, tl.maximum(high, low), low)
        stored = (q_first, q_stored, k_first, k_stored)
        used = (tl.where(own, q_used, 0), tl.where(own, k_used, 0), low, high)
        # Beyond all storage, and less than what an unbounded side is away.
        position = _clamp(position, -2 * FAR, 2 * FAR)
        bounds = (position + left, position + right)
        bases = (shift, i_base.to(tl.int32), j_base.to(tl.int32))
        tiles = (q_tiles, k_tiles)
        q_tiles, k_tiles = _write_rows(
            table, rows, live, stored, used, bounds, bases, rows * 0, tiles, BLOCK_Q, BLOCK_K
        )


@triton.jit(
    do_not_specialize=[
        "n_sequences", "n_documents", "stride", "M", "N", "q_start", "k_start", "shift", "left",
        "right",
    ]
)  # fmt: skip
def place_documents(
    table, cu_seqlens, n_sequences, n_documents, stride, M, N, q_start, k_start, shift, left, right,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The table of a padded call whose documents lie inside its batch rows. One program.

    cu_seqlens: `[docs + 1]`, or a batch row's from `stride` on. Each batch row has two sequences
    more: what lies before its first document and after its last sees nothing.
    shift: query m of storage stands at stored key m + shift. left, right: query m sees at most the
    stored keys from m + left to m + right.
    """
    q_tiles = 0
    k_tiles = 0
    each = n_documents + 2
    for start in range(0, n_sequences, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = rows < n_sequences
        batch = rows // each
        number = rows % each
        edges = cu_seqlens + batch.to(tl.int64) * stride
        has_edge, is_last = number > 0, number == each - 1
        first = tl.load(edges + number - 1, mask=live & has_edge, other=0).to(tl.int64) - k_start
        last = tl.load(edges + number, mask=live & (is_last == 0), other=0).to(tl.int64) - k_start
        k_first = tl.where(has_edge, _clamp(first, 0, N), 0)
        k_end = tl.where(is_last, N, _clamp(last, 0, N))
        q_first = tl.where(has_edge, _clamp(first - shift, 0, M), 0)
        q_end = tl.where(is_last, M, _clamp(last - shift, 0, M))
        q_stored, k_stored = tl.maximum(q_end - q_first, 0), tl.maximum(k_end - k_first, 0)
        high = tl.where(has_edge & (is_last == 0), k_stored, 0)
        apart = q_first - k_first
        bases = (_clamp(apart + shift, -FAR, FAR), q_first + q_start, k_first + k_start)
        stored = (q_first, q_stored, k_first, k_stored)
        used = (q_stored, k_stored, rows * 0, high)
        tiles = (q_tiles, k_tiles)
        q_tiles, k_tiles = _write_rows(
            table, rows, live, stored, used, (apart + left, apart + right), bases, batch, tiles,
            BLOCK_Q, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _write_rows(
    table, rows, live, stored, used, bounds, bases, batch, tiles,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of the table; returns how many tiles of queries and keys there are so far.

    stored: q_first, q_stored, k_first, k_stored. used: q_used, k_used, low, high. bounds: left and
    right. bases: shift, i_base, j_base.
    """
    row = table + rows.to(tl.int64) * FIELDS
    tl.store(row, stored[0], mask=live)
    tl.store(row + 1, stored[1], mask=live)
    tl.store(row + 2, used[0], mask=live)
    tl.store(row + 3, stored[2], mask=live)
    tl.store(row + 4, stored[3], mask=live)
    tl.store(row + 5, used[1], mask=live)
    tl.store(row + 6, used[2], mask=live)
    tl.store(row + 7, used[3], mask=live)
    tl.store(row + 8, _clamp(bounds[0], -FAR, FAR), mask=live)
    tl.store(row + 9, _clamp(bounds[1], -FAR, FAR), mask=live)
    tl.store(row + 10, bases[0], mask=live)
    tl.store(row + 11, bases[1], mask=live)
    tl.store(row + 12, bases[2], mask=live)
    q_count = tl.where(live, tl.cdiv(stored[1], BLOCK_Q), 0)
    k_count = tl.where(live, tl.cdiv(stored[3], BLOCK_K), 0)
    tl.store(row + FIRST_Q_TILE, tiles[0] + tl.cumsum(q_count, 0) - q_count, mask=live)
    tl.store(row + FIRST_K_TILE, tiles[1] + tl.cumsum(k_count, 0) - k_count, mask=live)
    tl.store(row + BATCH, batch, mask=live)
    return tiles[0] + tl.sum(q_count, 0), tiles[1] + tl.sum(k_count, 0)


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
        return tl.zeros_like(rows).to(tl.int64) + start
    else:
        return _bound(tl.load(starts + rows, mask=own, other=0).to(tl.int64))


@triton.jit
def _one_or_each(values, rows, own, IS_ONE: tl.constexpr):
    # Far from what int64 holds, so that a sum of a few is right.
    if IS_ONE:
        return _bound(tl.load(values).to(tl.int64))
    else:
        return _bound(tl.load(values + rows, mask=own, other=0).to(tl.int64))


@triton.jit
def _bound(x):
    return tl.minimum(tl.maximum(x, -_BEYOND), _BEYOND)
