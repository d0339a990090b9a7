"""What the tests of the hopper backend share: a guard against hangs, ragged shapes, inputs."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import DEVICE, qkv
from tests.gpu.hopper_variants import compile_all
from tilewise.core.backends import hopper_problem


def _is_here() -> bool:
    return torch.cuda.is_available() and not hopper_problem(DEVICE)


NEEDS_HOPPER = pytest.mark.skipif(not _is_here(), reason="needs a Hopper GPU")
RAGGED = (1, 63, 64, 65, 127, 128, 129, 1000)
# M, N, and what a window shows to the left and right.
WINDOWS = [
    (1000, 1000, 100, 0), (777, 1500, 300, 0), (1024, 1024, 17, 40), (500, 300, 64, 0),
    (300, 2000, 128, 0), (1000, 1000, 0, 0), (129, 700, 500, -400), (1000, 200, 3, 3),
]  # fmt: skip
# M, N, a mask, and the same as arguments of `band`.
HIDING = {
    "window": (300, 1000, tw.window(100, 0, offset=640), (100, 0, 640)),
    "causal": (300, 300, tw.causal(offset=-5), (None, 0, -5)),
    "nothing is seen": (100, 300, tw.causal(offset=-200), (None, 0, -200)),
}
CU_Q = (0, 1, 1, 64, 129, 257, 1257, 1257, 1320)
CU_K = (0, 7, 70, 134, 134, 334, 1334, 1400, 1465)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    compile_all()


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A protocol of barriers that is wrong hangs: then the process ends and says where."""
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()


def draw(B: int, M: int, N: int, heads: tuple[int, int] = (2, 1), **options: Any) -> list[Tensor]:
    return [x.detach() for x in qkv(B, M, N, heads, **options)]


def band(M: int, N: int, left: int | None, right: int | None, offset: int | None = None) -> Tensor:
    """What a window shows, bool `[M, N]`."""
    shift = N - M if offset is None else offset
    distance = torch.arange(N, device=DEVICE) - torch.arange(M, device=DEVICE)[:, None] - shift
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen
