"""Gradients of q, k, gate and beta, each chunk by itself, from what the passes over states and
`pairs.py` left.

Dims: as `structs.Prepared` and `structs.Pairs`; S, dS' `[D, E]`, d, y `[C, E]` (see `states.py`,
    `states_backward.py`). Grid: chunk slots x value heads, heads first.
Math: through the state dq = do S^T, dk = -beta y S^T (decayed from the chunk's start), dk = d dS'^T
    (to its end). A score and a step of A go back to q, k and the gate as they came (`prepare.py`),
    rung by rung where the gate is a vector.
    A gate's gradient is the sum over every decay that it is in of that decay's own, x dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import (
    decay_of,
    load_scalar_gate,
    load_vector_gate,
    rung,
    rung_pairs,
    rungs,
    scalar_decays,
    vector_decays,
)
from .structs import NO_GATE, SCALAR_GATE, VECTOR_GATE, locate_chunk
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
def _chunk_gradients_kernel(
    call, remade, pairs, passes, dout, results, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """remade: states, steps. passes: dstates, dsteps and dtotal, of SLICES parts. results: operands
    of dq, dk, dg and dbeta, some absent."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    states, steps = remade
    dstates, dsteps, dtotal = passes
    dq_out, dk_out, dg_out, dbeta_out = results
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    qk_head = head // decode(call.place.group)
    where = (at, head, row, first, count)
    offs = tl.arange(0, C)
    beta = tl.zeros((C,), tl.float32)
    dbeta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        dbeta = tl.load(pairs.dbeta + at * C + offs)
    # Of a scalar gate: what decays from the chunk's start, to its end and over it.
    g = tl.zeros((C,), tl.float32)
    from_start = tl.zeros((C,), tl.float32)
    to_end = tl.zeros((C,), tl.float32)
    if BUILD.gate == SCALAR_GATE:
        g = load_scalar_gate(call.g, row, first, count, head, C)
    reached, left, total = scalar_decays(g, C)
    for d0 in range(0, D, BLOCK):
        q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
        k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
        dq, dk_seen, dk = _through_state(
            where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE, BUILD
        )
        dq *= call.scale
        if BUILD.gate == VECTOR_GATE:
            gate = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, D)
            reached_v, left_v, total_v = vector_decays(gate, C, BUILD)
            dq, dk_seen, dk = dq * reached_v, dk_seen * reached_v, dk * left_v
            passed = sum_dot(_transposed_up_to(C, False), q * dq + k * dk_seen, BUILD)
            passed += sum_dot(_transposed_up_to(C, True), k * dk, BUILD)
            dims = d0 + tl.arange(0, BLOCK)
            whole_v = tl.zeros((BLOCK,), tl.float32)
            for part in range(0, SLICES):
                ptrs = dtotal + (at * SLICES + part) * D + dims
                whole_v += tl.load(ptrs, mask=dims < D, other=0.0)
            passed += (whole_v * total_v)[None, :]
            dk += dk_seen
            diagonal = tl.load(pairs.dqk + at * (C * C) + offs * (C + 1)).to(tl.float32)[:, None]
            dq += diagonal * k
            dk += diagonal * q
            dr = tl.zeros((C, BLOCK), tl.float32)
            for n in range(0, rungs(C)):
                dq, dk, dr, passed = _descend(
                    dq, dk, dr, passed, pairs, at, q, k, gate, beta, n, DTYPE, BUILD
                )
            store_rows(dg_out, row, first, count, head, d0, passed, C, BLOCK, D, BUILD)
        else:
            if BUILD.gate == SCALAR_GATE:
                dq, dk_seen, dk = (
                    dq * reached[:, None],
                    dk_seen * reached[:, None],
                    dk * left[:, None],
                )
                from_start += tl.sum(q * dq + k * dk_seen, 1)
                to_end += tl.sum(k * dk, 1)
            dk += dk_seen
            dq = dot(load_block(pairs.dqk, at, 0, 0, C, C, C, C), k, dq, DTYPE, BUILD)
            dk = dot(load_block_transposed(pairs.dqk, at, 0, 0, C, C, C, C), q, dk, DTYPE, BUILD)
            dr = tl.zeros((C, BLOCK), tl.float32)
            if BUILD.has_delta:
                dr = dot(load_block(pairs.da, at, 0, 0, C, C, C, C), k, None, DTYPE, BUILD)
                da_t = load_block_transposed(pairs.da, at, 0, 0, C, C, C, C)
                dk = dot(da_t, k * beta[:, None], dk, DTYPE, BUILD)
        if BUILD.has_delta:
            dbeta += tl.sum(dr * k, 1)
            dk += dr * beta[:, None]
        store_rows(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
        store_rows(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)
    if BUILD.has_delta:
        store_numbers(dbeta_out, row, first, count, head, dbeta, C, BUILD)
    if BUILD.gate == SCALAR_GATE:
        # Gate l is in the decay from the start to i >= l, to the end from j < l, in that of the
        # whole chunk, and in those of pairs.
        i, j = offs[:, None], offs[None, :]
        dg = tl.load(pairs.dg + at * C + offs) + tl.sum(
            tl.where(i >= j, from_start[:, None], to_end[:, None]), 0
        )
        for part in range(0, SLICES):
            dg += tl.load(dtotal + at * SLICES + part) * total
        store_numbers(dg_out, row, first, count, head, dg, C, BUILD)


@triton.jit
def _transposed_up_to(CHUNK: tl.constexpr, BEFORE: tl.constexpr):
    """`[l, i]` of `gates.up_to`."""
    step, i = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    if BEFORE:
        return (step > i).to(tl.float32)
    else:
        return (step <= i).to(tl.float32)


@triton.jit
def _through_state(
    where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """Gradients of q, of the k that reads and of the k that writes, before their decays, for dims
    from d0 on."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    WIDTH: tl.constexpr = BUILD.block_d
    BLOCK: tl.constexpr = BUILD.block_e
    at, head, row, first, count = where
    dq = tl.zeros((C, WIDTH), tl.float32)
    dk_seen = tl.zeros((C, WIDTH), tl.float32)
    dk = tl.zeros((C, WIDTH), tl.float32)
    for e0 in range(0, E, BLOCK):
        do = load_rows(dout, row, first, count, head, e0, C, BLOCK, E)
        state = load_block_transposed(states, at, d0, e0, WIDTH, BLOCK, D, E)
        dstate = load_block_transposed(dstates, at, d0, e0, WIDTH, BLOCK, D, E)
        d = load_block(steps, at, 0, e0, C, BLOCK, C, E)
        high = narrow(state, DTYPE, BUILD)
        dq = dot(do, high, dq, DTYPE, BUILD)
        if BUILD.gate != NO_GATE and tl.float32 != DTYPE:
            # A gate's gradient has no dim to average the rounding of the state over.
            dq = dot(do, state - high.to(tl.float32), dq, DTYPE, BUILD)
        if BUILD.has_delta:
            y = load_block(dsteps, at, 0, e0, C, BLOCK, C, E).to(tl.float32)
            dk_seen = dot(-y * beta[:, None], high, dk_seen, DTYPE, BUILD)
        dk = dot(d, dstate, dk, DTYPE, BUILD)
    return dq, dk_seen, dk


@triton.jit
def _descend(
    dq, dk, dr, passed, pairs, at, q, k, gate, beta, n, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """One rung of the ladder: its pairs' shares in dq, dk, dr (of k in A's rows, before beta) and
    the gate."""
    C: tl.constexpr = BUILD.chunk
    decay = decay_of(sum_dot(rung(n, C, False), gate, BUILD))
    q_here, k_here = narrow(q * decay, DTYPE, BUILD), narrow(k * decay, DTYPE, BUILD)
    lower, upper = rung_pairs(n, C, False), rung_pairs(n, C, True)
    dqk = load_block(pairs.dqk, at, 0, 0, C, C, C, C)
    dqk_t = load_block_transposed(pairs.dqk, at, 0, 0, C, C, C, C)
    dq_here = dot(tl.where(lower, dqk, 0.0), k_here, None, DTYPE, BUILD) * decay
    dk_here = dot(tl.where(upper, dqk_t, 0.0), q_here, None, DTYPE, BUILD)
    product = q * dq_here
    if BUILD.has_delta:
        da = load_block(pairs.da, at, 0, 0, C, C, C, C)
        da_t = load_block_transposed(pairs.da, at, 0, 0, C, C, C, C)
        dr_here = dot(tl.where(lower, da, 0.0), k_here, None, DTYPE, BUILD) * decay
        product += k * dr_here * beta[:, None]
        k_beta = k * decay * beta[:, None]
        dk_here = dot(tl.where(upper, da_t, 0.0), k_beta, dk_here, DTYPE, BUILD)
        dr += dr_here
    dk_here *= decay
    product += k * dk_here
    passed += sum_dot(rung(n, C, True), product, BUILD)
    return dq + dq_here, dk + dk_here, dr, passed
