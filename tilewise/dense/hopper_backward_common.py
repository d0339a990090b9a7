"""What the kernels of the hopper backward share: where a program's keys are, its producer, scores.

Dims: a tile is `block_n` keys of one kv head; who owns it visits blocks of `block_m` query rows,
    head after head of the group. Keys come in tiles of 64, as many as a warp group multiplies.
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
    tanh_fast,
    tma_load,
    wait_for_last,
)
from ..kernels.masks import row_span
from ..kernels.placement import FIELDS, FIRST_K_TILE, FIRST_Q_TILE, PACKED
from ..kernels.scores import load_slope
from ..kernels.softmax import LOG2_E
from ..kernels.structs import decode
from .hopper_fresh import fresh_number, fresh_sequence
from .hopper_producer import (
    ROWS,
    SpanBuild,
    _next_ticket,
    _put_back,
    _receive,
    clear_rows,
    locate,
)

BLOCK_M = gl.constexpr(64)


class BackwardBuild(NamedTuple):
    """What a kernel is compiled for.

    dim, value_dim: as tiles hold them. width, value_width: of which products are made. place: see
    `placement.py`. span: of a tile of keys. is_folded: a score is nothing but the scaled product.
    is_capped, has_slopes: there is a softcap, there are slopes. has_dq: dQ is added up in the
    same pass. has_queries: by a warp group of its own. dq_columns: of dQ that leave at a time.
    key_slots, slots: tiles of keys and blocks of rows in flight. keeps_keys, keeps_values: K and V
    stay in registers as left operands. takes_turns: groups issue their products one after the
    other. registers: of consumers, of the producer. columns, value_columns: of dK and dV in memory,
    where they are not stored by TMA. is_added: dK and dV are added to fp32 tensors.
    """

    dim: int
    value_dim: int
    width: int
    value_width: int
    place: int
    span: SpanBuild
    is_folded: bool
    is_capped: bool
    has_slopes: bool
    has_dq: bool
    has_queries: bool
    dq_columns: int
    key_slots: int
    slots: int
    keeps_keys: bool
    keeps_values: bool
    takes_turns: bool
    registers: tuple[int, int]
    columns: int
    value_columns: int
    is_added: bool


class Descriptors(NamedTuple):
    """For TMA: inputs, then outputs. rows: lse and delta of blocks. dq: the buffer, if any."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    dq: Any
    dk: Any
    dv: Any


class Heads(NamedTuple):
    """The order of a kernel's tiles. ptr, n_tiles: of one whose programs take tile after tile, as
    `hopper_producer.Tickets` has them, else None. n_heads: over all batch rows. together: how many
    take turns (see `hopper_producer.order_of`). n_blocks: of 64 rows of a query head, of all
    sequences. The numbers are coded."""

    ptr: Any
    n_tiles: Any
    n_heads: Any
    together: Any
    n_blocks: Any


class Tile(NamedTuple):
    """Which keys a program owns: the number of their sequence, the kv head, the tile in the
    sequence. blocks_of_head: of rows, of all sequences (coded)."""

    index: Any
    kv_head: Any
    number: Any
    blocks_of_head: Any


# Room for the numbers in the mail, a tile's three and six of its work: a power of two.
MAIL_FIELDS = gl.constexpr(16)


class Rows(NamedTuple):
    """What a producer knows of a tile's rows: from `first` to before `last` they see anything
    (others may be NaN, and become 0); the group's first head; how many blocks the program had
    before, those that nobody used included."""

    first: Any
    last: Any
    head: Any
    before: Any


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
def find_tile(call, heads, BUILD: gl.constexpr):
    """A program's tile, before its warps take their roles."""
    index, kv_head, number = locate(
        call.place, heads, gl.program_id(0), FIRST_K_TILE, False, 4, BUILD
    )
    return Tile(index, kv_head, number, heads.n_blocks)


@gluon.jit
def sequence_of(call, tile, BUILD: gl.constexpr):
    """A program's sequence, and its first key there. Found anew where it is needed: carried around
    the loop, its fields would take registers."""
    return fresh_sequence(call.place, tile.index, BUILD), tile.number * BUILD.span.block_n


