"""Forward of the hopper backend (sm_90): warp specialised, with a reference instead of a row max.

Dims: as in `triton_forward.py`. A tile is `block_m` query rows of one head, 64 to each consumer.
Grid: one program a multiprocessor; each takes tiles from a counter, those that see most first.
Math: P = exp2(scale S - ref), O += P V, sums += rowsum(P), out = O / sums, with a reference of each
    row that hardly ever changes: softmax does not depend on it. Blocks that need a test raise it to
    `room` above the row's maximum. In all others only the sums of P are looked at: where one passes
    `limit`, the row's reference is raised before P is rounded and used. So the hot loop has no row
    max, and results are exact for any input.
Units: scores and references in log2 units; lse natural, fp32.

Roles. One producer warp copies by TMA, consumer warp groups multiply. What a consumer waits for is
an mbarrier (`*_full`: a copy has arrived), what the producer waits for a named barrier (a slot is
empty: every consumer has arrived there once for each time that it was filled). All roles count the
same blocks of the same tiles, from the same fields, so that every wait has its arrival:
    K slot: filled by the producer after `empty`, read by one S = Q K^T of each consumer (a second
        one when the reference is raised), then emptied.
    V slot: the same with O += P V. Rows that the tile does not see may be NaN: the producer copies
        such a block to the same slot but on `landing`, writes zeros, and completes `v_full` itself.
    Q and the mail (which tile it is): after `q_empty`, where consumers arrive with nothing of the
        tile left to read. The last mail has index -1.
    Turn: consumer i issues its products after i - 1; each passes the turn once for each block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    FIRST_FREE,
    as_atoms,
    barrier_arrive,
    barrier_sync,
    exp2_fast,
    fence_async_shared,
    flag_declare,
    flag_read,
    flag_vote,
    gl,
    gluon,
    mask_columns,
    mbarrier,
    pack_pairs,
    sum_in_thread,
    tma_load,
    tma_store,
    tma_store_wait,
    unpack_pairs,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..kernels.masks import key_span
from ..kernels.placement import UNIFORM, sequence_at
from ..kernels.softmax import join_sink, softmax_end
from ..kernels.structs import decode
from ..kernels.tiles import statistics_base

# What a wgmma of a warp group multiplies.
ROWS = gl.constexpr(64)
_THREADS = gl.constexpr(128)
# The reference of a row that has none: far below any score, and finite, so that nothing is NaN.
_NO_REFERENCE = gl.constexpr(-3.0e38)
# Sums beyond it, 2^100, are not scaled down but made again.
_HUGE = gl.constexpr("0f71800000")


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


class Work(NamedTuple):
    """What a consumer knows of its tile. start, stop: the keys that each row sees. n_blocks: that
    the tile visits, from the last key on. last_column: of the first of them, its first key.
    iteration: blocks before this tile."""

    q: Any
    start: Any
    stop: Any
    n_blocks: Any
    last_column: Any
    iteration: Any
    scale: Any


class Tickets(NamedTuple):
    """The counter that programs take tiles from: int32 `[2]`, 0 before and after. n_tiles: of all
    heads. n_heads: over all batch rows. heads_together: how many take turns, so that their keys
    stay in L2. The numbers are coded."""

    ptr: Any
    n_tiles: Any
    n_heads: Any
    heads_together: Any


class SpanBuild(NamedTuple):
    """What `masks.key_span` is compiled for."""

    mask: int
    block_m: int
    block_n: int


class HopperBuild(NamedTuple):
    """What the kernel is compiled for.

    dim, value_dim: as tiles hold them. place: see `placement.py`. tile, group: spans of a tile and
    of a consumer's rows. has_start: rows may not see the first keys. n_consumers, k_slots, v_slots.
    takes_turns: see `Turn` above. is_early: wait for O before the vote, not after. shares_q: out is
    staged where Q was. room: log2 of the room that a new reference leaves. limit: of the sums of P
    in a thread, as PTX writes an f32. registers: of consumers, of the producer.
    """

    dim: int
    value_dim: int
    place: int
    tile: SpanBuild
    group: SpanBuild
    has_start: bool
    n_consumers: int
    k_slots: int
    v_slots: int
    takes_turns: bool
    is_early: bool
    shares_q: bool
    room: float
    limit: str
    limit_value: float
    registers: tuple[int, int]


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


# Named barriers: K slots, V slots, turns, Q.
@gluon.constexpr_function
def _v_empty(build):
    return FIRST_FREE.value + build.k_slots


@gluon.constexpr_function
def _turns(build):
    return FIRST_FREE.value + build.k_slots + build.v_slots


@gluon.constexpr_function
def _q_empty(build):
    turns = build.n_consumers if build.takes_turns else 0
    barrier = FIRST_FREE.value + build.k_slots + build.v_slots + turns
    assert barrier <= 15, "more named barriers than there are"
    return barrier


@gluon.constexpr_function
def _everyone(build):
    return 128 * build.n_consumers + 32


@gluon.constexpr_function
def _flag_name(partition):
    return f"passed{partition}"


# ---------------------------------------------------------------- producer


@gluon.jit
def _load_partition(q_desc, k_desc, v_desc, rings, call, tickets, BUILD: gl.constexpr):
    EVERYONE: gl.constexpr = _everyone(BUILD)
    Q_EMPTY: gl.constexpr = _q_empty(BUILD)
    N_CONSUMERS: gl.constexpr = BUILD.n_consumers
    TILE: gl.constexpr = BUILD.tile
    n_all = decode(tickets.n_tiles)
    ticket = gl.program_id(0)
    iteration = 0
    n_landed = 0
    is_first = True
    while ticket < n_all:
        index, h, tile = _locate(tickets, call.place, ticket)
        seq = sequence_at(call.place, index, BUILD.place)
        kv_head = h // decode(call.place.group)
        span = key_span(call.mask, seq, h, tile, 0, TILE)
        n_blocks = gl.maximum(span.n_whole + span.n_partial, 1)
        last = (span.begin + n_blocks - 1) * BUILD.tile.block_n
        row = seq.q_first + tile * BUILD.tile.block_m
        # Keys of the next tile come while consumers are still at the last one.
        _load_k(k_desc, rings, iteration, seq.batch, kv_head, seq.k_first + last, BUILD)
        if is_first == 0:
            barrier_sync(Q_EMPTY, EVERYONE, 1)
        _send(rings.mail, index, h, tile)
        for i in gl.static_range(N_CONSUMERS):
            mbarrier.expect(rings.q_full.index(i), q_desc.block_type.nbytes)
            at = [seq.batch, h, row + i * ROWS, 0]
            tma_load(q_desc, at, rings.q_full.index(i), rings.q.index(i))
        next_ticket = gl.num_programs(0) + gl.atomic_add(tickets.ptr, 1)
        # Keys are a block ahead of values.
        for j in range(0, n_blocks):
            n0 = last - j * BUILD.tile.block_n
            if j + 1 < n_blocks:
                below = seq.k_first + n0 - BUILD.tile.block_n
                _load_k(k_desc, rings, iteration + 1, seq.batch, kv_head, below, BUILD)
            n_landed = _load_v(v_desc, rings, iteration, n_landed, seq, span, kv_head, n0, BUILD)
            iteration += 1
        is_first = False
        ticket = next_ticket
    _drain(rings, iteration, BUILD)
    _send(rings.mail, -1, 0, 0)
    for i in gl.static_range(N_CONSUMERS):
        mbarrier.arrive(rings.q_full.index(i), count=1)
    _put_back(tickets)


@gluon.jit
def _locate(tickets, place, ticket):
    """The sequence, head and tile of a ticket: heads take turns in groups, late tiles first."""
    n_heads = decode(tickets.n_heads)
    together = decode(tickets.heads_together)
    n_tiles = decode(place.n_tiles)
    group = ticket // (together * n_tiles)
    rest = ticket - group * together * n_tiles
    size = gl.minimum(n_heads - group * together, together)
    tile = n_tiles - 1 - rest // size
    head = group * together + rest % size
    H = decode(place.H)
    return head // H, head % H, tile


@gluon.jit
def _send(mail, index, h, tile):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, LAYOUT)
    mail.index(0).store(zero + index)
    mail.index(1).store(zero + h)
    mail.index(2).store(zero + tile)


@gluon.jit
def _load_k(desc, rings, iteration, batch, head, row, BUILD: gl.constexpr):
    slot = iteration % BUILD.k_slots
    if iteration >= BUILD.k_slots:
        barrier_sync(FIRST_FREE + slot, _everyone(BUILD), 1)
    full = rings.k_full.index(slot)
    mbarrier.expect(full, desc.block_type.nbytes)
    tma_load(desc, [batch, head, row, 0], full, rings.k.index(slot))


@gluon.jit
def _load_v(desc, rings, iteration, n_landed, seq, span, head, n0, BUILD: gl.constexpr):
    """Copy the block of keys from n0 on; returns how many came by `landing` so far."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    slot = iteration % BUILD.v_slots
    if iteration >= BUILD.v_slots:
        barrier_sync(_v_empty(BUILD) + slot, _everyone(BUILD), 1)
    at = [seq.batch, head, seq.k_first + n0, 0]
    full = rings.v_full.index(slot)
    tile = rings.v.index(slot)
    # TMA itself fills up with zeros where storage ends.
    is_cut = (n0 < span.start) | ((n0 + BLOCK_N > span.stop) & (span.stop < seq.k_stored))
    if is_cut:
        landing = rings.landing.index(0)
        mbarrier.expect(landing, desc.block_type.nbytes)
        tma_load(desc, at, landing, tile)
        mbarrier.wait(landing, n_landed & 1)
        n_landed += 1
        start, stop = span.start - n0, span.stop - n0
        _clear_rows(rings.v, slot, start, stop, BLOCK_N, BUILD.value_dim)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, at, full, tile)
    return n_landed


