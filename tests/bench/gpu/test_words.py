"""Tables and sentences of a run."""

from dataclasses import replace

from tilewise.bench.cases import HOST
from tilewise.bench.gpu import words
from tilewise.bench.gpu.cells import HOST_CLOCK, Cell
from tilewise.bench.gpu.run import Result
from tilewise.bench.harness import REFUSED

from .test_judge import CASE, cell, entry


def row_of(*cells: Cell) -> dict[str, str]:
    columns, rows = words.tabulate(cells)
    return dict(zip(columns, rows[0], strict=True))


def test_a_row_has_ours_the_best_peer_and_a_column_for_each() -> None:
    found = cell(0.002, replace(CASE, feature="softcap"), a=0.001)
    found.ours[0].tflops, found.peers[0].tflops = 123.4, 246.8
    found.ours[0].backend, found.ours[0].first_call_s = "triton", 1.25
    found.plain = entry("Tilewise, plain", 0.001)
    row = row_of(found)
    assert row["case"] == "softcap, causal 4096"
    assert row["contestant"] == "Tilewise: triton"
    assert (row["us"], row["TFLOP/s"], row["spread"]) == ("2000.0", "123", "0 %")
    assert (row["best peer"], row["x best peer"]) == ("a", "0.50x FAILS")
    assert (row["x plain"], row["first s"], row["a TFLOP/s"]) == ("2.00x", "1.25", "247")
    assert "% of ceiling" not in row


def test_the_hosts_time_in_microseconds_and_without_a_judgement() -> None:
    host = cell(50e-6, replace(CASE, direction=HOST), a=40e-6)
    host.way = HOST_CLOCK
    row = row_of(host)
    assert (row["us"], row["a us"], row["x best peer"]) == ("50.0", "40.0", "0.80x")


def test_a_peer_that_did_not_run_says_so_in_its_column() -> None:
    found = cell(0.002)
    found.peers = [entry("absent", None)]
    assert row_of(found, found)["absent TFLOP/s"] == "not run"


def test_a_row_for_each_of_ours() -> None:
    both = cell(1.0)
    both.ours.append(entry("Tilewise, tiled", None))
    _, rows = words.tabulate([both])
    assert [row[3] for row in rows] == ["Tilewise", "Tilewise, tiled"]


def test_the_end_says_what_was_judged_refused_and_left_out() -> None:
    start, end = cell(1.0, grid="anchor, start", a=1.0), cell(1.1, grid="anchor, end", a=1.0)
    wrong = cell(1.0, a=2.0)
    wrong.peers.append(entry("b", None))
    wrong.peers[-1].status, wrong.peers[-1].note = REFUSED, "out: max error"
    broken = cell(None)
    broken.note = "raised RuntimeError: out of memory"
    result = Result({}, {"FA3": "not installed"}, [start, wrong, wrong, broken, end], ["bias"])
    lines = words.describe_end(result)
    assert (
        "dense, forward: against the best peer 2 of 2 cells pass, geometric mean 2.000x, "
        "worst 2.000x in D 128 causal 4096 float32 forward."
    ) in lines
    assert "From start to end the anchor's time moved: Tilewise +10.0 %, a +0.0 %." in lines
    said = "REFUSED b on D 128 causal 4096 float32 forward and 1 more: out: max error"
    assert lines.count(said) == 1
    assert f"NOT TIMED {CASE}: raised RuntimeError: out of memory" in lines
    assert "a is of a 1.0." in lines
    assert "Not in the tables: FA3: not installed." in lines
    assert "Left out, since the time was up: bias." in lines
    assert not any(line.startswith("ENDED EARLY") for line in lines)
