"""The bench of context parallelism: what its rows say, and that it refuses what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel import jobs
from tests.parallel.ranks import RANKS, WORLD
from tilewise.bench.cases import BOTH, FORWARD
from tilewise.bench.parallel import contestants, pieces, processes, trace
from tilewise.bench.parallel.cells import MASKS, Cell, RankRow, Request, cells_of
from tilewise.bench.parallel.pieces import HostMeter, Sizes
from tilewise.cli import main
from tilewise.parallel import volumes
from tilewise.parallel.volumes import Shape

pytestmark = pytest.mark.slow

FORM: dict[str, Any] = {
    "H": 4, "G": 2, "D": 16, "dtype": "float32", "device": "cpu", "rounds": 1,
    "verified_length": 96,
}  # fmt: skip
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


def request_of(*cells: Cell, **options: Any) -> Request:
    return Request(cells, **{**FORM, **options})


def test_schedules_over_ranks() -> None:
    """Alike on every rank; bytes of the formulas; every figure that a row is to have."""
    cells = [Cell("causal", 256, direction) for direction in (FORWARD, BOTH)]
    found = RANKS.run(WORLD, jobs.benched, request_of(*cells, H=8, G=8))
    assert all(rows == found[0] for rows in found)
    shape = Shape(1, 256, 8, 8, 16, 16, 4)
    names = [(row.contestant, row.direction) for row in found[0]]
    assert names == [(n, d) for d in (FORWARD, BOTH) for n in contestants.SCHEDULES]
    for row in found[0]:
        volume = getattr(volumes, row.contestant)(shape, WORLD)
        assert row.note == "" and 0 < row.budget_used <= 1
        assert row.received == (volume.total if row.direction == BOTH else volume.forward)
        assert row.low_ms == row.ms == row.high_ms > 0 and row.rounds == 1
        assert row.local_ms > 0 and row.single_ms > 0 and row.predicted_ms > 0
        assert row.exposed_ms == max(0.0, row.ms - row.local_ms)
        assert row.efficiency == row.single_ms / WORLD / row.ms
        # Nothing is fitted where messages take no time, as a clock may say.
        assert row.fitted_ms is None or row.fitted_ms > 0


@pytest.mark.parametrize("mask", MASKS)
def test_a_silent_link_keeps_the_work(mask: str) -> None:
    """The same calls of the core, without a byte; and without work, the same bytes."""
    found = RANKS.run(2, jobs.parted, Cell(mask, 64, BOTH), FORM)
    for whole, local, idle, neither in found:
        assert whole["calls"] == local["calls"] > 0
        assert idle["calls"] == neither["calls"] == 0
        assert whole["received"] == idle["received"] > 0
        assert local["received"] == neither["received"] == 0


def test_what_a_wrong_contestant_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that says what is wrong, and no time."""
    for rows in RANKS.run(WORLD, jobs.benched_wrong, request_of(Cell("full", 64, FORWARD))):
        assert [row.contestant for row in rows] == ["ring", "all_gather", "ulysses"]
        assert rows[0].ms == 0.0 and "max error" in rows[0].note
        assert all(row.ms > 0 and not row.note for row in rows[1:])


def test_what_the_time_does_not_suffice_for() -> None:
    cells = [Cell("causal", 64, FORWARD), Cell("full", 64, FORWARD)]
    for rows in RANKS.run(WORLD, jobs.benched, request_of(*cells, seconds=0.0)):
        assert [(row.mask, row.ms, row.contestant) for row in rows] == [
            ("causal", 0.0, "all"),
            ("full", 0.0, "all"),
        ]
        assert all("left out" in row.note for row in rows)


