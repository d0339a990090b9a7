"""Producer of the hopper prefill over a cache: tiles of keys and values that lie in pages.

Dims: k `[pages, P, G, D]` and v the same with E, or `[R, N, G, D]`, where a row is a page for all
    keys of a sequence. A tile of BLOCK_N keys is copied as blocks of `rows` slots and 64 columns.

It is the producer of `dense/hopper_producer.py`, with the same roles and barriers. A tile lies in
shared memory as panels of 64 columns, each as atoms of 8 rows, so the slots of a page that make up
some of its rows are neighbours in each panel: as many copies as there are pages and panels complete
one barrier. Each lane looks up the page of a block, before the warp waits for the tile's place.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..dense.hopper_fresh import fresh_number, fresh_sequence
from ..dense.hopper_producer import (
    ROWS,
    _drain,
    _put_back,
    _send,
    _span,
    clear_rows,
    count_everyone,
    locate,
    q_empty_barrier,
    v_empty_barrier,
)
from ..kernels.gluon import (
    FIRST_FREE,
    as_blocks,
    barrier_sync,
    fence_async_shared,
    flag_declare,
    gl,
    gluon,
    lanes_keep,
    lanes_read,
    mbarrier,
    tma_load,
)
from ..kernels.placement import FIELDS, FIRST_Q_TILE, PACKED

# Columns of a panel.
PANEL = gl.constexpr(64)
_PAGES = gl.constexpr("pages")
_LANES = gl.constexpr(32)


class _Place(NamedTuple):
    """What `locate` reads of a `Placement`."""

    table: Any
    n_tiles: Any
    n_sequences: Any
    H: Any
    group: Any


class PagedBuild(NamedTuple):
    """page: slots of a page, 0 where a row holds all of a sequence. rows: that a copy takes.

    Which pages, `stored` says, a `triton_plan.CachePlace`.
    """

    page: int
    rows: int


@gluon.jit
def load_partition(
    q_desc, k_desc, v_desc, rings, call, stored, tickets, BUILD: gl.constexpr, PAGED: gl.constexpr
):  # fmt: skip
    N_CONSUMERS: gl.constexpr = BUILD.n_consumers
    flag_declare(_PAGES, gl.program_id(0))
    n_tiles = _count_tiles(call.place, BUILD)
    n_all = n_tiles * fresh_number(tickets.n_heads, BUILD)
    place = _Place(
        call.place.table, 4 * n_tiles + 3, call.place.n_sequences, call.place.H, call.place.group
    )
    ticket = gl.program_id(0)
    iteration = 0
    n_landed = 0
    while ticket < n_all:
        index, h, tile = locate(place, tickets, ticket, FIRST_Q_TILE, True, 1, BUILD)
        seq = fresh_sequence(place, index, BUILD)
        at = _start_tile(
            q_desc, k_desc, rings, call, stored, seq, h, tile, iteration, BUILD, PAGED
        )  # fmt: skip
        next_ticket = gl.num_programs(0) + gl.atomic_add(tickets.ptr, 1)
        iteration, n_landed = _load_blocks(
            k_desc, v_desc, rings, call, stored, seq, h, tile, at, iteration, n_landed, BUILD, PAGED
        )  # fmt: skip
        ticket = next_ticket
    _drain(rings, iteration, BUILD)
    _send(rings.mail, -1, 0, 0)
    for i in gl.static_range(N_CONSUMERS):
        mbarrier.arrive(rings.q_full.index(i), count=1)
    _put_back(tickets)


@gluon.jit
def _count_tiles(place, BUILD: gl.constexpr):
    """Of a head and row of storage; of packed sequences the table says how many there are."""
    if BUILD.place == PACKED:
        return gl.load(place.table + fresh_number(place.n_sequences, BUILD).to(gl.int64) * FIELDS)
    else:
        return fresh_number(place.n_tiles, BUILD)


@gluon.jit
def _start_tile(
    q_desc, k_desc, rings, call, stored, seq, h, tile, iteration, BUILD: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """Its first keys, which come while consumers are still at the tile before; then Q. Returns:
    where the first keys lie."""
    _, _, last = _span(call, seq, h, tile, BUILD)
    kv_head = h // fresh_number(call.place.group, BUILD)
    at = _find_pages(stored, seq.index, last, BUILD, PAGED)
    _load_k(k_desc, rings, iteration, at, kv_head, last, BUILD, PAGED)
    if iteration > 0:
        barrier_sync(q_empty_barrier(BUILD), count_everyone(BUILD), 1)
    _send(rings.mail, seq.index, h, tile)
    row = seq.q_first + tile * BUILD.tile.block_m
    N_CONSUMERS: gl.constexpr = BUILD.n_consumers
    for i in gl.static_range(N_CONSUMERS):
        mbarrier.expect(rings.q_full.index(i), q_desc.block_type.nbytes)
        tma_load(q_desc, [seq.batch, h, row + i * ROWS, 0], rings.q_full.index(i), rings.q.index(i))
    return at


@gluon.jit
def _load_blocks(
    k_desc, v_desc, rings, call, stored, seq, h, tile, at, iteration, n_landed, BUILD: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """The blocks of a tile, keys one ahead of values. at: where those of the first lie. Returns:
    iteration, n_landed."""
    span, n_blocks, last = _span(call, seq, h, tile, BUILD)
    kv_head = h // fresh_number(call.place.group, BUILD)
    for j in range(0, n_blocks):
        n0 = last - j * BUILD.tile.block_n
        below = n0 - BUILD.tile.block_n
        next_at = at
        if j + 1 < n_blocks:
            next_at = _find_pages(stored, seq.index, below, BUILD, PAGED)
            _load_k(k_desc, rings, iteration + 1, next_at, kv_head, below, BUILD, PAGED)
        n_landed = _load_v(
            v_desc, rings, iteration, n_landed, seq, span, at, kv_head, n0, BUILD, PAGED
        )  # fmt: skip
        at = next_at
        iteration += 1
    return iteration, n_landed


@gluon.jit
def _find_pages(stored, index, n0, BUILD: gl.constexpr, PAGED: gl.constexpr):
    """Of the block from key n0 on, the page that each copy takes from, one in a lane: inside what
    there is, whatever the table holds."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, _LANES, layout=LAYOUT)
    is_real = index < fresh_number(stored.B, PAGED)
    if PAGED.page > 0:
        COPIES: gl.constexpr = BUILD.tile.block_n // PAGED.rows
        # Behind its last page a sequence has no keys, but a tile may have rows.
        column = gl.minimum(
            (n0 + lane * PAGED.rows) // PAGED.page, fresh_number(stored.width_in_use, PAGED) - 1
        )  # fmt: skip
        entry = stored.table + index.to(gl.int64) * fresh_number(stored.width, PAGED) + column
        page = gl.load(entry, mask=is_real & (column >= 0) & (lane < COPIES), other=0)
    elif stored.rows is None:
        page = lane * 0 + index
    else:
        page = gl.load(stored.rows + index + lane * 0, mask=(lane < 1) & is_real, other=0)
    return gl.minimum(gl.maximum(page, 0), fresh_number(stored.storage, PAGED) - 1).to(gl.int32)


