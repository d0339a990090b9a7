"""Sequences cut into chunks, without reading a length on the host.

Dense rows are cut at multiples of the chunk. Packed tokens are one row whose chunks begin at the
documents' starts; how many there are is known only to the device, so there are as many slots as
there could be, and slots past the last chunk hold no token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Table(NamedTuple):
    """Chunks of packed tokens. All `[slots]` int64 but for the last two, `[B]`.

    sequence: whose chunk it is. start, length: its tokens; length 0 in slots past the last chunk.
    number: which of its sequence. first_slot: of each sequence; chunks: its number, 0 where empty.
    """

    sequence: Tensor
    start: Tensor
    length: Tensor
    number: Tensor
    first_slot: Tensor
    chunks: Tensor


def chunk_table(cu_seqlens: Tensor, total: int, chunk: int) -> Table:
    """The chunks of `total` stored tokens. Bounds that no check has seen are held to what is
    stored."""
    bounds = cu_seqlens.to(torch.int64).clamp(0, total).cummax(0).values
    count = (bounds.diff() + chunk - 1) // chunk
    ends = count.cumsum(0)
    slots = torch.arange(total // chunk + count.shape[0], device=cu_seqlens.device)
    last = max(count.shape[0] - 1, 0)
    sequence = torch.searchsorted(ends, slots, right=True).clamp(max=last)
    first_slot = ends - count
    number = slots - first_slot[sequence]
    start = bounds[:-1][sequence] + number * chunk
    length = (bounds[1:][sequence] - start).clamp(0, chunk)
    return Table(sequence, start, length, number, first_slot, count)


class Chunks:
    """How tokens go to chunks and back: `[B, M, ...]` or `[T, ...]` to `[R, N, C, ...]`.

    R rows of N chunks of C steps: a row per batch element, or one row of packed documents. Steps
    that hold no token are 0 in every tensor, which makes them the identity.
    """

    def __init__(self, tokens: int, chunk: int, cu_seqlens: Tensor | None) -> None:
        self.tokens, self.chunk = tokens, chunk
        self.table = None if cu_seqlens is None else chunk_table(cu_seqlens, tokens, chunk)
        self.n_chunks = (
            -(-tokens // chunk) if self.table is None else int(self.table.start.shape[0])
        )
        if self.table is not None:
            steps = torch.arange(chunk, device=self.table.start.device)
            self._has_token = steps < self.table.length.unsqueeze(1)
            places = self.table.start.unsqueeze(1) + steps
            self._token = torch.where(self._has_token, places, 0)

    def cut(self, x: Tensor) -> Tensor:
        """`[R, N, C, ...]` of tokens' numbers."""
        if self.table is None:
            spare = self.n_chunks * self.chunk - self.tokens
            if spare:
                x = torch.cat([x, x.new_zeros(x.shape[0], spare, *x.shape[2:])], 1)
            return x.unflatten(1, (self.n_chunks, self.chunk))
        if self.tokens == 0:
            return x.new_zeros(1, self.n_chunks, self.chunk, *x.shape[1:])
        has_token = self._has_token.view(*self._has_token.shape, *(1,) * (x.dim() - 1))
        return torch.where(has_token, x[self._token], 0.0).unsqueeze(0)

    def join(self, x: Tensor) -> Tensor:
        """The reverse of `cut`; tokens of no sequence are 0."""
        if self.table is None:
            return x.flatten(1, 2)[:, : self.tokens]
        flat = x[0].flatten(0, 1)
        joined = flat.new_zeros(self.tokens + 1, *flat.shape[1:])
        # Steps without a token all go to a place of their own, which is cut off.
        place = torch.where(self._has_token, self._token, self.tokens).flatten()
        return joined.index_copy(0, place, flat)[: self.tokens]
