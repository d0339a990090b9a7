"""Rows of a unit in Hopper's kernels over a cache: Q in registers, values cleared, results stored.

Units: scores and references in log2 units; lse natural, fp32.
"""

from __future__ import annotations

from ..kernels.gluon import as_atoms, gl, gluon
from ..kernels.softmax import join_sink, softmax_end
from ..kernels.structs import decode
from .hopper_plan import ROWS, first_of_part, row_offsets, unit_rows

# By how much a maximum may pass its reference, in log2 units; the same as PTX writes it.
LIMIT = gl.constexpr(8.0)
LIMIT_PTX = gl.constexpr("0f41000000")
# The reference of a row that has none: far below any score, and finite, so that nothing is NaN.
NO_REFERENCE = gl.constexpr(-3.0e38)


@gluon.constexpr_function
def accumulator(columns):
    # More in one instruction would need more registers than a program of four warp groups starts
    # with, whatever they share out later.
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(columns, 128), 16])


@gluon.jit
def load_columns(ptr, base, owned, START: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr):
    """Columns of Q, where the product that reads them from registers has them."""
    LAYOUT: gl.constexpr = accumulator(WIDTH)
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    columns = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    rows = ptr + gl.convert_layout(base, ROW)
    mask = gl.convert_layout(owned, ROW)[:, None]
    return gl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0).to(DTYPE)


@gluon.jit
def packed(x, WIDTH: gl.constexpr):
    """Two to an int32: 16-bit numbers that a loop uses would each take a register."""
    low, high = gl.split(x.to(gl.int16, bitcast=True).reshape([ROWS, WIDTH // 2, 2]))
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def left_operand(x, DTYPE: gl.constexpr, WIDTH: gl.constexpr, BUILD: gl.constexpr):
    """What was packed as a left operand; registers stay where they are."""
    # Not pure: it would leave the loop.
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x],
        dtype=(gl.int16, gl.int16), is_pure=False, pack=1,
    )  # fmt: skip
    pairs = gl.join(low, high).reshape([ROWS, WIDTH]).to(DTYPE, bitcast=True)
    return gl.convert_layout(pairs, gl.DotOperandLayout(0, accumulator(BUILD.block_n), 2))


@gluon.jit
def clear_rows(ring, slot, start, stop, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Zeros in the tile of a slot outside rows [start, stop).

    It lies in memory as panels of 64 columns, each as atoms of 8 rows.
    """
    STRIPS: gl.constexpr = BLOCK_N // 8
    ATOMS: gl.constexpr = WIDTH // 64 * STRIPS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    atoms = as_atoms(ring, ring.shape[0] * ATOMS, 64)
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, LAYOUT))
    for i in range(0, ATOMS):
        row = i % STRIPS * 8
        if (row < start) | (row + 8 > stop):
            seen = (rows + row >= start) & (rows + row < stop)
            atom = atoms.index(slot * ATOMS + i)
            x = atom.load(LAYOUT)
            atom.store(gl.where(seen[:, None], x, 0.0).to(x.dtype))


@gluon.jit
def last_factor(sums, ref, sinks, h, segment):
    """What O is multiplied by at the end of a segment."""
    ROW: gl.constexpr = ref.type.layout
    factor = gl.full([ROWS], 1.0, gl.float32, ROW)
    if segment.is_whole:
        row_lse, factor = softmax_end(ref, gl.convert_layout(gl.sum(sums, 1), ROW), True)
        if sinks is not None:
            _, shrink = join_sink(row_lse, gl.load(sinks + h).to(gl.float32))
            factor *= shrink
    return factor


@gluon.jit
def store_statistics(
    lse, parts, place, sinks, share, seq, segment, ref, sums, BUILD: gl.constexpr
):  # fmt: skip
    """The lse of a unit's rows, or the state of a part's."""
    ROW: gl.constexpr = ref.type.layout
    m, h = unit_rows(share, ROW, BUILD)
    total = gl.convert_layout(gl.sum(sums, 1), ROW)
    if segment.is_whole:
        if lse.ptr is not None:
            row_lse, _ = softmax_end(ref, total, True)
            if sinks is not None:
                row_lse, _ = join_sink(row_lse, gl.load(sinks + h).to(gl.float32))
            at = seq.batch.to(gl.int64) * decode(lse.stride_b)
            at += h.to(gl.int64) * decode(lse.stride_h) + seq.q_first + m
            row_lse = gl.where(m < seq.q_used, row_lse, float("-inf"))
            gl.store(lse.ptr + at, row_lse, mask=m < seq.q_stored)
    else:
        part = first_of_part(place, parts, share, seq, BUILD)
        part += gl.arange(0, ROWS, layout=ROW)
        top = gl.where(total > 0.0, ref, float("-inf"))
        gl.store(parts.state + part * 2, top)
        gl.store(parts.state + part * 2 + 1, total)


@gluon.jit
def store_values(
    acc, out, parts, place, share, seq, segment, START: gl.constexpr, WIDTH: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    """Columns of O from START on: of the result, or of a part."""
    ACC: gl.constexpr = acc.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, ACC)
    E: gl.constexpr = BUILD.value_dims[0]
    IS_PACKED: gl.constexpr = place.cu_q is not None
    columns = START + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, ACC))
    m, h = unit_rows(share, ROW, BUILD)
    mask = (m < seq.q_stored)[:, None] & (columns < E)[None, :]
    if segment.is_whole:
        at = (out.ptr + row_offsets(out, seq, m, h, IS_PACKED))[:, None] + columns[None, :]
        gl.store(at, acc.to(out.ptr.dtype.element_ty), mask=mask)
    else:
        part = first_of_part(place, parts, share, seq, BUILD)
        part += gl.arange(0, ROWS, layout=ROW)
        gl.store((parts.out + part * E)[:, None] + columns[None, :], acc, mask=mask)
