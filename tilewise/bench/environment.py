"""Where a result was obtained: machine, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import __version__

_PACKAGE = Path(__file__).resolve().parents[1]


def describe(device: torch.device) -> dict[str, str | int | float | None]:
    """What a result must carry to be read later; `threads` as torch is set right now, `load` how
    many threads of all processes wanted a core in the last minute."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": str(device),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": count_cores(),
        "load": _load(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tilewise": __version__,
        "commit": _commit(),
    }


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe_busy(facts: Mapping[str, Any]) -> str:
    """A sentence where so much else ran that times mean little; empty where not, or not known."""
    load, cores = facts.get("load"), facts.get("cores")
    # This process itself may want every core.
    if not load or not cores or load <= 1.5 * cores:
        return ""
    return (
        f"The machine was busy, {load:g} threads on {cores} cores: do not compare these times; "
        "with OMP_NUM_THREADS=1 they suffer least."
    )


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _load() -> float | None:
    try:
        return round(os.getloadavg()[0], 1)
    except (AttributeError, OSError):
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that this package lies in, marked where files differ from it."""
    root = _git("rev-parse", "--show-toplevel")
    if root is None or Path(root).resolve() != _PACKAGE.parent:
        return None
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit} with changes" if commit and _git("status", "--porcelain", "-uno") else commit


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_PACKAGE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