@gluon.jit
def _clear_rows(ring, slot, start, stop, ROWS_OF_TILE: gl.constexpr, DIM: gl.constexpr):
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
    EVERYONE: gl.constexpr = _everyone(BUILD)
    if iteration > 0:
        barrier_sync(_q_empty(BUILD), EVERYONE, 1)
    for i in range(gl.maximum(iteration - BUILD.k_slots, 0), iteration):
        barrier_sync(FIRST_FREE + i % BUILD.k_slots, EVERYONE, 1)
    for i in range(gl.maximum(iteration - BUILD.v_slots, 0), iteration):
        barrier_sync(_v_empty(BUILD) + i % BUILD.v_slots, EVERYONE, 1)


@gluon.jit
def _put_back(tickets):
    """The last program to finish leaves the counter as it was."""
    n_done = gl.atomic_add(tickets.ptr + 1, 1)
    if n_done == gl.num_programs(0) - 1:
        gl.store(tickets.ptr, 0)
        gl.store(tickets.ptr + 1, 0)


# ---------------------------------------------------------------- consumers


@gluon.jit
def _mma_partition(rings, out_desc, lse, call, ID: gl.constexpr, BUILD: gl.constexpr):
    EVERYONE: gl.constexpr = _everyone(BUILD)
    ROW: gl.constexpr = gl.SliceLayout(1, _accumulator(BUILD.tile.block_n))
    TILE: gl.constexpr = BUILD.tile
    GROUP: gl.constexpr = BUILD.group
    FLAG: gl.constexpr = _flag_name(ID)
    flag_declare(FLAG, gl.program_id(0))
    q = rings.q.index(ID).reshape([ROWS, BUILD.dim])
    iteration = 0
    n_tiles = 0
    if BUILD.takes_turns:
        if BUILD.n_consumers - 1 == ID:
            barrier_arrive(_turns(BUILD), 2 * _THREADS, 4)
    mbarrier.wait(rings.q_full.index(ID), 0)
    index = _receive(rings.mail, 0)
    while index >= 0:
        h = _receive(rings.mail, 1)
        tile = _receive(rings.mail, 2)
        seq = sequence_at(call.place, index, BUILD.place)
        span = key_span(call.mask, seq, h, tile, 0, TILE)
        n_blocks = gl.maximum(span.n_whole + span.n_partial, 1)
        end = span.begin + n_blocks
        # The same of these rows alone, in blocks from the tile's last on.
        own = key_span(call.mask, seq, h, tile * BUILD.n_consumers + ID, 0, GROUP)
        whole_begin = own.begin + own.head
        lo = gl.where(own.n_whole > 0, end - whole_begin - own.n_whole, n_blocks)
        lo = gl.minimum(gl.maximum(lo, 1), n_blocks)
        hi = gl.where(own.n_whole > 0, gl.minimum(end - whole_begin, n_blocks), lo)
        hi = gl.maximum(hi, lo)
        first = tile * BUILD.tile.block_m + ID * ROWS
        m = first + gl.arange(0, ROWS, layout=ROW)
        work = Work(
            q,
            gl.maximum(m + seq.left, seq.low),
            gl.minimum(m + seq.right + 1, seq.high),
            n_blocks,
            (end - 1) * BUILD.tile.block_n,
            iteration,
            call.terms.scale,
        )
        acc, sums, ref, p = _first_block(rings, work, ID, BUILD)
        acc, sums, ref, p = _blocks(1, lo, acc, sums, ref, p, rings, work, True, ID, BUILD)
        acc, sums, ref, p = _blocks(lo, hi, acc, sums, ref, p, rings, work, False, ID, BUILD)
        if BUILD.has_start:
            acc, sums, ref, p = _blocks(
                hi, n_blocks, acc, sums, ref, p, rings, work, True, ID, BUILD
            )
        if not BUILD.shares_q:
            barrier_arrive(_q_empty(BUILD), EVERYONE, 4)
        iteration += n_blocks
        acc = _last_values(rings, iteration - 1, p, acc, BUILD)
        row_lse, factor = softmax_end(ref, gl.convert_layout(gl.sum(sums, 1), ROW), True)
        if call.terms.sinks is not None:
            row_lse, shrink = join_sink(row_lse, gl.load(call.terms.sinks + h).to(gl.float32))
            factor *= shrink
        acc = _scale_rows(acc, factor)
        if BUILD.place != UNIFORM:
            owned = m < seq.q_used
            OWNED: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
            acc = gl.where(gl.convert_layout(owned, OWNED)[:, None], acc, 0.0)
            row_lse = gl.where(owned, row_lse, float("-inf"))
        _store_out(rings, out_desc, acc, [seq.batch, h, seq.q_first + first, 0], ID, BUILD)
        lse_base = statistics_base(lse, seq.batch, seq.q_first + first, h)
        gl.store(lse_base + (m - first), row_lse, mask=m < seq.q_stored)
        n_tiles += 1
        mbarrier.wait(rings.q_full.index(ID), n_tiles & 1)
        index = _receive(rings.mail, 0)
    if BUILD.takes_turns:
        # The turn that nobody takes.
        if ID == 0:
            barrier_sync(_turns(BUILD), 2 * _THREADS, 4)
    tma_store_wait(0)


