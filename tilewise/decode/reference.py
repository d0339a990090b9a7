"""Attention over a cache as its formula: the fp64 oracle and the eager form of the error budget.

Every sequence's keys are read slot by slot, `k[n] = K[table[b, n // P], n % P]` times its scale,
and put one behind the other; the rest is `tilewise.dense.reference` over packed sequences, whose
query m stands at key `m + N_b - M_b`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.partials import Partial
from ..core.positions import Positions
from ..dense.piece import Piece
from ..dense.reference import attention_eager, attention_reference
from .cache import KVCache
from .call import CacheCall


def cache_reference(call: CacheCall) -> Partial:
    """The exact `Partial(out, lse)` in fp64."""
    return _attend(call, attention_reference, torch.float64)


def cache_eager(call: CacheCall) -> Partial:
    """The same formula with products in q's dtype, on what a float8 cache stands for."""
    return _attend(call, attention_eager, call.q.dtype)


def read_sequence(cache: KVCache, name: str, b: int, dtype: torch.dtype) -> Tensor:
    """The keys or values in use of one sequence, `[N_b, G, X]`."""
    storage, scale = getattr(cache, name), getattr(cache, f"{name}_scale")
    rows = []
    for n in range(int(cache.lengths[b])):
        if cache.block_table is not None:
            P = storage.shape[1]
            at = int(cache.block_table[b, n // P]), n % P
        else:
            at = (b if cache.batch_index is None else int(cache.batch_index[b])), n
        row = storage[at].to(torch.float64)
        if scale is not None:
            of_slot = scale[at] if scale.dim() == 3 else scale[b] if scale.dim() == 2 else scale
            row = row * of_slot.to(torch.float64).unsqueeze(-1)
        rows.append(row)
    shape = (0, *storage.shape[2:])
    found = torch.stack(rows) if rows else torch.zeros(shape, dtype=torch.float64)
    return found.to(storage.device, dtype)


def _attend(call: CacheCall, form: Callable[[Piece], Partial], dtype: torch.dtype) -> Partial:
    cache, (B, H) = call.cache, (call.cache.B, call.q.shape[-2])
    keys = [read_sequence(cache, "k", b, dtype) for b in range(B)]
    values = [read_sequence(cache, "v", b, dtype) for b in range(B)]
    nothing = [
        torch.zeros(0, *x.shape[2:], dtype=dtype, device=x.device) for x in (cache.k, cache.v)
    ]
    k, v = torch.cat([nothing[0], *keys]), torch.cat([nothing[1], *values])
    ends = torch.tensor([0, *(x.shape[0] for x in keys)], device=call.q.device).cumsum(0)
    q = call.q if call.is_packed else call.q.flatten(0, 1)
    cu_q = call.cu_seqlens_q
    if cu_q is None:
        cu_q = torch.arange(B + 1, device=q.device) * call.q.shape[1]
    at = Positions(B, H, q.shape[0], k.shape[0], cu_seqlens_q=cu_q, cu_seqlens_k=ends)
    out, lse = form(Piece(q, k, v, call.whole_mask, at, call.terms))
    if call.is_packed:
        return Partial(out, lse)
    shape = call.q.shape[:2]
    return Partial(out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1))
