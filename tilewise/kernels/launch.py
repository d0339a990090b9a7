"""Launching kernels: the one place that knows how Triton is called."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import _async_compile

from ..core.backends import is_interpreted
from .structs import Build, Operand


class Config(NamedTuple):
    """Tile sizes of one kernel, and what the compiler is told.

    max_registers: of a thread at launch, where warps share them out later; 0 for as many as needed.
    begins_early: before the launch before it ends, which the kernel itself has to wait for (NVIDIA
    from compute capability 9.0).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0
    begins_early: bool = False


# Of a kernel without tiles.
UNTILED = Config(0, 0, 4, 1)


def compiler_options(config: Config) -> dict[str, Any]:
    """What the compiler is told. Products and sums fuse: Triton 3.10 will not by itself."""
    warps, stages = config.num_warps, config.num_stages
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if config.max_registers:
        options["maxnreg"] = config.max_registers
    if config.begins_early:
        options["launch_pdl"] = True
    return options


def architecture_of(device: torch.device) -> str:
    """`sm_90`, `gfx942`, ..., or `interpreter`."""
    return "interpreter" if is_interpreted() else _gpu_architecture(device)


@lru_cache(maxsize=64)
def _gpu_architecture(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def multiprocessors_of(device: torch.device) -> int:
    """How many a GPU has; 1 in the interpreter, which runs a program at a time."""
    return 1 if is_interpreted() else _gpu_multiprocessors(device)


@lru_cache(maxsize=64)
def _gpu_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


class Launch(NamedTuple):
    """A launch to be made.

    tag: what else the binary is made for, as `TritonCall.launch` says.
    """

    kernel: Any
    grid: tuple[int, ...]
    config: Config
    arguments: tuple[Any, ...]
    tag: tuple[Any, ...] = ()


_compiled_together: set[Any] = set()


def compile_together(
    launches: Sequence[Launch], device: torch.device, *, loads: bool = True
) -> None:
    """Compile what several launches need side by side, where it is not compiled yet.

    Most of a first call is the compiler's time, and it would take the kernels one after the other.
    loads: make them ready to run, too.
    """
    launches = [x for x in launches if 0 not in x.grid]
    if device.type != "cuda" or is_interpreted() or not launches:
        return
    key = device, *((x.kernel, x.config, x.tag, _constants_of(x.arguments)) for x in launches)
    if key in _compiled_together:
        return
    # Somebody else's mode, which cannot be nested, compiles side by side as it is.
    if _async_compile.active_mode.get() is None:
        workers = ThreadPoolExecutor(len(launches), "tilewise", torch.cuda.set_device, (device,))
        with torch.cuda.device(device), workers:
            with triton.AsyncCompileMode(workers):
                kernels = [
                    x.kernel.warmup(*x.arguments, grid=x.grid, **compiler_options(x.config))
                    for x in launches
                ]
            if loads:
                # The C that launches a binary is compiled too, when `run` is first read.
                list(workers.map(_make_launcher, kernels))
    if loads:
        _compiled_together.add(key)


_ahead: list[Future[None]] = []


def compile_ahead(launches: Sequence[Launch], device: torch.device) -> None:
    """Begin to compile what launches to come need, in a thread of its own.

    Nothing is loaded: a CUDA graph that is captured meanwhile would not allow it.
    """
    if device.type != "cuda" or is_interpreted():
        return
    worker = ThreadPoolExecutor(1, "tilewise")
    _ahead.append(worker.submit(compile_together, launches, device, loads=False))
    worker.shutdown(wait=False)


def finish_ahead() -> None:
    """Wait for what `compile_ahead` began: two threads would compile a kernel twice."""
    while _ahead:
        # What failed to compile is said by the launch that needs it.
        _ahead.pop().exception()


def _make_launcher(kernel: Any) -> None:
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    if compiled is not None:
        compiled.run  # noqa: B018


def _constants_of(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """What mostly settles the binary; a kernel that it misses is compiled when it is launched."""
    kinds = (getattr(x.ptr, "dtype", False) if isinstance(x, Operand) else x for x in arguments)
    return tuple(x for x in kinds if isinstance(x, (bool, Build, torch.dtype)))


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    config: Config,
    arguments: Sequence[Any],
    device: torch.device,
) -> Any:
    """Run a grid of a kernel's programs on a device's current stream.

    Returns: the compiled kernel for `relaunch`; None where there is none.
    """
    if 0 in grid:
        return None
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _run(kernel, grid, config, arguments)
    return _run(kernel, grid, config, arguments)


def relaunch(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device
) -> None:
    """Run a compiled kernel again, on other tensors of the same alignment and the same numbers.

    Looking it up by its arguments costs as much host time as the launch itself. A tensor may be
    given as its address, which the driver then need not be asked about.
    """
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _run_again(compiled, grid, arguments, device)
    else:
        _run_again(compiled, grid, arguments, device)


def _run_again(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], device: torch.device
) -> None:
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*arguments)
        return
    # What `compiled[grid]` does where nobody, such as a profiler, wants to be told of launches.
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    metadata = compiled.packed_metadata, None, None, None
    compiled.run(*grid, stream, compiled.function, *metadata, *arguments)


def _run(kernel: Any, grid: tuple[int, ...], config: Config, arguments: Sequence[Any]) -> Any:
    return kernel[grid](*arguments, **compiler_options(config))
