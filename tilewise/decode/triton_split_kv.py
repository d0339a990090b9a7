"""Attention over a cache on any GPU that Triton knows: split keys, equal shares, one pass.

Dims: q `[B, M, H, D]` or packed `[T, H, D]` with B = 1 row of storage; k `[R, N, G, D]` or
    `[pages, P, G, D]`; v the same with E; out as q with E; lse `[B, H, M]`; parts
    `[slots, G, BLOCK_M, E]` and `[slots, G, BLOCK_M, 2]`, fp32.
Grid: teams x G; see `triton_plan.py`. Rows of a tile are queries times the query heads of one kv
    head, so that keys are read once for all of them.
Math: FlashDecoding: online softmax over each part of the keys, then a merge of what they left.
Units: scores as in `kernels/softmax.py`; lse natural, fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..kernels.scores import add_terms
from ..kernels.softmax import join_sink, softmax_end, softmax_step
from ..kernels.structs import decode
from ..kernels.tiles import (
    _start,
    clean_rows,
    dot,
    scale_tile,
    zero_tile,
)
from .triton_plan import n_sequences, sequence_of, share_of, units_before, work_of

NONE, HEAD, TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
E4M3, E5M2 = tl.constexpr(1), tl.constexpr(2)
# Two pairs of bytes, each a key's columns 2 i and 2 i + 1, to column 2 i of both keys and column
# 2 i + 1 of both.
_FROM_E4M3 = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# The upper half of an fp16.
_FROM_E5M2 = tl.constexpr("prmt.b32 $0, $2, 0, 0x2404; prmt.b32 $1, $2, 0, 0x3414;")


class Scales(NamedTuple):
    """Of a float8 cache, fp32 or None. strides: of one row, slot and head; 0 where it is shared."""

    k: Any
    v: Any
    stride_b: Any
    stride_n: Any
    stride_g: Any


class Parts(NamedTuple):
    """What is left of units that more than one program worked on: sums of weighted values, and the
    maximum and the sum of weights of each row. Not an out and an lse: an lse of 10 holds a weight
    to ten times the rounding.

    notes: int64 `[teams, 8]` where parts are not fixed: a team's first quantum and its end, all
    quanta, the teams that share them; then the end of the unit that it began and left to others
    to finish, 0 where there is none, and that unit's sequence and tile. n_units, per_unit: where
    they are fixed, how many units have parts, and how many parts each; coded.
    """

    out: Any
    state: Any
    notes: Any
    n_units: Any
    per_unit: Any


class Rows(NamedTuple):
    """Rows of a unit: query m and head h of each, which of them are in use and which are stored."""

    m: Any
    h: Any
    owned: Any
    stored: Any


@triton.jit
def rows_of(seq, tile, g, BUILD: tl.constexpr):
    GROUP: tl.constexpr = BUILD.group
    x = tile * BUILD.block_m + tl.arange(0, BUILD.block_m)
    m = x // GROUP
    h = g * GROUP + x % GROUP
    return Rows(m, h, m < seq.q_used, m < seq.q_stored)


@triton.jit
def row_offsets(x, seq, rows, IS_PACKED: tl.constexpr):
    """Where rows begin in q or out."""
    offsets = (seq.q_first + rows.m).to(tl.int64) * x.stride_m + rows.h.to(tl.int64) * x.stride_h
    if IS_PACKED:
        return offsets
    else:
        return offsets + seq.batch.to(tl.int64) * x.stride_b


@triton.jit
def _load_rows(
    base, offsets, mask, DIM: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    columns = START + tl.arange(0, WIDTH)
    # Columns first: they stay where they are from tile to tile.
    ptrs = (base + columns)[None, :] + offsets[:, None]
    if START + WIDTH > DIM:
        return tl.load(ptrs, mask=mask[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs, mask=mask[:, None], other=0.0)


@triton.jit
def load_rows(base, offsets, mask, DIMS: tl.constexpr):
    """A tile of rows that begin anywhere; 0 outside the mask."""
    tile = ()
    for i in tl.static_range(len(DIMS) - 1):
        piece = _load_rows(base, offsets, mask, DIMS[0], _start(DIMS, i), DIMS[i + 1])
        tile = tile + (piece,)
    return tile


@triton.jit
def store_rows(base, offsets, tile, mask, DIMS: tl.constexpr):
    for i in tl.static_range(len(DIMS) - 1):
        columns = _start(DIMS, i) + tl.arange(0, DIMS[i + 1])
        keep = mask[:, None] & (columns < DIMS[0])[None, :]
        ptrs = base + offsets[:, None] + columns[None, :]
        tl.store(ptrs, tile[i].to(base.dtype.element_ty), mask=keep)


@triton.jit
def _convert(tile, DTYPE: tl.constexpr, DIMS: tl.constexpr, BUILD: tl.constexpr):
    converted = ()
    for i in tl.static_range(len(DIMS) - 1):
        if BUILD.pairs != NONE:
            even, odd = _unpacked(tile[i], BUILD)
            converted = converted + (even, odd)
        else:
            converted = converted + (tile[i].to(DTYPE),)
    return converted


@triton.constexpr_function
def _halved(dims):
    """A head dim and its pieces in pairs of columns."""
    return tuple(x // 2 for x in dims)


@triton.constexpr_function
def _apart(dims):
    """A head dim, and for each of its pieces the even columns and the odd ones."""
    return dims[0], *(x // 2 for x in dims[1:] for _ in range(2))


@triton.jit
def _take_apart(tile, DIMS: tl.constexpr):
    """Columns as `_apart` has them."""
    found = ()
    for i in tl.static_range(len(DIMS) - 1):
        even, odd = tl.split(tile[i].reshape(tile[i].shape[0], DIMS[i + 1] // 2, 2))
        found = found + (even, odd)
    return found


@triton.jit
def _put_together(tile, DIMS: tl.constexpr):
    found = ()
    for i in tl.static_range(len(DIMS) - 1):
        both = tl.join(tile[2 * i], tile[2 * i + 1])
        found = found + (both.reshape(both.shape[0], DIMS[i + 1]),)
    return found


@triton.jit
def _unpacked(x, BUILD: tl.constexpr):
    """Even and odd columns of float8 in pairs, in fp16. Matrix units want numbers of two keys side
    by side in a register, which shared memory hands out for 16 bits, and not for 8."""
    if BUILD.precision == "interpreted":
        F8: tl.constexpr = tl.float8e4nv if BUILD.pairs == E4M3 else tl.float8e5
        even = x.to(tl.int8).to(F8, bitcast=True).to(tl.float16)
        odd = (x >> 8).to(tl.int8).to(F8, bitcast=True).to(tl.float16)
        return even, odd
    else:
        ASM: tl.constexpr = _FROM_E4M3 if BUILD.pairs == E4M3 else _FROM_E5M2
        return tl.inline_asm_elementwise(
            ASM, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _in_fp16(tile, DIMS: tl.constexpr):
    """Rows of bf16 in fp16, and the power of two that each was divided by: what is lost is
    2^-25 of a row's largest."""
    top = tl.max(tl.abs(tile[0].to(tl.float32)), 1)
    for i in tl.static_range(1, len(DIMS) - 1):
        top = tl.maximum(top, tl.max(tl.abs(tile[i].to(tl.float32)), 1))
    power = power_of_two(top)
    scaled = ()
    for i in tl.static_range(len(DIMS) - 1):
        scaled = scaled + ((tile[i].to(tl.float32) / power[:, None]).to(tl.float16),)
    return scaled, power


