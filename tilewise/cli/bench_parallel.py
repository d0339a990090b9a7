"""`tilewise bench parallel`: pieces on one device, schedules over ranks, and the plan table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .options import UsageError, read_dtypes, read_lengths, read_output

if TYPE_CHECKING:
    import torch

    from ..bench.parallel.pieces import PieceRow
    from ..bench.parallel.ranks import RankRow
    from ..parallel.model import Prediction

COMMAND = "tilewise bench parallel"


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print, store. Exit code 1 where something was wrong and so not timed."""
    import torch

    from ..bench import environment
    from ..bench.parallel import ranks as over_ranks
    from ..bench.parallel.pieces import HostMeter, Sizes, measure_all
    from ..parallel.model import H200, plan_table
    from ..parallel.volumes import Shape
    from . import console

    for name in ("grid", "backend", "minutes"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"{COMMAND}: --{name} is for the bench of one device.")
    on_gpu, quick = device.type == "cuda", arguments.quick
    output = _read_output(arguments.output, device)
    lengths = read_lengths(COMMAND, arguments.lengths)
    lengths = lengths or ([16384, 65536] if on_gpu else [512] if quick else [2048])
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
    with console.open_progress() as progress:
        progress.stage("pieces", len(lengths) * len(counts))
        meter: Any = HostMeter()
        if on_gpu:
            from ..bench.gpu.meter import CudaMeter

            meter = CudaMeter(device)
        repeats = 5 if on_gpu else 1
        pieces, problems = measure_all(sizes, lengths, counts, meter, repeats, progress.step)
        rows: list[RankRow] = []
        worlds, too_many = _worlds(counts, on_gpu, is_named=bool(named))
        if worlds and not problems:
            progress.stage("schedules", len(worlds))
            name = str(dtype).removeprefix("torch.")
            kind = "cuda" if on_gpu else "cpu"
            request = over_ranks.Request(
                lengths[0], sizes.H, sizes.G, sizes.D, name, kind, sizes.rounds, repeats
            )
            for world in worlds:
                rows += over_ranks.spawn(world, request)
                progress.step(f"{world} ranks")
    shape = Shape(1, 8192, 32, 8, 128, 128)
    plan = plan_table(shape)
    problems += [row.note for row in rows if row.note]
    header = environment.describe(device)
    document = {
        "command": "bench parallel",
        **header,
        "problems": problems,
        "pieces": [row.as_json() for row in pieces],
        "ranks": [row.as_json() for row in rows],
        "plan": [
            {"schedule": p.schedule, "ranks": p.ranks, "tflops": p.tflops,
             "efficiency": p.efficiency, "received": p.received, "exposed_ms": p.exposed_s * 1e3}
            for p in plan
        ],
    }  # fmt: skip
    if output is not None:
        output.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.json:
        console.print_json(document)
        return 1 if problems else 0
    where = f"H {sizes.H} G {sizes.G} D {sizes.D} {str(sizes.dtype).removeprefix('torch.')}, "
    where += str(header["gpu"] or header["cpu"])
    _print(pieces, rows, plan, where)
    for problem in problems:
        console.print_line(f"REFUSED {problem}")
    for count in too_many:
        console.print_line(f"No schedules over {count} ranks: each wants a GPU of its own.")
    console.print_line(f"The plan is a model of {H200.name}, at 8192 tokens a rank, causal.")
    return 1 if problems else 0


def _read_output(text: str | None, device: torch.device) -> Path | None:
    from .bench import file_name

    if text and Path(text).is_dir():
        text = str(Path(text) / f"parallel-{file_name(device)}")
    return None if text is None else read_output(COMMAND, text)


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
            f"forward and backward over {ranks} ranks, {rows[0].tokens} tokens",
            ["schedule", "ms", "without messages", "exposed ms", "efficiency", "TFLOP/s a rank",
             "received MB"],
            [
                [
                    row.schedule, f"{row.ms:.2f}", f"{row.local_ms:.2f}", f"{row.exposed_ms:.2f}",
                    f"{row.efficiency:.2f}", f"{row.tflops:.3f}", f"{row.received / 1e6:.3f}",
                ]
                for row in rows
                if row.ranks == ranks
            ],
        )  # fmt: skip
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
