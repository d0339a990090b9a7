"""Preparation of chunks under a vector gate, each by itself: scores, the delta rule's A, q and k with
their decays.

Dims: as `structs.Prepared`; tiles are transposed, `[dims, steps]`, so that what one step's decay is
    made of stands in a row, and no product that is seen transposed is of Hopper's warp groups.
Grid: chunk slots x value heads, heads first.
Math: as `tiled.py`; the decay stands between the factors of a score. Where gates are not strong the
    middle of the chunk is the border of all pairs: from it to the later step, and to it from the
    earlier one, with exponents of both signs. Else a ladder of blocks of 32, 16, ..., 1 steps gives
    every pair its border between two blocks, so that no exponent is above 0; and the middle of a
    block of 16 still serves for the last four rungs where it may. Each block of dims by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import (
    decay_of,
    from_first,
    from_middle,
    load_gate_columns,
    near_limit,
    rung,
    rung_pairs,
    rungs,
    up_to,
)
from .structs import locate_chunk
from .tiles import (
    dot,
    load_columns,
    load_numbers,
    narrow,
    store_block,
    store_block_transposed,
    sum_dot_right,
)


@triton.jit
def _chunk_prepare_vector_kernel(call, out, BUILD: tl.constexpr):
    """Everything of one chunk and head that needs no state, but for the inverse."""
    C: tl.constexpr = BUILD.chunk
    BLOCK: tl.constexpr = BUILD.block_d
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    where = (at, head, row, first, count, head // decode(call.place.group))
    qk, kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    # Which blocks of dims have strong gates, bit by bit.
    strong = 0
    for d0 in range(0, BUILD.dim, BLOCK):
        qk, kk, is_strong = _add_weak(call, out, where, d0, qk, kk, DTYPE, BUILD)
        strong |= is_strong << (d0 // BLOCK)
    # By themselves: what a ladder holds would be held all along.
    if strong != 0:
        for d0 in range(0, BUILD.dim, BLOCK):
            if ((strong >> (d0 // BLOCK)) & 1) != 0:
                qk, kk = _add_strong(call, out, where, d0, qk, kk, DTYPE, BUILD)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # Above the diagonal there may be anything, of growth that no pair has.
    store_block(out.scores, at, 0, 0, tl.where(i >= j, qk * call.scale, 0.0), C, C, C, C, BUILD)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        a = tl.where(i > j, kk * beta[:, None], 0.0)
        store_block(out.lower, at, 0, 0, a, C, C, C, C, BUILD)


@triton.jit
def _load(call, where, d0, BUILD: tl.constexpr):
    """q, k and log2 gates of dims from d0 on, fp32."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    _, head, row, first, count, qk_head = where
    gate = load_gate_columns(call.g, row, first, count, head, d0, C, BLOCK, D)
    q = load_columns(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    k = load_columns(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    return q, k, gate


@triton.jit
def _add_weak(call, out, where, d0, qk, kk, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """The products of q and of k with k, and what these dims have for them; and 0, or 1 where the
    gates of these dims are too strong, and nothing else of them is done."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    at = where[0]
    dims, steps = d0 + tl.arange(0, BLOCK), tl.arange(0, C)[None, :]
    q, k, gate = _load(call, where, d0, BUILD)
    entry = tl.sum(tl.where(steps == 0, gate, 0.0), 1)
    # From the first step to the middle, and from there to the last.
    first_half = tl.sum(tl.where((steps > 0) & (steps <= C // 2), gate, 0.0), 1)
    second_half = tl.sum(tl.where(steps > C // 2, gate, 0.0), 1)
    tl.store(out.entry + at * D + dims, decay_of(entry), mask=dims < D)
    tl.store(out.total + at * D + dims, decay_of(first_half + second_half), mask=dims < D)
    exponent = sum_dot_right(gate, from_middle(C, C), BUILD)
    is_strong = (tl.max(tl.max(tl.abs(exponent), 1), 0) > near_limit(DTYPE)).to(tl.int32)
    if is_strong == 0:
        after, before = tl.exp2(exponent), tl.exp2(-exponent)
        q, seen, k = q * after, k * after, k * before
        columns = narrow(k, DTYPE, BUILD)
        qk = dot(tl.trans(narrow(q, DTYPE, BUILD)), columns, qk, DTYPE, BUILD)
        if BUILD.has_delta:
            kk = dot(tl.trans(narrow(seen, DTYPE, BUILD)), columns, kk, DTYPE, BUILD)
        reached, left = tl.exp2(first_half)[:, None], tl.exp2(second_half)[:, None]
        _store_decayed(call, out, at, d0, q * reached, seen * reached, k * left, BUILD)
    return qk, kk, is_strong


@triton.jit
def _add_strong(call, out, where, d0, qk, kk, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """The same for gates of any strength."""
    C: tl.constexpr = BUILD.chunk
    q, k, gate = _load(call, where, d0, BUILD)
    qk = _climb(q, k, gate, qk, True, DTYPE, BUILD)
    if BUILD.has_delta:
        kk = _climb(k, k, gate, kk, False, DTYPE, BUILD)
    reached = decay_of(sum_dot_right(gate, from_first(C, True), BUILD))
    left = decay_of(sum_dot_right(gate, up_to(C, True, True), BUILD))
    _store_decayed(call, out, where[0], d0, q * reached, k * reached, k * left, BUILD)
    return qk, kk


@triton.jit
def _store_decayed(call, out, at, d0, q, seen, k, BUILD: tl.constexpr):
    """q and k decayed from the chunk's first step, and k to its last."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    store_block_transposed(out.q, at, 0, d0, q * call.scale, C, BLOCK, C, D, BUILD)
    store_block_transposed(out.k, at, 0, d0, k, C, BLOCK, C, D, BUILD)
    if BUILD.has_delta:
        store_block_transposed(out.seen, at, 0, d0, seen, C, BLOCK, C, D, BUILD)


@triton.jit
def _climb(
    x, k, gate, acc, WITH_OWN: tl.constexpr, DTYPE: tl.constexpr, BUILD: tl.constexpr
):  # fmt: skip
    """acc + the products of x, q or k, with k over some dims, each with its decay, rung by rung.
    WITH_OWN: those of steps with themselves too."""
    C: tl.constexpr = BUILD.chunk
    LIMIT: tl.constexpr = near_limit(DTYPE)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    exponent = sum_dot_right(gate, from_middle(C, 16), BUILD)
    is_near = tl.max(tl.max(tl.abs(exponent), 1), 0) <= LIMIT
    lowest = tl.where(is_near, 4, 0).to(tl.int32)
    exponent = tl.minimum(tl.maximum(exponent, -LIMIT), LIMIT)
    rows = tl.trans(narrow(x * tl.exp2(exponent), DTYPE, BUILD))
    near = dot(rows, k * tl.exp2(-exponent), None, DTYPE, BUILD)
    acc += tl.where((((i ^ j) >> lowest) == 0) & (j < i), near, 0.0)
    if WITH_OWN:
        acc += tl.where(i == j, tl.sum(x * k, 0)[:, None], 0.0)
    # A loop, not unrolled: its code takes long to compile.
    for n in range(lowest, rungs(C)):
        decay = decay_of(sum_dot_right(gate, rung(n, C, True), BUILD))
        rows = tl.trans(narrow(x * decay, DTYPE, BUILD))
        far = dot(rows, k * decay, None, DTYPE, BUILD)
        acc += tl.where(rung_pairs(n, C, False), far, 0.0)
    return acc
