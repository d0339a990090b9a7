"""The inverse of a unit lower triangular matrix.

Math: row by row within diagonal blocks of 16, all at once: x_i = -(a_i + sum_j<i a_ij x_j). Then
    [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]], two products a doubling. Powers of the
    matrix would need no rows, but their sum cancels: of like keys their entries grow as binomials
    where the inverse has 0 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import rung_pairs
from .tiles import fine_dot

BLOCK = tl.constexpr(16)


@triton.jit
def invert_unit_lower(a, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """(I + a)^-1 for a strictly lower `[C, C]`."""
    x = _invert_blocks(a, CHUNK)
    if CHUNK > 16:
        x = _double(x, a, 4, CHUNK, BUILD)
    if CHUNK > 32:
        x = _double(x, a, 5, CHUNK, BUILD)
    return x


@triton.jit
def _invert_blocks(a, CHUNK: tl.constexpr):
    """The inverse of the diagonal blocks, 0 elsewhere."""
    N: tl.constexpr = CHUNK // BLOCK
    n = tl.arange(0, N)
    is_diagonal = (n[:, None, None, None] == n[None, None, :, None]).broadcast_to(
        (N, BLOCK, N, BLOCK)
    )
    blocks = tl.sum(tl.where(is_diagonal, tl.reshape(a, (N, BLOCK, N, BLOCK)), 0.0), 2)
    row = tl.arange(0, BLOCK)[None, :, None]
    col = tl.arange(0, BLOCK)[None, None, :]
    # Without the diagonal, whose rows are added up here.
    x = tl.zeros((N, BLOCK, BLOCK), tl.float32)
    for i in range(1, BLOCK):
        a_i = tl.sum(tl.where(row == i, blocks, 0.0), 1)
        x_i = -(a_i + tl.sum(tl.expand_dims(a_i, 2) * x, 1))
        x = tl.where(row == i, tl.expand_dims(x_i, 1), x)
    x = tl.where(row == col, 1.0, x)
    wide = tl.expand_dims(x, 2).broadcast_to((N, BLOCK, N, BLOCK))
    return tl.reshape(tl.where(is_diagonal, wide, 0.0), (CHUNK, CHUNK))


@triton.jit
def _double(x, a, N: tl.constexpr, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """The inverse of diagonal blocks of 2^(N + 1) from that of blocks of 2^N."""
    c = tl.where(rung_pairs(N, CHUNK, False), a, 0.0)
    return x - fine_dot(x, fine_dot(c, x, BUILD), BUILD)
