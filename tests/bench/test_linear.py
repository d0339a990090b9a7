"""`tilewise bench linear`: what is wrong is not timed; rows say what ran."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.bench.linear import cells as shapes
from tilewise.bench.linear import run as bench
from tilewise.bench.linear.ahead import compile_ahead
from tilewise.bench.linear.cells import BOTH, FORWARD, STEP, Cell
from tilewise.bench.linear.contestants import (
    COPY,
    DENSE,
    FLA,
    OURS,
    Contestant,
    find_contestants,
    lift_guard,
)
from tilewise.bench.parallel.pieces import HostMeter
from tilewise.bench.progress import Silent
from tilewise.cli import main

CELL = Cell("ops", "gated_delta_rule", 1, 65, 1, 2, 8, torch.float32)
CPU = torch.device("cpu")


def make(*known: Contestant, rounds: int = 2) -> bench.Bench:
    return bench.Bench(CPU, HostMeter(), list(known) or find_contestants(CPU)[0], rounds)


def of_peer(run: Any) -> Contestant:
    return Contestant("peer", "peer 1.0", run)


def ours(op: str, **x: Tensor) -> Tensor:
    run = find_contestants(CPU)[0][0].run
    assert run is not None
    return run(op, **x)


def test_a_right_op_is_timed_both_ways_and_keeps_every_round() -> None:
    rows = bench.measure(make(rounds=3), CELL)
    assert [(row.contestant, row.direction) for row in rows] == [(OURS, FORWARD), (OURS, BOTH)]
    for row in rows:
        assert not row.note and row.ms and row.tflops and row.first_call_s
        assert len(row.rounds_ms) == 3 and min(row.rounds_ms) <= row.ms <= max(row.rounds_ms)
        assert row.x_ours == 1.0
        assert "cell" not in json.loads(json.dumps(row.as_json(), allow_nan=False))


@pytest.mark.parametrize("name", ["out", "beta"])
def test_a_wrong_op_of_ours_is_refused_and_a_wrong_peer_timed_with_a_word(name: str) -> None:
    def wrong(op: str, **x: Tensor) -> Tensor:
        off = 1e-2 if name == "out" else 1e-2 * (x["beta"] - x["beta"].detach()).sum()
        return ours(op, **x) + off

    rows = bench.measure(make(Contestant(OURS, "", wrong), of_peer(wrong)), CELL)
    own, peers = rows[:2], rows[2:]
    assert own[1].note.startswith(f"{name}: max error") and own[1].is_refused
    assert own[1].ms is None
    # A wrong gradient does not keep the forward from being timed.
    assert (own[0].ms is None) == (name == "out")
    assert peers[1].ms and not peers[1].is_refused and "over the error budget" in peers[1].note


def test_a_peer_that_raises_says_so_in_its_row() -> None:
    def raising(op: str, **x: Tensor) -> Tensor:
        if x["q"].requires_grad:
            raise RuntimeError("no such kernel\nand a long story")
        return ours(op, **x)

    rows = bench.measure(make(find_contestants(CPU)[0][0], of_peer(raising)), CELL)
    assert all(row.ms for row in rows[:3])
    assert rows[3].note == "raised RuntimeError: no such kernel" and rows[3].ms is None
    assert not rows[3].is_refused


def test_a_cell_that_fails_is_a_row_and_the_others_run() -> None:
    broken = replace(CELL, G=3)
    result = bench.run(make(), [broken, CELL], Silent())
    assert result.has_failed and not result.left_out
    assert [bool(row.ms) for row in result.rows] == [False, False, True, True]
    assert "heads" in result.rows[0].note or "H" in result.rows[0].note
    late = bench.run(make(), [CELL], Silent(), minutes=1e-12)
    assert late.left_out == [f"ops: {CELL}"] and not late.rows


def test_every_row_is_stored_as_it_comes_and_first_calls_are_announced() -> None:
    said: list[str] = []

    class Watch(Silent):
        def stage(self, title: str, steps: int) -> None:
            said.append(title)

    stored: list[list[float | None]] = []
    known = find_contestants(CPU)[0][0], of_peer(ours)

    def store(result: bench.Result) -> None:
        stored.append([row.first_call_s and (row.ms or 0.0) for row in result.rows])

    bench.run(make(*known), [CELL], Watch(), store=store)
    assert [len(rows) for rows in stored[:4]] == [1, 2, 3, 4]
    assert all(ms == 0.0 for rows in stored[:4] for ms in rows)
    assert all(ms and ms > 0.0 for ms in stored[-1])
    assert said[:2] == [f"ops: {CELL}, first calls of {name}" for name in (OURS, "peer")]


def test_only_the_guard_of_the_peer_is_lifted() -> None:
    assert lift_guard(RuntimeError("out of memory")) == ""
    assert lift_guard(ValueError("produces incorrect results")) == ""


def test_a_decode_step_and_dense_attention_are_verified_too() -> None:
    step = Cell("decode", "kda", 2, 1, 2, 2, 8, torch.float32)
    rows = bench.measure(make(), step)
    assert [(row.contestant, row.direction) for row in rows] == [(OURS, STEP), (COPY, STEP)]
    assert all(row.ms and row.gbps and not row.note for row in rows)
    across = Cell("crossover", "simple_gla", 1, 65, 2, 2, 8, torch.float32)
    rows = bench.measure(make(), across)
    assert [row.contestant for row in rows] == [OURS, DENSE]
    assert all(row.ms and not row.note for row in rows) and rows[1].tflops is None


def test_flops_are_linear_in_length() -> None:
    once, twice = (Cell("ops", "kda", 1, m, 1, 2, 8, torch.float32) for m in (65, 130))
    assert twice.flops(FORWARD) == 2 * once.flops(FORWARD) < once.flops(BOTH)
    # The delta rule reads the state once more than it writes it.
    assert once.flops(FORWARD) > replace(once, op="gla").flops(FORWARD)


def test_the_grids_of_a_gpu_hold_what_is_promised() -> None:
    gpu = torch.device("cuda")
    found = shapes.cells(gpu)
    assert {cell.grid for cell in found} == set(shapes.GRIDS)
    long = [c for c in found if c.grid == "length"]
    assert [c.M for c in long if c.H == 32] == [16384, 32768, 65536, 131072]
    assert [(c.op, c.M) for c in long if c.H == 8] == [
        (op, m) for op in ("simple_gla", "gla") for m in (32768, 131072)
    ]
    assert {c.B * c.M for c in found if c.grid == "crossover"} == {32768}
    assert {c.op for c in found if c.grid == "ops"} == set(shapes.OPS)
    only = shapes.cells(gpu, ("decode",))
    assert [c.grid for c in only] == ["decode", "decode"]
    assert {c.M for c in shapes.cells(gpu, lengths=(512,))} == {512}


def test_the_command_stores_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shapes, "cells", lambda *given: [CELL])
    path = tmp_path / "run.json"
    assert main(["bench", "linear", "--quick", "--json", "--output", str(path)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    assert printed["missing_peers"] == {"flash-linear-attention": "its kernels need a GPU"}
    assert printed["header"]["rounds"] == 3 and len(printed["rows"]) == 2
    assert main(["bench", "linear", "--quick"]) == 0
    assert "gated_delta_rule B 1 M 65" in capsys.readouterr().out
    assert main(["bench", "linear", "--grid", "dense"]) == 2
    assert main(["bench", "linear", "--trace", "x"]) == 2
    assert "--trace is for another bench" in capsys.readouterr().err


def test_a_stored_run_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(CELL, op="simple_gla")
    monkeypatch.setattr(shapes, "cells", lambda *given: [CELL, other])
    path = tmp_path / "run.json"
    command = ["bench", "linear", "--quick", "--json", "--resume", str(path)]
    assert main(["bench", "linear", "--quick", "--output", str(path)]) == 0
    first = json.loads(path.read_text())
    # The second cell was cut short.
    first["rows"][2]["ms"] = None
    path.write_text(json.dumps(first))
    capsys.readouterr()
    assert main(command) == 0
    second = json.loads(path.read_text())
    assert [row["op"] for row in second["rows"]] == [CELL.op] * 2 + ["simple_gla"] * 2
    assert second["rows"][:2] == first["rows"][:2]
    assert all(row["ms"] for row in second["rows"][2:])
    assert second["rows"][3]["rounds_ms"] != first["rows"][3]["rounds_ms"]
    assert second["earlier"] == [first["header"]]

    # A direction that is not there is measured, and so are those that stand beside it.
    path.write_text(json.dumps({**second, "rows": [second["rows"][0], *second["rows"][2:]]}))
    assert main(command) == 0
    third = json.loads(path.read_text())
    assert len(third["rows"]) == 4 and len(third["earlier"]) == 2
    assert third["rows"][:2] == second["rows"][2:]
    capsys.readouterr()

    row, header = first["rows"][0], first["header"]
    for change, message in (
        ({"rows": [{"op": "gla"}]}, "none of tilewise bench linear's"),
        ({"rows": [{**row, "ms": float("nan")}]}, "times are finite numbers"),
        ({"rows": [{**row, "rounds_ms": []}]}, "a time is the median of rounds"),
        ({"rows": [{**row, "rounds_ms": ["x"]}]}, "times are finite numbers"),
        ({"rows": [{**row, "H": 9}]}, "which this run would not measure"),
        ({"rows": None}, "resume must name a stored run"),
        ({"earlier": 5}, "resume must name a stored run"),
        ({"header": []}, "headers and rows are objects"),
        ({"command": "bench decode"}, "it is of 'bench decode', not of 'bench linear'"),
        ({"header": {**header, "commit": "another"}}, "was measured with commit another"),
        ({"header": {**header, "threads": 64}}, "was measured with threads 64"),
    ):
        path.write_text(json.dumps({**first, **change}))
        assert main(command) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_peers_kernels_are_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cell in a process of its own, which may fail, and keeps no configuration it tried."""
    ops = tmp_path / "fla" / "ops"
    ops.mkdir(parents=True)
    (tmp_path / "fla" / "__init__.py").touch()
    (ops / "__init__.py").write_text(
        "import os, pathlib\n"
        "def chunk_gated_delta_rule(q, v, **rest):\n"
        "    name = f'{q.shape[1]}-{os.environ[\"FLA_CACHE_RESULTS\"]}'\n"
        f"    (pathlib.Path({str(tmp_path)!r}) / name).touch()\n"
        "    return v * q.sum() * sum(x.sum() for x in rest.values()), None\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    known = [Contestant(OURS), Contestant(FLA)]
    long, missing = replace(CELL, M=200), replace(CELL, op="gla")

    class Steps(Silent):
        n = 0

        def step(self, done: str) -> None:
            self.n += 1

    progress = Steps()
    compile_ahead([long, missing], known, CPU, progress)
    made = {path.name for path in tmp_path.iterdir() if path.name != "fla"}
    assert made == {"150-0", "200-0"}
    assert progress.n == 2

    compile_ahead([CELL], known[:1], CPU, progress)
    assert progress.n == 2
    # Past the deadline nothing begins, and what runs is ended.
    compile_ahead([long] * 9, known, CPU, progress, deadline=0.0)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*given, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    compile_ahead([long] * 9, known, CPU, progress, deadline=time.monotonic() + 0.3)
    assert progress.n == 2 and started
    assert all(process.poll() is not None for process in started)
