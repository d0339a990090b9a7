"""The inverse of a unit lower triangular matrix.

Math: [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]], from blocks of 1 to the whole. Two
    products a doubling, all blocks of a size at once. Powers of the matrix would take fewer, but
    their sum cancels: of like keys their entries grow as binomials and the inverse has 0 and 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import rung_pairs
from .tiles import fine_dot


@triton.jit
def invert_unit_lower(a, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """(I + a)^-1 for a strictly lower `[C, C]`."""
    row, col = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    identity = (row == col).to(tl.float32)
    # Of blocks of 1 the inverse is the identity, and both products are the matrix itself.
    x = identity - tl.where(rung_pairs(1, CHUNK, False), a, 0.0)
    x = _double(x, a, 2, CHUNK, BUILD)
    x = _double(x, a, 4, CHUNK, BUILD)
    x = _double(x, a, 8, CHUNK, BUILD)
    if CHUNK > 16:
        x = _double(x, a, 16, CHUNK, BUILD)
    if CHUNK > 32:
        x = _double(x, a, 32, CHUNK, BUILD)
    return x


@triton.jit
def _double(x, a, SIZE: tl.constexpr, CHUNK: tl.constexpr, BUILD: tl.constexpr):
    """The inverse of diagonal blocks of 2 SIZE from that of blocks of SIZE."""
    c = tl.where(rung_pairs(SIZE, CHUNK, False), a, 0.0)
    return x - fine_dot(x, fine_dot(c, x, BUILD), BUILD)
