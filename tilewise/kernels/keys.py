"""A tile of keys as a program that owns rows meets it."""

from __future__ import annotations

import triton
import triton.language as tl

from .masks import BAND, visible
from .tiles import load_tile


@triton.jit
def load_keys(
    bases, k_stride, v_stride, call, seq, span, h, m, m0, n0,
    IS_PARTIAL: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """K and V of the tile from local key n0 on, its indices `[n]`, and who sees whom `[m, n]`.

    bases: pointers to the sequence's first key and value. m: the rows' indices, `[m, 1]`. Without
    IS_PARTIAL everyone sees all, and the last one means nothing.
    """
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    n = n0 + tl.arange(0, BLOCK_N)
    # Keys that no row of the tile sees may be NaN, or not there.
    mask_n = (n >= span.start) & (n < span.stop)
    seen = m
    if IS_PARTIAL:
        seen = visible(call.mask, seq, h, m, n[None, :], m0, n0, BUILD)
        if BUILD.mask != BAND:
            mask_n = mask_n & (tl.max(seen.to(tl.int32), 0) > 0)
    k_base = bases[0] + n0.to(tl.int64) * k_stride
    v_base = bases[1] + n0.to(tl.int64) * v_stride
    k_tile = load_tile(k_base, k_stride, mask_n, IS_PARTIAL, BLOCK_N, DIMS, BUILD.is_wide)
    v_tile = load_tile(v_base, v_stride, mask_n, IS_PARTIAL, BLOCK_N, VALUE_DIMS, BUILD.is_wide)
    return k_tile, v_tile, n, seen
