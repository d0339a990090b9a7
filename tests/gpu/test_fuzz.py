"""A minute of random calls on each of four workers: every output and gradient within budget.

A failure names its seed; `TILEWISE_FUZZ_SEED=1234 TILEWISE_FUZZ_SECONDS=1` makes it the first call
of the first worker.
"""

import os
import time

import pytest

from tests.gpu import common
from tests.gpu.fuzz import draw
from tests.helpers import OPS
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

    The budget rests on the largest error of one eager run, which thousands of calls meet at its
    smallest: what is over it by less than its double, or has a few entries, counts if it is over
    it with each of three draws of the values.
    """
    for values in range(3):
        call = draw(seed, common.DEVICE, values)
        try:
            reports = verify_case(OPS[call.case.op], call.case, common.BACKEND)
        except Exception as error:
            return [call.words, f"raised {type(error).__name__}: {error}"]
        wrong = [report for report in reports if not report.is_within]
        if not wrong:
            return []
        if not all(report.used <= 2 or is_small(call.case, report.name) for report in wrong):
            break
    return [call.words, *map(str, wrong)]


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
