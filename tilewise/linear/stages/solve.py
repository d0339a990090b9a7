"""The inverse of a unit lower triangular matrix.

Math: [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]], two products a doubling, from single
    steps on; the first four within diagonal blocks of 16, as products of many small matrices.
    Powers of the matrix would take fewer steps, but their sum cancels: of like keys their entries
    grow as binomials where the inverse has 0 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import rung_pairs, rungs
from .tiles import fine_dot, load_block, load_block_transposed, narrow, split, store_block

BLOCK = tl.constexpr(16)


@triton.jit
def _chunk_invert_kernel(out, BUILD: tl.constexpr):
    """The inverse where it is not made with the rest of `prepare.py`, whose products for a vector
    gate leave it too few warps. Grid: chunk slots x value heads."""
    C: tl.constexpr = BUILD.chunk
    DTYPE: tl.constexpr = out.scores.dtype.element_ty
    at = tl.program_id(0).to(tl.int64)
    a = load_block(out.lower, at, 0, 0, C, C, C, C)
    store_inverse(out.inverse, at, invert_unit_lower(a, C, BUILD), DTYPE, BUILD)


@triton.jit
def invert_unit_lower(a, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """(I + a)^-1 for a strictly lower `[C, C]`."""
    x = _invert_blocks(a, CHUNK, BUILD)
    # A loop, not unrolled, since its code takes long to compile.
    for n in range(4, rungs(CHUNK)):
        c = tl.where(rung_pairs(n, CHUNK, False), a, 0.0)
        x = x - fine_dot(x, fine_dot(c, x, BUILD), BUILD)
    return x


@triton.jit
def _invert_blocks(a, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """The inverse of the diagonal blocks, 0 elsewhere: all at once, each by the same doubling."""
    N: tl.constexpr = CHUNK // BLOCK
    n = tl.arange(0, N)
    is_diagonal = (n[:, None, None, None] == n[None, None, :, None]).broadcast_to(
        (N, BLOCK, N, BLOCK)
    )
    blocks = tl.sum(tl.where(is_diagonal, tl.reshape(a, (N, BLOCK, N, BLOCK)), 0.0), 2)
    row = tl.arange(0, BLOCK)[None, :, None]
    col = tl.arange(0, BLOCK)[None, None, :]
    # Of two steps the inverse is 1 and -a.
    pair = tl.expand_dims(rung_pairs(0, BLOCK, False), 0)
    x = tl.where(row == col, 1.0, tl.where(pair, -blocks, 0.0))
    for k in tl.static_range(1, 4):
        pair = tl.expand_dims(rung_pairs(k, BLOCK, False), 0)
        c = tl.where(pair, blocks, 0.0)
        x = x - fine_dot(x, fine_dot(c, x, BUILD), BUILD)
    wide = tl.expand_dims(x, 2).broadcast_to((N, BLOCK, N, BLOCK))
    return tl.reshape(tl.where(is_diagonal, wide, 0.0), (CHUNK, CHUNK))


@triton.jit
def store_inverse(ptr, index, x, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """Of fp32 inputs in fp32; of others as the sum of two matrices in bf16, one after the other."""
    C: tl.constexpr = BUILD.chunk
    if tl.float32 == DTYPE:
        store_block(ptr, index, 0, 0, x, C, C, C, C, BUILD)
    else:
        high = narrow(x, tl.bfloat16, BUILD)
        store_block(ptr, 2 * index, 0, 0, high, C, C, C, C, BUILD)
        store_block(ptr, 2 * index + 1, 0, 0, x - high.to(tl.float32), C, C, C, C, BUILD)


@triton.jit
def apply_inverse(
    ptr, index, x, TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """The stored inverse, or its transpose, times x, which is fp32."""
    if tl.float32 == DTYPE:
        return fine_dot(_load(ptr, index, TRANSPOSED, BUILD), x, BUILD)
    else:
        high = _load(ptr, 2 * index, TRANSPOSED, BUILD)
        low = _load(ptr, 2 * index + 1, TRANSPOSED, BUILD)
        if BUILD.precision == "interpreted":
            return tl.dot(high.to(tl.float32) + low.to(tl.float32), x)
        else:
            x_high, x_low = split(x)
            return tl.dot(high, x_high, tl.dot(high, x_low, tl.dot(low, x_high)))


@triton.jit
def _load(ptr, index, TRANSPOSED: tl.constexpr, BUILD: tl.constexpr):
    C: tl.constexpr = BUILD.chunk
    if TRANSPOSED:
        return load_block_transposed(ptr, index, 0, 0, C, C, C, C)
    else:
        return load_block(ptr, index, 0, 0, C, C, C, C)
