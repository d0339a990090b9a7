"""Rotary position embeddings of keys and queries at given positions, in plain PyTorch.

Dims: x `[..., heads, D]`, positions `[...]`, tables `[positions, R / 2]` with R <= D rotated dims.
Math: with the pair (x1, x2) of a head and the angle of its position,
    (x1 cos - x2 sin, x1 sin + x2 cos), in fp32 (fp64 for fp64), rounded once.
    Pairs are (j, j + R/2), or (2j, 2j + 1) where interleaved. Dims past R stay as they are.
Source: RoFormer (arXiv 2104.09864), equation 34.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """How keys turn on their way into a cache.

    Args:
        cos, sin: `[positions, R / 2]`, R <= D and even.
        interleaved: pairs are (2j, 2j + 1), as in GPT-J; else (j, j + R / 2), as in GPT-NeoX.
        first: `[B]` integers, the position of each sequence's first new token; the cache's lengths
            when None.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    first: Tensor | None = None

    def check(self, op: str, D: int, B: int) -> None:
        cos, sin = self.cos, self.sin
        for name, x in (("cos", cos), ("sin", sin), ("first", self.first)):
            if not isinstance(x, Tensor) and not (name == "first" and x is None):
                raise ValueError(f"{op}: rotary {name} must be a tensor, got {type(x).__name__}.")
        is_table = cos.dim() == 2 and cos.shape == sin.shape and cos.dtype == sin.dtype
        if not is_table or not cos.is_floating_point() or 2 * cos.shape[1] > D:
            raise ValueError(
                f"{op}: rotary cos and sin must be floating [positions, R / 2] both with "
                f"R <= D = {D}, got {cos.dtype} {list(cos.shape)} and {sin.dtype} "
                f"{list(sin.shape)}."
            )
        first = self.first
        if first is not None and (
            first.shape != (B,) or first.dtype not in (torch.int32, torch.int64)
        ):
            raise ValueError(
                f"{op}: rotary first must be int32 or int64 [B] = [{B}], "
                f"got {first.dtype} {list(first.shape)}."
            )

    def check_reach(self, op: str, positions: Tensor) -> None:
        """That every position has an angle. Reads them."""
        last = self.cos.shape[0]
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < last:
            raise ValueError(
                f"{op}: rotary cos holds {last} positions, got positions "
                f"{int(positions.min())} to {int(positions.max())}."
            )


def rotate(x: Tensor, positions: Tensor, rotary: Rotary) -> Tensor:
    """x with the first R dims of every head turned by the angle of its position."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = rotary.cos.shape[-1]
    # Positions that the tables do not have belong to nobody.
    row = positions.to(torch.int64).clamp(0, max(0, rotary.cos.shape[0] - 1))
    c, s = (table.to(wide)[row].unsqueeze(-2) for table in (rotary.cos, rotary.sin))
    turned = x[..., : 2 * half].to(wide)
    if rotary.interleaved:
        x1, x2 = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([x1 * c - x2 * s, x1 * s + x2 * c], -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        pairs = torch.cat([x1 * c - x2 * s, x1 * s + x2 * c], -1)
    return torch.cat([pairs.to(x.dtype), x[..., 2 * half :]], -1)
