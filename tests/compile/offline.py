"""Compile the kernels that a call would launch, for a GPU that is not here, and read the result.

A call runs on CPU tensors with its launches recorded instead of made; each record is then compiled
as Triton would compile it, for any target, and the machine code is read.
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
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from tests.compile.sass import read_instructions
from tilewise.dense import choice, hopper_call, warm
from tilewise.kernels import launch as launching
from tilewise.kernels.launch import Config, compiler_options
from tilewise.linear import plan as linear_plan
from tilewise.linear import triton_call as linear_call
from tilewise.linear import warm as linear_warm
from tilewise.linear.machine_code import loses_an_operand


@dataclass(frozen=True)
class Target:
    """A GPU, the shared memory that a program may have there, and its matrix instruction for
    16-bit operands."""

    gpu: GPUTarget
    shared_kib: int
    mma: str


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163, "HMMA"),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 99, "HMMA"),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227, "HGMMA"),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227, "UTCHMMA"),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 99, "HMMA"),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64, "MFMA"),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 160, "MFMA"),
}
# Blackwell's tensor memory; a program that asks for more does not start.
TENSOR_MEMORY_COLUMNS = 512


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
    spilled vector registers (AMD). waits: for products of Hopper's warp groups. mma: the matrix
    instruction, "" where it uses none."""

    name: str
    registers: int
    spills: int
    waits: int
    shared_bytes: int
    tensor_columns: int
    mma: str


@contextmanager
def recorded(architecture: str) -> Iterator[list[Launch]]:
    """Collect launches as if on a GPU of that architecture."""
    records: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], config: Config, arguments: Any) -> None:
        records.append(Launch(kernel, config, tuple(arguments)))

    was = launching._run, launching._gpu_architecture
    problems = choice.triton_problem, choice.hopper_problem
    counted = hopper_call._multiprocessors, linear_call._multiprocessors
    launching._run = record
    launching._gpu_architecture = lambda device: architecture
    choice.triton_problem = lambda device: ""
    choice.hopper_problem = lambda device: "" if architecture == "sm_90" else "needs sm_90"
    hopper_call._multiprocessors = lambda device: 132
    linear_call._multiprocessors = lambda device: 132
    # What is kept of a call belongs to the device that it ran on.
    kept: list[dict[Any, Any]] = [warm._kept, linear_warm._kept, linear_plan._plans]
    for found in kept:
        found.clear()
    try:
        yield records
    finally:
        for found in kept:
            found.clear()
        launching._run, launching._gpu_architecture = was
        choice.triton_problem, choice.hopper_problem = problems
        hopper_call._multiprocessors, linear_call._multiprocessors = counted


def compile_call(call: Callable[[], Any], architecture: str, part: str = "") -> list[Compiled]:
    """Every binary that a call needs on such a GPU, in the order of its launches.

    part: of the names of those that are meant.
    """
    with recorded(architecture) as records:
        call()
    found = {}
    for record in records:
        if part not in record.name:
            continue
        key, source, options = _specialize(record, architecture)
        if key not in found:
            found[key] = _compile(record.name, source, options, architecture)
    return list(found.values())


def compiled_stage(launch: Launch, architecture: str, stage: str) -> Any:
    """What a launch's kernel is at a stage of the compiler: text, such as ptx, or a cubin."""
    _, source, options = _specialize(launch, architecture)
    compiled = triton.compile(source, target=TARGETS[architecture].gpu, options=options)
    return compiled.asm[stage]


def _specialize(launch: Launch, architecture: str) -> tuple[str, ASTSource, dict[str, Any]]:
    """A launch's kernel with just the specialisation that the launch would have, and a key."""
    kernel, backend = launch.kernel, make_backend(TARGETS[architecture].gpu)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = compiler_options(launch.config)
    bound, specialization, options = binder(*launch.arguments, debug=False, **options)
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constexprs, attrs)
    return f"{launch.name} {specialization} {options}", source, options.__dict__


def _compile(name: str, source: ASTSource, options: dict[str, Any], architecture: str) -> Compiled:
    target = TARGETS[architecture].gpu
    compiled = triton.compile(source, target=target, options=options)
    shared, columns = compiled.metadata.shared, getattr(compiled.metadata, "tmem_size", 0) or 0
    if architecture == "sm_90":
        assert not loses_an_operand(compiled.asm["cubin"]), name
    read = _read_amd if target.backend == "hip" else _read_nvidia
    registers, spills, waits, mma = read(
        compiled.asm["amdgcn" if target.backend == "hip" else "cubin"]
    )
    return Compiled(name, registers, spills, waits, shared, columns, mma)


def _read_nvidia(cubin: bytes) -> tuple[int, int, int, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = nvidia_tool("cuobjdump", "-res-usage", file.name)
    registers, stack = (_number(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK"))
    found = read_instructions(cubin)
    # A stack that nothing is stored to is not of spills.
    return registers, stack if found.is_local else 0, found.waits, found.mma


def nvidia_tool(name: str, *arguments: str) -> str:
    """The output of a tool that Triton brings."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def _read_amd(text: str) -> tuple[int, int, int, str]:
    registers, spills = (
        _number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")
    )
    return registers, spills, 0, "MFMA" if "v_mfma" in text else ""


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in the compiler's output"
    return int(found[1])
