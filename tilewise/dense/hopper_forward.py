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
    subtract_distance,
    sum_in_thread,
    tanh_fast,
    tma_store,
    tma_store_wait,
    unpack_pairs,
    warpgroup_mma_wait,
)
from ..kernels.masks import key_span
from ..kernels.placement import PACKED, UNIFORM
from ..kernels.scores import load_row_slope
from ..kernels.softmax import LOG2_E, join_sink, softmax_end, split_exponent
from ..kernels.tiles import statistics_base
from .hopper_fresh import fresh_sequence, fresh_statistics
from .hopper_producer import (
    ROWS,
    Rings,
    _receive,
    count_everyone,
    first_columns,
    load_partition,
    q_empty_barrier,
    turn_barrier,
    v_empty_barrier,
)
from .hopper_products import (
    accumulator,
    issue_product,
    issue_sum,
    left_operand,
    parts_of,
    store_rows,
    tile_at,
    wait_for_sum,
    zero_sum,
)

_THREADS = gl.constexpr(128)
# The reference of a row that has none: far below any score, and finite, so that nothing is NaN.
_NO_REFERENCE = gl.constexpr(-3.0e38)
# Sums beyond it, 2^100, are not scaled down but made again.
_HUGE = gl.constexpr("0f71800000")


class Work(NamedTuple):
    """What a consumer knows of its tile. start, stop: the keys that each row sees. n_blocks: that
    the tile visits, from the last key on. last_column: of the first of them, its first key.
    iteration: blocks before this tile. scale: brings scores to log2 units. position: the key at
    which a row stands. factor, cap: of products and of their tanh. slope: ALiBi's. The last two
    are in log2 units, as is the factor where there is no cap."""

    q: Any
    start: Any
    stop: Any
    n_blocks: Any
    last_column: Any
    iteration: Any
    scale: Any
    position: Any
    factor: Any
    cap: Any
    slope: Any


@gluon.constexpr_function
def _flag_name(partition):
    return f"passed{partition}"


# ---------------------------------------------------------------- consumers


@gluon.jit
def _mma_partition(
    rings, out_desc, out, remainder, lse, call, ID: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    EVERYONE: gl.constexpr = count_everyone(BUILD)
    FLAG: gl.constexpr = _flag_name(ID)
    flag_declare(FLAG, gl.program_id(0))
    iteration = 0
    n_tiles = 0
    if BUILD.takes_turns:
        if BUILD.n_consumers - 1 == ID:
            barrier_arrive(turn_barrier(BUILD), 2 * _THREADS, 4)
    mbarrier.wait(rings.q_full.index(ID), 0)
    index = _receive(rings.mail, 0)
    while index >= 0:
        seq, h, tile = _read_tile(rings, call, index, BUILD)
        work = _describe(rings, call, seq, h, tile, iteration, ID, BUILD)
        lo, hi = _whole_blocks(call, seq, h, tile, work, ID, BUILD)
        acc, rest, sums, ref, p = _first_block(rings, work, ID, BUILD)
        acc, rest, sums, ref, p = _blocks(
            1, lo, acc, rest, sums, ref, p, rings, work, True, ID, BUILD
        )
        acc, rest, sums, ref, p = _blocks(
            lo, hi, acc, rest, sums, ref, p, rings, work, False, ID, BUILD
        )
        # Once more, for it would have taken registers from the loop above.
        seq, h, tile = _read_tile(rings, call, _receive(rings.mail, 0), BUILD)
        work = _describe(rings, call, seq, h, tile, iteration, ID, BUILD)
        if BUILD.has_start:
            acc, rest, sums, ref, p = _blocks(
                hi, work.n_blocks, acc, rest, sums, ref, p, rings, work, True, ID, BUILD
            )
        if not BUILD.shares_q:
            barrier_arrive(q_empty_barrier(BUILD), EVERYONE, 4)
        iteration += work.n_blocks
        acc, rest = _last_values(rings, iteration - 1, p, acc, rest, BUILD)
        _finish(
            rings, out_desc, out, remainder, lse, call, seq, h, tile, acc, rest, sums, ref, ID,
            BUILD,
        )  # fmt: skip
        if BUILD.shares_q:
            barrier_arrive(q_empty_barrier(BUILD), EVERYONE, 4)
        n_tiles += 1
        mbarrier.wait(rings.q_full.index(ID), n_tiles & 1)
        index = _receive(rings.mail, 0)
    if BUILD.takes_turns:
        # The turn that nobody takes.
        if ID == 0:
            barrier_sync(turn_barrier(BUILD), 2 * _THREADS, 4)
    tma_store_wait(0)


@gluon.jit
def _read_tile(rings, call, index, BUILD: gl.constexpr):
    """The tile in the mail: its sequence, its head, its number in the sequence."""
    h, tile = _receive(rings.mail, 1), _receive(rings.mail, 2)
    return fresh_sequence(call.place, index, BUILD), h, tile


@gluon.jit
def _describe(rings, call, seq, h, tile, iteration, ID: gl.constexpr, BUILD: gl.constexpr):
    """The work that a tile is for a consumer."""
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(BUILD.tile.block_n))
    TILE: gl.constexpr = BUILD.tile
    span = key_span(call.mask, seq, h, tile, 0, TILE)
    n_blocks = gl.maximum(span.n_whole + span.n_partial, 1)
    m = tile * BUILD.tile.block_m + ID * ROWS + gl.arange(0, ROWS, layout=ROW)
    scale, factor, slope = call.terms.scale, call.terms.scale, 0.0
    if not BUILD.is_folded:
        scale = 1.0
        if not BUILD.is_capped:
            factor *= LOG2_E
    if BUILD.has_slopes:
        slope = load_row_slope(call.terms, seq, h) * LOG2_E
    return Work(
        tile_at(rings.q, ID, ROWS, BUILD.dim),
        gl.maximum(m + seq.left, seq.low),
        gl.minimum(m + seq.right + 1, seq.high),
        n_blocks,
        (span.begin + n_blocks - 1) * BUILD.tile.block_n,
        iteration,
        scale,
        m + seq.shift,
        factor,
        call.terms.cap * LOG2_E,
        slope,
    )


