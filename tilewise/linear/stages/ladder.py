"""Gradients of q, k, gate and beta of a vector gate, each chunk by itself: see `gradients.py`.

Dims, Grid: as there.
Math: as `gradients.py`; a score and a step of A go back to q, k and the gate as they came
    (`prepare_vector.py`): by way of the middle of the chunk where gates are not strong, else rung by
    rung. What a pair gives to its decay from a border is a gradient of every gate that stands
    between. From the middle it may be past both steps of a pair, and what they give then cancels:
    to the last digits of fp32, since both are made of the same rounded factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import decay_of, from_first, load_vector_gate, near_limit, rung, rung_pairs, rungs, up_to
from .gradients import _through_state
from .structs import locate_chunk
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_numbers,
    load_rows,
    narrow,
    store_numbers,
    store_rows,
    sum_dot,
)


@triton.jit
def _chunk_ladder_kernel(
    call, remade, pairs, passes, dout, results, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """The arguments of `gradients._chunk_gradients_kernel`."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    _, states, steps = remade
    dstates, dsteps, dtotal = passes
    dq_out, dk_out, dg_out, dbeta_out = results
    block = tl.program_id(0) % BLOCKS
    d0 = block * BLOCK
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0) // BLOCKS, C)
    qk_head = head // decode(call.place.group)
    offs = tl.arange(0, C)
    beta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    where = (at, head, row, first, count)
    dq, dk_seen, dk = _through_state(
        where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE, BUILD
    )
    gate = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, D)
    # The state has been decayed by the first.
    first_half = tl.sum(tl.where(((offs > 0) & (offs < C // 2))[:, None], gate, 0.0), 0)
    second_half = tl.sum(tl.where((offs >= C // 2)[:, None], gate, 0.0), 0)
    reached = sum_dot(from_first(C, False), gate, BUILD)
    is_strong = tl.float32 == DTYPE
    if tl.float32 != DTYPE:
        is_strong = tl.max(tl.abs(reached - first_half[None, :])) > near_limit(DTYPE)
    reached = decay_of(reached)
    left = decay_of(sum_dot(up_to(C, True, False), gate, BUILD))
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    dq, dk_seen, dk = dq * (reached * call.scale), dk_seen * reached, dk * left
    from_start, to_end = q * dq + k * dk_seen, k * dk
    diagonal = tl.load(pairs.dqk + at * (C * C) + offs * (C + 1)).to(tl.float32)[:, None]
    dq += diagonal * k
    dk += dk_seen + diagonal * q
    dr = tl.zeros((C, BLOCK), tl.float32)
    between = tl.zeros((C, BLOCK), tl.float32)
    rows = beta[:, None] * k
    if is_strong:
        # A loop, not unrolled: its code takes long to compile.
        for n in range(0, rungs(C)):
            decay = decay_of(sum_dot(rung(n, C, False), gate, BUILD))
            dq, dk, shares = _descend(dq, dk, pairs.dqk, at, q, k, decay, n, DTYPE, BUILD)
            if BUILD.has_delta:
                dr, dk, more = _descend(dr, dk, pairs.da, at, rows, k, decay, n, DTYPE, BUILD)
                shares += more
            between += sum_dot(rung(n, C, True), shares, BUILD)
    else:
        # From the middle to each step, and from each step to it.
        after = reached * tl.exp2(-first_half)[None, :]
        before = left * tl.exp2(-second_half)[None, :]
        k_before = narrow(k * before, DTYPE, BUILD)
        dq_far, dk_far, shares = _from_middle(
            pairs.dqk, at, narrow(q * after, DTYPE, BUILD), k_before, DTYPE, BUILD
        )
        if BUILD.has_delta:
            dr_far, more_far, more = _from_middle(
                pairs.da, at, narrow(rows * after, DTYPE, BUILD), k_before, DTYPE, BUILD
            )
            dr, dk_far, shares = dr_far * after, dk_far + more_far, shares + more
        dq += dq_far * after
        dk += dk_far * before
        from_start += shares
    # Of a gate what passes it from the chunk's start to later steps, from earlier ones to its end,
    # from earlier ones to later ones.
    between += sum_dot(up_to(C, False, True), from_start, BUILD)
    between += sum_dot(up_to(C, True, True), to_end, BUILD)
    dims = d0 + tl.arange(0, BLOCK)
    whole = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, SLICES):
        whole += tl.load(dtotal + (at * SLICES + part) * D + dims, mask=dims < D, other=0.0)
    between += (whole * decay_of(first_half + second_half))[None, :]
    store_rows(dg_out, row, first, count, head, d0, between, C, BLOCK, D, BUILD)
    if BUILD.has_delta:
        dk += dr * beta[:, None]
        dbeta = tl.sum(dr * k, 1)
        if block == 0:
            dbeta += tl.load(pairs.dbeta + at * C + offs)
        store_numbers(dbeta_out, row, first, count, head * BLOCKS + block, dbeta, C, BUILD)
    store_rows(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
    store_rows(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)


@triton.jit
def _from_middle(gradients, at, x, k, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """Of products of x, q or beta k decayed from the middle, and k decayed to it: the gradients of
    both, and what pairs give to the exponents. gradients: of the products."""
    C: tl.constexpr = BUILD.chunk
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # A step with itself has no decay, and would swallow the others' digits.
    pairs = load_block(gradients, at, 0, 0, C, C, C, C)
    dx = dot(tl.where(i > j, pairs, 0.0), k, None, DTYPE, BUILD)
    pairs_t = load_block_transposed(gradients, at, 0, 0, C, C, C, C)
    dk = dot(tl.where(i < j, pairs_t, 0.0), x, None, DTYPE, BUILD)
    return dx, dk, x.to(tl.float32) * dx - k.to(tl.float32) * dk


@triton.jit
def _descend(dx, dk, gradients, at, x, k, decay, n, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """One rung of the ladder of products of x, q or beta k, and k: its pairs' shares in the
    gradients of both, added up, and in those of the exponents. gradients: of the products."""
    C: tl.constexpr = BUILD.chunk
    lower, upper = rung_pairs(n, C, False), rung_pairs(n, C, True)
    pairs = tl.where(lower, load_block(gradients, at, 0, 0, C, C, C, C), 0.0)
    pairs_t = tl.where(upper, load_block_transposed(gradients, at, 0, 0, C, C, C, C), 0.0)
    dx_here = dot(pairs, k * decay, None, DTYPE, BUILD) * decay
    dk_here = dot(pairs_t, x * decay, None, DTYPE, BUILD) * decay
    return dx + dx_here, dk + dk_here, x * dx_here + k * dk_here
