"""Producer of latent attention on Hopper, and what it shares with the others: see `hopper_mla.py`.

Dims: a unit is 64 rows of one sequence, a tile BLOCK_N of its keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import FIRST_FREE, barrier_sync, gl, gluon, mbarrier, tma_load
from ..kernels.structs import decode
from .triton_plan import n_sequences, sequence_of, share_of, units_before, work_of

ROWS = gl.constexpr(64)
# Columns: of half a value, and of what only keys have.
HALF = gl.constexpr(256)
REST = gl.constexpr(64)
# Columns of Q that registers hold, or do not.
PIECE = gl.constexpr(128)
# Tiles of what only keys have, and of P, in shared memory.
PAIRS = gl.constexpr(2)
# Named barriers: halves of values, what only keys have, P. All threads that meet there.
REST_EMPTY = gl.constexpr(FIRST_FREE.value)
P_EMPTY = gl.constexpr(FIRST_FREE.value + 2)
HALF_EMPTY = gl.constexpr(FIRST_FREE.value + 4)
TO_PRODUCER = gl.constexpr(128 + 32)
FROM_BOTH = gl.constexpr(3 * 128)


class MlaBuild(NamedTuple):
    """halves: of values in shared memory, 6 at most. kept: pieces of Q in registers. has_start:
    rows may not see the first keys. registers: of the groups of O, of the producer; what they leave
    belongs to the group of P."""

    halves: int
    kept: int
    has_start: bool
    registers: tuple[int, int]


class Rings(NamedTuple):
    """Shared memory by slot. q: what registers do not hold. latent: halves of values. rest: what
    only keys have. weights: P. raised: whether a reference was raised. shrink: what O is multiplied
    by then. last: at the unit's end."""

    q: Any
    latent: Any
    rest: Any
    weights: Any
    raised: Any
    shrink: Any
    last: Any
    half_full: Any
    rest_full: Any
    p_full: Any


class Share(NamedTuple):
    """What is left to a program: the next quantum among all of the batch, its sequence, unit and
    number there, and how many there are. team, group: who the program is."""

    flat: Any
    b: Any
    tile: Any
    chunk: Any
    left: Any
    team: Any
    group: Any


class Segment(NamedTuple):
    """Part of a unit. count: of its quanta, 0 where there is nothing. is_whole: all of them.
    t0, t1: key tiles. start, stop: what some row sees; whole_start, whole_stop: what all do."""

    count: Any
    is_whole: Any
    t0: Any
    t1: Any
    start: Any
    stop: Any
    whole_start: Any
    whole_stop: Any


# ---------------------------------------------------------------- who works on what


