"""Backward of the hopper backend (sm_90): five products in one pass, warp specialised.

Dims: a tile is 128 keys of one kv head, 64 to each of two consumer warp groups, which visit blocks
    of 64 query rows, head after head of the group.
Grid: as many programs as multiprocessors, or one for every tile of keys and kv head if those are
    fewer. A program takes tile after tile from a counter; each tile is one program's alone.
Math: as in `triton_backward.py`. S^T and dP^T `[keys, rows]` are computed transposed, so that P^T
    and dS^T are left operands of dV and dK straight from registers. dQ of a block needs the dS of
    all keys: both consumers put theirs in shared memory, where it is multiplied by K, and TMA adds
    the result to an fp32 buffer in device memory (see `hopper_rows.py` for its order).
    Without `has_dq` it is left to `hopper_query_backward.py`, and two products are made twice.
Deterministic: dK and dV are; dQ is not, since programs add to it in any order.
Units: scores in log2 units.

Roles. One producer warp copies by TMA, two consumer warp groups multiply. Whose dQ is depends on
the registers that a consumer's sums leave:

Head dims up to 64 (`has_queries`): a third group's. A consumer's iteration: dP^T on its way; P; dV
    on its way; dS to shared memory; dK on its way, and S^T of the next block. The third group
    multiplies all of dS by all of K, so dS is read once, and nobody waits for dQ.
Up to 128: the consumers', half of K's columns each. So that none waits for the other's dS, dQ is of
    the block before. A consumer's iteration: P and dS from S^T and dP^T that are there; dV, dK and
    dQ on their way; then S^T and dP^T of the next block, while dQ leaves. They take turns, so that
    one multiplies while the other is at its exponents.
Without `has_dq`: as the first, and there is no dQ.

Barriers:
    keys_full [slot]: K and V have arrived, and before them the mail, which says of which tile (an
        index of -1: of none, and all roles end).
    q_full, do_full [slot]: a block's rows have arrived; with Q come lse and delta.
    empty [slot]: both consumers are done with a block. Of each tile the producer sends one Q more
        than there are blocks, for the S^T that nobody uses.
    ds_full, ds_free [place]: both consumers have stored dS; whoever makes dQ has read it.
    keys_free: all are done with K, so that dK may be staged there; V is read by its owner alone.
    keys_empty [slot]: dK and dV have left from there, so that another tile's keys may come.
Slots of rows are counted over all tiles of a program, with the one more of each; places of dS too,
without it. Where there are two slots of keys, the next tile's come while one is worked on; where
there is one, the next tile's first rows come while dK and dV leave.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    FIRST_FREE,
    barrier_arrive,
    barrier_sync,
    begin_next,
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
    MAIL_FIELDS,
    Descriptors,
    has_tile,
    load_tiles_partition,
    next_block,
    number_of,
    probabilities,
    read_mail,
    sequence_of,
    slot_of,
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
# Of both, for barriers between them.
_THREADS = gl.constexpr(256)
# A row of the buffer that dQ is added up in.
BUFFER_COLUMNS = gl.constexpr(256)


@gluon.constexpr_function
def ds_places(build):
    """How many blocks' dS shared memory holds: that of a block late stays a while longer."""
    return 2 if build.has_queries else 3


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
    keys_empty: Any
    q_full: Any
    do_full: Any
    empty: Any
    ds_full: Any
    ds_free: Any
    landing: Any
    mail: Any


# ---------------------------------------------------------------- consumers


@gluon.jit
def _own_keys(ring, first, ID: gl.constexpr, DIM: gl.constexpr, IS_KEPT: gl.constexpr):
    """A consumer's keys as a left operand. first: where the tile's begin. IS_KEPT: in registers."""
    tile = tile_at(ring, first + ID, ROWS, DIM)
    if IS_KEPT:
        return tile.load(left_operand(BLOCK_M))
    else:
        return tile


@gluon.jit
def _mma_partition(
    descs, memory, call, blocks_of_head, dk_out, dv_out, ID: gl.constexpr, BUILD: gl.constexpr
):
    n_tiles, n_blocks = 0, 0
    while has_tile(memory, n_tiles, BUILD):
        n_blocks = _own_tile(
            descs, memory, call, blocks_of_head, dk_out, dv_out, n_tiles, n_blocks, ID, BUILD
        )
        n_tiles += 1


