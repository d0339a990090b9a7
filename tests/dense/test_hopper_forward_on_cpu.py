"""The hopper forward's kernel, its own source run on the CPU: results, and the protocol.

Tiles of 192 columns are sums of two parts; where each tile has a program, nobody asks the counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense import choice, warm

pytest.importorskip("triton")

from tests.hopper_emulator import emulated


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from tilewise.kernels import launch

    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    monkeypatch.setattr(choice, "hopper_problem", lambda device: "")
    monkeypatch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
    warm._kept.clear()
    yield
    warm._kept.clear()


# M, N, query and kv heads, D, E.
CASES: list[tuple[tuple[int, ...], tw.Mask]] = [
    ((200, 200, 2, 1, 192, 192), tw.causal()),
    ((70, 150, 1, 1, 160, 160), tw.window(40, 5)),
    ((150, 130, 1, 1, 64, 180), tw.full()),
    ((130, 140, 2, 2, 64, 64), tw.causal()),
    ((300, 260, 2, 1, 128, 100), tw.causal()),
]


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(150, 3), tw.full()])
def test_tall_and_short_tiles_of_narrow_heads(
    mask: tw.Mask, is_short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.dense import hopper_call

    monkeypatch.setattr(hopper_call, "has_short_tiles", lambda rows, *, is_uneven: is_short)
    sizes = (420, 300, 2, 1, 64, 64)
    test_a_forward_is_within_budget(sizes, mask, 2, torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("processors", [2, 132])
@pytest.mark.parametrize(("sizes", "mask"), CASES, ids=lambda x: str(x))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_a_forward_is_within_budget(
    sizes: tuple[int, ...], mask: tw.Mask, processors: int, out_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from tilewise.dense import hopper_call

    monkeypatch.setattr(hopper_call, "_multiprocessors", lambda device: processors)
    M, N, H, G, D, E = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, M, H, D), (1, N, G, D), (1, N, G, E))
    x = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    options: dict[str, Any] = {"mask": mask}
    with emulated(is_strict=True) as names:
        out, lse = tw.attention_partial(*x, backend="hopper", out_dtype=out_dtype, **options)
    assert "_attention_fwd_hopper_kernel" in names
    exact = tw.attention_partial(*(t.double() for t in x), backend="reference", **options)
    eager = tw.attention_partial(*x, backend="tiled", **options)
    # P is rounded whatever out is.
    assert_within_budget(out.bfloat16(), exact.out, eager.out, name="out")
    assert_lse_within_budget(lse, exact.lse, x[0].dtype)
