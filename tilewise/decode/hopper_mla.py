"""Latent attention over a cache on Hopper (sm_90): warp specialised, keys and values one tile.

Dims: q `[B, M, H, 576]` or packed `[T, H, 576]`; k `[R, N, 1, 576]` or `[pages, P, 1, 576]` with
    P a multiple of BLOCK_N; values are its first 512 columns; out as q with 512; parts as in
    `triton_split_kv.py`. A unit is 64 rows: queries times the heads of a group.
Grid: teams x groups; see `triton_plan.py`. The heads of a call are cut into groups that fill a
    unit, as if each had a kv head of its own: programs of a team read the same keys side by side,
    and all but one find them in the L2 cache.
Math: FlashDecoding with a reference in place of the maximum: P = 2^(scale S - ref). A row's
    reference is some maximum of what it has seen; it is raised where the maximum passes it by
    LIMIT, so that P stays below 2^LIMIT and sums are rarely scaled.
Units: scores and references in log2 units; lse natural, fp32.

Roles. One warp copies tiles of keys by TMA, in three parts. One warp group, which holds part of Q
in registers, computes S and P, and puts P into shared memory. Two warp groups hold 256 columns of O
each and add P V. All count the same tiles of the same units, from the same numbers, so that every
wait has its arrival:
    rest (the columns that only keys have): filled by the producer after `REST_EMPTY`, which
        completes `rest_full` by TMA; read by S alone.
    half of the values of a tile: the same, `HALF_EMPTY` and `half_full`; read by S and then by the
        group that has those columns of O, which empties it: P comes after S.
    P, and beside it what O has to be multiplied by, before and at the end: written after `P_EMPTY`,
        where both groups of O have arrived, and read after `p_full`.
A slot is emptied once for each time that it was filled; at the end those who wait meet what nobody
else waits for. Values that no row of the unit sees may be NaN: whoever makes P writes zeros there.
"""

from __future__ import annotations

