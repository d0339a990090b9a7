"""What a peer compiles, compiled beforehand: a process for each cell, several at a time.

flash-linear-attention tries many configurations of each kernel and compiles them one after the
other, which takes minutes. Here nothing is timed: what it found best beside others would be of
little worth, so it is not kept, and the run itself tries them again, compiled by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ..environment import count_cores
from ..progress import Progress
from .cells import BOTH, Cell
from .contestants import FLA, Contestant, enlist, lift_guard, run_once, theirs

_LOOK_S = 0.2


def compile_ahead(
    cells: Sequence[Cell],
    known: list[Contestant],
    device: torch.device,
    progress: Progress,
    *,
    deadline: float | None = None,
) -> None:
    """Until all are compiled, or `time.monotonic()` is past the deadline. What fails here is said
    by the cell's own first call."""
    asked = [x for x in cells if any(who.name == FLA for who in enlist(x, known))]
    if not asked:
        return
    progress.stage(f"compiling what {FLA} needs", len(asked))
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0"}
    # Half of them: a compiler runs beside each.
    n_workers = max(1, count_cores() // 2)
    running: dict[subprocess.Popen[bytes], Cell] = {}
    try:
        while asked or running:
            if deadline is not None and time.monotonic() > deadline:
                return
            while asked and len(running) < n_workers:
                cell = asked.pop(0)
                command = [sys.executable, "-m", __name__, json.dumps(cell.as_json()), str(device)]
                quiet = subprocess.DEVNULL
                started = subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet)
                running[started] = cell
            for process in [x for x in running if x.poll() is not None]:
                cell = running.pop(process)
                progress.step(f"{cell}, which failed" if process.returncode else str(cell))
            time.sleep(_LOOK_S)
    finally:
        for process in running:
            process.kill()
            process.wait()


def call_once(cell: Cell, device: torch.device) -> None:
    """The peer's calls that a cell makes: the short one that is judged, and its own."""
    for form in (cell.short(), cell):
        x = form.draw(device)
        for _ in range(2):
            try:
                if BOTH in cell.directions:
                    run_once(theirs, form.op, x, torch.randn_like(x["v"]))
                else:
                    theirs(form.op, **x)
                break
            except RuntimeError as error:
                if not lift_guard(error):
                    raise


if __name__ == "__main__":
    call_once(Cell.of_json(json.loads(sys.argv[1])), torch.device(sys.argv[2]))
