"""Loads, stores and products of the stages' tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode


@triton.jit
def narrow(x, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """x in another dtype, rounded to the nearest."""
    if BUILD.precision == "interpreted" and tl.bfloat16 == DTYPE and x.dtype == tl.float32:
        # The interpreter cuts the low half of the bits off (Triton 3.6 to 3.9).
        bits = x.to(tl.int32, bitcast=True)
        # Of a small number it makes another where that half is not 0.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def _row_base(x, row, first, head):
    """64-bit: a tensor may pass 2^31 elements. A tile's own offsets may not (`LinearCall.operand`):
    the address of every row in 64 bits is what a loop over tiles would spend its time on."""
    offset = tl.cast(row, tl.int64) * x.stride_b + tl.cast(first, tl.int64) * x.stride_m
    return x.ptr + offset + tl.cast(head, tl.int64) * x.stride_h


@triton.jit
def load_rows(
    x, row, first, count, head, d0,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """`[ROWS, WIDTH]` of tokens from `first` on, dims from d0; 0 past `count` and DIM."""
    return load_steps(x, row, first, count, head, d0, tl.arange(0, ROWS), WIDTH, DIM)


@triton.jit
def load_steps(
    x, row, first, count, head, d0, steps, WIDTH: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """The same of tokens in any order, each a step after `first`."""
    cols = d0 + tl.arange(0, WIDTH)
    ptrs = _row_base(x, row, first, head) + (steps[:, None] * x.stride_m + cols[None, :])
    return tl.load(ptrs, mask=(steps < count)[:, None] & (cols < DIM)[None, :], other=0.0)


@triton.jit
def load_columns(
    x, row, first, count, head, d0,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The same, transposed: `[WIDTH, ROWS]`."""
    rows, cols = tl.arange(0, ROWS), d0 + tl.arange(0, WIDTH)
    ptrs = _row_base(x, row, first, head) + (rows[None, :] * x.stride_m + cols[:, None])
    return tl.load(ptrs, mask=(rows < count)[None, :] & (cols < DIM)[:, None], other=0.0)


@triton.jit
def store_rows(
    x, row, first, count, head, d0, tile,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, ROWS), d0 + tl.arange(0, WIDTH)
    ptrs = _row_base(x, row, first, head) + (rows[:, None] * x.stride_m + cols[None, :])
    mask = (rows < count)[:, None] & (cols < DIM)[None, :]
    tl.store(ptrs, narrow(tile, x.ptr.dtype.element_ty, BUILD), mask=mask)


