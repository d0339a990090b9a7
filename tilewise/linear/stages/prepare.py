"""Preparation of chunks, each by itself: scores of q and k, the delta rule's inverse, decays.

Dims: as `structs.Prepared`. Grid: chunk slots x value heads, heads first.
Math: as `tiled.py`. Without a gate or with a scalar one a score is a product times a decay. With a
    vector gate the decay stands between the factors, and a ladder of blocks of 32, 16, ..., 1 steps
    gives every pair of steps its border: from it to the later step, and to it from the earlier one,
    so that each rung is one product and no exponent is above 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import (
    decay_of,
    load_scalar_gate,
    load_vector_gate,
    pair_decay,
    rung,
    rung_pairs,
    rungs,
    scalar_decays,
    vector_decays,
)
from .solve import invert_unit_lower, store_inverse
from .structs import SCALAR_GATE, VECTOR_GATE, locate_chunk
from .tiles import (
    dot,
    load_columns,
    load_numbers,
    load_rows,
    narrow,
    store_block,
    sum_dot,
)


@triton.jit
def _chunk_prepare_kernel(call, out, BUILD: tl.constexpr):
    """Everything of one chunk and head that needs no state."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    qk_head = head // decode(call.place.group)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    qk = tl.zeros((C, C), tl.float32)
    kk = tl.zeros((C, C), tl.float32)
    for d0 in range(0, D, BLOCK):
        qk, kk = _add_products(call, qk, kk, row, first, count, head, qk_head, d0, DTYPE, BUILD)
    g = tl.zeros((C,), tl.float32)
    if BUILD.gate == SCALAR_GATE:
        g = load_scalar_gate(call.g, row, first, count, head, C)
        decay = pair_decay(g, C, BUILD)
        qk, kk = qk * decay, kk * decay
    store_block(out.scores, at, 0, 0, tl.where(i >= j, qk, 0.0) * call.scale, C, C, C, C, BUILD)
    if BUILD.gate == SCALAR_GATE:
        reached, left, total = scalar_decays(call.g, g, row, first, count, head, C)
        steps = tl.arange(0, C)
        tl.store(out.reached + at * C + steps, reached)
        tl.store(out.left + at * C + steps, left)
        tl.store(out.total + at, total)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        inverse = invert_unit_lower(tl.where(i > j, kk * beta[:, None], 0.0), C, BUILD)
        store_inverse(out.inverse, at, inverse, DTYPE, BUILD)
    if BUILD.gate == VECTOR_GATE:
        for d0 in range(0, D, BLOCK):
            _store_decayed(call, out, at, row, first, count, head, qk_head, d0, BUILD)


@triton.jit
def _add_products(
    call, qk, kk, row, first, count, head, qk_head, d0, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """The share of dims from d0 on in the scores of q and k and, for a delta rule, of k and k."""
    C: tl.constexpr = BUILD.chunk
    BLOCK: tl.constexpr = BUILD.block_d
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, BUILD.dim)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, BUILD.dim)
    if BUILD.gate != VECTOR_GATE:
        k_columns = load_columns(call.k, row, first, count, qk_head, d0, C, BLOCK, BUILD.dim)
        qk = dot(q, k_columns, qk, DTYPE, BUILD)
        if BUILD.has_delta:
            kk = dot(k, k_columns, kk, DTYPE, BUILD)
    else:
        g = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, BUILD.dim)
        q, k = q.to(tl.float32), k.to(tl.float32)
        i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        qk += tl.where(i == j, tl.sum(q * k, 1)[:, None], 0.0)
        # A loop, not unrolled: six times the code would take minutes to compile.
        for n in range(0, rungs(C)):
            qk, kk = _climb(qk, kk, q, k, g, n, DTYPE, BUILD)
    return qk, kk


@triton.jit
def _climb(qk, kk, q, k, g, n, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """One rung: pairs of steps whose border is that of two blocks of 2^n."""
    C: tl.constexpr = BUILD.chunk
    decay = decay_of(sum_dot(rung(n, C, False), g, BUILD))
    # Not of Hopper's warp groups, whose products may not be seen transposed: see `config.py`.
    columns = tl.trans(narrow(k * decay, DTYPE, BUILD))
    pairs = rung_pairs(n, C, False)
    qk += tl.where(pairs, dot(q * decay, columns, None, DTYPE, BUILD), 0.0)
    if BUILD.has_delta:
        kk += tl.where(pairs, dot(k * decay, columns, None, DTYPE, BUILD), 0.0)
    return qk, kk


@triton.jit
def _store_decayed(call, out, at, row, first, count, head, qk_head, d0, BUILD: tl.constexpr):
    """q and k with a vector gate's decays."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    g = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, D)
    reached, left, total = vector_decays(g, C, BUILD)
    store_block(out.q, at, 0, d0, q * reached * call.scale, C, BLOCK, C, D, BUILD)
    store_block(out.k, at, 0, d0, k * left, C, BLOCK, C, D, BUILD)
    if BUILD.has_delta:
        store_block(out.seen, at, 0, d0, k * reached, C, BLOCK, C, D, BUILD)
    dims = d0 + tl.arange(0, BLOCK)
    tl.store(out.total + at * D + dims, total, mask=dims < D)
