"""`tilewise bench`: time and extra memory beside the peers, each verified first."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from .options import (
    UsageError,
    add_device,
    add_json,
    read_device,
    read_dtypes,
    read_lengths,
    read_output,
)

if TYPE_CHECKING:
    from ..bench.harness import Row
    from ..bench.run import Result

COMMAND = "tilewise bench"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time and weigh attention beside PyTorch's, after verifying each"
    )
    parser.add_argument("--quick", action="store_true", help="short lengths and three rounds")
    parser.add_argument("--grid", help="dense, window or memory; all when not given")
    parser.add_argument("--lengths", nargs="+", default=(), help="in place of the grids' own")
    parser.add_argument("--dtype", help="in place of the grids' own: some with commas, or all")
    parser.add_argument("--threads", type=int, help="of torch; as torch has them when not given")
    parser.add_argument("--output", metavar="FILE", help="store the run as JSON")
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:

    from ..bench.cases import GRIDS
    from ..bench.run import Request
    from ..bench.run import run as run_bench
    from . import console

    if arguments.grid not in (None, *GRIDS):
        raise UsageError(
            f"{COMMAND}: grid must be one of {', '.join(GRIDS)}, got {arguments.grid!r}."
        )
    device = read_device(COMMAND, arguments.device)
    dtypes = () if arguments.dtype is None else read_dtypes(COMMAND, arguments.dtype)
    lengths = read_lengths(COMMAND, arguments.lengths)
    output = None if arguments.output is None else read_output(COMMAND, arguments.output)
    set_threads(COMMAND, arguments.threads)
    grids = (arguments.grid,) if arguments.grid else GRIDS
    request = Request(device, grids, lengths, dtypes, arguments.quick)
    with console.open_progress() as progress:
        result = run_bench(request, progress)
    document = {"command": "bench", **result.as_json()}
    if output is not None:
        output.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    if arguments.json:
        console.print_json(document)
    else:
        _print_result(result)
    return 1 if result.refused else 0


def set_threads(command: str, threads: int | None) -> None:
    import torch

    if threads is not None and threads < 1:
        raise UsageError(f"{command}: threads must be at least 1, got {threads}.")
    torch.set_num_threads(threads or torch.get_num_threads())


def _shape(row: Row) -> str:
    return f"B {row.case.B} H {row.case.H} D {row.case.D}"


def _print_result(result: Result) -> None:
    from ..bench.peers import MISSING
    from ..bench.run import COLUMNS, describe_row
    from . import console

    machine = f"threads {result.header['threads']}, {result.header['cpu']}"
    for name, rows in result.rows.items():
        table = [describe_row(row) for row in rows]
        kept = [i for i in range(len(COLUMNS)) if any(line[i] for line in table)]
        console.print_table(
            f"{name}: {_shape(rows[0])}, {machine}",
            [COLUMNS[i] for i in kept],
            [[line[i] for i in kept] for line in table],
            texts=5,
        )
    for row in result.refused:
        console.print_line(f"REFUSED {row.contestant} on {row.case}: {row.note}")
    for name, why in MISSING.items():
        console.print_line(f"Not in the table: {name}: {why}.")
