"""Against the fp64 recurrence beyond the catalog's cases: lengths, dims, gates."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import UNDER_TEST
from tilewise import catalog
from tilewise.linear.cases import Recipe, draw_case
from tilewise.report.verify import verify_case

LINEAR = {op.name: op for op in catalog.OPS if op.name.startswith("linear.")}


def check(op: str, recipe: Recipe, dtype: torch.dtype, seed: int = 11) -> None:
    case = draw_case(f"linear.{op}", recipe, dtype, torch.device(UNDER_TEST.device), seed)
    reports = verify_case(LINEAR[case.op], case, "tiled")
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)


@pytest.mark.parametrize("length", [15, 63, 65])
@pytest.mark.parametrize("op", ["simple_gla", "kda"])
def test_lengths_about_a_chunk(op: str, length: int) -> None:
    recipe = Recipe("length", (1, length, 2, 1, 16, 16), has_state=True)
    check(op, recipe, torch.float32)


@pytest.mark.parametrize("op", ["gla", "delta_rule", "gated_delta_rule"])
def test_a_thousand_steps(op: str) -> None:
    recipe = Recipe("long", (1, 1000, 1, 1, 16, 16), has_state=True)
    check(op, recipe, torch.bfloat16)


# Each is compiled anew on a GPU.
@pytest.mark.parametrize(
    ("op", "D", "E"),
    [
        ("gated_delta_rule", 64, 100),
        ("gated_delta_rule", 128, 128),
        ("gated_delta_rule", 256, 60),
        ("gated_delta_rule", 1, 1),
        ("kda", 100, 64),
        ("kda", 128, 128),
    ],
)
def test_head_dims(op: str, D: int, E: int) -> None:
    recipe = Recipe("dims", (1, 33, 2, 1, D, E), "strong", has_state=True)
    check(op, recipe, torch.bfloat16)


@pytest.mark.parametrize("gate", ["strong", "mixed"])
def test_gates_beyond_the_range_of_fp32(gate: str) -> None:
    """Steps of up to some -80 natural, and sums of some thousand over a chunk."""
    recipe = Recipe("gates", (1, 130, 1, 1, 16, 16), gate, has_state=True)
    for op in ("simple_gla", "gla", "kda"):
        check(op, recipe, torch.float32)
