"""Extra memory of a call: the most bytes alive above what was there before it, result included.

On the CPU torch's profiler reports every allocation and release of torch's allocator, also inside
ops and registered custom ops; on a GPU the caching allocator keeps the mark itself. What does not
come from torch's allocator (a BLAS library's packing buffers, say) shows only in the resident
set, which `resident_extra_bytes` reads as a cross-check.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from .cases import Case
from .peers import PEERS, bind


@dataclass(frozen=True)
class Observation:
    """One call watched: its peak above what existed before, and how often each torch op ran."""

    peak_bytes: int
    ops: Counter[str]


def observe(call: Callable[[], Any], device: torch.device) -> Observation:
    """Run the call once under the profiler. Not for timing."""
    # Kineto writes two lines to stderr at each profile, at a level above errors. It reads this
    # once, at the first profile.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with profile(use_kineto=False, profile_memory=True) as recorded:
        result = call()
    # Kept until here: its bytes count.
    del result
    events = recorded.kineto_results.events()
    ops = Counter(event.name() for event in events)
    if device.type == "cuda":
        return Observation(torch.cuda.max_memory_allocated(device) - before, ops)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        live += change
        peak = max(peak, live)
    return Observation(peak, ops)


def available_bytes(device: torch.device) -> int:
    """What can still be allocated, as far as the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def resident_extra_bytes(peer: str, case: Case, threads: int) -> int | None:
    """How much the resident set of a fresh process grows at its peak in one call; CPU only.

    None where the system keeps no mark that can be reset (anything but Linux), or where the
    process was ended, as the kernel does when memory runs out.
    """
    question = {"peer": peer, "threads": threads, "case": _as_json(case)}
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(question)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode < 0:
        return None
    if done.returncode != 0:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr.strip()}")
    answer: int | None = json.loads(done.stdout)
    return answer


def _as_json(case: Case) -> dict[str, Any]:
    return {**vars(case), "dtype": case.dtype_name}


def _answer(question: dict[str, Any]) -> int | None:
    torch.set_num_threads(question["threads"])
    fields = question["case"]
    fields |= {"dtype": getattr(torch, fields["dtype"]), "documents": tuple(fields["documents"])}
    case = Case(**fields)
    peer = next(peer for peer in PEERS if peer.name == question["peer"])
    device = torch.device("cpu")
    # Libraries load and set up their threads in a small call, which is not counted.
    bind(peer, case.verified_form(), device)()
    call = bind(peer, case, device)
    before = _reset_resident_mark()
    if before is None:
        return None
    result = call()
    peak = _read_status("VmHWM")
    del result
    return max(0, peak - before)


def _reset_resident_mark() -> int | None:
    """Start the high-water mark anew and return the resident set, in bytes.

    `ru_maxrss` will not do: a process inherits it from the one that started it.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _read_status("VmRSS")
    except OSError:
        return None


def _read_status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(_answer(json.loads(sys.argv[1]))))
