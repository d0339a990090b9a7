"""One run: every cell with everybody who takes part, verified first, timed in rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..harness import describe_error, synchronize
from ..progress import Progress, Silent
from .ahead import compile_ahead
from .cells import STEP, Cell
from .contestants import Contestant, bind, enlist, lift_guard
from .judge import judge

# A first sample this long tells as much as several calls would.
_SAMPLE_S, _MOST_REPEATS = 0.01, 20
_SILENT = Silent()
# Decoding is one of many short calls, which a server replays.
_GRAPH_CALLS = 5


class Meter(Protocol):
    """What a time is read with; see `tilewise.bench.gpu.meter`."""

    def sample(self, call: Callable[[], Any], repeats: int) -> float: ...


@dataclass
class Row:
    """One contestant on one cell in one direction.

    rounds_ms: every round's time, of which `ms` is the median. x_ours: its time over ours. note:
    why there are no figures, or what to know of them.
    """

    cell: Cell
    contestant: str
    version: str
    direction: str
    ms: float | None = None
    rounds_ms: list[float] = field(default_factory=list)
    tflops: float | None = None
    gbps: float | None = None
    x_ours: float | None = None
    first_call_s: float | None = None
    extra_peak_bytes: int | None = None
    note: str = ""
    is_refused: bool = False

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "cell"}
        return {**self.cell.as_json(), **fields}


@dataclass
class Result:
    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(row.is_refused for row in self.rows)


@dataclass
class Bench:
    """What the cells of a run share. verdicts: of each contestant on each kind of call."""

    device: torch.device
    meter: Meter
    known: list[Contestant]
    rounds: int = 7
    verdicts: dict[tuple[str, Cell, str], str] = field(default_factory=dict)


def run(
    bench: Bench,
    cells: Sequence[Cell],
    progress: Progress,
    *,
    minutes: float | None = None,
    done: Sequence[Row] = (),
    store: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Measure cell by cell; after `minutes` the rest is left out, and so it is after a fault that
    a device does not get over.

    done: rows of a run that this one goes on with. store: is called with every row that comes, when
    it has had its first call and when it is timed.
    """
    result, start = Result(list(done)), time.monotonic()
    known = {row.cell for row in done}
    cells = [cell for cell in cells if cell not in known]
    deadline = None if minutes is None else start + 60 * minutes
    is_lost = False
    # Half the time at most, or nothing would be measured.
    until = None if minutes is None else start + 30 * minutes
    compile_ahead(cells, bench.known, bench.device, progress, deadline=until)
    for cell in cells:
        if is_lost or (deadline is not None and time.monotonic() > deadline):
            result.left_out.append(f"{cell.grid}: {cell}")
            continue
        before = len(result.rows)

        def come(row: Row) -> None:
            result.rows.append(row)
            store(result)

        try:
            measure(bench, cell, progress, come)
        # What goes wrong in one cell, such as tensors that do not fit, is no reason to stop.
        except Exception as error:
            ours = bench.known[0]
            result.rows[before:] = [
                Row(cell, ours.name, "", way, note=_short(error), is_refused=True)
                for way in cell.directions
            ]
            is_lost = _is_lost(bench.device)
        store(result)
    store(result)
    return result


