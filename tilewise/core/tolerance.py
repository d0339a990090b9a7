"""The error budget: how far a result may be from the exact one, and the one assertion for it.

A result is judged against the fp64 oracle and against `eager`, the same formula in plain torch
with the input dtype's products:

    max|got - exact|  <= 2   * max|eager - exact|  + 2 eps max|exact|  + floor
    mean|got - exact| <= 1.5 * mean|eager - exact| +   eps mean|exact| + floor

eps is that of the result's dtype; `floor` is the fp32 rounding of what cancels, 0 where nothing
does, plus fp32's smallest normal number, 1.2e-38, in every case: on GPUs exp2 and products flush
smaller results to 0. LSE has a bound of its own and an exact pattern of `-inf`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class BudgetReport:
    """One tensor held against its budget.

    is_measured: False where the errors mean nothing, since shapes differ, elements are not finite
    or rows of an lse are empty that should not be, or the other way round.
    """

    name: str
    max_error: float
    max_budget: float
    mean_error: float
    mean_budget: float
    problem: str = ""
    is_measured: bool = True

    @property
    def is_within(self) -> bool:
        return not self.problem

    @property
    def used(self) -> float:
        """The larger share of a budget that was used: 1.0 is at the limit. inf: not measured."""
        if not self.is_measured:
            return float("inf")
        pairs = ((self.max_error, self.max_budget), (self.mean_error, self.mean_budget))
        return max(e / b if b > 0 else (0.0 if e == 0 else float("inf")) for e, b in pairs)

    def __str__(self) -> str:
        text = (
            f"{self.name}: max error {self.max_error:.3e} (budget {self.max_budget:.3e}), "
            f"mean error {self.mean_error:.3e} (budget {self.mean_budget:.3e})"
        )
        return f"{text}: {self.problem}" if self.problem else text


def measure_budget(
    got: Tensor, exact: Tensor, eager: Tensor, *, name: str = "result", floor: float = 0.0
) -> BudgetReport:
    """Hold `got` against the budget. All three of one shape; `exact` in fp64."""
    got, exact, eager = got.detach(), exact.detach(), eager.detach()
    problem = _form_problem(got, exact, eager)
    if not problem and not bool(torch.isfinite(exact).all()):
        problem = "the oracle itself is not finite"
    elif not problem and not bool(torch.isfinite(eager).all()):
        problem = "the eager form is not finite, so there is no budget"
    if problem or exact.numel() == 0:
        return BudgetReport(name, 0.0, 0.0, 0.0, 0.0, problem, not problem)
    eps = torch.finfo(got.dtype).eps
    exact64 = exact.to(torch.float64)
    error = (got.to(torch.float64) - exact64).abs()
    reference = (eager.to(torch.float64) - exact64).abs()
    size = exact64.abs()
    floor += _SMALLEST_NORMAL
    max_budget = 2 * float(reference.max()) + 2 * eps * float(size.max()) + floor
    mean_budget = 1.5 * float(reference.mean()) + eps * float(size.mean()) + floor
    max_error, mean_error = float(error.max()), float(error.mean())
    is_measured = bool(torch.isfinite(got).all())
    if not is_measured:
        problem = f"{int((~torch.isfinite(got)).sum())} elements are not finite"
    elif not max_error <= max_budget:
        where = torch.unravel_index(error.argmax(), error.shape)
        problem = f"max error over budget at {[int(x) for x in where]}"
    elif not mean_error <= mean_budget:
        problem = "mean error over budget"
    errors = (max_error, max_budget, mean_error, mean_budget)
    return BudgetReport(name, *errors, problem, is_measured)


def measure_lse(
    got: Tensor, exact: Tensor, input_dtype: torch.dtype, name: str = "lse"
) -> BudgetReport:
    """Hold an LSE against 1e-3 (16-bit), 1e-5 (fp32) or 1e-12 (fp64) of max(1, |lse|)."""
    bound = {torch.float32: 1e-5, torch.float64: 1e-12}.get(input_dtype, 1e-3)
    got, exact = got.detach(), exact.detach()
    problem = _form_problem(got, exact, exact)
    if not problem and not bool((torch.isfinite(exact) | exact.isneginf()).all()):
        problem = "the oracle itself is not finite"
    if problem or exact.numel() == 0:
        return BudgetReport(name, 0.0, 0.0, 0.0, 0.0, problem, not problem)
    is_empty = exact.isneginf()
    is_measured = torch.equal(got.isneginf(), is_empty)
    if not is_measured:
        problem = "the pattern of -inf differs"
    finite = torch.where(is_empty, 0.0, exact.to(torch.float64))
    error = (torch.where(is_empty, 0.0, got.to(torch.float64)) - finite).abs()
    relative = error / finite.abs().clamp(min=1.0)
    worst, mean = float(relative.max()), float(relative.mean())
    if not math.isfinite(worst):
        problem, is_measured = problem or "elements are not finite", False
    elif is_measured and not worst <= bound:
        problem = "error over its bound"
    return BudgetReport(name, worst, bound, mean, bound, problem, is_measured)


def _form_problem(got: Tensor, exact: Tensor, eager: Tensor) -> str:
    if got.shape != exact.shape or eager.shape != exact.shape:
        return f"shapes differ: got {list(got.shape)}, exact {list(exact.shape)}"
    return ""


def assert_within_budget(
    got: Tensor, exact: Tensor, eager: Tensor, *, name: str = "result", floor: float = 0.0
) -> None:
    """The one numeric assertion of the test suite. Raises AssertionError with the figures."""
    report = measure_budget(got, exact, eager, name=name, floor=floor)
    if not report.is_within:
        raise AssertionError(str(report))


def assert_lse_within_budget(
    got: Tensor, exact: Tensor, input_dtype: torch.dtype, name: str = "lse"
) -> None:
    """The same for a log-sum-exp."""
    report = measure_lse(got, exact, input_dtype, name)
    if not report.is_within:
        raise AssertionError(str(report))
