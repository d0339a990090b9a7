"""Judgement on figures that are given: ratios, geometric means, predictions, head dims."""

import json
from dataclasses import replace

from tilewise.bench.cases import BACKWARD, FORWARD, HOST, Case
from tilewise.bench.gpu.cells import HOST_CLOCK, STREAM, Cell, Entry
from tilewise.bench.gpu.judge import judge, ratios, shares_of_next_power, summarize
from tilewise.bench.harness import NOT_RUN, REFUSED, TIMED, Timing

CASE = Case("causal", 4096, D=128)


def entry(name: str, seconds: float | None, tflops: float | None = None) -> Entry:
    found = Entry(name, f"{name} 1.0", name == "Tilewise")
    if seconds is None:
        found.note = "absent"
        return found
    found.status, found.timing, found.tflops = TIMED, Timing(seconds, seconds, seconds), tflops
    return found


def cell(own_s: float | None, case: Case = CASE, grid: str = "dense", **peers: float) -> Cell:
    return Cell(
        grid,
        case,
        STREAM,
        ours=[entry("Tilewise", own_s)],
        peers=[entry(name, seconds) for name, seconds in peers.items()],
    )


def test_ratio_is_the_peers_time_over_ours() -> None:
    judged = judge(cell(2.0, a=3.0, b=1.5))
    assert judged["ratio_by_peer"] == {"a": 1.5, "b": 0.75}
    assert (judged["best_peer"], judged["ratio_best_peer"]) == ("b", 0.75)
    assert judged["passes"] is False


def test_a_percent_is_noise() -> None:
    assert judge(cell(1.0, a=0.99))["passes"] is True
    assert judge(cell(1.0, a=0.98))["passes"] is False


def test_nothing_to_judge() -> None:
    for alone in (cell(1.0), cell(None, a=1.0), Cell("dense", CASE, STREAM)):
        judged = judge(alone)
        assert judged["best_peer"] is judged["ratio_best_peer"] is judged["passes"] is None
    assert summarize([cell(1.0), cell(None, a=1.0)]) == []


def test_a_peer_without_a_time_is_no_measure() -> None:
    mixed = cell(1.0, a=0.5)
    mixed.peers += [entry("absent", None)]
    assert ratios(mixed) == {"a": 0.5}


def test_each_of_ours_has_a_ratio_of_its_own() -> None:
    both = cell(1.0, a=2.0)
    both.ours.append(entry("Tilewise, tiled", 4.0))
    judged = judge(both)
    assert [own["ratio_best_peer"] for own in judged["ours"]] == [2.0, 0.5]
    assert judged["ratio_best_peer"] == 2.0


def test_row_as_json() -> None:
    row = judge(cell(0.002, replace(CASE, G=2, feature="softcap"), a=0.003))
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert {"op", "shape", "dtype", "mask", "direction", "feature", "timed_by"} <= set(row)
    assert (row["H"], row["G"], row["D"]) == (8, 2, 128)
    (mine,), (theirs,) = row["ours"], row["peers"]
    assert mine["time_ms"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert (theirs["name"], theirs["version"]) == ("a", "a 1.0")


def test_cost_beside_the_plain_form_and_beside_the_visible_area() -> None:
    case = Case("documents", 100, documents=(50, 50))
    packed = cell(3.0, case)
    packed.plain = entry("Tilewise, plain", 4.0)
    (own,) = judge(packed)["ours"]
    # Half of the area in three quarters of the time.
    assert (own["times_plain"], own["times_predicted"]) == (0.75, 1.5)
    (bare,) = judge(cell(3.0, case))["ours"]
    assert bare["times_plain"] is bare["times_predicted"] is None


def test_summary_of_a_grid_and_direction() -> None:
    backward = replace(CASE, direction=BACKWARD)
    cells = [
        cell(1.0, a=2.0, b=8.0),
        cell(1.0, replace(CASE, D=64), a=0.5),
        cell(1.0, backward, a=3.0),
        cell(1.0, grid="gqa", a=1.0),
    ]
    first, second, third = summarize(cells)
    assert [(s.grid, s.direction) for s in (first, second, third)] == [
        ("dense", FORWARD),
        ("dense", BACKWARD),
        ("gqa", FORWARD),
    ]
    assert (first.best_peer.cells, first.best_peer.passed) == (2, 1)
    # sqrt(2.0 * 0.5)
    assert round(first.best_peer.geometric_mean, 12) == 1.0
    assert first.best_peer.worst == 0.5
    assert first.best_peer.worst_cell.startswith("D 64 causal 4096")
    assert first.by_peer["b"].cells == 1 and first.by_peer["b"].worst == 8.0
    assert first.as_json()["by_peer"]["a"]["worst"] == 0.5


def test_the_hosts_time_is_not_judged() -> None:
    host = cell(2.0, replace(CASE, direction=HOST), a=1.0)
    host.way = HOST_CLOCK
    assert judge(host)["passes"] is None and judge(host)["ratio_best_peer"] == 0.5
    assert summarize([host]) == []


def test_head_dims_beside_the_next_power_of_two() -> None:
    cells = []
    for D, tflops in ((64, 400.0), (80, 300.0), (128, 600.0), (192, 500.0)):
        cells.append(Cell("headdims", replace(CASE, D=D), STREAM))
        cells[-1].ours = [entry("Tilewise", 1.0, tflops)]
    # 256 was not measured, so 192 has nothing beside it.
    assert shares_of_next_power(cells) == {"headdims, causal 4096 float32 forward, D 80": 0.5}


def test_what_fails_a_cell() -> None:
    fine, wrong_peer, wrong = cell(1.0, a=1.0), cell(1.0, a=1.0), cell(1.0, a=1.0)
    wrong_peer.peers[0].status = REFUSED
    wrong.ours[0].status = REFUSED
    absent = cell(1.0)
    absent.peers = [entry("absent", None)]
    assert absent.peers[0].status == NOT_RUN
    assert [c.has_failed for c in (fine, wrong_peer, wrong, absent)] == [False, False, True, False]
    assert wrong_peer.refused == wrong_peer.peers
