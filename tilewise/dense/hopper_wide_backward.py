"""dK and dV of wide heads (sm_90): one warp group for dV, one for dK.

Dims: as in `hopper_backward.py`, but a program owns 64 keys: dK and dV of 128 would take every
    register that there is at 256 columns.
Grid: one program for every tile of keys and kv head.
Math: as in `triton_backward.py`. Group 0 computes S^T, P^T and dV, group 1 dP^T, dS^T and dK: each
    holds one sum of 64 keys, and its left operand comes straight from registers. P^T passes from
    group 0 to group 1 through shared memory, rounded as it is for dV. dQ is of
    `hopper_query_backward.py`.
Deterministic: yes.
Units: scores in log2 units.

Roles. One producer warp copies by TMA. A group's iteration: P (or dS) from the product that came
out of the iteration before; dV (or dK) on its way; S^T (or dP^T) of the next block behind it. While
one group is at its exponents the other multiplies. Barriers:
    keys_full: K and V have arrived.
    q_full, do_full [slot]: a block's rows have arrived; with Q come lse and delta.
    empty [slot]: both groups are done with a block: group 0 with dV, group 1 with dK, which comes
        after S^T and dP^T of the block. The producer sends one block more than there are, for the
        S^T and dP^T that nobody uses.
    p_full [slot]: group 0 has stored P. It stores that of the block that has the slot next once its
        Q has arrived, so after `empty`, so after group 1 has read this one.
    keys_free: both groups are done with all of shared memory, where dK and dV are then staged.
    Turn (a named barrier each): a group issues its two products after the other has; group 1 gives
        group 0 the first turn, and the last is one that nobody takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    FIRST_FREE,
    barrier_arrive,
    barrier_sync,
    fence_async_shared,
    gl,
    gluon,
    load_columns,
    mbarrier,
    pack_pairs,
    tma_store_wait,
    unpack_pairs,
    warpgroup_mma_wait,
)
from .hopper_backward_common import (
    BLOCK_M,
    Descriptors,
    find_tile,
    find_work,
    load_partition,
    next_block,
    probabilities,
    sequence_of,
)
from .hopper_producer import ROWS
from .hopper_products import (
    accumulator,
    issue_product,
    issue_sum,
    parts_of,
    store_result,
    tile_at,
    wait_for_sum,
    zero_sum,
)

BLOCK_N = gl.constexpr(64)
_N_GROUPS, _THREADS = gl.constexpr(2), gl.constexpr(256)


class Memory(NamedTuple):
    """Shared memory and its barriers, as the module's docstring has them. p: by slot, as
    `_store_pairs` has it."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    p: Any
    keys_full: Any
    keys_free: Any
    q_full: Any
    do_full: Any
    empty: Any
    p_full: Any
    landing: Any


