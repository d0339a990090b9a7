"""The bench over caches: verified before it is timed, caches that take turns, what is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.bench.decode import run as running
from tilewise.bench.decode.cases import DecodeCase, decode_cases, mla_cases
from tilewise.bench.decode.peers import DecodePeer, find_peers
from tilewise.bench.decode.run import HostMeter, Oracle, measure
from tilewise.cli import main

CPU = torch.device("cpu")
TINY = DecodeCase(2, 40, 4, 2, 16, 16, is_cold=False, storage=torch.float32)


def test_bytes_and_flops_are_those_of_the_formula() -> None:
    assert TINY.cache_bytes == 2 * 40 * 2 * (16 + 16) * 4
    assert replace(TINY, M=3).flops == 2 * 2 * 4 * (40 + 39 + 38) * 32
    latent = mla_cases(False, True)[0]
    q, cache = latent.draw(CPU)
    assert cache.is_latent and cache.nbytes == latent.cache_bytes
    assert q.shape == (2, 1, 16, 576)


@pytest.mark.parametrize("case", [*decode_cases(False, False), *mla_cases(False, True)], ids=str)
def test_ours_is_right_on_every_case(case: DecodeCase) -> None:
    ours = find_peers(CPU)[0][0]
    assert ours.is_ours and Oracle.of(case, CPU).judge(ours.build(case)) == ""


def test_a_wrong_contestant_is_not_timed() -> None:
    peers, _ = find_peers(CPU)
    wrong = DecodePeer("wrong", lambda case: lambda q, cache: q * 0.0, lambda case: True)
    broken = DecodePeer("broken", lambda case: lambda q, cache: 1 / 0, lambda case: True)
    rows = {
        row.contestant: row for row in measure(TINY, [*peers, wrong, broken], CPU, HostMeter(), 1)
    }
    assert rows["wrong"].is_refused and rows["wrong"].us is None
    assert "max error" in rows["wrong"].note
    assert "division by zero" in rows["broken"].note
    for name in ("Tilewise", "SDPA", "eager", running.READ):
        assert rows[name].us is not None and not rows[name].note
    ours = rows["Tilewise"]
    best = min(rows[name].us or 0 for name in ("SDPA", "eager"))
    assert ours.us is not None and ours.x_best_peer == best / ours.us


def test_cold_caches_take_turns() -> None:
    drawn = []
    cold = replace(TINY, is_cold=True)

    class Meter(HostMeter):
        def capture(self, calls: Any) -> Any:
            drawn.append(len(calls))
            return super().capture(calls)

    measure(cold, find_peers(CPU)[0], CPU, Meter(), 1)
    assert drawn == [16] * len(drawn)
    drawn.clear()
    measure(TINY, find_peers(CPU)[0], CPU, Meter(), 1)
    assert drawn == [5] * len(drawn)


@pytest.mark.parametrize("what", ["decode", "mla"])
def test_the_command_stores_what_it_measured(
    what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilewise.bench.decode import cases

    monkeypatch.setattr(cases, f"{what}_cases", lambda on_gpu, is_quick: [TINY])
    argv = ["bench", what, "--device", "cpu", "--quick", "--output", str(tmp_path)]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    # Beside the runs of other kinds on the same day.
    (path,) = tmp_path.glob(f"{what}-*.json")
    assert "Not in the table: FlashMLA: package flash-mla is not installed." in shown
    document = json.loads(path.read_text())
    assert document["command"] == f"bench {what}"
    ours = [row for row in document["rows"] if row["contestant"] == "Tilewise"]
    assert len(ours) == 1 and ours[0]["us"] > 0 and ours[0]["storage"] == "float32"
    assert set(document["missing_peers"]) == {"FA3", "FlashInfer", "FlashMLA"}
    assert main([*argv, "--minutes", "0.0000001"]) == 0
    assert "Left out for want of time" in capsys.readouterr().out
    for option in ("--grid", "--trace", "--lengths"):
        assert main(["bench", what, "--device", "cpu", option, "64"]) == 2
        assert f"{option} is for another bench" in capsys.readouterr().err
