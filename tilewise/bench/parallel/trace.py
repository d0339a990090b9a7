"""A Chrome trace of one ring, forward and backward, and how much of its messages lay under work."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .cells import Cell, Request
from .contestants import build_ours, work_of

Span = tuple[float, float]


def traced_cell(cells: Sequence[Cell]) -> Cell:
    """The first that is causal and has gradients, else the first."""
    return next((x for x in cells if x.mask == "causal" and x.has_gradients), cells[0])


def record(request: Request, cell: Cell) -> None:
    """A job of all ranks: rank 0's trace goes to `request.trace`, compressed."""
    from torch.profiler import ProfilerActivity, profile

    call = _ring(request, cell)
    activities = [ProfilerActivity.CPU]
    if request.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    call()
    for turn in range(2):
        is_seen = dist.get_rank() == 0 and turn == 1
        dist.barrier()
        if not is_seen:
            _run(call, request.device)
            continue
        with profile(activities=activities, acc_events=True) as seen:
            _run(call, request.device)
        seen.export_chrome_trace(request.trace)
        summary = summarize(read(request.trace))
        text = json.dumps({"cell": str(cell), **summary}, indent=1)
        Path(request.trace.removesuffix(".json.gz") + "-summary.json").write_text(text + "\n")
        print(f"trace of a ring, {cell}: {json.dumps(summary)}", flush=True)
    dist.barrier()


def _ring(request: Request, cell: Cell) -> Any:
    layout = cell.layout(dist.get_world_size())
    own = layout.lengths[dist.get_rank()]
    heads = (request.H, request.G, request.G, request.H)
    options: dict[str, Any] = {"dtype": request.torch_dtype, "device": request.device}
    tensors = [torch.randn(1, own, h, request.D, **options) for h in heads]
    work = work_of(
        tensors, cell.build_mask(), has_gradients=cell.has_gradients, backend=request.backend
    )
    return build_ours(work, layout, "ring").call


def _run(call: Any, device: str) -> None:
    # The first of them lets the hosts get ahead of the GPUs.
    for _ in range(2):
        call()
    if device == "cuda":
        torch.cuda.synchronize()


def read(path: str) -> list[dict[str, Any]]:
    """The events of a trace, compressed or not."""
    opened: Any = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt") as file:
        found: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return found


def summarize(events: Iterable[dict[str, Any]]) -> dict[str, float | int]:
    """Microseconds of the GPU's messages, of its other kernels, and of both at once."""
    messages, work = [], []
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        is_idle = "spin_kernel" in event["name"]
        if "nccl" in event["name"].lower():
            messages.append(span)
        elif not is_idle:
            work.append(span)
    both = sum(_common(span, _joined(work)) for span in _joined(messages))
    sizes = [sum(stop - start for start, stop in _joined(x)) for x in (messages, work)]
    share = both / sizes[0] if sizes[0] else 0.0
    return {
        "messages": len(messages),
        "messages_us": sizes[0],
        "work_us": sizes[1],
        "both_us": both,
        "messages_under_work": share,
    }


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _common(span: Span, others: Iterable[Span]) -> float:
    return sum(max(0.0, min(span[1], stop) - max(span[0], start)) for start, stop in others)
