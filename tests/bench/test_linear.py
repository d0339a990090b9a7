"""`tilewise bench linear`: what is wrong is not timed; rows say what ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.bench import linear as bench
from tilewise.bench.parallel.pieces import HostMeter
from tilewise.cli import main

SHAPE = bench.Shape("gated_delta_rule", 1, 65, 1, 2, 8, torch.float32)
CPU = torch.device("cpu")


def test_a_right_op_is_timed_both_ways() -> None:
    rows = bench.measure(SHAPE, CPU, HostMeter(), rounds=1, repeats=1)
    assert [(row.contestant, row.direction) for row in rows] == [
        ("tilewise", "forward"),
        ("tilewise", "both"),
    ]
    for row in rows:
        assert not row.note and row.ms > 0 and row.tflops > 0
        json.dumps(row.as_json(), allow_nan=False)


@pytest.mark.parametrize("name", ["out", "beta"])
def test_a_wrong_op_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bench.contestants(CPU)[0]["tilewise"]

    def wrong(op: str, **x: Tensor) -> Tensor:
        out = real(op, **x)
        off = 1e-2 if name == "out" else 1e-2 * (x["beta"] - x["beta"].detach()).sum()
        return out + off

    monkeypatch.setattr(bench, "contestants", lambda device: ({"wrong": wrong}, {}))
    (row,) = bench.measure(SHAPE, CPU, HostMeter(), rounds=1, repeats=1)
    assert row.note.startswith(f"{name}: max error") and row.ms == 0.0


def test_what_raises_is_refused_with_its_error() -> None:
    def raising(op: str, **x: Tensor) -> Tensor:
        raise RuntimeError("no such kernel")

    assert bench.verify(raising, SHAPE, CPU) == "raised RuntimeError: no such kernel"


def test_flops_are_linear_in_length() -> None:
    twice = bench.Shape("kda", 1, 130, 1, 2, 8, torch.float32)
    once = bench.Shape("kda", 1, 65, 1, 2, 8, torch.float32)
    assert twice.flops() == 2 * once.flops()
    # The delta rule reads the state once more than it writes it.
    assert once.flops() > bench.Shape("gla", 1, 65, 1, 2, 8, torch.float32).flops()


def test_the_command_stores_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "usual_shapes", lambda *given: [SHAPE])
    path = tmp_path / "run.json"
    assert main(["bench", "linear", "--quick", "--json", "--output", str(path)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed == json.loads(path.read_text())
    assert printed["missing"] == {"flash-linear-attention": "its kernels need a GPU"}
    for option in ("--grid", "--trace"):
        assert main(["bench", "linear", option, "dense"]) == 2
        assert f"{option} is for another bench" in capsys.readouterr().err