@gluon.jit
def _own_tile(
    descs, memory, call, blocks_of_head, dk_out, dv_out, n_tiles, n_blocks, ID: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    """A consumer's half of a tile, whose keys are there. n_tiles, n_blocks: what the program had
    before. Returns: n_blocks with this tile's."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    keys_at, _ = slot_of(n_tiles, BUILD.key_slots)
    _, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    end = n_blocks + work.n_all
    dk = gl.zeros([ROWS, DIM], gl.float32, accumulator(DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, accumulator(VALUE_DIM))
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    first_keys = keys_at * _N_CONSUMERS
    k_own = _own_keys(memory.k, first_keys, ID, DIM, BUILD.keeps_keys)
    v_own = _own_keys(memory.v, first_keys, ID, VALUE_DIM, BUILD.keeps_values)
    slot, phase = slot_of(n_blocks + n_tiles, BUILD.slots)
    mbarrier.wait(memory.q_full.index(slot), phase)
    s = issue_product(k_own, memory.q, slot, DIM)
    head, i = 0, 0
    if BUILD.has_dq and not BUILD.has_queries:
        if ID == 1:
            _pass_turn(ID)
        mbarrier.wait(memory.do_full.index(slot), phase)
        dp = issue_product(v_own, memory.dout, slot, VALUE_DIM)
        s, dp = warpgroup_mma_wait(0, [s, dp])
        # Keys that no row sees have no block, and after the first Q there comes none.
        if end > n_blocks:
            dk, dv = _visit_all_in_turn(
                s, dp, dk, dv, k_own, v_own, descs, memory, call, blocks_of_head, n_tiles,
                n_blocks, end, ID, BUILD,
            )  # fmt: skip
        # The turn that nobody takes.
        if ID == 0:
            _take_turn(ID)
    else:
        s = warpgroup_mma_wait(0, [s])
        for j in range(n_blocks, end):
            s, dk, dv, head, i = _visit(
                s, dk, dv, k_own, v_own, memory, call, blocks_of_head, j, n_tiles, head, i, ID,
                BUILD,
            )  # fmt: skip
    # The rows that nobody used: what comes where they are must not overtake them.
    slot, phase = slot_of(end + n_tiles, BUILD.slots)
    mbarrier.wait(memory.do_full.index(slot), phase)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(memory.empty.index(slot), count=1)
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    dk = dk * call.terms.gradient_scale
    tile, _ = read_mail(memory, keys_at, blocks_of_head, BUILD)
    seq, n0 = sequence_of(call, tile, BUILD)
    at = [seq.batch, tile.kv_head, seq.k_first + n0 + ID * ROWS, 0]
    n_rows = seq.k_stored - n0 - ID * ROWS
    store_result(
        descs.dv, memory.v, first_keys + ID, dv_out, at, dv, 0, n_rows,
        BUILD.value_columns, VALUE_DIM, VALUE_DIM, BUILD,
    )  # fmt: skip
    mbarrier.wait(memory.keys_free.index(0), n_tiles & 1)
    store_result(
        descs.dk, memory.k, first_keys + ID, dk_out, at, dk, 0, n_rows,
        BUILD.columns, DIM, DIM, BUILD,
    )  # fmt: skip
    tma_store_wait(0)
    mbarrier.arrive(memory.keys_empty.index(keys_at), count=1)
    return end


@gluon.jit
def _zero(j):
    """0, but the compiler does not know: it would move descriptors of shared memory out of the
    loop, and then spill them."""
    return j >> 30


@gluon.jit
def _visit(
    s, dk, dv, k_own, v_own, memory, call, blocks_of_head, j, n_tiles, head, i,
    ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """One block of rows, the program's number j, which is block i of a head; dQ is somebody else's.
    s: its scores. n_tiles: those before. Returns: the scores of the next one, dk, dv, head, i."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    DTYPE: gl.constexpr = memory.q.dtype
    slot, phase = slot_of(j + n_tiles, BUILD.slots)
    keys_at, _ = slot_of(n_tiles, BUILD.key_slots)
    first_keys = keys_at * _N_CONSUMERS + _zero(j)
    if not BUILD.keeps_values:
        v_own = _own_keys(memory.v, first_keys, ID, VALUE_DIM, False)
    if not BUILD.keeps_keys:
        k_own = _own_keys(memory.k, first_keys, ID, DIM, False)
    mbarrier.wait(memory.do_full.index(slot), phase)
    dp = issue_product(v_own, memory.dout, slot, VALUE_DIM)
    of_rows = memory.rows.index(slot)
    COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_M))
    lse = load_columns(of_rows, 0, BLOCK_M, COLUMN)
    tile, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    p, p_inner = probabilities(s, lse, call, tile, work, head, i, ID, BUILD)
    left = gl.convert_layout(p.to(DTYPE), left_operand(VALUE_DIM))
    dv = warpgroup_mma(left, tile_at(memory.dout, slot, BLOCK_M, VALUE_DIM), dv, is_async=True)
    delta = load_columns(of_rows, BLOCK_M, BLOCK_M, COLUMN)
    dp = warpgroup_mma_wait(1, [dp])
    ds = (p_inner * (dp - delta[None, :])).to(DTYPE)
    if BUILD.has_queries:
        _share_ds(memory, ds, j, ID, BUILD)
    left = gl.convert_layout(ds, left_operand(DIM))
    dk = warpgroup_mma(left, tile_at(memory.q, slot, BLOCK_M, DIM), dk, is_async=True)
    next_slot, next_phase = slot_of(j + n_tiles + 1, BUILD.slots)
    # An accumulator in flight around the loop makes ptxas wait after every product.
    mbarrier.wait(memory.q_full.index(next_slot), next_phase)
    s = issue_product(k_own, memory.q, next_slot, DIM)
    dk, dv = warpgroup_mma_wait(1, [dk, dv])
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    mbarrier.arrive(memory.empty.index(slot), count=1)
    s = warpgroup_mma_wait(0, [s])
    _, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    head, i = next_block(work, head, i)
    return s, dk, dv, head, i


