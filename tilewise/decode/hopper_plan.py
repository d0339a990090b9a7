"""Who works on what in Hopper's kernels over a cache: `triton_plan.py`, as roles walk through it.

Dims: a unit is 64 rows of one sequence: queries times the heads of a group. A tile is BLOCK_N keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import gl, gluon
from ..kernels.structs import decode
from .triton_plan import n_sequences, sequence_of, share_of, units_before, work_of

# What a wgmma of a warp group multiplies.
ROWS = gl.constexpr(64)


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
    t1 = gl.where(stop > start, t1, t0)
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


@gluon.jit
def row_of_tile(place, b, t, BUILD: gl.constexpr):
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
