"""Attention masks as data: what a query may see, as a small algebra that tiles can read.

A mask is an expression over leaves (`causal()`, `window()`, `key_padding()`, ...) joined by
`&`, `|` and `~`. Nothing is evaluated when it is built. A leaf answers, for every query, with a
few key intervals; `core/tiles.py` turns those into the tiles to skip, to test and to take whole.
What intervals cannot say (`blocks`, `from_function`) is kept as a list of tiles with one bit per
element.

Indices: a query has a batch (or document) index b, a head h and an index i in its sequence; a key
has an index j. The query stands at key position `i + offset`. The default offset belongs to the op
(bottom-right alignment of what is stored or in use); `causal(offset=)` and `window(offset=)` bring
their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

Offset = int | Tensor | None
Pair = tuple[int | Tensor, int | Tensor]

P = ParamSpec("P")
R = TypeVar("R")

# flags, ints, tensors: an expression in postfix order.
Lowered = tuple[list[int], list[int], list[Tensor]]

# Beyond any storable length, and small enough that sums of a few stay inside int64.
UNBOUNDED = 1 << 40
NOT, AND, OR = 101, 102, 103


@dataclass(frozen=True)
class Index:
    """Broadcastable int64 indices of queries (b, h, i) and keys (j), with the op's offset.

    `offset` is an int or a tensor that broadcasts with `i`.
    """

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    offset: int | Tensor

    def position(self, offset: Offset) -> Tensor:
        """The key position at which each query stands, with a leaf's own offset if it has one."""
        if offset is None:
            offset = self.offset
        elif isinstance(offset, Tensor):
            offset = per_batch(offset, self.b).clamp(-UNBOUNDED, UNBOUNDED)
        return self.i + offset


def per_batch(values: Tensor, b: Tensor) -> Tensor:
    """`values[b]` for a `[B]` tensor; a 0-d or one-element tensor serves every batch."""
    values = values.to(b.device, torch.int64)
    if values.numel() == 1:
        return values.reshape(())
    return values[b] if values.numel() else torch.zeros_like(b)


