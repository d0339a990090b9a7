"""One run on a GPU: ceilings, an anchor, the grids, the anchor again; stored after every case.

One that the time did not suffice for may be gone on with by another process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import environment
from ..cases import Case
from ..harness import describe_error, time_rounds
from ..progress import Progress
from ..stored import write_whole
from .cells import Cell
from .grids import ANCHOR_PEERS, GPU_GRIDS, Grid, anchor, gpu_grid
from .judge import PASS, judge, ratios, shares_of_next_power, summarize
from .measure import Bench, measure_cell
from .meter import Meter
from .peers import find_roster
from .resume import Stored, check_same, key_of, restore

_PRODUCT_SIZE = 8192
_COPY_BYTES = 1 << 30


@dataclass(frozen=True)
class Request:
    """What to measure; no lengths or dtypes: the grids' own; no minutes: to the end.

    without: names of peers that take no part. product_size, copy_bytes: of what the ceilings are
    read off.
    """

    device: torch.device
    grids: Sequence[str] = GPU_GRIDS
    backends: Sequence[str] = ("auto",)
    lengths: Sequence[int] = ()
    dtypes: Sequence[torch.dtype] = ()
    is_quick: bool = False
    minutes: float | None = None
    without: Sequence[str] = ()
    product_size: int = _PRODUCT_SIZE
    copy_bytes: int = _COPY_BYTES


@dataclass
class Result:
    """What was found so far. left_out: cases that the time did not suffice for. earlier: headers of
    the processes that measured before this one."""

    header: dict[str, Any]
    absent: dict[str, str]
    cells: list[Cell] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problem: str = ""
    is_finished: bool = False
    earlier: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return bool(self.problem) or any(cell.has_failed for cell in self.cells)

    def as_json(self) -> dict[str, Any]:
        return {
            "header": self.header,
            "earlier": self.earlier,
            "finished": self.is_finished,
            "problem": self.problem,
            "left_out": self.left_out,
            "missing_peers": self.absent,
            "summary": [summary.as_json() for summary in summarize(self.cells)],
            "share_of_next_power_of_two": shares_of_next_power(self.cells),
            "rows": [judge(cell) for cell in self.cells],
        }


Store = Callable[[Result], None]


def run(
    request: Request,
    progress: Progress,
    meter: Meter,
    *,
    store: Store = lambda result: None,
    clock: Callable[[], float] = time.monotonic,
    stored: Stored | None = None,
) -> Result:
    """Measure until the grids or the minutes are at their end; `store` gets every new state.

    stored: a run to go on with, whose cells are not measured again.
    """
    start = clock()
    grids = [
        gpu_grid(name, lengths=request.lengths, dtypes=request.dtypes, is_quick=request.is_quick)
        for name in request.grids
    ]
    with meter.active():
        bench, result = _begin(request, meter)
        work = [(grid, case) for grid in grids for case in grid.cases]
        ends = [_anchor_grid("anchor, start"), _anchor_grid("anchor, end")]
        if stored is not None:
            work = _go_on(result, stored, work, ends)
        progress.stage("bench", len(work) + 2)
        for grid, case in ((ends[0], ends[0].cases[0]), *work, (ends[1], ends[1].cases[0])):
            is_late = request.minutes is not None and clock() - start > 60 * request.minutes
            # The anchor takes a second or two, and a run without it cannot be compared.
            if is_late and grid not in ends:
                result.left_out.append(f"{grid.name}: D {case.D} {case}")
                continue
            cell = measure_cell(bench, grid, case)
            result.cells.append(cell)
            progress.step(_describe(cell))
            result.problem = _device_problem(meter, case)
            store(result)
            if result.problem:
                return result
    result.is_finished = not result.left_out
    store(result)
    return result


def _go_on(
    result: Result, stored: Stored, work: Sequence[tuple[Grid, Case]], ends: Sequence[Grid]
) -> list[tuple[Grid, Case]]:
    """Put what is stored into the result. Returns: what is left to do."""
    check_same(stored, result.header)
    others = [gpu_grid(name) for name in GPU_GRIDS]
    known = [(grid.name, case) for grid in (*others, *ends) for case in grid.cases]
    known += [(grid.name, case) for grid, case in work]
    result.cells, result.earlier = restore(stored, known), stored.headers
    done = {key_of(cell.grid, cell.case) for cell in result.cells}
    return [(grid, case) for grid, case in work if key_of(grid.name, case) not in done]


def _begin(request: Request, meter: Meter) -> tuple[Bench, Result]:
    rounds = 3 if request.is_quick else 7
    roster = find_roster(request.backends, request.without)
    ceilings = measure_ceilings(request, meter)
    bench = Bench(request.device, meter, roster, rounds, ceilings["matrix_product_tflops"])
    header = {
        **environment.describe(request.device),
        "triton": environment.version_of("triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "rounds": rounds,
        "flops": "4 B H D per visible pair, half of all pairs if causal, backward 2.5 times that",
        "passes": f"ratio_best_peer, the best peer's time over ours, of at least {PASS}",
        **ceilings,
    }
    return bench, Result(header, roster.absent)


def measure_ceilings(request: Request, meter: Meter) -> dict[str, float]:
    """TFLOP/s of a square bf16 product, and GB/s of a copy on the device (read and written)."""
    size, device = request.product_size, request.device
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.zeros(request.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    calls = {"product": lambda: a @ b, "copy": lambda: target.copy_(source)}
    timings = time_rounds(calls, rounds=7, sample=meter.sample)
    return {
        "matrix_product_tflops": 2.0 * size**3 / timings["product"].median_s / 1e12,
        "copy_gbps": 2.0 * request.copy_bytes / timings["copy"].median_s / 1e9,
    }


def _anchor_grid(name: str) -> Grid:
    return Grid(name, (anchor(),), ANCHOR_PEERS)


def _device_problem(meter: Meter, case: Case) -> str:
    """A fault of the GPU ends everything: no later call of this process would work."""
    try:
        meter.synchronize()
    except RuntimeError as error:
        return f"the GPU failed in {case}: {describe_error(error)}"
    return ""


def _describe(cell: Cell) -> str:
    found = ratios(cell)
    best = f", {min(found.values()):.2f}x the best peer" if found else ""
    return f"{cell.grid}: D {cell.case.D} {cell.case}{best}"


class File:
    """Keeps a run in a JSON file that is whole at every moment."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, result: Result) -> None:
        write_whole(self._path, {"command": "bench", **result.as_json()})
