"""Tiles of rows: their pointers, loads and stores, and products of tiles in pieces.

Tile sizes are powers of two. A head dim that is not is cut into pieces that are (80 = 64 + 16,
192 = 128 + 64), so that 80 costs 80 and not 128; `DIMS` is the dim and then the pieces' widths, and
a tile is a tuple of its pieces. More pieces also make shorter products, see `cut_dim`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .structs import decode


@triton.constexpr_function
def _start(dims, i):
    """Where piece i of a head dim starts."""
    return sum(dims[1 : i + 1])


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
    """BLOCK rows from `base` on. Rows outside `mask_rows` are 0 where MASKED."""
    tile = ()
    for i in tl.static_range(len(DIMS) - 1):
        piece = _load_piece(
            base, stride, mask_rows, MASKED, BLOCK, DIMS[0], _start(DIMS, i), DIMS[i + 1], WIDE
        )
        tile = tile + (piece,)
    return tile


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
    for i in tl.static_range(len(DIMS) - 1):
        _store_piece(
            base, stride, tile[i], mask_rows, ADD, BLOCK, DIMS[0], _start(DIMS, i), DIMS[i + 1],
            WIDE,
        )  # fmt: skip


@triton.jit
def _zero_piece(BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    return tl.zeros((BLOCK, WIDTH), tl.float32)


@triton.jit
def zero_tile(BLOCK: tl.constexpr, DIMS: tl.constexpr):
    """An fp32 accumulator of BLOCK rows."""
    tile = ()
    for i in tl.static_range(len(DIMS) - 1):
        tile = tile + (_zero_piece(BLOCK, DIMS[i + 1]),)
    return tile


@triton.jit
def scale_tile(tile, factor, DIMS: tl.constexpr):
    """A tile times a scalar, or times a factor for each row, `[rows, 1]`."""
    scaled = ()
    for i in tl.static_range(len(DIMS) - 1):
        scaled = scaled + (tile[i] * factor,)
    return scaled


@triton.jit
def clean_rows(tile, seen, DIMS: tl.constexpr):
    """A tile with 0 in the rows that are not seen: a NaN there must not meet a product."""
    cleaned = ()
    for i in tl.static_range(len(DIMS) - 1):
        cleaned = cleaned + (tl.where(seen[:, None], tile[i], 0.0),)
    return cleaned


@triton.jit
def rounded_off(tile, DTYPE: tl.constexpr, DIMS: tl.constexpr):
    """What an fp32 tile loses where it is stored in DTYPE."""
    lost = ()
    for i in tl.static_range(len(DIMS) - 1):
        lost = lost + (tile[i] - tile[i].to(DTYPE).to(tl.float32),)
    return lost


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
    for i in tl.static_range(1, len(DIMS) - 1):
        product = dot(a[i], tl.trans(b[i]), product, BUILD)
    return product


@triton.jit
def dot_add(p, tile, acc, DIMS: tl.constexpr, BUILD: tl.constexpr):
    """acc + p tile, for p `[x, y]` and a tile `[y, dim]`; p is rounded to the tile's dtype."""
    p = p.to(tile[0].dtype)
    total = ()
    for i in tl.static_range(len(DIMS) - 1):
        total = total + (dot(p, tile[i], acc[i], BUILD),)
    return total


@triton.jit
def row_product(o_tile, do_tile, DIMS: tl.constexpr):
    """rowsum(dO * O), fp32."""
    total = _piece_product(o_tile[0], do_tile[0])
    for i in tl.static_range(1, len(DIMS) - 1):
        total += _piece_product(o_tile[i], do_tile[i])
    return total


@triton.jit
def _piece_product(o, do):
    # An out of 0 adds nothing: an empty row is all 0, and its dO may be anything.
    # So does a dO of 0, whatever out is: it may have overflowed.
    product = o.to(tl.float32) * do.to(tl.float32)
    return tl.sum(tl.where((o == 0.0) | (do == 0.0), 0.0, product), 1)