@gluon.jit
def find_work(call, tile, BUILD: gl.constexpr):
    seq, _ = sequence_of(call, tile, BUILD)
    SPAN: gl.constexpr = BUILD.span
    span = row_span(call.mask, seq, tile.kv_head, tile.number, 0, SPAN)
    if BUILD.place >= PACKED:
        at = call.place.table + tile.index.to(gl.int64) * FIELDS + FIRST_Q_TILE
        first = gl.load(at)
    else:
        first = tile.index * ((seq.q_stored + BLOCK_M - 1) // BLOCK_M)
    group, blocks_of_head = fresh_number(call.place.group, BUILD), decode(tile.blocks_of_head)
    n_blocks = span.n_whole + span.n_partial
    origin = tile.kv_head * group * blocks_of_head + first + span.begin
    return Work(
        span.begin, span.head, span.n_whole, gl.maximum(n_blocks, 1), n_blocks * group, origin,
        blocks_of_head,
    )  # fmt: skip


@gluon.jit
def next_block(work, head, i):
    """After block i of a head of the group: the same of the block that is visited next. To divide
    its number would take the time of a product."""
    is_last = i + 1 == work.n_blocks
    return head + is_last.to(gl.int32), gl.where(is_last, 0, i + 1)


@gluon.jit
def number_of(work, head, i):
    """Which block it is among all."""
    return work.origin + head * work.blocks_of_head + i


# ---------------------------------------------------------------- producer


@gluon.jit
def load_partition(descs, memory, call, tile, BUILD: gl.constexpr):
    """Of a program of one tile."""
    work = find_work(call, tile, BUILD)
    seq, rows, keys = _find_edges(call, tile, 0, BUILD)
    n_landed = _load_keys(descs, memory, seq, tile, 0, keys, gl.to_tensor(0), BUILD)
    # The numbers of rows. K and V were there before.
    wait_for_last()
    zero = gl.to_tensor(0)
    _load_rows(descs, memory, seq, work, rows, 0, work.n_all + 1, n_landed, zero, zero, BUILD)


@gluon.jit
def load_tiles_partition(descs, memory, call, heads, BUILD: gl.constexpr):
    """Of a program that takes tile after tile. The mail says which, and at last that there is none
    (an index of -1)."""
    n_all = fresh_number(heads.n_tiles, BUILD)
    ticket = gl.program_id(0)
    n_tiles, n_uses, n_landed = 0, 0, 0
    while ticket < n_all:
        index, kv_head, number = locate(call.place, heads, ticket, FIRST_K_TILE, False, 1, BUILD)
        tile = Tile(index, kv_head, number, heads.n_blocks)
        work = find_work(call, tile, BUILD)
        n_landed = _load_tile(descs, memory, call, tile, work, n_tiles, n_uses, n_landed, BUILD)
        n_uses += work.n_all + 1
        n_tiles += 1
        ticket = _next_ticket(heads, BUILD)
    slot = _wait_for_slot(memory.keys_empty, n_tiles, BUILD.key_slots)
    _send_end(memory.mail, slot)
    mbarrier.arrive(memory.keys_full.index(slot), count=1)
    if n_all > gl.num_programs(0):
        _put_back(heads)


@gluon.jit
def slot_of(use, SLOTS: gl.constexpr):
    """Slot and phase of what was put into a ring after `use` others."""
    return use % SLOTS, (use // SLOTS) & 1


@gluon.jit
def _wait_for_slot(empty, use, SLOTS: gl.constexpr):
    """Until nobody needs what was there before. Returns: the slot."""
    slot, phase = slot_of(use, SLOTS)
    if use >= SLOTS:
        mbarrier.wait(empty.index(slot), phase ^ 1)
    return slot


@gluon.jit
def _load_tile(
    descs, memory, call, tile, work, n_tiles, n_uses, n_landed, BUILD: gl.constexpr
):  # fmt: skip
    """n_tiles, n_uses: tiles and blocks of rows that the program had, those that nobody used
    included. n_landed: copies it waited for. Returns: n_landed."""
    seq, rows, keys = _find_edges(call, tile, n_uses, BUILD)
    head, i, n_early = 0, 0, 0
    if BUILD.key_slots == 1:
        # The tile before is still being stored from where keys are to come: its successor's first
        # rows come meanwhile.
        if n_tiles > 0:
            n_early = gl.minimum(work.n_all + 1, BUILD.slots)
            n_landed, head, i = _load_rows(
                descs, memory, seq, work, rows, 0, n_early, n_landed, head, i, BUILD
            )
    slot = _wait_for_slot(memory.keys_empty, n_tiles, BUILD.key_slots)
    _send_tile(memory.mail, slot, tile, work)
    n_landed = _load_keys(descs, memory, seq, tile, slot, keys, n_landed, BUILD)
    # The numbers of rows, and the zeros that dQ is added to. K and V were there before.
    wait_for_last()
    n_landed, _, _ = _load_rows(
        descs, memory, seq, work, rows, n_early, work.n_all + 1, n_landed, head, i, BUILD
    )
    return n_landed


@gluon.jit
def _find_edges(call, tile, n_uses, BUILD: gl.constexpr):
    """Of a tile its sequence, `Rows`, and of its keys the first and the last that something sees;
    others may be NaN, and become 0."""
    seq, n0 = sequence_of(call, tile, BUILD)
    rows = Rows(
        gl.maximum(seq.low - seq.right, 0), gl.minimum(seq.q_used, seq.high - seq.left),
        tile.kv_head * fresh_number(call.place.group, BUILD), n_uses,
    )  # fmt: skip
    first_key = gl.maximum(seq.low, seq.left)
    last_key = gl.minimum(seq.high, seq.q_used + seq.right)
    return seq, rows, (first_key - n0, last_key - n0)


@gluon.jit
def _load_rows(
    descs, memory, seq, work, rows, begin, end, n_landed, head, i, BUILD: gl.constexpr
):  # fmt: skip
    """A tile's blocks from begin to end, of which the first is block i of a head. Returns:
    n_landed, head and i after them."""
    for j in range(begin, end):
        use = rows.before + j
        slot = _wait_for_slot(memory.empty, use, BUILD.slots)
        m0 = (work.begin + i) * BLOCK_M
        is_cut = m0 + BLOCK_M > rows.last
        if BUILD.place < PACKED:
            # TMA itself fills up with zeros where storage ends.
            is_cut = is_cut & (rows.last < seq.q_stored)
        is_cut = is_cut | (m0 < rows.first)
        at = [seq.batch, rows.head + head, seq.q_first + m0, 0]
        full = memory.q_full.index(slot)
        rows_at = [number_of(work, head, i) * 2 * BLOCK_M]
        if is_cut:
            start, stop = rows.first - m0, rows.last - m0
            n_landed = land(descs.q, memory.q, memory.landing, at, slot, n_landed)
            clear_rows(memory.q, slot, start, stop, BLOCK_M, BUILD.dim)
            n_landed = land(descs.dout, memory.dout, memory.landing, at, slot, n_landed)
            clear_rows(memory.dout, slot, start, stop, BLOCK_M, BUILD.value_dim)
            fence_async_shared()
            mbarrier.arrive(memory.do_full.index(slot), count=1)
            mbarrier.expect(full, descs.rows.block_type.nbytes)
            tma_load(descs.rows, rows_at, full, memory.rows.index(slot))
        else:
            mbarrier.expect(full, descs.q.block_type.nbytes + descs.rows.block_type.nbytes)
            tma_load(descs.q, at, full, memory.q.index(slot))
            # Before dO, which is needed later.
            tma_load(descs.rows, rows_at, full, memory.rows.index(slot))
            mbarrier.expect(memory.do_full.index(slot), descs.dout.block_type.nbytes)
            tma_load(descs.dout, at, memory.do_full.index(slot), memory.dout.index(slot))
        # The one more that nobody uses is the last again.
        if j + 1 < work.n_all:
            head, i = next_block(work, head, i)
    return n_landed, head, i


@gluon.jit
def _send_tile(mail, slot, tile, work):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    zero = gl.full([1], 0, gl.int32, LAYOUT)
    first = slot * MAIL_FIELDS
    mail.index(first).store(zero + tile.index)
    mail.index(first + 1).store(zero + tile.kv_head)
    mail.index(first + 2).store(zero + tile.number)
    mail.index(first + 3).store(zero + work.begin)
    mail.index(first + 4).store(zero + work.head)
    mail.index(first + 5).store(zero + work.n_whole)
    mail.index(first + 6).store(zero + work.n_blocks)
    mail.index(first + 7).store(zero + work.n_all)
    mail.index(first + 8).store(zero + work.origin)


@gluon.jit
def _send_end(mail, slot):
    """There is no tile any more."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mail.index(slot * MAIL_FIELDS).store(gl.full([1], -1, gl.int32, LAYOUT))


@gluon.jit
def has_tile(memory, n_tiles, BUILD: gl.constexpr):
    """Waits for the keys of a program's next tile, or to hear that there is none; which it is."""
    slot, phase = slot_of(n_tiles, BUILD.key_slots)
    mbarrier.wait(memory.keys_full.index(slot), phase)
    return _receive(memory.mail, slot * MAIL_FIELDS) >= 0


@gluon.jit
def read_mail(memory, slot, blocks_of_head, BUILD: gl.constexpr):
    """The tile whose keys are in a slot, and its work. Read where it is needed: carried around the
    loop, it would take registers."""
    mail, first = memory.mail, slot * MAIL_FIELDS
    tile = Tile(
        _receive(mail, first), _receive(mail, first + 1), _receive(mail, first + 2), blocks_of_head
    )
    work = Work(
        _receive(mail, first + 3), _receive(mail, first + 4), _receive(mail, first + 5),
        _receive(mail, first + 6), _receive(mail, first + 7), _receive(mail, first + 8),
        fresh_number(blocks_of_head, BUILD),
    )  # fmt: skip
    return tile, work


@gluon.jit
def _load_keys(descs, memory, seq, tile, slot, seen, n_landed, BUILD: gl.constexpr):
    """K and V, with zeros in the rows outside of those seen: the first, the last. Returns:
    n_landed."""
    start, stop = seen
    n0 = tile.number * BUILD.span.block_n
    is_cut = stop < BUILD.span.block_n
    if BUILD.place < PACKED:
        is_cut = is_cut & (stop + n0 < seq.k_stored)
    is_cut = is_cut | (start > 0)
    full = memory.keys_full.index(slot)
    TILES: gl.constexpr = BUILD.span.block_n // ROWS
    ring = slot * TILES
    if is_cut:
        for i in gl.static_range(TILES):
            at = [seq.batch, tile.kv_head, seq.k_first + n0 + i * ROWS, 0]
            n_landed = land(descs.k, memory.k, memory.landing, at, ring + i, n_landed)
            clear_rows(memory.k, ring + i, start - i * ROWS, stop - i * ROWS, ROWS, BUILD.dim)
            n_landed = land(descs.v, memory.v, memory.landing, at, ring + i, n_landed)
            clear_rows(memory.v, ring + i, start - i * ROWS, stop - i * ROWS, ROWS, BUILD.value_dim)
        fence_async_shared()
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, TILES * (descs.k.block_type.nbytes + descs.v.block_type.nbytes))
        for i in gl.static_range(TILES):
            at = [seq.batch, tile.kv_head, seq.k_first + n0 + i * ROWS, 0]
            tma_load(descs.k, at, full, memory.k.index(ring + i))
            tma_load(descs.v, at, full, memory.v.index(ring + i))
    return n_landed


@gluon.jit
def land(desc, ring, landing, at, slot, n_landed):
    """Copy a tile and wait for it. Returns: how often that was done."""
    mbarrier.expect(landing.index(0), desc.block_type.nbytes)
    tma_load(desc, at, landing.index(0), ring.index(slot))
    mbarrier.wait(landing.index(0), n_landed & 1)
    return n_landed + 1


# ---------------------------------------------------------------- consumers


@gluon.jit
def log2_scores(s, terms, BUILD: gl.constexpr):
    """Products as scores, but for ALiBi: what they are to be scaled by to be in log2 units, and the
    derivative of the softcap there."""
    if BUILD.is_folded:
        return s, terms.scale, 1.0
    elif BUILD.is_capped:
        t = tanh_fast(s * terms.scale)
        return t * (terms.cap * LOG2_E), 1.0, 1.0 - t * t
    else:
        return s * (terms.scale * LOG2_E), 1.0, 1.0


@gluon.jit
def probabilities(s, lse, call, tile, work, head, i, ID: gl.constexpr, BUILD: gl.constexpr):
    """P of tile ID of the keys and block i of a head's rows from their products, and P times what
    dP is to be multiplied by on its way to dS: the softcap's derivative, where there is one."""
    m0 = (work.begin + i) * BLOCK_M
    s, scale, derivative = log2_scores(s, call.terms, BUILD)
    if BUILD.has_slopes:
        seq, n0 = sequence_of(call, tile, BUILD)
        KEY: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        n = n0 + ID * ROWS + gl.arange(0, ROWS, layout=KEY)
        slope = load_slope(
            call.terms, seq, tile.kv_head * fresh_number(call.place.group, BUILD) + head
        )
        s = subtract_distance(s, (n - seq.shift - m0).to(gl.float32), slope * LOG2_E, ROWS, BLOCK_M)
    if (i < work.head) | (i >= work.head + work.n_whole):
        s = _mask(s, call, tile, m0, ID, BUILD)
    p = exp2_fast(s * scale - lse[None, :])
    if BUILD.is_capped:
        return p, p * derivative
    else:
        return p, p


@gluon.jit
def _mask(s, call, tile, m0, ID: gl.constexpr, BUILD: gl.constexpr):
    """-inf where a row does not see a key."""
    seq, n0 = sequence_of(call, tile, BUILD)
    KEY: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    n = n0 + ID * ROWS + gl.arange(0, ROWS, layout=KEY)
    is_key = (n >= seq.low) & (n < seq.high)
    stop = gl.where(is_key, n - seq.left + 1, 0)
    return mask_columns(s, n - seq.right - m0, stop - m0, True, ROWS, BLOCK_M)
