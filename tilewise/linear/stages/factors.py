"""What multiplies a chunk's rows in the passes over states, loaded a chunk ahead.

These are a few numbers, which the compiler does not load ahead as it does tiles; waited for where
they are needed, they would take as long as the products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .structs import SCALAR_GATE, VECTOR_GATE, locate_slot
from .tiles import load_numbers


@triton.jit
def load_factors(
    call, prepared, sequence, head, n, n_chunks, FULL_D: tl.constexpr, BUILD: tl.constexpr
):
    """Of the n-th chunk of a sequence, which may not be there: step sizes, decays from its first
    step and to its last `[C]`, and the entry's and the others', one or `[D]`. What an op has not
    is never read."""
    C: tl.constexpr = BUILD.chunk
    steps = tl.arange(0, C)
    beta, reached, left = (
        tl.zeros((C,), tl.float32),
        tl.zeros((C,), tl.float32),
        tl.zeros((C,), tl.float32),
    )
    entry, total = 0.0, 0.0
    is_there = (n >= 0) & (n < n_chunks)
    inside = tl.where(is_there, n, 0)
    slot, row, first, count = locate_slot(call.place, sequence, inside, is_there, C)
    at = slot.to(tl.int64) * decode(call.place.H) + head
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
    if BUILD.gate == SCALAR_GATE:
        mask = (steps < C) & is_there
        reached = tl.load(prepared.reached + at * C + steps, mask=mask, other=0.0)
        left = tl.load(prepared.left + at * C + steps, mask=mask, other=0.0)
        entry = tl.load(prepared.entry + at, mask=is_there, other=0.0)
        total = tl.load(prepared.total + at, mask=is_there, other=0.0)
    if BUILD.gate == VECTOR_GATE:
        D: tl.constexpr = BUILD.dim
        dims = tl.arange(0, FULL_D)
        mask = (dims < D) & is_there
        entry = tl.load(prepared.entry + at * D + dims, mask=mask, other=0.0)
        total = tl.load(prepared.total + at * D + dims, mask=mask, other=0.0)
    return beta, reached, left, entry, total
