"""Which keys a program reads: the work of a batch, cut into equal shares on the device.

A *unit* is one tile of rows of one sequence: its queries times the query heads of one kv head. Its
keys are counted in *quanta* of a few tiles. All quanta of a batch stand one behind the other, by
sequence, unit, key; *teams* of programs, one program for each kv head, take equal shares of them.
A share may end in the middle of a unit, whose parts are then merged (`triton_combine.py`). Every
program finds its share by summing over the lengths itself, so that nothing is read on the host and
no launch depends on a length: a CUDA graph is right for any.

Where parts are fixed, a quantum is a part, and the result of a sequence depends on nothing else in
the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernels.placement import FAR
from ..kernels.structs import Sequence, decode


class CachePlace(NamedTuple):
    """What a kernel is told of sequences and of storage. Absent tensors are None, ints are coded.

    lengths: `[B]`. cu_q: `[B + 1]`. table: `[B, width]`. rows: `[B]`, of a contiguous cache.
    offsets, lows, highs: of a window and of key bounds, `[B]` or one entry. starts: `[B]`, the
    end of left padding. tree: `[B or 1, n]`.
    M: queries of a sequence, or all packed ones. storage: rows or pages that there
    are. width: the table's row stride, and width_in_use its columns.
    left, right: of the window. own: its offset, where it has one. quantum: in key tiles.
    most: sequences of more queries are another kernel's; None where there is none.
    """

    lengths: Any
    cu_q: Any
    table: Any
    rows: Any
    offsets: Any
    lows: Any
    highs: Any
    starts: Any
    tree: Any
    B: Any
    G: Any
    M: Any
    capacity: Any
    storage: Any
    width: Any
    width_in_use: Any
    left: Any
    right: Any
    own: Any
    quantum: Any
    tree_stride: Any
    tree_bits: Any
    most: Any


class CacheBuild(NamedTuple):
    """What a kernel is compiled for. Everything in it is a constant to the kernel.

    dims, value_dims: head dims as `kernels/tiles.py` has them. is_shared: values are the first
    columns of the keys. group: query heads of a kv head. page: slots of a page, 0 where the cache
    is contiguous. is_flat: pages are smaller than a tile and lie one behind the other, so that a
    slot of all of them is a row. has_own: the window has an int offset of its own. singles: bit i
    where offsets, lows or highs has one entry for all. is_folded, is_capped, bias_rows,
    precision: as in `Build`. scales: of float8, NONE, HEAD or TOKEN; of_batch: `[B, G]`. pairs: of
    float8 columns as int16, NONE where they are read one by one, else E4M3 or E5M2.
    is_fixed: see the module. block_b: sequences that are summed over at a time; is_short: there
    are no more than that.
    """

    dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    is_shared: bool
    group: int
    page: int
    is_flat: bool
    has_own: bool
    singles: int
    is_folded: bool
    is_capped: bool
    bias_rows: int
    precision: str
    scales: int
    of_batch: bool
    pairs: int
    is_fixed: bool
    block_m: int
    block_n: int
    block_b: int
    is_short: bool


class Work(NamedTuple):
    """A sequence's units, of one kv head: how many, the quanta of each, its first key tile."""

    n_units: Any
    quanta: Any
    begin: Any


@triton.jit
def _clamp(x, low, high):
    return tl.minimum(tl.maximum(x.to(tl.int64), low), high).to(tl.int32)


@triton.jit
def _bound_at(values, b, exists, IS_ONE: tl.constexpr):
    if IS_ONE:
        return tl.load(values) + b * 0
    else:
        return tl.load(values + b, mask=exists, other=0)


@triton.jit
def sequence_of(place, b, exists, BUILD: tl.constexpr):
    """Sequence b, or a vector of them. Rows that no sequence of a packed call owns are one more."""
    B = decode(place.B)
    is_real = exists & (b < B)
    if place.cu_q is None:
        q_first = b * 0
        q_stored = q_first + decode(place.M)
    else:
        T = decode(place.M)
        q_first = _clamp(tl.load(place.cu_q + b, mask=exists, other=0), 0, T)
        end = _clamp(tl.load(place.cu_q + b + 1, mask=is_real, other=0), 0, T)
        q_stored = tl.maximum(tl.where(is_real, end, T) - q_first, 0)
        if place.most is not None:
            q_stored = tl.where(is_real & (q_stored > decode(place.most)), 0, q_stored)
    q_used = tl.where(is_real, q_stored, 0)
    lengths = tl.load(place.lengths + b, mask=is_real, other=0)
    k_used = _clamp(lengths, 0, decode(place.capacity))
    shift = k_used - q_used
    position = shift
    if BUILD.has_own:
        position = b * 0 + decode(place.own)
    if place.offsets is not None:
        offset = _bound_at(place.offsets, b, is_real, BUILD.singles & 1 != 0)
        position = _clamp(offset, -FAR, FAR)
    low, high = b * 0, k_used
    if place.lows is not None:
        low = _clamp(_bound_at(place.lows, b, is_real, BUILD.singles & 2 != 0), 0, FAR)
        highs = _bound_at(place.highs, b, is_real, BUILD.singles & 4 != 0)
        high = tl.minimum(high, _clamp(highs, 0, FAR))
    if place.starts is not None:
        low = tl.maximum(low, _clamp(tl.load(place.starts + b, mask=is_real, other=0), 0, FAR))
    left = tl.maximum(position - decode(place.left), -FAR)
    right = tl.minimum(position + decode(place.right), FAR)
    zero = b * 0
    return Sequence(
        b, b, q_first, q_stored, q_used, zero, k_used, k_used, low, high, left, right, shift, zero,
        zero,
    )  # fmt: skip


