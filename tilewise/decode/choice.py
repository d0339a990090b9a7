"""Which backend runs a call over a cache, and why not another."""

from __future__ import annotations

import torch

from ..core.backends import BackendChoice, check_backend_name, describe_device, triton_problem
from .call import CacheCall

BACKENDS = ("reference", "tiled", "triton")


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
    return "is not built yet for caches" if call else ""


def explain(op: str, backend: str, call: CacheCall) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, call), describe_device(call.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {"reference": "the oracle runs only when it is named"}
    if name == "triton":
        rejected["tiled"] = "plain torch tiles are slower on a GPU"
        return BackendChoice(name, f"Triton's split-KV kernel runs here, on {where}", rejected)
    problem = why_not_triton(call)
    rejected["triton"] = problem or "on the CPU it only interprets, which is slow"
    return BackendChoice(name, f"plain torch tiles run on any device, here {where}", rejected)
