"""The fuzz itself, on the CPU: what its draws cover, and that it tells a fault from bad luck."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu import common, fuzz, fuzz_judge
from tests.gpu.fuzz import Call
from tests.gpu.fuzz_judge import pooled, problems_of, reports_of
from tests.gpu.fuzz_masks import LEAVES
from tilewise.core.case import Case
from tilewise.core.tolerance import BudgetReport
from tilewise.dense import budget

CPU = torch.device("cpu")
NAN = float("nan")
# As the budget has them: name, largest error and its budget, mean error and its.
WITHIN = BudgetReport("out", 0.5, 1.0, 0.5, 1.0)
NEAR = BudgetReport("out", 1.2, 1.0, 0.5, 1.0, "max error over budget at [0]")
FAR = BudgetReport("out", 1.6, 1.0, 0.5, 1.0, "max error over budget at [0]")
SHAPE = BudgetReport("out", 0.0, 0.0, 0.0, 0.0, "shapes differ", is_measured=False)
LSE = BudgetReport("lse", 1.2e-3, 1e-3, 0.0, 1e-3, "error over its bound")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the device under test is a GPU: short calls on the tiled backend."""
    monkeypatch.setattr(common, "DEVICE", CPU)
    monkeypatch.setattr(common, "BACKEND", "tiled")
    monkeypatch.setattr(fuzz, "LENGTHS", (1, 17, 40))
    monkeypatch.setattr(fuzz, "MOST", 50)


def draws(count: int) -> list[Call]:
    return [fuzz.draw(10 * form + form % 10, CPU) for form in range(count)]


def test_draws_cover_what_the_ops_take() -> None:
    seen: Counter[str] = Counter()
    for call in draws(400):
        tensors, options = call.case.tensors, call.case.options
        for name in LEAVES:
            seen[name] += f"{name}(" in call.words
        seen["negative scale"] += options.get("scale", 1.0) < 0
        seen["scale 0"] += options.get("scale", 1.0) == 0
        for name in ("q_start", "k_start"):
            seen[f"{name}, int"] += isinstance(options.get(name), int)
            seen[f"{name}, tensor"] += isinstance(options.get(name), Tensor)
        seen["lse alone"] += call.is_through_lse
        if "bias" in tensors:
            seen["16-bit bias"] += tensors["bias"].dtype != torch.float32
            seen["strided bias"] += not tensors["bias"].is_contiguous()
        is_packed = "cu_seqlens_q" in options
        hidden = tensors["k"].isnan().flatten(1).any(1)
        seen["NaN keys, padded"] += not is_packed and bool(hidden.any())
        seen["NaN past seqused_k"] += "seqused_k" in options and bool(hidden[:-130].any())
        seen["NaN queries, padded"] += not is_packed and bool(tensors["q"].isnan().any())
    assert all(count > 0 for count in seen.values()), seen
    assert len(seen) == len(LEAVES) + 12


def test_a_call_is_its_seed() -> None:
    for seed in (3, 17, 170, 1234):
        one, again = (fuzz.draw(seed, CPU) for _ in range(2))
        assert one.words == again.words
        for name, x in one.case.tensors.items():
            assert torch.equal(x.nan_to_num(), again.case.tensors[name].nan_to_num())
        other = fuzz.draw(seed, CPU, 1)
        assert other.words == one.words
        assert not torch.equal(
            one.case.tensors["q"].nan_to_num(), other.case.tensors["q"].nan_to_num()
        ) or bool(one.case.tensors["q"].isnan().all())


def test_random_calls_are_right_on_the_cpu() -> None:
    """Drawn and judged as on a GPU; one form in four is of the lse alone."""
    found = [problems_of(10 * form) for form in range(24)]
    assert not any(found), "\n".join(line for lines in found for line in lines)


def test_gradients_of_the_lse_alone_are_judged() -> None:
    calls = [call for call in draws(60) if call.is_through_lse][:3]
    assert calls
    for call in calls:
        reports = reports_of(call)
        assert [report.name for report in reports][:1] == ["lse"]
        assert {"dq", "dk", "dv"} <= {report.name for report in reports}
        assert all(report.is_within for report in reports), list(map(str, reports))


