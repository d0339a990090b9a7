"""A minute of random calls on each of four workers: every output and gradient within budget.

A failure names its seed; `TILEWISE_FUZZ_SEED=1234 TILEWISE_FUZZ_SECONDS=1` makes it the first call
of the first worker.
"""

import os
import time
from statistics import mean

import pytest

from tests.gpu import common
from tests.gpu.fuzz import draw
from tests.helpers import OPS
from tilewise.core.tolerance import BudgetReport
from tilewise.dense.budget import Case
from tilewise.report.verify import verify_case

pytestmark = pytest.mark.gpu
SECONDS = float(os.environ.get("TILEWISE_FUZZ_SECONDS", "60"))
FIRST_SEED = int(os.environ.get("TILEWISE_FUZZ_SEED", "0"))
# Seeds of one worker; far more than it gets through.
LANE = 100_000


# Below so many entries eager may be nearly exact by luck, and the budget tighter than it means.
FEW = 256


def is_small(case: Case, name: str) -> bool:
    q, v = case.tensors["q"], case.tensors["v"]
    entries = {
        "out": q[..., 0].numel() * v.shape[-1],
        "lse": q[..., 0].numel(),
        **{f"d{name}": x.numel() for name, x in case.tensors.items()},
    }
    return entries[name] < FEW


def problems_of(seed: int) -> list[str]:
    """What is wrong with the call of a seed, in words.

    The budget rests on the errors of one eager run, which thousands of calls meet at their
    smallest. So what has a few entries, or is over its budget by less than half of it again, is
    judged by eight draws of the values taken together.
    """
    call = draw(seed, common.DEVICE)
    try:
        reports = verify_case(OPS[call.case.op], call.case, common.BACKEND)
        wrong = [report for report in reports if not report.is_within]
        if wrong and all(
            report.used <= 1.5 or is_small(call.case, report.name) for report in wrong
        ):
            names = {report.name for report in wrong}
            wrong = [report for report in pooled(seed) if report.name in names and report.used > 1]
    except Exception as error:
        return [call.words, f"raised {type(error).__name__}: {error}"]
    return [call.words, *map(str, wrong)] if wrong else []


def pooled(seed: int) -> list[BudgetReport]:
    """The reports of eight draws of a call as those of one: their largest and their mean error."""
    calls = [draw(seed, common.DEVICE, values) for values in range(8)]
    runs = [verify_case(OPS[c.case.op], c.case, common.BACKEND) for c in calls]
    return [
        BudgetReport(
            reports[0].name,
            max(report.max_error for report in reports),
            max(report.max_budget for report in reports),
            mean([report.mean_error for report in reports]),
            mean([report.mean_budget for report in reports]),
            next((report.problem for report in reports if not report.is_within), ""),
        )
        for reports in zip(*runs, strict=True)
    ]


@pytest.mark.parametrize("worker", range(4))
def test_random_calls(worker: int) -> None:
    first = FIRST_SEED + worker * LANE
    seed, failures = first, []
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop and len(failures) < 5:
        problems = problems_of(seed)
        if problems:
            failures.append("\n  ".join([f"seed {seed}:", *problems]))
        seed += 1
    print(f"worker {worker}: {seed - first} calls")
    assert not failures, "\n".join(failures)
