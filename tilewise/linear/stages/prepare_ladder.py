"""Preparation of chunks under a vector gate of any strength, each by itself: what
`prepare_vector.py` leaves out.

Dims, Grid: as there.
Math: a ladder of blocks of 32, 16, ..., 1 steps gives every pair of steps its border between two
    blocks: from it to the later step, and to it from the earlier one, so that each rung is one
    product and no exponent is above 0. Gates that are not strong let one border serve all pairs of
    a block of 16, with exponents of both signs, for the last four rungs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import (
    are_large,
    decay_of,
    from_first,
    from_middle,
    load_vector_gate,
    near_limit,
    rung,
    rung_pairs,
    rungs,
    up_to,
    whole_decays,
)
from .structs import locate_chunk
from .tiles import dot, load_numbers, load_rows, narrow, store_block, sum_dot


@triton.jit
def _chunk_prepare_ladder_kernel(call, out, strong, BUILD: tl.constexpr):
    """strong: which chunks are meant, by slot and head; None for all."""
    at = tl.program_id(0).to(tl.int64)
    if strong is None:
        _prepare(call, out, BUILD)
    else:
        if tl.load(strong + at) != 0:
            _prepare(call, out, BUILD)


@triton.jit
def _prepare(call, out, BUILD: tl.constexpr):
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    qk_head = head // decode(call.place.group)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    where = (row, first, count, head, qk_head)
    qk = _products(call, call.q, where, DTYPE, BUILD)
    store_block(out.scores, at, 0, 0, tl.where(i >= j, qk, 0.0) * call.scale, C, C, C, C, BUILD)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        kk = _products(call, call.k, where, DTYPE, BUILD)
        a = tl.where(i > j, kk * beta[:, None], 0.0)
        store_block(out.lower, at, 0, 0, a, C, C, C, C, BUILD)
    for d0 in range(0, D, BLOCK):
        _store_decayed(call, out, at, row, first, count, head, qk_head, d0, BUILD)


@triton.jit
def _products(call, rows, where, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """`[i, j]` of q or k with k and its decay, for j <= i."""
    C: tl.constexpr = BUILD.chunk
    acc, lowest = _near_products(call, rows, where, DTYPE, BUILD)
    # A loop, not unrolled: its code takes long to compile.
    for n in range(lowest, rungs(C)):
        acc = _climb(call, rows, acc, where, n, DTYPE, BUILD)
    return acc


@triton.jit
def _load(call, rows, where, d0, BUILD: tl.constexpr):
    """Rows, k and log2 gates of dims from d0 on, fp32."""
    C: tl.constexpr = BUILD.chunk
    BLOCK: tl.constexpr = BUILD.block_d
    row, first, count, head, qk_head = where
    x = load_rows(rows, row, first, count, qk_head, d0, C, BLOCK, BUILD.dim).to(tl.float32)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, BUILD.dim).to(tl.float32)
    return x, k, load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, BUILD.dim)


@triton.jit
def _near_products(call, rows, where, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """Steps with themselves, and pairs within blocks of 16 where one border in the middle serves
    all: where neither a decay from it nor a factor is beyond what the dtype holds. And which rungs
    are left, from which on."""
    C: tl.constexpr = BUILD.chunk
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    ones = from_middle(C)
    LIMIT: tl.constexpr = near_limit(DTYPE)
    own = tl.zeros((C,), tl.float32)
    acc = tl.zeros((C, C), tl.float32)
    worst = 0.0
    any_large = 0
    for d0 in range(0, BUILD.dim, BUILD.block_d):
        x, k, g = _load(call, rows, where, d0, BUILD)
        own += tl.sum(x * k, 1)
        any_large |= are_large(x, k, DTYPE)
        exponent = sum_dot(ones, g, BUILD)
        worst = tl.maximum(worst, tl.max(tl.max(tl.abs(exponent), 1), 0))
        reach = tl.where(any_large == 0, LIMIT, 0.0)
        exponent = tl.minimum(tl.maximum(exponent, -reach), reach)
        # Not of Hopper's warp groups, whose products may not be seen transposed: see `config.py`.
        columns = tl.trans(narrow(k * tl.exp2(-exponent), DTYPE, BUILD))
        acc = dot(x * tl.exp2(exponent), columns, acc, DTYPE, BUILD)
    lowest = tl.where((worst <= LIMIT) & (any_large == 0), 4, 0).to(tl.int32)
    acc = tl.where((((i ^ j) >> lowest) == 0) & (j < i), acc, 0.0)
    return tl.where(i == j, own[:, None], acc), lowest


@triton.jit
def _climb(call, rows, acc, where, n, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """One rung: pairs of steps whose border is that of two blocks of 2^n."""
    C: tl.constexpr = BUILD.chunk
    ones = rung(n, C, False)
    far = tl.zeros((C, C), tl.float32)
    for d0 in range(0, BUILD.dim, BUILD.block_d):
        x, k, g = _load(call, rows, where, d0, BUILD)
        decay = decay_of(sum_dot(ones, g, BUILD))
        columns = tl.trans(narrow(k * decay, DTYPE, BUILD))
        far = dot(x * decay, columns, far, DTYPE, BUILD)
    return tl.where(rung_pairs(n, C, False), far, acc)


@triton.jit
def _store_decayed(call, out, at, row, first, count, head, qk_head, d0, BUILD: tl.constexpr):
    """q and k with a vector gate's decays."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    dims = d0 + tl.arange(0, BLOCK)
    g = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, D)
    entry, total = whole_decays(g, C)
    tl.store(out.entry + at * D + dims, entry, mask=dims < D)
    tl.store(out.total + at * D + dims, total, mask=dims < D)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    left = decay_of(sum_dot(up_to(C, True, False), g, BUILD))
    store_block(out.k, at, 0, d0, k * left, C, BLOCK, C, D, BUILD)
    reached = decay_of(sum_dot(from_first(C, False), g, BUILD))
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    store_block(out.q, at, 0, d0, q * reached * call.scale, C, BLOCK, C, D, BUILD)
    if BUILD.has_delta:
        store_block(out.seen, at, 0, d0, k * reached, C, BLOCK, C, D, BUILD)
