"""What a segment of chunks does to a state, without a delta rule: S' = decay S + U.

Dims: U `[D, E]`, decay `[D]` or `[1]`, fp32. Grid: as `states.py`, with a program for each segment.
Math: U is the pass over states from a state of 0, and the decay the product of the chunks' own. A
    state at a segment's start is then made of what the segments before it left, one after another;
    of gradients dS = decay dS' + dU, from the sequence's end. So no segment waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .factors import load_factors
from .structs import NO_GATE, SCALAR_GATE, VECTOR_GATE, locate_segment, locate_slice, locate_slot
from .tiles import dot, load_block, load_block_transposed, load_columns, load_rows, store_block

# The largest number: of inf a state of 0 would be NaN.
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _segments_kernel(
    call, prepared, rows, segments,
    REVERSED: tl.constexpr, FULL_D: tl.constexpr, BLOCK_E: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """rows: v; REVERSED: the outputs' gradient, and U is that of the state at the segment's start.
    The decays are the same both ways, and written once."""
    C: tl.constexpr = BUILD.chunk
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    H = decode(call.place.H)
    e0, head, part, qk_head = locate_slice(call.place, tl.program_id(0), BLOCK_E, BUILD)
    sequence, _, begin, end = locate_segment(call.place, segments, part)
    state = tl.zeros((FULL_D, BLOCK_E), tl.float32)
    if BUILD.gate == VECTOR_GATE:
        decay = tl.full((FULL_D,), 1.0, tl.float32)
    else:
        decay = tl.full((1,), 1.0, tl.float32)
    _, reached, left, entry, total = load_factors(
        call, prepared, sequence, head, end - 1 if REVERSED else begin, end, FULL_D, BUILD
    )
    for i in range(begin, end):
        n = begin + end - 1 - i if REVERSED else i
        _, next_reached, next_left, next_entry, next_total = load_factors(
            call, prepared, sequence, head, n - 1 if REVERSED else n + 1, end, FULL_D, BUILD
        )
        slot, row, first, count = locate_slot(call.place, sequence, n, n < end, C)
        at = slot.to(tl.int64) * H + head
        d = load_rows(rows, row, first, count, head, e0, C, BLOCK_E, E).to(tl.float32)
        if BUILD.gate == VECTOR_GATE:
            columns = load_block_transposed(
                prepared.q if REVERSED else prepared.k, at, 0, 0, C, FULL_D, C, D
            )
            before, after = entry[:, None], total[:, None]
        else:
            columns = load_columns(
                call.q if REVERSED else call.k, row, first, count, qk_head, 0, C, FULL_D, D
            )
            before, after = entry, total
            if REVERSED:
                d *= call.scale
            if BUILD.gate == SCALAR_GATE:
                d *= (reached if REVERSED else left)[:, None]
        if BUILD.gate != NO_GATE:
            if not REVERSED:
                state *= before
            state *= after
            decay = tl.minimum(tl.minimum(decay * entry, _LARGEST) * total, _LARGEST)
        state = dot(columns, d, state, DTYPE, BUILD)
        if BUILD.gate != NO_GATE and REVERSED:
            state *= before
        reached, left, entry, total = next_reached, next_left, next_entry, next_total
    at = part.to(tl.int64) * H + head
    store_block(segments.states, at, 0, e0, state, FULL_D, BLOCK_E, D, E, BUILD)
    if BUILD.gate != NO_GATE and not REVERSED and e0 == 0:
        if BUILD.gate == VECTOR_GATE:
            dims = tl.arange(0, FULL_D)
            tl.store(segments.decays + at * D + dims, decay, mask=dims < D)
        else:
            tl.store(segments.decays + at + tl.arange(0, 1), decay)


@triton.jit
def pass_segments(
    state, call, segments, sequence, head, begin, end, e0, REVERSED: tl.constexpr,
    FULL_D: tl.constexpr, BLOCK_E: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """What segments from `begin` to `end` make of a state; REVERSED: of its gradient, the last
    one first."""
    D: tl.constexpr = BUILD.dim
    E: tl.constexpr = BUILD.value_dim
    H = decode(call.place.H)
    dims = tl.arange(0, FULL_D)
    for i in range(begin, end):
        segment = begin + end - 1 - i if REVERSED else i
        at = (sequence * decode(segments.count) + segment).to(tl.int64) * H + head
        if BUILD.gate == VECTOR_GATE:
            state *= tl.load(segments.decays + at * D + dims, mask=dims < D, other=0.0)[:, None]
        if BUILD.gate == SCALAR_GATE:
            state *= tl.load(segments.decays + at)
        state += load_block(segments.states, at, 0, e0, FULL_D, BLOCK_E, D, E)
    return state
