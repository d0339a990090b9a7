"""`tilewise bench linear`: the ops of linear attention, beside flash-linear-attention where it is.

Each contestant is held to the error budget on a short call of the same kind before it is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import catalog
from ..core.case import Case
from ..core.tolerance import measure_budget
from ..linear import api

VERIFIED_LENGTH = 150
_GATED = ("simple_gla", "gla", "gated_delta_rule", "kda")
_DELTA = ("delta_rule", "gated_delta_rule", "kda")


class Meter(Protocol):
    """What a time is read with; see `tilewise.bench.gpu.meter`."""

    def sample(self, call: Callable[[], Any], repeats: int) -> float: ...


@dataclass(frozen=True)
class Shape:
    """One cell. G heads of q and k, H of v; D of all."""

    op: str
    B: int
    M: int
    G: int
    H: int
    D: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.op} B {self.B} M {self.M} G {self.G} H {self.H} D {self.D}"

    def flops(self) -> float:
        """Of a forward in chunks of 64: within them and through the state."""
        per_step = 2.0 * (2 * self.D * self.D + 64 * 2 * self.D)
        if self.op in _DELTA:
            per_step += 2.0 * (self.D * self.D + 64 * 2 * self.D)
        return self.B * self.M * self.H * per_step

    def draw(self, device: torch.device, length: int | None = None) -> dict[str, Tensor]:
        """q, k (normalised), v, and what else the op takes, as models have them."""
        generator = torch.Generator().manual_seed(0)
        lead = (self.B, self.M if length is None else length)

        def normal(*shape: int) -> Tensor:
            # On a GPU a long call's numbers are drawn there.
            if length is None and device.type == "cuda":
                return torch.randn(*lead, *shape, device=device)
            return torch.randn(*lead, *shape, generator=generator, device="cpu").to(device)

        k = normal(self.G, self.D)
        x = {
            "q": normal(self.G, self.D).to(self.dtype),
            "k": (k / k.norm(dim=-1, keepdim=True)).to(self.dtype),
            "v": normal(self.H, self.D).to(self.dtype),
        }
        if self.op in _GATED:
            dims = (self.H, self.D) if self.op in ("gla", "kda") else (self.H,)
            x["g"] = torch.nn.functional.logsigmoid(normal(*dims)) / 8
        if self.op in _DELTA:
            x["beta"] = normal(self.H).sigmoid().to(self.dtype)
        return x


@dataclass(frozen=True)
class Row:
    """One contestant on one cell. direction: forward, or both (forward and backward). note: why
    there are no figures."""

    shape: Shape
    contestant: str
    direction: str
    ms: float = 0.0
    tflops: float = 0.0
    first_call_s: float = 0.0
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        cell = {**asdict(self.shape), "dtype": str(self.shape.dtype).removeprefix("torch.")}
        return {**asdict(self), "shape": cell}


Contestant = Callable[..., Tensor]


def contestants(device: torch.device) -> tuple[dict[str, Contestant], dict[str, str]]:
    """What runs here by name, and what does not, with the reason."""

    def ours(op: str, **x: Tensor) -> Tensor:
        q, k, v = (x.pop(name) for name in "qkv")
        out: Tensor = getattr(api, op)(q, k, v, **x)[0]
        return out

    found: dict[str, Contestant] = {"tilewise": ours}
    if device.type != "cuda":
        return found, {"flash-linear-attention": "its kernels need a GPU"}
    if find_spec("fla") is None:
        return found, {"flash-linear-attention": "not installed"}
    found["flash-linear-attention"] = _theirs
    return found, {}


def _theirs(op: str, **x: Tensor) -> Tensor:
    import fla.ops as ops  # type: ignore[import-not-found]

    out: Tensor = getattr(ops, f"chunk_{op}")(**x)[0]
    return out


def run_once(call: Contestant, op: str, x: dict[str, Tensor], dout: Tensor) -> list[Tensor]:
    """Out and every gradient."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    out = call(op, **leaves)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]


