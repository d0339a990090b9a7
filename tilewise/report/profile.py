"""One call of attention under PyTorch's profiler, and plain attention beside it.

Kernels are taken from the Chrome trace: what was launched while a labelled part of the host ran
belongs to it, whichever thread launched it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from .explain import tiles
from .explain.measure import inputs
from .explain.request import Request
from .tables import Table

FORWARD, BACKWARD = "forward", "backward"
PRODUCT, MASK, SOFTMAX, VALUES = (
    "plain: S = Q K^T",
    "plain: mask",
    "plain: softmax",
    "plain: O = P V",
)
_WARM_UPS = 3
# Of a softmax's element: maximum, difference, exponential, sum, division.
_SOFTMAX_FLOPS = 5
# What a kernel is for, by a part of its name.
_ROLES = (
    ("place_", "prepare"),
    ("list_", "prepare"),
    ("bwd_delta", "prepare"),
    ("bwd_hopper_prepare", "prepare"),
    ("bwd_hopper_finish", "combine"),
    ("attention_fwd", "main"),
    ("attention_bwd", "main"),
    ("split", "main"),
    ("combine", "combine"),
    ("merge", "combine"),
    ("sum", "combine"),
    ("reduce", "combine"),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel as the trace has it, in microseconds."""

    name: str
    start_us: float
    duration_us: float

    @property
    def role(self) -> str:
        name = self.name.lower()
        return next((role for part, role in _ROLES if part in name), "other")


@dataclass(frozen=True)
class Part:
    """A labelled part: how long the host was in it, and the kernels that it launched."""

    title: str
    host_us: float
    kernels: list[Kernel]

    @property
    def device_us(self) -> float:
        return sum(kernel.duration_us for kernel in self.kernels)

    def by_role(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for kernel in self.kernels:
            found[kernel.role] = found.get(kernel.role, 0.0) + kernel.duration_us
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.title,
            "host_us": self.host_us,
            "device_us": self.device_us,
            "by_role_us": self.by_role(),
            "kernels": [vars(kernel) for kernel in self.kernels],
        }


@dataclass(frozen=True)
class Profile:
    """plain_problem: why plain attention was not run; empty where it was."""

    request: Request
    backend: str
    tiled: list[Part]
    plain: list[Part]
    plain_problem: str
    traces: list[Path]

    @property
    def softmax_shares(self) -> tuple[float, float] | None:
        """Of plain attention's time, and of its FLOPs."""
        total = sum(part.device_us for part in self.plain)
        if not total:
            return None
        spent = sum(part.device_us for part in self.plain if part.title == SOFTMAX)
        per_pair = 2 * (self.request.D + self.request.E)
        return spent / total, _SOFTMAX_FLOPS / (per_pair + _SOFTMAX_FLOPS)

    def as_json(self) -> dict[str, Any]:
        shares = self.softmax_shares
        return {
            "command": "profile",
            "request": self.request.as_json(),
            "backend": self.backend,
            "tiled": [part.as_json() for part in self.tiled],
            "plain": [part.as_json() for part in self.plain],
            "plain_problem": self.plain_problem or None,
            "softmax_share_of_time": shares and shares[0],
            "softmax_share_of_flops": shares and shares[1],
            "traces": [str(path) for path in self.traces],
        }


def run(request: Request, device: torch.device, folder: Path, backend: str) -> Profile:
    """Profile a forward and a backward, and plain attention's steps. backend: what runs the call,
    for the record; it was verified before."""
    from ..dense.api import attention

    given = inputs(request, device)
    q, k, v = (given.pop(name) for name in "qkv")
    dout = torch.randn(request.B, request.M, request.H, request.E, dtype=q.dtype, device=device)

    def tiled() -> None:
        with record_function(FORWARD):
            out = attention(q, k, v, **given)
        _synchronize(device)
        with record_function(BACKWARD):
            torch.autograd.grad(out, (q, k, v), dout)
        _synchronize(device)

    traces = [folder / "tilewise-trace.json"]
    parts = _trace(tiled, (FORWARD, BACKWARD), traces[0], device)
    problem = why_no_plain(request, device)
    plain: list[Part] = []
    if not problem:
        steps = plain_steps(request, q.detach(), k.detach(), v.detach())
        traces.append(folder / "plain-trace.json")

        def untiled() -> None:
            with torch.no_grad():
                state: dict[str, Tensor] = {}
                for title, step in steps.items():
                    with record_function(title):
                        step(state)
                    _synchronize(device)

        plain = _trace(untiled, tuple(steps), traces[1], device)
    return Profile(request, backend, parts, plain, problem, traces)


