"""Which backend runs a call of linear attention, and why not another."""

from __future__ import annotations

from ..core.backends import (
    BackendChoice,
    check_backend_name,
    describe_device,
    triton_problem,
)
from .inputs import Inputs

# eager: the oracle's recurrence in the inputs' precision, which the error budget is measured by.
BACKENDS = ("reference", "eager", "recurrent", "tiled", "triton")
LARGEST_DIM = 256
# Whether "auto" takes Triton's kernels: only as they last passed the GPU suite.
AUTO_TAKES_TRITON = True


def choose(op: str, backend: str, inputs: Inputs) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not, NotImplementedError where the named one cannot.
    """
    check_backend_name(op, backend, BACKENDS)
    if backend == "auto":
        if inputs.q.device.type in ("cpu", "meta"):
            return "tiled"
        return "triton" if AUTO_TAKES_TRITON and not why_not_triton(inputs) else "tiled"
    problem = why_not_triton(inputs) if backend == "triton" else ""
    if problem:
        raise NotImplementedError(f"{op}: backend 'triton' {problem}; use backend='tiled'.")
    return backend


def why_not_triton(inputs: Inputs) -> str:
    """Why the triton backend cannot run a call, as a verb phrase; empty where it can."""
    if inputs.q.device.type == "meta":
        return ""
    dtype = str(inputs.q.dtype).removeprefix("torch.")
    if dtype not in ("float16", "bfloat16", "float32"):
        return f"computes float16, bfloat16, float32, not {dtype}"
    D, E = inputs.q.shape[-1], inputs.v.shape[-1]
    if max(D, E) > LARGEST_DIM:
        return f"takes head dims up to {LARGEST_DIM}, got {D} and {E}"
    return triton_problem(inputs.q.device)


def explain(op: str, backend: str, inputs: Inputs) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, inputs), describe_device(inputs.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {
        "reference": "the fp64 oracle runs only when it is named",
        "recurrent": "step by step it is slower than by chunks",
    }
    if name == "triton":
        rejected["tiled"] = "plain torch is slower on a GPU"
        return BackendChoice(name, f"Triton's kernels run here, on {where}", rejected)
    untaken = "" if AUTO_TAKES_TRITON else "its kernels have not passed the GPU suite"
    on_cpu = "on the CPU it only interprets, which is slow"
    rejected["triton"] = why_not_triton(inputs) or untaken or on_cpu
    return BackendChoice(name, f"plain torch runs on any device, here {where}", rejected)
