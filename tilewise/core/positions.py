"""Where queries and keys stand: batches, packed documents, used lengths and pieces.

A mask and ALiBi speak of (b, h, i, j): batch row or document, head, query and key index in their
sequence. Storage speaks of rows m and columns n. `Positions` is the way from one to the other, in
one form for padded tensors (`[B, M, H, D]`) and packed ones (`[T, H, D]`, taken as one batch row
whose rows belong to different documents).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mask import Index


@dataclass(frozen=True)
class Rows:
    """A tile of query rows. All tensors broadcast to `[b, h, m, 1]`.

    `first` and `stop` bound the stored keys that the rows' sequences own and use; a stored key n
    has index `n - key_base`. `owned` is False for rows past a used length or the last document;
    None where every row is in use. `i` and `key_base` count from the piece's `q_start` and
    `k_start`.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    offset: int | Tensor
    key_base: int | Tensor
    first: int | Tensor
    stop: int | Tensor
    owned: Tensor | None = None
    q_start: int | Tensor = 0
    k_start: int | Tensor = 0

    def index(self, n0: int, n1: int) -> Index:
        """The mask's indices of these rows against stored keys `[n0, n1)`."""
        j = torch.arange(n0, n1, device=self.i.device).reshape(1, 1, 1, -1) - self.key_base
        return Index(self.b, self.h, self.i, j, self.offset)

    def key_distance(self, n0: int, n1: int) -> Tensor:
        """`|m + offset - n|` in sequence indices, as ALiBi counts it."""
        at = self.index(n0, n1)
        return (at.position(None) - at.j).abs()


