"""What a sweep leaves out and why, with the measuring replaced by a formula."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from tilewise.bench.cases import Case
from tilewise.bench.harness import NOT_RUN, TIMED, Plan, Row, Timing
from tilewise.bench.peers import Peer
from tilewise.report import sweep, tables

CPU = torch.device("cpu")
LENGTHS = (256, 512, 1024, 2048)
# Seconds a call takes at a length of 256.
SPEED = {"Tilewise": 0.01, "Tilewise, own tiles": 0.02, "SDPA": 0.01, "eager": 0.1}


class Watch:
    def __init__(self) -> None:
        self.steps = 0
        self.planned = 0

    def stage(self, title: str, steps: int) -> None:
        self.planned += steps

    def step(self, what: str) -> None:
        self.steps += 1


@pytest.fixture(autouse=True)
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world in which time is quadratic, and passes only by measuring."""
    now = [0.0]

    def measure(
        case: Case,
        peers: Sequence[Peer],
        device: torch.device,
        plan: Plan,
        *,
        skipped: Mapping[str, str],
    ) -> list[Row]:
        rows = []
        for peer in peers:
            if not peer.serves(case, device):
                continue
            row = Row(case, peer.name, peer.is_ours, NOT_RUN, note=skipped.get(peer.name, ""))
            if not row.note:
                seconds = SPEED.get(peer.name, 0.05) * (case.length / 256) ** 2
                row.status, row.timing = TIMED, Timing(seconds, seconds, seconds)
                now[0] += seconds * (plan.rounds + 2)
            rows.append(row)
        return rows

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])


def run(**budget: Any) -> list[sweep.Series]:
    limits = {"lengths": LENGTHS, "rounds": 3, "call_s": 1000.0, "total_s": 1e6, **budget}
    return sweep.run(CPU, Watch(), sweep.Budget(**limits))


def lengths_of(series: sweep.Series, name: str) -> list[int]:
    return [r.case.length for r in series.rows if r.contestant == name and r.timing]


def test_all_lengths_where_they_are_affordable() -> None:
    for series in run():
        for name in {row.contestant for row in series.rows}:
            assert lengths_of(series, name) == list(LENGTHS)
        assert series.ends() == {}
        assert tables.describe_ends(series) == []


def test_slow_contestants_end_where_a_call_would_take_too_long() -> None:
    series = run(call_s=0.5)[0]
    # 0.1 s, 0.4 s, and 1.6 s would be too much; the others stay under it to the third length.
    assert lengths_of(series, "eager") == [256, 512]
    assert lengths_of(series, "Tilewise") == [256, 512, 1024]
    assert series.ends()["eager"] == (1024, "a call would take more than 0.5 s")
    assert tables.describe_ends(series) == [
        "From length 1024 on without eager: a call would take more than 0.5 s.",
        "From length 2048 on without Tilewise, Tilewise, own tiles, SDPA: "
        "a call would take more than 0.5 s.",
    ]


def test_where_the_time_runs_out_tilewise_ends_last() -> None:
    # Half of it is for the first series: 3.5 s to 512, and then 0.8 s each for the quick ones.
    for total_s, with_sdpa in ((12.0, True), (9.0, False)):
        series = run(total_s=total_s)[0]
        spent_s = sum(row.timing.median_s * 5 for row in series.rows if row.timing)
        assert spent_s <= total_s / 2
        assert lengths_of(series, "Tilewise") == [256, 512, 1024]
        assert (lengths_of(series, "SDPA") == [256, 512, 1024]) == with_sdpa
        assert lengths_of(series, "eager") == [256, 512]
    assert series.ends()["eager"][1] == "the time for this part was spent"


def test_every_step_is_told() -> None:
    watch = Watch()
    sweep.run(CPU, watch, sweep.Budget(LENGTHS, 3, 1.0, 10.0))
    assert watch.steps == watch.planned == 3 * len(LENGTHS)


def test_tables_have_a_dash_where_nothing_was_measured() -> None:
    series = run(call_s=0.5)[0]
    table = tables.tabulate_series(series, tables.TIME)
    assert table.columns == ["length", "Tilewise", "Tilewise, own tiles", "SDPA", "eager"]
    assert table.rows[0] == ["256", "10 ms", "20 ms", "10 ms", "100 ms"]
    assert table.rows[2] == ["1024", "160 ms", "320 ms", "160 ms", "-"]
    assert len(table.rows) == 3
    assert tables.tabulate_series(series, tables.MEMORY).rows == []


@pytest.mark.parametrize(
    ("seconds", "words"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (2.5e-05, "25 µs"), (61.0, "61 s")]
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert tables.write_seconds(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(8.59e9, "8.59 GB"), (2.5e6, "2.5 MB"), (4096, "4.1 kB"), (12, "12 B")]
)
def test_bytes_in_words(count: float, words: str) -> None:
    assert tables.write_bytes(count) == words


def test_share_in_words() -> None:
    assert [tables.write_share(used) for used in (0.812, 1.5, float("inf"))] == [
        "81 %", "150 %", "over",
    ]  # fmt: skip
