"""Schedules over ranks: time with messages and without, bytes received, what is exposed.

"Without" runs the same local work over buffers that nobody filled, so it is what one GPU would need
for its share. The difference is the time that messages add.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from ...core.mask_leaves import causal
from ...core.tolerance import measure_budget
from ...dense.api import attention
from ...parallel.api import Run, context_parallel_attention
from ...parallel.comm import Link, Pending, count_traffic
from ...parallel.layout import zigzag
from ...parallel.loopback import plain_terms
from ...parallel.model import Machine, flops_of, predict
from ...parallel.prepare import Given, Where, links_of, prepare
from ...parallel.volumes import Shape
from .pieces import BACKWARD_FLOPS

SCHEDULES = ("ring", "all_gather", "ulysses")
_VERIFIED_LENGTH = 192


@dataclass(frozen=True)
class Request:
    """What is measured: `tokens` of all ranks together, forward and backward, causal zigzag."""

    tokens: int
    H: int
    G: int
    D: int
    dtype: str
    device: str
    rounds: int = 5
    repeats: int = 1


@dataclass(frozen=True)
class RankRow:
    """One schedule. Times are of the slowest rank; received: bytes of one rank."""

    schedule: str
    ranks: int
    tokens: int
    ms: float
    local_ms: float
    received: int
    tflops: float
    note: str = ""

    @property
    def exposed_ms(self) -> float:
        return max(0.0, self.ms - self.local_ms)

    @property
    def efficiency(self) -> float:
        return self.local_ms / self.ms if self.ms else 0.0

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "exposed_ms": self.exposed_ms, "efficiency": self.efficiency}


@dataclass(frozen=True)
class Muted(Link):
    """A link over which nothing is sent; what should have arrived is whatever was in memory."""

    def exchange(
        self, kind: str, sent: tuple[Tensor, int], received: tuple[Tensor, int]
    ) -> Pending:
        received[0].zero_()
        return Pending([], [])

    def all_gather(self, kind: str, x: Tensor) -> tuple[Tensor, Pending]:
        return x.expand(self.ranks, *x.shape), Pending([], [])

    def all_to_all(
        self, kind: str, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Pending]:
        return x.new_zeros(sum(received)), Pending([], [])


def measure_here(request: Request) -> list[RankRow]:
    """A job of one rank in a process group that is there: every schedule, the same on all ranks."""
    rows = []
    for schedule in SCHEDULES:
        problems = _gathered("; ".join(_verify(request, schedule)))
        note = next((text for text in problems if text), "")
        if note:
            rows.append(RankRow(schedule, dist.get_world_size(), request.tokens, 0, 0, 0, 0, note))
        else:
            rows.append(_time(request, schedule))
    return rows


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _tensors(request: Request, tokens: int) -> list[Tensor]:
    """Whole q, k, v and dout, alike on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    heads = (request.H, request.G, request.G, request.H)
    drawn = [torch.randn(1, tokens, h, request.D, generator=generator) for h in heads]
    return [x.to(request.device, getattr(torch, request.dtype)) for x in drawn]


def _verify(request: Request, schedule: str) -> list[str]:
    """What this rank's rows and gradients get wrong at a short length."""
    layout, rank = zigzag(_VERIFIED_LENGTH, dist.get_world_size()), dist.get_rank()
    whole = _tensors(request, _VERIFIED_LENGTH)
    *leaves, dout = (layout.shard(x, rank).clone() for x in whole)
    leaves = [x.requires_grad_() for x in leaves]
    out = context_parallel_attention(*leaves, layout=layout, schedule=schedule, mask=causal())
    got = [out, *torch.autograd.grad(out, leaves, dout)]
    results = []
    for dtype, backend in ((torch.float64, "reference"), (whole[0].dtype, "auto")):
        copies = [x.to(dtype, copy=True).requires_grad_() for x in whole[:3]]
        result = attention(*copies, mask=causal(), backend=backend)
        grads = torch.autograd.grad(result, copies, whole[3].to(dtype))
        results.append([layout.shard(x, rank) for x in (result, *grads)])
    floor = torch.finfo(torch.float32).eps * _VERIFIED_LENGTH
    reports = [
        measure_budget(x, exact, eager, name=f"{schedule} {name}", floor=floor)
        for name, x, exact, eager in zip(("out", "dq", "dk", "dv"), got, *results, strict=True)
    ]
    return [str(report) for report in reports if not report.is_within]


def _time(request: Request, schedule: str) -> RankRow:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = zigzag(request.tokens, ranks)
    *leaves, dout = (layout.shard(x, rank).clone() for x in _tensors(request, request.tokens))
    q, k, v = (x.requires_grad_() for x in leaves)
    where = Where(None, None, layout, schedule, causal(), "auto")
    scalars = {"scale": None, "softcap": None, "dropout_p": 0.0}
    tensors: dict[str, Any] = dict.fromkeys(("alibi_slopes", "bias", "sinks"))
    ready = prepare(Given(q, k, v, where, links_of(None, None), scalars, tensors))
    silent = replace(ready, ring_link=_mute(ready.ring_link))
    if silent.swap is not None:
        silent = replace(silent, swap=replace(silent.swap, link=_mute(silent.swap.link)))

    def run(prepared: Any) -> None:
        step = Run(prepared, plain_terms(q, k, v), q.dtype)
        out = (
            step.local(q, k, v, tensors)
            if prepared.swap is None
            else step.swapped(q, k, v, tensors, is_partial=False)
        ).out
        torch.autograd.grad(out, (q, k, v), dout)

    with count_traffic() as counted:
        run(ready)
    times: dict[str, list[float]] = {"whole": [], "local": []}
    for turn in range(request.rounds + 1):
        for name, prepared in (("whole", ready), ("local", silent)):
            dist.barrier()
            _settle(request.device)
            start = time.perf_counter()
            for _ in range(request.repeats):
                run(prepared)
            _settle(request.device)
            seconds = max(_gathered((time.perf_counter() - start) / request.repeats))
            if turn:
                times[name].append(seconds)
    whole, local = (statistics.median(times[name]) for name in ("whole", "local"))
    shape = Shape(1, request.tokens, request.H, request.G, request.D, request.D)
    flops = flops_of(shape) * (1 + BACKWARD_FLOPS) / ranks
    return RankRow(
        schedule, ranks, request.tokens, whole * 1e3, local * 1e3, counted.total,
        flops / whole / 1e12,
    )  # fmt: skip


def _mute(link: Link) -> Link:
    return Muted(link.group, link.rank, link.ranks)


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


# ---------------------------------------------------------------- processes


def _start(rank: int, ranks: int, folder: str, request: Request) -> None:
    """One process of `spawn`."""
    stores: Any = dist
    store = stores.FileStore(str(Path(folder) / "store"), ranks)
    backend = "nccl" if request.device == "cuda" else "gloo"
    if request.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5)
    )
    try:
        rows = measure_here(request)
        if rank == 0:
            text = json.dumps([asdict(row) for row in rows])
            (Path(folder) / "rows.json").write_text(text)
    finally:
        dist.destroy_process_group()


def spawn(ranks: int, request: Request) -> list[RankRow]:
    """The rows of `ranks` processes on this machine: NCCL on GPUs, gloo on the CPU."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(_start, args=(ranks, folder, request), nprocs=ranks, join=True)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    return [RankRow(**row) for row in rows]


def predicted(row: RankRow, request: Request, machine: Machine) -> float:
    """Milliseconds that the model says for a row."""
    shape = Shape(1, request.tokens, request.H, request.G, request.D, request.D)
    return predict(row.schedule, shape, row.ranks, machine).seconds * 1e3
