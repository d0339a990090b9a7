"""Decays within a chunk, from sums of log gates over the steps between.

A sum is never the difference of two longer ones that were rounded: it is a product of the gates
with a matrix of 0 and 1, or a running sum from where it begins, or exact. So no exponent is above 0
where no gate is, a strong gate costs its neighbours no accuracy, and the gradient of a gate adds up
what passed it, with the same matrix transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .structs import HIGHEST_LOG2, LOG2_E, LOWEST_LOG2
from .tiles import load_columns, load_numbers, load_rows


@triton.jit
def load_scalar_gate(g, row, first, count, head, CHUNK: tl.constexpr):
    """Log2 gates `[C]`."""
    return tl.maximum(load_numbers(g, row, first, count, head, CHUNK) * LOG2_E, LOWEST_LOG2)


@triton.jit
def log2_gate(gate):
    """Of natural log gates, fp32."""
    return tl.maximum(gate * LOG2_E, LOWEST_LOG2)


@triton.jit
def load_vector_gate(
    g, row, first, count, head, d0,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Log2 gates `[C, WIDTH]`."""
    tile = load_rows(g, row, first, count, head, d0, CHUNK, WIDTH, DIM).to(tl.float32)
    return log2_gate(tile)


@triton.jit
def load_gate_columns(
    g, row, first, count, head, d0,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The same, transposed: `[WIDTH, C]`."""
    tile = load_columns(g, row, first, count, head, d0, CHUNK, WIDTH, DIM).to(tl.float32)
    return log2_gate(tile)


@triton.jit
def up_to(CHUNK: tl.constexpr, BEFORE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`[i, l]`: 1 where step l is at or before i; with BEFORE, where l is after i; or `[l, i]`."""
    if TRANSPOSED:
        i, step = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    else:
        i, step = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if BEFORE:
        return (step > i).to(tl.float32)
    else:
        return (step <= i).to(tl.float32)


@triton.jit
def from_first(CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`[i, l]`: 1 where step l is after the first and at or before i; or `[l, i]`."""
    step = tl.arange(0, CHUNK)
    if TRANSPOSED:
        i, step = step[None, :], step[:, None]
    else:
        i, step = step[:, None], step[None, :]
    return ((step > 0) & (step <= i)).to(tl.float32)


@triton.jit
def decay_of(exponent):
    return tl.exp2(tl.minimum(exponent, HIGHEST_LOG2))


@triton.jit
def scalar_decays(gate, g, row, first, count, head, CHUNK: tl.constexpr):
    """From the chunk's first step to each, from each step to the last, of the first step itself,
    and of all others.

    The first gate stands apart: it may be so strong that, in 16 bits, nothing were left of what
    every other step reads of the state; the state in fp32 takes it as it is.
    """
    after = load_scalar_gate(gate, row, first + 1, count - 1, head, CHUNK)
    left = tl.cumsum(after, 0, reverse=True)
    is_first = tl.arange(0, CHUNK) == 0
    later = tl.where(is_first, 0.0, g)
    entry = decay_of(tl.sum(tl.where(is_first, g, 0.0), 0))
    return decay_of(tl.cumsum(later, 0)), decay_of(left), entry, decay_of(tl.sum(later, 0))


@triton.jit
def whole_decays(g, CHUNK: tl.constexpr):
    """Of a vector gate `[C, dims]` the first step's and all others'."""
    is_first = (tl.arange(0, CHUNK) == 0)[:, None]
    entry = tl.sum(tl.where(is_first, g, 0.0), 0)
    return decay_of(entry), decay_of(tl.sum(tl.where(is_first, 0.0, g), 0))


@triton.jit
def pair_decay(g, CHUNK: tl.constexpr):
    """`[i, j]`: a scalar gate's decay from step j to step i, 0 for j > i.

    Here a sum is the difference of two from the chunk's start, whose digits are kept apart so that
    none is lost: multiples of 2^-4 and of 2^-23, each with sums that fp32 holds exactly, and the
    rest, of which 64 are below 2^-18.
    """
    row, col = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    g = tl.minimum(g, -LOWEST_LOG2)
    high = tl.floor(g * 16.0) * 0.0625
    rest = g - high
    middle = tl.floor(rest * 8388608.0) * 1.1920928955078125e-07
    low = _differences(tl.cumsum(rest - middle, 0))
    sums = _differences(tl.cumsum(high, 0)) + (_differences(tl.cumsum(middle, 0)) + low)
    return tl.where(row >= col, decay_of(sums), 0.0)


@triton.jit
def _differences(x):
    return x[:, None] - x[None, :]


@triton.jit
def rung(n, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`[i, l]` of the n-th rung of the ladder: which gates stand between step i and the border that
    two neighbouring blocks of 2^n steps share; or `[l, i]`.

    The border is the first step of the second block: its gates after that, up to i, and the first
    block's after i, up to that. What passes between the two is the product of both.
    """
    if TRANSPOSED:
        i, step = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    else:
        i, step = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    border = (((i >> n) | 1) << n).to(tl.int32)
    low, high = tl.minimum(i, border), tl.maximum(i, border)
    return ((step > low) & (step <= high)).to(tl.float32)


# How far from a border that serves pairs on both sides a decay may be, as a power of two: factors
# are as large and as small. bf16 has the range, and no precision to lose to the exponents'; and two
# such stay within what growth may reach.
NEAR_LOG2, SHORT_LOG2 = tl.constexpr(57.7), tl.constexpr(4.0)


@triton.constexpr_function
def near_limit(dtype):
    """For factors that are rounded to a dtype."""
    return NEAR_LOG2 if dtype == tl.bfloat16 else SHORT_LOG2


# What rows of fp16 have to stay below: times 2^SHORT_LOG2, and a beta of 2, fp16 holds them.
_LARGE_FP16 = tl.constexpr(2047.0)


@triton.jit
def are_large(q, k, DTYPE: tl.constexpr):
    """1 where factors of these rows, on either side of a border, may be beyond what the dtype
    holds, else 0."""
    worst = 0.0
    if tl.float16 == DTYPE:
        worst = tl.maximum(tl.max(tl.abs(q.to(tl.float32))), tl.max(tl.abs(k.to(tl.float32))))
    return (worst > _LARGE_FP16).to(tl.int32)


@triton.jit
def from_middle(CHUNK: tl.constexpr):
    """`[i, l]`: which gates stand between the middle of step i's block of 16 and the step: 1 those
    before it, -1 those after it."""
    i, step = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    middle = ((i >> 4) << 4) + 8
    after = ((step > middle) & (step <= i)).to(tl.float32)
    return after - ((step > i) & (step <= middle)).to(tl.float32)


@triton.jit
def rung_pairs(n, CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """`[i, j]` bool: i in a second block of 2^n steps, j in the first of the two; or `[j, i]`."""
    if TRANSPOSED:
        i, j = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    else:
        i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    # The blocks' numbers differ in the last bit alone, and j's is 0.
    return (((i >> n) ^ (j >> n)) == 1) & (j < i)


@triton.constexpr_function
def rungs(chunk):
    """How many there are: blocks of 1, 2, 4, ... steps up to half a chunk."""
    return chunk.bit_length() - 1
