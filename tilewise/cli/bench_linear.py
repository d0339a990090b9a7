"""`tilewise bench linear`: the ops of linear attention, verified, timed and beside their peer."""

from __future__ import annotations

import argparse
import json
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from .options import UsageError, read_dtypes, read_lengths

if TYPE_CHECKING:
    import torch

    from ..bench.linear import Row

COMMAND = "tilewise bench linear"


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print, store. Exit code 1 where ours was wrong and so not timed."""
    import torch

    from ..bench import environment
    from ..bench import linear as bench
    from ..bench.parallel.pieces import HostMeter
    from . import console
    from .bench import read_stored, refuse_others

    refuse_others(COMMAND, arguments, ("grid", "backend", "without", "minutes", "ranks", "trace"))
    on_gpu = device.type == "cuda"
    path = read_stored(COMMAND, arguments.output, device, "linear-")
    dtypes = read_dtypes(COMMAND, arguments.dtype or ("bfloat16" if on_gpu else "float32"))
    if len(dtypes) != 1:
        raise UsageError(f"{COMMAND}: --dtype takes one dtype here, got {arguments.dtype!r}.")
    lengths = read_lengths(COMMAND, arguments.lengths)
    if arguments.quick and not on_gpu:
        lengths = lengths or [256]
    shapes = bench.usual_shapes(on_gpu, lengths, dtypes[0])
    rounds, repeats = (3 if arguments.quick else 7), (5 if on_gpu else 1)
    meter: bench.Meter = HostMeter()
    active: AbstractContextManager[None] = nullcontext()
    if on_gpu:
        from ..bench.gpu.meter import CudaMeter

        on_cuda = CudaMeter(device)
        meter, active = on_cuda, on_cuda.active()
    _, missing = bench.contestants(device)
    rows: list[Row] = []
    document: dict[str, object] = {}
    with active, console.open_progress() as progress:
        progress.stage("linear attention", len(shapes))
        for shape in shapes:
            rows += bench.measure(shape, device, meter, rounds, repeats)
            progress.step(str(shape))
            document = {
                "command": "bench linear",
                **environment.describe(device),
                "torch_threads": torch.get_num_threads(),
                "missing": missing,
                "rows": [row.as_json() for row in rows],
            }
            # Whole after every cell: a run that is ended keeps what it has.
            if path is not None:
                path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.json:
        console.print_json(document)
    else:
        _print(rows, missing)
    return 1 if any(row.note for row in rows if row.contestant == "tilewise") else 0


def _print(rows: list[Row], missing: dict[str, str]) -> None:
    from . import console

    ours = {(r.shape, r.direction): r.ms for r in rows if r.contestant == "tilewise" and not r.note}
    console.print_table(
        "linear attention, forward and forward with backward",
        ["op and shape", "contestant", "direction", "ms", "TFLOP/s", "first call s", "x ours"],
        [
            [
                str(row.shape),
                row.contestant,
                row.direction,
                f"{row.ms:.3f}",
                f"{row.tflops:.2f}",
                f"{row.first_call_s:.1f}",
                f"{row.ms / ours[row.shape, row.direction]:.2f}"
                if (row.shape, row.direction) in ours
                else "",
            ]
            for row in rows
            if not row.note
        ],
        texts=3,
    )
    for row in rows:
        if row.note:
            console.print_line(f"REFUSED {row.contestant} on {row.shape}: {row.note}")
    for name, why in missing.items():
        console.print_line(f"Not in the table: {name}: {why}.")
