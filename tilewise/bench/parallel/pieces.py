"""The pieces of a causal zigzag ring on one device, beside dense calls of the same size.

A ring of R ranks is as fast as its pieces, where messages hide. Three kinds of them: a rank's own
keys (causal), keys of an earlier rank (all queries, the front half of the keys) and of a later one
(the back half of the queries, all keys). Each gives an fp32 partial, and adds fp32 gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.mask_leaves import Full, causal
from ...core.tolerance import measure_budget
from ...dense.api import attention
from ...parallel.layout import zigzag
from ...parallel.loopback import loopback, plain_terms, plans_of
from ...parallel.pieces import Backward, Extras, run_call
from ...parallel.plan import Call

# Times the forward's flops, as everywhere here.
BACKWARD_FLOPS = 2.5
VERIFIED_LENGTH = 384


class Meter(Protocol):
    """What a time is read with; see `tilewise.bench.gpu.meter`."""

    def sample(self, call: Callable[[], Any], repeats: int) -> float: ...


class HostMeter:
    """The CPU's clock."""

    def sample(self, call: Callable[[], Any], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


@dataclass(frozen=True)
class Sizes:
    """Heads and dims of the calls, and how often they are timed."""

    H: int
    G: int
    D: int
    dtype: torch.dtype
    device: torch.device
    rounds: int = 7


@dataclass(frozen=True)
class PieceRow:
    """One kind of piece: its time, the dense call's, and their ratio (above 1, ours is faster)."""

    tokens: int
    ranks: int
    piece: str
    direction: str
    queries: int
    keys: int
    us: float
    tflops: float
    dense_us: float
    dense_tflops: float

    @property
    def ratio(self) -> float:
        return self.dense_us / self.us

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio_dense": self.ratio}


def verify_pieces(sizes: Sizes, ranks: int) -> list[str]:
    """What a whole ring of such pieces gets wrong at a short length; empty where all is right."""
    q, k, v = _tensors(sizes, VERIFIED_LENGTH)
    dout = torch.randn_like(q)
    got = loopback(q, k, v, dout, layout=zigzag(VERIFIED_LENGTH, ranks), mask=causal())
    found = []
    for form in (torch.float64, sizes.dtype):
        leaves = [x.detach().to(form, copy=True).requires_grad_() for x in (q, k, v)]
        backend = "reference" if form == torch.float64 else "auto"
        out = attention(*leaves, mask=causal(), backend=backend)
        found.append([out, *torch.autograd.grad(out, leaves, dout.to(form))])
    problems = []
    for name, x, exact, eager in zip(
        ("out", "dq", "dk", "dv"), (got.out, got.dq, got.dk, got.dv), *found, strict=True
    ):
        floor = torch.finfo(torch.float32).eps * VERIFIED_LENGTH
        report = measure_budget(x.to(sizes.dtype), exact, eager, name=name, floor=floor)
        if not report.is_within:
            problems.append(str(report))
    return problems


def measure_pieces(
    sizes: Sizes, tokens: int, ranks: int, meter: Meter, repeats: int
) -> list[PieceRow]:
    """Each kind of piece of a ring over `tokens` tokens, both directions."""
    layout, rank = zigzag(tokens, ranks), ranks // 2
    q, k, v = _tensors(sizes, layout.lengths[rank])
    plan = plans_of(layout, causal(), q)[rank]
    kinds = {"own": rank, "earlier": rank - 1, "later": rank + 1}
    rows = []
    for name, source in kinds.items():
        if not 0 <= source < ranks:
            continue
        (call,) = plan.calls[source]
        contestants = _bind(q, k, v, call)
        times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for turn in range(sizes.rounds + 1):
            for contestant, run in contestants.items():
                seconds = meter.sample(run, repeats)
                # The first round warms up.
                if turn:
                    times[contestant].append(seconds)
        M, N = call.q1 - call.q0, call.k1 - call.k0
        area = M * N if isinstance(call.mask, Full) else M * (M + 1) // 2
        flops = 4.0 * sizes.H * sizes.D * area
        for direction, factor in (("forward", 1.0), ("backward", BACKWARD_FLOPS)):
            own, dense = (
                statistics.median(times[f"{side} {direction}"]) for side in ("piece", "dense")
            )
            work = factor * flops / 1e12
            figures = (own * 1e6, work / own, dense * 1e6, work / dense)
            rows.append(PieceRow(tokens, ranks, name, direction, M, N, *figures))
    return rows


def _tensors(sizes: Sizes, length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    heads = (sizes.H, sizes.G, sizes.G)
    drawn = [torch.randn(1, length, h, sizes.D, generator=generator, device="cpu") for h in heads]
    q, k, v = (x.to(sizes.device, sizes.dtype) for x in drawn)
    return q, k, v


def _bind(q: Tensor, k: Tensor, v: Tensor, call: Call) -> dict[str, Callable[[], Any]]:
    """The piece and a dense call of its size, forward and backward, on the same numbers."""
    terms, extras = plain_terms(q, k, v), Extras()
    dout = torch.randn_like(q)
    dense = [
        x.detach().clone().requires_grad_()
        for x in (q[:, call.q0 : call.q1], k[:, call.k0 : call.k1], v[:, call.k0 : call.k1])
    ]
    dense_dout = dout[:, call.q0 : call.q1].clone()
    out = attention(*dense, mask=call.mask)
    B, M, H = q.shape[:3]
    part = run_call(q, k, v, call, extras, terms)
    lse = torch.zeros(B, H, M, device=q.device)
    lse[..., call.q0 : call.q1] = part.lse
    delta = torch.zeros_like(lse)
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (q, k, v))
    state = Backward(q, k, v, extras, dout, lse, delta, dq, dk, dv, None, None)

    def dense_forward() -> Tensor:
        with torch.no_grad():
            return attention(*dense, mask=call.mask)

    return {
        "piece forward": lambda: run_call(q, k, v, call, extras, terms),
        "dense forward": dense_forward,
        "piece backward": lambda: state.add(k, v, (dk, dv), [call], terms),
        "dense backward": lambda: torch.autograd.grad(out, dense, dense_dout, retain_graph=True),
    }


def measure_all(
    sizes: Sizes,
    lengths: Sequence[int],
    ranks: Sequence[int],
    meter: Meter,
    repeats: int,
    step: Callable[[str], None],
) -> tuple[list[PieceRow], list[str]]:
    """The rows of all lengths and ranks, and why none were measured where a ring is wrong."""
    problems = [text for count in ranks for text in verify_pieces(sizes, count)]
    if problems:
        return [], problems
    rows = []
    for tokens in lengths:
        for count in ranks:
            step(f"pieces of {tokens} tokens over {count} ranks")
            rows += measure_pieces(sizes, tokens, count, meter, repeats)
    return rows, []
