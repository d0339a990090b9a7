"""Keys and values gathered from all ranks, a few heads at a time.

While one stride of heads is computed, the next is gathered. Queries then meet all keys of the
sequence at once, in order of position: one call a run of queries, nothing to merge. Backward, K and
V are gathered again, and gradients go back to their owners in fp32 by an all-to-all, so that each
sum has one owner and one order.

Dims: S tokens of the sequence, R ranks, G kv heads, D and E key and value dims, e bytes an element.
Cost, received per rank: forward (R - 1) / R S G (D + E) e; backward the same again and
    (R - 1) / R S G (D + E) 4 of gradients. Shards of different lengths travel as long as the
    longest.
Memory: K and V of the whole sequence for two strides of heads; backward, their fp32 gradients too.
Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Link, Pending
from .layout import Layout
from .pieces import Accumulator, Backward, Extras, Terms, adds_nothing, slice_heads
from .plan import Plan

# Two would do for the overlap; with four, less is exposed before the first and after the last.
_STRIDES = 4


@dataclass(frozen=True)
class AllGather:
    """One call's gathers. is_split: whether heads may be computed apart; not where dropout counts
    them or a mask tells them apart."""

    link: Link
    plan: Plan
    layout: Layout
    terms: Terms
    is_split: bool = True

    @property
    def adds_nothing(self) -> bool:
        return adds_nothing(self.plan.whole)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, dtype: torch.dtype | None
    ) -> Accumulator:
        total, group = Accumulator(q, v.shape[-1], dtype), q.shape[2] // k.shape[2]
        for g, k_all, v_all in self._gathered(k, v):
            heads = slice(g.start * group, g.stop * group)
            part, some = total.of_heads(heads), slice_heads(extras, heads)
            part.add(q[:, :, heads], k_all, v_all, self.plan.whole, some, self.terms)
            part.settle()
        return total

    def backward(self, state: Backward) -> None:
        group = state.q.shape[2] // state.k.shape[2]
        under_way: tuple[slice, Tensor, Pending] | None = None
        for g, k_all, v_all in self._gathered(state.k, state.v):
            dk, dv = (torch.zeros_like(x, dtype=state.dk.dtype) for x in (k_all, v_all))
            part = state.of_heads(slice(g.start * group, g.stop * group), dk, dv)
            part.add(k_all, v_all, (dk, dv), self.plan.whole, self.terms)
            if under_way is not None:
                self._receive(state, *under_way)
            under_way = (g, *self._send(dk, dv))
        if under_way is not None:
            self._receive(state, *under_way)

    def _gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Strides of kv heads with all their keys and values, by position."""
        G = k.shape[2]
        width = -(-G // _STRIDES) if self.is_split else G
        strides = [slice(g, min(G, g + width)) for g in range(0, G, width)]
        ahead = self._gather(k, v, strides[0])
        for at, stride in enumerate(strides):
            now = ahead
            if at + 1 < len(strides):
                ahead = self._gather(k, v, strides[at + 1])
            found, pending = now
            pending.wait()
            yield stride, *self._in_order(found, k.shape[-1])

    def _gather(self, k: Tensor, v: Tensor, g: slice) -> tuple[Tensor, Pending]:
        both = torch.cat([k[:, :, g], v[:, :, g]], -1)
        missing = max(self.layout.lengths) - both.shape[1]
        if missing:
            both = torch.nn.functional.pad(both, (0, 0, 0, 0, 0, missing))
        if self.link.ranks == 1:
            return both.unsqueeze(0), Pending([], [])
        return self.link.all_gather("kv", both)

    def _in_order(self, found: Tensor, D: int) -> tuple[Tensor, Tensor]:
        """`[R, B, longest, g, D + E]` -> k `[B, S, g, D]` and v `[B, S, g, E]`."""
        stored = found.transpose(0, 1).flatten(1, 2)
        order = self.layout.order(found.device, padded=True)
        # In two copies: a kernel wants rows that start at aligned addresses.
        k, v = (x.index_select(1, order) for x in (stored[..., :D], stored[..., D:]))
        return k, v

    def _send(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Pending]:
        parts, sizes = [], []
        for rank in range(self.link.ranks):
            at = self.layout.positions(rank, dk.device)
            part = [x.index_select(1, at).reshape(-1) for x in (dk, dv)]
            parts += part
            sizes.append(sum(x.numel() for x in part))
        own = sizes[self.link.rank]
        flat = torch.cat(parts)
        if self.link.ranks == 1:
            return flat, Pending([], [])
        return self.link.all_to_all("dkv", flat, sizes, [own] * self.link.ranks)

    def _receive(self, state: Backward, g: slice, found: Tensor, pending: Pending) -> None:
        pending.wait()
        parts = found.view(self.link.ranks, -1)
        # Rank after rank: the same order of every sum in every run.
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        dk, dv = state.dk[:, :, g], state.dv[:, :, g]
        k_part, v_part = total.split([dk.numel(), dv.numel()])
        dk.add_(k_part.view(dk.shape))
        dv.add_(v_part.view(dv.shape))
