"""The pass over states: one program carries a slice of a head's state through its sequence, or
through a segment of it.

Dims: S `[D, E]` fp32, a program has all of D and BLOCK_E of E.
Grid: sequences x segments, where they are cut (`segments.py`), x value heads x slices of E.
Math: e = v - k S, d = inverse (beta e); d = v without a delta rule; o = q S + scores d;
    S' = total S + k^T d, with S decayed by the chunk's first step already. q and the k of e are
    decayed from that step, the k of S' to the last. In the forward o is made here and no state is
    written; for the backward each chunk's S, e and d are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .factors import load_factors
from .segments import pass_segments
from .solve import apply_inverse
from .structs import SCALAR_GATE, VECTOR_GATE, is_last, locate_segment, locate_slice, locate_slot
from .tiles import (
    dot,
    load_block,
    load_block_transposed,
    load_rows,
    narrow,
    store_block,
    store_rows,
)


@triton.jit
def _states_kernel(
    call, prepared, segments, initial, final, out, states, errors, steps, steps_low,
    FULL_D: tl.constexpr, BLOCK_E: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """segments: what each makes of a state. initial: None for zeros; final: None where no one asks.
    out: where the outputs go, or a pointer None. By slot and head, or None: states `[D, E]`, errors
    and steps (e, d) `[C, E]`, and what is rounded off steps."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    H = decode(call.place.H)
    e0, head, part, qk_head = locate_slice(call.place, tl.program_id(0), BLOCK_E, BUILD)
    sequence, segment, begin, end = locate_segment(call.place, segments, part)
    index = (sequence * H + head).to(tl.int64)
    state = tl.zeros((FULL_D, BLOCK_E), tl.float32)
    if initial is not None:
        state += load_block(initial, index, 0, e0, FULL_D, BLOCK_E, D, E)
    if segments.count is not None:
        state = pass_segments(
            state, call, segments, sequence, head, 0, segment, e0, False, FULL_D, BLOCK_E, BUILD
        )
    beta, reached, left, entry, total = load_factors(
        call, prepared, sequence, head, begin, end, FULL_D, BUILD
    )
    for n in range(begin, end):
        next_beta, next_reached, next_left, next_entry, next_total = load_factors(
            call, prepared, sequence, head, n + 1, end, FULL_D, BUILD
        )
        slot, row, first, count = locate_slot(call.place, sequence, n, n < end, C)
        at = slot.to(tl.int64) * H + head
        if BUILD.gate == VECTOR_GATE:
            state *= entry[:, None]
        if BUILD.gate == SCALAR_GATE:
            state *= entry
        before = narrow(state, DTYPE, BUILD)
        if states is not None:
            store_block(states, at, 0, e0, state, FULL_D, BLOCK_E, D, E, BUILD)
        d = load_rows(call.v, row, first, count, head, e0, C, BLOCK_E, E).to(tl.float32)
        if BUILD.gate != VECTOR_GATE:
            # Once: a loaded tile, unlike a product, may be seen transposed.
            k = load_rows(call.k, row, first, count, qk_head, 0, C, FULL_D, D)
        if BUILD.has_delta:
            if BUILD.gate == VECTOR_GATE:
                reader = load_block(prepared.seen, at, 0, 0, C, FULL_D, C, D)
            else:
                reader = k
            d -= _read(reader, before, reached, DTYPE, BUILD)
            if errors is not None:
                store_block(errors, at, 0, e0, d, C, BLOCK_E, C, E, BUILD)
            d *= beta[:, None]
            d = apply_inverse(prepared.inverse, at, d, False, DTYPE, BUILD)
        if steps is not None:
            store_block(steps, at, 0, e0, d, C, BLOCK_E, C, E, BUILD)
        if steps_low is not None:
            low = d - narrow(d, DTYPE, BUILD).to(tl.float32)
            store_block(steps_low, at, 0, e0, low, C, BLOCK_E, C, E, BUILD)
        if out.ptr is not None:
            if BUILD.gate == VECTOR_GATE:
                reader = load_block(prepared.q, at, 0, 0, C, FULL_D, C, D)
                o = _read(reader, before, reached, DTYPE, BUILD)
            else:
                reader = load_rows(call.q, row, first, count, qk_head, 0, C, FULL_D, D)
                o = _read(reader, before, reached, DTYPE, BUILD) * call.scale
            scores = load_block(prepared.scores, at, 0, 0, C, C, C, C)
            o = dot(scores, d, o, DTYPE, BUILD)
            store_rows(out, row, first, count, head, e0, o, C, BLOCK_E, E, BUILD)
        if BUILD.gate == VECTOR_GATE:
            k_columns = load_block_transposed(prepared.k, at, 0, 0, C, FULL_D, C, D)
            state = _add_step(k_columns, d, state * total[:, None], DTYPE, BUILD)
        else:
            if BUILD.gate == SCALAR_GATE:
                d = d * left[:, None]
                state = state * total
            state = _add_step(tl.trans(k), d, state, DTYPE, BUILD)
        beta, reached, left = next_beta, next_reached, next_left
        entry, total = next_entry, next_total
    if final is not None:
        ends_here = is_last(segments, segment)
        if ends_here:
            store_block(final, index, 0, e0, state, FULL_D, BLOCK_E, D, E, BUILD)


@triton.jit
def _add_step(k, d, state, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """S + k^T d. The delta rule's d is no number of the inputs' dtype, and what is rounded off it
    would stay in the state: it is added in two parts."""
    high = narrow(d, DTYPE, BUILD)
    state = dot(k, high, state, DTYPE, BUILD)
    if BUILD.has_delta and tl.float32 != DTYPE:
        state = dot(k, d - high.to(tl.float32), state, DTYPE, BUILD)
    return state


@triton.jit
def _read(reader, state, reached, DTYPE: tl.constexpr, BUILD: tl.constexpr):
    """What q or k reads of the state at the chunk's start, as it reaches each step. With a vector
    gate a reader is decayed already."""
    read = dot(reader, state, None, DTYPE, BUILD)
    if BUILD.gate == SCALAR_GATE:
        read *= reached[:, None]
    return read
