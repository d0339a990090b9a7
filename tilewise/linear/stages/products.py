"""Products of a chunk's q and k with its keys, without a gate or before a scalar one's decay."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import dot, load_rows


@triton.jit
def key_products(call, row, first, count, qk_head, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """`[i, j]` of q and k with every k; those of k, which a delta rule alone needs, 0 without."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    for d0 in range(0, D, BLOCK):
        q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D)
        k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D)
        # A loaded tile, unlike a product, may be seen transposed.
        qk = dot(q, tl.trans(k), qk, DTYPE, BUILD)
        if BUILD.has_delta:
            kk = dot(k, tl.trans(k), kk, DTYPE, BUILD)
    return qk, kk
