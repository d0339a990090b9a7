"""The grids of the GPU, and which peers each asks.

The sizes are those that attention papers measure: hidden size 2048 (H = 2048 / D) and 16384 tokens
in all (B = 16384 / S), unless a grid says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..cases import BACKWARD, FORWARD, HOST, HOST_GRAD, Case
from .peers import CUDNN, EAGER, EFFICIENT, FA3, FA4, FLASH, FLEX, SDPA_AUTO

_TOKENS = 16384
_HIDDEN = 2048
_DIRECTIONS = (FORWARD, BACKWARD)

# Eight documents of one packed row; no edge falls on a tile's.
_DOCUMENTS = (4000, 3200, 2500, 2100, 1700, 1300, 900, 684)

ANCHOR_PEERS = (FLASH,)


@dataclass(frozen=True)
class Grid:
    """Cases that are judged together. peers: the names of those that each case is put to."""

    name: str
    cases: tuple[Case, ...]
    peers: tuple[str, ...]


def _case(mask: str, length: int, D: int, direction: str) -> Case:
    batch = max(1, _TOKENS // length)
    return Case(mask, length, torch.bfloat16, direction, B=batch, H=_HIDDEN // D, D=D)


def anchor() -> Case:
    """Measured at the start and at the end of every run, so that runs can be compared."""
    return _case("causal", 4096, 128, FORWARD)


def _dense(lengths: Sequence[int]) -> list[Case]:
    # Both directions of a shape one after the other: FlexAttention compiles once for the two.
    return [
        _case(mask, length, D, direction)
        for D in (64, 128)
        for length in lengths
        for mask in ("full", "causal")
        for direction in _DIRECTIONS
    ]


def _head_dims(lengths: Sequence[int]) -> list[Case]:
    return [
        _case(mask, length, D, direction)
        for length in lengths
        for D in (64, 80, 96, 128, 160, 192, 256)
        for mask in ("causal", "full")
        for direction in _DIRECTIONS
    ]


def _gqa(lengths: Sequence[int]) -> list[Case]:
    return [
        replace(_case(mask, length, 128, direction), H=32, G=4)
        for length in lengths
        for mask in ("full", "causal")
        for direction in _DIRECTIONS
    ]


def _window(lengths: Sequence[int]) -> list[Case]:
    return [
        replace(_case("window", length, D, direction), window=1024)
        for D in (64, 128)
        for length in lengths
        for direction in _DIRECTIONS
    ]


def _documents(lengths: Sequence[int]) -> list[Case]:
    found = []
    for length in lengths:
        documents = [max(1, n * length // sum(_DOCUMENTS)) for n in _DOCUMENTS]
        documents[0] += length - sum(documents)
        found += [
            replace(_case("documents", length, D, direction), documents=tuple(documents))
            for D in (64, 128)
            for direction in _DIRECTIONS
        ]
    return found


def _features(lengths: Sequence[int]) -> list[Case]:
    found = []
    for length in lengths:
        for direction in _DIRECTIONS:
            plain = _case("causal", length, 128, direction)
            found += [replace(plain, feature=name) for name in ("softcap", "alibi", "bias")]
            if direction == BACKWARD:
                # Its forward is the bias's.
                found.append(replace(plain, feature="learned bias"))
            found += [replace(plain, feature=name) for name in ("dropout", "sinks")]
            found.append(replace(plain, mask="bits"))
    return found


def _small(lengths: Sequence[int]) -> list[Case]:
    return [
        replace(_case("causal", length, D, direction), B=4, H=16)
        for D in (64, 128)
        for length in lengths
        for direction in _DIRECTIONS
    ]


def _host(lengths: Sequence[int]) -> list[Case]:
    # Work for a few microseconds, so that the queue never fills.
    found = []
    for length in lengths:
        for direction in (HOST, HOST_GRAD):
            plain = [
                replace(_case(mask, length, 64, direction), B=1, H=2) for mask in ("full", "causal")
            ]
            documents = (length // 3, length - length // 3)
            found += [*plain, replace(plain[1], mask="documents", documents=documents)]
    return found


_Make = Callable[[Sequence[int]], list[Case]]

# By name: how the cases are made, the usual and the quick lengths, and the peers.
_GRIDS: dict[str, tuple[_Make, tuple[int, ...], tuple[int, ...], tuple[str, ...]]] = {
    "dense": (
        _dense,
        (1024, 4096, 16384),
        (4096,),
        (FLASH, CUDNN, EFFICIENT, FLEX, EAGER, FA3, FA4),
    ),
    "headdims": (_head_dims, (4096,), (4096,), (FLASH, CUDNN, FA3, FA4)),
    "window": (_window, (16384,), (16384,), (FA3, FA4)),
    "documents": (_documents, (16384,), (16384,), (FA3, FA4)),
    "features": (_features, (4096,), (4096,), ()),
    "gqa": (_gqa, (4096, 16384), (4096,), (FLASH, CUDNN, FA3, FA4)),
    "small": (_small, (128, 256, 512), (256,), (FLASH, CUDNN, FA3, FA4)),
    "host": (_host, (128,), (128,), (SDPA_AUTO, FA3, FA4)),
}
GPU_GRIDS = tuple(_GRIDS)


def gpu_grid(
    name: str,
    *,
    lengths: Sequence[int] = (),
    dtypes: Sequence[torch.dtype] = (),
    is_quick: bool = False,
) -> Grid:
    """A grid by name; lengths and dtypes replace the grid's own where they are given."""
    make, usual, quick, peers = _GRIDS[name]
    cases = make(tuple(lengths) or (quick if is_quick else usual))
    chosen = tuple(dtypes) or (torch.bfloat16,)
    return Grid(name, tuple(replace(c, dtype=dtype) for dtype in chosen for c in cases), peers)