@triton.jit
def store_columns(
    x, row, first, count, head, d0, tile,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Of a tile that is transposed, `[WIDTH, ROWS]`."""
    rows, cols = tl.arange(0, ROWS), d0 + tl.arange(0, WIDTH)
    ptrs = _row_base(x, row, first, head) + (rows[None, :] * x.stride_m + cols[:, None])
    mask = (rows < count)[None, :] & (cols < DIM)[:, None]
    tl.store(ptrs, narrow(tile, x.ptr.dtype.element_ty, BUILD), mask=mask)


@triton.jit
def _number_ptrs(x, row, first, head, ROWS: tl.constexpr):
    """Of one number a token; its strides are coded."""
    steps = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
    offset = tl.cast(row, tl.int64) * decode(x.stride_b) + tl.cast(head, tl.int64) * decode(
        x.stride_h
    )
    return x.ptr + offset + steps * decode(x.stride_m)


@triton.jit
def load_row(x, row, step, head, d0, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """`[WIDTH]` of one token, dims from d0; 0 past DIM."""
    cols = d0 + tl.arange(0, WIDTH)
    return tl.load(_row_base(x, row, step, head) + cols, mask=cols < DIM, other=0.0)


@triton.jit
def load_number(x, row, step, head):
    """The number of one token, fp32."""
    offset = tl.cast(row, tl.int64) * decode(x.stride_b) + tl.cast(step, tl.int64) * decode(
        x.stride_m
    )
    return tl.load(x.ptr + offset + head * decode(x.stride_h)).to(tl.float32)


@triton.jit
def load_numbers(x, row, first, count, head, ROWS: tl.constexpr):
    """One number a token, `[ROWS]` fp32; 0 past `count`."""
    ptrs = _number_ptrs(x, row, first, head, ROWS)
    return tl.load(ptrs, mask=tl.arange(0, ROWS) < count, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(x, row, first, count, head, numbers, ROWS: tl.constexpr, BUILD: tl.constexpr):
    ptrs = _number_ptrs(x, row, first, head, ROWS)
    mask = tl.arange(0, ROWS) < count
    tl.store(ptrs, narrow(numbers, x.ptr.dtype.element_ty, BUILD), mask=mask)


@triton.jit
def load_block(
    ptr, index, r0, c0,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`[HEIGHT, WIDTH]` of the index-th matrix `[ROWS, COLS]` of a buffer."""
    rows, cols = r0 + tl.arange(0, HEIGHT), c0 + tl.arange(0, WIDTH)
    ptrs = ptr + index * (ROWS * COLS) + rows[:, None] * COLS + cols[None, :]
    return tl.load(ptrs, mask=(rows < ROWS)[:, None] & (cols < COLS)[None, :], other=0.0)


@triton.jit
def load_block_transposed(
    ptr, index, r0, c0,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The same block as `[WIDTH, HEIGHT]`."""
    rows, cols = r0 + tl.arange(0, HEIGHT), c0 + tl.arange(0, WIDTH)
    ptrs = ptr + index * (ROWS * COLS) + rows[None, :] * COLS + cols[:, None]
    return tl.load(ptrs, mask=(rows < ROWS)[None, :] & (cols < COLS)[:, None], other=0.0)


@triton.jit
def store_block(
    ptr, index, r0, c0, tile, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    rows, cols = r0 + tl.arange(0, HEIGHT), c0 + tl.arange(0, WIDTH)
    ptrs = ptr + index * (ROWS * COLS) + rows[:, None] * COLS + cols[None, :]
    mask = (rows < ROWS)[:, None] & (cols < COLS)[None, :]
    tl.store(ptrs, narrow(tile, ptr.dtype.element_ty, BUILD), mask=mask)


@triton.jit
def store_steps(
    ptr, index, d0, steps, tile,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Rows in any order, columns from d0 on."""
    cols = d0 + tl.arange(0, WIDTH)
    ptrs = ptr + index * (ROWS * COLS) + steps[:, None] * COLS + cols[None, :]
    mask = (steps < ROWS)[:, None] & (cols < COLS)[None, :]
    tl.store(ptrs, narrow(tile, ptr.dtype.element_ty, BUILD), mask=mask)


@triton.jit
def dot(a, b, acc, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """acc + a b of operands rounded to the inputs' dtype, in fp32; acc may be None."""
    PRECISION: tl.constexpr = BUILD.precision
    if PRECISION == "interpreted":
        # Triton 3.6's interpreter multiplies the bit patterns of bf16.
        a, b = narrow(a, DTYPE, BUILD), narrow(b, DTYPE, BUILD)
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    elif PRECISION == "split":
        return _wide_dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        return tl.dot(a.to(DTYPE), b.to(DTYPE), acc)


@triton.jit
def fine_dot(a, b, BUILD: tl.constexpr):
    """a b of fp32 numbers: as fp32 does it for fp32 inputs, to 2^-16 for others."""
    PRECISION: tl.constexpr = BUILD.precision
    if PRECISION == "interpreted":
        return tl.dot(a, b)
    elif PRECISION == "split":
        return _wide_dot(a, b, None)
    else:
        a_high, a_low = split(a)
        b_high, b_low = split(b)
        return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def sum_dot(ones, x, BUILD: tl.constexpr):
    """The same for a matrix of 0 and 1 on the left."""
    if BUILD.precision == "interpreted":
        return tl.dot(ones, x)
    else:
        ones = ones.to(tl.bfloat16)
        high, low = split(x)
        if BUILD.precision == "split":
            _, middle, lowest = _split_in_three(x)
            return tl.dot(ones, high, tl.dot(ones, middle, tl.dot(ones, lowest)))
        else:
            return tl.dot(ones, high, tl.dot(ones, low))


@triton.jit
def sum_dot_right(x, ones, BUILD: tl.constexpr):
    """The same with the matrix on the right."""
    if BUILD.precision == "interpreted":
        return tl.dot(x, ones)
    else:
        ones = ones.to(tl.bfloat16)
        high, low = split(x)
        if BUILD.precision == "split":
            _, middle, lowest = _split_in_three(x)
            return tl.dot(high, ones, tl.dot(middle, ones, tl.dot(lowest, ones)))
        else:
            return tl.dot(high, ones, tl.dot(low, ones))


@triton.jit
def _wide_dot(a, b, acc):
    """acc + a b to fp32's accuracy, the small products first.

    In bf16. Kernels with three tf32 products instead read out of bounds on an H200 (Triton 3.6,
    2026-11-30), likely for the reason in `machine_code.py`; they have not run since.
    """
    a1, a2, a3 = _split_in_three(a)
    b1, b2, b3 = _split_in_three(b)
    small = tl.dot(a1, b3, tl.dot(a3, b1, tl.dot(a2, b2)))
    small = tl.dot(a1, b2, tl.dot(a2, b1, small))
    small = tl.dot(a1, b1, small)
    if acc is None:
        return small
    else:
        return acc + small


@triton.jit
def split(x):
    """fp32 numbers as the sum of two in bf16, to 2^-17."""
    wide, high = _upper_half(x)
    return high, (x - wide).to(tl.bfloat16)


@triton.jit
def _split_in_three(x):
    """fp32 numbers as the sum of three in bf16, to 2^-25."""
    wide, high = _upper_half(x)
    rest = x - wide
    wide, middle = _upper_half(rest)
    return high, middle, (rest - wide).to(tl.bfloat16)


@triton.jit
def _upper_half(x):
    """fp32 numbers rounded to bf16, in fp32 and in bf16.

    By their bits: a conversion and the one back are slow where each number has both of its own.
    """
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & ~0xFFFF
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return bits.to(tl.float32, bitcast=True), high
