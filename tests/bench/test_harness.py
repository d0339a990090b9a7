"""Timing on a clock that only the calls move, rows, and the refusal to time a wrong contestant."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewise.bench import harness, peers
from tilewise.bench.cases import BOTH, Case
from tilewise.bench.harness import NOT_RUN, REFUSED, TIMED, WEIGHED, Plan, Timing
from tilewise.bench.peers import EAGER, SDPA, TILEWISE, Peer

CPU = torch.device("cpu")
SHORT = Case("causal", 40, H=2, D=16)


class Clock:
    """A clock, and calls that take as long as they are told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, *durations: float) -> Callable[[], None]:
        """Takes each of the durations in turn, the last one for ever."""
        left = list(durations)

        def run() -> None:
            self.log.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_median_and_spread_without_the_warm_up() -> None:
    clock = Clock()
    # A warm-up of 9 s, which is long enough to tell the length of a call, and five rounds.
    call = clock.call("a", 9.0, 5.0, 1.0, 2.0, 4.0, 3.0)
    timings = harness.time_interleaved({"a": call}, rounds=5, clock=clock)
    assert timings == {"a": Timing(median_s=3.0, min_s=1.0, max_s=5.0)}


def test_even_rounds_take_the_middle_of_two() -> None:
    clock = Clock()
    call = clock.call("a", 1.0, 1.0, 2.0, 4.0, 8.0)
    timings = harness.time_interleaved({"a": call}, rounds=4, clock=clock)
    assert timings["a"].median_s == 3.0


def test_rounds_are_interleaved_and_rotate() -> None:
    clock = Clock()
    calls = {name: clock.call(name, 1.0) for name in "abc"}
    harness.time_interleaved(calls, rounds=4, clock=clock)
    assert "".join(clock.log) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_short_calls_are_repeated_in_a_sample() -> None:
    clock = Clock()
    short = 2.0**-10
    calls = {"short": clock.call("s", short), "long": clock.call("l", 1.0)}
    timings = harness.time_interleaved(calls, rounds=2, clock=clock)
    assert timings["short"] == Timing(short, short, short)
    # Two calls to warm up and to see how long it takes, then 21 a round to fill 20 ms.
    assert clock.log.count("s") == 2 + 2 * 21
    assert clock.log.count("l") == 1 + 2


def test_a_clock_that_stands_still_does_no_harm() -> None:
    clock = Clock()
    timings = harness.time_interleaved({"a": clock.call("a", 0.0)}, rounds=1, clock=clock)
    assert timings["a"].median_s == 0.0


def test_device_is_synchronized_around_every_sample() -> None:
    clock, log = Clock(), []
    call = clock.call("call", 1.0)
    clock.log = log
    harness.time_interleaved(
        {"a": call}, rounds=1, clock=clock, synchronize=lambda: log.append("wait")
    )
    assert log == ["wait", "call", "wait"] * 2


def test_nothing_to_time() -> None:
    assert harness.time_interleaved({}, rounds=3) == {}


def test_rows_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        name: Timing(t, t, t) for name, t in (("Tilewise", 0.5), ("SDPA", 1.0), ("eager", 4.0))
    }
    monkeypatch.setattr(harness, "time_interleaved", lambda calls, **_: given)
    plan = Plan(rounds=1, ceilings_tflops={"float32": SHORT.flops() / 1e12})
    rows = harness.measure(SHORT, (TILEWISE, SDPA, EAGER), CPU, plan)
    assert [row.status for row in rows] == [TIMED] * 3
    assert [row.ratio_to_sdpa for row in rows] == [2.0, 1.0, 0.25]
    assert [row.percent_of_ceiling for row in rows] == [200.0, 100.0, 25.0]
    assert rows[0].backend == "tiled(torch-flash)"
    found = rows[0].as_json()
    assert found["time_ms"] == {"median": 500.0, "min": 500.0, "max": 500.0}
    assert found["extra_peak_bytes"] >= 40 * 2 * 16 * 4


def shrunk(case: Case, device: torch.device) -> peers.Attend:
    right = TILEWISE.build(case, device)
    return lambda q, k, v: right(q, k, v) * 0.99


def wrong_gradient(case: Case, device: torch.device) -> peers.Attend:
    right = TILEWISE.build(case, device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(q.detach() + 0.99 * (q - q.detach()), k, v)

    return attend


def raising(case: Case, device: torch.device) -> peers.Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise NotImplementedError("attention: no such mask")

    return attend


@pytest.mark.parametrize(
    ("build", "direction", "words"),
    [
        (shrunk, "forward", "out: max error"),
        (wrong_gradient, BOTH, "dq: max error"),
        (raising, "forward", "raised NotImplementedError: attention: no such mask"),
    ],
)
def test_a_wrong_contestant_is_refused(
    build: Callable[[Case, torch.device], peers.Attend], direction: str, words: str
) -> None:
    wrong = Peer("wrong", build, heads_first=False)
    case = replace(SHORT, direction=direction)
    refused, timed = harness.measure(case, (wrong, SDPA), CPU, Plan(rounds=1))
    assert refused.status == REFUSED
    assert words in refused.note
    assert refused.timing is refused.extra_peak_bytes is refused.ratio_to_sdpa is None
    assert timed.status == TIMED


def test_wrong_forward_alone_passes_where_only_the_gradient_is_wrong() -> None:
    wrong = Peer("wrong", wrong_gradient, heads_first=False)
    assert harness.verify(wrong, SHORT, CPU) == ""


def test_not_run_without_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.memory, "available_bytes", lambda device: 10_000)
    row, other = harness.measure(SHORT, (EAGER, TILEWISE), CPU, Plan(rounds=1))
    assert row.status == NOT_RUN
    assert "score matrices" in row.note
    assert other.status == TIMED


def test_skipped_with_the_reason_given() -> None:
    rows = harness.measure(
        SHORT, (SDPA, TILEWISE), CPU, Plan(rounds=1), skipped={"SDPA": "too slow"}
    )
    assert [(row.status, row.note) for row in rows] == [(NOT_RUN, "too slow"), (TIMED, "")]
    assert rows[1].ratio_to_sdpa is None


def test_weighed_without_times() -> None:
    rows = harness.measure(SHORT, (EAGER,), CPU, Plan(has_times=False))
    assert [(row.status, row.timing) for row in rows] == [(WEIGHED, None)]
    assert (rows[0].extra_peak_bytes or 0) >= SHORT.scores_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_every_peer_is_right(mask: str, dtype: torch.dtype) -> None:
    case = Case(mask, 150, dtype, BOTH, H=2, D=16, window=40)
    asked = [peer for peer in peers.PEERS if peer.serves(case, CPU)]
    assert len(asked) == (3 if mask == "window" else 5)
    assert {peer.name: harness.verify(peer, case, CPU) for peer in asked} == {
        peer.name: "" for peer in asked
    }


def test_own_tiles_are_own_and_the_hand_over_is_seen() -> None:
    asked = (TILEWISE, peers.PURE_TILED)
    labels = [row.backend for row in harness.measure(SHORT, asked, CPU, Plan(rounds=1))]
    assert labels == ["tiled(torch-flash)", "tiled"]
    windowed = replace(SHORT, mask="window", window=9)
    (row,) = harness.measure(windowed, asked, CPU, Plan(rounds=1))
    assert row.backend == "tiled"


def test_ceiling_is_a_rate() -> None:
    assert 0 < harness.measure_ceiling(torch.float32, CPU, size=64) < 1000
