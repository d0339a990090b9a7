"""`tilewise bench`: time and extra memory beside the peers, each verified first."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
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
    import torch

    from ..bench.gpu.resume import Stored
    from ..bench.gpu.run import Request as GpuRequest
    from ..bench.gpu.run import Result as GpuResult
    from ..bench.harness import Row
    from ..bench.run import Request, Result

COMMAND = "tilewise bench"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench", help="time and weigh attention beside PyTorch's, after verifying each"
    )
    parser.add_argument(
        "what",
        nargs="?",
        choices=["parallel", "decode", "mla", "linear"],
        help="parallel: context parallelism, its pieces, its schedules over ranks, its plan; "
        "decode, mla: attention over caches; linear: linear attention's ops",
    )
    parser.add_argument("--ranks", help="parallel: how many, some with commas")
    parser.add_argument(
        "--trace", metavar="FILE", help="parallel: a Chrome trace of a ring, as .json.gz"
    )
    parser.add_argument("--quick", action="store_true", help="fewer lengths and three rounds")
    parser.add_argument(
        "--grid",
        help="some with commas, all when not given: dense, window, memory on a CPU; dense, "
        "headdims, window, documents, features, gqa, small, host on a GPU; linear: ops, models, "
        "length, crossover, decode",
    )
    parser.add_argument("--lengths", nargs="+", default=(), help="in place of the grids' own")
    parser.add_argument("--dtype", help="in place of the grids' own: some with commas, or all")
    parser.add_argument("--threads", type=int, help="of torch; as torch has them when not given")
    parser.add_argument(
        "--backend", help="GPU: which of ours run, some with commas; the first is judged"
    )
    parser.add_argument(
        "--without",
        metavar="PEERS",
        help="GPU: peers that take no part, some of fa2, cudnn, efficient, flex, eager, fa3, fa4 "
        "with commas",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help="GPU, parallel, decode, mla, linear: end after so many, with what was measured so far",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="store the run as JSON; in a folder, under the name of the device and the date",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE",
        help="GPU, linear: go on with this stored run, without the cases that it has, and store it "
        "there",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    device = read_device(COMMAND, arguments.device)
    set_threads(COMMAND, arguments.threads)
    if arguments.what not in (None, "linear"):
        refuse_others(f"{COMMAND} {arguments.what}", arguments, ("resume",))
    if arguments.what == "parallel":
        from . import bench_parallel

        return bench_parallel.run(arguments, device)
    if arguments.what == "linear":
        from . import bench_linear

        return bench_linear.run(arguments, device)
    if arguments.what in ("decode", "mla"):
        from . import bench_decode

        return bench_decode.run(arguments, device)
    if arguments.ranks is not None:
        raise UsageError(f"{COMMAND}: --ranks is for tilewise bench parallel.")
    if arguments.trace is not None:
        raise UsageError(f"{COMMAND}: --trace is for tilewise bench parallel.")
    return (_run_on_gpu if device.type == "cuda" else _run_on_cpu)(arguments, device)


def _run_on_cpu(arguments: argparse.Namespace, device: torch.device) -> int:
    from ..bench.cases import GRIDS
    from ..bench.run import Request
    from ..bench.run import run as run_bench
    from ..bench.stored import write_whole
    from . import console

    for name in ("backend", "minutes", "without", "resume"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"{COMMAND}: --{name} is for a run on a GPU; the device is {device}.")
    grids = read_grids(arguments.grid, GRIDS)
    request: Request = Request(device, grids, *_read_sizes(arguments), arguments.quick)
    output = read_stored(COMMAND, arguments.output, device)
    with console.open_progress() as progress:
        result = run_bench(request, progress)
    document = {"command": "bench", **result.as_json()}
    if output is not None:
        write_whole(output, document)
    if arguments.json:
        console.print_json(document)
    else:
        _print_result(result)
    return 1 if result.refused else 0


def _run_on_gpu(arguments: argparse.Namespace, device: torch.device) -> int:
    from ..bench.gpu.grids import GPU_GRIDS
    from ..bench.gpu.meter import CudaMeter
    from ..bench.gpu.resume import ResumeError
    from ..bench.gpu.run import File, Request
    from ..bench.gpu.run import run as run_bench
    from . import console

    grids = read_grids(arguments.grid, GPU_GRIDS)
    backends = read_backends(arguments.backend)
    minutes = read_minutes(arguments.minutes)
    lengths, dtypes = _read_sizes(arguments)
    without = _read_peers(arguments.without)
    request: GpuRequest = Request(
        device, grids, backends, lengths, dtypes, arguments.quick, minutes, without
    )
    stored, output = read_resumed(COMMAND, arguments, device)
    store = (lambda result: None) if output is None else File(output)
    with console.open_progress() as progress:
        try:
            result = run_bench(request, progress, CudaMeter(device), store=store, stored=stored)
        except ResumeError as error:
            raise UsageError(f"{COMMAND}: {error}") from None
    if arguments.json:
        console.print_json({"command": "bench", **result.as_json()})
    else:
        print_gpu_result(result)
    return 1 if result.has_failed else 0


# ---------------------------------------------------------------- arguments


def read_resumed(
    command: str, arguments: argparse.Namespace, device: torch.device, kind: str = ""
) -> tuple[Stored | None, Path | None]:
    """The run to go on with, if any, and where this one is stored, as `read_stored` says."""
    if arguments.resume is None:
        return None, read_stored(command, arguments.output, device, kind)
    if arguments.output is not None:
        raise UsageError(f"{command}: --resume stores where it reads; leave --output away.")
    from ..bench.gpu.resume import ResumeError, read_run

    try:
        named = command.removeprefix("tilewise ")
        return read_run(Path(arguments.resume), named), read_output(command, arguments.resume)
    except ResumeError as error:
        raise UsageError(f"{command}: {error}") from None


def read_grids(text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    """From a list with commas, without repeats; all where there is none."""
    names = known if text is None else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{COMMAND}: grid must be one of {', '.join(known)}, got {name!r}.")
    return names


def read_backends(text: str | None) -> tuple[str, ...]:
    from ..dense.choice import BACKENDS

    known = ("auto", *BACKENDS)
    names = ("auto",) if text is None else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{COMMAND}: backend must be one of {', '.join(known)}, got {name!r}.")
    return names


def _read_peers(text: str | None) -> tuple[str, ...]:
    from ..bench.gpu.peers import SHORT_NAMES

    names = () if text is None else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in SHORT_NAMES:
            known = ", ".join(SHORT_NAMES)
            raise UsageError(f"{COMMAND}: without must be some of {known}, got {name!r}.")
    return tuple(SHORT_NAMES[name] for name in names)


def read_minutes(minutes: float | None) -> float | None:
    if minutes is not None and not 0 < minutes < float("inf"):
        raise UsageError(f"{COMMAND}: minutes must be above 0, got {minutes:g}.")
    return minutes


def _read_sizes(arguments: argparse.Namespace) -> tuple[list[int], list[torch.dtype]]:
    dtypes = [] if arguments.dtype is None else read_dtypes(COMMAND, arguments.dtype)
    return read_lengths(COMMAND, arguments.lengths), dtypes


def read_stored(
    command: str, text: str | None, device: torch.device, kind: str = ""
) -> Path | None:
    """Where a run is stored, if anywhere: a file, or a folder, in which no other kind's run is
    written over."""
    if text and Path(text).is_dir():
        text = str(Path(text) / f"{kind}{_file_name(device)}")
    return None if text is None else read_output(command, text)


def refuse_others(command: str, arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise for what was given and is another bench's."""
    for name in names:
        if getattr(arguments, name) not in (None, ()):
            raise UsageError(f"{command}: --{name} is for another bench.")


