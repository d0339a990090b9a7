"""New steps on states of a pool: one program holds a slice of a head's state for all of a sequence.

Dims: S `[D, E]` fp32, a program has all of D and BLOCK_E of E. Grid: sequences x heads x slices.
Math: as `reference.py`. The state is read once and written as often as it is asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .structs import LOG2_E, SCALAR_GATE, VECTOR_GATE, locate_slice
from .tiles import load_block, load_number, load_row, narrow, store_block


@triton.jit
def _decode_kernel(
    call, pool, out, slots, write_slots, n_slots, n_steps, n_writes,
    FULL_D: tl.constexpr, BLOCK_E: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """slots, write_slots: contiguous `[B]`, `[B, n_writes]`."""
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    H = decode(call.place.H)
    e0, head, b, qk_head = locate_slice(call.place, tl.program_id(0), BLOCK_E, BUILD)
    slot = tl.load(slots + b).to(tl.int64)
    steps, writes = decode(n_steps), decode(n_writes)
    is_used = (slot >= 0) & (slot < decode(n_slots))
    cols = e0 + tl.arange(0, BLOCK_E)
    if is_used:
        state = load_block(pool, slot * H + head, 0, e0, FULL_D, BLOCK_E, D, E).to(tl.float32)
        for m in range(0, steps):
            q = load_row(call.q, b, m, qk_head, 0, FULL_D, D).to(tl.float32)
            k = load_row(call.k, b, m, qk_head, 0, FULL_D, D).to(tl.float32)
            d = load_row(call.v, b, m, head, e0, BLOCK_E, E).to(tl.float32)
            if BUILD.gate == VECTOR_GATE:
                g = load_row(call.g, b, m, head, 0, FULL_D, D).to(tl.float32)
                state *= tl.exp2(g * LOG2_E)[:, None]
            if BUILD.gate == SCALAR_GATE:
                g = load_number(call.g, b, m, head)
                state *= tl.exp2(g * LOG2_E)
            if BUILD.has_delta:
                beta = load_number(call.beta, b, m, head)
                d = beta * (d - tl.sum(k[:, None] * state, 0))
            state += k[:, None] * d[None, :]
            o = tl.sum(q[:, None] * state, 0) * call.scale
            ptrs = out + ((b.to(tl.int64) * steps + m) * H + head) * E + cols
            tl.store(ptrs, narrow(o, out.dtype.element_ty, BUILD), mask=cols < E)
            if (writes > 1) | (m == steps - 1):
                to = tl.load(write_slots + b * writes + tl.minimum(m, writes - 1)).to(tl.int64)
                if (to >= 0) & (to < decode(n_slots)):
                    store_block(pool, to * H + head, 0, e0, state, FULL_D, BLOCK_E, D, E, BUILD)
    else:
        for m in range(0, steps):
            ptrs = out + ((b.to(tl.int64) * steps + m) * H + head) * E + cols
            tl.store(ptrs, tl.zeros((BLOCK_E,), tl.float32), mask=cols < E)
