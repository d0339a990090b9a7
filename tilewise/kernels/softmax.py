"""The online softmax: one step over a tile of scores, and its end.

Math: Milakov and Gimelshein (arXiv 1805.02867); FlashAttention-2 (arXiv 2307.08691), algorithm 1.
Units: folded scores are raw products, and `scale` brings them to log2 units inside the one
    multiply-add before exp2. Other scores are natural: a product with log2 e beforehand would be
    one more rounding, and would overflow where a bias is the dtype's most negative number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def softmax_step(s, row_max, row_sum, scale, IS_FOLDED: tl.constexpr):
    """Probabilities of a tile `[m, n]` relative to the new maximum, and the new statistics.

    Returns: p, what earlier sums have to be multiplied by, row_max, row_sum.
    """
    if IS_FOLDED:
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
    else:
        new_max = tl.maximum(row_max, tl.max(s, 1))
    # A row that has seen nothing has maximum -inf: subtract 0, not -inf from -inf.
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    if IS_FOLDED:
        p = tl.exp2(s * scale - shift[:, None])
        rescale = tl.exp2(row_max - shift)
    else:
        p = tl.exp2((s - shift[:, None]) * LOG2_E)
        rescale = tl.exp2((row_max - shift) * LOG2_E)
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def softmax_end(row_max, row_sum, IS_FOLDED: tl.constexpr):
    """The natural lse of each row and 1 / its sum; -inf and 1 for a row that saw nothing."""
    is_empty = row_sum == 0.0
    safe_sum = tl.where(is_empty, 1.0, row_sum)
    if IS_FOLDED:
        lse = row_max * LN_2 + tl.log2(safe_sum) * LN_2
    else:
        lse = row_max + tl.log2(safe_sum) * LN_2
    return tl.where(is_empty, float("-inf"), lse), 1.0 / safe_sum


@triton.jit
def split_exponent(x):
    """A normal x > 0 as a number in [1, 2) and the exponent of two beside it, both fp32.

    Infinity and NaN stay what they are.
    """
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    is_finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(is_finite, mantissa, x), ((bits >> 23) - 127).to(tl.float32)


@triton.jit
def join_sink(lse, sink):
    """The lse with the sink in it, and what the row's output shrinks by."""
    top = tl.maximum(lse, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.exp2((lse - shift) * LOG2_E) + tl.exp2((sink - shift) * LOG2_E)
    joined = tl.where(top == float("-inf"), top, shift + tl.log2(total) * LN_2)
    return joined, tl.exp2((lse - tl.where(top == float("-inf"), 0.0, joined)) * LOG2_E)


@triton.jit
def probabilities(s, lse, scale, IS_FOLDED: tl.constexpr):
    """P = exp(S - lse) again, in the backward. lse: natural, +inf for rows without any."""
    if IS_FOLDED:
        return tl.exp2(s * scale - lse * LOG2_E)
    else:
        return tl.exp2((s - lse) * LOG2_E)