@gluon.jit
def _values_partition(descs, memory, call, tile, dv_out, BUILD: gl.constexpr):
    """Group 0: S^T, P^T and dV."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    WIDTH: gl.constexpr = BUILD.width
    VALUE_WIDTH: gl.constexpr = BUILD.value_width
    PRODUCT: gl.constexpr = accumulator(BLOCK_M)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    DTYPE: gl.constexpr = memory.q.dtype
    work = find_work(call, tile, BUILD)
    dv, dv_rest = zero_sum(VALUE_WIDTH)
    mbarrier.wait(memory.keys_full.index(0), 0)
    mbarrier.wait(memory.q_full.index(0), 0)
    s = issue_product(tile_at(memory.k, 0, ROWS, DIM), memory.q, 0, WIDTH)
    s = warpgroup_mma_wait(0, [s])
    head, i = 0, 0
    for j in range(work.n_all):
        slot, phase, after, after_phase, zero = _slots(j, BUILD)
        lse = load_columns(memory.rows.index(slot), 0, BLOCK_M, COLUMN)
        p, p_inner = probabilities(s, lse, call, tile, work, head, i, 0, BUILD)
        head, i = next_block(work, head, i)
        pairs = pack_pairs(p, DTYPE, ROWS, BLOCK_M)
        if BUILD.is_capped:
            _store_pairs(memory.p.index(slot), pack_pairs(p_inner, DTYPE, ROWS, BLOCK_M), BLOCK_M)
        else:
            _store_pairs(memory.p.index(slot), pairs, BLOCK_M)
        mbarrier.arrive(memory.p_full.index(slot), count=1)
        mbarrier.wait(memory.do_full.index(slot), phase)
        _take_turn(0, BUILD)
        left = unpack_pairs(pairs, DTYPE, PRODUCT, ROWS, BLOCK_M)
        dv, dv_rest = issue_sum(left, memory.dout, slot, dv, dv_rest, VALUE_WIDTH)
        mbarrier.wait(memory.q_full.index(after), after_phase)
        s = issue_product(tile_at(memory.k, zero, ROWS, DIM), memory.q, after, WIDTH)
        _pass_turn(0, BUILD)
        dv, dv_rest = wait_for_sum(parts_of(WIDTH), dv, dv_rest, VALUE_WIDTH)
        mbarrier.arrive(memory.empty.index(slot), count=1)
        s = warpgroup_mma_wait(0, [s])
    # The turn that nobody takes.
    _take_turn(0, BUILD)
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    _store(
        descs.dv, memory.v, dv_out, dv, dv_rest, memory, call, tile,
        VALUE_DIM, VALUE_WIDTH, BUILD.value_columns, BUILD,
    )  # fmt: skip


@gluon.jit
def _keys_partition(descs, memory, call, tile, dk_out, BUILD: gl.constexpr):
    """Group 1: dP^T, dS^T and dK."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    WIDTH: gl.constexpr = BUILD.width
    VALUE_WIDTH: gl.constexpr = BUILD.value_width
    PRODUCT: gl.constexpr = accumulator(BLOCK_M)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    DTYPE: gl.constexpr = memory.q.dtype
    work = find_work(call, tile, BUILD)
    dk, dk_rest = zero_sum(WIDTH)
    _pass_turn(1, BUILD)
    mbarrier.wait(memory.keys_full.index(0), 0)
    mbarrier.wait(memory.do_full.index(0), 0)
    v = tile_at(memory.v, 0, ROWS, VALUE_DIM)
    dp = issue_product(v, memory.dout, 0, VALUE_WIDTH)
    dp = warpgroup_mma_wait(0, [dp])
    for j in range(work.n_all):
        slot, phase, after, after_phase, zero = _slots(j, BUILD)
        mbarrier.wait(memory.q_full.index(slot), phase)
        delta = load_columns(memory.rows.index(slot), BLOCK_M, BLOCK_M, COLUMN)
        mbarrier.wait(memory.p_full.index(slot), phase)
        pairs = _load_pairs(memory.p.index(slot), BLOCK_M)
        p = unpack_pairs(pairs, DTYPE, PRODUCT, ROWS, BLOCK_M).to(gl.float32)
        ds = (p * (dp - delta[None, :])).to(DTYPE)
        _take_turn(1, BUILD)
        dk, dk_rest = issue_sum(ds, memory.q, slot, dk, dk_rest, WIDTH)
        mbarrier.wait(memory.do_full.index(after), after_phase)
        v = tile_at(memory.v, zero, ROWS, VALUE_DIM)
        dp = issue_product(v, memory.dout, after, VALUE_WIDTH)
        _pass_turn(1, BUILD)
        dk, dk_rest = wait_for_sum(parts_of(VALUE_WIDTH), dk, dk_rest, WIDTH)
        mbarrier.arrive(memory.empty.index(slot), count=1)
        dp = warpgroup_mma_wait(0, [dp])
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    dk = dk * call.terms.gradient_scale
    if parts_of(WIDTH) == 2:
        dk_rest = dk_rest * call.terms.gradient_scale
    _store(
        descs.dk, memory.k, dk_out, dk, dk_rest, memory, call, tile,
        DIM, WIDTH, BUILD.columns, BUILD,
    )  # fmt: skip


