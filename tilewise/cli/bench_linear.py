"""`tilewise bench linear`: the ops of linear attention, verified, timed and beside their peer."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from .options import UsageError, read_dtypes, read_lengths

if TYPE_CHECKING:
    import torch

    from ..bench.linear.run import Meter, Result, Row

COMMAND = "tilewise bench linear"


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print, store. Exit code 1 where ours was wrong and so not timed."""
    from ..bench import environment
    from ..bench.gpu.resume import ResumeError, check_same
    from ..bench.linear.cells import GRIDS, cells
    from ..bench.linear.contestants import find_contestants
    from ..bench.linear.resume import restore
    from ..bench.linear.run import Bench
    from ..bench.linear.run import run as run_bench
    from ..bench.parallel.pieces import HostMeter
    from ..bench.stored import write_whole
    from . import console
    from .bench import read_grids, read_minutes, read_resumed, refuse_others

    refuse_others(COMMAND, arguments, ("backend", "without", "ranks", "trace"))
    on_gpu = device.type == "cuda"
    stored, output = read_resumed(COMMAND, arguments, device, "linear-")
    grids, minutes = read_grids(arguments.grid, GRIDS), read_minutes(arguments.minutes)
    dtypes = read_dtypes(COMMAND, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    if len(dtypes) != 1:
        raise UsageError(f"{COMMAND}: --dtype takes one dtype here, got {arguments.dtype!r}.")
    lengths = read_lengths(COMMAND, arguments.lengths)
    asked = cells(device, grids, lengths, dtypes[0], arguments.quick)
    known, missing = find_contestants(device)
    meter: Meter = HostMeter()
    active: AbstractContextManager[None] = nullcontext()
    if on_gpu:
        from ..bench.gpu.meter import CudaMeter

        on_cuda = CudaMeter(device)
        meter, active = on_cuda, on_cuda.active()
    bench = Bench(device, meter, known, rounds=3 if arguments.quick else 7)
    header = {
        **environment.describe(device),
        "triton": environment.version_of("triton"),
        "rounds": bench.rounds,
        "flops": "of a forward in chunks of 64; with backward 3.5 times that",
    }

    done: list[Row] = []
    if stored is not None:
        try:
            check_same(stored, header)
            done = restore(stored, asked, known)
        except ResumeError as error:
            raise UsageError(f"{COMMAND}: {error}") from None

    def document(result: Result) -> dict[str, Any]:
        return {
            "command": "bench linear",
            "header": header,
            "earlier": [] if stored is None else stored.headers,
            "missing_peers": missing,
            "left_out": result.left_out,
            "rows": [row.as_json() for row in result.rows],
        }

    def store(result: Result) -> None:
        # Whole after every cell: a run that is ended keeps what it has.
        if output is not None:
            write_whole(output, document(result))

    with active, console.open_progress() as progress:
        result = run_bench(bench, asked, progress, minutes=minutes, done=done, store=store)
    if arguments.json:
        console.print_json(document(result))
    else:
        _print(result, str(header["gpu"] or header["cpu"]), missing)
    return 1 if result.has_failed else 0


_COLUMNS = (
    "op and shape", "contestant", "direction", "ms", "min..max", "x ours", "TFLOP/s", "GB/s",
    "B a token", "first call s",
)  # fmt: skip


def _print(result: Result, machine: str, missing: dict[str, str]) -> None:
    from . import console

    for grid in dict.fromkeys(row.cell.grid for row in result.rows):
        lines = [_line(row) for row in result.rows if row.cell.grid == grid and row.ms is not None]
        if lines:
            console.print_table(f"linear, {grid}: {machine}", list(_COLUMNS), lines, texts=3)
    for row in result.rows:
        if row.note:
            word = "REFUSED " if row.is_refused else "" if row.ms is not None else "Not timed: "
            console.print_line(f"{word}{row.contestant} on {row.cell}, {row.direction}: {row.note}")
    for name, why in missing.items():
        console.print_line(f"Not in the table: {name}: {why}.")
    for name in result.left_out:
        console.print_line(f"Left out: {name}.")


def _line(row: Row) -> list[str]:
    def show(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    tokens = row.cell.B * row.cell.M
    name = f"{row.contestant} ({row.version})" if row.version else row.contestant
    weight = None if row.extra_peak_bytes is None else row.extra_peak_bytes / tokens
    spread = f"{min(row.rounds_ms):.3f}..{max(row.rounds_ms):.3f}"
    return [
        str(row.cell), name, row.direction, show(row.ms, 3), spread, show(row.x_ours, 2),
        show(row.tflops, 2), show(row.gbps, 0), show(weight, 0), show(row.first_call_s, 1),
    ]  # fmt: skip
