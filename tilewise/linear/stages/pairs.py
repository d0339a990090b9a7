"""Gradients of pairs of steps, each chunk by itself: of its scores and of the delta rule's A.

Dims: as `structs.Pairs`; e, d, y `[C, E]` (see `states.py`, `states_backward.py`).
Grid: chunk slots x value heads, heads first.
Math: dscores = do d^T, and of the delta rule dA = -y d^T, strictly lower;
    dbeta = rowsum(y e) + rowsum over A / beta, of which the first is here.
    A scalar gate is in the decay of every pair that it stands between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import load_scalar_gate, pair_decay
from .products import key_products
from .structs import SCALAR_GATE, locate_chunk
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_columns,
    load_numbers,
    load_rows,
    narrow,
    store_block,
)


@triton.jit
def _chunk_pairs_kernel(
    call, errors, steps, steps_low, dsteps, dout, out, BUILD: tl.constexpr
):  # fmt: skip
    """out: a `structs.Pairs`. steps_low: as there dqk_low, of a delta rule's d, or None."""
    C: tl.constexpr = BUILD.chunk
    E: tl.constexpr = BUILD.value_dim
    BLOCK: tl.constexpr = BUILD.block_e
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    offs = tl.arange(0, C)
    i, j = offs[:, None], offs[None, :]
    dqk = tl.zeros((C, C), tl.float32)
    da = tl.zeros((C, C), tl.float32)
    dbeta = tl.zeros((C,), tl.float32)
    for e0 in range(0, E, BLOCK):
        do = load_rows(dout, row, first, count, head, e0, C, BLOCK, E)
        if BUILD.has_delta:
            d_columns = load_block_transposed(steps, at, 0, e0, C, BLOCK, C, E)
            y = load_block(dsteps, at, 0, e0, C, BLOCK, C, E)
            da = dot(y, d_columns, da, DTYPE, BUILD)
            error = load_block(errors, at, 0, e0, C, BLOCK, C, E).to(tl.float32)
            dbeta += tl.sum(y.to(tl.float32) * error, 1)
        else:
            d_columns = load_columns(call.v, row, first, count, head, e0, C, BLOCK, E)
        dqk = dot(do, d_columns, dqk, DTYPE, BUILD)
        if steps_low is not None:
            low_columns = load_block_transposed(steps_low, at, 0, e0, C, BLOCK, C, E)
            dqk = dot(do, low_columns, dqk, DTYPE, BUILD)
    dqk = tl.where(i >= j, dqk, 0.0) * call.scale
    da = tl.where(i > j, -da, 0.0)
    if BUILD.gate == SCALAR_GATE:
        g = load_scalar_gate(call.g, row, first, count, head, C)
        decay = pair_decay(g, C)
        dqk, da = dqk * decay, da * decay
    store_block(out.dqk, at, 0, 0, dqk, C, C, C, C, BUILD)
    if out.dqk_low is not None:
        low = dqk - narrow(dqk, DTYPE, BUILD).to(tl.float32)
        store_block(out.dqk_low, at, 0, 0, low, C, C, C, C, BUILD)
    if BUILD.has_delta:
        store_block(out.da, at, 0, 0, da, C, C, C, C, BUILD)
        tl.store(out.dbeta + at * C + offs, dbeta)
    if BUILD.gate == SCALAR_GATE:
        qk_head = head // decode(call.place.group)
        qk, kk = key_products(call, row, first, count, qk_head, DTYPE, BUILD)
        between = dqk * qk
        if BUILD.has_delta:
            beta = load_numbers(call.beta, row, first, count, head, C)
            between += da * beta[:, None] * kk
        # Gate l is in the decay of a pair j < l <= i. A step's own is in none, and would swallow
        # the others' digits.
        between = tl.where(i > j, between, 0.0)
        earlier = tl.cumsum(between, 1) - between
        tl.store(out.dg + at * C + offs, tl.sum(tl.where(i >= j, earlier, 0.0), 0))
