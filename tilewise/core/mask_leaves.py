"""The masks that a few key intervals per query can say, and their constructors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .mask import (
    UNBOUNDED,
    Index,
    Leaf,
    Mask,
    Offset,
    Pair,
    outside_inference_mode,
    per_batch,
    register_leaf,
)
from .shapes import is_integer

Lengths = int | Tensor | Sequence[int]


@register_leaf
@dataclass(frozen=True, eq=False)
class Full(Leaf):
    CODE: ClassVar[int] = 1

    def intervals(self, at: Index) -> list[Pair]:
        return [(-UNBOUNDED, UNBOUNDED)]

    def visible(self, at: Index) -> Tensor:
        return torch.ones_like(at.j, dtype=torch.bool)


@register_leaf
@dataclass(frozen=True, eq=False)
class Window(Leaf):
    """Keys in `[p - left, p + right]` around the query's position p. `causal` is `right = 0`."""

    left: int
    right: int
    CODE: ClassVar[int] = 2
    INTS: ClassVar[int] = 2

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [self.left, self.right], []

    def position(self, at: Index) -> Tensor:
        return at.position(None)

    def intervals(self, at: Index) -> list[Pair]:
        p = self.position(at)
        start: int | Tensor = -UNBOUNDED if self.left == UNBOUNDED else p - self.left
        stop: int | Tensor = UNBOUNDED if self.right == UNBOUNDED else p + (self.right + 1)
        return [(start, stop)]


@register_leaf
@dataclass(frozen=True, eq=False)
class ShiftedWindow(Window):
    """A window with an int offset of its own."""

    offset: int
    CODE: ClassVar[int] = 8
    INTS: ClassVar[int] = 3

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [self.left, self.right, self.offset], []

    def position(self, at: Index) -> Tensor:
        return at.position(self.offset)


@register_leaf
@dataclass(frozen=True, eq=False)
class BatchShiftedWindow(Window):
    """A window with an offset per batch row, `[B]`, on the device."""

    offsets: Tensor
    CODE: ClassVar[int] = 9
    TENSORS: ClassVar[int] = 1

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [self.left, self.right], [self.offsets]

    def position(self, at: Index) -> Tensor:
        return at.position(self.offsets)

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        _check_length("window(offset=)", self.offsets, B)


@register_leaf
@dataclass(frozen=True, eq=False)
class KeyBounds(Leaf):
    """Keys in `[starts[b], stops[b])`: right padding, left padding and prefixes."""

    starts: Tensor
    stops: Tensor
    CODE: ClassVar[int] = 3
    TENSORS: ClassVar[int] = 2

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [], [self.starts, self.stops]

    def intervals(self, at: Index) -> list[Pair]:
        return [(per_batch(self.starts, at.b), per_batch(self.stops, at.b))]

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        for tensor in (self.starts, self.stops):
            _check_length("key_padding, left_padding or prefix", tensor, B)
            if reads and bool((tensor < 0).any()):
                raise ValueError(
                    "mask: lengths must not be negative, got "
                    f"{int(tensor.min())} at batch {int(tensor.argmin())}."
                )