def test_rows_are_stored_as_they_come(tmp_path: Path) -> None:
    """Into the document that is there."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"command": "bench parallel"}))
    request = request_of(Cell("documents", 96, FORWARD), output=str(path))
    rows = RANKS.run(WORLD, jobs.benched, request)[0]
    document = json.loads(path.read_text())
    assert document["command"] == "bench parallel"
    assert document["ranks"] == [row.as_json() for row in rows]


def test_cells_in_the_order_of_what_they_say() -> None:
    cells = cells_of([16384, 65536, 262144])
    assert cells[:3] == (
        Cell("causal", 65536, FORWARD), Cell("causal", 65536, BOTH), Cell("causal", 16384, FORWARD),
    )  # fmt: skip
    assert len(set(cells)) == 18 and cells[-1] == Cell("full", 262144, BOTH)


@pytest.mark.parametrize("mask", MASKS)
def test_the_flops_of_a_cell_are_those_of_its_mask(mask: str) -> None:
    """To half a key a query, which is what half of all pairs leaves out."""
    cell = Cell(mask, 1024, BOTH)
    areas = cell.layout(2).areas(cell.build_mask())
    slack = 0 if mask == "full" else 512
    assert sum(areas) - slack == cell.pairs
    assert cell.flops(3, 8) == 3.5 * 4 * 3 * 8 * cell.pairs
    assert cell.edges[-1] == 1024


def test_a_trace_is_read_for_what_lies_under_work(tmp_path: Path) -> None:
    kernels = [
        ("ncclDevKernel_SendRecv", 10, 20),
        ("attention", 0, 5),
        ("attention", 15, 10),
        ("add", 20, 4),
        ("spin_kernel", 5, 100),
        ("host", 0, 1000),
    ]
    events = [
        {"cat": "cpu_op" if name == "host" else "kernel", "name": name, "ts": ts, "dur": dur}
        for name, ts, dur in kernels
    ]
    found = trace.summarize([*events, {"name": "no duration"}])
    assert found == {
        "messages": 1, "messages_us": 20.0, "work_us": 15.0, "both_us": 10.0,
        "messages_under_work": 0.5,
    }  # fmt: skip
    path = tmp_path / "ring.json.gz"
    RANKS.run(WORLD, jobs.traced, request_of(Cell("causal", 64, BOTH), trace=str(path)))
    names = {event["name"] for event in trace.read(str(path))}
    assert any("attention_fwd" in name for name in names)
    summary = json.loads((tmp_path / "ring-summary.json").read_text())
    # No GPU, no kernels.
    assert (summary["cell"], summary["messages"]) == ("causal 64 forward+backward", 0)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its document and tables; the processes that it would start are not."""
    asked: list[Any] = []

    def spawn(count: int, request: Request) -> list[RankRow]:
        (cell,) = request.cells
        asked.append((count, cell.tokens, request.seconds is not None))
        form = (count, cell.mask, cell.tokens, cell.direction)
        return [RankRow("ring", *form, 0.1, 2.0, single_ms=3.6, local_ms=1.5, messages_ms=1.0)]

    monkeypatch.setattr(processes, "spawn", spawn)
    argv = ["bench", "parallel", "--device", "cpu", "--quick", "--lengths", "64", "--ranks", "2,3"]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert asked == [(2, 64, False), (3, 64, False)]
    assert [row["ranks"] for row in document["ranks"]] == [2, 3]
    assert {(row["ranks"], row["tokens"]) for row in document["pieces"]} == {(2, 64), (3, 64)}
    first = document["ranks"][0]
    assert (first["exposed_ms"], first["exposed_share"], first["efficiency"]) == (0.5, 0.5, 0.9)
    assert {row["ranks"] for row in document["plan"]} >= {8, 1024}
    assert main([*argv, "--minutes", "1"]) == 0
    assert asked[2:] == [(2, 64, True), (3, 64, True)]
    assert "90.0" in capsys.readouterr().out
    wrong = RankRow("ring", 2, "causal", 64, BOTH, note="ring dq: off")
    monkeypatch.setattr(processes, "spawn", lambda *_: [wrong])
    assert main(argv) == 1
    assert "REFUSED ring dq: off" in capsys.readouterr().out


def test_the_dtype_named_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr(
        pieces, "measure_all", lambda sizes, *_: asked.append(sizes.dtype) or ([], [])
    )
    monkeypatch.setattr(processes, "spawn", lambda _, request: asked.append(request.dtype) or [])
    argv = ["bench", "parallel", "--device", "cpu", "--ranks", "2", "--dtype", "bfloat16"]
    assert main(argv) == 0
    assert asked == ["bfloat16", torch.bfloat16]
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["parallel", "--ranks", "two"], "ranks must be integers from 1 on, got 'two'"),
        (["parallel", "--ranks", "0"], "got '0'"),
        (["parallel", "--dtype", "fp7"], "dtype must be all or some of"),
        (["parallel", "--dtype", "float32,bfloat16"], "--dtype takes one dtype here"),
        (["parallel", "--grid", "dense"], "--grid is for the bench of one device"),
        (["parallel", "--backend", "triton,tiled"], "--backend takes one here"),
        (["parallel", "--backend", "fast"], "backend must be one of"),
        (["--ranks", "2"], "--ranks is for tilewise bench parallel"),
        (["--trace", "x.json.gz"], "--trace is for tilewise bench parallel"),
    ],
)
def test_arguments_that_do_not_fit(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--device", "cpu", *argv]) == 2
    assert words in capsys.readouterr().err


def test_processes_of_its_own() -> None:
    rows = processes.spawn(2, request_of(Cell("causal", 64, BOTH), H=2, G=1, D=8))
    assert [(row.ranks, row.note) for row in rows] == [(2, "")] * len(contestants.SCHEDULES)
