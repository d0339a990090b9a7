"""TMA descriptors of the hopper kernels' tensors."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from typing import Any

from torch import Tensor

from ..kernels.gluon import TensorDescriptor, gl


@lru_cache
def tile_layout(dim: int) -> Any:
    return gl.NVMMASharedLayout(min(2 * dim, 128), 16, rank=4)


def one_key(x: Tensor) -> Tensor:
    """x, or one key that nobody sees: a descriptor has no dim of 0."""
    return x if x.shape[1] else x.new_zeros((x.shape[0], 1, *x.shape[2:]))


def spread(x: Tensor) -> Tensor:
    """x, or a copy where it repeats itself in memory: a TMA descriptor has no stride of 0."""
    repeats = any(n > 1 and s == 0 for n, s in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if repeats else x


def describe(x: Tensor, block: list[int], layout: Any) -> Any:
    """Of `[B, M, H, D]`, with coordinates (batch, head, row, column)."""
    # A layout is one of the cached ones here.
    key = (x.shape, x.stride(), x.dtype, *block, id(layout))
    found = _made.get(key)
    if found is None:
        B, M, H, D = x.shape
        # The stride of a dim of one may be anything, also what no descriptor takes.
        b, m, h = (s if n > 1 else D for n, s in zip(x.shape[:3], x.stride(), strict=False))
        found = _keep(key, TensorDescriptor(x, [B, H, M, D], [b, h, m, 1], block, layout))
    return _on(found, x)


def describe_tiles(x: Tensor, rows: int, columns: int) -> Any:
    """The same, of tiles `[rows, columns]`; TMA fills up with zeros, and stores what there is."""
    return describe(x, [1, 1, rows, columns], tile_layout(columns))


@lru_cache
def _flat_layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(0, 32, rank=rank)


def describe_numbers(x: Tensor, block: list[int]) -> Any:
    """Of fp32 `x`, contiguous, one or two dims, in blocks that lie in memory as they come."""
    key = (x.shape, *block)
    found = _made.get(key)
    if found is None:
        layout = _flat_layout(len(block))
        found = _keep(key, TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout))
    return _on(found, x)


# A descriptor checks all that it is given, which took 15 us on an H200's host (2026-11-30), and a
# backward has eleven. Those of one layout differ in their tensor alone.
_made: dict[tuple[Any, ...], Any] = {}
_MOST_MADE = 4096


def _keep(key: tuple[Any, ...], descriptor: Any) -> Any:
    if len(_made) >= _MOST_MADE:
        _made.clear()
    _made[key] = _on(descriptor, None)
    return descriptor


def _on(descriptor: Any, x: Tensor | None) -> Any:
    """The same of another tensor."""
    other = copy(descriptor)
    other.base = x
    return other
