"""Preparation of chunks under a vector gate, each by itself: scores, the delta rule's A, decays.

Dims: as `structs.Prepared`. Grid: chunk slots x value heads, heads first.
Math: as `tiled.py`; the decay stands between the factors of a score. Where gates are not strong the
    middle of the chunk is the border of all pairs: from it to the later step, and to it from the
    earlier one, with exponents of both signs. Others see `prepare_ladder.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import are_large, decay_of, load_vector_gate, log2_gate, near_limit
from .structs import locate_chunk
from .tiles import dot, load_numbers, load_steps, narrow, store_block, store_steps


@triton.jit
def _chunk_prepare_vector_kernel(call, out, strong, BLOCK: tl.constexpr, BUILD: tl.constexpr):
    """Everything of one chunk and head that needs no state, but for the inverse, where no gate is
    strong; else 1 in `strong`, by slot and head. BLOCK: of dims."""
    C: tl.constexpr = BUILD.chunk
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    where = (at, head, row, first, count, head // decode(call.place.group))
    qk, kk = tl.zeros((C, C), tl.float32), tl.zeros((C, C), tl.float32)
    # Of a step with itself, the largest: without a decay there is nothing to round.
    own = tl.zeros((C,), tl.float32)
    any_strong = 0
    for d0 in range(0, BUILD.dim, BLOCK):
        qk, kk, more, is_strong = _add_weak(call, out, where, d0, qk, kk, BLOCK, DTYPE, BUILD)
        own += more
        any_strong |= is_strong
    tl.store(strong + at, any_strong)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    qk = tl.where(i == j, own[:, None], qk)
    # Above the diagonal there may be anything, of growth that no pair has.
    qk = tl.where(i >= j, _in_order(qk, C) * call.scale, 0.0)
    store_block(out.scores, at, 0, 0, qk, C, C, C, C, BUILD)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        a = tl.where(i > j, _in_order(kk, C) * beta[:, None], 0.0)
        store_block(out.lower, at, 0, 0, a, C, C, C, C, BUILD)


@triton.jit
def _spread(CHUNK: tl.constexpr):
    """The order of a weak block's steps: two that follow each other stand half a tile apart, so
    that one thread has both and adds them up alone."""
    at = tl.arange(0, CHUNK)
    return (at % (CHUNK // 2)) * 2 + at // (CHUNK // 2)


@triton.jit
def _in_order(pairs, CHUNK: tl.constexpr):
    """`[i, j]` of pairs of steps that are in that order."""
    spread = tl.reshape(pairs, (2, CHUNK // 2, 2, CHUNK // 2))
    return tl.reshape(tl.permute(spread, (1, 0, 3, 2)), (CHUNK, CHUNK))


@triton.jit
def _add_weak(
    call, out, where, d0, qk, kk, BLOCK: tl.constexpr, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """The products of q and of k with k, of steps in their spread order, and what these dims have
    for them; products of steps with themselves; and 0, or 1 where the gates of these dims are
    too strong, and nothing of them is done."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    at, head, row, first, count, qk_head = where
    steps = _spread(C)
    gate = load_steps(call.g, row, first, count, head, d0, steps, BLOCK, D).to(tl.float32)
    q = load_steps(call.q, row, first, count, qk_head, d0, steps, BLOCK, D).to(tl.float32)
    k = load_steps(call.k, row, first, count, qk_head, d0, steps, BLOCK, D).to(tl.float32)
    own = tl.sum(q * k, 1)
    # The state has been decayed by the first.
    gate = tl.where((steps > 0)[:, None], log2_gate(gate), 0.0)
    exponent, first_half, second_half = _from_middle(gate, C, BLOCK)
    is_strong = (tl.max(tl.abs(exponent)) > near_limit(DTYPE)).to(tl.int32)
    is_strong |= are_large(q, k, DTYPE)
    if is_strong == 0:
        after, before = tl.exp2(exponent), tl.exp2(-exponent)
        q, seen, k = q * after, k * after, k * before
        columns = tl.trans(narrow(k, DTYPE, BUILD))
        qk = dot(q, columns, qk, DTYPE, BUILD)
        if BUILD.has_delta:
            # What A is off by grows from step to step: one factor is taken as it is.
            kk = dot(seen, columns, kk, DTYPE, BUILD)
            rest = k - narrow(k, DTYPE, BUILD).to(tl.float32)
            kk = dot(seen, tl.trans(narrow(rest, DTYPE, BUILD)), kk, DTYPE, BUILD)
        reached, left = tl.exp2(first_half)[None, :], tl.exp2(second_half)[None, :]
        store_steps(out.q, at, d0, steps, q * (reached * call.scale), BLOCK, C, D, BUILD)
        store_steps(out.k, at, d0, steps, k * left, BLOCK, C, D, BUILD)
        if BUILD.has_delta:
            store_steps(out.seen, at, d0, steps, seen * reached, BLOCK, C, D, BUILD)
        _store_whole(call, out, where, d0, first_half + second_half, BLOCK, BUILD)
    return qk, kk, own, is_strong


@triton.jit
def _from_middle(gate, CHUNK: tl.constexpr, WIDTH: tl.constexpr):
    """Of gates in their spread order: the sum from the middle of the chunk to each step, below 0
    for steps after it, and that of each half. A sum is a difference of others, off by some 2^-17
    where none is large."""
    HALF: tl.constexpr = CHUNK // 2
    gate = tl.reshape(gate, (2, HALF, WIDTH))
    twos = tl.sum(gate, 0)
    is_first = (tl.arange(0, HALF) < HALF // 2)[:, None]
    first_half = tl.sum(tl.where(is_first, twos, 0.0), 0)
    second_half = tl.sum(tl.where(is_first, 0.0, twos), 0)
    # To the second of two steps; the first has one gate less.
    exponent = (tl.cumsum(twos, 0) - first_half[None, :])[None, :, :]
    is_even = (tl.arange(0, 2) == 0)[:, None, None]
    second = tl.sum(tl.where(is_even, 0.0, gate), 0)[None, :, :]
    exponent = tl.where(is_even, exponent - second, exponent)
    return tl.reshape(exponent, (CHUNK, WIDTH)), first_half, second_half


@triton.jit
def _store_whole(call, out, where, d0, later, BLOCK: tl.constexpr, BUILD: tl.constexpr):
    """The first step's decay and, from the sum of their gates, all others'."""
    D: tl.constexpr = BUILD.dim
    at, head, row, first, count, _ = where
    entry = tl.sum(load_vector_gate(call.g, row, first, count, head, d0, 1, BLOCK, D), 0)
    dims = d0 + tl.arange(0, BLOCK)
    tl.store(out.entry + at * D + dims, decay_of(entry), mask=dims < D)
    tl.store(out.total + at * D + dims, decay_of(later), mask=dims < D)
