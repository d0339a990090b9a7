"""Producer of the hopper forward, and what it shares with the consumers: see `hopper_forward.py`.

Dims: a tile is `block_m` query rows of one head, 64 to each consumer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    FIRST_FREE,
    as_atoms,
    barrier_sync,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
)
from ..kernels.masks import key_span
from ..kernels.placement import FAR, FIELDS, FIRST_K_TILE, FIRST_Q_TILE, PACKED
from .hopper_fresh import fresh, fresh_number, fresh_sequence

# What a wgmma of a warp group multiplies.
ROWS = gl.constexpr(64)
# Sequences that a search looks at together.
_SEARCH = gl.constexpr(128)


class Rings(NamedTuple):
    """Shared memory: tiles by slot, their barriers, and the mail."""

    q: Any
    k: Any
    v: Any
    out: Any
    q_full: Any
    k_full: Any
    v_full: Any
    landing: Any
    mail: Any


class Tickets(NamedTuple):
    """The counter that programs take tiles from: int32 `[2]`, 0 before and after. n_tiles: of all
    heads. n_heads: over all batch rows. together: how many take turns, so that their keys stay in
    L2. The numbers are coded."""

    ptr: Any
    n_tiles: Any
    n_heads: Any
    together: Any


class SpanBuild(NamedTuple):
    """What `masks.key_span` is compiled for."""

    mask: int
    block_m: int
    block_n: int


class HopperBuild(NamedTuple):
    """What the kernel is compiled for.

    dim, value_dim: as tiles hold them. width, value_width: of which S and O are made. place: see
    `placement.py`. tile, group: spans of a tile and of a consumer's rows. has_start: rows may not
    see the first keys. is_folded: a score is nothing but the scaled product. is_capped, has_slopes:
    there is a softcap, there are slopes. n_consumers, k_slots, v_slots. takes_turns: see `Turn` in
    `hopper_forward.py`. is_early: wait for O before the vote, not after. is_staged: out leaves by
    TMA. shares_q: it is staged where Q was. room: log2 of the room that a new reference leaves.
    limit: of the sums of P in a thread, as PTX writes an f32. registers: of consumers, of the
    producer.
    """

    dim: int
    value_dim: int
    width: int
    value_width: int
    place: int
    tile: SpanBuild
    group: SpanBuild
    has_start: bool
    is_folded: bool
    is_capped: bool
    has_slopes: bool
    n_consumers: int
    k_slots: int
    v_slots: int
    takes_turns: bool
    is_early: bool
    is_staged: bool
    shares_q: bool
    room: float
    limit: str
    limit_value: float
    registers: tuple[int, int]


# Of 129 to 192 columns a tile's last 64 hold nothing, and products leave them out: they are made of
# the first 128 and of the next 64.
@gluon.constexpr_function
def first_columns(width):
    return 128 if width == 192 else width


# Named barriers: K slots, V slots, turns, Q.
@gluon.constexpr_function
def v_empty_barrier(build):
    return FIRST_FREE.value + build.k_slots


@gluon.constexpr_function
def turn_barrier(build):
    return FIRST_FREE.value + build.k_slots + build.v_slots


@gluon.constexpr_function
def q_empty_barrier(build):
    turns = build.n_consumers if build.takes_turns else 0
    barrier = FIRST_FREE.value + build.k_slots + build.v_slots + turns
    assert barrier <= 15, "more named barriers than there are"
    return barrier


@gluon.constexpr_function
def count_everyone(build):
    return 128 * build.n_consumers + 32


# ---------------------------------------------------------------- producer


@gluon.jit
def load_partition(q_desc, k_desc, v_desc, rings, call, tickets, BUILD: gl.constexpr):
    N_CONSUMERS: gl.constexpr = BUILD.n_consumers
    n_all = fresh_number(tickets.n_tiles, BUILD)
    ticket = gl.program_id(0)
    iteration = 0
    n_landed = 0
    while ticket < n_all:
        index, h, tile = locate(call.place, tickets, ticket, FIRST_Q_TILE, True, 1, BUILD)
        seq = fresh_sequence(call.place, index, BUILD)
        # Of packed documents tiles are counted from above.
        if tile * BUILD.tile.block_m < seq.q_stored:
            _start_tile(
                q_desc, k_desc, rings, call, seq, index, h, tile, iteration, BUILD
            )  # fmt: skip
            iteration, n_landed, ticket = _load_blocks(
                k_desc, v_desc, rings, call, seq, h, tile, iteration, n_landed, tickets, BUILD
            )  # fmt: skip
        else:
            ticket = _next_ticket(tickets, BUILD)
    _drain(rings, iteration, BUILD)
    _send(rings.mail, -1, 0, 0)
    for i in gl.static_range(N_CONSUMERS):
        mbarrier.arrive(rings.q_full.index(i), count=1)
    if n_all > gl.num_programs(0):
        _put_back(tickets)


@gluon.jit
def _next_ticket(tickets, BUILD: gl.constexpr):
    """From the counter, or none where each tile has its program."""
    n_all = fresh_number(tickets.n_tiles, BUILD)
    ticket = n_all
    if n_all > gl.num_programs(0):
        ticket = gl.num_programs(0) + gl.atomic_add(tickets.ptr, 1)
    return ticket


@gluon.jit
def order_of(ticket, n_tiles, n_heads, together):
    """Head and tile of a ticket: heads take turns in groups of `together`, tile by tile."""
    group = ticket // (together * n_tiles)
    rest = ticket - group * together * n_tiles
    size = gl.minimum(n_heads - group * together, together)
    return group * together + rest % size, rest // size


@gluon.jit
def locate(
    place, order, ticket, COLUMN: gl.constexpr, IS_REVERSED: gl.constexpr, WARPS: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    """Of a ticket the sequence, head and tile there. order: has n_heads and `together`, coded.
    COLUMN: tiles are of queries or of keys. IS_REVERSED: late tiles first."""
    n_tiles = fresh_number(place.n_tiles, BUILD)
    n_heads, together = fresh_number(order.n_heads, BUILD), fresh_number(order.together, BUILD)
    head, tile = order_of(ticket, n_tiles, n_heads, together)
    if IS_REVERSED:
        tile = n_tiles - 1 - tile
    if BUILD.place >= PACKED:
        index = find_sequence(place, tile, COLUMN, WARPS, BUILD)
        first = gl.load(place.table + index.to(gl.int64) * FIELDS + COLUMN)
        return index, head, tile - first
    else:
        H = fresh_number(place.H, BUILD)
        if COLUMN == FIRST_K_TILE:
            H = H // fresh_number(place.group, BUILD)
        return head // H, head % H, tile


@gluon.jit
def find_sequence(
    place, tile, COLUMN: gl.constexpr, WARPS: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """The last sequence whose first tile is at or before this one, as `placement.locate` does."""
    n_sequences = fresh_number(place.n_sequences, BUILD)
    block = 0
    if n_sequences > _SEARCH:
        block -= 1
        for start in range(0, n_sequences, _SEARCH * _SEARCH):
            block += _count_begun(
                place.table, start, _SEARCH, n_sequences, tile, COLUMN, WARPS, BUILD
            )
    start = block * _SEARCH
    return start + _count_begun(place.table, start, 1, n_sequences, tile, COLUMN, WARPS, BUILD) - 1


@gluon.jit
def _count_begun(
    table, start, STEP: gl.constexpr, n_sequences, tile, COLUMN: gl.constexpr, WARPS: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    """Of _SEARCH sequences, STEP apart, those whose first tile is at or before this one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    rows = fresh(start, BUILD) + STEP * gl.arange(0, _SEARCH, layout=LAYOUT)
    first = gl.load(table + rows.to(gl.int64) * FIELDS + COLUMN, mask=rows < n_sequences, other=FAR)
    return gl.sum((first <= tile).to(gl.int32), 0)