class Mask:
    """A boolean function of (b, h, i, j). Combine with `&`, `|`, `~`; immutable."""

    @property
    def is_exact(self) -> bool:
        """True where `intervals` tells everything and no bit tile has to be read."""
        return True

    def __and__(self, other: Mask) -> Mask:
        _check_operand("&", other)
        return And(self, other)

    def __or__(self, other: Mask) -> Mask:
        _check_operand("|", other)
        return Or(self, other)

    def __invert__(self) -> Mask:
        return Not(self)

    def invert(self) -> Mask:
        """`~self`, for functions that torch.compile traces: it does not trace the operator."""
        return self.__invert__()

    def __bool__(self) -> bool:
        raise TypeError("mask: a mask has no truth value; combine masks with &, | and ~.")

    @property
    def has_predicate(self) -> bool:
        """True where some `from_function` still has to be evaluated by `lowered`."""
        return False

    def intervals(self, at: Index) -> list[Pair]:
        """Half-open key intervals [start, stop) per query whose union holds every visible key.

        Equal to the visible set when `is_exact`; they may overlap and may be empty.
        """
        raise NotImplementedError

    def hidden_intervals(self, at: Index) -> list[Pair]:
        """The same for the complement: covers every key that is not visible."""
        return complement(self.intervals(at), at)

    def visible(self, at: Index) -> Tensor:
        """The predicate itself, broadcast over the indices of `at`."""
        seen: Tensor | None = None
        for start, stop in self.intervals(at):
            inside = (at.j >= start) & (at.j < stop)
            seen = inside if seen is None else seen | inside
        assert seen is not None
        return seen

    def dense(
        self,
        B: int,
        H: int,
        M: int,
        N: int,
        *,
        offset: Offset = None,
        batch_index: Tensor | None = None,
        q_start: int = 0,
        k_start: int = 0,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """The whole mask as a bool tensor `[B, H, M, N]`, True where the key is visible.

        Args:
            B, H, M, N: batch, query heads, query length, key length.
            offset: the op's query offset, an int or a `[B]` tensor; `N - M` when None.
            batch_index: `[B]` indices b of the rows; `arange(B)` when None.
            q_start, k_start: index of the first query and key, for a piece of a longer sequence.
        Cost: O(B H M N) memory. For the oracle, for tests and for looking at.
        """

        def axis(size: int, dim: int, start: int = 0) -> Tensor:
            shape = [1, 1, 1, 1]
            shape[dim] = size
            return torch.arange(start, start + size, device=device).reshape(shape)

        b = axis(B, 0) if batch_index is None else batch_index.to(device).reshape(B, 1, 1, 1)
        op_offset: int | Tensor = N - M if offset is None else offset
        if isinstance(op_offset, Tensor):
            op_offset = op_offset.to(device, torch.int64).reshape(-1, 1, 1, 1)
        at = Index(b, axis(H, 1), axis(M, 2, q_start), axis(N, 3, k_start), op_offset)
        return self.visible(at).expand(B, H, M, N)

    def lowered(self, B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> Mask:
        """This mask with every predicate evaluated into bit tiles for these sizes."""
        return self

    def lower(self) -> Lowered:
        """`(flags, ints, tensors)`: the expression in postfix order, as ops and kernels take it.

        Predicates must have been evaluated (`lowered`). `raise_mask` is the inverse.
        """
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """Every tensor that the mask reads."""
        return self.lower()[2]

    @property
    def form(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
        """What the mask is but for what its tensors hold, hashable, and those tensors in the order
        of `lower`; None where functions are part of it."""
        return None

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What the mask is, hashable; None where tensors or functions are part of it."""
        form = self.form
        return None if form is None or form[1] else form[0]

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        """Raise ValueError if a tensor does not fit the call or holds what it must not.

        reads: look into the tensors too, not at their shapes alone.
        """


def outside_inference_mode(make: Callable[P, R]) -> Callable[P, R]:
    """Decorator: the tensors that `make` makes serve a later training call too."""

    @wraps(make)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    return wrapped


def _check_operand(sign: str, other: object) -> None:
    if not isinstance(other, Mask):
        raise TypeError(f"mask {sign}: expected a Mask on both sides, got {type(other).__name__}.")


def maximum(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    """Elementwise; ints stay ints, so that none is copied to a device."""
    if isinstance(a, Tensor):
        return a.clamp(min=b)
    return b.clamp(min=a) if isinstance(b, Tensor) else max(a, b)


def minimum(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return a.clamp(max=b)
    return b.clamp(max=a) if isinstance(b, Tensor) else min(a, b)


def complement(pairs: list[Pair], at: Index) -> list[Pair]:
    """The gaps between intervals, one more than there are intervals; some may be empty."""
    if len(pairs) == 1:
        ((start, stop),) = pairs
        return [(-UNBOUNDED, start), (maximum(start, stop), UNBOUNDED)]
    ends = [bound for pair in pairs for bound in pair if isinstance(bound, Tensor)]
    shape = torch.broadcast_shapes((1, 1, 1, 1), *(x.shape for x in ends))

    def column(bound: int | Tensor) -> Tensor:
        if isinstance(bound, Tensor):
            return bound.expand(shape)
        return torch.full(shape, bound, dtype=torch.int64, device=at.i.device)

    starts, order = torch.stack([column(start) for start, _ in pairs], -1).sort(-1)
    stops = torch.stack([column(maximum(start, stop)) for start, stop in pairs], -1)
    reached = stops.gather(-1, order).cummax(-1).values
    lows: list[int | Tensor] = [-UNBOUNDED, *reached.unbind(-1)]
    highs: list[int | Tensor] = [*starts.unbind(-1), UNBOUNDED]
    return list(zip(lows, highs, strict=True))


def intersect(left: list[Pair], right: list[Pair]) -> list[Pair]:
    return [(maximum(s, t), minimum(e, f)) for s, e in left for t, f in right]


# ---------------------------------------------------------------- the algebra


@dataclass(frozen=True, eq=False)
class _Binary(Mask):
    left: Mask
    right: Mask

    @property
    def is_exact(self) -> bool:
        return self.left.is_exact and self.right.is_exact

    @property
    def has_predicate(self) -> bool:
        return self.left.has_predicate or self.right.has_predicate

    @property
    def form(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
        left, right = self.left.form, self.right.form
        if left is None or right is None:
            return None
        return (type(self), left[0], right[0]), left[1] + right[1]

    def lowered(self, B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> Mask:
        left = self.left.lowered(B, H, M, N, device)
        return type(self)(left, self.right.lowered(B, H, M, N, device))

    def lower(self) -> Lowered:
        left, right = self.left.lower(), self.right.lower()
        flag = AND if isinstance(self, And) else OR
        return [*left[0], *right[0], flag], left[1] + right[1], left[2] + right[2]

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        self.left.check_contents(B, H, reads=reads)
        self.right.check_contents(B, H, reads=reads)


@dataclass(frozen=True, eq=False)
class And(_Binary):
    def intervals(self, at: Index) -> list[Pair]:
        left, right = self.left.intervals(at), self.right.intervals(at)
        if self.is_exact and len(left) * len(right) > len(left) + len(right) + 3:
            return complement(self.hidden_intervals(at), at)
        return intersect(left, right)

    def hidden_intervals(self, at: Index) -> list[Pair]:
        return self.left.hidden_intervals(at) + self.right.hidden_intervals(at)

    def visible(self, at: Index) -> Tensor:
        return self.left.visible(at) & self.right.visible(at)


@dataclass(frozen=True, eq=False)
class Or(_Binary):
    def intervals(self, at: Index) -> list[Pair]:
        return self.left.intervals(at) + self.right.intervals(at)

    def hidden_intervals(self, at: Index) -> list[Pair]:
        if self.is_exact:
            return complement(self.intervals(at), at)
        return intersect(self.left.hidden_intervals(at), self.right.hidden_intervals(at))

    def visible(self, at: Index) -> Tensor:
        return self.left.visible(at) | self.right.visible(at)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    inner: Mask

    @property
    def is_exact(self) -> bool:
        return self.inner.is_exact

    @property
    def has_predicate(self) -> bool:
        return self.inner.has_predicate

    @property
    def form(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
        inner = self.inner.form
        return None if inner is None else ((Not, inner[0]), inner[1])

    def __invert__(self) -> Mask:
        return self.inner

    def intervals(self, at: Index) -> list[Pair]:
        return self.inner.hidden_intervals(at)

    def hidden_intervals(self, at: Index) -> list[Pair]:
        return self.inner.intervals(at)

    def visible(self, at: Index) -> Tensor:
        return ~self.inner.visible(at)

    def lowered(self, B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> Mask:
        return Not(self.inner.lowered(B, H, M, N, device))

    def lower(self) -> Lowered:
        flags, ints, tensors = self.inner.lower()
        return [*flags, NOT], ints, tensors

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        self.inner.check_contents(B, H, reads=reads)


# ---------------------------------------------------------------- leaves


@dataclass(frozen=True, eq=False)
class Leaf(Mask):
    """A mask without operands: `CODE`, its ints and its tensors are the whole of it."""

    CODE: ClassVar[int] = 0
    INTS: ClassVar[int] = 0
    TENSORS: ClassVar[int] = 0

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [], []

    @property
    def form(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
        ints, tensors = self.parts()
        return (self.CODE, *ints), tuple(tensors)

    @classmethod
    def from_parts(cls, ints: list[int], tensors: list[Tensor]) -> Leaf:
        return cls(*ints, *tensors)

    def lower(self) -> Lowered:
        ints, tensors = self.parts()
        return [self.CODE], ints, tensors


LEAVES: dict[int, type[Leaf]] = {}


def register_leaf(leaf: type[Leaf]) -> type[Leaf]:
    """Class decorator: `raise_mask` finds the leaf by its CODE."""
    LEAVES[leaf.CODE] = leaf
    return leaf


def raise_mask(flags: Iterable[int], ints: Sequence[int], tensors: Sequence[Tensor]) -> Mask:
    """The mask that `lower()` took apart."""
    stack: list[Mask] = []
    n_ints = n_tensors = 0
    for flag in flags:
        if flag == NOT:
            stack.append(Not(stack.pop()))
        elif flag in (AND, OR):
            right, left = stack.pop(), stack.pop()
            stack.append(And(left, right) if flag == AND else Or(left, right))
        else:
            leaf = LEAVES[flag]
            stack.append(
                leaf.from_parts(
                    list(ints[n_ints : n_ints + leaf.INTS]),
                    list(tensors[n_tensors : n_tensors + leaf.TENSORS]),
                )
            )
            n_ints += leaf.INTS
            n_tensors += leaf.TENSORS
    (mask,) = stack
    return mask
