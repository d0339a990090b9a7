"""Gradients of q, k, gate and beta, each chunk by itself, from what the passes over states left.

Dims: as `structs.Prepared`; S, dS' `[D, E]`, e, d, y `[C, E]` (see `states.py`,
    `states_backward.py`). Grid: chunk slots x value heads, heads first.
Math: dscores = do d^T, and of the delta rule dA = -y d^T, strictly lower; through the state
    dq = do S^T, dk = -beta y S^T (decayed from the chunk's start), dk = d dS'^T (to its end);
    dbeta = rowsum(y e) + rowsum over A / beta. A score and a step of A go back to q, k and the gate
    as they came (`prepare.py`), rung by rung where the gate is a vector.
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
    pair_decay,
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
    load_columns,
    load_numbers,
    load_rows,
    narrow,
    store_numbers,
    store_rows,
    sum_dot,
)


@triton.jit
def _chunk_gradients_kernel(
    call, remade, passes, dout, results, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """remade: states, errors, steps. passes: dstates, dsteps and dtotal, of SLICES parts. results:
    operands of dq, dk, dg and dbeta, some absent."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    states, errors, steps = remade
    dstates, dsteps, dtotal = passes
    dq_out, dk_out, dg_out, dbeta_out = results
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    qk_head = head // decode(call.place.group)
    where = (at, head, row, first, count)
    beta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    pairs, dbeta = _pair_gradients(call, where, errors, steps, dsteps, dout, DTYPE, BUILD)
    dqk, dqk_t, da, da_t = pairs
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    g = tl.zeros((C,), tl.float32)
    # Of a scalar gate: what decays from the chunk's start, to its end, over it and between pairs.
    from_start = tl.zeros((C,), tl.float32)
    to_end = tl.zeros((C,), tl.float32)
    whole = tl.sum(g, 0)
    between = tl.zeros((C, C), tl.float32)
    if BUILD.gate == SCALAR_GATE:
        g = load_scalar_gate(call.g, row, first, count, head, C)
        for part in range(0, SLICES):
            whole += tl.load(dtotal + at * SLICES + part)
        decay, decay_t = pair_decay(g, C, False), pair_decay(g, C, True)
        dqk, dqk_t, da, da_t = dqk * decay, dqk_t * decay_t, da * decay, da_t * decay_t
        for d0 in range(0, D, BLOCK):
            q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D)
            k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D)
            columns = load_columns(call.k, row, first, count, qk_head, d0, C, BLOCK, D)
            between += dqk * dot(q, columns, None, DTYPE, BUILD)
            if BUILD.has_delta:
                between += da * beta[:, None] * dot(k, columns, None, DTYPE, BUILD)
    reached, left, total = scalar_decays(g, C)
    diagonal = tl.sum(tl.where(i == j, dqk, 0.0), 1)[:, None]
    # As products take them: four of these in fp32 would fill the registers.
    dqk, dqk_t = narrow(dqk, DTYPE, BUILD), narrow(dqk_t, DTYPE, BUILD)
    da, da_t = narrow(da, DTYPE, BUILD), narrow(da_t * beta[None, :], DTYPE, BUILD)
    pairs = (dqk, dqk_t, da, da_t)
    for d0 in range(0, D, BLOCK):
        q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
        k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
        dq, dk_seen, dk = _through_state(
            where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE, BUILD
        )
        dq *= call.scale
        gate = tl.zeros((C, BLOCK), tl.float32)
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
            dq += diagonal * k
            dk += diagonal * q
            dr = tl.zeros((C, BLOCK), tl.float32)
            for n in range(0, rungs(C)):
                dq, dk, dr, passed = _descend(
                    dq, dk, dr, passed, pairs, q, k, gate, beta, n, DTYPE, BUILD
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
            dq = dot(dqk, k, dq, DTYPE, BUILD)
            dk = dot(dqk_t, q, dk, DTYPE, BUILD)
            dr = tl.zeros((C, BLOCK), tl.float32)
            if BUILD.has_delta:
                dr = dot(da, k, None, DTYPE, BUILD)
                dk = dot(da_t, k, dk, DTYPE, BUILD)
        if BUILD.has_delta:
            dbeta += tl.sum(dr * k, 1)
            dk += dr * beta[:, None]
        store_rows(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
        store_rows(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)
    if BUILD.has_delta:
        store_numbers(dbeta_out, row, first, count, head, dbeta, C, BUILD)
    if BUILD.gate == SCALAR_GATE:
        # Gate l is in the decay of a pair j < l <= i, from the start to i >= l, to the end from
        # j < l, and in that of the whole chunk.
        earlier = tl.cumsum(between, 1) - between
        crossing = tl.where(i >= j, earlier + from_start[:, None], 0.0)
        dg = tl.sum(crossing, 0) + tl.sum(tl.where(i < j, to_end[:, None], 0.0), 0) + whole * total
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
def _pair_gradients(
    call, where, errors, steps, dsteps, dout, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """Of q's and k's products, with the scale, and of A / beta, each also transposed; and dbeta so
    far. Transposed products are computed as such: see `kernels/README.md`."""
    C: tl.constexpr = BUILD.chunk
    E: tl.constexpr = BUILD.value_dim
    BLOCK: tl.constexpr = BUILD.block_e
    at, head, row, first, count = where
    dqk = tl.zeros((C, C), tl.float32)
    dqk_t = tl.zeros((C, C), tl.float32)
    da = tl.zeros((C, C), tl.float32)
    da_t = tl.zeros((C, C), tl.float32)
    dbeta = tl.zeros((C,), tl.float32)
    for e0 in range(0, E, BLOCK):
        do = load_rows(dout, row, first, count, head, e0, C, BLOCK, E)
        do_columns = load_columns(dout, row, first, count, head, e0, C, BLOCK, E)
        if BUILD.has_delta:
            d = load_block(steps, at, 0, e0, C, BLOCK, C, E)
            d_columns = load_block_transposed(steps, at, 0, e0, C, BLOCK, C, E)
            y = load_block(dsteps, at, 0, e0, C, BLOCK, C, E)
            y_columns = load_block_transposed(dsteps, at, 0, e0, C, BLOCK, C, E)
            da = dot(y, d_columns, da, DTYPE, BUILD)
            da_t = dot(d, y_columns, da_t, DTYPE, BUILD)
            error = load_block(errors, at, 0, e0, C, BLOCK, C, E).to(tl.float32)
            dbeta += tl.sum(y.to(tl.float32) * error, 1)
        else:
            d = load_rows(call.v, row, first, count, head, e0, C, BLOCK, E)
            d_columns = load_columns(call.v, row, first, count, head, e0, C, BLOCK, E)
        dqk = dot(do, d_columns, dqk, DTYPE, BUILD)
        dqk_t = dot(d, do_columns, dqk_t, DTYPE, BUILD)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    dqk = tl.where(i >= j, dqk, 0.0) * call.scale
    dqk_t = tl.where(i <= j, dqk_t, 0.0) * call.scale
    return (dqk, dqk_t, tl.where(i > j, -da, 0.0), tl.where(i < j, -da_t, 0.0)), dbeta


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
    dq, dk, dr, passed, pairs, q, k, gate, beta, n, DTYPE: tl.constexpr, BUILD: tl.constexpr
):
    """One rung of the ladder: its pairs' shares in dq, dk, dr (of k in A's rows, before beta) and
    the gate. Of pairs the last, of A's columns, has beta."""
    C: tl.constexpr = BUILD.chunk
    dqk, dqk_t, da, da_t = pairs
    decay = decay_of(sum_dot(rung(n, C, False), gate, BUILD))
    q_here, k_here = narrow(q * decay, DTYPE, BUILD), narrow(k * decay, DTYPE, BUILD)
    lower, upper = rung_pairs(n, C, False), rung_pairs(n, C, True)
    dq_here = dot(tl.where(lower, dqk, 0.0), k_here, None, DTYPE, BUILD) * decay
    dk_here = dot(tl.where(upper, dqk_t, 0.0), q_here, None, DTYPE, BUILD)
    product = q * dq_here
    if BUILD.has_delta:
        dr_here = dot(tl.where(lower, da, 0.0), k_here, None, DTYPE, BUILD) * decay
        product += k * dr_here * beta[:, None]
        dk_here = dot(tl.where(upper, da_t, 0.0), k_here, dk_here, DTYPE, BUILD)
        dr += dr_here
    dk_here *= decay
    product += k * dk_here
    passed += sum_dot(rung(n, C, True), product, BUILD)
    return dq + dq_here, dk + dk_here, dr, passed