def plain_steps(
    request: Request, q: Tensor, k: Tensor, v: Tensor
) -> Mapping[str, Callable[[dict[str, Tensor]], None]]:
    """Attention with its score matrix, step by step; the mask is made beforehand."""
    group = request.H // request.G
    qs, ks, vs = (x.transpose(1, 2) for x in (q, k, v))
    if group > 1:
        ks, vs = (x.repeat_interleave(group, 1) for x in (ks, vs))
    heads = tiles.told_apart(request, request.lowered)[1]
    hidden = ~request.lowered.dense(request.B, heads, request.M, request.N, device=q.device)

    def product(state: dict[str, Tensor]) -> None:
        state["s"] = (qs * request.D**-0.5) @ ks.transpose(2, 3)

    def mask(state: dict[str, Tensor]) -> None:
        state["s"].masked_fill_(hidden, float("-inf"))

    def softmax(state: dict[str, Tensor]) -> None:
        state["p"] = state.pop("s").softmax(-1)

    def values(state: dict[str, Tensor]) -> None:
        state["o"] = state.pop("p") @ vs

    return {PRODUCT: product, MASK: mask, SOFTMAX: softmax, VALUES: values}


def why_no_plain(request: Request, device: torch.device) -> str:
    """Plain attention wants two score matrices at a time, and its mask."""
    if device.type != "cuda":
        return ""
    pairs = request.B * request.H * request.M * request.N
    wanted = pairs * (2 * request.itemsize + 1)
    free, _ = torch.cuda.mem_get_info(device)
    if wanted <= 0.9 * free:
        return ""
    return f"its scores would take {wanted / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free"


def _trace(
    call: Callable[[], None], titles: tuple[str, ...], path: Path, device: torch.device
) -> list[Part]:
    for _ in range(_WARM_UPS):
        call()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # One cycle; but torch 2.11 warns where nothing is said of others.
    with profile(activities=activities, acc_events=True) as profiler:
        call()
    profiler.export_chrome_trace(str(path))
    return read_parts(json.loads(path.read_text(encoding="utf-8")), titles)


def read_parts(trace: Mapping[str, Any], titles: tuple[str, ...]) -> list[Part]:
    """Each labelled part with its kernels, from a Chrome trace of PyTorch's profiler."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    kernels: dict[int, list[Kernel]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            found = Kernel(event["name"], float(event["ts"]), float(event["dur"]))
            kernels.setdefault(event["args"].get("correlation", -1), []).append(found)
    launches = [x for x in events if x.get("cat") in ("cuda_runtime", "cuda_driver")]
    parts = []
    for title in titles:
        label = next(x for x in events if x["name"] == title and x.get("cat") == "user_annotation")
        start, stop = label["ts"], label["ts"] + label["dur"]
        launched = {x["args"].get("correlation", -1) for x in launches if start <= x["ts"] <= stop}
        own = [kernel for number in launched for kernel in kernels.get(number, [])]
        own.sort(key=lambda kernel: kernel.start_us)
        parts.append(Part(title, float(label["dur"]), own))
    return parts


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- words


def tabulate(found: Profile) -> list[Table]:
    rows = [
        [part.title, kernel.role, kernel.name, f"{kernel.duration_us:.1f}",
         f"{100 * kernel.duration_us / part.device_us:.0f} %"]
        for part in (*found.tiled, *found.plain)
        for kernel in part.kernels
    ]  # fmt: skip
    columns = ["part", "role", "kernel", "µs", "of the part"]
    roles = ("prepare", "main", "combine", "other")
    sums = [
        [
            kind,
            part.title,
            *(f"{part.by_role().get(role, 0.0):.1f}" for role in roles),
            f"{part.device_us:.1f}",
            f"{part.host_us:.1f}",
        ]
        for kind, parts in (("tiled", found.tiled), ("plain", found.plain))
        for part in parts
    ]
    parts_of = ["attention", "part", *roles, "device", "host"]
    return [
        Table("Kernels, in the order in which they ran", columns, rows, texts=3),
        Table("Parts, in µs", parts_of, sums, texts=2),
    ]


def sentences(found: Profile) -> list[str]:
    lines = []
    shares = found.softmax_shares
    if shares is not None:
        time, flops = shares
        lines.append(
            f"Plain attention's softmax is {100 * flops:.1f} % of its FLOPs and {100 * time:.0f} % "
            "of its time."
        )
    if found.plain and found.tiled:
        plain = sum(part.device_us for part in found.plain)
        tiled = found.tiled[0].device_us
        if tiled:
            lines.append(
                f"Forward: plain {plain:.0f} µs, tiled {tiled:.0f} µs on the {found.backend} "
                "backend."
            )
    if found.plain_problem:
        lines.append(f"Plain attention was not run: {found.plain_problem}.")
    return lines
