"""Gradients of q, k, gate and beta of a vector gate, each chunk by itself: see `gradients.py`.

Dims, Grid: as there.
Math: as `gradients.py`; a score and a step of A go back to q, k and the gate as they came
    (`prepare_vector.py`): by way of the middle of the chunk where gates are not strong, else rung
    by rung. What a pair gives to its decay from a border is a gradient of every gate that stands
    between. The middle may be past both steps of a pair, and what they give then cancels: to the
    last digits of fp32, since both are made of the same factors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import are_large, decay_of, from_first, load_vector_gate, near_limit, up_to
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
def _chunk_middle_kernel(
    call, remade, pairs, passes, dout, results, strong, SLICES: tl.constexpr, BUILD: tl.constexpr
):
    """The arguments of `gradients._chunk_gradients_kernel`. strong: by slot, head and block of D,
    where 1 is left if gates are strong, and else 0."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    BLOCK: tl.constexpr = BUILD.block_d
    BLOCKS: tl.constexpr = (D + BLOCK - 1) // BLOCK
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    dtotal = passes[2]
    dq_out, dk_out, dg_out, dbeta_out = results
    block = tl.program_id(0) % BLOCKS
    d0 = block * BLOCK
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0) // BLOCKS, C)
    qk_head = head // decode(call.place.group)
    offs = tl.arange(0, C)
    beta = tl.zeros((C,), tl.float32)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    gate = load_vector_gate(call.g, row, first, count, head, d0, C, BLOCK, D)
    q = load_rows(call.q, row, first, count, qk_head, d0, C, BLOCK, D)
    k = load_rows(call.k, row, first, count, qk_head, d0, C, BLOCK, D)
    # The state has been decayed by the first. Both halves, of which the middle is the border.
    first_half = tl.sum(tl.where(((offs > 0) & (offs < C // 2))[:, None], gate, 0.0), 0)
    second_half = tl.sum(tl.where((offs >= C // 2)[:, None], gate, 0.0), 0)
    exponent = sum_dot(from_first(C, False), gate, BUILD)
    worst = tl.max(tl.abs(exponent - first_half[None, :]))
    is_strong = (worst > near_limit(DTYPE)).to(tl.int32) | are_large(q, k, DTYPE)
    tl.store(strong + at * BLOCKS + block, is_strong)
    where = (at, head, row, first, count, d0)
    if is_strong == 0:
        dq, dk, dbeta, between = _by_middle(
            call, remade, pairs, passes, dout, where, q, k, beta, exponent, first_half, second_half,
            DTYPE, BUILD,
        )  # fmt: skip
        dims = d0 + tl.arange(0, BLOCK)
        whole = tl.zeros((BLOCK,), tl.float32)
        for part in range(0, SLICES):
            whole += tl.load(dtotal + (at * SLICES + part) * D + dims, mask=dims < D, other=0.0)
        between += (whole * decay_of(first_half + second_half))[None, :]
        store_rows(dg_out, row, first, count, head, d0, between, C, BLOCK, D, BUILD)
        if BUILD.has_delta:
            if block == 0:
                dbeta += tl.load(pairs.dbeta + at * C + offs)
            store_numbers(dbeta_out, row, first, count, head * BLOCKS + block, dbeta, C, BUILD)
        store_rows(dq_out, row, first, count, head, d0, dq, C, BLOCK, D, BUILD)
        store_rows(dk_out, row, first, count, head, d0, dk, C, BLOCK, D, BUILD)


@triton.jit
def _by_middle(
    call, remade, pairs, passes, dout, where, q, k, beta, exponent, first_half, second_half,
    DTYPE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k, beta and the gate, by way of the chunk's middle. exponent: of the decay
    from the first step to each. One after the other, so that little is held."""
    C: tl.constexpr = BUILD.chunk
    at = where[0]
    _, states, steps = remade
    dstates, dsteps, _ = passes
    exponent -= first_half[None, :]
    reached, left = tl.exp2(first_half)[None, :], tl.exp2(second_half)[None, :]
    after = tl.exp2(exponent)
    x, y = q.to(tl.float32) * after, k.to(tl.float32) * tl.exp2(-exponent)
    # What a pair gives to both of its steps' exponents, of the same factors: it cancels for gates
    # on one side of both, and of a step with itself for all.
    far = _apply(load_block(pairs.dqk, at, 0, 0, C, C, C, C), y, None, DTYPE, BUILD)
    far = dot(load_block(pairs.dqk_low, at, 0, 0, C, C, C, C), y, far, DTYPE, BUILD)
    near = _read_by_q(dout, states, where, DTYPE, BUILD) * (reached * call.scale)
    passed = x * (near + far)
    dq = (near + far) * after
    dk = tl.zeros_like(dq)
    dbeta = tl.zeros((C,), tl.float32)
    pairs_t = load_block_transposed(pairs.dqk, at, 0, 0, C, C, C, C)
    far = _apply(pairs_t, x, None, DTYPE, BUILD)
    pairs_t = load_block_transposed(pairs.dqk_low, at, 0, 0, C, C, C, C)
    far = dot(pairs_t, x, far, DTYPE, BUILD)
    if BUILD.has_delta:
        x = k.to(tl.float32) * after
        rows = x * beta[:, None]
        pairs_t = load_block_transposed(pairs.da, at, 0, 0, C, C, C, C)
        far = _apply(pairs_t, rows, far, DTYPE, BUILD)
        dr = _apply(load_block(pairs.da, at, 0, 0, C, C, C, C), y, None, DTYPE, BUILD)
        dbeta = tl.sum(dr * x, 1)
        near = _by_steps(dsteps, states, where, DTYPE, BUILD) * -beta[:, None] * reached
        near += dr * beta[:, None]
        passed += x * near
        dk = near * after
    near = _by_steps(steps, dstates, where, DTYPE, BUILD) * left
    before = tl.exp2(-exponent)
    to_end = y * near
    passed -= y * far + to_end
    dk += (near + far) * before
    # Of a gate what passes it: whole, from all steps to the chunk's end, less that of later ones.
    between = sum_dot(up_to(C, False, True), passed, BUILD) + tl.sum(to_end, 0)[None, :]
    return dq, dk, dbeta, between


@triton.jit
def _apply(pairs, x, acc, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """acc + pairs x. A gate's gradient has no dim to average the rounding of x over."""
    high = narrow(x, DTYPE, BUILD)
    return dot(pairs, high, dot(pairs, x - high.to(tl.float32), acc, DTYPE, BUILD), DTYPE, BUILD)


@triton.jit
def _read_by_q(dout, states, where, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """The gradient of q through the state, before its decay and scale."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    WIDTH: tl.constexpr = BUILD.block_d
    BLOCK: tl.constexpr = BUILD.block_e
    at, head, row, first, count, d0 = where
    acc = tl.zeros((C, WIDTH), tl.float32)
    for e0 in range(0, E, BLOCK):
        do = load_rows(dout, row, first, count, head, e0, C, BLOCK, E)
        state = load_block_transposed(states, at, d0, e0, WIDTH, BLOCK, D, E)
        high = narrow(state, DTYPE, BUILD)
        acc = dot(do, high, acc, DTYPE, BUILD)
        if tl.float32 != DTYPE:
            # A gate's gradient has no dim to average the rounding of the state over.
            acc = dot(do, state - high.to(tl.float32), acc, DTYPE, BUILD)
    return acc


@triton.jit
def _by_steps(rows, states, where, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """Of the k that reads, through the gradients of its steps and the state; of the k that writes,
    through its steps and the gradient of the state. Before decays and beta."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    WIDTH: tl.constexpr = BUILD.block_d
    BLOCK: tl.constexpr = BUILD.block_e
    at, d0 = where[0], where[5]
    acc = tl.zeros((C, WIDTH), tl.float32)
    for e0 in range(0, E, BLOCK):
        row = load_block(rows, at, 0, e0, C, BLOCK, C, E)
        state = load_block_transposed(states, at, d0, e0, WIDTH, BLOCK, D, E)
        acc = dot(row, state, acc, DTYPE, BUILD)
    return acc