@triton.jit
def power_of_two(x):
    """The largest that is not above x >= 0; 1 for what is no normal number."""
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where((power > 0.0) & (power < float("inf")), power, 1.0)


@triton.jit
def rows_of_tile(place, b, t, mask, BUILD: tl.constexpr):
    """The rows or pages of a tile's keys, inside what there is, whatever the tables hold: one for
    each key, or one for all where a page holds whole tiles; flat, the slots that pages begin at."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    # Rows that nobody owns come with a sequence that tables do not have.
    is_real = b < decode(place.B)
    if BUILD.page > 0:
        table = place.table + b.to(tl.int64) * decode(place.width)
        if BUILD.page % BLOCK_N == 0:
            # A tile of a sequence is never behind its last page, but the next one may be.
            column = tl.minimum(t * BLOCK_N // BUILD.page, decode(place.width_in_use) - 1)
            row = tl.load(table + column, mask=is_real & (column >= 0), other=0)
        else:
            n = t * BLOCK_N + tl.arange(0, BLOCK_N)
            row = tl.load(table + n // BUILD.page, mask=mask, other=0)
    else:
        row = b
        if place.rows is not None:
            row = tl.load(place.rows + b, mask=is_real, other=0)
    row = tl.minimum(tl.maximum(row, 0), decode(place.storage) - 1)
    if BUILD.is_flat:
        row = row.to(tl.int32) * BUILD.page
    return row


@triton.jit
def load_keys(x, row, n, g, mask, DIMS: tl.constexpr, BUILD: tl.constexpr):
    """Keys or values n, which lie in `row`."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    base = x.ptr + g.to(tl.int64) * x.stride_h
    slot = n
    if BUILD.page > 0:
        slot = n % BUILD.page
    if BUILD.is_flat:
        slot += row
    elif (BUILD.page > 0) & (BUILD.page % BLOCK_N != 0):
        return load_rows(
            base, row.to(tl.int64) * x.stride_b + slot.to(tl.int64) * x.stride_m, mask, DIMS
        )
    else:
        base += row.to(tl.int64) * x.stride_b
    return load_rows(base, slot.to(tl.int64) * x.stride_m, mask, DIMS)


