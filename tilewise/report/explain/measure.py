"""Times of the call on the GPU that is here, after its backend was verified."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from .request import Request

_WARM_UPS, _ROUNDS = 3, 15
# Of the catalog: what verifies the backend that is then timed.
_CASE = "causal, several tiles"


def inputs(request: Request, device: torch.device) -> dict[str, Any]:
    """Random q, k, v that need gradients, and the other arguments of attention."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = {
        "q": (request.B, request.M, request.H, request.D),
        "k": (request.B, request.N, request.G, request.D),
        "v": (request.B, request.N, request.G, request.E),
    }
    tensors: dict[str, Any] = {
        name: torch.randn(shape, dtype=request.dtype, device=device, generator=generator)
        for name, shape in shapes.items()
    }
    for x in tensors.values():
        x.requires_grad_()
    terms = request.score_terms(str(device))
    return {**tensors, "mask": request.mask, **terms}


def verified_backend(request: Request, device: torch.device) -> str:
    """The backend that takes the call, after a call of the catalog on it was within budget.

    Raises: RuntimeError where it was not.
    """
    from ...catalog import OPS
    from ...dense.api import explain_backend
    from ..verify import verify_case

    given = inputs(request, device)
    q, k, v = (given.pop(name) for name in "qkv")
    name = explain_backend(q, k, v, **given).name
    op = next(op for op in OPS if op.name == "attention")
    case = next(x for x in op.load("cases")(op.name, request.dtype, device) if x.name == _CASE)
    failed = [str(x) for x in verify_case(op, case, name) if not x.is_within]
    if failed:
        raise RuntimeError(f"{name} is not within its error budget here: {failed[0]}")
    return name


def measure(request: Request, device: torch.device | None = None) -> dict[str, float]:
    """Microseconds of a forward and of a backward, medians."""
    from ...dense.api import attention

    device = torch.device("cuda") if device is None else device
    verified_backend(request, device)
    given = inputs(request, device)
    q, k, v = (given.pop(name) for name in "qkv")
    out = attention(q, k, v, **given)
    dout = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    with torch.no_grad():
        forward_us = _median_us(lambda: attention(q, k, v, **given), device)
    return {"forward": forward_us, "backward": _median_us(backward, device)}


def _median_us(call: Callable[[], Any], device: torch.device) -> float:
    for _ in range(_WARM_UPS):
        call()
    times = []
    for _ in range(_ROUNDS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(stop))
    return statistics.median(times)
