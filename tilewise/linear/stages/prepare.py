"""Preparation of chunks, each by itself: scores of q and k, the delta rule's inverse, decays.

Dims: as `structs.Prepared`. Grid: chunk slots x value heads, heads first.
Math: as `tiled.py`. Without a gate or with a scalar one a score is a product times a decay; with a
    vector gate see `prepare_vector.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .gates import load_scalar_gate, pair_decay, scalar_decays
from .products import key_products
from .solve import invert_unit_lower, store_inverse
from .structs import SCALAR_GATE, locate_chunk
from .tiles import load_numbers, store_block


@triton.jit
def _chunk_prepare_kernel(call, out, BUILD: tl.constexpr):
    """Everything of one chunk and head that needs no state."""
    C: tl.constexpr = BUILD.chunk
    DTYPE: tl.constexpr = call.q.ptr.dtype.element_ty
    at, head, row, first, count = locate_chunk(call.place, tl.program_id(0), C)
    qk_head = head // decode(call.place.group)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    qk, kk = key_products(call, row, first, count, qk_head, DTYPE, BUILD)
    g = tl.zeros((C,), tl.float32)
    if BUILD.gate == SCALAR_GATE:
        g = load_scalar_gate(call.g, row, first, count, head, C)
        decay = pair_decay(g, C)
        qk *= decay
    store_block(out.scores, at, 0, 0, tl.where(i >= j, qk, 0.0) * call.scale, C, C, C, C, BUILD)
    if BUILD.gate == SCALAR_GATE:
        reached, left, entry, total = scalar_decays(call.g, g, row, first, count, head, C)
        steps = tl.arange(0, C)
        tl.store(out.reached + at * C + steps, reached)
        tl.store(out.left + at * C + steps, left)
        tl.store(out.entry + at, entry)
        tl.store(out.total + at, total)
    if BUILD.has_delta:
        beta = load_numbers(call.beta, row, first, count, head, C)
        if BUILD.gate == SCALAR_GATE:
            kk *= decay
        a = tl.where(i > j, kk * beta[:, None], 0.0)
        store_inverse(out.inverse, at, invert_unit_lower(a, C, BUILD), DTYPE, BUILD)
