"""Ring attention: keys and values go round, queries stay.

    step   rank 0     rank 1     rank 2           Each rank computes its queries against the keys
     0     k0         k1         k2               that have arrived, while the next ones travel.
     1     k2         k0         k1               Backward, fp32 gradients of keys travel one step
     2     k1         k2         k0               behind them and go home at the end, while the
                                                  later half of the queries meets the own keys.

A window or documents may leave nothing to see after a few hops: the ring then stops there, on all
ranks alike. A rank's own gradients never travel.

Dims: S tokens of the sequence, R ranks, G kv heads, D and E key and value dims, e bytes an element.
Cost, received per rank: forward (R - 1) / R S G (D + E) e; backward the same again and
    (R - 1) / R S G (D + E) 4 of gradients.
Memory: two shards of K and V beside the rank's own, and three of their gradients in fp32.
Source: Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .comm import Link, Pending, flatten, unflatten
from .pieces import Accumulator, Backward, Extras, Terms, adds_nothing
from .plan import Plan


@dataclass(frozen=True)
class Ring:
    """One call's ring. lengths: tokens of each rank."""

    link: Link
    plan: Plan
    lengths: tuple[int, ...]
    terms: Terms

    @property
    def adds_nothing(self) -> bool:
        own = self.plan.calls[self.link.rank]
        return self.plan.hops == 0 and adds_nothing(own)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, dtype: torch.dtype | None
    ) -> Accumulator:
        total = Accumulator(q, v.shape[-1], dtype)
        travel = _Travel(self, k, v)
        for step in range(self.plan.hops + 1):
            source, (k_now, v_now) = travel.next(step)
            total.add(q, k_now, v_now, self.plan.calls[source], extras, self.terms)
        return total

    def backward(self, state: Backward) -> None:
        rank, ranks, hops = self.link.rank, self.link.ranks, self.plan.hops
        travel = _Travel(self, state.k, state.v)
        own = (state.k, state.v, (state.dk, state.dv))
        early, late = self.plan.halves
        sent: Tensor | None = None
        for step in range(hops + 1):
            source, (k, v) = travel.next(step)
            if step == 0:
                state.add(*own, early, self.terms)
                continue
            arriving: Tensor | None = None
            pending = Pending([], [])
            if sent is not None:
                arriving = state.dk.new_empty(k.numel() + v.numel())
                pending = self.link.exchange(
                    "dkv", (sent, (rank + 1) % ranks), (arriving, (rank - 1) % ranks)
                )
                self.link.give_way(sent)
            sums = state.dk.new_zeros(k.numel() + v.numel())
            dk, dv = unflatten(sums, (k.shape, v.shape))
            state.add(k, v, (dk, dv), self.plan.calls[source], self.terms)
            pending.wait()
            sent = sums if arriving is None else sums.add_(arriving)
        if sent is None:
            state.add(*own, late, self.terms)
            return
        home = state.dk.new_empty(state.dk.numel() + state.dv.numel())
        peers = ((sent, (rank - hops) % ranks), (home, (rank + hops) % ranks))
        pending = self.link.exchange("dkv", *peers)
        self.link.give_way(sent)
        state.add(*own, late, self.terms)
        pending.wait()
        parts = unflatten(home, (state.dk.shape, state.dv.shape))
        for total, part in zip((state.dk, state.dv), parts, strict=True):
            total.add_(part)


class _Travel:
    """K and V going round, the next hop under way while this step is computed."""

    def __init__(self, ring: Ring, k: Tensor, v: Tensor) -> None:
        self.ring, self.shapes = ring, (k.shape, v.shape)
        self.now = (k, v)
        self.flat = flatten((k, v)) if ring.plan.hops else k
        self.pending = Pending([], [])
        self.arriving = self.flat

    def next(self, step: int) -> tuple[int, tuple[Tensor, Tensor]]:
        """The source rank of this step, and its keys and values."""
        link, ranks = self.ring.link, self.ring.link.ranks
        source = (link.rank - step) % ranks
        if step:
            self.pending.wait()
            self.flat = self.arriving
            k, v = unflatten(self.flat, self._shapes_of(source))
            self.now = (k, v)
        if step < self.ring.plan.hops:
            shapes = self._shapes_of((source - 1) % ranks)
            size = sum(torch.Size(shape).numel() for shape in shapes)
            self.arriving = self.flat.new_empty(size)
            peers = ((self.flat, (link.rank + 1) % ranks), (self.arriving, (link.rank - 1) % ranks))
            self.pending = link.exchange("kv", *peers)
            link.give_way(self.flat)
        return source, self.now

    def _shapes_of(self, source: int) -> list[tuple[int, ...]]:
        length = self.ring.lengths[source]
        return [(shape[0], length, *shape[2:]) for shape in self.shapes]
