"""Which backend runs a call of dense attention, and why not another."""

from __future__ import annotations

from torch import Tensor

from ..core.backends import BackendChoice, check_backend_name, describe_device, triton_problem

BACKENDS = ("reference", "tiled", "triton")
# What an int32 index inside the kernels can hold, with room for the sums of a few.
_MOST_ROWS = 1 << 28
_LARGEST_DIM = 256
_KERNEL_DTYPES = ("float16", "bfloat16", "float32")


def choose(op: str, backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not, NotImplementedError where the named one cannot.
    """
    check_backend_name(op, backend, BACKENDS)
    if backend == "auto":
        is_on_gpu = q.device.type not in ("cpu", "meta")
        return "triton" if is_on_gpu and not why_not_triton(q, k, v) else "tiled"
    if backend == "triton":
        problem = why_not_triton(q, k, v)
        if problem:
            raise NotImplementedError(f"{op}: backend 'triton' {problem}; use backend='tiled'.")
    return backend


def why_not_triton(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Why the triton backend cannot run a call, as a verb phrase; empty where it can."""
    if q.device.type == "meta":
        return ""
    dtype = str(q.dtype).removeprefix("torch.")
    if dtype not in _KERNEL_DTYPES:
        return f"computes {', '.join(_KERNEL_DTYPES)}, not {dtype}"
    if max(q.shape[-1], v.shape[-1]) > _LARGEST_DIM:
        return f"takes head dims up to {_LARGEST_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    if max(q.shape[-3], k.shape[-3]) >= _MOST_ROWS:
        return f"counts rows up to {_MOST_ROWS}, got {q.shape[-3]} and {k.shape[-3]}"
    return triton_problem(q.device)


def explain(op: str, backend: str, q: Tensor, k: Tensor, v: Tensor) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, q, k, v), describe_device(q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {"reference": "the O(M N) oracle runs only when it is named"}
    if name == "triton":
        rejected["tiled"] = "plain torch tiles are slower on a GPU"
        return BackendChoice(name, f"Triton's kernels run here, on {where}", rejected)
    problem = why_not_triton(q, k, v)
    rejected["triton"] = problem or "on the CPU it only interprets, which is slow"
    return BackendChoice(name, f"plain torch tiles run on any device, here {where}", rejected)
