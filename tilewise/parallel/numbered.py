"""Calls on some heads that keep their numbers in the whole.

Dropout counts `b * H + h`. Where ranks have traded heads, head h of rank u is head `u H/U + h` of
the whole, so row b of this rank counts as row `b U + u` of H / U heads. Packed documents number
their rows so: document `b U + u` holds row b, and the others are empty.

Dims: B batch rows, M rows of each, U ranks that share the heads, H heads here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .masks import of_batches
from .plan import Call


class Numbering(NamedTuple):
    """Share `u` of `U` of the heads, in `B` batch rows."""

    B: int
    u: int
    U: int

    def pack(self, x: Tensor) -> Tensor:
        """`[B, M, H, X]` -> `[B M, H, X]`."""
        return x.reshape(-1, *x.shape[2:])

    def pack_rows(self, x: Tensor) -> Tensor:
        """`[B, H, M]` -> `[H, B M]`."""
        return x.transpose(0, 1).reshape(x.shape[1], -1)

    def unpack(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.B, -1))

    def unpack_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.B, -1)).transpose(0, 1)

    def cu_seqlens(self, length: int, device: torch.device) -> Tensor:
        """Documents `b U + u` of `length` rows each, and empty ones between."""
        ends = torch.arange(self.B * self.U + 1, device=device)
        return (ends + (self.U - 1 - self.u)) // self.U * length

    def expand(self, x: Tensor | None) -> Tensor | None:
        """A table `[B or 1, ...]` over batch rows as one over documents."""
        if x is None or x.shape[0] == 1:
            return x
        return x.repeat_interleave(self.U, 0)

    def own(self, x: Tensor, like: Tensor) -> Tensor:
        """The rows of an expanded table that belong to documents with tokens."""
        return x if x.shape == like.shape else x[self.u :: self.U]

    def mask_of(self, call: Call) -> Call:
        return call._replace(mask=of_batches(call.mask, lambda x: x.repeat_interleave(self.U, 0)))
