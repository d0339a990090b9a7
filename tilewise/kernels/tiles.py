"""Tiles of rows: their pointers, loads and stores, and products of tiles in one or two pieces.

Tile sizes are powers of two. A head dim that is not is cut into two pieces that are (80 = 64 + 16,
192 = 128 + 64), so that 80 costs 80 and not 128. `DIMS` is (dim, first piece, second piece or 0);
a tile is a pair of pieces, the second one being the first again where there is only one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .structs import decode


@triton.jit
def row_base(x, batch, row, h):
    """Pointer to storage row `row` of head h. 64-bit: a tensor may pass 2^31 elements."""
    offset = batch.to(tl.int64) * x.stride_b + row.to(tl.int64) * x.stride_m
    return x.ptr + offset + tl.cast(h, tl.int64) * x.stride_h


@triton.jit
def statistics_base(x, batch, row, h):
    """Pointer to a row's number of head h."""
    offset = batch.to(tl.int64) * decode(x.stride_b) + tl.cast(h, tl.int64) * decode(x.stride_h)
    return x.ptr + offset + row


@triton.jit
def _piece_offsets(
    stride, BLOCK: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):
    rows = tl.arange(0, BLOCK)
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride + (START + tl.arange(0, WIDTH))[None, :]


@triton.jit
def _load_piece(
    base,
    stride,
    mask_rows,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    ptrs = base + _piece_offsets(stride, BLOCK, START, WIDTH, WIDE)
    if START + WIDTH > DIM:
        mask_cols = (START + tl.arange(0, WIDTH)) < DIM
        if MASKED:
            return tl.load(ptrs, mask=mask_rows[:, None] & mask_cols[None, :], other=0.0)
        else:
            return tl.load(ptrs, mask=mask_cols[None, :], other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=mask_rows[:, None], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_tile(
    base,
    stride,
    mask_rows,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """BLOCK rows from `base` on, in pieces. Rows outside `mask_rows` are 0 where MASKED."""
    first = _load_piece(base, stride, mask_rows, MASKED, BLOCK, DIMS[0], 0, DIMS[1], WIDE)
    second = first
    if DIMS[2] > 0:
        second = _load_piece(
            base, stride, mask_rows, MASKED, BLOCK, DIMS[0], DIMS[1], DIMS[2], WIDE
        )
    return first, second


@triton.jit
def _store_piece(
    base,
    stride,
    piece,
    mask_rows,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    ptrs = base + _piece_offsets(stride, BLOCK, START, WIDTH, WIDE)
    mask = mask_rows[:, None] & ((START + tl.arange(0, WIDTH)) < DIM)[None, :]
    if ADD:
        piece += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(ptrs, piece.to(base.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    base, stride, tile, mask_rows,
    BLOCK: tl.constexpr, DIMS: tl.constexpr, ADD: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows in `mask_rows`; with ADD, add to what is there."""
    _store_piece(base, stride, tile[0], mask_rows, ADD, BLOCK, DIMS[0], 0, DIMS[1], WIDE)
    if DIMS[2] > 0:
        _store_piece(base, stride, tile[1], mask_rows, ADD, BLOCK, DIMS[0], DIMS[1], DIMS[2], WIDE)


@triton.jit
def zero_tile(BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """An fp32 accumulator of BLOCK rows."""
    FIRST: tl.constexpr = DIMS[1]
    SECOND: tl.constexpr = DIMS[2]
    first = tl.zeros((BLOCK, FIRST), tl.float32)
    second = first
    if SECOND > 0:
        second = tl.zeros((BLOCK, SECOND), tl.float32)
    return first, second


@triton.jit
def scale_tile(tile, factor, DIMS: tl.constexpr):
    """A tile times a scalar, or times a factor for each row, `[rows, 1]`."""
    first = tile[0] * factor
    second = first
    if DIMS[2] > 0:
        second = tile[1] * factor
    return first, second


@triton.jit
def dot(a, b, acc, BUILD: tl.constexpr):
    """acc + a b in fp32; acc may be None."""
    PRECISION: tl.constexpr = BUILD.precision
    if PRECISION == "interpreted":
        # Triton 3.6's interpreter multiplies the bit patterns of bf16.
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def dot_rows(a, b, DIMS: tl.constexpr, BUILD: tl.constexpr):
    """a b^T of tiles `[x, dim]` and `[y, dim]`: `[x, y]` in fp32."""
    product = dot(a[0], tl.trans(b[0]), None, BUILD)
    if DIMS[2] > 0:
        product = dot(a[1], tl.trans(b[1]), product, BUILD)
    return product


@triton.jit
def dot_add(p, tile, acc, DIMS: tl.constexpr, BUILD: tl.constexpr):
    """acc + p tile, for p `[x, y]` and a tile `[y, dim]`; p is rounded to the tile's dtype."""
    p = p.to(tile[0].dtype)
    first = dot(p, tile[0], acc[0], BUILD)
    second = first
    if DIMS[2] > 0:
        second = dot(p, tile[1], acc[1], BUILD)
    return first, second


@triton.jit
def clean_rows(tile, seen, DIMS: tl.constexpr):
    """A tile with 0 in the rows that are not seen: a NaN there must not meet a product."""
    first = tl.where(seen[:, None], tile[0], 0.0)
    second = first
    if DIMS[2] > 0:
        second = tl.where(seen[:, None], tile[1], 0.0)
    return first, second
