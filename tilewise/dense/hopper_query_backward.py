"""dQ (sm_90), summed by the program that owns its rows: in no buffer, and the same in every run.

Dims: a program owns 128 query rows of one head, 64 to each of two consumer warp groups, and visits
    blocks of `block_n` keys.
Grid: one program for every tile of rows and head; those that see most first.
Math: as in `triton_backward.py`. S and dP `[rows, keys]`; dS is dQ's left operand, straight from
    registers.
Deterministic: yes.
Units: scores in log2 units.

Roles. One producer warp copies by TMA. A consumer's iteration: dP on its way; P; dS; dQ on its way,
and S of the next block behind it. While one consumer is at its exponents the other multiplies.
Barriers:
    rows_full: Q and dO have arrived.
    k_full, v_full [slot]: a block's keys have arrived.
    k_empty, v_empty [slot]: both consumers are done with them: V after dP, K after dQ. The producer
        sends one K more than there are blocks, for the S that nobody uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import (
    exp2_fast,
    fence_async_shared,
    gl,
    gluon,
    mask_columns,
    mbarrier,
    subtract_distance,
    sum_in_thread,
    tma_load,
    tma_store_wait,
    warpgroup_mma_wait,
)
from ..kernels.masks import key_span
from ..kernels.placement import FIELDS, FIRST_Q_TILE, PACKED
from ..kernels.scores import load_row_slope
from ..kernels.softmax import LOG2_E
from ..kernels.tiles import statistics_base
from .hopper_backward_common import land, log2_scores
from .hopper_fresh import fresh_number, fresh_sequence, fresh_statistics
from .hopper_producer import (
    ROWS,
    SpanBuild,
    clear_rows,
    locate,
)
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
from .hopper_rows import number_of_row

BLOCK_M = gl.constexpr(128)
_N_CONSUMERS = gl.constexpr(2)


class QueryBuild(NamedTuple):
    """What the kernel is compiled for.

    dim, value_dim, width, value_width, place: see `BackwardBuild`. tile, group: spans of a tile and
    of a consumer's rows. has_start: rows may not see the first keys. is_folded, is_capped,
    has_slopes: see `BackwardBuild`. has_sums: rowsum(P dP) of each row is written, too. k_slots,
    v_slots: blocks of keys in flight. registers: of consumers, of the producer. columns: of dQ in
    memory, where it is not stored by TMA. is_added: it is added to an fp32 tensor.
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
    has_sums: bool
    k_slots: int
    v_slots: int
    registers: tuple[int, int]
    columns: int
    is_added: bool


class Descriptors(NamedTuple):
    """For TMA: inputs, then dQ."""

    q: Any
    k: Any
    v: Any
    dout: Any
    dq: Any


class Memory(NamedTuple):
    """Shared memory and its barriers, as the module's docstring has them."""

    q: Any
    dout: Any
    k: Any
    v: Any
    rows_full: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    landing: Any


class Tile(NamedTuple):
    """Which rows a program owns: number of the sequence, head, number of the tile there."""

    index: Any
    head: Any
    number: Any


class Outputs(NamedTuple):
    """dQ as an operand; rowsum(P dP) `[B, H, M]`, or absent."""

    dq: Any
    sums: Any


class Numbers(NamedTuple):
    """Of rows, in blocks of 64: see `hopper_rows.py`. table: where sequences' blocks begin, if not
    at multiples. n_blocks: of a head (coded)."""

    ptr: Any
    table: Any
    n_blocks: Any


@gluon.jit
def _blocks(call, seq, tile, BUILD: gl.constexpr):
    """The keys that a program visits: their span, and how many blocks."""
    TILE: gl.constexpr = BUILD.tile
    span = key_span(call.mask, seq, tile.head, tile.number, 0, TILE)
    return span, gl.maximum(span.n_whole + span.n_partial, 1)


# ---------------------------------------------------------------- producer