@gluon.jit
def _span(call, seq, h, tile, BUILD: gl.constexpr):
    """The keys that a tile visits: its span, how many blocks, the first key of the last."""
    TILE: gl.constexpr = BUILD.tile
    span = key_span(call.mask, seq, h, tile, 0, TILE)
    n_blocks = gl.maximum(span.n_whole + span.n_partial, 1)
    return span, n_blocks, (span.begin + n_blocks - 1) * BUILD.tile.block_n


@gluon.jit
def _start_tile(
    q_desc, k_desc, rings, call, seq, index, h, tile, iteration, BUILD: gl.constexpr
):  # fmt: skip
    """Its first keys, which come while consumers are still at the tile before; then Q."""
    _, _, last = _span(call, seq, h, tile, BUILD)
    kv_head = h // fresh_number(call.place.group, BUILD)
    _load_k(k_desc, rings, iteration, seq.batch, kv_head, seq.k_first + last, BUILD)
    if iteration > 0:
        barrier_sync(q_empty_barrier(BUILD), count_everyone(BUILD), 1)
    _send(rings.mail, index, h, tile)
    row = seq.q_first + tile * BUILD.tile.block_m
    N_CONSUMERS: gl.constexpr = BUILD.n_consumers
    for i in gl.static_range(N_CONSUMERS):
        mbarrier.expect(rings.q_full.index(i), q_desc.block_type.nbytes)
        at = [seq.batch, h, row + i * ROWS, 0]
        tma_load(q_desc, at, rings.q_full.index(i), rings.q.index(i))