@register_leaf
@dataclass(frozen=True, eq=False)
class Documents(Leaf):
    """Keys of the query's own document; `cu_seqlens` `[docs + 1]` or `[B, docs + 1]`."""

    cu_seqlens: Tensor
    CODE: ClassVar[int] = 4
    TENSORS: ClassVar[int] = 1

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [], [self.cu_seqlens]

    def intervals(self, at: Index) -> list[Pair]:
        p = at.position(None)
        cu = self.cu_seqlens.to(p.device, torch.int64)
        if cu.dim() == 1:
            doc = torch.searchsorted(cu, p.contiguous(), right=True)
            low = cu[(doc - 1).clamp(0, cu.numel() - 1)]
            high = cu[doc.clamp(0, cu.numel() - 1)]
        else:
            b = at.b if cu.shape[0] > 1 else torch.zeros_like(at.b)
            rows = cu[b]
            doc = (rows <= p.unsqueeze(-1)).sum(-1)
            rows = rows.expand(*doc.shape, cu.shape[-1])
            low = rows.gather(-1, (doc - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)
            high = rows.gather(-1, doc.clamp(max=cu.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
        # Before the first document or after the last one there is nothing to see.
        outside = (doc == 0) | (doc == cu.shape[-1])
        return [(low, torch.where(outside, low, high))]

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        cu = self.cu_seqlens
        if cu.dim() == 2 and cu.shape[0] != B and cu.shape[0] != 1:
            raise ValueError(
                f"documents: expected cu_seqlens [docs + 1] or [{B}, docs + 1], "
                f"got {list(cu.shape)}."
            )
        if not reads:
            return
        if bool((cu[..., 0] != 0).any()) or bool((cu[..., 1:] < cu[..., :-1]).any()):
            got = cu.flatten()[:8].tolist()
            raise ValueError(f"documents: cu_seqlens must start at 0 and never fall, got {got}.")


@register_leaf
@dataclass(frozen=True, eq=False)
class Chunked(Leaf):
    """Keys of the chunk of `size` positions in which the query stands."""

    size: int
    CODE: ClassVar[int] = 5
    INTS: ClassVar[int] = 1

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [self.size], []

    def intervals(self, at: Index) -> list[Pair]:
        start = at.position(None).div(self.size, rounding_mode="floor") * self.size
        return [(start, start + self.size)]


@register_leaf
@dataclass(frozen=True, eq=False)
class Intervals(Leaf):
    """Explicit intervals `[starts, stops)` per query, `[B or 1, H or 1, M, I]`."""

    starts: Tensor
    stops: Tensor
    CODE: ClassVar[int] = 6
    TENSORS: ClassVar[int] = 2

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [], [self.starts, self.stops]

    def intervals(self, at: Index) -> list[Pair]:
        if self.starts.numel() == 0:
            nothing = torch.zeros_like(at.i)
            return [(nothing, nothing)]
        b, h = broadcast_index(self.starts, at)
        # A query past the last row of the tensors sees nothing.
        known = at.i < self.starts.shape[2]
        i = at.i.clamp(max=self.starts.shape[2] - 1)
        starts = self.starts.to(at.i.device)[b, h, i].to(torch.int64)
        stops = self.stops.to(at.i.device)[b, h, i].to(torch.int64)
        stops = torch.where(known.unsqueeze(-1), stops, starts)
        return list(zip(starts.unbind(-1), stops.unbind(-1), strict=True))

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        check_table("intervals", self.starts, B, H)


@register_leaf
@dataclass(frozen=True, eq=False)
class Tree(Leaf):
    """Every key before the first query, and of the queries' own keys those with a bit set.

    `bits` `[B or 1, M]`: bit j of `bits[b, i]` shows query i the key of query j, which stands at
    key index `offset + j`.
    """

    bits: Tensor
    CODE: ClassVar[int] = 10
    TENSORS: ClassVar[int] = 1

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [], [self.bits]

    def intervals(self, at: Index) -> list[Pair]:
        bits = self.bits.to(at.i.device, torch.int64)
        rows = bits.shape[1]
        if bits.numel() == 0:
            nothing = torch.zeros_like(at.i)
            return [(nothing, nothing)]
        b = at.b if bits.shape[0] > 1 else torch.zeros_like(at.b)
        row = bits[b, at.i.clamp(0, rows - 1)]
        # A query past the last row sees nothing.
        known = (at.i >= 0) & (at.i < rows)
        before = torch.where(known, at.offset, -UNBOUNDED)
        pairs: list[Pair] = [(-UNBOUNDED, before)]
        for j in range(rows):
            seen = torch.where(known, (row >> j) & 1, 0)
            pairs.append((at.offset + j, at.offset + j + seen))
        return pairs

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        if self.bits.shape[0] not in (1, B):
            raise ValueError(f"tree: expected bits [{B} or 1, M], got {list(self.bits.shape)}.")


def check_table(op: str, table: Tensor, B: int, H: int) -> None:
    """Raise ValueError unless `table` is `[B or 1, H or 1, ...]`."""
    if any(have != want and have != 1 for have, want in zip(table.shape, (B, H), strict=False)):
        raise ValueError(
            f"mask {op}: expected [{B} or 1, {H} or 1, ...] (batch rows, query heads), "
            f"got {list(table.shape)}."
        )


def broadcast_index(table: Tensor, at: Index) -> tuple[Tensor, Tensor]:
    """The (b, h) at which to read a `[B or 1, H or 1, ...]` table."""
    b = at.b if table.shape[0] > 1 else torch.zeros_like(at.b)
    h = at.h if table.shape[1] > 1 else torch.zeros_like(at.h)
    return b, h


def full() -> Mask:
    """Every query sees every key."""
    return Full()


def causal(offset: Offset = None) -> Mask:
    """Key n is visible to query m where `n <= m + offset`.

    Args:
        offset: an int or an int32 or int64 tensor `[B]`; the op's own (bottom-right) when None.
    Raises: ValueError for an offset of other form.
    """
    return window(None, 0, offset=offset)


def window(left: int | None, right: int | None, *, offset: Offset = None) -> Mask:
    """Keys from `left` before to `right` after the query's position, both inclusive.

    Args:
        left, right: bounds >= 0; None is unbounded, 0 is a real bound.
        offset: an int or an int32 or int64 tensor `[B]`; the op's own (bottom-right) when None.
    Raises: ValueError for a bound that is no int or negative, and for an offset of other form.
    """
    for name, bound in (("left", left), ("right", right)):
        if bound is not None and (not is_integer(bound) or bound < 0):
            raise ValueError(f"window: {name} must be None or an int >= 0, got {bound!r}.")
    low = UNBOUNDED if left is None else min(left, UNBOUNDED)
    high = UNBOUNDED if right is None else min(right, UNBOUNDED)
    if offset is None:
        return Window(low, high)
    if isinstance(offset, Tensor):
        return BatchShiftedWindow(low, high, _integers("window(offset=)", offset))
    if not is_integer(offset):
        raise ValueError(f"window(offset=): expected an int or a [B] tensor, got {offset!r}.")
    offset = max(-UNBOUNDED, min(offset, UNBOUNDED))
    return ShiftedWindow(low, high, offset)


@outside_inference_mode
def documents(cu_seqlens: Tensor | Sequence[int]) -> Mask:
    """Documents packed in one row: a query sees the keys of the document it stands in.

    Args:
        cu_seqlens: int32 or int64 cumulative lengths from 0, `[docs + 1]`, or `[B, docs + 1]` for a
            packing per row; equal neighbours are an empty document.
    Raises: ValueError for other dtypes and shapes; where the call reads what it holds, also for
        what does not start at 0, or falls.
    """
    cu = _integers("documents", cu_seqlens, dims=(1, 2))
    if cu.shape[-1] == 0:
        raise ValueError("documents: cu_seqlens must hold at least one entry, got none.")
    return Documents(cu)


@outside_inference_mode
def key_padding(lengths: Lengths) -> Mask:
    """Only the first `lengths[b]` keys are visible. Never moves the query offset.

    Args:
        lengths: int32 or int64 `[B]`, a list, or one int for all; 0 hides every key.
    Raises: ValueError for other dtypes and shapes; where the call reads what it holds, also for
        what is negative.
    """
    stops = _integers("key_padding", lengths)
    return KeyBounds(torch.zeros_like(stops), stops)


@outside_inference_mode
def left_padding(starts: Lengths) -> Mask:
    """Only keys from `starts[b]` on are visible. Never moves the query offset.

    Args:
        starts: as the lengths of `key_padding`.
    Raises: ValueError as `key_padding`.
    """
    first = _integers("left_padding", starts)
    return KeyBounds(first, torch.full_like(first, UNBOUNDED, dtype=torch.int64))


@outside_inference_mode
def prefix(lengths: Lengths) -> Mask:
    """The first `lengths[b]` keys; `causal() | prefix(lengths)` is the prefix-LM mask.

    Args:
        lengths: as those of `key_padding`.
    Raises: ValueError as `key_padding`.
    """
    stops = _integers("prefix", lengths)
    return KeyBounds(torch.zeros_like(stops), stops)


def chunked(size: int) -> Mask:
    """Keys of the query's own chunk of `size` positions (chunked attention).

    Raises: ValueError for a size that is no positive int.
    """
    if not is_integer(size) or size <= 0:
        raise ValueError(f"chunked: size must be a positive int, got {size!r}.")
    return Chunked(min(size, UNBOUNDED))


def intervals(starts: Tensor, stops: Tensor) -> Mask:
    """Explicit key intervals `[starts, stops)` per query; where stop <= start, empty.

    Args:
        starts, stops: int32 or int64 `[M, I]`, `[B, M, I]` or `[B or 1, H or 1, M, I]`, I intervals
            a query. The interval lists of one query may touch or overlap.
    Raises: ValueError for other dtypes and shapes.
    """
    for name, tensor in (("starts", starts), ("stops", stops)):
        _check_integer(f"intervals({name}=)", tensor)
    if starts.shape != stops.shape or not 2 <= starts.dim() <= 4:
        raise ValueError(
            "intervals: expected starts and stops of one shape [M, I], [B, M, I] or [B, H, M, I], "
            f"got {list(starts.shape)} and {list(stops.shape)}."
        )
    shapes = {2: (1, 1), 3: (starts.shape[0], 1), 4: tuple(starts.shape[:2])}
    shape = (*shapes[starts.dim()], *starts.shape[-2:])
    return Intervals(starts.reshape(shape), stops.reshape(shape))


def tree(bits: Tensor) -> Mask:
    """A tree of drafted tokens behind a text that all of them see (speculative decoding).

    Args:
        bits: int32 or int64, `[M]` or `[B or 1, M]`, at most 32 or 64 queries: bit j of
            `bits[b, i]` lets query i see the key of query j. The queries' own keys are the last
            M; all keys before them are visible. A token sees itself only where its bit says so.
    Raises: ValueError for other dtypes and shapes.
    """
    _check_integer("tree", bits)
    width = 32 if bits.dtype == torch.int32 else 64
    if bits.dim() not in (1, 2) or bits.shape[-1] > width:
        raise ValueError(
            f"tree: expected bits [M] or [B, M] with M <= {width} for {bits.dtype}, "
            f"got {list(bits.shape)}."
        )
    return Tree(bits.reshape(-1, bits.shape[-1]) if bits.numel() else bits.reshape(1, 0))


def _integers(op: str, values: Lengths, dims: tuple[int, ...] = (0, 1)) -> Tensor:
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        got = type(values).__name__
        raise ValueError(f"{op}: expected integers or a tensor of them, got {got}.") from None
    _check_integer(op, tensor)
    if tensor.dim() not in dims:
        raise ValueError(f"{op}: expected {' or '.join(map(str, dims))} dims, got {tensor.dim()}.")
    return tensor


def _check_integer(op: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{op}: expected a tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: expected int32 or int64, got {tensor.dtype}.")


def _check_length(op: str, tensor: Tensor, B: int) -> None:
    # Equality first: a size that comes from data is known to equal itself, but not to be 1.
    if tensor.numel() != B and tensor.numel() != 1:
        raise ValueError(f"{op}: expected {B} entries, one a batch row, got {tensor.numel()}.")