@triton.jit
def _visible(place, seq, rows, bits, n, BUILD: tl.constexpr):
    """bool `[m, n]`: which keys a row sees."""
    start = tl.maximum(rows.m + seq.left, seq.low)
    stop = tl.where(rows.owned, tl.minimum(rows.m + seq.right + 1, seq.high), 0)
    seen = (n[None, :] >= start[:, None]) & (n[None, :] < stop[:, None])
    if place.tree is not None:
        own = n[None, :] - seq.shift
        bit = (bits[:, None] >> tl.maximum(own, 0).to(bits.dtype)) & 1
        seen = seen & ((own < 0) | ((own < decode(place.tree_bits)) & (bit == 1)))
    return seen


@triton.jit
def _added(a, b, acc, BUILD: tl.constexpr):
    """acc + a b. A product of fp32 is summed by itself first: exact products are added one after
    the other, and a long sum loses what several short ones keep."""
    if (a.dtype == tl.float32) & (BUILD.precision == "ieee"):
        # A number that is not 0 keeps the compiler from summing into acc all the same.
        return acc + tl.dot(a, b, input_precision="ieee", max_num_imprecise_acc=1)
    else:
        return dot(a, b, acc, BUILD)


@triton.jit
def _scores(q_tile, k_tile, DIMS: tl.constexpr, BUILD: tl.constexpr):
    product = dot(q_tile[0], tl.trans(k_tile[0]), None, BUILD)
    for i in tl.static_range(1, len(DIMS) - 1):
        product = _added(q_tile[i], tl.trans(k_tile[i]), product, BUILD)
    return product


@triton.jit
def _add_values(p, v_tile, acc, VALUE_DIMS: tl.constexpr, BUILD: tl.constexpr):
    p = p.to(v_tile[0].dtype)
    total = ()
    for i in tl.static_range(len(VALUE_DIMS) - 1):
        total = total + (_added(p, v_tile[i], acc[i], BUILD),)
    return total


@triton.jit
def load_queries(q, seq, rows, IS_PACKED: tl.constexpr, DIMS: tl.constexpr):
    return load_rows(q.ptr, row_offsets(q, seq, rows, IS_PACKED), rows.owned, DIMS)


