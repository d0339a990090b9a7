"""What the hopper backward reads and writes row by row: lse and delta before it, dQ after it.

Dims: a block is 64 query rows of one sequence and head. Blocks are counted head after head.
Grid: one program a block.

Numbers of a block: fp32 `[2, 64]`, lse in log2 units (+inf where a row has none, so that P is 0)
and delta = rowsum(dO * O) - dLSE (0 there). Row r = 16 t + 8 u + 2 lane + j stands at
16 t + 4 lane + 2 u + j: a thread of the backward holds the rows of one lane and reads 16 bytes at a
time, and those of four lanes lie in different banks of shared memory.

Buffer of dQ: fp32, one block after the other, of each first one half of the columns, then the
other. Inside a half, column c of row r stands where the thread that holds it in a wgmma accumulator
writes 16 bytes: at 512 (c / 8) + 128 (r / 16) + 16 (r % 8) + 4 (c % 8 / 2) + 2 (r / 8 % 2) + c % 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.placement import FIRST_Q_TILE, PACKED, locate
from ..kernels.softmax import LOG2_E
from ..kernels.structs import decode
from ..kernels.tiles import load_tile, row_base, row_product, statistics_base

_BLOCK = tl.constexpr(64)


# As `kernels.gluon` has them for Gluon's kernels.


@triton.jit
def begin_next():
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_last():
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _locate(place, PLACE: tl.constexpr):
    """A program's sequence and head, the first row in the sequence, the block among all."""
    seq, h, tile, number = locate(place, tl.program_id(0), PLACE, FIRST_Q_TILE, False)
    of_head = decode(place.n_tiles)
    if PLACE < PACKED:
        of_head *= decode(place.n_sequences)
    return seq, h, tile * _BLOCK, (h * of_head + number).to(tl.int64)


@triton.jit
def number_of_row(r):
    """Where the number of a block's row r stands."""
    return r // 16 * 16 + (r % 8 // 2) * 4 + (r // 8 % 2) * 2 + r % 2


@triton.jit
def _attention_bwd_hopper_prepare_kernel(
    out, remainder, dout, lse, dlse, rows_ptr, buffer_ptr, place,
    DIM: tl.constexpr, VALUE_DIMS: tl.constexpr, PLACE: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    """Numbers of a block's rows, and zeros in its part of the buffer. remainder: of out. DIM:
    columns of dQ there, 0 where it is not added up in a buffer."""
    begin_next()
    seq, h, m0, number = _locate(place, PLACE)
    if DIM > 0:
        cells = buffer_ptr + number * (_BLOCK * DIM) + tl.arange(0, _BLOCK * DIM)
        tl.store(cells, tl.zeros((_BLOCK * DIM,), tl.float32))
    r = tl.arange(0, _BLOCK)
    used, first = m0 + r < seq.q_used, seq.q_first + m0
    delta = tl.zeros((_BLOCK,), tl.float32)
    # Of a piece, -dlse is all of delta.
    if out.ptr is not None:
        o_base, do_base = row_base(out, seq.batch, first, h), row_base(dout, seq.batch, first, h)
        o_tile = load_tile(o_base, out.stride_m, used, True, _BLOCK, VALUE_DIMS, IS_WIDE)
        do_tile = load_tile(do_base, dout.stride_m, used, True, _BLOCK, VALUE_DIMS, IS_WIDE)
        delta += row_product(o_tile, do_tile, VALUE_DIMS)
        if remainder.ptr is not None:
            base = row_base(remainder, seq.batch, first, h)
            rest = load_tile(base, remainder.stride_m, used, True, _BLOCK, VALUE_DIMS, IS_WIDE)
            delta += row_product(rest, do_tile, VALUE_DIMS)
    if dlse.ptr is not None:
        delta -= tl.load(statistics_base(dlse, seq.batch, first, h) + r, mask=used, other=0.0)
    minus_inf = float("-inf")
    row_lse = tl.load(statistics_base(lse, seq.batch, first, h) + r, mask=used, other=minus_inf)
    is_empty = row_lse == minus_inf
    numbers = rows_ptr + number * (2 * _BLOCK) + number_of_row(r)
    tl.store(numbers, tl.where(is_empty, float("inf"), row_lse * LOG2_E))
    tl.store(numbers + _BLOCK, tl.where(is_empty, 0.0, delta))


@triton.jit
def _attention_bwd_hopper_finish_kernel(
    buffer_ptr, dq, scale, place,
    COLUMNS: tl.constexpr, DIM: tl.constexpr, PLACE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dQ of a block from the buffer, scaled and rounded; with ADD added to what is there. COLUMNS:
    of dq in memory, not more than DIM."""
    wait_for_last()
    seq, h, m0, number = _locate(place, PLACE)
    r = tl.arange(0, _BLOCK)[:, None]
    column = tl.arange(0, DIM)[None, :]
    x = tl.load(buffer_ptr + number * (_BLOCK * DIM) + tl.arange(0, _BLOCK * DIM)) * scale
    if not ADD:
        x = x.to(dq.ptr.dtype.element_ty)
    x = tl.reshape(x, (2, DIM // 16, 4, 8, 4, 2, 2))
    x = tl.reshape(tl.permute(x, (2, 5, 3, 0, 1, 4, 6)), (_BLOCK, DIM))
    ptrs = row_base(dq, seq.batch, seq.q_first + m0, h) + r.to(tl.int64) * dq.stride_m + column
    mask = (m0 + r < seq.q_stored) & (column < COLUMNS)
    if ADD:
        x += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, x.to(dq.ptr.dtype.element_ty), mask=mask)