def measure(
    bench: Bench,
    cell: Cell,
    progress: Progress = _SILENT,
    come: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """The rows of a cell: every contestant in every direction, in rotation.

    come: is told of each row when it has had its first call; its figures follow.
    """
    x = cell.draw(bench.device)
    rows: list[Row] = []
    calls: list[tuple[Row, Callable[[], Any]]] = []
    contestants = enlist(cell, bench.known)
    title = f"{cell.grid}: {cell}"
    for contestant in contestants:
        # A peer that tunes itself takes a minute and more here.
        progress.stage(f"{title}, first calls of {contestant.name}", len(cell.directions))
        for direction in cell.directions:
            row = Row(cell, contestant.name, contestant.version, direction)
            rows.append(row)
            call = _make_ready(bench, contestant, row, x)
            if call is not None:
                calls.append((row, call))
            come(row)
            progress.step(f"{direction}: {row.first_call_s or 0.0:.1f} s")
    progress.stage(f"{title}, {bench.rounds} rounds", 1)
    _time(bench, calls)
    for row, call in calls:
        if row.rounds_ms:
            _enter(bench, row, call)
    ours = {row.direction: row.ms for row in rows if row.contestant == bench.known[0].name}
    for row in rows:
        own = ours.get(row.direction)
        if row.ms and own:
            row.x_ours = row.ms / own
    progress.step("timed")
    return rows


def _make_ready(
    bench: Bench, contestant: Contestant, row: Row, x: dict[str, torch.Tensor]
) -> Callable[[], Any] | None:
    """Verify and call once; None where it is not to be timed, and then the row says why.

    One of ours that is wrong is refused. A peer that is over the budget is timed, and its row says
    by how much; one that raises says what.
    """
    for _ in range(2):
        try:
            problem = _verdict(bench, contestant, row)
            call = bind(contestant, row.cell, row.direction, x, bench.device)
            start = time.perf_counter()
            call()
            synchronize(bench.device)
            row.first_call_s = time.perf_counter() - start
        # A kernel's compiler raises what it likes.
        except Exception as error:
            lifted = "" if contestant.is_ours or row.note else lift_guard(error)
            row.note = lifted or _short(error)
            if lifted:
                continue
            row.is_refused = contestant.is_ours
            return None
        if problem and contestant.is_ours:
            row.note, row.is_refused = problem, True
            return None
        row.note = row.note or (problem and f"over the error budget, timed all the same: {problem}")
        return call
    return None


def _verdict(bench: Bench, contestant: Contestant, row: Row) -> str:
    key = (contestant.name, row.cell.short(), row.direction)
    if key not in bench.verdicts:
        bench.verdicts[key] = judge(contestant, row.cell, row.direction, bench.device)
    return bench.verdicts[key]


def _time(bench: Bench, calls: list[tuple[Row, Callable[[], Any]]]) -> None:
    """Every round's time of each, in an order that rotates, so that drift meets all alike."""
    capture = getattr(bench.meter, "capture", None)
    ready: list[tuple[Row, Callable[[], Any], int, int]] = []
    for row, call in calls:
        try:
            each = 1
            if row.direction == STEP and capture is not None:
                call, each = capture([call] * _GRAPH_CALLS), _GRAPH_CALLS
            # Warms up too.
            once = bench.meter.sample(call, 1)
            repeats = min(_MOST_REPEATS, max(1, round(_SAMPLE_S / once))) if once > 0 else 1
            ready.append((row, call, repeats, each))
        except Exception as error:
            row.note, row.is_refused = _short(error), row.contestant == bench.known[0].name
    for turn in range(bench.rounds):
        first = turn % max(1, len(ready))
        for row, call, repeats, each in ready[first:] + ready[:first]:
            row.rounds_ms.append(1e3 * bench.meter.sample(call, repeats) / each)


def _enter(bench: Bench, row: Row, call: Callable[[], Any]) -> None:
    row.ms = statistics.median(row.rounds_ms)
    if row.direction == STEP:
        # Read and written.
        row.gbps = 2 * row.cell.state_bytes / row.ms / 1e6
    elif row.contestant in (known.name for known in bench.known):
        row.tflops = row.cell.flops(row.direction) / row.ms / 1e9
    weigh = getattr(bench.meter, "peak_bytes", None)
    if weigh is not None and row.direction != STEP:
        row.extra_peak_bytes = weigh(call)


def _short(error: Exception) -> str:
    return describe_error(error).strip().split("\n")[0][:300]


def _is_lost(device: torch.device) -> bool:
    """Whether the device answers no more."""
    try:
        synchronize(device)
    except Exception:
        return True
    return False
