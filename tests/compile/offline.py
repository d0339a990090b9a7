"""Compile the kernels that a call would launch, for a GPU that is not here, and read the result.

A call runs on CPU tensors with its launches recorded instead of made; each record is then compiled
as Triton would compile it, for any target, and the machine code is read with Triton's own tools.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from tilewise.kernels import launch as launching
from tilewise.kernels.launch import Config

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


@dataclass(frozen=True)
class Launch:
    """A launch that was not made."""

    kernel: Any
    config: Config
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_").removesuffix("_kernel")


@dataclass(frozen=True)
class Compiled:
    """What came of a launch. registers and spills are for each thread; spills in bytes (NVIDIA), or
    spilled vector registers (AMD). mma: which matrix instructions it uses."""

    name: str
    registers: int
    spills: int
    shared_bytes: int
    mma: str


@contextmanager
def recorded(architecture: str) -> Iterator[list[Launch]]:
    """Collect launches as if on a GPU of that architecture."""
    records: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], config: Config, arguments: Any) -> None:
        records.append(Launch(kernel, config, tuple(arguments)))

    was = launching._run, launching._gpu_architecture
    launching._run = record
    launching._gpu_architecture = lambda device: architecture
    try:
        yield records
    finally:
        launching._run, launching._gpu_architecture = was


def record_call(call: Callable[[], Any], architecture: str) -> list[Launch]:
    """The launches of a call, each kind of kernel once."""
    with recorded(architecture) as records:
        call()
    return list({record.name: record for record in records}.values())


def compile_launch(launch: Launch, architecture: str) -> Compiled:
    """Compile a launch's kernel with just the specialisation that the launch would have."""
    target = TARGETS[architecture]
    kernel, backend = launch.kernel, make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = {"num_warps": launch.config.num_warps, "num_stages": launch.config.num_stages}
    bound, specialization, options = binder(*launch.arguments, debug=False, **options)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    source = ASTSource(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    shared = compiled.metadata.shared
    if target.backend == "hip":
        return _read_amd(launch.name, compiled.asm["amdgcn"], shared)
    return _read_nvidia(launch.name, compiled.asm["cubin"], shared)


def _read_nvidia(name: str, cubin: bytes, shared_bytes: int) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output(tool, "-res-usage", file.name)
        sass = _output(tool, "-sass", file.name)
    registers = int(re.search(r"REG:(\d+)", usage)[1])  # type: ignore[index]
    stack = int(re.search(r"STACK:(\d+)", usage)[1])  # type: ignore[index]
    local = len(re.findall(r"\b(?:STL|LDL)\b", sass))
    found = {kind for kind in ("UTCHMMA", "HGMMA", "HMMA", "FFMA") if f"{kind}" in sass}
    mma = next((kind for kind in ("UTCHMMA", "HGMMA", "HMMA") if kind in found), "FFMA")
    return Compiled(name, registers, stack if local else 0, shared_bytes, mma)


def _read_amd(name: str, text: str, shared_bytes: int) -> Compiled:
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
    spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
    return Compiled(name, registers, spills, shared_bytes, "MFMA" if "v_mfma" in text else "FMA")


def _output(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
