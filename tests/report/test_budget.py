"""Which targets are verified, the quick sample, and the summary of rows."""

import math
from dataclasses import replace

import pytest
import torch

from tilewise.bench.progress import Silent
from tilewise.catalog import OPS
from tilewise.core.tolerance import BudgetReport
from tilewise.report import budget
from tilewise.report.verify import VerifyRow

CPU = torch.device("cpu")
BY_NAME = {op.name: op for op in OPS}


def row(tensor: str, error: float, *, case: str = "full", problem: str = "") -> VerifyRow:
    # A problem of another kind than size is not a measurement.
    is_measured = not problem or "over budget" in problem
    report = BudgetReport(tensor, error, 1.0, error / 2, 1.0, problem, is_measured)
    return VerifyRow("attention", case, "tiled", torch.float32, report)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_quick_cases_are_in_the_catalog(op: budget.Op) -> None:
    names = {case.name for case in op.load("cases")(op.name, torch.float32, CPU)}
    assert set(budget.QUICK_CASES[op.name]) <= names
    assert len(set(budget.QUICK_CASES[op.name])) >= 2


def test_every_op_and_dtype_is_a_target() -> None:
    found = budget.targets(OPS, [torch.float32, torch.float16], "cpu")
    assert {(t.op.name, t.dtype) for t in found} == {
        (op.name, dtype) for op in OPS for dtype in (torch.float32, torch.float16)
    }


def test_named_backend_takes_the_ops_that_have_it() -> None:
    found = budget.targets(OPS, [torch.float32], "cpu", backend="tiled")
    assert [t.op.name for t in found] == [op.name for op in OPS if "tiled" in op.backends]
    assert budget.targets(OPS, [torch.float32], "cpu", backend="nobody") == []


def test_gpu_backends_are_left_out_on_the_cpu() -> None:
    op = replace(BY_NAME["attention"], backends=("tiled", "triton"))
    for device, names in (("cpu", ["tiled"]), ("cuda", ["tiled", "triton"])):
        assert [t.backend for t in budget.targets([op], [torch.float32], device)] == names


def test_kernels_run_under_the_interpreter_and_never_in_double(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = replace(BY_NAME["attention"], backends=("tiled", "triton", "hopper"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for device, dtype, names in (
        ("cpu", torch.float32, ["tiled", "triton"]),
        ("cpu", torch.float64, ["tiled"]),
        ("cuda", torch.float32, ["tiled"]),
    ):
        assert [t.backend for t in budget.targets([op], [dtype], device)] == names
    monkeypatch.delenv("TRITON_INTERPRET")
    assert [t.backend for t in budget.targets([op], [torch.float64], "cuda")] == ["tiled"]
    assert budget.targets([op], [torch.float64], "cuda", backend="triton") == []


def test_only_the_asked_cases_run() -> None:
    targets = budget.targets([BY_NAME["merge"]], [torch.float32], "cpu")
    rows = budget.verify(targets, CPU, Silent(), only={"merge": ("two",)})
    assert {r.case for r in rows} == {"two"}
    assert [r.report.name for r in rows] == [
        "out", "lse", "dout_0", "dlse_0", "dout_1", "dlse_1",
    ]  # fmt: skip


def test_parts_are_all_cases_once() -> None:
    targets = budget.targets([BY_NAME["merge"]], [torch.float32], "cpu")
    whole = {row.case for row in budget.verify(targets, CPU, Silent())}
    parts = [
        {row.case for row in budget.verify(targets, CPU, Silent(), part=(i, 3))} for i in (1, 2, 3)
    ]
    assert all(parts) and sum(map(len, parts)) == len(whole) and set().union(*parts) == whole


def test_group_takes_the_worst_and_counts_the_rest() -> None:
    rows = [row("out", 0.25), row("out", 0.5, case="causal"), row("dq", 0.125)]
    out, dq = budget.group(rows)
    assert (out.tensor, out.cases, out.within, out.worst_used, out.worst_case) == (
        "out", 2, 2, 0.5, "causal",
    )  # fmt: skip
    assert (dq.tensor, dq.worst_used) == ("dq", 0.125)
    assert out.is_within and dq.is_within


def test_numbered_inputs_are_one_group() -> None:
    groups = budget.group([row("dout_0", 0.25), row("dout_1", 0.5), row("dout", 0.75)])
    assert [(g.tensor, g.cases) for g in groups] == [("dout", 3)]


@pytest.mark.parametrize("error", [0.0, 0.5, math.nan])
def test_a_failure_that_is_not_a_size_uses_all_there_is(error: float) -> None:
    rows = [row("out", 0.5), row("out", error, case="bad", problem="3 elements are not finite")]
    (group,) = budget.group(rows)
    assert group.worst_used == math.inf
    assert (group.worst_case, group.within, group.is_within) == ("bad", 1, False)


def test_verdict_counts() -> None:
    good = [row("out", 0.5), row("dq", 0.5), row("out", 0.5, case="causal")]
    assert budget.describe_verdict(good) == (
        "All 3 outputs and gradients of 2 calls are within budget."
    )
    bad = [*good, row("dk", 2.0, problem="max error over budget at [0]")]
    assert budget.describe_verdict(bad) == (
        "3 of 4 outputs and gradients of 2 calls are within budget, 1 is not."
    )
    assert "attention [full] tiled float32 dk: max error 2.000e+00" in budget.describe_row(bad[-1])