def small_case(op: str = "attention_partial") -> Case:
    """Fewer entries than anything is judged by alone; the first query sees no key."""
    made = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(1, 5, 1, 8, generator=made) for name in "qkv"}
    return Case(op, "small", tensors, {"mask": tw.causal(offset=-1)})


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Tensor]], None]) -> None:
    """The backend under test gives what `change` makes of its outputs."""
    right = budget.run

    def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
        outputs = right(case, tensors, backend)
        if backend != "reference":
            change(outputs)
        return outputs

    monkeypatch.setattr(budget, "run", run)
    monkeypatch.setattr(fuzz_judge, "draw", lambda *_: Call(small_case(), "words"))


def put_nan(outputs: dict[str, Tensor]) -> None:
    bad = torch.zeros_like(outputs["out"])
    bad[0, 2, 0, 3] = NAN
    outputs["out"] = outputs["out"] + bad


def cut_short(outputs: dict[str, Tensor]) -> None:
    outputs["out"] = outputs["out"][:, :-1]


def fill_empty_row(outputs: dict[str, Tensor]) -> None:
    outputs["lse"] = outputs["lse"].nan_to_num(neginf=0.0)


def fill_lse_with_nan(outputs: dict[str, Tensor]) -> None:
    outputs["lse"] = outputs["lse"] * NAN


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put_nan, "out: max error nan .* 1 elements are not finite"),
        (cut_short, "raised"),
        (fill_empty_row, "lse: .* the pattern of -inf differs"),
        (fill_lse_with_nan, "lse: .* the pattern of -inf differs"),
    ],
)
def test_a_fault_of_a_small_call_is_told(
    change: Callable[[dict[str, Tensor]], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, change)
    words, *found = problems_of(0)
    assert words == "words" and any(re.search(said, line) for line in found), found


def test_a_small_call_that_is_right_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, lambda outputs: None)
    assert problems_of(0) == []


def judge(monkeypatch: pytest.MonkeyPatch, *runs: list[BudgetReport]) -> tuple[list[str], int]:
    """What is said of a call whose first run has the first reports, and the draws of its pool the
    others; and how many runs it took."""
    left: list[Any] = list(runs)

    def fake(call: Call) -> list[BudgetReport]:
        return left.pop(0)

    monkeypatch.setattr(fuzz_judge, "draw", lambda *_: Call(small_case(), "words"))
    monkeypatch.setattr(fuzz_judge, "reports_of", fake)
    return problems_of(0), len(runs) - len(left)


def test_only_errors_over_their_budget_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    right = [[WITHIN]] * 8
    assert judge(monkeypatch, [WITHIN]) == ([], 1)
    # Few entries, or over by a little.
    assert judge(monkeypatch, [FAR], *right) == ([], 9)
    assert judge(monkeypatch, [NEAR], *right) == ([], 9)
    # Otherwise it is wrong at once, whatever else is a little over.
    for report in (SHAPE, replace(FAR, is_measured=False), LSE):
        found, runs = judge(monkeypatch, [NEAR, report], *right)
        assert runs == 1 and found == ["words", str(NEAR), str(report)]


def test_large_tensors_that_are_far_over_are_not_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz_judge, "FEW", 1)
    right = [[WITHIN]] * 8
    assert judge(monkeypatch, [NEAR], *right) == ([], 9)
    assert judge(monkeypatch, [FAR], *right) == (["words", str(FAR)], 1)


def test_a_fault_in_the_pool_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whichever tensor, and in whichever draw."""
    right = [WITHIN, replace(WITHIN, name="dq")]
    first = [NEAR, right[1]]
    broken = replace(right[1], problem="1 elements are not finite", is_measured=False)
    runs = [first, *[right] * 5, [WITHIN, broken], *[right] * 2]
    found, _ = judge(monkeypatch, *runs)
    assert len(found) == 2 and "dq: " in found[1] and "not finite" in found[1]
    # Over in the same draw that was over before, and in all taken together.
    found, _ = judge(monkeypatch, first, *[first] * 8)
    assert len(found) == 2 and "max error over budget" in found[1]


def test_a_pool_is_of_eight_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def draw(seed: int, device: torch.device, values: int = 0) -> Call:
        asked.append(values)
        return Call(small_case(), "words")

    monkeypatch.setattr(fuzz_judge, "draw", draw)
    reports = pooled(5)
    assert asked == list(range(8))
    assert [r.name for r in reports] == ["out", "lse", "dq", "dk", "dv"]
    assert all(report.is_within for report in reports)