@gluon.jit
def _receive(mail, FIELD: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(mail.index(FIELD).load(LAYOUT), 0)


@gluon.jit
def _take_turn(ID: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_sync(_turns(BUILD) + ID, 2 * _THREADS, 4)


@gluon.jit
def _pass_turn(ID: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_arrive(_turns(BUILD) + (ID + 1) % BUILD.n_consumers, 2 * _THREADS, 4)


@gluon.jit
def _issue_scores(rings, q, slot, BUILD: gl.constexpr):
    """S of a block, on its way."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    k = rings.k.index(slot).reshape([BLOCK_N, BUILD.dim]).permute((1, 0))
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, _accumulator(BLOCK_N))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _issue_values(rings, p, acc, slot, BUILD: gl.constexpr):
    """O of a block more, on its way. p: packed."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, _accumulator(BUILD.value_dim), 2)
    left = unpack_pairs(p, rings.v.dtype, P_LAYOUT, ROWS, BLOCK_N)
    v = rings.v.index(slot).reshape([BLOCK_N, BUILD.value_dim])
    return warpgroup_mma(left, v, acc, is_async=True)


@gluon.jit
def _scale_rows(x, factor):
    """x times a factor for each row, in whatever layout that is."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, LAYOUT)[:, None]


@gluon.jit
def _raise_all(s, ref, scale, BUILD: gl.constexpr):
    """P, with a new reference where a row's maximum passed it, and what earlier sums shrink by."""
    top = gl.max(s, 1) * scale
    new = gl.where(top > ref, top + BUILD.room, ref)
    return exp2_fast(s * scale - new[:, None]), exp2_fast(ref - new), new


@gluon.jit
def _mask(s, work, j, BUILD: gl.constexpr):
    n0 = work.last_column - j * BUILD.tile.block_n
    return mask_columns(
        s, work.start - n0, work.stop - n0, BUILD.has_start, ROWS, BUILD.tile.block_n
    )


@gluon.jit
def _first_block(rings, work, ID: gl.constexpr, BUILD: gl.constexpr):
    """S and P of the first block; there is no O to add to yet."""
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    slot = work.iteration % BUILD.k_slots
    mbarrier.wait(rings.k_full.index(slot), (work.iteration // BUILD.k_slots) & 1)
    _take_turn(ID, BUILD)
    s = _issue_scores(rings, work.q, slot, BUILD)
    _pass_turn(ID, BUILD)
    s = warpgroup_mma_wait(0, [s])
    barrier_arrive(FIRST_FREE + slot, _everyone(BUILD), 4)
    s = _mask(s, work, 0, BUILD)
    none = gl.full([ROWS], _NO_REFERENCE, gl.float32, gl.SliceLayout(1, _accumulator(BLOCK_N)))
    p, _, ref = _raise_all(s, none, work.scale, BUILD)
    acc = gl.zeros([ROWS, VALUE_DIM], gl.float32, _accumulator(VALUE_DIM))
    sums = sum_in_thread(p, ROWS, BLOCK_N)
    return acc, sums, ref, pack_pairs(p, rings.v.dtype, ROWS, BLOCK_N)


@gluon.jit
def _blocks(
    lo, hi, acc, sums, ref, p, rings, work,
    MASKED: gl.constexpr, ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """Blocks lo to hi, counted from the tile's last: S of each, and O of the one before it.

    acc: O. sums: of P, `[rows, 4]`. p: of the block before, packed.
    """
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    EVERYONE: gl.constexpr = _everyone(BUILD)
    DTYPE: gl.constexpr = rings.v.dtype
    EARLY: gl.constexpr = BUILD.is_early and not MASKED
    FLAG: gl.constexpr = _flag_name(ID)
    LIMIT: gl.constexpr = BUILD.limit
    for j in range(lo, hi):
        it = work.iteration + j
        slot = it % BUILD.k_slots
        v_slot = (it - 1) % BUILD.v_slots
        mbarrier.wait(rings.k_full.index(slot), (it // BUILD.k_slots) & 1)
        _take_turn(ID, BUILD)
        s = _issue_scores(rings, work.q, slot, BUILD)
        mbarrier.wait(rings.v_full.index(v_slot), ((it - 1) // BUILD.v_slots) & 1)
        acc = _issue_values(rings, p, acc, v_slot, BUILD)
        _pass_turn(ID, BUILD)
        s = warpgroup_mma_wait(1, [s])
        if MASKED:
            barrier_arrive(FIRST_FREE + slot, EVERYONE, 4)
            s = _mask(s, work, j, BUILD)
            x, shrink, ref = _raise_all(s, ref, work.scale, BUILD)
            sums = _scale_rows(sums, shrink) + sum_in_thread(x, ROWS, BLOCK_N)
            acc = warpgroup_mma_wait(0, [acc])
            barrier_arrive(_v_empty(BUILD) + v_slot, EVERYONE, 4)
            acc = _scale_rows(acc, shrink)
            p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
        else:
            if EARLY:
                acc = warpgroup_mma_wait(0, [acc])
                barrier_arrive(_v_empty(BUILD) + v_slot, EVERYONE, 4)
            x = exp2_fast(s * work.scale - ref[:, None])
            new = sum_in_thread(x, ROWS, BLOCK_N)
            if EARLY:
                p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
            flag_vote(FLAG, ID, new, LIMIT)
            if not EARLY:
                acc = warpgroup_mma_wait(0, [acc])
                barrier_arrive(_v_empty(BUILD) + v_slot, EVERYONE, 4)
            if flag_read(FLAG, it) != 0:
                x2, new, shrink, ref = _pass_limit(
                    x, new, ref, rings, work, it, slot, ID, BUILD
                )  # fmt: skip
                sums = _scale_rows(sums, shrink)
                acc = _scale_rows(acc, shrink)
                if EARLY:
                    p = pack_pairs(x2, DTYPE, ROWS, BLOCK_N)
                else:
                    x = x2
            sums = sums + new
            # Held until no row needs S again.
            barrier_arrive(FIRST_FREE + slot, EVERYONE, 4)
            if not EARLY:
                p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
    return acc, sums, ref, p


@gluon.jit
def _pass_limit(x, new, ref, rings, work, it, slot, ID: gl.constexpr, BUILD: gl.constexpr):
    """P and its sums again, below the limit, after some row of the warp group passed it.

    Rows that did not pass it keep their bits. Up to 2^100 P is scaled down by a power of two, which
    is exact; beyond, or in a row that had no reference, S is computed again.
    Returns: P, sums, what earlier sums shrink by, ref.
    """
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    FLAG: gl.constexpr = _flag_name(ID)
    flag_vote(FLAG, ID, new, _HUGE)
    if flag_read(FLAG, it) != 0:
        s = _issue_scores(rings, work.q, slot, BUILD)
        s = warpgroup_mma_wait(0, [s])
        x, shrink, ref = _raise_all(s, ref, work.scale, BUILD)
        new = sum_in_thread(x, ROWS, BLOCK_N)
    else:
        ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
        total = gl.convert_layout(gl.sum(new, 1), ROW)
        largest = gl.convert_layout(gl.max(new, 1), ROW)
        excess = gl.minimum(gl.floor(gl.log2(total)) + BUILD.room, 125.0)
        excess = gl.where(largest >= BUILD.limit_value, excess, 0.0)
        shrink = exp2_fast(-excess)
        ref = ref + excess
        x = x * shrink[:, None]
        new = _scale_rows(new, shrink)
    return x, new, shrink, ref


@gluon.jit
def _last_values(rings, iteration, p, acc, BUILD: gl.constexpr):
    """O with the last block in it."""
    slot = iteration % BUILD.v_slots
    mbarrier.wait(rings.v_full.index(slot), (iteration // BUILD.v_slots) & 1)
    acc = _issue_values(rings, p, acc, slot, BUILD)
    acc = warpgroup_mma_wait(0, [acc])
    barrier_arrive(_v_empty(BUILD) + slot, _everyone(BUILD), 4)
    return acc


@gluon.jit
def _store_out(rings, desc, acc, at, ID: gl.constexpr, BUILD: gl.constexpr):
    tile = rings.out.index(ID)
    # The tile before may still be on its way out of this memory.
    tma_store_wait(0)
    tile.reshape([ROWS, BUILD.value_dim]).store(acc.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, at, tile)
    if BUILD.shares_q:
        tma_store_wait(0)
        barrier_arrive(_q_empty(BUILD), _everyone(BUILD), 4)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, lse, call, tickets, BUILD: gl.constexpr
):
    N: gl.constexpr = BUILD.n_consumers
    K_SLOTS: gl.constexpr = BUILD.k_slots
    V_SLOTS: gl.constexpr = BUILD.v_slots
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    MAIL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(q_desc.dtype, [N, 1, 1, ROWS, BUILD.dim], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [K_SLOTS, 1, 1, BLOCK_N, BUILD.dim], k_desc.layout)
    v = gl.allocate_shared_memory(
        v_desc.dtype, [V_SLOTS, 1, 1, BLOCK_N, BUILD.value_dim], v_desc.layout
    )
    if BUILD.shares_q:
        out = q
    else:
        out = gl.allocate_shared_memory(
            out_desc.dtype, [N, 1, 1, ROWS, BUILD.value_dim], out_desc.layout
        )
    q_full = gl.allocate_shared_memory(gl.int64, [N, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mail = gl.allocate_shared_memory(gl.int32, [4, 1], MAIL)
    for i in gl.static_range(N):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(landing.index(0), count=1)
    fence_async_shared()
    rings = Rings(q, k, v, out, q_full, k_full, v_full, landing, mail)
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    if N == 2:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, lse, call, 1, BUILD)),
                (_load_partition, (q_desc, k_desc, v_desc, rings, call, tickets, BUILD)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, lse, call, 1, BUILD)),
                (_mma_partition, (rings, out_desc, lse, call, 2, BUILD)),
                (_load_partition, (q_desc, k_desc, v_desc, rings, call, tickets, BUILD)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
