"""The pass over states backwards: one program carries a slice of the gradient of a head's state
through its sequence, or through a segment of it.

Dims, Grid: as `states.py`.
Math: with dS' the gradient of the state at a chunk's end and do that of the output,
    dd = scores^T do + k dS';  y = inverse^T dd;  de = beta y;
    dS = entry (total dS' + q^T do - k^T de),
    with k of dd decayed to the chunk's last step, q and the other k from its first, whose own decay
    is the entry's. de is the gradient of v; without a delta rule dd is. Scores are loaded
    transposed: see `kernels/README.md` on transposed products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .factors import load_factors
from .segments import pass_segments
from .solve import apply_inverse
from .structs import NO_GATE, SCALAR_GATE, VECTOR_GATE, locate_segment, locate_slice, locate_slot
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_columns,
    load_rows,
    narrow,
    store_block,
    store_rows,
)


@triton.jit
def _states_bwd_kernel(
    call, prepared, segments, states, dout, dfinal, dinitial, dv, dstates, dsteps, dtotal,
    FULL_D: tl.constexpr, BLOCK_E: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """segments: what each makes of a gradient. dfinal: None for zeros; dinitial: None where no one
    asks. By slot and head: dstates (dS') `[D, E]`, dsteps (y of a delta rule) `[C, E]` and dtotal
    `[slices, D or 1]`, the gradient of a whole chunk's decay."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    SLICES: tl.constexpr = (E + BLOCK_E - 1) // BLOCK_E
    H = decode(call.place.H)
    e0, head, part, qk_head = locate_slice(call.place, tl.program_id(0), BLOCK_E, BUILD)
    sequence, segment, begin, end = locate_segment(call.place, segments, part)
    index = (sequence * H + head).to(tl.int64)
    dstate = tl.zeros((FULL_D, BLOCK_E), tl.float32)
    if dfinal is not None:
        dstate += load_block(dfinal, index, 0, e0, FULL_D, BLOCK_E, D, E)
    if segments.count is not None:
        dstate = pass_segments(
            dstate, call, segments, sequence, head, segment + 1, decode(segments.count), e0, True,
            FULL_D, BLOCK_E, BUILD,
        )  # fmt: skip
    beta, reached, left, entry, total = load_factors(
        call, prepared, sequence, head, end - 1, end, FULL_D, BUILD
    )
    for backwards in range(begin, end):
        n = begin + end - 1 - backwards
        next_beta, next_reached, next_left, next_entry, next_total = load_factors(
            call, prepared, sequence, head, n - 1, end, FULL_D, BUILD
        )
        slot, row, first, count = locate_slot(call.place, sequence, n, n >= begin, C)
        at = slot.to(tl.int64) * H + head
        if BUILD.gate != NO_GATE:
            # Needed late, and on its way by then.
            state = load_block(states, at, 0, e0, FULL_D, BLOCK_E, D, E).to(tl.float32)
        after = narrow(dstate, DTYPE, BUILD)
        store_block(dstates, at, 0, e0, after, FULL_D, BLOCK_E, D, E, BUILD)
        do = load_rows(dout, row, first, count, head, e0, C, BLOCK_E, E)
        if BUILD.gate == VECTOR_GATE:
            k = load_block(prepared.k, at, 0, 0, C, FULL_D, C, D)
        else:
            k = load_rows(call.k, row, first, count, qk_head, 0, C, FULL_D, D)
        dd = dot(k, after, None, DTYPE, BUILD)
        if BUILD.gate == SCALAR_GATE:
            dd *= left[:, None]
        scores = load_block_transposed(prepared.scores, at, 0, 0, C, C, C, C)
        dd = dot(scores, do, dd, DTYPE, BUILD)
        if BUILD.has_delta:
            dd = apply_inverse(prepared.inverse, at, dd, True, DTYPE, BUILD)
            store_block(dsteps, at, 0, e0, dd, C, BLOCK_E, C, E, BUILD)
            dd *= beta[:, None]
        store_rows(dv, row, first, count, head, e0, dd, C, BLOCK_E, E, BUILD)
        if BUILD.gate == VECTOR_GATE:
            dims = tl.arange(0, FULL_D)
            passed = tl.sum(state * dstate, 1)
            tl.store(dtotal + (at * SLICES + e0 // BLOCK_E) * D + dims, passed, mask=dims < D)
            dstate *= total[:, None]
        if BUILD.gate == SCALAR_GATE:
            passed = tl.sum(tl.sum(state * dstate, 1), 0)
            tl.store(dtotal + at * SLICES + e0 // BLOCK_E, passed)
            dstate *= total
        do = do.to(tl.float32)
        if BUILD.gate == VECTOR_GATE:
            q_columns = load_block_transposed(prepared.q, at, 0, 0, C, FULL_D, C, D)
            dstate = dot(q_columns, do, dstate, DTYPE, BUILD)
            if BUILD.has_delta:
                seen_columns = load_block_transposed(prepared.seen, at, 0, 0, C, FULL_D, C, D)
                dstate = dot(seen_columns, -dd, dstate, DTYPE, BUILD)
        else:
            q_columns = load_columns(call.q, row, first, count, qk_head, 0, C, FULL_D, D)
            do *= call.scale
            if BUILD.gate == SCALAR_GATE:
                do, dd = do * reached[:, None], dd * reached[:, None]
            dstate = dot(q_columns, do, dstate, DTYPE, BUILD)
            if BUILD.has_delta:
                dstate = dot(tl.trans(k), -dd, dstate, DTYPE, BUILD)
        if BUILD.gate == VECTOR_GATE:
            dstate *= entry[:, None]
        if BUILD.gate == SCALAR_GATE:
            dstate *= entry
        beta, reached, left = next_beta, next_reached, next_left
        entry, total = next_entry, next_total
    if dinitial is not None:
        begins_here = segment == 0
        if begins_here:
            store_block(dinitial, index, 0, e0, dstate, FULL_D, BLOCK_E, D, E, BUILD)
