"""`tilewise doctor`: what is installed, and which backends work here and why not."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .options import EXTRAS, INSTALL_EXTRAS, add_json, missing_extras, why_no_kernels

if TYPE_CHECKING:
    import torch

_WORKS = "ran forward and backward, within its error budget"
_ON_ROCM = "; on ROCm no release was tested, so run tilewise verify --all before relying on it"
_PACKAGES = ("torch", "triton", "transformers", "rich", "numpy")


def add_command(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor", help="say what is installed, and which backends work here and why not"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..bench import environment
    from . import console
    from .options import default_device

    device = default_device()
    facts = environment.describe(device)
    versions = {name: environment.version_of(name) for name in _PACKAGES}
    gpus = list_gpus()
    backends = try_backends()
    extras = {
        extra: {name: find_spec(name) is not None for name in names}
        for extra, names in {**EXTRAS, "gpu": ("triton",)}.items()
    }
    is_well = all(backend["status"] != "broken" for backend in backends)
    if arguments.json:
        console.print_json(
            {
                "command": "doctor",
                "environment": facts,
                "packages": versions,
                "gpus": gpus,
                "backends": backends,
                "extras": extras,
            }
        )
        return 0 if is_well else 1
    machine = [(name.replace("_", " "), str(value)) for name, value in facts.items() if value]
    machine += [
        (n, version or "not installed") for n, version in versions.items() if n not in facts
    ]
    machine += [("GPU", gpu) for gpu in gpus or ["torch sees none"]]
    console.print_table("This machine", ("what", "here"), machine, texts=2)
    console.print_table(
        "Backends",
        ("backend", "device", "status", "why"),
        [tuple(backend.values()) for backend in backends],
        texts=4,
    )
    console.print_table(
        "Extras",
        ("extra", "package", "installed"),
        [
            (extra, name, "yes" if is_here else "no")
            for extra, names in extras.items()
            for name, is_here in names.items()
        ],
        texts=3,
    )
    if missing_extras():
        console.print_line(f"{INSTALL_EXTRAS} brings what is missing.")
    return 0 if is_well else 1


def list_gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory_gb = properties.total_memory / 1e9
        capability = f"sm_{properties.major}{properties.minor}"
        found.append(f"cuda:{index} {properties.name}, {capability}, {memory_gb:.0f} GB")
    return found


def try_backends() -> list[dict[str, str]]:
    """Each backend on each device, by running it: name, device, status, why."""
    import torch

    from ..dense.choice import BACKENDS

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", 0))
    found = []
    for name in BACKENDS:
        if name == "triton":
            found += try_triton()
        elif name == "hopper":
            found.append(try_hopper())
        else:
            found += [_row(name, device, try_backend(name, device)) for device in devices]
    return found


def try_triton() -> list[dict[str, str]]:
    """The triton backend on the GPU, or why there is none; in Triton's interpreter if asked."""

    import torch

    from ..core.backends import is_interpreted

    found = []
    problem = why_no_kernels()
    if problem:
        found.append({"name": "triton", "device": "cuda", "status": "absent", "why": problem})
    else:
        device = torch.device("cuda", 0)
        row = _row("triton", device, try_backend("triton", device))
        if torch.version.hip is not None:
            row["why"] += _ON_ROCM
        found.append(row)
    if is_interpreted():
        cpu = torch.device("cpu")
        found.append(_row("triton", cpu, try_backend("triton", cpu)))
    return found


def try_hopper() -> dict[str, str]:
    """The hopper backend on the GPU, or why there is none."""
    import torch

    from ..core.backends import hopper_problem

    device = torch.device("cuda", 0)
    problem = why_no_kernels()
    if not problem:
        problem = hopper_problem(device)
        problem = problem and f"The hopper backend {problem}."
    if problem:
        return {"name": "hopper", "device": "cuda", "status": "absent", "why": problem}
    return _row("hopper", device, try_backend("hopper", device))


def _row(name: str, device: torch.device, problem: str) -> dict[str, str]:
    status, why = ("broken", problem) if problem else ("works", _WORKS)
    return {"name": name, "device": str(device), "status": status, "why": why}


def try_backend(name: str, device: torch.device) -> str:
    """What is wrong with a small call of attention, forward and backward; empty if nothing is."""
    import torch

    from ..catalog import OPS
    from ..report.verify import verify_case

    op = next(op for op in OPS if op.name == "attention")
    dtype = torch.bfloat16 if name == "hopper" else torch.float32
    case = op.load("cases")(op.name, dtype, device)[0]
    try:
        reports = verify_case(op, case, name)
    except Exception as error:
        # Whatever a backend raises is what is wrong with it.
        return f"{type(error).__name__}: {error}"
    return "; ".join(str(report) for report in reports if not report.is_within)