@gluon.jit
def _take_turn(GROUP: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_sync(FIRST_FREE + GROUP, _THREADS, 4)


@gluon.jit
def _pass_turn(GROUP: gl.constexpr, BUILD: gl.constexpr):
    if BUILD.takes_turns:
        barrier_arrive(FIRST_FREE + 1 - GROUP, _THREADS, 4)


@gluon.jit
def _slots(j, BUILD: gl.constexpr):
    """Slot and phase of block j and of the one after it; and 0, which the compiler does not know:
    it would move the descriptors of shared memory out of the loop, and then spill them."""
    after = j + 1
    return (
        j % BUILD.slots, (j // BUILD.slots) & 1, after % BUILD.slots, (after // BUILD.slots) & 1,
        j >> 30,
    )  # fmt: skip


# ---------------------------------------------------------------- pairs
#
# Both groups hold `[keys, rows]` in the same way, so a thread reads what its twin wrote: 16 bytes
# at a time, those of a warp's threads one after the other.


@gluon.constexpr_function
def _pairs_layout(n):
    in_thread = [[1], [2]] + [[512 << i] for i in range(8) if 512 << i < n]
    lanes = [[4], [8], [16], [32], [64]]
    return gl.DistributedLinearLayout(in_thread, lanes, [[128], [256]], [], [n])


@gluon.jit
def _store_pairs(to, pairs, COLS: gl.constexpr):
    """What `pack_pairs` packed of `[64, COLS]`."""
    x = pairs.reshape([4, 2, 8, COLS // 16, 2, 4]).permute((3, 0, 2, 5, 4, 1))
    x = x.reshape([ROWS * COLS // 2])
    to.store(gl.convert_layout(x, _pairs_layout(ROWS * COLS // 2), assert_trivial=True))


@gluon.jit
def _load_pairs(to, COLS: gl.constexpr):
    x = to.load(_pairs_layout(ROWS * COLS // 2))
    x = x.reshape([COLS // 16, 4, 8, 4, 2, 2]).permute((1, 5, 2, 0, 4, 3))
    return x.reshape([ROWS, COLS // 2])


# ---------------------------------------------------------------- results


@gluon.jit
def _store(
    desc, ring, out, x, rest, memory, call, tile,
    DIM: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """A group's sum."""
    seq, n0 = sequence_of(call, tile, BUILD)
    at = [seq.batch, tile.kv_head, seq.k_first + n0, 0]
    n_rows = seq.k_stored - n0
    mbarrier.wait(memory.keys_free.index(0), 0)
    store_result(desc, ring, 0, out, at, x, rest, n_rows, COLUMNS, DIM, WIDTH, BUILD)
    # Shared memory stays until all of it has left.
    tma_store_wait(0)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_bwd_hopper_wide_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc, dk, dv, call,
    heads, BUILD: gl.constexpr,
):  # fmt: skip
    tile = find_tile(call, heads, BUILD)
    descs = Descriptors(q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc)
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    SLOTS: gl.constexpr = BUILD.slots
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    PAIRS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, 1, BLOCK_M, DIM], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [1, 1, 1, ROWS, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [1, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    dout = gl.allocate_shared_memory(
        dout_desc.dtype, [SLOTS, 1, 1, BLOCK_M, VALUE_DIM], dout_desc.layout
    )
    rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * BLOCK_M], rows_desc.layout)
    p = gl.allocate_shared_memory(gl.int32, [SLOTS, ROWS * BLOCK_M // 2], PAIRS)
    keys_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    p_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(keys_full.index(0), count=1)
    mbarrier.init(keys_free.index(0), count=_N_GROUPS)
    mbarrier.init(landing.index(0), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_N_GROUPS)
        mbarrier.init(p_full.index(i), count=1)
    fence_async_shared()
    memory = Memory(
        q, k, v, dout, rows, p, keys_full, keys_free, q_full, do_full, empty, p_full, landing
    )
    GROUP_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    gl.warp_specialize(
        [
            (_values_partition, (descs, memory, call, tile, dv, BUILD)),
            (_keys_partition, (descs, memory, call, tile, dk, BUILD)),
            (load_partition, (descs, memory, call, tile, BUILD)),
        ],
        [4, 1],
        [GROUP_REGISTERS, PRODUCER_REGISTERS],
    )