@gluon.jit
def _load_blocks(
    k_desc, v_desc, rings, call, seq, h, tile, iteration, n_landed, tickets, BUILD: gl.constexpr
):  # fmt: skip
    """The blocks of a tile, keys one ahead of values. Returns: iteration, n_landed, and the ticket
    after this tile's."""
    ticket = 0
    span, n_blocks, last = _span(call, seq, h, tile, BUILD)
    kv_head = h // fresh_number(call.place.group, BUILD)
    for j in range(0, n_blocks):
        n0 = last - j * BUILD.tile.block_n
        if j + 1 < n_blocks:
            below = seq.k_first + n0 - BUILD.tile.block_n
            _load_k(k_desc, rings, iteration + 1, seq.batch, kv_head, below, BUILD)
        n_landed = _load_v(v_desc, rings, iteration, n_landed, seq, span, kv_head, n0, BUILD)
        if j == 0:
            # When all is on its way that the first product waits for: the counter answers late.
            ticket = _next_ticket(tickets, BUILD)
        iteration += 1
    return iteration, n_landed, ticket


@gluon.jit
def _send(mail, index, h, tile):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, LAYOUT)
    mail.index(0).store(zero + index)
    mail.index(1).store(zero + h)
    mail.index(2).store(zero + tile)


@gluon.jit
def _receive(mail, field):
    """What a warp group reads in the mail."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(mail.index(field).load(LAYOUT), 0)


@gluon.jit
def _load_k(desc, rings, iteration, batch, head, row, BUILD: gl.constexpr):
    slot = iteration % BUILD.k_slots
    if iteration >= BUILD.k_slots:
        barrier_sync(FIRST_FREE + slot, count_everyone(BUILD), 1)
    full = rings.k_full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full, rings.k.index(slot))


@gluon.jit
def _load_v(desc, rings, iteration, n_landed, seq, span, head, n0, BUILD: gl.constexpr):
    """Copy the block of keys from n0 on; returns how many came by `landing` so far."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    slot = iteration % BUILD.v_slots
    if iteration >= BUILD.v_slots:
        barrier_sync(v_empty_barrier(BUILD) + slot, count_everyone(BUILD), 1)
    at = [seq.batch, head, seq.k_first + n0, 0]
    full = rings.v_full.index(slot)
    tile = rings.v.index(slot)
    is_cut = n0 + BLOCK_N > span.stop
    if BUILD.place < PACKED:
        # TMA itself fills up with zeros where storage ends.
        is_cut = is_cut & (span.stop < seq.k_stored)
    is_cut = is_cut | (n0 < span.start)
    if is_cut:
        landing = rings.landing.index(0)
        mbarrier.expect(landing, desc.block_type.nbytes)
        tma_load(desc, at, landing, tile)
        mbarrier.wait(landing, n_landed & 1)
        n_landed += 1
        start, stop = span.start - n0, span.stop - n0
        clear_rows(rings.v, slot, start, stop, BLOCK_N, BUILD.value_dim)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, at, full, tile)
    return n_landed


@gluon.jit
def clear_rows(ring, slot, start, stop, ROWS_OF_TILE: gl.constexpr, DIM: gl.constexpr):
    """Zeros in the rows of a slot outside [start, stop).

    A tile lies in memory as panels of up to 64 columns, each as atoms of 8 rows.
    """
    WIDTH: gl.constexpr = min(DIM, 64)
    STRIPS: gl.constexpr = ROWS_OF_TILE // 8
    PANELS: gl.constexpr = DIM // WIDTH
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [32 // (WIDTH // 8), WIDTH // 8], [1, 1], [1, 0]
    )
    atoms = as_atoms(ring, ring.shape[0] * PANELS * STRIPS, WIDTH)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for i in range(0, PANELS * STRIPS):
        row = i % STRIPS * 8
        if (row < start) | (row + 8 > stop):
            seen = (rows + row >= start) & (rows + row < stop)
            atom = atoms.index(slot * (PANELS * STRIPS) + i)
            x = atom.load(LAYOUT)
            atom.store(gl.where(seen[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def _drain(rings, iteration, BUILD: gl.constexpr):
    """Meet the arrivals that no later copy waits for."""
    EVERYONE: gl.constexpr = count_everyone(BUILD)
    if iteration > 0:
        barrier_sync(q_empty_barrier(BUILD), EVERYONE, 1)
    for i in range(gl.maximum(iteration - BUILD.k_slots, 0), iteration):
        barrier_sync(FIRST_FREE + i % BUILD.k_slots, EVERYONE, 1)
    for i in range(gl.maximum(iteration - BUILD.v_slots, 0), iteration):
        barrier_sync(v_empty_barrier(BUILD) + i % BUILD.v_slots, EVERYONE, 1)


@gluon.jit
def _put_back(tickets):
    """The last program to finish leaves the counter as it was."""
    n_done = gl.atomic_add(tickets.ptr + 1, 1)
    if n_done == gl.num_programs(0) - 1:
        gl.store(tickets.ptr, 0)
        gl.store(tickets.ptr + 1, 0)
