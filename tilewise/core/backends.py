"""Backend names, the devices that are here, and reasons in words.

Each op's `api.py` owns its table of backends; this module only knows what a choice looks like.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch

# Ampere: the first with the matrix units and the asynchronous copies that the kernels count on.
OLDEST_CAPABILITY = (8, 0)
# Instructions of sm_90a: no later GPU has them.
HOPPER_CAPABILITY = (9, 0)
OLDEST_TRITON = (3, 6)


@dataclass(frozen=True)
class BackendChoice:
    """Which backend runs a call, why, and why the others do not."""

    name: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}"]
        lines += [f"not {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def check_backend_name(op: str, name: str, known: tuple[str, ...]) -> None:
    if name != "auto" and name not in known:
        raise ValueError(
            f"{op}: backend must be one of {', '.join(('auto', *known))}, got {name!r}."
        )


def describe_device(device: torch.device) -> str:
    """A device in words, with the GPU's name where there is one."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU.

    As Triton itself reads TRITON_INTERPRET; settled when kernels are imported.
    """
    return _wants_interpreter() and find_spec("triton") is not None


def _wants_interpreter() -> bool:
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def triton_problem(device: torch.device) -> str:
    """Why Triton's kernels cannot run on a device, as a verb phrase; empty where they can.

    torch.compile asks once, while it traces: what is installed is nothing that it could trace.
    """
    if device.type == "cpu" and not _wants_interpreter():
        return "needs a GPU, or TRITON_INTERPRET=1 to be interpreted on the CPU"
    if find_spec("triton") is None:
        return "needs Triton, which is not installed (pip install 'tilewise[gpu]')"
    if device.type not in ("cpu", "cuda"):
        return f"is not made for the device {device.type}"
    fault = _triton_fault()
    if fault or device.type == "cpu":
        return fault
    if is_interpreted():
        return "is interpreted (TRITON_INTERPRET), on the CPU only"
    return _gpu_problem(device)


@lru_cache(maxsize=1)
def _triton_fault() -> str:
    """What is wrong with the installed Triton, tried once."""
    try:
        # By name: the core itself rests on torch alone, and asks only where kernels would run.
        version = str(import_module("triton").__version__)
    except Exception as error:
        return f"needs Triton, which does not import: {error}"
    numbers = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    if numbers >= OLDEST_TRITON:
        return ""
    return f"needs Triton {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]} or newer, and this is {version}"


def hopper_problem(device: torch.device) -> str:
    """Why Hopper's own kernels cannot run on a device; as `triton_problem`."""
    if device.type != "cuda":
        return f"needs a Hopper GPU (sm_90), and this device is {device.type}"
    return triton_problem(device) or _not_hopper(device)


@lru_cache(maxsize=64)
def _not_hopper(device: torch.device) -> str:
    if torch.version.hip:
        return "needs a Hopper GPU (sm_90), and this one is AMD's"
    major, minor = torch.cuda.get_device_capability(device)
    is_hopper = (major, minor) == HOPPER_CAPABILITY
    return "" if is_hopper else f"needs a Hopper GPU (sm_90), and this one is sm_{major}{minor}"


@lru_cache(maxsize=64)
def _gpu_problem(device: torch.device) -> str:
    if torch.version.hip:
        return ""
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= OLDEST_CAPABILITY:
        return ""
    return f"needs sm_80 (Ampere) or newer, and this GPU is sm_{major}{minor}"
