"""What a score is made of besides q . k, and dropout's bits.

Index tensors m and n are local to the sequence and broadcast against each other, so that one
function serves scores `[m, n]` and transposed scores `[n, m]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .softmax import LOG2_E
from .structs import decode


@triton.jit
def _tanh(x):
    """To fp32 accuracy: a polynomial near 0, where 1 - exp(-2 x) would cancel."""
    x2 = x * x
    near = -0.00886323552990220 + x2 * 0.00359212803657248
    near = 0.0218694885361552 + x2 * near
    near = -0.0539682539682540 + x2 * near
    near = 0.1333333333333333 + x2 * near
    near = x + x * x2 * (-0.3333333333333333 + x2 * near)
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - small) / (1.0 + small)
    return tl.where(x2 < 0.1, near, tl.where(x < 0.0, -far, far))


@triton.jit
def add_terms(s, terms, seq, h, m, n, BUILD: tl.constexpr):
    """Natural scores from raw products, and tanh(s / cap), by which the softcap's gradient goes."""
    s = s * terms.scale
    capped = s
    if BUILD.is_capped:
        capped = _tanh(s)
        s = capped * terms.cap
    if terms.bias.ptr is not None:
        s += load_bias(terms.bias, seq, h, m, n, BUILD.bias_rows)
    if terms.slopes.ptr is not None:
        s -= load_slope(terms, seq, h) * key_distance(seq, m, n)
    return s, capped


@triton.jit
def load_bias(bias, seq, h, m, n, ROWS: tl.constexpr):
    """The bias of a tile in fp32; 0 outside what is stored and in use.

    ROWS: 0 where its columns are not neighbours in memory, else what its other strides are
    multiples of, which says how wide a load may be.
    """
    stride_b, stride_h, stride_m = _strides(bias, ROWS)
    base = bias.ptr + seq.index.to(tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    offsets = m.to(tl.int64) * stride_m
    if ROWS > 0:
        offsets += n
    else:
        offsets += n.to(tl.int64) * decode(bias.stride_n)
    inside = (m < tl.minimum(seq.q_used, decode(bias.rows))) & (
        n < tl.minimum(seq.k_used, decode(bias.cols))
    )
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _strides(bias, ROWS: tl.constexpr):
    stride_b, stride_h, stride_m = (
        decode(bias.stride_b), decode(bias.stride_h), decode(bias.stride_m)
    )  # fmt: skip
    if ROWS > 1:
        stride_b = tl.multiple_of(stride_b, ROWS)
        stride_h = tl.multiple_of(stride_h, ROWS)
        stride_m = tl.multiple_of(stride_m, ROWS)
    return stride_b, stride_h, stride_m


@triton.jit
def load_slope(terms, seq, h):
    at = seq.index.to(tl.int64) * decode(terms.slopes.stride_b) + h
    return tl.load(terms.slopes.ptr + at).to(tl.float32)


@triton.jit
def load_row_slope(terms, seq, h):
    """The same for rows that nobody may own: slopes have none of the sequence that those are."""
    at = seq.index.to(tl.int64) * decode(terms.slopes.stride_b) + h
    return tl.load(terms.slopes.ptr + at, mask=seq.q_used > 0, other=0.0).to(tl.float32)


@triton.jit
def key_distance(seq, m, n):
    """`|m + offset - n|` in fp32."""
    return tl.abs(m + seq.shift - n).to(tl.float32)


@triton.jit
def keep_tile(call, seq, h, m0, n0, TRANSPOSED: tl.constexpr, BUILD: tl.constexpr):
    """Which probabilities dropout keeps: bool `[m, n]`, or `[n, m]` where TRANSPOSED.

    One Philox call gives the words of four neighbouring keys. is_grouped says that tiles start at a
    multiple of four; otherwise every element makes its own call and takes one word of it.
    """
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    rng = call.terms.rng
    seed = tl.load(rng)
    offset = (tl.load(rng + 1) & 0xFFFFFFFF).to(tl.uint32)
    row = (seq.index * decode(call.place.H) + h).to(tl.uint32)
    i = (seq.i_base + m0 + tl.arange(0, BLOCK_M)).to(tl.uint32)
    first = seq.j_base + n0
    if BUILD.is_grouped:
        group = (first // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)
        if TRANSPOSED:
            w0, w1, w2, w3 = _philox(seed, offset, row, i[None, :], group[:, None])
        else:
            w0, w1, w2, w3 = _philox(seed, offset, row, i[:, None], group[None, :])
        # [..., x, y] of the two joins is word 2 x + y.
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
        if TRANSPOSED:
            words = words.permute(0, 2, 3, 1).reshape(BLOCK_N, BLOCK_M)
        else:
            words = words.reshape(BLOCK_M, BLOCK_N)
    else:
        j = first + tl.arange(0, BLOCK_N)
        if TRANSPOSED:
            j, i = j[:, None], i[None, :]
        else:
            j, i = j[None, :], i[:, None]
        w0, w1, w2, w3 = _philox(seed, offset, row, i, (j >> 2).to(tl.uint32))
        lane = j & 3
        words = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
    high = decode(call.terms.drop_high)
    drop_below = (high.to(tl.uint32) << 16) | decode(call.terms.drop_low).to(tl.uint32)
    # A threshold of 2^32 drops every word.
    return (words >= drop_below) & (high < 65536)


@triton.jit
def _philox(seed, offset, row, i, group):
    # One shape for all counters: words that do not depend on i or group yet would stay scalars.
    zero = i * 0 + group * 0
    return tl.philox(seed, zero + offset, zero + row, zero + i, zero + group)