@triton.jit
def _segment(
    q_tile, k, v, place, terms, scales, seq, rows, tile, g, t0, t1, BUILD: tl.constexpr
):  # fmt: skip
    """A unit's rows over its key tiles [t0, t1): the sums of values, the maximum and the sum of the
    weights of what they see of it."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    IS_PAIRED: tl.constexpr = BUILD.pairs != NONE
    WHOLE: tl.constexpr = BUILD.dims
    WHOLE_VALUES: tl.constexpr = BUILD.value_dims
    # As they are stored, and as they are multiplied.
    STORED: tl.constexpr = _halved(WHOLE) if IS_PAIRED else WHOLE
    STORED_VALUES: tl.constexpr = _halved(WHOLE_VALUES) if IS_PAIRED else WHOLE_VALUES
    DIMS: tl.constexpr = _apart(WHOLE) if IS_PAIRED else WHOLE
    VALUE_DIMS: tl.constexpr = _apart(WHOLE_VALUES) if IS_PAIRED else WHOLE_VALUES
    if IS_PAIRED:
        q_tile = _take_apart(q_tile, WHOLE)
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = zero_tile(BLOCK_M, VALUE_DIMS)
    # What the rows of this tile see at most, and what all of them see.
    m_first = tile * BLOCK_M // BUILD.group
    m_last = tl.minimum(((tile + 1) * BLOCK_M - 1) // BUILD.group, seq.q_used - 1)
    start = tl.maximum(seq.low, m_first + seq.left)
    stop = tl.minimum(seq.high, m_last + seq.right + 1)
    stop = tl.where(m_last >= m_first, stop, start)
    whole_start = tl.maximum(seq.low, m_last + seq.left)
    whole_stop = tl.minimum(seq.high, m_first + seq.right + 1)
    bits = rows.m
    if place.tree is not None:
        inside = rows.owned & (rows.m < decode(place.tree_bits))
        at = seq.index.to(tl.int64) * decode(place.tree_stride) + rows.m
        # Past its last row a tree shows nothing: not even what comes before.
        bits = tl.load(place.tree + at, mask=inside, other=0)
        rows = Rows(rows.m, rows.h, inside, rows.stored)
        whole_stop = tl.where(m_last < decode(place.tree_bits), whole_stop, whole_start)
        whole_stop = tl.minimum(whole_stop, seq.shift)
    t0 = tl.maximum(t0, start // BLOCK_N)
    # Rows that see nothing visit no tile: those that nobody owns have no slope to read there.
    t1 = tl.where(stop > start, tl.minimum(t1, tl.cdiv(stop, BLOCK_N)), t0)
    # A GPU turns float8 into fp16, which holds all of it, and into bf16 by way of that.
    DTYPE: tl.constexpr = tl.float32 if q_tile[0].dtype == tl.float32 else tl.float16
    IS_FP16: tl.constexpr = q_tile[0].dtype != tl.float32
    IS_SCALED: tl.constexpr = (BUILD.scales != NONE) & (q_tile[0].dtype == tl.bfloat16)
    k_factor = 1.0
    v_factor = 1.0
    if BUILD.scales == HEAD:
        of_batch = seq.index.to(tl.int64) * decode(scales.stride_b)
        is_real = seq.index < decode(place.B)
        k_factor = tl.load(scales.k + of_batch + g, mask=is_real, other=0.0)
        v_factor = tl.load(scales.v + of_batch + g, mask=is_real, other=0.0)
    if IS_SCALED:
        q_tile, q_power = _in_fp16(q_tile, DIMS)
    # Looked up one tile ahead, so that no load of keys waits for its table.
    n = t0 * BLOCK_N + tl.arange(0, BLOCK_N)
    row = rows_of_tile(place, seq.index, t0, (n >= start) & (n < stop), BUILD)
    for t in range(t0, t1):
        n = t * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = (n >= start) & (n < stop)
        k_tile = load_keys(k, row, n, g, mask_n, STORED, BUILD)
        if BUILD.is_shared:
            v_tile = k_tile
        else:
            v_tile = load_keys(v, row, n, g, mask_n, STORED_VALUES, BUILD)
        if BUILD.scales != NONE:
            k_tile = _convert(k_tile, DTYPE, STORED, BUILD)
            v_tile = _convert(v_tile, DTYPE, STORED_VALUES, BUILD)
        s = _scores(q_tile, k_tile, DIMS, BUILD)
        if BUILD.scales == TOKEN:
            slot = n
            if BUILD.page > 0:
                slot = n % BUILD.page
            if BUILD.is_flat:
                at = (row + slot).to(tl.int64) * decode(scales.stride_n) + g
            else:
                at = row.to(tl.int64) * decode(scales.stride_b) + g
                at += slot.to(tl.int64) * decode(scales.stride_n)
            k_scale = tl.load(scales.k + at, mask=mask_n, other=0.0)
            s = s * k_scale[None, :]
        if IS_SCALED:
            s = s * (q_power * k_factor)[:, None]
        elif BUILD.scales == HEAD:
            s = s * k_factor
        if not BUILD.is_folded:
            s, _ = add_terms(s, terms, seq, rows.h[:, None], rows.m[:, None], n[None, :], BUILD)
        if (t * BLOCK_N < whole_start) | ((t + 1) * BLOCK_N > whole_stop):
            s = tl.where(_visible(place, seq, rows, bits, n, BUILD), s, float("-inf"))
        p, rescale, row_max, row_sum = softmax_step(
            s, row_max, row_sum, terms.scale, BUILD.is_folded
        )
        if BUILD.scales == TOKEN:
            v_scale = tl.load(scales.v + at, mask=mask_n, other=0.0)
            if IS_FP16:
                # Such a weight times a small scale is nothing in fp16: the tile's power of two
                # stays outside the product.
                power = power_of_two(tl.max(v_scale, 0))
                v_scale = v_scale / power
                rescale = rescale / power
            p = p * v_scale[None, :]
        acc = scale_tile(acc, rescale[:, None], VALUE_DIMS)
        acc = _add_values(p, v_tile, acc, VALUE_DIMS, BUILD)
        if (BUILD.scales == TOKEN) & IS_FP16:
            acc = scale_tile(acc, power, VALUE_DIMS)
        if BUILD.page > 0:
            n += BLOCK_N
            row = rows_of_tile(place, seq.index, t + 1, (n >= start) & (n < stop), BUILD)
    # Rows that nobody owns met keys of others.
    seen = rows.owned & (row_sum > 0.0)
    acc = clean_rows(scale_tile(acc, v_factor, VALUE_DIMS), seen, VALUE_DIMS)
    if IS_PAIRED:
        acc = _put_together(acc, WHOLE_VALUES)
    return acc, tl.where(seen, row_max, float("-inf")), tl.where(seen, row_sum, 0.0)


@triton.jit
def _cache_attention_fwd_kernel(
    q, k, v, out, lse, parts, place, terms, scales, BUILD: tl.constexpr
):
    """The units of one team's share, for one kv head."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    IS_PACKED: tl.constexpr = place.cu_q is not None
    G = decode(place.G)
    team = tl.program_id(0) // G
    g = tl.program_id(0) % G
    quantum = decode(place.quantum)
    n_all = tl.num_programs(0) // G
    flat, end, b, first, total, n_teams = share_of(
        place, team, n_all, tl.arange(0, BUILD.block_b), BUILD
    )
    if not BUILD.is_fixed:
        if g == 0:
            note = parts.notes + team * 8
            tl.store(note, flat)
            tl.store(note + 1, end)
            tl.store(note + 2, total)
            tl.store(note + 3, n_teams.to(tl.int64))
            tl.store(note + 4, tl.zeros((), tl.int64))
    seq = sequence_of(place, b, b < n_sequences(place), BUILD)
    work = work_of(place, seq, BUILD)
    tile = (flat - first).to(tl.int32) // work.quanta
    rows = rows_of(seq, tile, g, BUILD)
    q_tile = load_queries(q, seq, rows, IS_PACKED, DIMS)
    # A large tile of queries would take the registers of what is worked on.
    IS_AHEAD: tl.constexpr = BLOCK_M * DIMS[0] <= 4096
    while flat < end:
        chunk = (flat - first).to(tl.int32) % work.quanta
        count = tl.minimum(work.quanta - chunk, tl.minimum(end - flat, 1 << 30).to(tl.int32))
        if BUILD.is_fixed:
            count = tl.minimum(count, 1)
        has_work = tile < work.n_units
        count = tl.where(has_work, count, 0)
        # The next unit and its queries are on their way while this one is worked on.
        is_last = (tile + 1 >= work.n_units) & (chunk + count >= work.quanta)
        goes_on = is_last | (has_work == 0)
        next_b = b + tl.where(goes_on, 1, 0)
        next_first = tl.where(goes_on, flat + count, first)
        next_seq = sequence_of(place, next_b, next_b < n_sequences(place), BUILD)
        next_work = work_of(place, next_seq, BUILD)
        next_tile = (flat + count - next_first).to(tl.int32) // next_work.quanta
        next_rows = rows_of(next_seq, next_tile, g, BUILD)
        if IS_AHEAD:
            next_q = load_queries(q, next_seq, next_rows, IS_PACKED, DIMS)
        if has_work:
            if not BUILD.is_fixed:
                if (chunk == 0) & (count < work.quanta) & (g == 0):
                    note = parts.notes + team * 8
                    tl.store(note + 4, flat + work.quanta)
                    tl.store(note + 5, b.to(tl.int64))
                    tl.store(note + 6, tile.to(tl.int64))
            t0 = work.begin + chunk * quantum
            acc, row_max, row_sum = _segment(
                q_tile, k, v, place, terms, scales, seq, rows, tile, g, t0, t0 + count * quantum,
                BUILD,
            )  # fmt: skip
            if count == work.quanta:
                row_lse, factor = softmax_end(row_max, row_sum, BUILD.is_folded)
                if terms.sinks is not None:
                    sink = tl.load(terms.sinks + rows.h, mask=rows.owned, other=0.0)
                    row_lse, shrink = join_sink(row_lse, sink.to(tl.float32))
                    factor *= shrink
                acc = scale_tile(acc, factor[:, None], VALUE_DIMS)
                offsets = row_offsets(out, seq, rows, IS_PACKED)
                store_rows(out.ptr, offsets, acc, rows.stored, VALUE_DIMS)
                if lse.ptr is not None:
                    store_lse(lse, seq, rows, row_lse)
            else:
                if BUILD.is_fixed:
                    # Where offsets of queries are not what they should be there are units beyond.
                    unit = units_before(place, seq.q_first, b, BUILD) + tile
                    unit = tl.minimum(unit, decode(parts.n_units) - 1)
                    slot = unit.to(tl.int64) * decode(parts.per_unit) + chunk
                else:
                    # A share has two units at most that others work on too.
                    slot = team.to(tl.int64) * 2 + tl.where(chunk == 0, 1, 0)
                part = (slot * G + g) * BLOCK_M + tl.arange(0, BLOCK_M)
                store_rows(parts.out, part * VALUE_DIMS[0], acc, rows.stored, VALUE_DIMS)
                tl.store(parts.state + part * 2, row_max)
                tl.store(parts.state + part * 2 + 1, row_sum)
        flat += count
        b, first, tile = next_b, next_first, next_tile
        seq, work, rows = next_seq, next_work, next_rows
        if IS_AHEAD:
            q_tile = next_q
        else:
            q_tile = load_queries(q, seq, rows, IS_PACKED, DIMS)


@triton.jit
def store_lse(lse, seq, rows, row_lse):
    at = seq.batch.to(tl.int64) * decode(lse.stride_b) + rows.h.to(tl.int64) * decode(lse.stride_h)
    row_lse = tl.where(rows.owned, row_lse, float("-inf"))
    tl.store(lse.ptr + at + seq.q_first + rows.m, row_lse, mask=rows.stored)
