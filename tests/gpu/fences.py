"""Buffers with a fence on both sides: whatever writes outside of what it was given shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

# More than a tile of 128 rows of all heads at the sizes of these tests; kernels find buffers as
# aligned as torch's own.
_FENCE_BYTES = 1 << 19
_CANARY = 0x5A
_FACTORIES = ("empty", "zeros", "full", "empty_like", "zeros_like", "full_like", "ones_like")
_METHODS = ("new_empty", "new_zeros", "new_full")
# As they are before any is replaced.
_empty, _full = torch.empty, torch.full


class Fences:
    """Every buffer that torch made meanwhile: its bytes, fences included, and its size."""

    def __init__(self) -> None:
        self._fenced: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._fenced)

    def put_around(self, x: Tensor) -> Tensor:
        """The same tensor, content and strides, between fences."""
        size = x.untyped_storage().nbytes()
        if x.storage_offset() != 0 or size == 0:
            return x
        whole = _full([2 * _FENCE_BYTES + size], _CANARY, dtype=torch.uint8, device=x.device)
        inside = whole[_FENCE_BYTES : _FENCE_BYTES + size]
        inside.copy_(_bytes_of(x))
        self._fenced.append((whole, size))
        typed = inside.view(x.dtype)
        return typed.as_strided(x.shape, x.stride(), typed.storage_offset())

    def broken(self) -> list[str]:
        """Which fences something wrote to."""
        found = []
        for whole, size in self._fenced:
            low, high = whole[:_FENCE_BYTES], whole[_FENCE_BYTES + size :]
            for side, fence in (("before", low), ("after", high)):
                if bool((fence != _CANARY).any()):
                    at = int((fence != _CANARY).nonzero()[0])
                    found.append(f"{side} a buffer of {size} bytes, at byte {at}")
        return found


def _bytes_of(x: Tensor) -> Tensor:
    return _empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


@contextmanager
def fences(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    """While it lasts, torch's factories return buffers between fences."""
    made = Fences()

    def fenced(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            return made.put_around(factory(*args, **kwargs))

        return make

    with monkeypatch.context() as patch:
        # Looked up before any is replaced.
        factories = [(torch, name, getattr(torch, name)) for name in _FACTORIES]
        factories += [(Tensor, name, getattr(Tensor, name)) for name in _METHODS]
        for owner, name, factory in factories:
            patch.setattr(owner, name, fenced(factory))
        yield made