@gluon.jit
def _copy_block(
    desc, ring, slot, at, head, n0, full, DIM: gl.constexpr, BUILD: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """The block of keys from n0 on to a slot, on its way; `full` awaits all of its bytes."""
    COPIES: gl.constexpr = BUILD.tile.block_n // PAGED.rows
    PANELS: gl.constexpr = DIM // PANEL
    ALL: gl.constexpr = ring.shape[0] * PANELS * COPIES
    blocks = as_blocks(ring, ALL, PAGED.rows, PANEL)
    mbarrier.expect(full, COPIES * PANELS * desc.block_type.nbytes)
    lanes_keep(_PAGES, at)
    for i in range(0, COPIES):
        page = lanes_read(_PAGES, i)
        row = n0 + i * PAGED.rows
        if PAGED.page > 0:
            row = row % PAGED.page
        for panel in gl.static_range(PANELS):
            block = blocks.index((slot * PANELS + panel) * COPIES + i)
            tma_load(desc, [page, head, row, panel * PANEL], full, block)


@gluon.jit
def _load_k(desc, rings, iteration, at, head, n0, BUILD: gl.constexpr, PAGED: gl.constexpr):
    slot = iteration % BUILD.k_slots
    if iteration >= BUILD.k_slots:
        barrier_sync(FIRST_FREE + slot, count_everyone(BUILD), 1)
    _copy_block(
        desc, rings.k, slot, at, head, n0, rings.k_full.index(slot), BUILD.dim, BUILD, PAGED
    )


@gluon.jit
def _load_v(
    desc, rings, iteration, n_landed, seq, span, at, head, n0, BUILD: gl.constexpr,
    PAGED: gl.constexpr,
):  # fmt: skip
    """Copy the block of values from n0 on; returns how many came by `landing` so far."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    DIM: gl.constexpr = BUILD.value_dim
    slot = iteration % BUILD.v_slots
    if iteration >= BUILD.v_slots:
        barrier_sync(v_empty_barrier(BUILD) + slot, count_everyone(BUILD), 1)
    full = rings.v_full.index(slot)
    is_cut = n0 + BLOCK_N > span.stop
    if PAGED.page == 0:
        # TMA itself fills up with zeros where storage ends.
        is_cut = is_cut & (span.stop < seq.k_stored)
    is_cut = is_cut | (n0 < span.start)
    if is_cut:
        landing = rings.landing.index(0)
        _copy_block(desc, rings.v, slot, at, head, n0, landing, DIM, BUILD, PAGED)
        mbarrier.wait(landing, n_landed & 1)
        n_landed += 1
        clear_rows(rings.v, slot, span.start - n0, span.stop - n0, BLOCK_N, DIM)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        _copy_block(desc, rings.v, slot, at, head, n0, full, DIM, BUILD, PAGED)
    return n_landed
