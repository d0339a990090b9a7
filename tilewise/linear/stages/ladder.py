"""Gradients of q, k, gate and beta of a vector gate of any strength, each chunk by itself: what
`middle.py` leaves out.

Dims: as there; every tile is transposed, `[dims, steps]`, so that its rows are the few dims of one
    program: products of less than 64 rows are not of Hopper's warp groups (see `config.py`).
Grid: chunk slots x value heads, where all are meant x blocks of D, the last first.
Math: as `gradients.py`; a score and a step of A go back to q, k and the gate as they came
    (`prepare_ladder.py`), rung by rung. What a pair gives to its decay from a border is a gradient
    of every gate that stands between; nothing is the difference of larger sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import decay_of, from_first, load_gate_columns, rung, rung_pairs, rungs, up_to
from .structs import locate_chunk
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_columns,
    load_numbers,
    narrow,
    store_columns,
    store_numbers,
    sum_dot_right,
)


@triton.jit
def _chunk_ladder_kernel(
    call, remade, pairs, passes, dout, results, strong, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """The arguments of `gradients._chunk_gradients_kernel`. strong: by slot, head and block of D,
    not 0 where it is meant; None for everywhere."""
    BLOCKS: tl.constexpr = (BUILD.dim + BUILD.block_d - 1) // BUILD.block_d
    pid = tl.program_id(0)
    if strong is None:
        at, block = pid // BLOCKS, pid % BLOCKS
        _give_back(call, remade, pairs, passes, dout, results, at, block, SLICES, BUILD)
    else:
        for block in range(0, BLOCKS):
            if tl.load(strong + pid.to(tl.int64) * BLOCKS + block) != 0:
                _give_back(call, remade, pairs, passes, dout, results, pid, block, SLICES, BUILD)


@triton.jit
def _give_back(
    call, remade, pairs, passes, dout, results, slot_head, block,
    SLICES: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk and head, of one block of dims."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    _, states, steps = remade
    dstates, dsteps, dtotal = passes
    dq_out, dk_out, dg_out, dbeta_out = results
    d0 = block * BLOCK
    at, head, row, first, count = locate_chunk(call.place, slot_head, C)
    qk_head = head // decode(call.place.group)
    offs = tl.arange(0, C)
    beta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    where = (at, head, row, first, count)
    dq, dk_seen, dk = _through_state(
        where, beta, states, steps, dstates, dsteps, dout, d0, DTYPE, BUILD
    )
    q = load_columns(call.q, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    k = load_columns(call.k, row, first, count, qk_head, d0, C, BLOCK, D).to(tl.float32)
    gate = load_gate_columns(call.g, row, first, count, head, d0, C, BLOCK, D)
    # The state has been decayed by the first.
    reached = decay_of(sum_dot_right(gate, from_first(C, True), BUILD))
    left = decay_of(sum_dot_right(gate, up_to(C, True, True), BUILD))
    dq, dk_seen, dk = dq * call.scale * reached, dk_seen * reached, dk * left
    passed = sum_dot_right(q * dq + k * dk_seen, up_to(C, False, False), BUILD)
    passed += sum_dot_right(k * dk, up_to(C, True, False), BUILD)
    dims = d0 + tl.arange(0, BLOCK)
    whole = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, SLICES):
        whole += tl.load(dtotal + (at * SLICES + part) * D + dims, mask=dims < D, other=0.0)
    later = tl.sum(tl.where((offs > 0)[None, :], gate, 0.0), 1)
    passed += (whole * decay_of(later))[:, None]
    diagonal = tl.load(pairs.dqk + at * (C * C) + offs * (C + 1)).to(tl.float32)[None, :]
    if pairs.dqk_low is not None:
        low = tl.load(pairs.dqk_low + at * (C * C) + offs * (C + 1)).to(tl.float32)
        diagonal += low[None, :]
    dq += diagonal * k
    dk += dk_seen + diagonal * q
    dr = tl.zeros((BLOCK, C), tl.float32)
    # A loop, not unrolled: its code takes long to compile.
    for n in range(0, rungs(C)):
        decay = decay_of(sum_dot_right(gate, rung(n, C, True), BUILD))
        dq, dk, shares = _descend(dq, dk, pairs.dqk, at, q, k, decay, n, DTYPE, BUILD)
        if BUILD.has_delta:
            dr, dk, more = _descend(
                dr, dk, pairs.da, at, k * beta[None, :], k, decay, n, DTYPE, BUILD
            )
            shares += more
        passed += sum_dot_right(shares, rung(n, C, False), BUILD)
    if pairs.dqk_low is not None:
        # In a loop of its own, so that little is held at a time.
        for n in range(0, rungs(C)):
            decay = decay_of(sum_dot_right(gate, rung(n, C, True), BUILD))
            dq, dk, shares = _descend(dq, dk, pairs.dqk_low, at, q, k, decay, n, DTYPE, BUILD)
            passed += sum_dot_right(shares, rung(n, C, False), BUILD)
    if BUILD.has_delta:
        dk += dr * beta[None, :]
        dbeta = tl.sum(dr * k, 0)
        if block == 0:
            dbeta += tl.load(pairs.dbeta + at * C + offs)
        store_numbers(dbeta_out, row, first, count, head * BLOCKS + block, dbeta, C, BUILD)
    store_columns(dg_out, row, first, count, head, d0, passed, C, BLOCK, D, BUILD)
    store_columns(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
    store_columns(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)


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
    dq = tl.zeros((WIDTH, C), tl.float32)
    dk_seen = tl.zeros((WIDTH, C), tl.float32)
    dk = tl.zeros((WIDTH, C), tl.float32)
    for e0 in range(0, E, BLOCK):
        do = load_columns(dout, row, first, count, head, e0, C, BLOCK, E)
        state = load_block(states, at, d0, e0, WIDTH, BLOCK, D, E)
        high = narrow(state, DTYPE, BUILD)
        dq = dot(high, do, dq, DTYPE, BUILD)
        if tl.float32 != DTYPE:
            # A gate's gradient has no dim to average the rounding of the state over.
            dq = dot(state - high.to(tl.float32), do, dq, DTYPE, BUILD)
        if BUILD.has_delta:
            y = load_block_transposed(dsteps, at, 0, e0, C, BLOCK, C, E).to(tl.float32)
            dk_seen = dot(high, -y * beta[None, :], dk_seen, DTYPE, BUILD)
        dstate = load_block(dstates, at, d0, e0, WIDTH, BLOCK, D, E)
        d = load_block_transposed(steps, at, 0, e0, C, BLOCK, C, E)
        dk = dot(dstate, d, dk, DTYPE, BUILD)
    return dq, dk_seen, dk


@triton.jit
def _descend(dx, dk, gradients, at, x, k, decay, n, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """One rung of the ladder of products of x, q or beta k, and k: its pairs' shares in the
    gradients of both, added up, and in those of the exponents. gradients: of the products."""
    C: tl.constexpr = BUILD.chunk
    lower, upper = rung_pairs(n, C, False), rung_pairs(n, C, True)
    pairs = tl.where(lower, load_block(gradients, at, 0, 0, C, C, C, C), 0.0)
    pairs_t = tl.where(upper, load_block_transposed(gradients, at, 0, 0, C, C, C, C), 0.0)
    dx_here = dot(k * decay, pairs_t, None, DTYPE, BUILD) * decay
    dk_here = dot(x * decay, pairs, None, DTYPE, BUILD) * decay
    return dx + dx_here, dk + dk_here, x * dx_here + k * dk_here
