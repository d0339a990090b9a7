"""Attention over a cache in plain torch: pieces of its keys through the dense forward, merged.

A contiguous cache in q's dtype is read where it lies, in one piece; pages, other rows and float8
are gathered `CHUNK` slots at a time, so that memory stays bounded. Packed queries are taken in
batches of like lengths on the CPU, where lengths may be read; elsewhere padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.partials import Partial, merge_into
from ..core.positions import Positions, Rows
from ..dense.piece import Piece
from ..dense.tiled_forward import attention_fwd
from .cache import FLOAT8, KVCache
from .call import CacheCall

# Slots of a sequence that are gathered at a time: 4 MiB of bf16 keys and values at G 2, D 128.
CHUNK = 4096


@dataclass(frozen=True)
class CachePositions(Positions):
    """Queries of sequences `ids` over the keys `[first, first + N)` of their caches.

    used: how many keys each has in all. Query m stands at key `m + used - M` of the whole, so that
    masks and ALiBi mean the same in every piece.
    """

    ids: Tensor | None = None
    used: Tensor | None = None
    key_first: int = 0

    @property
    def lengths(self) -> list[Tensor]:
        found = (self.ids, self.used, self.seqused_q)
        return [x for x in found if x is not None]

    def rows(
        self,
        batch: tuple[int, int],
        heads: tuple[int, int],
        m: tuple[int, int],
        device: torch.device | None = None,
    ) -> Rows:
        assert self.ids is not None and self.used is not None
        device = self.host_device if device is None else device
        h = torch.arange(*heads, device=device).reshape(1, -1, 1, 1)
        i = torch.arange(*m, device=device).reshape(1, 1, -1, 1)

        def of_batch(x: Tensor) -> Tensor:
            return x[slice(*batch)].to(device, torch.int64).reshape(-1, 1, 1, 1)

        used_k = of_batch(self.used).clamp(min=0)
        used_q = self.M if self.seqused_q is None else of_batch(self.seqused_q)
        stop = (used_k - self.key_first).clamp(0, self.N)
        owned = None
        if isinstance(used_q, Tensor):
            owned = i < used_q
            stop = torch.where(owned, stop, 0)
        return Rows(
            b=of_batch(self.ids),
            h=h,
            i=i,
            offset=used_k - used_q,
            key_base=-self.key_first,
            first=0,
            stop=stop,
            owned=owned,
            k_start=self.key_first,
        )


def cache_attention_fwd(call: CacheCall, out: Tensor, lse: Tensor) -> None:
    """Write out (of q's shape, with E) and lse, where it has room. Nothing is checked here."""
    if lse.numel() == 0:
        H, rows = call.q.shape[-2], call.q.shape[-3]
        wide = torch.promote_types(torch.float32, call.q.dtype)
        lse = call.q.new_empty((*call.q.shape[:-3], H, rows), dtype=wide)
    if call.q.numel() == 0:
        out.zero_()
        lse.fill_(float("-inf"))
        return
    if call.cu_seqlens_q is None:
        ids = torch.arange(call.cache.B, device=call.q.device)
        part = _attend(call, call.q, ids, None, out.dtype)
        out.copy_(part.out)
        lse.copy_(part.lse)
        return
    cu = call.cu_seqlens_q.to(torch.int64)
    counts = cu.diff()
    # Rows that nobody owns; of the others q may lie where out is.
    token = torch.arange(call.q.shape[0], device=cu.device)
    unowned = (token < cu[0]) | (token >= cu[-1])
    out.masked_fill_(unowned[:, None, None], 0.0)
    lse.masked_fill_(unowned, float("-inf"))
    for ids, M in _batches(call, counts):
        m = torch.arange(M, device=cu.device)
        own = m < counts[ids].unsqueeze(-1)
        at = (cu[ids].unsqueeze(-1) + m).clamp(max=call.q.shape[0] - 1)
        part = _attend(call, call.q[at], ids, counts[ids], out.dtype)
        if own.device.type == "cpu":
            out[at[own]] = part.out[own]
            lse[:, at[own]] = part.lse.transpose(1, 2)[own].T
            continue
        # Rows past a sequence's own all go to one more row, which is cut off.
        targets = torch.where(own, at, call.q.shape[0]).flatten()
        longer: Tensor = torch.cat([out, out[:1]]).index_copy_(0, targets, part.out.flatten(0, 1))
        out.copy_(longer[:-1])
        longer = torch.cat([lse, lse[:, :1]], 1)
        longer.index_copy_(1, targets, part.lse.transpose(0, 1).flatten(1))
        lse.copy_(longer[:, :-1])


def _batches(call: CacheCall, counts: Tensor) -> list[tuple[Tensor, int]]:
    """Sequences to pad together, and to how many queries: at most twice what they have."""
    everyone = torch.arange(counts.shape[0], device=counts.device)
    if counts.device.type != "cpu":
        return [(everyone, call.most_queries)]
    found = []
    low, longest = 0, int(counts.max()) if counts.numel() else 0
    while low < longest:
        high = max(1, 2 * low)
        ids = everyone[(counts > low) & (counts <= high)]
        if ids.numel():
            found.append((ids, int(counts[ids].max())))
        low = high
    return found


def _attend(
    call: CacheCall, q: Tensor, ids: Tensor, used_q: Tensor | None, out_dtype: torch.dtype
) -> Partial:
    """q `[b, M, H, D]` of sequences `ids`, used_q of its rows in use."""
    cache, (b, M, H, _) = call.cache, q.shape
    used = cache.lengths[ids]
    stop = cache.capacity
    if used.device.type == "cpu":
        stop = int(used.max())
    step = max(1, stop) if _is_in_place(call, ids) else CHUNK
    edges = list(range(0, max(1, stop), step))
    wide = torch.promote_types(torch.float32, q.dtype)
    total: Partial | None = None
    for n0 in edges:
        n1 = min(stop, n0 + step)
        k, v = (_read(cache, name, ids, n0, n1, q.dtype) for name in "kv")
        at = CachePositions(b, H, M, n1 - n0, seqused_q=used_q, ids=ids, used=used, key_first=n0)
        terms = call.terms
        if terms.bias is not None:
            bias = terms.bias if terms.bias.shape[0] == 1 else terms.bias[ids]
            bias = bias[:, :, :M] if bias.shape[2] > 1 else bias
            terms = replace(terms, bias=bias[..., n0:n1] if bias.shape[3] > 1 else bias)
        if n0 > 0:
            # The sink is one logit of the whole.
            terms = replace(terms, sinks=None)
        dtype = out_dtype if len(edges) == 1 else wide
        piece = Piece(q, k, v, call.whole_mask, at, terms)
        part = Partial(*attention_fwd(piece, dtype, hands_over=False))
        if total is None:
            total = part
        else:
            merge_into(total, part)
    assert total is not None
    return Partial(total.out.to(out_dtype), total.lse)


def _is_in_place(call: CacheCall, ids: Tensor) -> bool:
    """Whether keys are read where they lie."""
    cache = call.cache
    is_plain = not cache.is_paged and cache.batch_index is None
    return is_plain and cache.k.dtype not in FLOAT8 and ids.shape[0] == cache.B


def _read(cache: KVCache, name: str, ids: Tensor, n0: int, n1: int, dtype: torch.dtype) -> Tensor:
    """Slots `[n0, n1)` of sequences ids, `[b, n, G, X]`: a view where they lie so.

    dtype: of q; float8 comes as what it stands for, in fp32 or fp64.
    """
    storage: Tensor = getattr(cache, name)
    is_plain = not cache.is_paged and cache.batch_index is None
    if is_plain and storage.dtype not in FLOAT8 and ids.shape[0] == cache.B:
        return storage[:, n0:n1]
    if cache.block_table is not None and storage.dtype not in FLOAT8 and n1 > n0:
        # Whole pages are copied faster than slots.
        P = storage.shape[1]
        first = n0 // P
        pages = cache.block_table[ids, first : -(-n1 // P)].to(torch.int64)
        found = storage[pages.clamp(0, storage.shape[0] - 1)].flatten(1, 2)
        return found[:, n0 - first * P : n1 - first * P]
    b, n = ids.unsqueeze(-1), torch.arange(n0, n1, device=ids.device)
    at = cache.slots(b, n)
    if storage.dtype not in FLOAT8:
        return storage[at]
    # Indexing knows no float8. Not rounded to 16 bits: the scale may hold more of them.
    wide = torch.promote_types(torch.float32, dtype)
    found = storage.view(torch.uint8)[at].view(storage.dtype).to(wide)
    scale = cache.scales_at(name, b, at)
    assert scale is not None
    return found * scale.to(wide)