@gluon.jit
def _load_partition(descs, memory, call, tile, BUILD: gl.constexpr):
    seq = fresh_sequence(call.place, tile.index, BUILD)
    span, n_blocks = _blocks(call, seq, tile, BUILD)
    full = memory.rows_full.index(0)
    mbarrier.expect(full, _N_CONSUMERS * (descs.q.block_type.nbytes + descs.dout.block_type.nbytes))
    for i in gl.static_range(_N_CONSUMERS):
        at = [seq.batch, tile.head, seq.q_first + tile.number * BLOCK_M + i * ROWS, 0]
        tma_load(descs.q, at, full, memory.q.index(i))
        tma_load(descs.dout, at, full, memory.dout.index(i))
    kv_head = tile.head // fresh_number(call.place.group, BUILD)
    n_landed = 0
    for j in range(n_blocks + 1):
        n0 = (span.begin + gl.minimum(j, n_blocks - 1)) * BUILD.tile.block_n
        is_cut = n0 + BUILD.tile.block_n > span.stop
        if BUILD.place < PACKED:
            # TMA itself fills up with zeros where storage ends.
            is_cut = is_cut & (span.stop < seq.k_stored)
        is_cut = is_cut | (n0 < span.start)
        at = [seq.batch, kv_head, seq.k_first + n0, 0]
        bounds = (span.start - n0, span.stop - n0)
        slot = j % BUILD.k_slots
        if j >= BUILD.k_slots:
            mbarrier.wait(memory.k_empty.index(slot), (j // BUILD.k_slots - 1) & 1)
        n_landed = _load_keys(
            descs.k, memory.k, memory.k_full, memory.landing, at, slot, bounds, is_cut, n_landed
        )  # fmt: skip
        if j < n_blocks:
            slot = j % BUILD.v_slots
            if j >= BUILD.v_slots:
                mbarrier.wait(memory.v_empty.index(slot), (j // BUILD.v_slots - 1) & 1)
            n_landed = _load_keys(
                descs.v, memory.v, memory.v_full, memory.landing, at, slot, bounds, is_cut,
                n_landed,
            )  # fmt: skip


@gluon.jit
def _load_keys(desc, ring, barriers, landing, at, slot, bounds, is_cut, n_landed):
    """A block of K or V; where it is cut, with zeros in the rows out of bounds, which may be NaN.
    Returns: n_landed."""
    full = barriers.index(slot)
    if is_cut:
        n_landed = land(desc, ring, landing, at, slot, n_landed)
        clear_rows(ring, slot, bounds[0], bounds[1], ring.shape[3], ring.shape[4])
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, desc.block_type.nbytes)
        tma_load(desc, at, full, ring.index(slot))
    return n_landed


# ---------------------------------------------------------------- consumers


class Rows(NamedTuple):
    """What a consumer knows of its rows. m: their numbers in the sequence. start, stop: the keys
    that each sees. lo, hi: the blocks in between need no test. first_key: of all blocks. slope:
    ALiBi's, in log2 units."""

    m: Any
    start: Any
    stop: Any
    lo: Any
    hi: Any
    first_key: Any
    slope: Any


@gluon.jit
def _describe(call, seq, tile, ID: gl.constexpr, BUILD: gl.constexpr):
    """A consumer's rows, and how many blocks they visit."""
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(BUILD.tile.block_n))
    GROUP: gl.constexpr = BUILD.group
    span, n_blocks = _blocks(call, seq, tile, BUILD)
    own = key_span(call.mask, seq, tile.head, tile.number * _N_CONSUMERS + ID, 0, GROUP)
    lo = own.begin + own.head - span.begin
    m = tile.number * BLOCK_M + ID * ROWS + gl.arange(0, ROWS, layout=ROW)
    slope = 0.0
    if BUILD.has_slopes:
        slope = load_row_slope(call.terms, seq, tile.head) * LOG2_E
    rows = Rows(
        m, gl.maximum(m + seq.left, seq.low), gl.minimum(m + seq.right + 1, seq.high),
        lo, lo + own.n_whole, span.begin * BUILD.tile.block_n, slope,
    )  # fmt: skip
    return rows, n_blocks


@gluon.jit
def _load_numbers(numbers, seq, tile, ID: gl.constexpr, BUILD: gl.constexpr):
    """lse and delta of a consumer's rows; of those that are not stored, as of rows without keys."""
    ROW: gl.constexpr = gl.SliceLayout(1, accumulator(BUILD.tile.block_n))
    if BUILD.place >= PACKED:
        first = gl.load(numbers.table + tile.index.to(gl.int64) * FIELDS + FIRST_Q_TILE)
    else:
        first = tile.index * ((seq.q_stored + ROWS - 1) // ROWS)
    block = tile.number * _N_CONSUMERS + ID
    r = gl.arange(0, ROWS, layout=ROW)
    number = tile.head * fresh_number(numbers.n_blocks, BUILD) + first + block
    ptrs = numbers.ptr + number.to(gl.int64) * (2 * ROWS) + number_of_row(r)
    stored = block * ROWS + r < seq.q_stored
    lse = gl.load(ptrs, mask=stored, other=float("inf"))
    return lse, gl.load(ptrs + ROWS, mask=stored, other=0.0)


@gluon.jit
def _probabilities(s, lse, rows, j, call, seq, BUILD: gl.constexpr):
    """As `hopper_backward_common.probabilities`, of rows and block j of the keys."""
    n0 = rows.first_key + j * BUILD.tile.block_n
    s, scale, derivative = log2_scores(s, call.terms, BUILD)
    if BUILD.has_slopes:
        position = (rows.m + seq.shift - n0).to(gl.float32)
        s = subtract_distance(s, position, rows.slope, ROWS, BUILD.tile.block_n)
    if (j < rows.lo) | (j >= rows.hi):
        s = mask_columns(
            s, rows.start - n0, rows.stop - n0, BUILD.has_start, ROWS, BUILD.tile.block_n
        )
    p = exp2_fast(s * scale - lse[:, None])
    if BUILD.is_capped:
        return p, p * derivative
    else:
        return p, p


@gluon.jit
def _mma_partition(
    descs, memory, call, tile, numbers, outputs, ID: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    WIDTH: gl.constexpr = BUILD.width
    DTYPE: gl.constexpr = memory.q.dtype
    seq = fresh_sequence(call.place, tile.index, BUILD)
    rows, n_blocks = _describe(call, seq, tile, ID, BUILD)
    lse, delta = _load_numbers(numbers, seq, tile, ID, BUILD)
    dq, dq_rest = zero_sum(WIDTH)
    mbarrier.wait(memory.rows_full.index(0), 0)
    mbarrier.wait(memory.k_full.index(0), 0)
    s = issue_product(tile_at(memory.q, ID, ROWS, DIM), memory.k, 0, WIDTH)
    s = warpgroup_mma_wait(0, [s])
    if BUILD.has_sums:
        sums = sum_in_thread(gl.zeros_like(s), ROWS, BUILD.tile.block_n)
    for j in range(n_blocks):
        # 0, which the compiler does not know: it would move descriptors out of the loop.
        zero = j >> 30
        slot, v_slot, after = j % BUILD.k_slots, j % BUILD.v_slots, (j + 1) % BUILD.k_slots
        mbarrier.wait(memory.v_full.index(v_slot), (j // BUILD.v_slots) & 1)
        dout = tile_at(memory.dout, ID + zero, ROWS, VALUE_DIM)
        dp = issue_product(dout, memory.v, v_slot, BUILD.value_width)
        p, p_inner = _probabilities(s, lse, rows, j, call, seq, BUILD)
        dp = warpgroup_mma_wait(0, [dp])
        mbarrier.arrive(memory.v_empty.index(v_slot), count=1)
        if BUILD.has_sums:
            sums += sum_in_thread(p * dp, ROWS, BUILD.tile.block_n)
        ds = (p_inner * (dp - delta[:, None])).to(DTYPE)
        dq, dq_rest = issue_sum(ds, memory.k, slot, dq, dq_rest, WIDTH)
        mbarrier.wait(memory.k_full.index(after), ((j + 1) // BUILD.k_slots) & 1)
        s = issue_product(tile_at(memory.q, ID + zero, ROWS, DIM), memory.k, after, WIDTH)
        dq, dq_rest = wait_for_sum(parts_of(WIDTH), dq, dq_rest, WIDTH)
        mbarrier.arrive(memory.k_empty.index(slot), count=1)
        s = warpgroup_mma_wait(0, [s])
    # Of a row that sees nothing Q and dO may be NaN, and a sink's logit is an lse.
    rows, _ = _describe(call, seq, tile, ID, BUILD)
    is_alive = (lse != float("inf")) & (rows.start < rows.stop)
    first = tile.number * BLOCK_M + ID * ROWS
    if BUILD.has_sums:
        total = gl.convert_layout(gl.sum(sums, 1), lse.type.layout)
        base = statistics_base(
            fresh_statistics(outputs.sums, BUILD), seq.batch, seq.q_first + first, tile.head
        )
        total = gl.where(is_alive, total, 0.0)
        gl.store(base + (rows.m - first), total, mask=rows.m < seq.q_stored)
    dq = _finish(dq, is_alive, call)
    if parts_of(WIDTH) == 2:
        dq_rest = _finish(dq_rest, is_alive, call)
    at = [seq.batch, tile.head, seq.q_first + first, 0]
    n_rows = seq.q_stored - first
    # Q is of this consumer alone, and read.
    store_result(
        descs.dq, memory.q, ID, outputs.dq, at, dq, dq_rest, n_rows, BUILD.columns, DIM, WIDTH,
        BUILD,
    )  # fmt: skip
    # Shared memory stays until all of it has left.
    tma_store_wait(0)


@gluon.jit
def _finish(x, is_alive, call):
    """A part of dQ scaled, and 0 in rows that see nothing."""
    is_alive = gl.convert_layout(is_alive, gl.SliceLayout(1, x.type.layout))
    return gl.where(is_alive[:, None], x * call.terms.gradient_scale, 0.0)


# ---------------------------------------------------------------- kernel


@gluon.jit
def _attention_bwd_hopper_query_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    dq_desc,
    outputs,
    numbers,
    call,
    heads,
    BUILD: gl.constexpr,
):
    tile = Tile(*locate(call.place, heads, gl.program_id(0), FIRST_Q_TILE, True, 4, BUILD))
    descs = Descriptors(q_desc, k_desc, v_desc, dout_desc, dq_desc)
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    K_SLOTS: gl.constexpr = BUILD.k_slots
    V_SLOTS: gl.constexpr = BUILD.v_slots
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, ROWS, DIM], q_desc.layout)
    dout = gl.allocate_shared_memory(dout_desc.dtype, [2, 1, 1, ROWS, VALUE_DIM], dout_desc.layout)
    k = gl.allocate_shared_memory(
        k_desc.dtype, [K_SLOTS, 1, 1, BUILD.tile.block_n, DIM], k_desc.layout
    )
    v = gl.allocate_shared_memory(
        v_desc.dtype, [V_SLOTS, 1, 1, BUILD.tile.block_n, VALUE_DIM], v_desc.layout
    )
    rows_full = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mbarrier.init(rows_full.index(0), count=1)
    mbarrier.init(landing.index(0), count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=_N_CONSUMERS)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=_N_CONSUMERS)
    fence_async_shared()
    memory = Memory(q, dout, k, v, rows_full, k_full, v_full, k_empty, v_empty, landing)
    CONSUMER_REGISTERS: gl.constexpr = BUILD.registers[0]
    PRODUCER_REGISTERS: gl.constexpr = BUILD.registers[1]
    gl.warp_specialize(
        [
            (_mma_partition, (descs, memory, call, tile, numbers, outputs, 0, BUILD)),
            (_mma_partition, (descs, memory, call, tile, numbers, outputs, 1, BUILD)),
            (_load_partition, (descs, memory, call, tile, BUILD)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
