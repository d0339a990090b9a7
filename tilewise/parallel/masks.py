"""Masks taken apart: those of some heads, or with batch rows numbered anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..core.mask import And, Mask, Not, Or
from ..core.mask_bits import Bits
from ..core.mask_leaves import BatchShiftedWindow, Documents, Intervals, KeyBounds, Tree

# The tables of each leaf that are `[B or 1, ...]`, and those whose second dim is `H or 1`.
_BATCHED: dict[type[Mask], tuple[str, ...]] = {
    Bits: ("kinds",),
    Intervals: ("starts", "stops"),
    KeyBounds: ("starts", "stops"),
    BatchShiftedWindow: ("offsets",),
    Tree: ("bits",),
}
_WITH_HEADS: tuple[type[Mask], ...] = (Bits, Intervals)


def leaves(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, (And, Or)):
        yield from leaves(mask.left)
        yield from leaves(mask.right)
    elif isinstance(mask, Not):
        yield from leaves(mask.inner)
    else:
        yield mask


def map_leaves(mask: Mask, change: Callable[[Any], Mask]) -> Mask:
    """The same expression over changed leaves."""
    if isinstance(mask, (And, Or)):
        return type(mask)(map_leaves(mask.left, change), map_leaves(mask.right, change))
    if isinstance(mask, Not):
        return Not(map_leaves(mask.inner, change))
    return change(mask)


def tells_heads_apart(mask: Mask) -> bool:
    """Whether a mask, its predicates evaluated, depends on the head."""
    return any(
        getattr(leaf, _BATCHED[type(leaf)][0]).shape[1] > 1
        for leaf in leaves(mask)
        if isinstance(leaf, _WITH_HEADS)
    )


def of_heads(mask: Mask, first: int, stop: int) -> Mask:
    """The mask of query heads `[first, stop)`, which then count from 0."""

    def change(leaf: Any) -> Mask:
        if type(leaf) not in _WITH_HEADS:
            untouched: Mask = leaf
            return untouched
        names = _BATCHED[type(leaf)]
        tables = {name: getattr(leaf, name) for name in names}
        sliced = {n: x[:, first:stop] for n, x in tables.items() if x.shape[1] > 1}
        changed: Any = replace(leaf, **sliced)
        found: Mask = changed
        return found

    return map_leaves(mask, change)


def of_batches(mask: Mask, number: Callable[[Tensor], Tensor]) -> Mask:
    """The mask whose tables over batch rows went through `number`, `[B, ...] -> [B', ...]`."""

    def change(leaf: Any) -> Mask:
        names = _BATCHED.get(type(leaf), ())
        if isinstance(leaf, Documents) and leaf.cu_seqlens.dim() == 2:
            names = ("cu_seqlens",)
        tables = {name: getattr(leaf, name) for name in names}
        changed = {n: number(x) for n, x in tables.items() if x.dim() and x.shape[0] > 1}
        found: Mask = replace(leaf, **changed) if changed else leaf
        return found

    return map_leaves(mask, change)
