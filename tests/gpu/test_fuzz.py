"""80 seconds of random calls on each of four workers: every output and gradient within budget.

A failure names its seed; `TILEWISE_FUZZ_SEED=1234 TILEWISE_FUZZ_SECONDS=1` makes it the first call
of the first worker.
"""

import os
import time

import pytest

from tests.gpu.fuzz_judge import problems_of

pytestmark = pytest.mark.gpu
SECONDS = float(os.environ.get("TILEWISE_FUZZ_SECONDS", "80"))
FIRST_SEED = int(os.environ.get("TILEWISE_FUZZ_SEED", "0"))
# Seeds of one worker; far more than it gets through.
LANE = 100_000
# Fewer calls in half a minute or more say that something hangs, and too little.
LEAST = 20


@pytest.mark.parametrize("worker", range(4))
def test_random_calls(worker: int, request: pytest.FixtureRequest) -> None:
    first = FIRST_SEED + worker * LANE
    seed, failures = first, []
    stop = time.monotonic() + SECONDS
    while time.monotonic() < stop and len(failures) < 5:
        problems = problems_of(seed)
        if problems:
            failures.append("\n  ".join([f"seed {seed}:", *problems]))
        seed += 1
    # `tools/gpu_test.py` keeps their sum.
    request.node.user_properties.append(("calls", seed - first))
    assert not failures, "\n".join(failures)
    assert SECONDS < 30 or seed - first >= LEAST, f"{seed - first} calls in {SECONDS:.0f} s"
