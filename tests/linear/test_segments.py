"""A long sequence of few heads, cut into segments that programs of their own pass over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.helpers import UNDER_TEST
from tests.linear import test_plan
from tests.linear.test_budget import check
from tests.linear.test_equivalences import assert_all_same, assert_same, draw, gradients, run
from tilewise.core.backends import is_interpreted
from tilewise.linear.cases import Recipe
from tilewise.linear.inputs import Inputs

pytest.importorskip("triton")

from tilewise.linear import plan, triton_call, warm
from tilewise.linear.config import count_segments

OPS = ("linear_attention", "retention", "simple_gla", "gla")
runs_kernels = pytest.mark.skipif(
    not (UNDER_TEST.device == "cuda" or is_interpreted()), reason="of the stages, not run here"
)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What sets into how many segments every call is cut; and what plans launched since. What no
    program has written is NaN."""
    launched: list[Any] = []
    add = plan.Plan.add

    def spy(self: Any, kernel: Any, programs: int, *rest: Any) -> None:
        launched.append((kernel.__name__, programs))
        add(self, kernel, programs, *rest)

    run_first = plan.Plan._run_first

    def run_on_nan(self: Any, given: Any, made: Any, space: Tensor) -> None:
        run_first(self, given, made, space.fill_(255))

    monkeypatch.setattr(plan.Plan, "add", spy)
    monkeypatch.setattr(plan.Plan, "_run_first", run_on_nan)

    def into(n: int) -> list[Any]:
        monkeypatch.setattr(triton_call, "count_segments", lambda *sizes: n)
        for kept in (warm._kept, plan._plans):
            kept.clear()
        launched.clear()
        return launched

    yield into
    for kept in (warm._kept, plan._plans):
        kept.clear()


# ---------------------------------------------------------------- how many, with no kernel run


def test_few_programs_on_long_sequences_are_cut() -> None:
    # 8 heads of 4 slices.
    assert count_segments(32, 512, 132) == 4
    assert count_segments(32, 2048, 132) == 4
    assert count_segments(4, 2048, 132) > 16
    # Those that fill a GPU, and those that are soon done, are not.
    for programs, n_chunks in ((128, 2048), (64, 2048), (132, 512), (32, 8), (1, 1), (0, 0)):
        assert count_segments(programs, n_chunks, 132) == 1


@pytest.mark.parametrize("processors", [1, 2, 108, 132, 304])
def test_segments_fill_no_more_than_the_gpu(processors: int) -> None:
    for programs in (0, 1, 3, 8, 32, 100, 1000):
        found = [count_segments(programs, n, processors) for n in (0, 1, 2, 16, 128, 1024, 16384)]
        assert all(n == 1 or n * programs <= processors for n in found)
        assert found[:4] == [1] * 4
        assert found == sorted(found)


@pytest.mark.parametrize("op", [*OPS, "delta_rule", "kda"])
def test_all_but_a_delta_rule_are_cut(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels import launch

    monkeypatch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
    monkeypatch.setattr(triton_call, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    x = draw(op, 1, 64 * 64, H=8, E=64)
    inputs = Inputs(*map(x.get, ("q", "k", "v", "g", "beta")), None, None, 1.0)
    assert triton_call.LinearCall(inputs).n_segments == (4 if "beta" not in x else 1)


@pytest.mark.parametrize("op", OPS)
def test_a_plan_of_segments_runs_again_with_the_same_arguments(
    op: str, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(3)
    test_plan.test_a_run_that_follows_has_the_arguments_of_a_first_one(op, False, monkeypatch)


# ---------------------------------------------------------------- with kernels


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.interpreter
def test_segments_are_within_the_budget(op: str, dtype: torch.dtype, cut: Any) -> None:
    launched = cut(3)
    length = 4 * (64 if dtype == torch.bfloat16 else 32) + 5
    check(op, Recipe("cut", (1, length, 2, 1, 16, 20), has_state=True), dtype, "triton")
    # Forward, remaking and backward, three programs of what was one.
    slices = 1 if dtype == torch.bfloat16 else 2
    assert [n for name, n in launched if "_states_" in name] == [3 * 2 * slices] * 3
    assert len([n for name, n in launched if "_segments_" in name]) == 3


@runs_kernels
@pytest.mark.interpreter
@pytest.mark.parametrize("gate", ["strong", "mixed"])
@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_segments_under_strong_gates(op: str, gate: str, cut: Any) -> None:
    cut(2)
    recipe = Recipe("cut", (1, 100, 2, 1, 16, 16), gate, has_state=True)
    check(op, recipe, torch.float32, "triton")


@runs_kernels
@pytest.mark.interpreter
@pytest.mark.parametrize("op", OPS)
def test_packed_segments_are_within_the_budget(op: str, cut: Any) -> None:
    """Sequences of none, one, two and three chunks, in two segments."""
    cut(2)
    recipe = Recipe("cut", (5, 80, 2, 1, 16, 16), has_state=True, is_packed=True)
    check(op, recipe, torch.float32, "triton")


@runs_kernels
@pytest.mark.interpreter
@pytest.mark.parametrize(("op", "n"), [("simple_gla", 2), ("gla", 5)])
def test_segments_equal_one_pass(op: str, n: int, cut: Any) -> None:
    """Also more segments than chunks, and some that are empty."""
    bounds = torch.tensor([0, 3, 3, 105, 140])
    x = draw(op, 150, H=1, G=1)
    x["initial_state"] = torch.randn(4, 1, 16, 12, requires_grad=True)
    for name, t in x.items():
        if name != "initial_state":
            t.data[140:] = torch.nan

    def both(n: int) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
        cut(n)
        results = run(op, x, cu_seqlens=bounds, backend="triton")
        return results, gradients(results, x)

    whole, one = both(1)
    split, got = both(n)
    again, more = both(n)
    assert_same(split[0], whole[0])
    assert_same(split[1], whole[1])
    assert torch.equal(split[1][1], x["initial_state"][1])
    assert_all_same(got, one)
    assert all(map(torch.equal, (*split, *got.values()), (*again, *more.values())))


@runs_kernels
@pytest.mark.interpreter
@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_what_a_gate_of_minus_infinity_forgets_stays_forgotten(op: str, cut: Any) -> None:
    x = {n: t.detach() for n, t in draw(op, 1, 170, H=2, G=1).items()}
    x["g"][:, [0, 31, 40, 64, 99, 169]] = -torch.inf
    x["initial_state"] = torch.randn(1, 2, 16, 12)
    for t in x.values():
        t.requires_grad_()
    cut(1)
    whole = run(op, x, backend="triton")
    one = gradients(whole, x)
    cut(3)
    split = run(op, x, backend="triton")
    assert_same(split[0], whole[0])
    assert_same(split[1], whole[1])
    assert_all_same(gradients(split, x), one)


@runs_kernels
@pytest.mark.interpreter
@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_growth_past_every_number_leaves_a_state_of_zero(op: str, cut: Any) -> None:
    """A segment's own growth is inf, and 0 times that were NaN."""
    x = {n: t.detach() for n, t in draw(op, 1, 300, H=2, G=1).items()}
    x["v"].zero_()
    x["g"].fill_(2.0)
    cut(3)
    with np.errstate(over="ignore"):
        out, state = run(op, x, backend="triton")
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(state, torch.zeros_like(state))