def verify(call: Contestant, shape: Shape, device: torch.device) -> str:
    """What is wrong on a short call of the same kind; empty where nothing is."""
    op = next(op for op in catalog.OPS if op.name == f"linear.{shape.op}")
    x = shape.draw(device, VERIFIED_LENGTH)
    dout = torch.randn(x["v"].shape, generator=torch.Generator().manual_seed(1), device="cpu")
    dout = dout.to(device, shape.dtype)
    case = Case(op.name, str(shape), x)
    try:
        got = run_once(call, shape.op, x, dout)
    # A kernel's compiler raises what it likes.
    except Exception as error:
        return f"raised {type(error).__name__}: {error}"
    wide = {name: t.double() for name, t in x.items()}
    forms = []
    for form, tensors in (("exact", wide), ("eager", x)):
        leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
        out = op.load(form)(case, leaves)["out"]
        grads = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        forms.append([out.detach(), *grads])
    upstream = {"out": dout.double(), "final_state": _no_state(shape, device)}
    floors = op.load("floors")(case, wide, upstream, torch.finfo(torch.float32).eps)
    for name, value, exact, eager in zip(("out", *x), got, *forms, strict=True):
        floor = 0.0 if name == "out" else floors[name]
        report = measure_budget(value, exact, eager, name=name, floor=floor)
        if not report.is_within:
            return str(report)
    return ""


def _no_state(shape: Shape, device: torch.device) -> Tensor:
    size = (shape.B, shape.H, shape.D, shape.D)
    return torch.zeros(size, dtype=torch.float64, device=device)


def measure(
    shape: Shape, device: torch.device, meter: Meter, rounds: int, repeats: int
) -> list[Row]:
    """The rows of a cell: every contestant forward, and forward and backward, in rotation."""
    named, _ = contestants(device)
    x = shape.draw(device)
    dout = torch.randn_like(x["v"])
    rows: list[Row] = []
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name, call in named.items():
        problem = verify(call, shape, device)
        if problem:
            rows.append(Row(shape, name, "forward", note=problem))
            continue
        start = time.perf_counter()
        call(shape.op, **x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first[name] = time.perf_counter() - start
        calls[name, "forward"] = partial(call, shape.op, **x)
        calls[name, "both"] = partial(run_once, call, shape.op, x, dout)
    times: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    keys = list(calls)
    for turn in range(rounds + 1):
        for key in keys[turn % max(1, len(keys)) :] + keys[: turn % max(1, len(keys))]:
            seconds = meter.sample(calls[key], repeats)
            # The first round warms up.
            if turn:
                times[key].append(seconds)
    for (name, direction), seconds_of in times.items():
        middle = statistics.median(seconds_of)
        factor = 1.0 if direction == "forward" else 3.5
        tflops = factor * shape.flops() / middle / 1e12
        rows.append(Row(shape, name, direction, middle * 1e3, tflops, first[name]))
    return rows


def usual_shapes(on_gpu: bool, lengths: Sequence[int], dtype: torch.dtype) -> list[Shape]:
    """On a GPU the shapes that others publish; on a CPU small ones, at the lengths asked for."""
    # The other ops are simple_gla with a fixed decay or none.
    ops = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
    if not on_gpu:
        return [Shape(op, 1, m, 2, 4, 64, dtype) for op in ops for m in (lengths or (512, 1024))]
    if lengths:
        return [Shape(op, 1, m, 16, 32, 128, dtype) for op in ops for m in lengths]
    return [
        *(Shape(op, 2, 8192, 16, 16, 128, dtype) for op in ops),
        Shape("gated_delta_rule", 1, 8192, 16, 32, 128, dtype),
        Shape("gated_delta_rule", 1, 32768, 16, 32, 128, dtype),
        Shape("kda", 1, 8192, 64, 64, 128, dtype),
    ]
