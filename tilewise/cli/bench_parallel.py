"""`tilewise bench parallel`: schedules over ranks, pieces on one device, and the plan table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import UsageError, read_dtypes, read_lengths

if TYPE_CHECKING:
    import torch

    from ..bench.parallel.cells import RankRow, Request
    from ..bench.parallel.pieces import PieceRow
    from ..parallel.model import Prediction

COMMAND = "tilewise bench parallel"
_GPU_LENGTHS = [16384, 65536, 262144]
# Pieces of more tokens say nothing new.
_LONGEST_PIECES = 65536


@dataclass
class Found:
    """What a run has so far. limit_s: of the run; None for none."""

    header: dict[str, Any]
    start: float
    limit_s: float | None
    pieces: list[PieceRow]
    rows: list[RankRow]
    plan: list[Prediction]
    problems: list[str]

    @property
    def left_s(self) -> float | None:
        return None if self.limit_s is None else self.start + self.limit_s - time.monotonic()

    def as_json(self) -> dict[str, Any]:
        plan = [
            {"schedule": p.schedule, "ranks": p.ranks, "tflops": p.tflops,
             "efficiency": p.efficiency, "received": p.received, "exposed_ms": p.exposed_s * 1e3}
            for p in self.plan
        ]  # fmt: skip
        return {
            "command": "bench parallel",
            **self.header,
            "problems": self.problems,
            "pieces": [row.as_json() for row in self.pieces],
            "ranks": [row.as_json() for row in self.rows],
            "plan": plan,
        }

    def write(self, output: Path | None) -> None:
        from ..bench.stored import write_whole

        if output is not None:
            write_whole(output, self.as_json())


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print, store. Exit code 1 where something was wrong and so not timed."""
    from ..bench import environment
    from ..parallel.model import H200, plan_table
    from ..parallel.volumes import Shape
    from . import console
    from .bench import read_backends, read_minutes, read_stored

    if arguments.grid is not None:
        raise UsageError(f"{COMMAND}: --grid is for the bench of one device.")
    if len(read_backends(arguments.backend)) != 1:
        raise UsageError(f"{COMMAND}: --backend takes one here, got {arguments.backend!r}.")
    output = read_stored(COMMAND, arguments.output, device, "parallel-")
    minutes = read_minutes(arguments.minutes)
    sizes, lengths, counts, is_named = _read_sizes(arguments, device)
    on_gpu = device.type == "cuda"
    plan = plan_table(Shape(1, 8192, 32, 8, 128, 128))
    limit = None if minutes is None else 60 * minutes
    found = Found(environment.describe(device), time.monotonic(), limit, [], [], plan, [])
    found.write(output)
    worlds, too_many = _worlds(counts, on_gpu, is_named=is_named)
    with console.open_progress() as progress:
        if worlds:
            progress.stage("schedules", len(worlds))
            _measure_ranks(found, worlds, _request(sizes, lengths, arguments, output), progress)
        found.write(output)
        _measure_pieces(found, sizes, lengths, counts, progress)
    found.problems += [row.note for row in found.rows if row.note and not row.ms and row.is_ours]
    found.write(output)
    if arguments.json:
        console.print_json(found.as_json())
        return 1 if found.problems else 0
    where = f"H {sizes.H} G {sizes.G} D {sizes.D} {str(sizes.dtype).removeprefix('torch.')}, "
    where += str(found.header["gpu"] or found.header["cpu"])
    _print(found.pieces, found.rows, plan, where)
    for problem in found.problems:
        console.print_line(f"REFUSED {problem}")
    for count in too_many:
        console.print_line(f"No schedules over {count} ranks: each wants a GPU of its own.")
    console.print_line(f"The plan is a model of {H200.name}, at 8192 tokens a rank, causal.")
    return 1 if found.problems else 0


def _read_sizes(
    arguments: argparse.Namespace, device: torch.device
) -> tuple[Any, list[int], list[int], bool]:
    """Sizes, lengths, numbers of ranks, and whether these were named."""
    import torch

    from ..bench.parallel.pieces import Sizes

    on_gpu, quick = device.type == "cuda", arguments.quick
    lengths = read_lengths(COMMAND, arguments.lengths)
    lengths = lengths or (_GPU_LENGTHS if on_gpu else [512] if quick else [2048])
    dtype = _read_dtype(arguments.dtype) or (torch.bfloat16 if on_gpu else torch.float32)
    named = read_ranks(arguments.ranks)
    counts = named or ([2, 4, 8] if on_gpu else [2] if quick else [2, 4])
    sizes = Sizes(
        H=32 if on_gpu else 4,
        G=8 if on_gpu else 2,
        D=128 if on_gpu else 64,
        dtype=dtype,
        device=device,
        rounds=3 if quick else 7,
    )
    return sizes, lengths, counts, bool(named)


