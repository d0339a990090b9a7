"""Backward of the hopper backend (sm_90): five products in one pass, warp specialised.

Dims: a program owns 128 keys of one kv head, 64 to each of two consumer warp groups, and visits
    blocks of 64 query rows, head after head of the group.
Grid: one program for every tile of keys and kv head.
Math: as in `triton_backward.py`. S^T and dP^T `[keys, rows]` are computed transposed, so that P^T
    and dS^T are left operands of dV and dK straight from registers. dQ of a block needs the dS of
    all keys: both consumers put theirs in shared memory, each multiplies it by half of K's columns,
    and TMA adds the result to an fp32 buffer in device memory (see `hopper_rows.py` for its order).
    Without `has_dq` it is left to `hopper_query_backward.py`, and two products are made twice.
Deterministic: dK and dV are; dQ is not, since programs add to it in any order.
Units: scores in log2 units.

Roles. One producer warp copies by TMA. A consumer's iteration: dP^T on its way; P; dV on its way;
dS to shared memory; dK on its way; dQ on its way once both have stored dS; S^T of the next block on
its way, so that it runs while dQ leaves; dQ to shared memory and off.

With `has_queries` dQ is a third group's: there the consumers' sums leave it registers enough. It
multiplies all of dS by all of K, reads dS once, not twice, and nobody waits for dQ. So consumers
need not keep step: P and dS of a block are made from S^T and dP^T that are there, then all products
of the consumer are on their way at once, S^T and dP^T of the next block among them, and one
consumer multiplies while the other is at its exponents. They take turns at that. Barriers:
    keys_full: K and V have arrived.
    q_full, do_full [slot]: a block's rows have arrived; with Q come lse and delta.
    empty [slot]: both consumers are done with a block. The producer sends one Q more than there
        are blocks, for the S^T that nobody uses.
    ds_full [half]: both consumers have stored dS. Two halves take turns: who stores dS of block
        j + 2 has seen the other's dS of j + 1, which comes after its dQ of j.
    ds_free [half]: the third group has read it, if there is one.
    keys_free: all are done with K, so that dK may be staged there; V is read by its owner alone.
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
    sync_partition,
    tma_reduce_add,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from .hopper_backward_common import (
    BLOCK_M,
    Descriptors,
    find_tile,
    find_work,
    load_partition,
    next_block,
    number_of,
    probabilities,
    sequence_of,
)
from .hopper_producer import ROWS
from .hopper_products import (
    accumulator,
    issue_product,
    left_operand,
    store_result,
    tile_at,
)

BLOCK_N = gl.constexpr(128)
_N_CONSUMERS = gl.constexpr(2)
# dS of blocks in shared memory.
DS_SLOTS = gl.constexpr(3)
# Of both, for barriers between them.
_THREADS = gl.constexpr(256)
# A row of the buffer that dQ is added up in.
BUFFER_COLUMNS = gl.constexpr(256)


class Memory(NamedTuple):
    """Shared memory and its barriers, as the module's docstring has them."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    ds: Any
    dq: Any
    keys_full: Any
    keys_free: Any
    q_full: Any
    do_full: Any
    empty: Any
    ds_full: Any
    ds_free: Any
    landing: Any


# ---------------------------------------------------------------- consumers


@gluon.jit
def _own_keys(ring, zero, ID: gl.constexpr, DIM: gl.constexpr, IS_KEPT: gl.constexpr):
    """A consumer's keys as a left operand. zero: always 0, but the compiler does not know: it would
    move the descriptors of shared memory out of the loop, and then spill them. IS_KEPT: in
    registers."""
    tile = tile_at(ring, ID + zero, ROWS, DIM)
    if IS_KEPT:
        return tile.load(left_operand(BLOCK_M))
    else:
        return tile


