"""Calls that dense attention's kernels take: a contiguous cache is padded keys with used lengths.

Many queries fill a GPU without splitting keys, and the dense kernels are faster then; they also
know every mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.positions import Positions
from ..dense.choice import why_not_hopper, why_not_triton
from ..dense.piece import Piece
from . import choice as caches
from .call import CacheCall


def why_not_dense(call: CacheCall) -> str:
    """Why dense kernels cannot run a call, as a verb phrase; empty where they can."""
    cache = call.cache
    if cache.is_paged or cache.batch_index is not None:
        return "wants a contiguous cache in the order of the batch"
    if call.is_packed:
        return "wants queries that are not packed"
    if cache.k.dtype != call.q.dtype:
        return "wants a cache in the dtype of q"
    return why_not_triton(piece_of(call))


def takes(call: CacheCall) -> bool:
    """Whether a call of the triton backend goes to dense kernels. For where Triton is."""
    from .triton_call import SplitMask

    return is_faster(call) or SplitMask.of(call.mask) is None


def is_faster(call: CacheCall) -> bool:
    """Whether dense kernels fill the GPU by queries alone. Not where splits were asked for."""
    is_large = caches.has_many_queries(call) and caches.fills_a_gpu(call)
    return is_large and not why_not_dense(call)


def piece_of(call: CacheCall) -> Piece:
    """The call as dense attention sees it: query m stands at key `m + lengths - M` there too."""
    cache, (B, M, H) = call.cache, call.q.shape[:3]
    at = Positions(B, H, M, cache.k.shape[1], seqused_k=cache.lengths)
    return Piece(call.q, cache.k, cache.v, call.whole_mask, at, call.terms)


def dense_forward(call: CacheCall, out: Tensor, lse: Tensor) -> Any:
    """Write out and, where it has room, lse. Nothing is checked here.

    Returns: what runs calls like this one again, or None.
    """
    from ..dense.triton_call import TritonCall

    piece = piece_of(call)
    if not why_not_hopper(piece):
        if not caches.why_not_hopper(call):
            # The same kernel, whose sequences this package places.
            from .hopper_prefill_call import PrefillForward
            from .triton_call import cache_attention_fwd

            return cache_attention_fwd(call, out, lse, PrefillForward)
        from ..dense.hopper_call import Forward
    else:
        from ..dense.triton_forward import Forward  # type: ignore[assignment]
    found = Forward(TritonCall(piece), out.dtype).run(piece.q, piece.k, piece.v)
    out.copy_(found[0])
    if lse.numel():
        lse.copy_(found[1].to(torch.float32))
    return None
