"""The simplest normal form of a mask: one window, one range of keys, and documents.

Full, causal, window, padding, prefix and document masks and their intersections are bands. A kernel
that knows a sequence's bounds needs nothing else for them: no list of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .mask import UNBOUNDED, And, Mask
from .mask_leaves import BatchShiftedWindow, Documents, Full, KeyBounds, ShiftedWindow, Window


@dataclass(frozen=True)
class Band:
    """Query at position p sees keys j with `p - left <= j <= p + right` and `lows <= j < highs`.

    offset: of the window, an int or `[B]`; None for the op's own. lows, highs: `[B]` or one entry;
    None where there are no bounds. documents: `[docs + 1]` or `[B, docs + 1]`, as `documents()`
    takes them, or None.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    offset: int | Tensor | None = None
    lows: Tensor | None = None
    highs: Tensor | None = None
    documents: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        given = (self.offset, self.lows, self.highs, self.documents)
        return [x for x in given if isinstance(x, Tensor)]

    @property
    def has_tensors(self) -> bool:
        return bool(self.tensors)

    @classmethod
    def of(cls, mask: Mask, op_offset: int | None = None) -> Band | None:
        """The band that a mask is, or None.

        op_offset: the op's query offset where it is known on the host; windows with an int offset
            of their own then join those without.
        """
        if isinstance(mask, Full):
            return cls()
        if isinstance(mask, And):
            left, right = cls.of(mask.left, op_offset), cls.of(mask.right, op_offset)
            return None if left is None or right is None else left._intersect(right)
        if isinstance(mask, KeyBounds):
            return cls(lows=mask.starts, highs=mask.stops)
        if isinstance(mask, Documents):
            return cls(documents=mask.cu_seqlens)
        if isinstance(mask, Window):
            offset: int | Tensor | None = op_offset
            if isinstance(mask, ShiftedWindow):
                offset = mask.offset
            elif isinstance(mask, BatchShiftedWindow):
                offset = mask.offsets
            return cls(mask.left, mask.right, offset)
        return None

    @property
    def is_bounded(self) -> bool:
        """Whether there is a window."""
        return self.left < UNBOUNDED or self.right < UNBOUNDED

    def _intersect(self, other: Band) -> Band | None:
        offset = self.offset if self.is_bounded else other.offset
        if self.is_bounded and other.is_bounded and not _is_same(self.offset, other.offset):
            return None
        lows, highs = self.lows, self.highs
        if lows is None or highs is None:
            lows, highs = other.lows, other.highs
        elif other.lows is not None and other.highs is not None:
            lows, highs = torch.maximum(lows, other.lows), torch.minimum(highs, other.highs)
        if self.documents is not None and other.documents is not None:
            return None
        documents = other.documents if self.documents is None else self.documents
        left, right = min(self.left, other.left), min(self.right, other.right)
        return Band(left, right, offset, lows, highs, documents)


def _is_same(a: int | Tensor | None, b: int | Tensor | None) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    return a == b
