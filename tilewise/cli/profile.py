"""`tilewise profile`: one call of attention, and plain attention, under PyTorch's profiler."""

from __future__ import annotations

import argparse
from typing import Any

from .explain import add_shape, read_request
from .options import (
    UsageError,
    add_device,
    add_json,
    read_device,
    read_folder,
    why_no_kernels,
)

COMMAND = "tilewise profile"


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile", help="break a call down by kernel on a GPU, beside plain attention"
    )
    add_shape(parser)
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        default=".",
        help="where the Chrome traces go (default: here); chrome://tracing or Perfetto opens them",
    )
    add_device(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    device = read_device(COMMAND, arguments.device)
    if device.type != "cuda":
        why = why_no_kernels() or "The device named is the CPU."
        raise UsageError(f"{COMMAND}: needs a GPU that the kernels run on. {why}")
    request = read_request(COMMAND, arguments)
    folder = read_folder(COMMAND, arguments.output)

    from ..report import profile
    from ..report.explain.measure import verified_backend
    from . import console

    try:
        backend = verified_backend(request, device)
        found = profile.run(request, device, folder, backend)
    except RuntimeError as error:
        # Out of memory, or a backend that is not right here: a call that cannot be profiled.
        console.print_line(f"{COMMAND}: {str(error).splitlines()[0]}")
        return 1
    if arguments.json:
        console.print_json(found.as_json())
        return 0
    for table in profile.tabulate(found):
        console.print_table(table.title, table.columns, table.rows, texts=table.texts)
    for line in profile.sentences(found):
        console.print_line(line)
    for path in found.traces:
        console.print_line(f"Trace: {path}")
    return 0
