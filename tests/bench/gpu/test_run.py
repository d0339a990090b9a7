"""A whole run on tiny grids: the anchor at both ends, the minutes, the file, a GPU that fails."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilewise.bench.cases import FORWARD, Case
from tilewise.bench.gpu import run as gpu_run
from tilewise.bench.gpu import words
from tilewise.bench.gpu.grids import Grid
from tilewise.bench.gpu.peers import FLASH
from tilewise.bench.gpu.resume import ResumeError, read_run
from tilewise.bench.gpu.run import File, Request, Result, run
from tilewise.bench.progress import Silent

from .fakes import CPU, Meter

ANCHOR = Case("causal", 40, torch.float32, FORWARD, H=1, D=8)
REQUEST = Request(CPU, grids=("dense",), is_quick=True, product_size=16, copy_bytes=1024)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three cases in place of each grid."""
    cases = tuple(replace(ANCHOR, length=length) for length in (32, 36, 1100))
    monkeypatch.setattr(gpu_run, "anchor", lambda: ANCHOR)
    monkeypatch.setattr(gpu_run, "gpu_grid", lambda name, **_: Grid(name, cases, (FLASH,)))


def clock(*readings: float) -> Iterator[float]:
    yield from readings
    while True:
        yield readings[-1]


def test_a_run_is_whole() -> None:
    result = run(REQUEST, Silent(), Meter())
    assert [cell.grid for cell in result.cells] == [
        "anchor, start",
        *["dense"] * 3,
        "anchor, end",
    ]
    assert result.is_finished and not result.has_failed and result.left_out == []
    assert {entry.name for cell in result.cells for entry in cell.entries} == {"Tilewise", FLASH}
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    header = document["header"]
    assert {"gpu", "torch", "triton", "cuda", "cudnn", "tilewise", "commit", "date"} <= set(header)
    assert header["rounds"] == 3
    # Every call takes a millisecond on this meter.
    assert round(header["matrix_product_tflops"] * 1e12) == 2 * 16**3 * 1000
    assert round(header["copy_gbps"] * 1e9) == 2 * 1024 * 1000
    assert len(document["rows"]) == 5
    assert {row["ratio_best_peer"] for row in document["rows"]} == {1.0}
    assert document["summary"][0]["best_peer"]["geometric_mean"] == 1.0
    assert "FA3" in document["missing_peers"]


def test_minutes_end_a_run_with_what_it_has() -> None:
    # Start, the anchor, the first case, and then the time is up.
    readings = clock(0.0, 1.0, 2.0, 61.0)
    request = replace(REQUEST, minutes=1.0)
    result = run(request, Silent(), Meter(), clock=lambda: next(readings))
    assert [cell.grid for cell in result.cells] == ["anchor, start", "dense", "anchor, end"]
    assert len(result.left_out) == 2 and "causal 36" in result.left_out[0]
    assert not result.is_finished and not result.has_failed


def test_the_file_is_whole_after_every_case(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("an older run")
    file, seen = File(path), []

    def store(result: Result) -> None:
        file(result)
        document = json.loads(path.read_text())
        seen.append((len(document["rows"]), document["finished"]))

    run(REQUEST, Silent(), Meter(), store=store)
    assert seen == [(1, False), (2, False), (3, False), (4, False), (5, False), (5, True)]
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_a_run_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    readings = clock(0.0, 1.0, 2.0, 61.0)
    first = run(
        replace(REQUEST, minutes=1.0), Silent(), Meter(), store=File(path),
        clock=lambda: next(readings),
    )  # fmt: skip
    stored = read_run(path, "bench")
    whole = run(REQUEST, Silent(), Meter(call_s=0.002), store=File(path), stored=stored)
    assert [cell.grid for cell in whole.cells] == [
        "anchor, start", "dense", "anchor, end", "anchor, start", "dense", "dense", "anchor, end",
    ]  # fmt: skip
    assert whole.is_finished and whole.earlier == [first.header]
    before, after = (x.as_json()["rows"] for x in (first, whole))
    assert after[:3] == before and len(after) == 7
    # Nothing is left but the anchor; headers of all processes are kept.
    again = run(REQUEST, Silent(), Meter(), stored=read_run(path, "bench"))
    assert len(again.cells) == 9 and len(again.earlier) == 2


def test_what_failed_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(REQUEST, Silent(), Meter(), store=File(path))
    document = json.loads(path.read_text())
    document["rows"][2]["note"] = "raised OutOfMemoryError"
    path.write_text(json.dumps(document))
    result = run(REQUEST, Silent(), Meter(), stored=read_run(path, "bench"))
    assert [cell.case.length for cell in result.cells] == [40, 32, 1100, 40, 40, 36, 40]


def test_a_run_of_other_code_or_cases_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run(REQUEST, Silent(), Meter(), store=File(path))
    text = path.read_text()
    other = json.loads(text)
    other["header"]["torch"] = "1.0"
    path.write_text(json.dumps(other))
    with pytest.raises(ResumeError, match=r"run.json was measured with torch 1\.0, this run has"):
        run(REQUEST, Silent(), Meter(), stored=read_run(path, "bench"))
    path.write_text(text.replace("M=N 36", "M=N 37"))
    with pytest.raises(ResumeError, match="M=N 37 in the grid dense, which this run would not"):
        run(REQUEST, Silent(), Meter(), stored=read_run(path, "bench"))
    path.write_text("{}")
    with pytest.raises(ResumeError, match="resume must name a stored run, got"):
        read_run(path, "bench")


def test_an_interrupted_run_leaves_its_cases(tmp_path: Path) -> None:
    path = tmp_path / "run.json"

    class Interrupting(Silent):
        steps = 0

        def step(self, what: str) -> None:
            self.steps += 1
            if self.steps == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(REQUEST, Interrupting(), Meter(), store=File(path))
    document = json.loads(path.read_text())
    assert (len(document["rows"]), document["finished"]) == (2, False)


def test_a_case_that_does_not_fit_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Case.draw

    def draw(case: Case, device: torch.device, seed: int = 0) -> object:
        if case.length == 36:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(case, device, seed)

    monkeypatch.setattr(Case, "draw", draw)
    result = run(REQUEST, Silent(), Meter())
    assert [bool(cell.note) for cell in result.cells] == [False, False, True, False, False]
    assert result.is_finished and result.has_failed and not result.problem
    assert "out of memory" in json.dumps(result.as_json()["rows"][2])


def test_a_gpu_that_fails_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, stored = Meter(), []
    real = gpu_run.measure_cell

    def fail_in_the_second(*arguments: object) -> object:
        cell = real(*arguments)  # type: ignore[arg-type]
        if cell.grid == "dense":
            meter.problem = RuntimeError("an illegal memory access was encountered")
        return cell

    monkeypatch.setattr(gpu_run, "measure_cell", fail_in_the_second)
    result = run(REQUEST, Silent(), meter, store=stored.append)
    assert "the GPU failed in causal 32" in result.problem and "illegal memory" in result.problem
    assert len(result.cells) == 2 and stored[-1] is result
    assert result.has_failed and not result.is_finished
    assert any(line.startswith("ENDED EARLY") for line in words.describe_end(result))


def test_progress_says_how_each_case_went() -> None:
    said: list[str] = []

    class Listening(Silent):
        def stage(self, title: str, steps: int) -> None:
            said.append(f"{steps} steps")

        def step(self, what: str) -> None:
            said.append(what)

    run(REQUEST, Listening(), Meter())
    assert said[0] == "5 steps" and len(said) == 6
    assert said[1] == "anchor, start: D 8 causal 40 float32 forward, 1.00x the best peer"