@triton.jit
def work_of(place, seq, BUILD: tl.constexpr):
    """The work of a sequence, or of a vector of them. A unit without keys has a quantum too, since
    its rows have to be written."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    n_units = tl.cdiv(seq.q_stored * BUILD.group, BUILD.block_m)
    start = tl.maximum(seq.low, seq.left)
    stop = tl.minimum(seq.high, seq.q_used + seq.right)
    begin = start // BLOCK_N
    tiles = tl.where(stop > start, tl.cdiv(stop, BLOCK_N) - begin, 0)
    quanta = tl.maximum(tl.cdiv(tiles, decode(place.quantum)), 1)
    return Work(n_units, quanta, begin)


@triton.jit
def n_sequences(place):
    """With the one that owns what nobody else does."""
    if place.cu_q is None:
        return decode(place.B)
    else:
        return decode(place.B) + 1


@triton.jit
def _quanta_at(place, b, count, BUILD: tl.constexpr):
    """Quanta and units of each of the sequences b, and which of them there are."""
    exists = b < count
    work = work_of(place, sequence_of(place, b, exists, BUILD), BUILD)
    n_units = tl.where(exists, work.n_units, 0)
    return (n_units * work.quanta).to(tl.int64), n_units, exists


@triton.jit
def share_of(place, team, n_teams, lanes, BUILD: tl.constexpr):
    """A team's share of the batch's quanta: its first, its end, the sequence that the first belongs
    to, that sequence's first, all quanta, and how many teams share them. int64, but for the
    sequence and the teams. lanes: 0 to block_b, in the layout that a kernel sums in."""
    count = n_sequences(place)
    if BUILD.is_short:
        # All sequences at once: their lengths are read once.
        quanta, n_units, exists = _quanta_at(place, lanes, count, BUILD)
        total = tl.sum(quanta, 0)
        n_teams = teams_of(n_teams, tl.sum(n_units, 0))
        flat = share_start(team, total, n_teams)
        ends = tl.cumsum(quanta, 0)
        is_before = exists & (ends <= flat)
        found = tl.sum(is_before.to(tl.int32), 0)
        first = tl.max(tl.where(is_before, ends, 0), 0)
    else:
        zero = (team * 0).to(tl.int64)
        total = zero
        units = 0
        for start in range(0, count, BUILD.block_b):
            quanta, n_units, exists = _quanta_at(place, start + lanes, count, BUILD)
            total += tl.sum(quanta, 0)
            units += tl.sum(n_units, 0)
        n_teams = teams_of(n_teams, units)
        flat = share_start(team, total, n_teams)
        before = zero
        first = zero
        found = 0
        for start in range(0, count, BUILD.block_b):
            quanta, _, exists = _quanta_at(place, start + lanes, count, BUILD)
            ends = before + tl.cumsum(quanta, 0)
            is_before = exists & (ends <= flat)
            found += tl.sum(is_before.to(tl.int32), 0)
            first = tl.maximum(first, tl.max(tl.where(is_before, ends, 0), 0))
            before += tl.sum(quanta, 0)
    return flat, share_start(team + 1, total, n_teams), found, first, total, n_teams


@triton.jit
def units_before(place, q_first, b, BUILD: tl.constexpr):
    """Where the units of sequence b begin when parts are fixed: no two sequences' meet, and none of
    it depends on a length."""
    if place.cu_q is None:
        return b * tl.cdiv(decode(place.M) * BUILD.group, BUILD.block_m)
    else:
        return q_first * BUILD.group // BUILD.block_m + b


@triton.jit
def find_unit(place, unit, BUILD: tl.constexpr):
    """The sequence of such a unit and its number there; a number that the sequence does not have
    where there is no such unit."""
    if place.cu_q is None:
        per_sequence = tl.maximum(units_before(place, 0, 1, BUILD), 1)
        return unit // per_sequence, unit % per_sequence
    else:
        B, T = decode(place.B), decode(place.M)
        found = -1
        first = 0
        for start in range(0, B + 1, BUILD.block_b):
            b = start + tl.arange(0, BUILD.block_b)
            q_first = _clamp(tl.load(place.cu_q + b, mask=b <= B, other=0), 0, T)
            begin = units_before(place, q_first, b, BUILD)
            is_before = (b <= B) & (begin <= unit)
            found += tl.sum(is_before.to(tl.int32), 0)
            first = tl.maximum(first, tl.max(tl.where(is_before, begin, 0), 0))
        # Before the first one's there are units only where queries do not begin at 0.
        return tl.maximum(found, 0), tl.where(found < 0, FAR, unit - first)


@triton.jit
def teams_of(n_teams, n_units):
    """How many teams share the work: so many for each unit where that leaves few without any, since
    equal units then begin and end with shares."""
    whole = n_teams - n_teams % tl.maximum(n_units, 1)
    return tl.where(16 * whole >= 15 * n_teams, whole, n_teams)


@triton.jit
def share_start(team, total, n_teams):
    """The first quantum of a team's share; `total` of a team that has none."""
    return tl.minimum(team, n_teams).to(tl.int64) * total // n_teams


@triton.jit
def team_of(flat, total, n_teams):
    """The team whose share has quantum `flat`."""
    return (((flat + 1) * n_teams - 1) // total).to(tl.int32)
