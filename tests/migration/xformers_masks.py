"""What xFormers' documentation says of its attention and masks, written out densely.

It has no wheel for the CPU. The names are those of `xformers.ops` and of its `fmha.attn_bias`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def memory_efficient_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | DenseMask | None = None,
    scale: float | None = None,
) -> Tensor:
    """`[B, M, H, D]`, or `[B, M, G, H / G, D]` with grouped heads."""
    if q.dim() == 5:
        parts = (x.flatten(2, 3) for x in (q, k, v))
        out = memory_efficient_attention(*parts, attn_bias=attn_bias, scale=scale)
        return out.unflatten(2, q.shape[2:4])
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if isinstance(attn_bias, Tensor):
        scores = scores + attn_bias
    elif attn_bias is not None:
        scores = attn_bias.add_to(scores)
    return torch.einsum("bhmn,bnhe->bmhe", scores.softmax(-1), v)


class DenseMask:
    """A mask by which keys a query at i may see, of M queries and N keys."""

    def visible(self, i: Tensor, j: Tensor, M: int, N: int) -> Tensor:
        raise NotImplementedError

    def add_to(self, scores: Tensor) -> Tensor:
        M, N = scores.shape[-2:]
        i, j = torch.arange(M)[:, None], torch.arange(N)
        return scores.masked_fill(~self.visible(i, j, M, N), -torch.inf)


class LowerTriangularMask(DenseMask):
    def visible(self, i: Tensor, j: Tensor, M: int, N: int) -> Tensor:
        return j <= i


class LowerTriangularFromBottomRightMask(DenseMask):
    def visible(self, i: Tensor, j: Tensor, M: int, N: int) -> Tensor:
        return j <= i + N - M


@dataclass
class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    bias: Tensor

    def add_to(self, scores: Tensor) -> Tensor:
        return super().add_to(scores + self.bias)


@dataclass
class LocalAttentionFromBottomRightMask(DenseMask):
    window_left: int
    window_right: int

    def visible(self, i: Tensor, j: Tensor, M: int, N: int) -> Tensor:
        distance = j - (i + N - M)
        return (distance >= -self.window_left) & (distance <= self.window_right)


@dataclass
class BlockDiagonalMask(DenseMask):
    lengths: list[int]
    is_causal: bool = False

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonalMask:
        return cls(lengths)

    def make_causal(self) -> BlockDiagonalMask:
        return BlockDiagonalMask(self.lengths, True)

    def visible(self, i: Tensor, j: Tensor, M: int, N: int) -> Tensor:
        sequence = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
        return (sequence[i] == sequence[j]) & ((j <= i) if self.is_causal else True)
