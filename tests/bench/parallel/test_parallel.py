"""The bench of context parallelism: what its rows say, and that it refuses what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.ranks import RANKS, WORLD
from tilewise.bench.parallel import pieces, ranks
from tilewise.bench.parallel.pieces import HostMeter, Sizes
from tilewise.bench.parallel.ranks import RankRow, Request
from tilewise.cli import main
from tilewise.parallel import volumes
from tilewise.parallel.volumes import Shape

SIZES = Sizes(4, 2, 16, torch.float32, torch.device("cpu"), rounds=1)


class Clock:
    """Runs each call and says that it took as many seconds as calls came before."""

    def __init__(self) -> None:
        self.calls = 0

    def sample(self, call: Any, repeats: int) -> float:
        call()
        self.calls += 1
        return float(self.calls)


def test_the_kinds_of_pieces_and_their_sizes() -> None:
    rows = pieces.measure_pieces(SIZES, 240, 3, Clock(), 1)
    kinds = {(row.piece, row.direction): (row.queries, row.keys) for row in rows}
    both = [("own", (80, 80)), ("earlier", (80, 40)), ("later", (40, 80))]
    assert kinds == {(name, d): size for name, size in both for d in ("forward", "backward")}
    own = rows[0]
    # The fifth call is the first after the warming round; forward of the piece, then of the dense.
    assert (own.us, own.dense_us, own.ratio) == (5e6, 6e6, 1.2)
    assert own.tflops == 4 * 4 * 16 * (80 * 81 // 2) / 5.0 / 1e12


def test_pieces_that_are_wrong_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces.verify_pieces(SIZES, 2) == []
    right = pieces.loopback

    def wrong(*arguments: Any, **options: Any) -> Any:
        found = right(*arguments, **options)
        return found._replace(dk=found.dk * 1.01)

    monkeypatch.setattr(pieces, "loopback", wrong)
    rows, problems = pieces.measure_all(SIZES, [64], [2], HostMeter(), 1, lambda what: None)
    assert rows == []
    assert len(problems) == 1 and problems[0].startswith("dk: max error")


def test_schedules_over_ranks() -> None:
    """Alike on every rank; bytes of the formulas; what is muted sends nothing."""
    request = Request(256, 8, 8, 16, "float32", "cpu", rounds=1)
    found = RANKS.run(WORLD, jobs.benched, request)
    assert all(rows == found[0] for rows in found)
    shape = Shape(1, 256, 8, 8, 16, 16, 4)
    assert [row.schedule for row in found[0]] == list(ranks.SCHEDULES)
    for row in found[0]:
        assert row.note == ""
        assert row.received == getattr(volumes, row.schedule)(shape, WORLD).total
        assert row.ms > 0 and row.local_ms > 0
        assert row.exposed_ms == max(0.0, row.ms - row.local_ms)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its document and tables; the processes that it would start are not."""
    asked: list[Any] = []

    def spawn(count: int, request: Request) -> list[RankRow]:
        asked.append((count, request.tokens))
        return [RankRow("ring", count, request.tokens, 2.0, 1.5, 1000, 0.1)]

    monkeypatch.setattr(ranks, "spawn", spawn)
    argv = ["bench", "parallel", "--device", "cpu", "--quick", "--lengths", "64", "--ranks", "2,3"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert asked == [(2, 64), (3, 64)]
    assert [row["ranks"] for row in document["ranks"]] == [2, 3]
    assert {(row["ranks"], row["tokens"]) for row in document["pieces"]} == {(2, 64), (3, 64)}
    assert document["ranks"][0]["exposed_ms"] == 0.5
    assert {row["ranks"] for row in document["plan"]} >= {8, 1024}
    monkeypatch.setattr(
        ranks, "spawn", lambda *_: [RankRow("ring", 2, 64, 0, 0, 0, 0, "ring dq: off")]
    )
    assert main(argv) == 1
    assert "REFUSED ring dq: off" in capsys.readouterr().out


def test_the_dtype_named_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(
        pieces, "measure_all", lambda sizes, *_: asked.append(sizes.dtype) or ([], [])
    )
    monkeypatch.setattr(ranks, "spawn", lambda _, request: asked.append(request.dtype) or [])
    argv = ["bench", "parallel", "--device", "cpu", "--ranks", "2", "--dtype", "bfloat16"]
    assert main(argv) == 0
    assert asked == [torch.bfloat16, "bfloat16"]
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["parallel", "--ranks", "two"], "ranks must be integers from 1 on, got 'two'"),
        (["parallel", "--ranks", "0"], "got '0'"),
        (["parallel", "--dtype", "fp7"], "dtype must be all or some of"),
        (["parallel", "--dtype", "float32,bfloat16"], "--dtype takes one dtype here"),
        (["parallel", "--grid", "dense"], "--grid is for the bench of one device"),
        (["--ranks", "2"], "--ranks is for tilewise bench parallel"),
    ],
)
def test_arguments_that_do_not_fit(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "cpu", *argv]) == 2
    assert words in capsys.readouterr().err


def test_processes_of_its_own() -> None:
    rows = ranks.spawn(2, Request(64, 2, 1, 8, "float32", "cpu", rounds=1))
    assert [(row.ranks, row.note) for row in rows] == [(2, "")] * len(ranks.SCHEDULES)
