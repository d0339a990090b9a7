"""Backward of the hopper backend (sm_90): five products in one pass, warp specialised.

Dims: a program owns 128 keys of one kv head, 64 to each of two consumer warp groups, and visits
    blocks of 64 query rows, head after head of the group.
Grid: one program for every tile of keys and kv head.
Math: as in `triton_backward.py`. S^T and dP^T `[keys, rows]` are computed transposed, so that P^T
    and dS^T are left operands of dV and dK straight from registers. dQ of a block needs the dS of
    all keys: both consumers put theirs in shared memory, each multiplies it by half of K's columns,
    and TMA adds the result to an fp32 buffer in device memory (see `hopper_rows.py` for its order).
Deterministic: dK and dV are; dQ is not, since programs add to it in any order.
Units: scores in log2 units.

Roles. One producer warp copies by TMA. A consumer's iteration: dP^T on its way; P; dV on its way;
dS to shared memory; dK on its way; dQ on its way once both have stored dS; S^T of the next block on
its way, so that it runs while dQ leaves; dQ to shared memory and off. Barriers:
    keys_full: K and V have arrived.
    q_full, do_full [slot]: a block's rows have arrived; with Q come lse and delta.
    empty [slot]: both consumers are done with a block. The producer sends one Q more than there
        are blocks, for the S^T that nobody uses.
    ds_full [half]: both consumers have stored dS. Two halves take turns: who stores dS of block
        j + 2 has seen the other's dS of j + 1, which comes after its dQ of j.
    keys_free: both are done with K, so that dK may be staged there; V is read by its owner alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    exp2_fast,
    fence_async_shared,
    gl,
    gluon,
    load_columns,
    mask_columns,
    mbarrier,
    sync_partition,
    tma_load,
    tma_reduce_add,
    tma_store,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from ..kernels.masks import row_span
from ..kernels.placement import FIELDS, FIRST_K_TILE, FIRST_Q_TILE, PACKED, sequence_at
from ..kernels.structs import decode
from ..kernels.tiles import row_base
from .hopper_producer import ROWS, SpanBuild, clear_rows, find_sequence

BLOCK_M, BLOCK_N = gl.constexpr(64), gl.constexpr(128)
_N_CONSUMERS = gl.constexpr(2)
# A row of the buffer that dQ is added up in.
BUFFER_COLUMNS = gl.constexpr(256)


class BackwardBuild(NamedTuple):
    """What the kernel is compiled for.

    dim, value_dim: as tiles hold them. place: see `placement.py`. span: of a tile of keys.
    slots: blocks of rows in flight. keeps_keys: K and V stay in registers as left operands.
    registers: of consumers, of the producer. columns, value_columns: of dK and dV in memory, where
    they are not stored by TMA. is_added: dK and dV are added to fp32 tensors.
    """

    dim: int
    value_dim: int
    place: int
    span: SpanBuild
    slots: int
    keeps_keys: bool
    registers: tuple[int, int]
    columns: int
    value_columns: int
    is_added: bool


class Descriptors(NamedTuple):
    """For TMA: inputs, then outputs. rows: lse and delta of blocks. dq: the fp32 buffer."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    dq: Any
    dk: Any
    dv: Any


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
    landing: Any


class Tile(NamedTuple):
    """Which keys a program owns: the number of their sequence, the kv head, the tile in the
    sequence. blocks_of_head: of rows, of all sequences (coded)."""

    index: Any
    kv_head: Any
    number: Any
    blocks_of_head: Any


class Work(NamedTuple):
    """What a program visits: for each of the group's heads n_blocks blocks of rows, from number
    `begin` of the sequence on, of which those from `head` on need no test, n_whole of them.
    n_all: for all heads. origin: the first among the blocks of all heads and sequences."""

    begin: Any
    head: Any
    n_whole: Any
    n_blocks: Any
    n_all: Any
    origin: Any
    blocks_of_head: Any


