"""Against the fp64 recurrence beyond the catalog's cases: lengths, dims, the form for a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import UNDER_TEST, backends
from tilewise import catalog
from tilewise.core.backends import is_interpreted
from tilewise.linear.cases import Recipe, draw_case
from tilewise.report.verify import verify_case

LINEAR = {op.name: op for op in catalog.OPS if op.name.startswith("linear.")}


def check(op: str, recipe: Recipe, dtype: torch.dtype, backend: str, seed: int = 11) -> None:
    case = draw_case(f"linear.{op}", recipe, dtype, torch.device(UNDER_TEST.device), seed)
    reports = verify_case(LINEAR[case.op], case, backend)
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)


@pytest.mark.parametrize("length", [15, 63, 65])
@pytest.mark.parametrize("op", ["simple_gla", "kda"])
@pytest.mark.parametrize("backend", backends("tiled"))
def test_lengths_about_a_chunk(op: str, length: int, backend: str) -> None:
    recipe = Recipe("length", (1, length, 2, 1, 16, 16), has_state=True)
    check(op, recipe, torch.float32, backend)


@pytest.mark.parametrize("op", ["gla", "delta_rule", "gated_delta_rule"])
@pytest.mark.parametrize("backend", backends("tiled"))
def test_a_thousand_steps(op: str, backend: str) -> None:
    recipe = Recipe("long", (1, 1000, 1, 1, 16, 16), has_state=True)
    check(op, recipe, torch.bfloat16, backend)


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
@pytest.mark.parametrize("backend", backends("tiled"))
def test_head_dims(op: str, D: int, E: int, backend: str) -> None:
    # Two numbers in all would tell little of the eager form's error.
    B, H = (4, 6) if D == 1 else (1, 2)
    recipe = Recipe("dims", (B, 33, H, H // 2, D, E), "strong", has_state=True)
    check(op, recipe, torch.bfloat16, backend)


@pytest.mark.parametrize("gate", ["strong", "mixed"])
@pytest.mark.parametrize("backend", backends("tiled"))
def test_gates_beyond_the_range_of_fp32(gate: str, backend: str) -> None:
    """Steps of up to some -80 natural, and sums of some thousand over a chunk.

    Of several heads: of one, all that reaches the initial state may be e^-50, whose own rounding,
    of a sum of 50 before the power, is no other result's.
    """
    recipe = Recipe("gates", (2, 130, 4, 2, 16, 16), gate, has_state=True)
    for op in ("simple_gla", "gla", "kda"):
        check(op, recipe, torch.float32, backend)


# In the interpreter.
STAGES = {
    "kda": (torch.bfloat16, Recipe("two chunks", (1, 70, 2, 1, 20, 12), "mixed", True)),
    "gated_delta_rule": (
        torch.float32,
        Recipe("packed", (5, 80, 1, 1, 20, 12), "strong", True, True),
    ),
    "gla": (torch.float32, Recipe("weak gates", (1, 33, 1, 1, 16, 16))),
    "linear_attention": (torch.float16, Recipe("D 1", (1, 10, 2, 1, 1, 1), has_state=True)),
}


@pytest.mark.skipif(not is_interpreted(), reason="the interpreter's")
@pytest.mark.interpreter
@pytest.mark.parametrize("op", STAGES)
def test_stages(op: str) -> None:
    dtype, recipe = STAGES[op]
    check(op, recipe, dtype, "triton")
