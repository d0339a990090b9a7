"""Which backend runs a call over a cache, and why not another."""

from __future__ import annotations

import torch

from ..core.backends import BackendChoice, check_backend_name, describe_device, triton_problem
from .cache import FLOAT8
from .call import CacheCall

BACKENDS = ("reference", "tiled", "triton")
LARGEST_DIM = 1024
# What an int32 index inside the kernels can hold, with room for the sums of a few.
MOST_ROWS = 1 << 28


def choose(op: str, backend: str, call: CacheCall) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not, NotImplementedError where the named one cannot.
    """
    check_backend_name(op, backend, BACKENDS)
    if backend == "auto":
        if call.q.device.type in ("cpu", "meta"):
            return "tiled"
        return "tiled" if why_not_triton(call) else "triton"
    problem = why_not_triton(call) if backend == "triton" else ""
    if problem:
        raise NotImplementedError(f"{op}: backend 'triton' {problem}; use backend='tiled'.")
    return backend


def why_not_triton(call: CacheCall) -> str:
    """Why the triton backend cannot run a call, as a verb phrase; empty where it can."""
    q, cache = call.q, call.cache
    if q.device.type == "meta":
        return ""
    if q.dtype == torch.float64:
        return "computes float16, bfloat16, float32, not float64"
    # Three products for one of fp32 leave no registers for more.
    largest = 256 if q.dtype == torch.float32 else LARGEST_DIM
    D, E = cache.k.shape[3], cache.v.shape[3]
    if max(D, E) > largest:
        return f"takes head dims up to {largest} for {q.dtype}, got {D} and {E}"
    if cache.capacity >= MOST_ROWS or q.shape[-3] >= MOST_ROWS:
        return f"counts rows up to {MOST_ROWS}, got {cache.capacity} and {q.shape[-3]}"
    if cache.k.stride(-1) != 1 or cache.v.stride(-1) != 1:
        return "reads caches whose head dims are contiguous"
    problem = triton_problem(q.device)
    if problem:
        return problem
    from .triton_call import SplitMask

    if SplitMask.of(call.mask) is None:
        from .dense_call import why_not_dense

        problem = why_not_dense(call)
        if problem:
            return f"takes only windows, key ranges and trees as masks, for any other {problem}"
    return _float8_problem(call)


def _float8_problem(call: CacheCall) -> str:
    """Which GPUs know a float8 cache's dtype."""
    device, dtype = call.q.device, call.cache.k.dtype
    if device.type != "cuda" or dtype not in FLOAT8:
        return ""
    if torch.version.hip:
        return "reads no float8 cache on AMD GPUs"
    if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) < (8, 9):
        return "reads float8_e4m3fn caches from sm_89 on"
    return ""


def explain(op: str, backend: str, call: CacheCall) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, call), describe_device(call.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {"reference": "the oracle runs only when it is named"}
    if name == "triton":
        from .dense_call import takes

        rejected["tiled"] = "plain torch tiles are slower on a GPU"
        kernel = "dense attention's kernel" if takes(call) else "Triton's split-KV kernel"
        return BackendChoice(name, f"{kernel} runs here, on {where}", rejected)
    problem = why_not_triton(call)
    rejected["triton"] = problem or "on the CPU it only interprets, which is slow"
    return BackendChoice(name, f"plain torch tiles run on any device, here {where}", rejected)