@gluon.jit
def _mma_partition(
    descs, memory, call, tile, dk_out, dv_out, ID: gl.constexpr, BUILD: gl.constexpr
):
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    work = find_work(call, tile, BUILD)
    dk = gl.zeros([ROWS, DIM], gl.float32, accumulator(DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, accumulator(VALUE_DIM))
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    mbarrier.wait(memory.keys_full.index(0), 0)
    k_own = _own_keys(memory.k, 0, ID, DIM, BUILD.keeps_keys)
    v_own = _own_keys(memory.v, 0, ID, VALUE_DIM, BUILD.keeps_values)
    mbarrier.wait(memory.q_full.index(0), 0)
    s = issue_product(k_own, memory.q, 0, DIM)
    head, i = 0, 0
    if BUILD.has_dq:
        if ID == 1:
            _pass_turn(ID)
        mbarrier.wait(memory.do_full.index(0), 0)
        dp = issue_product(v_own, memory.dout, 0, VALUE_DIM)
        s, dp = warpgroup_mma_wait(0, [s, dp])
        start, before = 0, 0
        if not BUILD.has_queries:
            # There is no dS before the first block's.
            s, dp, dk, dv = _visit_in_turn(
                s, dp, dk, dv, k_own, v_own, descs, memory, call, tile, work, 0, head, i, before,
                True, ID, BUILD,
            )  # fmt: skip
            before = number_of(work, head, i)
            head, i = next_block(work, head, i)
            start = 1
        for j in range(start, work.n_all):
            s, dp, dk, dv = _visit_in_turn(
                s, dp, dk, dv, k_own, v_own, descs, memory, call, tile, work, j, head, i, before,
                False, ID, BUILD,
            )  # fmt: skip
            before = number_of(work, head, i)
            head, i = next_block(work, head, i)
        if not BUILD.has_queries:
            COLUMNS: gl.constexpr = BUILD.dq_columns
            last = work.n_all - 1
            mbarrier.wait(memory.ds_full.index(last % DS_SLOTS), (last // DS_SLOTS) & 1)
            dq = _issue_dq(memory, last % DS_SLOTS, 0, ID * COLUMNS, COLUMNS, DIM)
            dq = warpgroup_mma_wait(0, [dq])
            tma_store_wait(0)
            sync_partition()
            _send_dq(descs, memory, dq, before, ID, BUILD)
        # The turn that nobody takes.
        if ID == 0:
            _take_turn(ID)
    else:
        s = warpgroup_mma_wait(0, [s])
        for j in range(work.n_all):
            s, dk, dv = _visit(
                s, dk, dv, k_own, v_own, memory, call, tile, work, j, head, i, ID, BUILD
            )
            head, i = next_block(work, head, i)
        # The dO that nobody used has to land while this memory is still the program's.
        last = work.n_all % BUILD.slots
        mbarrier.wait(memory.do_full.index(last), (work.n_all // BUILD.slots) & 1)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    dk = dk * call.terms.gradient_scale
    seq, n0 = sequence_of(call, tile, BUILD)
    at = [seq.batch, tile.kv_head, seq.k_first + n0 + ID * ROWS, 0]
    n_rows = seq.k_stored - n0 - ID * ROWS
    store_result(
        descs.dv, memory.v, ID, dv_out, at, dv, 0, n_rows,
        BUILD.value_columns, VALUE_DIM, VALUE_DIM, BUILD,
    )  # fmt: skip
    mbarrier.wait(memory.keys_free.index(0), 0)
    store_result(
        descs.dk, memory.k, ID, dk_out, at, dk, 0, n_rows, BUILD.columns, DIM, DIM, BUILD
    )  # fmt: skip
    # Shared memory stays until all of it has left.
    tma_store_wait(0)


@gluon.jit
def _visit(
    s, dk, dv, k_own, v_own, memory, call, tile, work, j, head, i,
    ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """One block of rows without dQ. s: its scores. Returns: the scores of the next one, dk, dv."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    DTYPE: gl.constexpr = memory.q.dtype
    slot, phase = j % BUILD.slots, (j // BUILD.slots) & 1
    if not BUILD.keeps_values:
        v_own = _own_keys(memory.v, j >> 30, ID, VALUE_DIM, False)
    if not BUILD.keeps_keys:
        k_own = _own_keys(memory.k, j >> 30, ID, DIM, False)
    mbarrier.wait(memory.do_full.index(slot), phase)
    dp = issue_product(v_own, memory.dout, slot, VALUE_DIM)
    of_rows = memory.rows.index(slot)
    COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_M))
    lse = load_columns(of_rows, 0, BLOCK_M, COLUMN)
    p, p_inner = probabilities(s, lse, call, tile, work, head, i, ID, BUILD)
    left = gl.convert_layout(p.to(DTYPE), left_operand(VALUE_DIM))
    dv = warpgroup_mma(left, tile_at(memory.dout, slot, BLOCK_M, VALUE_DIM), dv, is_async=True)
    delta = load_columns(of_rows, BLOCK_M, BLOCK_M, COLUMN)
    dp = warpgroup_mma_wait(1, [dp])
    ds = (p_inner * (dp - delta[None, :])).to(DTYPE)
    left = gl.convert_layout(ds, left_operand(DIM))
    dk = warpgroup_mma(left, tile_at(memory.q, slot, BLOCK_M, DIM), dk, is_async=True)
    next_slot = (j + 1) % BUILD.slots
    # An accumulator in flight around the loop makes ptxas wait after every product.
    mbarrier.wait(memory.q_full.index(next_slot), ((j + 1) // BUILD.slots) & 1)
    s = issue_product(k_own, memory.q, next_slot, DIM)
    dk, dv = warpgroup_mma_wait(1, [dk, dv])
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    mbarrier.arrive(memory.empty.index(slot), count=1)
    s = warpgroup_mma_wait(0, [s])
    return s, dk, dv


@gluon.jit
def _visit_in_turn(
    s, dp, dk, dv, k_own, v_own, descs, memory, call, tile, work, j, head, i, before,
    IS_FIRST: gl.constexpr, ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """One block of rows, and dQ of the one before it unless that is the third group's. s, dp: the
    block's scores and dP^T. before: the number of the one before. Returns: scores and dP^T of the
    next one, dk, dv."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    DTYPE: gl.constexpr = memory.q.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_M))
    ADDS: gl.constexpr = not BUILD.has_queries
    slot, place, zero = j % BUILD.slots, j % DS_SLOTS, j >> 30
    if not BUILD.keeps_values:
        v_own = _own_keys(memory.v, zero, ID, VALUE_DIM, False)
    if not BUILD.keeps_keys:
        k_own = _own_keys(memory.k, zero, ID, DIM, False)
    of_rows = memory.rows.index(slot)
    lse = load_columns(of_rows, 0, BLOCK_M, COLUMN)
    p, p_inner = probabilities(s, lse, call, tile, work, head, i, ID, BUILD)
    delta = load_columns(of_rows, BLOCK_M, BLOCK_M, COLUMN)
    ds = (p_inner * (dp - delta[None, :])).to(DTYPE)
    mbarrier.wait(memory.ds_free.index(place), ((j // DS_SLOTS) & 1) ^ 1)
    memory.ds.index(place * _N_CONSUMERS + ID).store(ds)
    fence_async_shared()
    if ADDS:
        # What dQ left by has been read; and a barrier of the warp group for the store above.
        tma_store_wait(0)
    mbarrier.arrive(memory.ds_full.index(place), count=1)
    next_slot, next_phase = (j + 1) % BUILD.slots, ((j + 1) // BUILD.slots) & 1
    p_left = gl.convert_layout(p.to(DTYPE), left_operand(VALUE_DIM))
    ds_left = gl.convert_layout(ds, left_operand(DIM))
    dout, q = tile_at(memory.dout, slot, BLOCK_M, VALUE_DIM), tile_at(memory.q, slot, BLOCK_M, DIM)
    if ADDS:
        # Of the block before; an accumulator of this one's would be in flight around the loop.
        last = (j + DS_SLOTS - 1) % DS_SLOTS
        if not IS_FIRST:
            mbarrier.wait(memory.ds_full.index(last), ((j - 1) // DS_SLOTS) & 1)
        _take_turn(ID)
        dv = warpgroup_mma(p_left, dout, dv, is_async=True)
        dk = warpgroup_mma(ds_left, q, dk, is_async=True)
        COLUMNS: gl.constexpr = BUILD.dq_columns
        if IS_FIRST:
            _pass_turn(ID)
            dk, dv = warpgroup_mma_wait(0, [dk, dv])
        else:
            dq = _issue_dq(memory, last, zero, ID * COLUMNS, COLUMNS, DIM)
            _pass_turn(ID)
            dk, dv, dq = warpgroup_mma_wait(0, [dk, dv, dq])
            mbarrier.arrive(memory.ds_free.index(last), count=1)
        dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
        mbarrier.arrive(memory.empty.index(slot), count=1)
        mbarrier.wait(memory.q_full.index(next_slot), next_phase)
        s = issue_product(k_own, memory.q, next_slot, DIM)
        # Before dP, for which there would be no registers.
        if not IS_FIRST:
            _send_dq(descs, memory, dq, before, ID, BUILD)
        mbarrier.wait(memory.do_full.index(next_slot), next_phase)
        dp = issue_product(v_own, memory.dout, next_slot, VALUE_DIM)
    else:
        mbarrier.wait(memory.q_full.index(next_slot), next_phase)
        mbarrier.wait(memory.do_full.index(next_slot), next_phase)
        _take_turn(ID)
        dv = warpgroup_mma(p_left, dout, dv, is_async=True)
        dk = warpgroup_mma(ds_left, q, dk, is_async=True)
        s = issue_product(k_own, memory.q, next_slot, DIM)
        dp = issue_product(v_own, memory.dout, next_slot, VALUE_DIM)
        _pass_turn(ID)
        dk, dv = warpgroup_mma_wait(2, [dk, dv])
        dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
        mbarrier.arrive(memory.empty.index(slot), count=1)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    return s, dp, dk, dv


@gluon.jit
def _send_dq(descs, memory, dq, number, ID: gl.constexpr, BUILD: gl.constexpr):
    """A consumer's half of dQ's columns of a block, added to the buffer."""
    COLUMNS: gl.constexpr = BUILD.dq_columns
    memory.dq.index(ID).store(_in_registers_order(dq, COLUMNS))
    fence_async_shared()
    sync_partition()
    at = (number * _N_CONSUMERS + ID) * (ROWS * COLUMNS // BUFFER_COLUMNS)
    tma_reduce_add(descs.dq, [at, 0], memory.dq.index(ID))


@gluon.jit
def _take_turn(ID: gl.constexpr):
    barrier_sync(FIRST_FREE + ID, _THREADS, 4)


@gluon.jit
def _pass_turn(ID: gl.constexpr):
    barrier_arrive(FIRST_FREE + 1 - ID, _THREADS, 4)


@gluon.jit
def _issue_dq(
    memory, place, zero, START: gl.constexpr, COLUMNS: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Columns of dQ from START on, over the keys of both consumers, on its way."""
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, accumulator(COLUMNS))
    for i in gl.static_range(_N_CONSUMERS):
        ds = memory.ds.index(place * _N_CONSUMERS + i).permute((1, 0))
        k = tile_at(memory.k, i + zero, ROWS, DIM)
        if COLUMNS < DIM:
            k = k.slice(START, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _query_partition(descs, memory, call, tile, BUILD: gl.constexpr):
    """dQ of block after block, added to the buffer. Two places to leave by take turns."""
    DIM: gl.constexpr = BUILD.dim
    work = find_work(call, tile, BUILD)
    mbarrier.wait(memory.keys_full.index(0), 0)
    head, i = 0, 0
    for j in range(work.n_all):
        place, half = j % DS_SLOTS, j & 1
        mbarrier.wait(memory.ds_full.index(place), (j // DS_SLOTS) & 1)
        dq = _issue_dq(memory, place, j >> 30, 0, DIM, DIM)
        dq = warpgroup_mma_wait(0, [dq])
        # Of the block before the last, dQ has been read.
        tma_store_wait(1)
        mbarrier.arrive(memory.ds_free.index(place), count=1)
        memory.dq.index(half).store(_in_registers_order(dq, DIM))
        fence_async_shared()
        sync_partition()
        at = number_of(work, head, i) * (ROWS * DIM // BUFFER_COLUMNS)
        tma_reduce_add(descs.dq, [at, 0], memory.dq.index(half))
        head, i = next_block(work, head, i)
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    tma_store_wait(0)


@gluon.jit
def _in_registers_order(dq, COLUMNS: gl.constexpr):
    """dQ as rows of the buffer, so that each thread writes 16 bytes: see `hopper_rows.py`."""
    x = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([ROWS * COLUMNS // BUFFER_COLUMNS, BUFFER_COLUMNS])


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc, dk, dv, call,
    heads, BUILD: gl.constexpr,
):  # fmt: skip
    tile = find_tile(call, heads, BUILD)
    descs = Descriptors(q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc)
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    SLOTS: gl.constexpr = BUILD.slots
    COLUMNS: gl.constexpr = BUILD.dq_columns
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    HAS_DQ: gl.constexpr = BUILD.has_dq
    q = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, 1, BLOCK_M, DIM], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, ROWS, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    dout = gl.allocate_shared_memory(
        dout_desc.dtype, [SLOTS, 1, 1, BLOCK_M, VALUE_DIM], dout_desc.layout
    )
    rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * BLOCK_M], rows_desc.layout)
    HAS_QUERIES: gl.constexpr = BUILD.has_queries
    ds, dq = None, None
    if HAS_DQ:
        DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
        ds = gl.allocate_shared_memory(q_desc.dtype, [DS_SLOTS * _N_CONSUMERS, ROWS, BLOCK_M], DS)
        dq = gl.allocate_shared_memory(
            gl.float32, [2, ROWS * COLUMNS // BUFFER_COLUMNS, BUFFER_COLUMNS], dq_desc.layout
        )
    keys_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [DS_SLOTS, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [DS_SLOTS, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(keys_full.index(0), count=1)
    N_READERS: gl.constexpr = _N_CONSUMERS + 1 if HAS_QUERIES else _N_CONSUMERS
    mbarrier.init(keys_free.index(0), count=N_READERS)
    mbarrier.init(landing.index(0), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_N_CONSUMERS)
    N_FREEING: gl.constexpr = 1 if HAS_QUERIES else _N_CONSUMERS
    for i in gl.static_range(DS_SLOTS):
        mbarrier.init(ds_full.index(i), count=_N_CONSUMERS)
        mbarrier.init(ds_free.index(i), count=N_FREEING)
    fence_async_shared()
    memory = Memory(
        q, k, v, dout, rows, ds, dq, keys_full, keys_free, q_full, do_full, empty, ds_full, ds_free,
        landing,
    )  # fmt: skip
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    if HAS_QUERIES:
        # What is left of 65536 by consumers and producer.
        QUERY_REGISTERS: gl.constexpr = 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (_mma_partition, (descs, memory, call, tile, dk, dv, 0, BUILD)),
                (_mma_partition, (descs, memory, call, tile, dk, dv, 1, BUILD)),
                (_query_partition, (descs, memory, call, tile, BUILD)),
                (load_partition, (descs, memory, call, tile, BUILD)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, QUERY_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (descs, memory, call, tile, dk, dv, 0, BUILD)),
                (_mma_partition, (descs, memory, call, tile, dk, dv, 1, BUILD)),
                (load_partition, (descs, memory, call, tile, BUILD)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
