"""A cell: who is refused, what is timed how, and what is counted per call."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.cases import BACKWARD, FORWARD, HOST, HOST_GRAD, Case
from tilewise.bench.gpu import measure
from tilewise.bench.gpu.cells import GRAPH, HOST_CLOCK, STREAM
from tilewise.bench.gpu.measure import count_sets, measure_cell
from tilewise.bench.harness import NOT_RUN, REFUSED, TIMED
from tilewise.bench.peers import EAGER

from .fakes import SHORT, Meter, bench, grid, other, ours, raising

TINY = replace(SHORT, length=48)


def test_rows_of_a_cell() -> None:
    meter = Meter()
    own, peer = ours(meter, 0.004), other(meter, "peer", 0.003)
    cell = measure_cell(
        bench(meter, [own], [peer], ceiling_tflops=SHORT.flops() / 1e12 / 0.001),
        grid(SHORT, peers=[peer]),
        SHORT,
    )
    (mine,), (theirs,) = cell.ours, cell.peers
    assert cell.way == STREAM and cell.plain is None and not cell.has_failed
    assert [entry.status for entry in cell.entries] == [TIMED, TIMED]
    # A causal case is its own plain form, so it takes half.
    assert mine.timing is not None and round(mine.timing.median_s, 9) == 0.002
    assert theirs.timing is not None and round(theirs.timing.median_s, 9) == 0.003
    assert mine.tflops is not None and mine.percent_of_ceiling is not None
    assert round(mine.percent_of_ceiling, 6) == 50.0
    assert mine.backend == "tiled" or mine.backend == "tiled(torch-flash)"
    assert mine.first_call_s is not None and mine.first_call_s > 0
    assert theirs.first_call_s is None and theirs.version == "peer 1.0"
    assert mine.extra_peak_bytes == theirs.extra_peak_bytes == 1_000_000
    assert meter.log[0] == "release"


def test_only_those_who_are_asked_and_serve_it_take_part() -> None:
    meter = Meter()
    asked, other_grid = other(meter, "asked", 0.001), other(meter, "other", 0.001)
    unfit = replace(other(meter, "unfit", 0.001), serves=lambda case, device: False)
    cell = measure_cell(
        bench(meter, [ours(meter, 0.001)], [asked, other_grid, unfit]),
        grid(SHORT, peers=[asked, unfit]),
        SHORT,
    )
    assert [entry.name for entry in cell.peers] == ["asked"]


def test_a_wrong_peer_is_refused_and_not_timed() -> None:
    meter = Meter()
    wrong = other(meter, "wrong", 0.001, factor=0.99)
    cell = measure_cell(
        bench(meter, [ours(meter, 0.001)], [wrong]), grid(TINY, peers=[wrong]), TINY
    )
    (entry,) = cell.peers
    assert (entry.status, entry.timing, entry.tflops) == (REFUSED, None, None)
    assert "out: max error" in entry.note
    assert cell.ours[0].status == TIMED and not cell.has_failed


def test_ours_when_wrong_fails_the_cell() -> None:
    meter = Meter()
    wrong = replace(other(meter, "Tilewise", 0.001, factor=0.99), is_ours=True)
    cell = measure_cell(bench(meter, [wrong]), grid(TINY), TINY)
    assert cell.has_failed and cell.refused == cell.ours
    assert cell.ours[0].timing is None and cell.ours[0].first_call_s is None


@pytest.mark.parametrize(("is_ours", "status"), [(True, REFUSED), (False, NOT_RUN)])
def test_who_raises_is_named_with_the_first_line(is_ours: bool, status: str) -> None:
    meter = Meter()
    error = AssertionError("head dim 80\n" + "of a compiler" * 100)
    peer = raising("raises", error, is_ours=is_ours)
    own = [ours(meter, 0.001), peer] if is_ours else [ours(meter, 0.001)]
    cell = measure_cell(
        bench(meter, own, [] if is_ours else [peer]), grid(TINY, peers=[peer]), TINY
    )
    entry = next(entry for entry in cell.entries if entry.name == "raises")
    assert (entry.status, entry.note) == (status, "raised AssertionError: head dim 80")
    assert cell.has_failed == is_ours
    assert cell.ours[0].status == TIMED


def test_verified_once_for_all_lengths() -> None:
    meter = Meter()
    shared = bench(meter, [ours(meter, 0.001)])
    for length in (1100, 1200):
        measure_cell(shared, grid(), replace(SHORT, length=length))
    assert len(shared.verdicts) == 1
    measure_cell(shared, grid(), replace(SHORT, direction=BACKWARD))
    assert len(shared.verdicts) == 2


def test_who_keeps_gradients_is_verified_in_one_form() -> None:
    meter = Meter()
    peer = replace(other(meter, "compiled", 0.001), keeps_grad=True)
    shared = bench(meter, [], [peer])
    # Without ours there is nothing to compare with, and the peer is measured all the same.
    shared.roster = replace(shared.roster, ours=(ours(meter, 0.001),))
    for direction, B in ((FORWARD, 1), (BACKWARD, 1), (FORWARD, 4)):
        case = replace(SHORT, direction=direction, B=B)
        assert measure_cell(shared, grid(peers=[peer]), case).peers[0].status == TIMED
    assert len([name for name, _ in shared.verdicts if name == "compiled"]) == 1


def test_short_calls_are_captured_and_counted_one_by_one() -> None:
    meter = Meter()
    cell = measure_cell(bench(meter, [ours(meter, 0.002)]), grid(TINY), TINY)
    assert cell.way == GRAPH and cell.sets == 1
    assert meter.captured == [10]
    timing = cell.ours[0].timing
    assert timing is not None and round(timing.median_s, 9) == 0.001


def test_sets_of_tensors_take_turns_inside_the_graph() -> None:
    # q, k, v and dout of one head take 4 * 48 * 8 * 4 bytes.
    meter = Meter(cache_bytes=3 * 4 * 48 * 8 * 4)
    cell = measure_cell(bench(meter, [ours(meter, 0.002)]), grid(TINY), TINY)
    assert cell.sets == 6
    assert meter.captured == [12]


def test_sets_only_where_they_fit_in_the_cache() -> None:
    set_bytes = 1100 * 4 * 8 * 4
    assert count_sets(SHORT, set_bytes - 1) == 1
    assert count_sets(SHORT, set_bytes) == 2
    assert count_sets(SHORT, 1000 * set_bytes) == 32


def test_sets_take_turns_in_the_stream() -> None:
    seen: list[str] = []
    calls = [lambda name=name: seen.append(name) for name in "abc"]
    run = measure._take_turns(calls)
    for _ in range(5):
        run()
    assert "".join(seen) == "abcab"


def test_backward_alone_is_timed() -> None:
    meter = Meter()
    own = ours(meter, 0.002)
    case = replace(SHORT, direction=BACKWARD)
    cell = measure_cell(bench(meter, [own]), grid(case), case)
    # The forward moves the clock, and runs when the call is bound only.
    timing = cell.ours[0].timing
    assert timing is not None and timing.median_s == meter.call_s


@pytest.mark.parametrize("direction", [HOST, HOST_GRAD])
def test_the_hosts_time_is_read_by_its_own_clock(direction: str) -> None:
    meter = Meter()
    case = replace(TINY, direction=direction)
    cell = measure_cell(bench(meter, [ours(meter, 0.002)]), grid(case), case)
    assert cell.way == HOST_CLOCK and "host" in meter.log and meter.captured == []
    assert cell.ours[0].timing is not None and cell.ours[0].tflops is None


def test_special_cases_run_beside_their_plain_form() -> None:
    meter = Meter()
    case = replace(SHORT, feature="softcap")
    cell = measure_cell(bench(meter, [ours(meter, 0.004)]), grid(case), case)
    assert cell.plain is not None and cell.plain.name == "Tilewise, plain"
    assert cell.plain.timing is not None and round(cell.plain.timing.median_s, 9) == 0.002
    assert cell.ours[0].timing is not None and round(cell.ours[0].timing.median_s, 9) == 0.004


def test_lacking_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewise.bench.harness.memory.available_bytes", lambda device: 10_000)
    meter = Meter()
    cell = measure_cell(
        bench(meter, [ours(meter, 0.001)], [EAGER]), grid(SHORT, peers=[EAGER]), SHORT
    )
    assert cell.peers[0].status == NOT_RUN and "score matrices" in cell.peers[0].note


def test_a_fault_while_timing_ends_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()

    def fail(call: object, repeats: int) -> float:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(meter, "sample", fail)
    cell = measure_cell(bench(meter, [ours(meter, 0.001)]), grid(SHORT), SHORT)
    assert cell.note == "raised RuntimeError: out of memory" and cell.has_failed


def test_tensors_that_do_not_fit_end_the_cell_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(case: Case, device: torch.device, seed: int = 0) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TiB.")

    meter = Meter()
    shared = bench(meter, [ours(meter, 0.001)])
    with monkeypatch.context() as patch:
        patch.setattr(Case, "draw", draw)
        cell = measure_cell(shared, grid(SHORT), SHORT)
    assert cell.note.startswith("raised OutOfMemoryError: CUDA out of memory") and cell.has_failed
    assert [entry.status for entry in cell.entries] == [NOT_RUN]
    assert measure_cell(shared, grid(SHORT), SHORT).ours[0].status == TIMED


@pytest.mark.gpu
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD, HOST_GRAD])
@pytest.mark.parametrize("length", [256, 1536])
def test_on_a_gpu(direction: str, length: int) -> None:
    from tilewise.bench.gpu.meter import CudaMeter
    from tilewise.bench.gpu.peers import FLASH, find_roster

    device = torch.device("cuda")
    meter = CudaMeter(device)
    case = Case("causal", length, torch.bfloat16, direction, B=2, H=4, D=64)
    with meter.active():
        shared = measure.Bench(device, meter, find_roster(), rounds=3)
        flash = replace(grid(case), peers=(FLASH,))
        cell = measure_cell(shared, flash, case)
    assert [(entry.status, entry.note) for entry in cell.entries] == [(TIMED, "")] * 2
    assert not cell.note
    assert all(entry.timing is not None and entry.timing.min_s > 0 for entry in cell.entries)
