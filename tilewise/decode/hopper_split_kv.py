"""Attention over a cache on Hopper (sm_90), for units of many rows: copies by TMA, one consumer.

Dims: q `[B, M, H, D]` or packed `[T, H, D]`; k and v `[R, N, G, D]` or `[pages, P, G, D]` with P a
    multiple of BLOCK_N; out as q; parts as in `triton_split_kv.py`. A unit is 64 rows: queries
    times heads of one kv head.
Grid: teams x groups of heads, two programs a multiprocessor: while one is at its exponents the
    other multiplies. See `triton_plan.py`.
Math: as `hopper_mla.py`: P = 2^(scale S - ref), with a reference that is raised where the maximum
    passes it by LIMIT.
Units: scores and references in log2 units; lse natural, fp32.

Roles. One warp copies tiles of keys and values by TMA, one warp group multiplies. Both count the
same tiles of the same units. A slot of K or V is filled after `empty` (a named barrier, where the
consumer has arrived once for each time that it was filled), which completes `full`. Values that no
row of the unit sees may be NaN: the consumer writes zeros there before it multiplies.
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
    sum_in_thread,
    sync_partition,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from .hopper_plan import (
    ROWS,
    advance,
    find_share,
    leave_note,
    row_of_tile,
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
# Consumer and producer.
_EVERYONE = gl.constexpr(128 + 32)


class SplitBuild(NamedTuple):
    """slots: tiles of K, and as many of V, 5 at most. groups: of heads, of one kv head. has_start:
    rows may not see the first keys. registers: of the producer; the consumer has the rest."""

    slots: int
    groups: int
    has_start: bool
    registers: int


class Rings(NamedTuple):
    """Shared memory by slot."""

    k: Any
    v: Any
    k_full: Any
    v_full: Any


@gluon.jit
def _load_partition(
    k_desc, v_desc, rings, place, share, BUILD: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    SLOTS: gl.constexpr = SPLIT.slots
    BLOCK_N: gl.constexpr = BUILD.block_n
    head = share.group // SPLIT.groups
    it = 0
    while share.left > 0:
        seq = sequence(place, share, BUILD)
        segment = segment_of(place, share, seq, BUILD)
        # Looked up one tile ahead, so that no copy waits for its table.
        row = row_of_tile(place, seq.index, segment.t0, BUILD)
        for t in range(segment.t0, segment.t1):
            next_row = row_of_tile(place, seq.index, t + 1, BUILD)
            slot = it % SLOTS
            n = t * BLOCK_N
            if BUILD.page > 0:
                n = n % BUILD.page
            if it >= SLOTS:
                barrier_sync(FIRST_FREE + slot, _EVERYONE, 1)
            full = rings.k_full.index(slot)
            mbarrier.expect(full, k_desc.block_type.nbytes)
            tma_load(k_desc, [row, head, n, 0], full, rings.k.index(slot))
            if it >= SLOTS:
                barrier_sync(FIRST_FREE + SLOTS + slot, _EVERYONE, 1)
            full = rings.v_full.index(slot)
            mbarrier.expect(full, v_desc.block_type.nbytes)
            tma_load(v_desc, [row, head, n, 0], full, rings.v.index(slot))
            row = next_row
            it += 1
        share = advance(place, share, seq, segment, BUILD)
    # Meet the arrivals that no later copy waits for.
    for i in range(gl.maximum(it - SLOTS, 0), it):
        barrier_sync(FIRST_FREE + i % SLOTS, _EVERYONE, 1)
        barrier_sync(FIRST_FREE + SLOTS + i % SLOTS, _EVERYONE, 1)


@gluon.jit
def _mma_partition(
    q, rings, out, lse, parts, place, scale, sinks, share, BUILD: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    BLOCK_N: gl.constexpr = BUILD.block_n
    DIM: gl.constexpr = BUILD.dims[0]
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(BLOCK_N))
    DTYPE: gl.constexpr = rings.k.dtype
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
            q_tile = packed(load_columns(q.ptr, base, owned, 0, DIM, DTYPE), DIM)
            start = gl.maximum(m + seq.left, seq.low)
            stop = gl.where(owned, gl.minimum(m + seq.right + 1, seq.high), 0)
            ref = gl.full([ROWS], NO_REFERENCE, gl.float32, ROW)
            zero = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator(BLOCK_N))
            sums = sum_in_thread(zero, ROWS, BLOCK_N)
            acc = gl.zeros([ROWS, DIM], gl.float32, accumulator(DIM))
            for t in range(segment.t0, segment.t1):
                acc, ref, sums = _add_tile(
                    rings, q_tile, scale, it, t, segment, start, stop, acc, ref, sums, BUILD, SPLIT
                )
                it += 1
            store_statistics(lse, parts, place, sinks, share, seq, segment, ref, sums, BUILD)
            _, h = unit_rows(share, ROW, BUILD)
            factor = last_factor(sums, ref, sinks, h, segment)
            factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
            store_values(
                acc * factor[:, None], out, parts, place, share, seq, segment, 0, DIM, BUILD
            )
        share = advance(place, share, seq, segment, BUILD)


@gluon.jit
def _add_tile(
    rings, q_tile, scale, it, t, segment, start, stop, acc, ref, sums, BUILD: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """O with a tile of keys in it. Returns: acc, ref, sums."""
    SLOTS: gl.constexpr = SPLIT.slots
    BLOCK_N: gl.constexpr = BUILD.block_n
    DIM: gl.constexpr = BUILD.dims[0]
    DTYPE: gl.constexpr = rings.k.dtype
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, accumulator(DIM), 2)
    slot = it % SLOTS
    phase = (it // SLOTS) & 1
    n = t * BLOCK_N
    mbarrier.wait(rings.k_full.index(slot), phase)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator(BLOCK_N))
    k = rings.k.index(slot).reshape([BLOCK_N, DIM]).permute((1, 0))
    q_left = left_operand(q_tile, DTYPE, DIM, BUILD)
    s = warpgroup_mma(q_left, k, zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    barrier_arrive(FIRST_FREE + slot, _EVERYONE, 4)
    if (n < segment.whole_start) | (n + BLOCK_N > segment.whole_stop):
        s = mask_columns(s, start - n, stop - n, SPLIT.has_start, ROWS, BLOCK_N)
    top = gl.max(s, 1) * scale
    flag_vote(_FLAG, 0, top - ref, LIMIT_PTX)
    if flag_read(_FLAG, it) != 0:
        new = gl.where(top - ref >= LIMIT, top, ref)
        shrink = exp2_fast(ref - new)
        sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        ref = new
    p = exp2_fast(s * scale - ref[:, None])
    sums = sums + sum_in_thread(p, ROWS, BLOCK_N)
    left = gl.convert_layout(p.to(DTYPE), P_LAYOUT)
    mbarrier.wait(rings.v_full.index(slot), phase)
    if (n < segment.start) | (n + BLOCK_N > segment.stop):
        clear_rows(rings.v, slot, segment.start - n, segment.stop - n, BLOCK_N, DIM)
        fence_async_shared()
        sync_partition()
    v = rings.v.index(slot).reshape([BLOCK_N, DIM])
    acc = warpgroup_mma(left, v, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    barrier_arrive(FIRST_FREE + SLOTS + slot, _EVERYONE, 4)
    return acc, ref, sums


@gluon.jit
def _cache_attention_fwd_hopper_kernel(
    k_desc, v_desc, q, out, lse, parts, place, scale, sinks, BUILD: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    SLOTS: gl.constexpr = SPLIT.slots
    TILE: gl.constexpr = [SLOTS, 1, 1, BUILD.block_n, BUILD.dims[0]]
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k = gl.allocate_shared_memory(k_desc.dtype, TILE, k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, TILE, v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    for i in gl.static_range(SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    rings = Rings(k, v, k_full, v_full)
    share = find_share(place, parts, BUILD)
    REGISTERS: gl.constexpr = SPLIT.registers
    gl.warp_specialize(
        [
            (_mma_partition, (q, rings, out, lse, parts, place, scale, sinks, share, BUILD, SPLIT)),
            (_load_partition, (k_desc, v_desc, rings, place, share, BUILD, SPLIT)),
        ],
        [1],
        [REGISTERS],
    )
