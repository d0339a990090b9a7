"""What a launch compiles to: registers, spills and shared memory, for a GPU that need not be here.

Triton compiles for any GPU it knows, and its NVIDIA builds bring the tool that reads the result.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .gpus import Gpu
from .plan import Launch


@dataclass(frozen=True)
class Binary:
    """Of one launch. registers: of a thread, as launched; spill_bytes: of a thread, where the
    compiler says so. shared_bytes: of a program."""

    registers: int | None
    spill_bytes: int | None
    shared_bytes: int


def compile_launch(launch: Launch, gpu: Gpu) -> Binary:
    """Compile with just the specialisation that the launch would have."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.jit import create_function_from_signature

    from ...kernels.launch import compiler_options

    is_amd = gpu.architecture.startswith("gfx")
    target = (
        GPUTarget("hip", gpu.architecture, 64)
        if is_amd
        else GPUTarget("cuda", int(gpu.architecture.removeprefix("sm_")), 32)
    )
    kernel, backend = launch.kernel, make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(
        *launch.arguments, debug=False, **compiler_options(launch.config)
    )
    options, signature, constexprs, attrs = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    make: Any = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constexprs, attrs)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    shared = int(compiled.metadata.shared)
    if is_amd:
        text = compiled.asm["amdgcn"]
        registers, spills = (
            _number(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count")
        )
        return Binary(registers, None if spills is None else 4 * spills, shared)
    usage = _usage(compiled.asm["cubin"])
    registers, stack = (_number(rf"\b{name}:(\d+)", usage) for name in ("REG", "STACK"))
    return Binary(registers, stack, shared)


def _usage(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return found.stdout


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else int(found[1])