@gluon.jit
def find_share(place, parts, BUILD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    groups = decode(place.G)
    team = gl.program_id(0) // groups
    group = gl.program_id(0) % groups
    lanes = gl.arange(0, BUILD.block_b, layout=LAYOUT)
    flat, end, b, first, total, n_teams = share_of(
        place, team, gl.num_programs(0) // groups, lanes, BUILD
    )
    if not BUILD.is_fixed:
        if group == 0:
            note = parts.notes + team * 8
            gl.store(note, flat)
            gl.store(note + 1, end)
            gl.store(note + 2, total)
            gl.store(note + 3, n_teams.to(gl.int64))
            gl.store(note + 4, flat * 0)
    work = work_of(place, sequence_of(place, b, b < n_sequences(place), BUILD), BUILD)
    inside = (flat - first).to(gl.int32)
    left = gl.minimum(end - flat, 1 << 30).to(gl.int32)
    return Share(flat, b, inside // work.quanta, inside % work.quanta, left, team, group)


@gluon.jit
def sequence(place, share, BUILD: gl.constexpr):
    return sequence_of(place, share.b, share.b < n_sequences(place), BUILD)


@gluon.jit
def segment_of(place, share, seq, BUILD: gl.constexpr):
    BLOCK_N: gl.constexpr = BUILD.block_n
    work = work_of(place, seq, BUILD)
    count = gl.minimum(work.quanta - share.chunk, share.left)
    if BUILD.is_fixed:
        count = gl.minimum(count, 1)
    count = gl.where(share.tile < work.n_units, count, 0)
    m_first = share.tile * ROWS // BUILD.group
    m_last = gl.minimum(((share.tile + 1) * ROWS - 1) // BUILD.group, seq.q_used - 1)
    start = gl.maximum(seq.low, m_first + seq.left)
    stop = gl.minimum(seq.high, m_last + seq.right + 1)
    stop = gl.where(m_last >= m_first, stop, start)
    quantum = decode(place.quantum)
    t0 = work.begin + share.chunk * quantum
    t1 = gl.minimum(t0 + count * quantum, gl.cdiv(stop, BLOCK_N))
    t0 = gl.maximum(t0, start // BLOCK_N)
    return Segment(
        count, count == work.quanta, t0, gl.maximum(t0, t1), start, stop,
        gl.maximum(seq.low, m_last + seq.left),
        gl.minimum(seq.high, m_first + seq.right + 1),
    )  # fmt: skip


@gluon.jit
def advance(place, share, seq, segment, BUILD: gl.constexpr):
    """The share after a segment of it."""
    work = work_of(place, seq, BUILD)
    count = segment.count
    ends_unit = share.chunk + count >= work.quanta
    goes_on = (ends_unit & (share.tile + 1 >= work.n_units)) | (count == 0)
    tile = gl.where(goes_on, 0, share.tile + gl.where(ends_unit, 1, 0))
    chunk = gl.where(goes_on | ends_unit, 0, share.chunk + count)
    return Share(
        share.flat + count, share.b + gl.where(goes_on, 1, 0), tile, chunk, share.left - count,
        share.team, share.group,
    )  # fmt: skip


@gluon.jit
def leave_note(place, parts, share, seq, segment, BUILD: gl.constexpr):
    """Of a unit that is begun here and left to others to finish."""
    quanta = work_of(place, seq, BUILD).quanta
    if (share.chunk == 0) & (segment.count < quanta) & (share.group == 0):
        note = parts.notes + share.team * 8
        gl.store(note + 4, share.flat + quanta)
        gl.store(note + 5, share.b.to(gl.int64))
        gl.store(note + 6, share.tile.to(gl.int64))


@gluon.jit
def first_of_part(place, parts, share, seq, BUILD: gl.constexpr):
    """The first row of the part that a segment is."""
    if BUILD.is_fixed:
        # Where offsets of queries are not what they should be there are units beyond.
        unit = units_before(place, seq.q_first, share.b, BUILD) + share.tile
        unit = gl.minimum(unit, decode(parts.n_units) - 1)
        slot = unit.to(gl.int64) * decode(parts.per_unit) + share.chunk
    else:
        slot = share.team.to(gl.int64) * 2 + gl.where(share.chunk == 0, 1, 0)
    return (slot * decode(place.G) + share.group) * ROWS


@gluon.jit
def unit_rows(share, LAYOUT: gl.constexpr, BUILD: gl.constexpr):
    """The query and the head of each row."""
    x = share.tile * ROWS + gl.arange(0, ROWS, layout=LAYOUT)
    return x // BUILD.group, share.group * BUILD.group + x % BUILD.group


@gluon.jit
def row_offsets(x, seq, m, h, IS_PACKED: gl.constexpr):
    """Where rows begin in q or out."""
    offsets = (seq.q_first + m).to(gl.int64) * x.stride_m + h.to(gl.int64) * x.stride_h
    if not IS_PACKED:
        offsets += seq.batch.to(gl.int64) * x.stride_b
    return offsets


# ---------------------------------------------------------------- producer


@gluon.jit
def load_partition(
    k_desc, rest_desc, rings, place, share, BUILD: gl.constexpr, MLA: gl.constexpr
):  # fmt: skip
    HALVES: gl.constexpr = MLA.halves
    BLOCK_N: gl.constexpr = BUILD.block_n
    it = 0
    while share.left > 0:
        seq = sequence(place, share, BUILD)
        segment = segment_of(place, share, seq, BUILD)
        # Looked up one tile ahead, so that no copy waits for its table.
        row = _row_of_tile(place, seq.index, segment.t0, BUILD)
        for t in range(segment.t0, segment.t1):
            next_row = _row_of_tile(place, seq.index, t + 1, BUILD)
            n = t * BLOCK_N
            if BUILD.page > 0:
                n = n % BUILD.page
            pair = it % PAIRS
            if it >= PAIRS:
                barrier_sync(REST_EMPTY + pair, TO_PRODUCER, 1)
            full = rings.rest_full.index(pair)
            mbarrier.expect(full, rest_desc.block_type.nbytes)
            tma_load(rest_desc, [row, n, 2 * HALF], full, rings.rest.index(pair))
            for side in gl.static_range(2):
                half = 2 * it + side
                slot = half % HALVES
                if half >= HALVES:
                    barrier_sync(HALF_EMPTY + slot, TO_PRODUCER, 1)
                full = rings.half_full.index(slot)
                mbarrier.expect(full, k_desc.block_type.nbytes)
                tma_load(k_desc, [row, n, side * HALF], full, rings.latent.index(slot))
            row = next_row
            it += 1
        share = advance(place, share, seq, segment, BUILD)
    # Meet the arrivals that no later copy waits for.
    for i in range(gl.maximum(it - PAIRS, 0), it):
        barrier_sync(REST_EMPTY + i % PAIRS, TO_PRODUCER, 1)
    for i in range(gl.maximum(2 * it - HALVES, 0), 2 * it):
        barrier_sync(HALF_EMPTY + i % HALVES, TO_PRODUCER, 1)


@gluon.jit
def _row_of_tile(place, b, t, BUILD: gl.constexpr):
    """The row or page of a tile's keys, inside what there is, whatever the tables hold."""
    is_real = b < decode(place.B)
    row = b
    if BUILD.page > 0:
        # A tile of a sequence is never behind its last page, but the next one may be.
        column = gl.minimum(t * BUILD.block_n // BUILD.page, decode(place.width_in_use) - 1)
        at = place.table + b.to(gl.int64) * decode(place.width) + column
        row = gl.load(at, mask=is_real & (column >= 0), other=0)
    elif place.rows is not None:
        row = gl.load(place.rows + b, mask=is_real, other=0)
    return gl.minimum(gl.maximum(row, 0), decode(place.storage) - 1).to(gl.int32)