def _file_name(device: torch.device) -> str:
    """`nvidia-h200-2026-01-31.json`: the device and the day."""
    from ..bench import environment

    described = environment.describe(device)
    name = str(described["gpu"] or "cpu").lower()
    return f"{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}-{str(described['date']).split()[0]}.json"


def set_threads(command: str, threads: int | None) -> None:
    import torch

    if threads is not None and threads < 1:
        raise UsageError(f"{command}: threads must be at least 1, got {threads}.")
    torch.set_num_threads(threads or torch.get_num_threads())


# ---------------------------------------------------------------- what is shown


def _shape(row: Row) -> str:
    return f"B {row.case.B} H {row.case.H} D {row.case.D}"


def _print_result(result: Result) -> None:
    from ..bench.environment import describe_busy
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
    if busy := describe_busy(result.header):
        console.print_line(busy)


def print_gpu_result(result: GpuResult) -> None:
    from ..bench.gpu.words import TEXT_COLUMNS, describe_end, tabulate
    from . import console

    header = result.header
    machine = (
        f"{header['gpu']}, torch {header['torch']}, ceiling "
        f"{header['matrix_product_tflops']:.0f} TFLOP/s and {header['copy_gbps']:.0f} GB/s"
    )
    for name in dict.fromkeys(cell.grid for cell in result.cells):
        columns, rows = tabulate([cell for cell in result.cells if cell.grid == name])
        console.print_table(f"{name}: {machine}", columns, rows, texts=TEXT_COLUMNS)
    for line in describe_end(result):
        console.print_line(line)