@dataclass(frozen=True)
class Positions:
    """Sizes and placement of one attention call.

    Args:
        B, H, M, N: batch rows (or documents, when packed), query heads, stored query rows (of one
            batch row, or all packed ones), stored key rows.
        cu_seqlens_q, cu_seqlens_k: `[B + 1]` cumulative storage of the documents, when packed.
        seqused_q, seqused_k: `[B]` how much of each sequence is in use, from its start.
        q_start, k_start: index of the first query and key of a piece, an int or `[B]`; None where
            the call is whole.
        max_seqlen_q, max_seqlen_k: rows of the longest document, where the caller knows them.
    """

    B: int
    H: int
    M: int
    N: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    q_start: int | Tensor | None = None
    k_start: int | Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def is_piece(self) -> bool:
        return self.q_start is not None or self.k_start is not None

    @property
    def is_plain(self) -> bool:
        """Padded storage, all of it in use, from index 0."""
        return not (self.is_packed or self.is_piece) and self.seqused_q is self.seqused_k is None

    @property
    def lengths(self) -> list[Tensor]:
        """Every tensor that places rows."""
        fields = (
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqused_q,
            self.seqused_k,
            self.q_start,
            self.k_start,
        )
        return [x for x in fields if isinstance(x, Tensor)]

    @property
    def host_device(self) -> torch.device:
        """Where the lengths live; the CPU when there are none."""
        return self.lengths[0].device if self.lengths else torch.device("cpu")

    def unpacked(self) -> Positions:
        """The same sequences one a batch row, as long as the longest.

        Reads lengths on the host where max_seqlen_q or max_seqlen_k is not known.
        """
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return self
        queries, keys = (x.diff() for x in (self.cu_seqlens_q, self.cu_seqlens_k))
        return Positions(
            self.B,
            self.H,
            self._longest(self.cu_seqlens_q, self.M, self.max_seqlen_q),
            self._longest(self.cu_seqlens_k, self.N, self.max_seqlen_k),
            seqused_q=queries if self.seqused_q is None else self.seqused_q,
            seqused_k=keys if self.seqused_k is None else self.seqused_k,
            q_start=self.q_start,
            k_start=self.k_start,
        )

    @property
    def extent(self) -> tuple[int, int]:
        """How many query and key indices a sequence has at most.

        Reads lengths on the host as `unpacked` does.
        """
        queries = self._longest(self.cu_seqlens_q, self.M, self.max_seqlen_q)
        keys = self._longest(self.cu_seqlens_k, self.N, self.max_seqlen_k)
        return queries + self._last(self.q_start), keys + self._last(self.k_start)

    @staticmethod
    def _longest(cu_seqlens: Tensor | None, stored: int, known: int | None) -> int:
        # A traced length is not known; no document is longer than all of them.
        if cu_seqlens is None or torch.compiler.is_compiling():
            return stored
        if known is not None:
            return min(known, stored)
        return int(cu_seqlens.diff().clamp(0, stored).max()) if cu_seqlens.numel() > 1 else 0

    @staticmethod
    def _last(start: int | Tensor | None) -> int:
        if isinstance(start, Tensor):
            return int(start.max()) if start.numel() else 0
        return start or 0

    def rows(
        self,
        batch: tuple[int, int],
        heads: tuple[int, int],
        m: tuple[int, int],
        device: torch.device | None = None,
    ) -> Rows:
        """The rows of a tile: storage batch rows, query heads and query rows, each `[from, to)`.

        device: where the lengths live, or will meet a mask's tensors; `host_device` when None.
        """
        device = self.host_device if device is None else device
        h = torch.arange(*heads, device=device).reshape(1, -1, 1, 1)
        storage = torch.arange(*m, device=device).reshape(1, 1, -1, 1)
        if self.is_packed:
            return self._packed_rows(h, storage)
        b = torch.arange(*batch, device=device).reshape(-1, 1, 1, 1)
        used_q = self._used(self.seqused_q, b, self.M)
        used_k = self._used(self.seqused_k, b, self.N)
        stop: int | Tensor = used_k
        owned = None
        if self.seqused_q is not None:
            owned = storage < used_q
            stop = torch.where(owned, used_k, 0)
        q_start, k_start = self._starts(b)
        return Rows(
            b=b,
            h=h,
            i=storage + q_start,
            offset=0 if self.is_piece else used_k - used_q,
            key_base=-k_start,
            first=0,
            stop=stop,
            owned=owned,
            q_start=q_start,
            k_start=k_start,
        )

    def _packed_rows(self, h: Tensor, storage: Tensor) -> Rows:
        assert self.cu_seqlens_q is not None and self.cu_seqlens_k is not None
        cu_q, cu_k = self.cu_seqlens_q.to(torch.int64), self.cu_seqlens_k.to(torch.int64)
        if self.B == 0:
            zero = torch.zeros_like(storage)
            return Rows(zero, h, storage, 0, 0, zero, zero, zero.bool())
        # The last document that starts at or before the row: empty documents are passed over.
        found = torch.searchsorted(cu_q.contiguous(), storage, right=True) - 1
        b = found.clamp(0, self.B - 1)
        # Device lengths are not checked, so what they claim is cut to what is stored.
        first_q, first_k = cu_q[b].clamp(0, self.M), cu_k[b].clamp(0, self.N)
        used_q = self._used(self.seqused_q, b, cu_q[b + 1] - first_q)
        used_k = self._used(self.seqused_k, b, cu_k[b + 1] - first_k)
        m = storage - first_q
        owned = (cu_q[-1] > storage) & (m >= 0) & (m < used_q)
        q_start, k_start = self._starts(b)
        return Rows(
            b=b,
            h=h,
            i=m + q_start,
            offset=0 if self.is_piece else used_k - used_q,
            key_base=first_k - k_start,
            first=first_k,
            stop=torch.where(owned, (first_k + used_k).clamp(max=self.N), first_k),
            owned=owned,
            q_start=q_start,
            k_start=k_start,
        )

    def _starts(self, b: Tensor) -> tuple[int | Tensor, int | Tensor]:
        q_start, k_start = (
            x.to(torch.int64)[b] if isinstance(x, Tensor) else x or 0
            for x in (self.q_start, self.k_start)
        )
        return q_start, k_start

    @staticmethod
    def _used(used: Tensor | None, b: Tensor, stored: int | Tensor) -> Any:
        if used is None:
            return stored
        return used.to(torch.int64)[b].clamp(max=stored).clamp(min=0)
