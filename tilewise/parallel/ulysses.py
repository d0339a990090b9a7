"""Ulysses: ranks trade their tokens of all heads for all tokens of some heads, and back.

           tokens ->            tokens ->
    heads  r0 | r1 | r2         r0 r0 r0       One all-to-all before attention, one after it; in
           r0 | r1 | r2   <->   r1 r1 r1       between, every rank has whole sequences, so any
           r0 | r1 | r2         r2 r2 r2       mask and every term works as on one rank.

Query head h of H goes to the rank whose share `[H r // R, H (r + 1) // R)` it is in, and takes its
kv head along: where there are fewer kv heads than ranks, several ranks get the same one, and its
gradients are summed.

Dims: S tokens, R ranks, H query heads, G kv heads, D and E dims, e bytes an element.
Cost, received per rank: (R - 1) / R S / R (H (D + E) + G (D + E)) e forward, the same backward.
Source: DeepSpeed Ulysses (arXiv 2309.14509).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .comm import Link
from .layout import Layout


def share_of(heads: int, rank: int, ranks: int) -> range:
    """The query heads of a rank."""
    return range(heads * rank // ranks, heads * (rank + 1) // ranks)


def kv_heads_of(heads: range, group: int) -> list[int]:
    """The kv heads that some query heads read, so that the ratio stays whole.

    Each once where the query heads are whole groups, or lie in one; else one for each query head.
    """
    if len(heads) == 0:
        return []
    each = [h // group for h in heads]
    if heads.start % group == 0 and len(heads) % group == 0:
        return each[::group]
    return each[:1] if each[0] == each[-1] else each


@dataclass(frozen=True)
class HeadSwap:
    """The trade of one group of ranks.

    link: the ranks that trade. layout: which positions of the *traded* tokens each of them holds;
    position p is the p-th token of the group in order.
    """

    link: Link
    layout: Layout

    def to_tokens(self, tensors: list[Tensor], heads: list[list[list[int]]]) -> list[Tensor]:
        """`[B, own, H, X]` each -> `[B, all, heads of this rank, X]`, by position.

        heads: for each tensor, for each rank, which of its heads that rank gets.
        """
        ranks, lengths = range(self.link.ranks), self.layout.lengths
        parts = [
            [_pick(x, shares[rank], 2) for x, shares in zip(tensors, heads, strict=True)]
            for rank in ranks
        ]
        sent = [sum(x.numel() for x in part) for part in parts]
        mine = [len(shares[self.link.rank]) for shares in heads]
        shapes = [
            [(x.shape[0], length, n, x.shape[3]) for x, n in zip(tensors, mine, strict=True)]
            for length in lengths
        ]
        found = self._trade("heads", parts, sent, shapes)
        order = self.layout.order(tensors[0].device)
        return [
            torch.cat([part[i] for part in found], 1).index_select(1, order)
            for i in range(len(tensors))
        ]

    def to_heads(
        self, tensors: list[Tensor], heads: list[list[list[int]]], counts: list[int]
    ) -> list[Tensor]:
        """The way back: `[B, all, heads of this rank, X]` -> `[B, own, H, X]`.

        What several ranks hold of one head is summed, in the order of the ranks, in the tensors'
        dtype. counts: H of each result.
        """
        own = self.layout.lengths[self.link.rank]
        parts = []
        for rank in range(self.link.ranks):
            at = self.layout.positions(rank, tensors[0].device)
            parts.append([x.index_select(1, at) for x in tensors])
        sent = [sum(x.numel() for x in part) for part in parts]
        shapes = [
            [
                (x.shape[0], own, len(shares[rank]), x.shape[3])
                for x, shares in zip(tensors, heads, strict=True)
            ]
            for rank in range(self.link.ranks)
        ]
        found = self._trade("heads", parts, sent, shapes)
        results = []
        for i, (x, count) in enumerate(zip(tensors, counts, strict=True)):
            if [head for share in heads[i] for head in share] == list(range(count)):
                results.append(torch.cat([part[i] for part in found], 2))
                continue
            total = x.new_zeros(x.shape[0], own, count, x.shape[3])
            for rank, part in enumerate(found):
                for index, head in enumerate(heads[i][rank]):
                    total[:, :, head] += part[i][:, :, index]
            results.append(total)
        return results

    def _trade(
        self, kind: str, parts: list[list[Tensor]], sent: list[int], shapes: list[list[Any]]
    ) -> list[list[Tensor]]:
        sizes = [[torch.Size(shape).numel() for shape in each] for each in shapes]
        flat = torch.cat([x.reshape(-1) for part in parts for x in part])
        if self.link.ranks > 1:
            received = [sum(each) for each in sizes]
            flat, pending = self.link.all_to_all(kind, flat, sent, received)
            pending.wait()
        pieces = iter(flat.split([size for each in sizes for size in each]))
        return [[next(pieces).view(shape) for shape in each] for each in shapes]


def _pick(x: Tensor, heads: list[int], dim: int) -> Tensor:
    if heads and heads == list(range(heads[0], heads[-1] + 1)):
        return x.narrow(dim, heads[0], len(heads))
    return x.index_select(dim, torch.tensor(heads, dtype=torch.int64, device=x.device))


class ToTokens(torch.autograd.Function):
    """`HeadSwap.to_tokens`, whose gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, swap: HeadSwap, heads: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.swap, ctx.heads = swap, heads
        ctx.counts = [x.shape[2] for x in tensors]
        return tuple(swap.to_tokens(list(tensors), heads))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.swap.to_heads(list(grads), ctx.heads, ctx.counts)


class ToHeads(torch.autograd.Function):
    """`HeadSwap.to_heads`, where every head is held by one rank; its gradient is the way there."""

    @staticmethod
    def forward(ctx: Any, swap: HeadSwap, heads: Any, counts: Any, *tensors: Tensor) -> Any:
        ctx.swap, ctx.heads = swap, heads
        return tuple(swap.to_heads(list(tensors), heads, counts))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *ctx.swap.to_tokens(list(grads), ctx.heads)
