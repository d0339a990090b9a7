"""Random masks: expressions of up to three leaves of every kind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise as tw


@dataclass(frozen=True)
class Span:
    """What a mask is drawn for: sequences, and the longest of their queries and keys."""

    B: int
    M: int
    N: int
    device: torch.device


# A leaf's numbers are the call's, what kernels are compiled for is the form's.
Draw = Callable[[random.Random, random.Random, Span], tuple[tw.Mask, Any]]


def draw_mask(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, str]:
    """A mask, and in words what it is made of; its shape is the form's."""
    mask, words = _draw_leaf(form, dice, span)
    for _ in range(form.choice((0, 0, 1, 1, 2))):
        sign = form.choice(("&", "&", "|"))
        other, said = _draw_leaf(form, dice, span)
        mask = mask & other if sign == "&" else mask | other
        words = f"({words} {sign} {said})"
    if form.random() < 0.1:
        return ~mask, f"~{words}"
    return mask, words


def _draw_leaf(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, str]:
    name = form.choice(tuple(LEAVES))
    mask, numbers = LEAVES[name](form, dice, span)
    return mask, f"{name}({numbers})"


def ints(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def _window(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
    left, right = dice.randint(0, span.N), dice.choice((0, 3, None))
    return tw.window(left, right), (left, right)


def _lengths(make: Callable[[Tensor], tw.Mask], low: int = 0) -> Draw:
    """A leaf of one number a sequence."""

    def draw(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
        values = [dice.randint(low, span.N) for _ in range(span.B)]
        return make(ints(values, span.device)), values

    return draw


def _chunked(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
    size = dice.choice((1, 16, 50, 128))
    return tw.chunked(size), size


def _documents(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
    """Edges of all rows alike or of each its own; some documents are empty, some keys in none."""
    count = dice.randint(1, 4)
    rows = [
        [0, *sorted(dice.randint(0, span.N) for _ in range(count))]
        for _ in range(span.B if form.random() < 0.5 else 1)
    ]
    return tw.documents(ints(rows if len(rows) > 1 else rows[0], span.device)), rows


def _intervals(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
    count, rows = form.choice((1, 2, 3)), span.B if form.random() < 0.5 else 1
    seed = dice.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    shape, options = (rows, span.M, count), {"generator": generator, "dtype": torch.int32}
    starts = torch.randint(0, span.N, shape, **options)
    stops = starts + torch.randint(-3, 1 + span.N // 2, shape, **options)
    return tw.intervals(*(x.to(span.device) for x in (starts, stops))), f"{count}, seed {seed}"


def _blocks(form: random.Random, dice: random.Random, span: Span) -> tuple[tw.Mask, Any]:
    size, rows = form.choice((16, 100, 128)), span.B if form.random() < 0.5 else 1
    seed = dice.randrange(1 << 30)
    generator = torch.Generator().manual_seed(seed)
    # The last tiles of some are missing: hidden.
    shape = (rows, -(-span.M // size), max(1, -(-span.N // size) - dice.choice((0, 0, 1))))
    visible = torch.rand(shape, generator=generator) < 0.6
    return tw.blocks(visible.to(span.device), size, size), f"{size}, seed {seed}"


def _checkered(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (m + 2 * n + h + b) % 3 != 0


LEAVES: dict[str, Draw] = {
    "full": lambda form, dice, span: (tw.full(), ""),
    "causal": lambda form, dice, span: (tw.causal(), ""),
    "window": _window,
    "offset": _lengths(lambda x: tw.causal(offset=x), -9),
    "padding": _lengths(tw.key_padding),
    "left": _lengths(tw.left_padding),
    "prefix": _lengths(tw.prefix),
    "chunked": _chunked,
    "documents": _documents,
    "intervals": _intervals,
    "blocks": _blocks,
    "checkered": lambda form, dice, span: (tw.from_function(_checkered), ""),
}