@gluon.jit
def _whole_blocks(call, seq, h, tile, work, ID: gl.constexpr, BUILD: gl.constexpr):
    """Which blocks, counted from the tile's last, need no test of this consumer's rows."""
    GROUP: gl.constexpr = BUILD.group
    own = key_span(call.mask, seq, h, tile * BUILD.n_consumers + ID, 0, GROUP)
    # To the last block that all rows see, in the same count.
    skipped = work.last_column // BUILD.tile.block_n + 1 - (own.begin + own.head)
    has_whole = own.n_whole > 0
    lo = gl.where(has_whole, skipped - own.n_whole, work.n_blocks)
    lo = gl.minimum(gl.maximum(lo, 1), work.n_blocks)
    hi = gl.where(has_whole, gl.minimum(skipped, work.n_blocks), lo)
    return lo, gl.maximum(hi, lo)


@gluon.jit
def _take_turn(ID: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_sync(turn_barrier(BUILD) + ID, 2 * _THREADS, 4)


@gluon.jit
def _pass_turn(ID: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_arrive(turn_barrier(BUILD) + (ID + 1) % BUILD.n_consumers, 2 * _THREADS, 4)


@gluon.jit
def _issue_values(rings, p, acc, rest, slot, BUILD: gl.constexpr):
    """O of a block more, on its way. p: packed."""
    LEFT: gl.constexpr = left_operand(first_columns(BUILD.value_width))
    left = unpack_pairs(p, rings.v.dtype, LEFT, ROWS, BUILD.tile.block_n)
    return issue_sum(left, rings.v, slot, acc, rest, BUILD.value_width)


@gluon.jit
def _scale_values(acc, rest, factor, BUILD: gl.constexpr):
    """O times a factor for each row."""
    acc = _scale_rows(acc, factor)
    if parts_of(BUILD.value_width) == 2:
        rest = _scale_rows(rest, factor)
    return acc, rest


@gluon.jit
def _scale_rows(x, factor):
    """x times a factor for each row, in whatever layout that is."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, LAYOUT)[:, None]


@gluon.jit
def _raise(s, ref, may_raise, scale, room):
    """P, with a new reference where a row's maximum passed it, and what earlier sums shrink by.

    may_raise: of which rows, or True. room: what a new reference leaves above the maximum.
    """
    top = gl.max(s, 1) * scale
    new = gl.where(may_raise & (top > ref), top + room, ref)
    return exp2_fast(s * scale - new[:, None]), exp2_fast(ref - new), new


@gluon.jit
def _add_terms(s, work, j, BUILD: gl.constexpr):
    """Scores in log2 units from raw products, where `work.scale` alone does not make them so."""
    if not BUILD.is_folded:
        s = s * work.factor
        if BUILD.is_capped:
            s = tanh_fast(s) * work.cap
        if BUILD.has_slopes:
            n0 = work.last_column - j * BUILD.tile.block_n
            s = subtract_distance(
                s, (work.position - n0).to(gl.float32), work.slope, ROWS, BUILD.tile.block_n
            )
    return s


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
    slot = work.iteration % BUILD.k_slots
    mbarrier.wait(rings.k_full.index(slot), (work.iteration // BUILD.k_slots) & 1)
    _take_turn(ID, BUILD)
    s = issue_product(work.q, rings.k, slot, BUILD.width)
    _pass_turn(ID, BUILD)
    s = warpgroup_mma_wait(0, [s])
    barrier_arrive(FIRST_FREE + slot, count_everyone(BUILD), 4)
    s = _mask(_add_terms(s, work, 0, BUILD), work, 0, BUILD)
    none = gl.full([ROWS], _NO_REFERENCE, gl.float32, gl.SliceLayout(1, accumulator(BLOCK_N)))
    # Where no block follows there is nothing to make room for, and P keeps more of its bits.
    room = gl.where(work.n_blocks > 1, BUILD.room, 0.0)
    p, _, ref = _raise(s, none, True, work.scale, room)
    acc, rest = zero_sum(BUILD.value_width)
    sums = sum_in_thread(p, ROWS, BLOCK_N)
    return acc, rest, sums, ref, pack_pairs(p, rings.v.dtype, ROWS, BLOCK_N)


@gluon.jit
def _blocks(
    lo, hi, acc, rest, sums, ref, p, rings, work,
    MASKED: gl.constexpr, ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """Blocks lo to hi, counted from the tile's last: S of each, and O of the one before it.

    acc, rest: O. sums: of P, `[rows, 4]`. p: of the block before, packed.
    """
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    EVERYONE: gl.constexpr = count_everyone(BUILD)
    DTYPE: gl.constexpr = rings.v.dtype
    EARLY: gl.constexpr = BUILD.is_early and not MASKED
    FLAG: gl.constexpr = _flag_name(ID)
    LIMIT: gl.constexpr = BUILD.limit
    WIDTH: gl.constexpr = BUILD.value_width
    PARTS: gl.constexpr = parts_of(WIDTH)
    for j in range(lo, hi):
        it = work.iteration + j
        slot = it % BUILD.k_slots
        v_slot = (it - 1) % BUILD.v_slots
        mbarrier.wait(rings.k_full.index(slot), (it // BUILD.k_slots) & 1)
        _take_turn(ID, BUILD)
        s = issue_product(work.q, rings.k, slot, BUILD.width)
        mbarrier.wait(rings.v_full.index(v_slot), ((it - 1) // BUILD.v_slots) & 1)
        acc, rest = _issue_values(rings, p, acc, rest, v_slot, BUILD)
        _pass_turn(ID, BUILD)
        s = warpgroup_mma_wait(PARTS, [s])
        if MASKED:
            barrier_arrive(FIRST_FREE + slot, EVERYONE, 4)
            s = _mask(_add_terms(s, work, j, BUILD), work, j, BUILD)
            x, shrink, ref = _raise(s, ref, True, work.scale, BUILD.room)
            sums = _scale_rows(sums, shrink) + sum_in_thread(x, ROWS, BLOCK_N)
            acc, rest = wait_for_sum(0, acc, rest, WIDTH)
            barrier_arrive(v_empty_barrier(BUILD) + v_slot, EVERYONE, 4)
            acc, rest = _scale_values(acc, rest, shrink, BUILD)
            p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
        else:
            if EARLY:
                acc, rest = wait_for_sum(0, acc, rest, WIDTH)
                barrier_arrive(v_empty_barrier(BUILD) + v_slot, EVERYONE, 4)
            s = _add_terms(s, work, j, BUILD)
            x = exp2_fast(s * work.scale - ref[:, None])
            new = sum_in_thread(x, ROWS, BLOCK_N)
            if EARLY:
                p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
            flag_vote(FLAG, ID, new, LIMIT)
            if not EARLY:
                acc, rest = wait_for_sum(0, acc, rest, WIDTH)
                barrier_arrive(v_empty_barrier(BUILD) + v_slot, EVERYONE, 4)
            if flag_read(FLAG, it) != 0:
                x2, new, shrink, ref = _pass_limit(
                    x, new, ref, rings, work, it, slot, ID, BUILD
                )  # fmt: skip
                sums = _scale_rows(sums, shrink)
                acc, rest = _scale_values(acc, rest, shrink, BUILD)
                if EARLY:
                    p = pack_pairs(x2, DTYPE, ROWS, BLOCK_N)
                else:
                    x = x2
            sums = sums + new
            # Held until no row needs S again.
            barrier_arrive(FIRST_FREE + slot, EVERYONE, 4)
            if not EARLY:
                p = pack_pairs(x, DTYPE, ROWS, BLOCK_N)
    return acc, rest, sums, ref, p


@gluon.jit
def _pass_limit(x, new, ref, rings, work, it, slot, ID: gl.constexpr, BUILD: gl.constexpr):
    """P and its sums again, below the limit, after some row of the warp group passed it.

    Rows that did not pass it keep their bits. Up to 2^100 P is scaled down by a power of two, which
    is exact; beyond, or in a row that had no reference, S is computed again.
    Returns: P, sums, what earlier sums shrink by, ref.
    """
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    FLAG: gl.constexpr = _flag_name(ID)
    ROW: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    passed = gl.convert_layout(gl.max(new, 1), ROW) >= BUILD.limit_value
    flag_vote(FLAG, ID, new, _HUGE)
    if flag_read(FLAG, it) != 0:
        s = issue_product(work.q, rings.k, slot, BUILD.width)
        s = warpgroup_mma_wait(0, [s])
        s = _add_terms(s, work, it - work.iteration, BUILD)
        x, shrink, ref = _raise(s, ref, passed, work.scale, BUILD.room)
        new = sum_in_thread(x, ROWS, BLOCK_N)
    else:
        total = gl.convert_layout(gl.sum(new, 1), ROW)
        excess = gl.minimum(gl.floor(gl.log2(total)) + BUILD.room, 125.0)
        excess = gl.where(passed, excess, 0.0)
        shrink = exp2_fast(-excess)
        ref = ref + excess
        x = x * shrink[:, None]
        new = _scale_rows(new, shrink)
    return x, new, shrink, ref


@gluon.jit
def _last_values(rings, iteration, p, acc, rest, BUILD: gl.constexpr):
    """O with the last block in it."""
    slot = iteration % BUILD.v_slots
    mbarrier.wait(rings.v_full.index(slot), (iteration // BUILD.v_slots) & 1)
    acc, rest = _issue_values(rings, p, acc, rest, slot, BUILD)
    acc, rest = wait_for_sum(0, acc, rest, BUILD.value_width)
    barrier_arrive(v_empty_barrier(BUILD) + slot, count_everyone(BUILD), 4)
    return acc, rest


@gluon.jit
def _finish(
    rings, out_desc, out, remainder, lse, call, seq, h, tile, acc, rest, sums, ref,
    ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """Write a consumer's rows of out and lse; and what rounding took off out, where there is room
    for it."""
    ROW: gl.constexpr = ref.type.layout
    first = tile * BUILD.tile.block_m + ID * ROWS
    m = first + gl.arange(0, ROWS, layout=ROW)
    total = gl.convert_layout(gl.sum(sums, 1), ROW)
    is_empty = total == 0.0
    factor = 1.0 / gl.where(is_empty, 1.0, total)
    # The reference may be far from the maximum, and the sum as far from 1: their exponents cancel
    # before anything is rounded, or the backward's P would not add up to 1.
    mantissa, exponent = split_exponent(gl.where(is_empty, 1.0, total))
    row_lse, _ = softmax_end(ref + exponent, gl.where(is_empty, 0.0, mantissa), True)
    if call.terms.sinks is not None:
        row_lse, shrink = join_sink(row_lse, gl.load(call.terms.sinks + h).to(gl.float32))
        factor *= shrink
    acc, rest = _scale_values(acc, rest, factor, BUILD)
    if BUILD.place != UNIFORM:
        owned = m < seq.q_used
        acc = _clean_rows(acc, owned)
        if parts_of(BUILD.value_width) == 2:
            rest = _clean_rows(rest, owned)
        row_lse = gl.where(owned, row_lse, float("-inf"))
    n_rows = seq.q_stored - first
    at = [seq.batch, h, seq.q_first + first, 0]
    if not BUILD.is_staged:
        _store_values(out, at, acc, rest, n_rows, BUILD)
    elif BUILD.place >= PACKED:
        # TMA does not know where a document ends.
        if n_rows >= ROWS:
            _store_out(rings, out_desc, acc, rest, at, BUILD, ID)
        else:
            _store_values(out, at, acc, rest, n_rows, BUILD)
    else:
        _store_out(rings, out_desc, acc, rest, at, BUILD, ID)
    if remainder.ptr is not None:
        acc = acc - acc.to(out.ptr.dtype.element_ty).to(gl.float32)
        if parts_of(BUILD.value_width) == 2:
            rest = rest - rest.to(out.ptr.dtype.element_ty).to(gl.float32)
        _store_values(remainder, at, acc, rest, n_rows, BUILD)
    lse_base = statistics_base(fresh_statistics(lse, BUILD), seq.batch, seq.q_first + first, h)
    gl.store(lse_base + (m - first), row_lse, mask=m < seq.q_stored)


@gluon.jit
def _clean_rows(x, owned):
    """x, and 0 in rows that nobody owns."""
    OWNED: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return gl.where(gl.convert_layout(owned, OWNED)[:, None], x, 0.0)


@gluon.jit
def _store_values(out, at, acc, rest, n_rows, BUILD: gl.constexpr):
    FIRST: gl.constexpr = first_columns(BUILD.value_width)
    # Heads are neighbours, so their stride is what a row stores.
    store_rows(out, at, acc, n_rows, 0, out.stride_h, False, BUILD)
    if BUILD.value_width > FIRST:
        store_rows(out, at, rest, n_rows, FIRST, out.stride_h, False, BUILD)


@gluon.jit
def _store_out(rings, desc, acc, rest, at, BUILD: gl.constexpr, ID: gl.constexpr):
    """A consumer's rows, cut by TMA where storage ends."""
    FIRST: gl.constexpr = first_columns(BUILD.value_width)
    # The tile before may still be on its way out of this memory.
    tma_store_wait(0)
    tile = tile_at(rings.out, ID, ROWS, BUILD.value_dim)
    if BUILD.value_width == FIRST:
        tile.store(acc.to(desc.dtype))
    else:
        tile.slice(0, FIRST, 1).store(acc.to(desc.dtype))
        tile.slice(FIRST, BUILD.value_width - FIRST, 1).store(rest.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, at, rings.out.index(ID))
    if BUILD.shares_q:
        tma_store_wait(0)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, out, remainder, lse, call, tickets, BUILD: gl.constexpr
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
    stage = q
    if BUILD.is_staged and not BUILD.shares_q:
        stage = gl.allocate_shared_memory(
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
    rings = Rings(q, k, v, stage, q_full, k_full, v_full, landing, mail)
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    if N == 2:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 1, BUILD)),
                (load_partition, (q_desc, k_desc, v_desc, rings, call, tickets, BUILD)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 1, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 2, BUILD)),
                (load_partition, (q_desc, k_desc, v_desc, rings, call, tickets, BUILD)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
