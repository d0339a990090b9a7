"""`tilewise bench decode` and `tilewise bench mla`: attention over caches beside its peers."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ..bench.decode.run import DecodeResult

COLUMNS = ("case", "contestant", "us", "GB/s", "% of read", "TFLOP/s", "x best peer", "host us", "")


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    """Measure, print, store. Exit code 1 where ours was wrong."""
    from ..bench import environment
    from ..bench.decode.cases import decode_cases, mla_cases
    from ..bench.decode.peers import find_peers
    from ..bench.decode.run import HostMeter
    from ..bench.decode.run import run as run_bench
    from ..bench.stored import write_whole
    from . import console
    from .bench import read_minutes, read_stored, refuse_others

    command = f"tilewise bench {arguments.what}"
    refuse_others(
        command, arguments, ("grid", "backend", "without", "ranks", "trace", "dtype", "lengths")
    )
    output = read_stored(command, arguments.output, device, f"{arguments.what}-")
    minutes = read_minutes(arguments.minutes)
    on_gpu = device.type == "cuda"
    make = decode_cases if arguments.what == "decode" else mla_cases
    peers, absent = find_peers(device)
    header = environment.describe(device)

    def document(result: DecodeResult) -> dict[str, Any]:
        return {
            "command": f"bench {arguments.what}",
            "header": header,
            "missing_peers": absent,
            "left_out": result.left_out,
            "rows": [row.as_json() for row in result.rows],
        }

    def store(result: DecodeResult) -> None:
        if output is not None:
            write_whole(output, document(result))

    meter: Any = HostMeter()
    if on_gpu:
        from ..bench.gpu.meter import CudaMeter

        meter = CudaMeter(device)
    with console.open_progress() as progress, meter.active() if on_gpu else nullcontext():
        result = run_bench(
            make(on_gpu, arguments.quick), peers, device, progress, meter,
            rounds=3 if arguments.quick else 7, minutes=minutes, store=store,
        )  # fmt: skip
    store(result)
    if arguments.json:
        console.print_json(document(result))
        return 1 if result.has_failed else 0
    _print(result, str(header["gpu"] or header["cpu"]), absent, arguments.what)
    return 1 if result.has_failed else 0


def _print(result: DecodeResult, machine: str, absent: dict[str, str], what: str) -> None:
    from . import console

    def show(value: float | None, digits: int = 0) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    lines = []
    for row in result.rows:
        name = f"{row.contestant} ({row.version})" if row.version else row.contestant
        lines.append(
            [str(row.case), name, show(row.us, 1), show(row.gbps), show(row.percent_of_read, 1),
             show(row.tflops, 1), show(row.x_best_peer, 3), show(row.host_us, 1), row.note]
        )  # fmt: skip
    console.print_table(f"{what}: {machine}", list(COLUMNS), lines, texts=2)
    for name, why in absent.items():
        console.print_line(f"Not in the table: {name}: {why}.")
    for name in result.left_out:
        console.print_line(f"Left out for want of time: {name}.")