from ..kernels.gluon import (
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
    sum_in_thread,
    sync_partition,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_mla_producer import (
    FROM_BOTH,
    HALF,
    HALF_EMPTY,
    P_EMPTY,
    PAIRS,
    PIECE,
    REST,
    REST_EMPTY,
    TO_PRODUCER,
    Rings,
    load_partition,
)
from .hopper_plan import (
    ROWS,
    advance,
    find_share,
    leave_note,
    row_offsets,
    segment_of,
    sequence,
    unit_rows,
)
from .hopper_rows import (
    LIMIT,
    LIMIT_PTX,
    NO_REFERENCE,
    accumulator,
    clear_rows,
    last_factor,
    left_operand,
    load_columns,
    packed,
    store_statistics,
    store_values,
)

_FLAG = gl.constexpr("raised")


# ---------------------------------------------------------------- P


@gluon.jit
def _weights_partition(
    q, rings, lse, parts, place, scale, sinks, share, BUILD: gl.constexpr, MLA: gl.constexpr
):  # fmt: skip
    BLOCK_N: gl.constexpr = BUILD.block_n
    ACC: gl.constexpr = accumulator(BLOCK_N)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    IS_PACKED: gl.constexpr = place.cu_q is not None
    flag_declare(_FLAG, gl.program_id(0))
    it = 0
    while share.left > 0:
        seq = sequence(place, share, BUILD)
        segment = segment_of(place, share, seq, BUILD)
        if segment.count > 0:
            if not BUILD.is_fixed:
                leave_note(place, parts, share, seq, segment, BUILD)
            m, h = unit_rows(share, ROW, BUILD)
            owned = m < seq.q_used
            base = row_offsets(q, seq, m, h, IS_PACKED)
            q_tile = _load_queries(q.ptr, base, owned, rings, MLA)
            start = gl.maximum(m + seq.left, seq.low)
            stop = gl.where(owned, gl.minimum(m + seq.right + 1, seq.high), 0)
            ref = gl.full([ROWS], NO_REFERENCE, gl.float32, ROW)
            sums = sum_in_thread(gl.zeros([ROWS, BLOCK_N], gl.float32, ACC), ROWS, BLOCK_N)
            for t in range(segment.t0, segment.t1):
                ref, sums = _weigh(
                    rings, q_tile, scale, it, t, segment, start, stop, ref, sums, BUILD, MLA
                )
                if t + 1 == segment.t1:
                    _leave_last(rings, it, sums, ref, sinks, h, segment)
                sync_partition()
                mbarrier.arrive(rings.p_full.index(it % PAIRS), count=1)
                it += 1
            store_statistics(lse, parts, place, sinks, share, seq, segment, ref, sums, BUILD)
        share = advance(place, share, seq, segment, BUILD)
    for i in range(gl.maximum(it - PAIRS, 0), it):
        barrier_sync(P_EMPTY + i % PAIRS, FROM_BOTH, 4)


@gluon.jit
def _load_queries(ptr, base, owned, rings, MLA: gl.constexpr):
    """Q: pieces that registers hold, as `packed` has them; the others go to shared memory."""
    KEPT: gl.constexpr = MLA.kept
    DTYPE: gl.constexpr = rings.latent.dtype
    held = (packed(load_columns(ptr, base, owned, 2 * HALF, REST, DTYPE), REST),)
    for i in gl.static_range(KEPT):
        x = load_columns(ptr, base, owned, i * PIECE, PIECE, DTYPE)
        held = held + (packed(x, PIECE),)
    for i in gl.static_range(KEPT, 2 * HALF // PIECE):
        rings.q.index(i - KEPT).store(load_columns(ptr, base, owned, i * PIECE, PIECE, DTYPE))
    if KEPT < 2 * HALF // PIECE:
        fence_async_shared()
        sync_partition()
    return held


@gluon.jit
def _issue_scores(rings, held, it, BUILD: gl.constexpr, MLA: gl.constexpr):
    """S of a tile, on its way: each part as it arrives."""
    BLOCK_N: gl.constexpr = BUILD.block_n
    KEPT: gl.constexpr = MLA.kept
    PIECES: gl.constexpr = HALF // PIECE
    DTYPE: gl.constexpr = rings.latent.dtype
    pair = it % PAIRS
    mbarrier.wait(rings.rest_full.index(pair), (it // PAIRS) & 1)
    s = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator(BLOCK_N))
    k = rings.rest.index(pair).reshape([BLOCK_N, REST]).permute((1, 0))
    s = warpgroup_mma(left_operand(held[0], DTYPE, REST, BUILD), k, s, use_acc=False, is_async=True)
    for side in gl.static_range(2):
        half = 2 * it + side
        slot = half % MLA.halves
        mbarrier.wait(rings.half_full.index(slot), (half // MLA.halves) & 1)
        k_half = rings.latent.index(slot).reshape([BLOCK_N, HALF])
        for i in gl.static_range(side * PIECES, (side + 1) * PIECES):
            k = k_half.slice(i % PIECES * PIECE, PIECE, 1).permute((1, 0))
            if i < KEPT:
                q = left_operand(held[i + 1], DTYPE, PIECE, BUILD)
                s = warpgroup_mma(q, k, s, is_async=True)
            else:
                s = warpgroup_mma(rings.q.index(i - KEPT), k, s, is_async=True)
    return s


@gluon.jit
def _weigh(
    rings, held, scale, it, t, segment, start, stop, ref, sums, BUILD: gl.constexpr,
    MLA: gl.constexpr,
):  # fmt: skip
    """P of a tile, in shared memory. Returns: ref, sums."""
    BLOCK_N: gl.constexpr = BUILD.block_n
    pair = it % PAIRS
    n = t * BLOCK_N
    s = _issue_scores(rings, held, it, BUILD, MLA)
    s = warpgroup_mma_wait(0, [s])
    barrier_arrive(REST_EMPTY + pair, TO_PRODUCER, 4)
    if (n < segment.whole_start) | (n + BLOCK_N > segment.whole_stop):
        s = mask_columns(s, start - n, stop - n, MLA.has_start, ROWS, BLOCK_N)
    top = gl.max(s, 1) * scale
    # It is a barrier too: past it no warp reads the tile any more.
    flag_vote(_FLAG, 0, top - ref, LIMIT_PTX)
    raised = flag_read(_FLAG, it)
    if it >= PAIRS:
        barrier_sync(P_EMPTY + pair, FROM_BOTH, 4)
    if raised != 0:
        new = gl.where(top - ref >= LIMIT, top, ref)
        shrink = exp2_fast(ref - new)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
        rings.shrink.index(pair).store(shrink)
        ref = new
    p = exp2_fast(s * scale - ref[:, None])
    sums = sums + sum_in_thread(p, ROWS, BLOCK_N)
    rings.raised.index(pair).store(
        gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0])) + raised
    )
    rings.weights.index(pair).store(p.to(rings.weights.dtype))
    if (n < segment.start) | (n + BLOCK_N > segment.stop):
        for side in gl.static_range(2):
            slot = (2 * it + side) % MLA.halves
            clear_rows(rings.latent, slot, segment.start - n, segment.stop - n, BLOCK_N, HALF)
    fence_async_shared()
    return ref, sums


@gluon.jit
def _leave_last(rings, it, sums, ref, sinks, h, segment):
    """What O is multiplied by at the end of a segment."""
    rings.last.index(it % PAIRS).store(last_factor(sums, ref, sinks, h, segment))


# ---------------------------------------------------------------- O


@gluon.jit
def _values_partition(
    rings, out, parts, place, share, SIDE: gl.constexpr, BUILD: gl.constexpr, MLA: gl.constexpr
):  # fmt: skip
    """Columns of O from SIDE * HALF on."""
    BLOCK_N: gl.constexpr = BUILD.block_n
    ACC: gl.constexpr = accumulator(HALF)
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    FLAG: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    it = 0
    while share.left > 0:
        seq = sequence(place, share, BUILD)
        segment = segment_of(place, share, seq, BUILD)
        if segment.count > 0:
            acc = gl.zeros([ROWS, HALF], gl.float32, ACC)
            factor = gl.full([ROWS], 0.0, gl.float32, ROW)
            for _ in range(segment.t0, segment.t1):
                pair = it % PAIRS
                slot = (2 * it + SIDE) % MLA.halves
                mbarrier.wait(rings.p_full.index(pair), (it // PAIRS) & 1)
                if gl.sum(rings.raised.index(pair).load(FLAG), 0) != 0:
                    acc = acc * rings.shrink.index(pair).load(ROW)[:, None]
                v = rings.latent.index(slot).reshape([BLOCK_N, HALF])
                acc = warpgroup_mma(rings.weights.index(pair), v, acc, is_async=True)
                # Of the last tile alone it means something.
                factor = rings.last.index(pair).load(ROW)
                acc = warpgroup_mma_wait(0, [acc])
                barrier_arrive(HALF_EMPTY + slot, TO_PRODUCER, 4)
                barrier_arrive(P_EMPTY + pair, FROM_BOTH, 4)
                it += 1
            # Once more, for they would have taken registers from the loop.
            seq = sequence(place, share, BUILD)
            segment = segment_of(place, share, seq, BUILD)
            # Without a tile O is 0, whatever it is multiplied by.
            acc = acc * factor[:, None]
            store_values(
                acc, out, parts, place, share, seq, segment, SIDE * HALF, HALF, BUILD
            )  # fmt: skip
        share = advance(place, share, seq, segment, BUILD)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _mla_cache_fwd_hopper_kernel(
    k_desc, rest_desc, q, out, lse, parts, place, scale, sinks, BUILD: gl.constexpr,
    MLA: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = MLA.halves
    BLOCK_N: gl.constexpr = BUILD.block_n
    DTYPE: gl.constexpr = k_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_N, 16, rank=2)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_tile = gl.allocate_shared_memory(DTYPE, [2 * HALF // PIECE - MLA.kept, ROWS, PIECE], QUERIES)
    latent = gl.allocate_shared_memory(DTYPE, [HALVES, 1, BLOCK_N, HALF], k_desc.layout)
    rest = gl.allocate_shared_memory(DTYPE, [PAIRS, 1, BLOCK_N, REST], rest_desc.layout)
    weights = gl.allocate_shared_memory(DTYPE, [PAIRS, ROWS, BLOCK_N], WEIGHTS)
    raised = gl.allocate_shared_memory(gl.int32, [PAIRS, 1], PLAIN)
    shrink = gl.allocate_shared_memory(gl.float32, [PAIRS, ROWS], PLAIN)
    last = gl.allocate_shared_memory(gl.float32, [PAIRS, ROWS], PLAIN)
    half_full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], BARRIER)
    rest_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [PAIRS, 1], BARRIER)
    for i in gl.static_range(HALVES):
        mbarrier.init(half_full.index(i), count=1)
    for i in gl.static_range(PAIRS):
        mbarrier.init(rest_full.index(i), count=1)
        mbarrier.init(p_full.index(i), count=1)
    fence_async_shared()
    rings = Rings(
        q_tile, latent, rest, weights, raised, shrink, last, half_full, rest_full, p_full
    )  # fmt: skip
    share = find_share(place, parts, BUILD)
    OF_VALUES: gl.constexpr = MLA.registers[0]
    OF_PRODUCER: gl.constexpr = MLA.registers[1]
    gl.warp_specialize(
        [
            (_weights_partition, (q, rings, lse, parts, place, scale, sinks, share, BUILD, MLA)),
            (_values_partition, (rings, out, parts, place, share, 0, BUILD, MLA)),
            (_values_partition, (rings, out, parts, place, share, 1, BUILD, MLA)),
            (load_partition, (k_desc, rest_desc, rings, place, share, BUILD, MLA)),
        ],
        [4, 4, 1],
        [OF_VALUES, OF_VALUES, OF_PRODUCER],
    )
