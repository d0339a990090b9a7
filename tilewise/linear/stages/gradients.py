"""Gradients of q, k, gate and beta, each chunk by itself, from what the passes over states and
`pairs.py` left, without a gate or with a scalar one; of a vector one see `ladder.py`.

Dims: as `structs.Prepared` and `structs.Pairs`; S, dS' `[D, E]`, d, y `[C, E]` (see `states.py`,
    `states_backward.py`). Grid: chunk slots x value heads x blocks of D, the
    last first.
Math: through the state dq = do S^T, dk = -beta y S^T (decayed from the chunk's start), dk = d dS'^T
    (to its end). A score and a step of A go back to q and k as they came (`prepare.py`).
    A gate's gradient is the sum over every decay that it is in of that decay's own, x dx.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .structs import NO_GATE, SCALAR_GATE, locate_chunk
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_numbers,
    load_rows,
    narrow,
    store_numbers,
    store_rows,
)


@triton.jit
def _chunk_gradients_kernel(
    call, remade, pairs, passes, dout, results, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """remade: what chunks prepared, states, steps. passes: dstates, dsteps and dtotal, of SLICES
    parts. results: operands of dq, dk, dg and dbeta, some absent; of numbers a head has one for
    each block of dims."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    decays, states, steps = remade
    dstates, dsteps, dtotal = passes
    dq_out, dk_out, dg_out, dbeta_out = results
    block = tl.program_id(0) % BLOCKS
    d0 = block * BLOCK
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0) // BLOCKS, C)
    qk_head = head // decode(call.place.group)
    where = (at, head, row, first, count)
    offs = tl.arange(0, C)
    beta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    dq, dk_seen, dk = _through_state(
        where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE, BUILD
    )
    dq *= call.scale
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    if BUILD.gate == SCALAR_GATE:
        reached, left = (
            tl.load(decays.reached + at * C + offs),
            tl.load(decays.left + at * C + offs),
        )
        total = tl.load(decays.total + at)
        dq, dk_seen, dk = (
            dq * reached[:, None],
            dk_seen * reached[:, None],
            dk * left[:, None],
        )
        # From the chunk's start and to its end, of these dims.
        dg = _passed_gates(tl.sum(q * dq + k * dk_seen, 1), tl.sum(k * dk, 1), C)
        if block == 0:
            dg += tl.load(pairs.dg + at * C + offs)
            for part in range(0, SLICES):
                dg += tl.load(dtotal + at * SLICES + part) * total
        store_numbers(dg_out, row, first, count, head * BLOCKS + block, dg, C, BUILD)
    dk += dk_seen
    dq = dot(load_block(pairs.dqk, at, 0, 0, C, C, C, C), k, dq, DTYPE, BUILD)
    dk = dot(load_block_transposed(pairs.dqk, at, 0, 0, C, C, C, C), q, dk, DTYPE, BUILD)
    if BUILD.has_delta:
        dr = dot(load_block(pairs.da, at, 0, 0, C, C, C, C), k, None, DTYPE, BUILD)
        da_t = load_block_transposed(pairs.da, at, 0, 0, C, C, C, C)
        dk = dot(da_t, k * beta[:, None], dk, DTYPE, BUILD)
        dk += dr * beta[:, None]
        dbeta = tl.sum(dr * k, 1)
        if block == 0:
            dbeta += tl.load(pairs.dbeta + at * C + offs)
        store_numbers(dbeta_out, row, first, count, head * BLOCKS + block, dbeta, C, BUILD)
    store_rows(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
    store_rows(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)


@triton.jit
def _passed_gates(from_start, to_end, CHUNK: tl.constexpr):
    """Of each gate l: what passes it from the start to steps i >= l and from steps before it to the
    end."""
    i, gate = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return tl.sum(tl.where(i >= gate, from_start[:, None], to_end[:, None]), 0)


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