def _request(
    sizes: Any, lengths: Sequence[int], arguments: argparse.Namespace, output: Path | None
) -> Request:
    from ..bench.cases import BOTH
    from ..bench.parallel.cells import Cell, Request, cells_of

    on_gpu = sizes.device.type == "cuda"
    cells = cells_of(lengths) if on_gpu else (Cell("causal", lengths[0], BOTH),)
    return Request(
        cells,
        sizes.H,
        sizes.G,
        sizes.D,
        str(sizes.dtype).removeprefix("torch."),
        sizes.device.type,
        rounds=min(5, sizes.rounds) if on_gpu else sizes.rounds,
        sample_s=0.02 if on_gpu else 0.0,
        output=str(output or ""),
        trace=arguments.trace or "",
        verified_length=1024 if on_gpu else 192,
        has_peers=on_gpu,
        has_variants=on_gpu,
        backend=arguments.backend or "auto",
    )


def _measure_ranks(found: Found, worlds: Sequence[int], request: Request, progress: Any) -> None:
    from dataclasses import replace

    from ..bench.parallel import processes

    for at, world in enumerate(worlds):
        left = found.left_s
        if left is not None:
            left = max(0.0, left) / (len(worlds) - at)
        found.rows += processes.spawn(world, replace(request, seconds=left))
        progress.step(f"{world} ranks")


def _measure_pieces(
    found: Found, sizes: Any, lengths: Sequence[int], counts: Sequence[int], progress: Any
) -> None:
    from ..bench.parallel.pieces import HostMeter, measure_all

    if found.left_s is not None and found.left_s <= 0:
        progress.step("no time for pieces")
        return
    meter: Any = HostMeter()
    on_gpu = sizes.device.type == "cuda"
    if on_gpu:
        from ..bench.gpu.meter import CudaMeter

        meter = CudaMeter(sizes.device)
    short = [n for n in lengths if n <= _LONGEST_PIECES] or list(lengths)
    progress.stage("pieces", len(short) * len(counts))
    found.pieces, problems = measure_all(
        sizes, short, counts, meter, 5 if on_gpu else 1, progress.step
    )
    found.problems += problems


def read_ranks(text: str | None) -> list[int]:
    """From a list with commas; none where there is none."""
    if text is None:
        return []
    found = []
    for part in text.split(","):
        if not part.isascii() or not part.isdigit() or int(part) < 1:
            raise UsageError(f"{COMMAND}: ranks must be integers from 1 on, got {part!r}.")
        found.append(int(part))
    return found


def _read_dtype(text: str | None) -> torch.dtype | None:
    """The one that everything runs in; none where none is named."""
    if text is None:
        return None
    dtypes = read_dtypes(COMMAND, text)
    if len(dtypes) != 1:
        raise UsageError(f"{COMMAND}: --dtype takes one dtype here, got {text!r}.")
    return dtypes[0]


def _worlds(counts: Sequence[int], on_gpu: bool, *, is_named: bool) -> tuple[list[int], list[int]]:
    """Over how many processes the schedules run, and which of the counts named are too many.

    One process a GPU: all of them where no counts are named.
    """
    import torch

    if not on_gpu:
        return [count for count in counts if count > 1], []
    most = torch.cuda.device_count()
    wanted = [count for count in (counts if is_named else [most]) if count > 1]
    return [n for n in wanted if n <= most], [n for n in wanted if n > most]


def _print(
    pieces: Sequence[PieceRow], rows: Sequence[RankRow], plan: Sequence[Prediction], where: str
) -> None:
    from . import console

    console.print_table(
        f"pieces of a causal zigzag ring: {where}",
        ["piece", "direction", "tokens", "ranks", "q x k", "us", "TFLOP/s", "dense us", "x dense"],
        [
            [
                row.piece, row.direction, str(row.tokens), str(row.ranks),
                f"{row.queries} x {row.keys}", f"{row.us:.0f}", f"{row.tflops:.2f}",
                f"{row.dense_us:.0f}", f"{row.ratio:.3f}",
            ]
            for row in pieces
        ],
        texts=2,
    )  # fmt: skip
    for ranks in dict.fromkeys(row.ranks for row in rows):
        console.print_table(
            f"over {ranks} ranks: {where}",
            _COLUMNS,
            [_cells_of_row(row) for row in rows if row.ranks == ranks and row.ms],
            texts=3,
        )
    console.print_table(
        "plan",
        ["schedule", "ranks", "TFLOP/s a GPU", "efficiency", "received MB", "exposed ms"],
        [
            [
                row.schedule, str(row.ranks), f"{row.tflops:.0f}", f"{row.efficiency:.2f}",
                f"{row.received / 1e6:.0f}", f"{row.exposed_s * 1e3:.2f}",
            ]
            for row in plan
        ],
    )  # fmt: skip


_COLUMNS = [
    "contestant", "direction", "mask", "tokens", "ms", "TFLOP/s a rank", "% of R x one GPU",
    "exposed ms", "of messages ms", "received MB", "plan ms", "fitted ms",
]  # fmt: skip


def _cells_of_row(row: RankRow) -> list[str]:
    def show(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    received = None if row.received is None else row.received / 1e6
    share = None if row.efficiency is None else 100 * row.efficiency
    return [
        row.contestant, row.direction, row.mask, str(row.tokens), f"{row.ms:.3f}",
        f"{row.tflops:.3g}", show(share, ".1f"), show(row.exposed_ms, ".3f"),
        show(row.messages_ms, ".3f"), show(received, ".3f"), show(row.predicted_ms, ".3f"),
        show(row.fitted_ms, ".3f"),
    ]  # fmt: skip
