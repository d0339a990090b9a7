"""Gradients of short sequences by one launch: the budget, NaN where nobody looks, who takes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.helpers import check_call
from tilewise.kernels import launch

from .probes import DEVICE

pytestmark = pytest.mark.interpreter

# B, M, N, H, G, D, E.
SHAPES = [(2, 67, 100, 4, 2, 16, 8), (1, 128, 128, 1, 1, 64, 64), (2, 40, 33, 4, 1, 40, 24)]
MASKS = [tw.causal(), tw.window(9, 3), tw.full()]


def draw(B: int, M: int, N: int, H: int, G: int, D: int, E: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (B, M, H, D), "k": (B, N, G, D), "v": (B, N, G, E)}
    return {
        name: torch.randn(shape, generator=generator, device="cpu").to(DEVICE, torch.bfloat16)
        for name, shape in shapes.items()
    }


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    if launch.architecture_of(DEVICE) not in ("interpreter", "sm_90"):
        pytest.skip("on Hopper alone")
    names: list[str] = []
    run = launch._run

    def listen(kernel: Any, *rest: Any) -> Any:
        names.append(kernel.__name__)
        return run(kernel, *rest)

    monkeypatch.setattr(launch, "_run", listen)
    return names


def takes_it(names: list[str]) -> bool:
    backward = [name for name in names if "_bwd_" in name]
    assert backward
    return set(backward) == {"_attention_bwd_few_keys_kernel"}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_are_within_budget(
    shape: tuple[int, ...], mask: tw.Mask, launched: list[str]
) -> None:
    check_call("attention_partial", draw(*shape), backend="triton", mask=mask)
    assert takes_it(launched)


def test_rows_and_keys_that_nobody_sees_may_be_nan(launched: list[str]) -> None:
    x = draw(1, 100, 90, 2, 1, 16, 16)
    mask = tw.window(20, 0, offset=-20)
    seen = mask.dense(1, 1, 100, 90)[0, 0].to(DEVICE)
    found = []
    for poison in (0.0, float("nan")):
        q, k, v = (t.clone() for t in x.values())
        q[:, ~seen.any(1)] = poison
        k[:, ~seen.any(0)] = v[:, ~seen.any(0)] = poison
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = tw.attention(*leaves, mask=mask, backend="triton")
        found.append([out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert takes_it(launched)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("M", "options"),
    [(32, {"softcap": 5.0}), (600, {}), (32, {"sinks": torch.zeros(2)}),
     (32, {"mask": tw.causal() & tw.key_padding([20])})],
    ids=["softcap", "many rows", "sinks", "lengths"],
)  # fmt: skip
def test_others_are_for_programs_that_own_rows(
    M: int, options: dict[str, Any], launched: list[str]
) -> None:
    tensors = draw(1, M, 40, 2, 2, 16, 16)
    options = {k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    leaves = [x.requires_grad_() for x in tensors.values()]
    out = tw.attention(*leaves, backend="triton", **options)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert not takes_it(launched)
