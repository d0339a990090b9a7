"""One run: every case with everybody who serves it, verified first, timed in rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.mask_leaves import causal
from ...core.tolerance import measure_budget
from ...decode.cache import KVCache
from ...decode.call import Splits, make_call
from ...decode.reference import cache_eager, cache_reference
from ..harness import describe_error, time_rounds
from ..parallel import pieces
from ..progress import Progress
from .cases import DecodeCase
from .peers import Attend, DecodePeer, scale_of
from .stream import reader

# Caches take turns until together they are this many bytes, several times any last cache.
_COLD_BYTES = 250_000_000
_GRAPH_CALLS = 5
_SAMPLE_S = 0.01
READ = "read only"


@dataclass
class DecodeRow:
    """One contestant on one case. x_best_peer: of ours, the best peer's time over ours."""

    case: DecodeCase
    contestant: str
    version: str = ""
    us: float | None = None
    us_min: float | None = None
    us_max: float | None = None
    gbps: float | None = None
    tflops: float | None = None
    percent_of_read: float | None = None
    x_best_peer: float | None = None
    host_us: float | None = None
    note: str = ""
    is_refused: bool = False

    def as_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "case"}
        case = vars(self.case) | {"storage": str(self.case.storage).removeprefix("torch.")}
        return {"case": str(self.case), **case, **fields}


@dataclass
class DecodeResult:
    rows: list[DecodeRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def has_failed(self) -> bool:
        return any(row.is_refused and row.contestant == "Tilewise" for row in self.rows)


def run(
    cases: Sequence[DecodeCase],
    peers: Sequence[DecodePeer],
    device: torch.device,
    progress: Progress,
    meter: Any,
    *,
    rounds: int = 7,
    minutes: float | None = None,
    store: Callable[[DecodeResult], None] = lambda result: None,
) -> DecodeResult:
    """meter: samples and captures as `bench.gpu.meter.Meter` does."""
    result, start = DecodeResult(), time.monotonic()
    progress.stage("bench", len(cases))
    for case in cases:
        if minutes is not None and time.monotonic() - start > 60 * minutes:
            result.left_out.append(str(case))
            continue
        try:
            result.rows += measure(case, peers, device, meter, rounds)
        # What goes wrong in one case, such as a cache that does not fit, is no reason to stop.
        except Exception as error:
            result.rows.append(DecodeRow(case, "Tilewise", note=describe_error(error)[:300]))
            result.rows[-1].is_refused = True
        store(result)
        progress.step(str(case))
    return result


def measure(
    case: DecodeCase, peers: Sequence[DecodePeer], device: torch.device, meter: Any, rounds: int
) -> list[DecodeRow]:
    rows: dict[str, DecodeRow] = {}
    calls: dict[str, Callable[[], Any]] = {}
    alone: dict[str, Callable[[], Any]] = {}
    sets = _count_sets(case)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    drawn = [case.draw(device, seed) for seed in range(sets)]
    oracle = Oracle.of(case, device)
    for peer in peers:
        if not peer.serves(case):
            continue
        row = rows[peer.name] = DecodeRow(case, peer.name, peer.version)
        try:
            attend = peer.build(case)
            row.note = oracle.judge(attend)
            row.is_refused = bool(row.note)
            if row.is_refused:
                continue
            bound = [_bind(attend, q, cache) for q, cache in drawn]
            alone[peer.name] = bound[0]
            calls[peer.name] = _joined(bound, meter)
        # Peers raise whatever their libraries raise.
        except Exception as error:
            row.note = describe_error(error).strip().split("\n")[0][:300]
            row.is_refused = peer.is_ours
    reads = [reader(cache) for _, cache in drawn]
    rows[READ] = DecodeRow(case, READ)
    calls[READ] = _joined(reads, meter)
    n_calls = _n_calls(sets)
    for name, timing in time_rounds(
        calls, rounds=rounds, sample=meter.sample, sample_s=_SAMPLE_S
    ).items():
        row = rows[name]
        row.us, row.us_min, row.us_max = (
            1e6 * x / n_calls for x in (timing.median_s, timing.min_s, timing.max_s)
        )
        row.gbps = case.cache_bytes / row.us / 1e3
        row.tflops = None if name == READ else case.flops / row.us / 1e6
    for name, call in alone.items():
        rows[name].host_us = 1e6 * meter.sample_host(call, 30)
    _enter_ratios(rows)
    return list(rows.values())


@dataclass(frozen=True)
class Oracle:
    """A case's short form, what is exact there and what eager makes of it."""

    q: Tensor
    cache: KVCache
    exact: Tensor
    eager: Tensor

    @classmethod
    def of(cls, case: DecodeCase, device: torch.device) -> Oracle:
        q, cache = case.verified_form().draw(device, seed=7)
        terms = {
            "scale": scale_of(case), "softcap": None, "alibi_slopes": None, "bias": None,
            "sinks": None,
        }  # fmt: skip
        call = make_call("bench", q, cache, causal(), terms, None, None, Splits())
        return cls(q, cache, cache_reference(call).out, cache_eager(call).out)

    def judge(self, attend: Attend) -> str:
        """What is wrong with a contestant; empty where nothing is."""
        got = attend(self.q, self.cache)
        report = measure_budget(got, self.exact, self.eager, name="out")
        return "" if report.is_within else str(report)


def _count_sets(case: DecodeCase) -> int:
    if not case.is_cold:
        return 1
    return min(16, max(1, math.ceil(_COLD_BYTES / case.cache_bytes)))


def _n_calls(sets: int) -> int:
    """In one graph: each set as often as any other."""
    return math.ceil(_GRAPH_CALLS / sets) * sets


def _bind(attend: Attend, q: Tensor, cache: KVCache) -> Callable[[], Any]:
    return lambda: attend(q, cache)


def _joined(calls: Sequence[Callable[[], Any]], meter: Any) -> Callable[[], Any]:
    """So many calls in turn, replayed from a graph where there are graphs."""
    turns = [calls[i % len(calls)] for i in range(_n_calls(len(calls)))]
    joined: Callable[[], Any] = meter.capture(turns)
    return joined


def _enter_ratios(rows: dict[str, DecodeRow]) -> None:
    read = rows[READ].us
    for row in rows.values():
        if row.us and read and row.contestant != READ:
            row.percent_of_read = 100 * read / row.us
    ours = rows.get("Tilewise")
    others = [r.us for name, r in rows.items() if name not in ("Tilewise", READ) and r.us]
    if ours is not None and ours.us and others:
        ours.x_best_peer = min(others) / ours.us


class HostMeter(pieces.HostMeter):
    """The same for a CPU, and calls in a row."""

    def sample_host(self, call: Callable[[], Any], repeats: int) -> float:
        return self.sample(call, 3)

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        return lambda: [call() for call in calls]