@gluon.jit
def _share_ds(memory, ds, j, ID: gl.constexpr, BUILD: gl.constexpr):
    """A consumer's dS of block j into shared memory, for dQ."""
    PLACES: gl.constexpr = ds_places(BUILD)
    place = j % PLACES
    mbarrier.wait(memory.ds_free.index(place), ((j // PLACES) & 1) ^ 1)
    memory.ds.index(place * _N_CONSUMERS + ID).store(ds)
    fence_async_shared()
    mbarrier.arrive(memory.ds_full.index(place), count=1)


@gluon.jit
def _visit_all_in_turn(
    s, dp, dk, dv, k_own, v_own, descs, memory, call, blocks_of_head, n_tiles, begin, end,
    ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """Blocks from begin to end, at least one, from the first one's scores and dP^T on. n_tiles:
    those before. Returns: dk, dv."""
    # There is no dS before the first block's.
    s, dp, dk, dv, before, head, i = _visit_in_turn(
        s, dp, dk, dv, k_own, v_own, descs, memory, call, blocks_of_head, begin, n_tiles, 0, 0, 0,
        True, ID, BUILD,
    )  # fmt: skip
    for j in range(begin + 1, end):
        s, dp, dk, dv, before, head, i = _visit_in_turn(
            s, dp, dk, dv, k_own, v_own, descs, memory, call, blocks_of_head, j, n_tiles, head, i,
            before, False, ID, BUILD,
        )  # fmt: skip
    _add_last_dq(descs, memory, end - 1, n_tiles, before, ID, BUILD)
    return dk, dv


@gluon.jit
def _visit_in_turn(
    s, dp, dk, dv, k_own, v_own, descs, memory, call, blocks_of_head, j, n_tiles, head, i, before,
    IS_FIRST: gl.constexpr, ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """One block of rows, the program's number j, which is block i of a head, and dQ of the one
    before it. s, dp: the block's scores and dP^T. n_tiles: those before. before: the number of the
    block before. Returns: scores and dP^T of the next one, dk, dv, before, head, i."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    DTYPE: gl.constexpr = memory.q.dtype
    COLUMN: gl.constexpr = gl.SliceLayout(0, accumulator(BLOCK_M))
    slot, _ = slot_of(j + n_tiles, BUILD.slots)
    keys_at, _ = slot_of(n_tiles, BUILD.key_slots)
    first_keys = keys_at * _N_CONSUMERS + _zero(j)
    if not BUILD.keeps_values:
        v_own = _own_keys(memory.v, first_keys, ID, VALUE_DIM, False)
    if not BUILD.keeps_keys:
        k_own = _own_keys(memory.k, first_keys, ID, DIM, False)
    of_rows = memory.rows.index(slot)
    lse = load_columns(of_rows, 0, BLOCK_M, COLUMN)
    tile, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    p, p_inner = probabilities(s, lse, call, tile, work, head, i, ID, BUILD)
    delta = load_columns(of_rows, BLOCK_M, BLOCK_M, COLUMN)
    ds = (p_inner * (dp - delta[None, :])).to(DTYPE)
    # What dQ left by has been read.
    tma_store_wait(0)
    _share_ds(memory, ds, j, ID, BUILD)
    p_left = gl.convert_layout(p.to(DTYPE), left_operand(VALUE_DIM))
    ds_left = gl.convert_layout(ds, left_operand(DIM))
    PLACES: gl.constexpr = ds_places(BUILD)
    last = j - 1
    if not IS_FIRST:
        mbarrier.wait(memory.ds_full.index(last % PLACES), (last // PLACES) & 1)
    _take_turn(ID)
    dv = warpgroup_mma(p_left, tile_at(memory.dout, slot, BLOCK_M, VALUE_DIM), dv, is_async=True)
    dk = warpgroup_mma(ds_left, tile_at(memory.q, slot, BLOCK_M, DIM), dk, is_async=True)
    if IS_FIRST:
        _pass_turn(ID)
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
    else:
        # An accumulator in flight around the loop makes ptxas wait after every product, so it is
        # the block before's.
        COLUMNS: gl.constexpr = BUILD.dq_columns
        dq = _issue_dq(memory, last % PLACES, first_keys, ID * COLUMNS, COLUMNS, DIM)
        _pass_turn(ID)
        dk, dv, dq = warpgroup_mma_wait(0, [dk, dv, dq])
        mbarrier.arrive(memory.ds_free.index(last % PLACES), count=1)
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    mbarrier.arrive(memory.empty.index(slot), count=1)
    next_slot, next_phase = slot_of(j + n_tiles + 1, BUILD.slots)
    mbarrier.wait(memory.q_full.index(next_slot), next_phase)
    s = issue_product(k_own, memory.q, next_slot, DIM)
    # Before dP, which takes the registers.
    if not IS_FIRST:
        _send_dq(descs, memory, dq, before, ID, BUILD)
    mbarrier.wait(memory.do_full.index(next_slot), next_phase)
    dp = issue_product(v_own, memory.dout, next_slot, VALUE_DIM)
    s, dp = warpgroup_mma_wait(0, [s, dp])
    _, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    before = number_of(work, head, i)
    head, i = next_block(work, head, i)
    return s, dp, dk, dv, before, head, i


@gluon.jit
def _add_last_dq(descs, memory, last, n_tiles, number, ID: gl.constexpr, BUILD: gl.constexpr):
    """dQ of a tile's last block, `last` in the program's count."""
    keys_at, _ = slot_of(n_tiles, BUILD.key_slots)
    COLUMNS: gl.constexpr = BUILD.dq_columns
    PLACES: gl.constexpr = ds_places(BUILD)
    mbarrier.wait(memory.ds_full.index(last % PLACES), (last // PLACES) & 1)
    first_keys = keys_at * _N_CONSUMERS
    dq = _issue_dq(memory, last % PLACES, first_keys, ID * COLUMNS, COLUMNS, BUILD.dim)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(memory.ds_free.index(last % PLACES), count=1)
    tma_store_wait(0)
    sync_partition()
    _send_dq(descs, memory, dq, number, ID, BUILD)


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
    memory, place, first_keys, START: gl.constexpr, COLUMNS: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Columns of dQ from START on, over the keys of both consumers, on its way."""
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, accumulator(COLUMNS))
    for i in gl.static_range(_N_CONSUMERS):
        ds = memory.ds.index(place * _N_CONSUMERS + i).permute((1, 0))
        k = tile_at(memory.k, first_keys + i, ROWS, DIM)
        if COLUMNS < DIM:
            k = k.slice(START, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _query_partition(descs, memory, blocks_of_head, BUILD: gl.constexpr):
    n_tiles, n_blocks = 0, 0
    while has_tile(memory, n_tiles, BUILD):
        n_blocks = _add_dq(descs, memory, blocks_of_head, n_tiles, n_blocks, BUILD)
        n_tiles += 1
    tma_store_wait(0)


@gluon.jit
def _add_dq(descs, memory, blocks_of_head, n_tiles, n_blocks, BUILD: gl.constexpr):
    """dQ of a tile's block after block, added to the buffer. Two places to leave by take turns.
    n_tiles, n_blocks: those before. Returns: n_blocks with this tile's."""
    DIM: gl.constexpr = BUILD.dim
    PLACES: gl.constexpr = ds_places(BUILD)
    keys_at, _ = slot_of(n_tiles, BUILD.key_slots)
    _, work = read_mail(memory, keys_at, blocks_of_head, BUILD)
    end = n_blocks + work.n_all
    head, i = 0, 0
    for j in range(n_blocks, end):
        place, half = j % PLACES, j & 1
        mbarrier.wait(memory.ds_full.index(place), (j // PLACES) & 1)
        dq = _issue_dq(memory, place, keys_at * _N_CONSUMERS + _zero(j), 0, DIM, DIM)
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
    return end


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
    begin_next()
    descs = Descriptors(q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc)
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    SLOTS: gl.constexpr = BUILD.slots
    COLUMNS: gl.constexpr = BUILD.dq_columns
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    HAS_DQ: gl.constexpr = BUILD.has_dq
    q = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, 1, BLOCK_M, DIM], q_desc.layout)
    KEY_SLOTS: gl.constexpr = BUILD.key_slots
    TILES: gl.constexpr = KEY_SLOTS * _N_CONSUMERS
    k = gl.allocate_shared_memory(k_desc.dtype, [TILES, 1, 1, ROWS, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [TILES, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    dout = gl.allocate_shared_memory(
        dout_desc.dtype, [SLOTS, 1, 1, BLOCK_M, VALUE_DIM], dout_desc.layout
    )
    rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * BLOCK_M], rows_desc.layout)
    HAS_QUERIES: gl.constexpr = BUILD.has_queries
    PLACES: gl.constexpr = ds_places(BUILD)
    ds, dq = None, None
    if HAS_DQ:
        DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
        ds = gl.allocate_shared_memory(q_desc.dtype, [PLACES * _N_CONSUMERS, ROWS, BLOCK_M], DS)
        dq = gl.allocate_shared_memory(
            gl.float32, [2, ROWS * COLUMNS // BUFFER_COLUMNS, BUFFER_COLUMNS], dq_desc.layout
        )
    keys_full = gl.allocate_shared_memory(gl.int64, [KEY_SLOTS, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    keys_empty = gl.allocate_shared_memory(gl.int64, [KEY_SLOTS, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    ds_free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    MAIL: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    mail = gl.allocate_shared_memory(gl.int32, [KEY_SLOTS * MAIL_FIELDS, 1], MAIL)
    for i in gl.static_range(KEY_SLOTS):
        mbarrier.init(keys_full.index(i), count=1)
        mbarrier.init(keys_empty.index(i), count=_N_CONSUMERS)
    N_READERS: gl.constexpr = _N_CONSUMERS + 1 if HAS_QUERIES else _N_CONSUMERS
    mbarrier.init(keys_free.index(0), count=N_READERS)
    mbarrier.init(landing.index(0), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_N_CONSUMERS)
    N_FREEING: gl.constexpr = 1 if HAS_QUERIES else _N_CONSUMERS
    for i in gl.static_range(PLACES):
        mbarrier.init(ds_full.index(i), count=_N_CONSUMERS)
        mbarrier.init(ds_free.index(i), count=N_FREEING)
    fence_async_shared()
    memory = Memory(
        q, k, v, dout, rows, ds, dq, keys_full, keys_free, keys_empty, q_full, do_full, empty,
        ds_full, ds_free, landing, mail,
    )  # fmt: skip
    blocks = heads.n_blocks
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    if HAS_QUERIES:
        # What is left of 65536 by consumers and producer.
        QUERY_REGISTERS: gl.constexpr = 512 - 2 * CONSUMER_REGISTERS - PRODUCER_REGISTERS
        gl.warp_specialize(
            [
                (_mma_partition, (descs, memory, call, blocks, dk, dv, 0, BUILD)),
                (_mma_partition, (descs, memory, call, blocks, dk, dv, 1, BUILD)),
                (_query_partition, (descs, memory, blocks, BUILD)),
                (load_tiles_partition, (descs, memory, call, heads, BUILD)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, QUERY_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (descs, memory, call, blocks, dk, dv, 0, BUILD)),
                (_mma_partition, (descs, memory, call, blocks, dk, dv, 1, BUILD)),
                (load_tiles_partition, (descs, memory, call, heads, BUILD)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
