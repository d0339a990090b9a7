"""New buffers full of NaN, and with a fence on both sides: what is not written shows, and so does
what is written outside."""

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
_EMPTY_FACTORIES = ("empty", "empty_like", "empty_strided")
_FACTORIES = (*_EMPTY_FACTORIES, "zeros", "full", "zeros_like", "full_like", "ones_like")
_EMPTY_METHODS = ("new_empty", "new_empty_strided")
_METHODS = (*_EMPTY_METHODS, "new_zeros", "new_full")
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
        if x.storage_offset() != 0 or size == 0 or x.device.type == "meta":
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
def nan_in_new_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While it lasts, torch's factories leave nothing uninitialised: floats are NaN, ints their
    largest. Otherwise memory that was just freed may hold the right result."""

    def filled(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            return _fill(factory(*args, **kwargs))

        return make

    with _replaced(monkeypatch, _EMPTY_FACTORIES, _EMPTY_METHODS, filled):
        yield


def _fill(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(float("nan") if x.is_floating_point() else torch.iinfo(x.dtype).max)


@contextmanager
def fences(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    """While it lasts, torch's factories return buffers between fences."""
    made = Fences()

    def fenced(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            return made.put_around(factory(*args, **kwargs))

        return make

    with _replaced(monkeypatch, _FACTORIES, _METHODS, fenced):
        yield made


@contextmanager
def _replaced(
    monkeypatch: pytest.MonkeyPatch,
    factories: tuple[str, ...],
    methods: tuple[str, ...],
    wrap: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
) -> Iterator[None]:
    with monkeypatch.context() as patch:
        # Looked up before any is replaced.
        found = [(torch, name, getattr(torch, name)) for name in factories]
        found += [(Tensor, name, getattr(Tensor, name)) for name in methods]
        for owner, name, factory in found:
            patch.setattr(owner, name, wrap(factory))
        yield