@gluon.jit
def _locate(call, blocks_of_head, BUILD: gl.constexpr):
    """As `placement.locate`, before the program's warps take their roles."""
    place = call.place
    n_tiles = decode(place.n_tiles)
    tile = gl.program_id(0) % n_tiles
    head = gl.program_id(0) // n_tiles
    if BUILD.place >= PACKED:
        index = find_sequence(place, tile, FIRST_K_TILE, 4)
        first = gl.load(place.table + index.to(gl.int64) * FIELDS + FIRST_K_TILE)
        return Tile(index, head, tile - first, blocks_of_head)
    else:
        G = decode(place.H) // decode(place.group)
        return Tile(head // G, head % G, tile, blocks_of_head)


@gluon.jit
def _sequence(call, tile, BUILD: gl.constexpr):
    """A program's sequence, and its first key there. Found anew where it is needed: carried around
    the loop, its fields would take registers."""
    return sequence_at(call.place, tile.index, BUILD.place), tile.number * BLOCK_N


@gluon.jit
def _find_work(call, tile, BUILD: gl.constexpr):
    seq, _ = _sequence(call, tile, BUILD)
    SPAN: gl.constexpr = BUILD.span
    span = row_span(call.mask, seq, tile.kv_head, tile.number, 0, SPAN)
    if BUILD.place >= PACKED:
        at = call.place.table + tile.index.to(gl.int64) * FIELDS + FIRST_Q_TILE
        first = gl.load(at)
    else:
        first = tile.index * ((seq.q_stored + BLOCK_M - 1) // BLOCK_M)
    group, blocks_of_head = decode(call.place.group), decode(tile.blocks_of_head)
    n_blocks = span.n_whole + span.n_partial
    origin = tile.kv_head * group * blocks_of_head + first + span.begin
    return Work(
        span.begin, span.head, span.n_whole, gl.maximum(n_blocks, 1), n_blocks * group, origin,
        blocks_of_head,
    )  # fmt: skip


@gluon.jit
def _block(work, j):
    """Of a program's block number j: the head in the group, which of the head's blocks it is, and
    which among all."""
    head = j // work.n_blocks
    i = j - head * work.n_blocks
    return head, i, work.origin + head * work.blocks_of_head + i


# ---------------------------------------------------------------- producer


@gluon.jit
def _load_partition(descs, memory, call, tile, BUILD: gl.constexpr):
    work = _find_work(call, tile, BUILD)
    seq, n0 = _sequence(call, tile, BUILD)
    # Rows that see something and keys that something sees; others may be NaN, and become 0.
    first_row = gl.maximum(seq.low - seq.right, 0)
    last_row = gl.minimum(seq.q_used, seq.high - seq.left)
    first_key = gl.maximum(seq.low, seq.left)
    last_key = gl.minimum(seq.high, seq.q_used + seq.right)
    n_landed = _load_keys(descs, memory, seq, tile, first_key - n0, last_key - n0, BUILD)
    first_head = tile.kv_head * decode(call.place.group)
    for j in range(work.n_all + 1):
        head, i, number = _block(work, gl.maximum(gl.minimum(j, work.n_all - 1), 0))
        slot = j % BUILD.slots
        if j >= BUILD.slots:
            mbarrier.wait(memory.empty.index(slot), (j // BUILD.slots - 1) & 1)
        m0 = (work.begin + i) * BLOCK_M
        is_cut = m0 + BLOCK_M > last_row
        if BUILD.place < PACKED:
            # TMA itself fills up with zeros where storage ends.
            is_cut = is_cut & (last_row < seq.q_stored)
        is_cut = is_cut | (m0 < first_row)
        at = [seq.batch, first_head + head, seq.q_first + m0, 0]
        full = memory.q_full.index(slot)
        rows_at = [number * 2 * BLOCK_M]
        if is_cut:
            start, stop = first_row - m0, last_row - m0
            n_landed = _land(descs.q, memory.q, memory.landing, at, slot, n_landed)
            clear_rows(memory.q, slot, start, stop, BLOCK_M, BUILD.dim)
            n_landed = _land(descs.dout, memory.dout, memory.landing, at, slot, n_landed)
            clear_rows(memory.dout, slot, start, stop, BLOCK_M, BUILD.value_dim)
            fence_async_shared()
            mbarrier.arrive(memory.do_full.index(slot), count=1)
            mbarrier.expect(full, descs.rows.block_type.nbytes)
        else:
            mbarrier.expect(full, descs.q.block_type.nbytes + descs.rows.block_type.nbytes)
            tma_load(descs.q, at, full, memory.q.index(slot))
            mbarrier.expect(memory.do_full.index(slot), descs.dout.block_type.nbytes)
            tma_load(descs.dout, at, memory.do_full.index(slot), memory.dout.index(slot))
        tma_load(descs.rows, rows_at, full, memory.rows.index(slot))


@gluon.jit
def _load_keys(descs, memory, seq, tile, start, stop, BUILD: gl.constexpr):
    """K and V, with zeros in the rows outside [start, stop). Returns: n_landed."""
    n0 = tile.number * BLOCK_N
    is_cut = stop < BLOCK_N
    if BUILD.place < PACKED:
        is_cut = is_cut & (stop + n0 < seq.k_stored)
    is_cut = is_cut | (start > 0)
    full = memory.keys_full.index(0)
    n_landed = 0
    if is_cut:
        for i in gl.static_range(_N_CONSUMERS):
            at = [seq.batch, tile.kv_head, seq.k_first + n0 + i * ROWS, 0]
            n_landed = _land(descs.k, memory.k, memory.landing, at, i, n_landed)
            clear_rows(memory.k, i, start - i * ROWS, stop - i * ROWS, ROWS, BUILD.dim)
            n_landed = _land(descs.v, memory.v, memory.landing, at, i, n_landed)
            clear_rows(memory.v, i, start - i * ROWS, stop - i * ROWS, ROWS, BUILD.value_dim)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(
            full, _N_CONSUMERS * (descs.k.block_type.nbytes + descs.v.block_type.nbytes)
        )
        for i in gl.static_range(_N_CONSUMERS):
            at = [seq.batch, tile.kv_head, seq.k_first + n0 + i * ROWS, 0]
            tma_load(descs.k, at, full, memory.k.index(i))
            tma_load(descs.v, at, full, memory.v.index(i))
    return n_landed


@gluon.jit
def _land(desc, ring, landing, at, slot, n_landed):
    """Copy a tile and wait for it. Returns: how often that was done."""
    mbarrier.expect(landing.index(0), desc.block_type.nbytes)
    tma_load(desc, at, landing.index(0), ring.index(slot))
    mbarrier.wait(landing.index(0), n_landed & 1)
    return n_landed + 1


# ---------------------------------------------------------------- consumers


@gluon.constexpr_function
def _accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _left_operand(columns):
    return gl.DotOperandLayout(0, _accumulator(columns), 2)


@gluon.jit
def _tile(ring, slot, ROWS_OF_TILE: gl.constexpr, DIM: gl.constexpr):
    return ring.index(slot).reshape([ROWS_OF_TILE, DIM])


@gluon.jit
def _issue_transposed(left, rows, slot, DIM: gl.constexpr):
    """Keys times rows, `[keys, rows]`, on its way."""
    zero = gl.zeros([ROWS, BLOCK_M], gl.float32, _accumulator(BLOCK_M))
    right = _tile(rows, slot, BLOCK_M, DIM).permute((1, 0))
    return warpgroup_mma(left, right, zero, use_acc=False, is_async=True)


@gluon.jit
def _own_keys(ring, zero, ID: gl.constexpr, DIM: gl.constexpr, BUILD: gl.constexpr):
    """A consumer's keys as a left operand. zero: always 0, but the compiler does not know: it would
    move the descriptors of shared memory out of the loop, and then spill them."""
    tile = _tile(ring, ID + zero, ROWS, DIM)
    if BUILD.keeps_keys:
        return tile.load(_left_operand(BLOCK_M))
    else:
        return tile


@gluon.jit
def _mma_partition(
    descs, memory, call, tile, dk_out, dv_out, ID: gl.constexpr, BUILD: gl.constexpr
):
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    work = _find_work(call, tile, BUILD)
    dk = gl.zeros([ROWS, DIM], gl.float32, _accumulator(DIM))
    dv = gl.zeros([ROWS, VALUE_DIM], gl.float32, _accumulator(VALUE_DIM))
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    mbarrier.wait(memory.keys_full.index(0), 0)
    k_own = _own_keys(memory.k, 0, ID, DIM, BUILD)
    v_own = _own_keys(memory.v, 0, ID, VALUE_DIM, BUILD)
    mbarrier.wait(memory.q_full.index(0), 0)
    s = _issue_transposed(k_own, memory.q, 0, DIM)
    s = warpgroup_mma_wait(0, [s])
    for j in range(work.n_all):
        s, dk, dv = _visit(s, dk, dv, k_own, v_own, descs, memory, call, tile, work, j, ID, BUILD)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(memory.keys_free.index(0), count=1)
    dk = dk * call.terms.gradient_scale
    seq, n0 = _sequence(call, tile, BUILD)
    at = [seq.batch, tile.kv_head, seq.k_first + n0 + ID * ROWS, 0]
    n_rows = seq.k_stored - n0 - ID * ROWS
    if BUILD.is_added:
        _store_rows(dk_out, at, dk, n_rows, BUILD.columns, DIM, True)
        _store_rows(dv_out, at, dv, n_rows, BUILD.value_columns, VALUE_DIM, True)
    elif BUILD.place >= PACKED:
        # TMA does not know where a document ends.
        if n_rows >= ROWS:
            _store_tiles(descs, memory, at, dk, dv, ID, BUILD)
        else:
            _store_rows(dk_out, at, dk, n_rows, BUILD.columns, DIM, False)
            _store_rows(dv_out, at, dv, n_rows, BUILD.value_columns, VALUE_DIM, False)
    else:
        _store_tiles(descs, memory, at, dk, dv, ID, BUILD)
    # Shared memory stays until all of it has left.
    tma_store_wait(0)


@gluon.jit
def _store_tiles(descs, memory, at, dk, dv, ID: gl.constexpr, BUILD: gl.constexpr):
    """dK and dV by way of where K and V were, cut by TMA where storage ends."""
    _tile(memory.v, ID, ROWS, BUILD.value_dim).store(dv.to(memory.v.dtype))
    mbarrier.wait(memory.keys_free.index(0), 0)
    _tile(memory.k, ID, ROWS, BUILD.dim).store(dk.to(memory.k.dtype))
    fence_async_shared()
    sync_partition()
    tma_store(descs.dv, at, memory.v.index(ID))
    tma_store(descs.dk, at, memory.k.index(ID))


@gluon.jit
def _store_rows(
    out, at, x, n_rows, COLUMNS: gl.constexpr, DIM: gl.constexpr, ADD: gl.constexpr
):  # fmt: skip
    """The first n_rows of a consumer's rows; with ADD added to what is there."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    base = row_base(out, at[0], at[2], at[1])
    ptrs = base + (rows.to(gl.int64) * out.stride_m)[:, None] + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < COLUMNS)[None, :]
    if ADD:
        x += gl.load(ptrs, mask=mask, other=0.0)
    gl.store(ptrs, x.to(out.ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _visit(
    s, dk, dv, k_own, v_own, descs, memory, call, tile, work, j,
    ID: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """One block of rows. s: its scores. Returns: the scores of the next one, dk, dv."""
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    DTYPE: gl.constexpr = memory.q.dtype
    COLUMNS: gl.constexpr = DIM // _N_CONSUMERS
    slot, phase = j % BUILD.slots, (j // BUILD.slots) & 1
    half = j & 1
    zero = j >> 30
    _, i, number = _block(work, j)
    if not BUILD.keeps_keys:
        v_own = _own_keys(memory.v, zero, ID, VALUE_DIM, BUILD)
        k_own = _own_keys(memory.k, zero, ID, DIM, BUILD)
    mbarrier.wait(memory.do_full.index(slot), phase)
    dp = _issue_transposed(v_own, memory.dout, slot, VALUE_DIM)
    of_rows = memory.rows.index(slot)
    COLUMN: gl.constexpr = gl.SliceLayout(0, _accumulator(BLOCK_M))
    lse = load_columns(of_rows, 0, BLOCK_M, COLUMN)
    if (i < work.head) | (i >= work.head + work.n_whole):
        s = _mask(s, call, tile, (work.begin + i) * BLOCK_M, ID, BUILD)
    p = exp2_fast(s * call.terms.scale - lse[None, :])
    left = gl.convert_layout(p.to(DTYPE), _left_operand(VALUE_DIM))
    dv = warpgroup_mma(left, _tile(memory.dout, slot, BLOCK_M, VALUE_DIM), dv, is_async=True)
    delta = load_columns(of_rows, BLOCK_M, BLOCK_M, COLUMN)
    dp = warpgroup_mma_wait(1, [dp])
    ds = (p * (dp - delta[None, :])).to(DTYPE)
    memory.ds.index(half * _N_CONSUMERS + ID).store(ds)
    fence_async_shared()
    # What dQ left by has been read; and a barrier of the warp group for the store above.
    tma_store_wait(0)
    mbarrier.arrive(memory.ds_full.index(half), count=1)
    left = gl.convert_layout(ds, _left_operand(DIM))
    dk = warpgroup_mma(left, _tile(memory.q, slot, BLOCK_M, DIM), dk, is_async=True)
    mbarrier.wait(memory.ds_full.index(half), (j >> 1) & 1)
    dq = _issue_dq(memory, half, zero, ID, DIM)
    next_slot = (j + 1) % BUILD.slots
    mbarrier.wait(memory.q_full.index(next_slot), ((j + 1) // BUILD.slots) & 1)
    # An accumulator in flight around the loop makes ptxas wait after every product.
    dk, dv = warpgroup_mma_wait(2, [dk, dv])
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    s = _issue_transposed(k_own, memory.q, next_slot, DIM)
    dq, dk, dv = warpgroup_mma_wait(1, [dq, dk, dv])
    dk, dv = warpgroup_mma_init(dk), warpgroup_mma_init(dv)
    ROWS_OF_BUFFER: gl.constexpr = ROWS * COLUMNS // BUFFER_COLUMNS
    memory.dq.index(ID).store(_in_registers_order(dq, COLUMNS))
    fence_async_shared()
    sync_partition()
    mbarrier.arrive(memory.empty.index(slot), count=1)
    at = (number * _N_CONSUMERS + ID) * ROWS_OF_BUFFER
    tma_reduce_add(descs.dq, [at, 0], memory.dq.index(ID))
    s = warpgroup_mma_wait(0, [s])
    return s, dk, dv


@gluon.jit
def _mask(s, call, tile, m0, ID: gl.constexpr, BUILD: gl.constexpr):
    """-inf where a row does not see a key."""
    seq, n0 = _sequence(call, tile, BUILD)
    KEY: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    n = n0 + ID * ROWS + gl.arange(0, ROWS, layout=KEY)
    is_key = (n >= seq.low) & (n < seq.high)
    stop = gl.where(is_key, n - seq.left + 1, 0)
    return mask_columns(s, n - seq.right - m0, stop - m0, True, ROWS, BLOCK_M)


@gluon.jit
def _issue_dq(memory, half, zero, ID: gl.constexpr, DIM: gl.constexpr):
    """Half of dQ's columns, over the keys of both consumers, on its way."""
    COLUMNS: gl.constexpr = DIM // _N_CONSUMERS
    dq = gl.zeros([BLOCK_M, COLUMNS], gl.float32, _accumulator(COLUMNS))
    for i in gl.static_range(_N_CONSUMERS):
        ds = memory.ds.index(half * _N_CONSUMERS + i).permute((1, 0))
        k = _tile(memory.k, i + zero, ROWS, DIM).slice(ID * COLUMNS, COLUMNS, 1)
        dq = warpgroup_mma(ds, k, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def _in_registers_order(dq, COLUMNS: gl.constexpr):
    """dQ as rows of the buffer, so that each thread writes 16 bytes: see `hopper_rows.py`."""
    x = dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute((3, 0, 2, 4, 1, 5))
    return x.reshape([ROWS * COLUMNS // BUFFER_COLUMNS, BUFFER_COLUMNS])


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_bwd_hopper_kernel(
    q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc, dk, dv, call,
    blocks_of_head, BUILD: gl.constexpr,
):  # fmt: skip
    tile = _locate(call, blocks_of_head, BUILD)
    descs = Descriptors(q_desc, k_desc, v_desc, dout_desc, rows_desc, dq_desc, dk_desc, dv_desc)
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    SLOTS: gl.constexpr = BUILD.slots
    COLUMNS: gl.constexpr = DIM // _N_CONSUMERS
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_M], q_desc.dtype)
    q = gl.allocate_shared_memory(q_desc.dtype, [SLOTS, 1, 1, BLOCK_M, DIM], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, ROWS, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, ROWS, VALUE_DIM], v_desc.layout)
    dout = gl.allocate_shared_memory(
        dout_desc.dtype, [SLOTS, 1, 1, BLOCK_M, VALUE_DIM], dout_desc.layout
    )
    rows = gl.allocate_shared_memory(gl.float32, [SLOTS, 2 * BLOCK_M], rows_desc.layout)
    ds = gl.allocate_shared_memory(q_desc.dtype, [4, ROWS, BLOCK_M], DS)
    dq = gl.allocate_shared_memory(
        gl.float32, [2, ROWS * COLUMNS // BUFFER_COLUMNS, BUFFER_COLUMNS], dq_desc.layout
    )
    keys_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(keys_full.index(0), count=1)
    mbarrier.init(keys_free.index(0), count=_N_CONSUMERS)
    mbarrier.init(landing.index(0), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=_N_CONSUMERS)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=_N_CONSUMERS)
    fence_async_shared()
    memory = Memory(
        q, k, v, dout, rows, ds, dq, keys_full, keys_free, q_full, do_full, empty, ds_full, landing
    )  # fmt: skip
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    gl.warp_specialize(
        [
            (_mma_partition, (descs, memory, call, tile, dk, dv, 0, BUILD)),
            (_mma_partition, (descs, memory, call, tile, dk, dv, 1, BUILD)),
            (_load_partition, (descs, memory, call, tile, BUILD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
