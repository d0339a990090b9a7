"""Whether a random call is right, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.gpu import common
from tests.gpu.fuzz import Call, draw
from tests.helpers import OPS
from tilewise.catalog import Op
from tilewise.core.case import Case
from tilewise.core.tolerance import BudgetReport
from tilewise.report.verify import verify_case

# Below so many entries eager may be nearly exact by luck, and the budget tighter than it means.
FEW = 256
POOL = 8

Forms = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class ThroughLse:
    """A partial op as one of which only the lse has an upstream gradient."""

    op: Op
    has_gradients: ClassVar[bool] = True

    def load(self, role: str) -> Any:
        form = self.op.load(role)
        return _floors_of(form) if role == "floors" else _lse_of(form)


def _lse_of(form: Forms) -> Forms:
    def lse_alone(case: Case, tensors: dict[str, Tensor], *backend: str) -> dict[str, Tensor]:
        lse, v = form(case, tensors, *backend)["lse"], tensors["v"]
        if not backend:
            # In plain torch lse is no function of v; its gradient is 0.
            lse = lse + (torch.where(v.isfinite(), v, 0.0) * 0.0).sum().to(lse.dtype)
        return {"lse": lse}

    return lse_alone


def _floors_of(form: Callable[..., dict[str, float]]) -> Callable[..., dict[str, float]]:
    def floors(
        case: Case, tensors: dict[str, Tensor], upstream: dict[str, Tensor], eps: float
    ) -> dict[str, float]:
        q, v = tensors["q"], tensors["v"]
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        return form(case, tensors, {"out": out, **upstream}, eps)

    return floors


def reports_of(call: Call) -> list[BudgetReport]:
    op: Any = OPS[call.case.op]
    return verify_case(ThroughLse(op) if call.is_through_lse else op, call.case, common.BACKEND)


def is_small(case: Case, name: str) -> bool:
    q, v = case.tensors["q"], case.tensors["v"]
    entries = {
        "out": q[..., 0].numel() * v.shape[-1],
        **{f"d{name}": x.numel() for name, x in case.tensors.items()},
    }
    return entries[name] < FEW


def may_be_luck(case: Case, report: BudgetReport) -> bool:
    """Whether eager may have been too good. An lse has a bound of its own, and what is wrong in
    form, or not finite, is wrong."""
    if not report.is_measured or report.name == "lse":
        return False
    return report.used <= 1.5 or is_small(case, report.name)


def problems_of(seed: int) -> list[str]:
    """What is wrong with the call of a seed, in words.

    The budget rests on the errors of one eager run, which thousands of calls meet at their
    smallest. So what has a few entries, or is over its budget by less than half of it again, is
    judged by eight draws of the values taken together.
    """
    words = "not drawn"
    try:
        call = draw(seed, common.DEVICE)
        words = call.words
        wrong = [report for report in reports_of(call) if not report.is_within]
        if wrong and all(may_be_luck(call.case, report) for report in wrong):
            names = {report.name for report in wrong}
            wrong = [
                report
                for report in pooled(seed)
                if not report.is_measured or (report.name in names and report.used > 1)
            ]
    except Exception as error:
        return [words, f"raised {type(error).__name__}: {error}"]
    return [words, *map(str, wrong)] if wrong else []


def pooled(seed: int) -> list[BudgetReport]:
    """The reports of eight draws of a call as those of one: their largest and their mean error."""
    runs = [reports_of(draw(seed, common.DEVICE, values)) for values in range(POOL)]
    return [_pool(reports) for reports in zip(*runs, strict=True)]


def _pool(reports: tuple[BudgetReport, ...]) -> BudgetReport:
    # A draw that could not be measured is the one to be told of.
    told = sorted(reports, key=lambda report: report.is_measured)
    return BudgetReport(
        reports[0].name,
        max(report.max_error for report in reports),
        max(report.max_budget for report in reports),
        mean([report.mean_error for report in reports]),
        mean([report.mean_budget for report in reports]),
        next((report.problem for report in told if not report.is_within), ""),
        all(report.is_measured for report in reports),
    )
