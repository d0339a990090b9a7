"""Measure contestants side by side: verify, then time in interleaved rounds, then weigh memory.

A contestant whose output or gradient is over the error budget is refused, and its row says so.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import catalog
from ..core.case import Case as Call
from ..core.tolerance import measure_budget
from . import memory
from .cases import Case
from .peers import BASELINES, TORCH_FLASH_OP, Peer, bind, explain_choice
from .progress import Progress

TIMED, WEIGHED, REFUSED, NOT_RUN = "timed", "weighed", "refused", "not run"

# A sample shorter than this is made of several calls, so that the clock's grain does not count.
_SAMPLE_S = 0.02
# A first call that takes this long tells the length of a call without another.
_LONG_S = 0.5


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, over rounds."""

    median_s: float
    min_s: float
    max_s: float


@dataclass(frozen=True)
class Plan:
    """How to measure. has_resident: also in a fresh process each, as a cross-check (CPU)."""

    rounds: int = 5
    has_times: bool = True
    has_resident: bool = False
    # By dtype name: what a square matrix product reaches in the same run.
    ceilings_tflops: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Row:
    """One contestant on one case. `backend` says what ran; `note` why there are no figures."""

    case: Case
    contestant: str
    is_ours: bool
    status: str
    backend: str = ""
    note: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    percent_of_ceiling: float | None = None
    ratio_to_sdpa: float | None = None
    extra_peak_bytes: int | None = None
    extra_resident_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        timing = self.timing and {
            name.replace("_s", ""): seconds * 1e3 for name, seconds in asdict(self.timing).items()
        }
        return {
            "op": "attention",
            "shape": self.case.shape,
            "length": self.case.length,
            "dtype": self.case.dtype_name,
            "mask": self.case.mask_name,
            "direction": self.case.direction,
            "contestant": self.contestant,
            "backend": self.backend,
            "status": self.status,
            "note": self.note,
            "time_ms": timing,
            "tflops": self.tflops,
            "percent_of_ceiling": self.percent_of_ceiling,
            "ratio_to_sdpa": self.ratio_to_sdpa,
            "extra_peak_bytes": self.extra_peak_bytes,
            "extra_resident_bytes": self.extra_resident_bytes,
        }


def measure(
    case: Case,
    peers: Sequence[Peer],
    device: torch.device,
    plan: Plan,
    *,
    skipped: Mapping[str, str] = {},
) -> list[Row]:
    """The rows of a case, one for each peer that it is a question for.

    skipped: peers that are not to be run, and why.
    """
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for peer in peers:
        if not peer.serves(case, device):
            continue
        row = Row(case, peer.name, peer.is_ours, NOT_RUN, note=skipped.get(peer.name, ""))
        rows[peer.name] = row
        row.note = row.note or lacks_memory(peer, case, device)
        if row.note:
            continue
        row.note = verify(peer, case, device)
        if row.note:
            row.status = REFUSED
            continue
        calls[peer.name] = bind(peer, case, device)
    if plan.has_times:
        timings = time_interleaved(
            calls, rounds=plan.rounds, synchronize=lambda: synchronize(device)
        )
        for name, timing in timings.items():
            _enter_time(rows[name], timing, plan)
    for name, call in calls.items():
        row = rows[name]
        seen = memory.observe(call, device)
        row.status = TIMED if plan.has_times else WEIGHED
        row.extra_peak_bytes = seen.peak_bytes
        if row.is_ours:
            handed_on = "(torch-flash)" if TORCH_FLASH_OP in seen.ops else ""
            row.backend = f"{explain_choice(case, device).name}{handed_on}"
        if plan.has_resident and device.type == "cpu":
            row.extra_resident_bytes = memory.resident_extra_bytes(
                name, case, torch.get_num_threads()
            )
    _enter_ratios(rows)
    return list(rows.values())


def measure_all(
    cases: Sequence[Case],
    peers: Sequence[Peer],
    device: torch.device,
    plan: Plan,
    progress: Progress,
) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        rows += measure(case, peers, device, plan)
        progress.step(str(case))
    return rows


def measure_ceiling(dtype: torch.dtype, device: torch.device, size: int = 1536) -> float:
    """TFLOP/s of a product of two square matrices: about the most that attention could reach."""
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    timing = time_interleaved(
        {"product": lambda: a @ b}, rounds=5, synchronize=lambda: synchronize(device)
    )["product"]
    # The best round: a ceiling is what the machine does when nothing else disturbs it.
    return 2.0 * size**3 / timing.min_s / 1e12


def time_interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time each call by the host's clock, once a round."""

    def sample(call: Callable[[], Any], repeats: int) -> float:
        synchronize()
        start = clock()
        for _ in range(repeats):
            call()
        synchronize()
        return (clock() - start) / repeats

    return time_rounds(calls, rounds=rounds, sample=sample)


def time_rounds(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    sample: Callable[[Callable[[], Any], int], float],
    sample_s: float = _SAMPLE_S,
) -> dict[str, Timing]:
    """Time each call once a round, in an order that rotates, so that drift meets all alike.

    sample: runs a call so many times and returns the seconds that one took. The first call of
    each is a warm-up; it or a second one tells how many make a sample of `sample_s`.
    """
    repeats = {}
    for name, call in calls.items():
        once = sample(call, 1)
        if once < _LONG_S:
            once = sample(call, 1)
        repeats[name] = min(1000, math.ceil(sample_s / once)) if once > 0 else 1000
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            samples[name].append(sample(calls[name], repeats[name]))
    return {name: Timing(statistics.median(s), min(s), max(s)) for name, s in samples.items()}


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _enter_time(row: Row, timing: Timing, plan: Plan) -> None:
    row.timing = timing
    row.tflops = row.case.flops() / timing.median_s / 1e12
    ceiling = plan.ceilings_tflops.get(row.case.dtype_name)
    if ceiling:
        row.percent_of_ceiling = 100 * row.tflops / ceiling


def _enter_ratios(rows: Mapping[str, Row]) -> None:
    """How many times faster than SDPA each is, from the medians of the same rounds."""
    baseline = next((rows[name].timing for name in BASELINES if name in rows), None)
    for row in rows.values():
        if baseline is not None and row.timing is not None:
            row.ratio_to_sdpa = baseline.median_s / row.timing.median_s


def lacks_memory(peer: Peer, case: Case, device: torch.device) -> str:
    """Why the peer's score matrices do not fit; empty where they do."""
    needed, free = peer.scores_bytes(case), memory.available_bytes(device)
    # Half, so that a machine in use does not begin to swap.
    if needed <= free / 2:
        return ""
    return f"its score matrices take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"


def verify(peer: Peer, case: Case, device: torch.device) -> str:
    """What is wrong with the peer on a short call of the same kind; empty where nothing is."""
    short = case.verified_form()
    try:
        results = run_short(peer, short, device)
    # A kernel's compiler raises what it likes.
    except Exception as error:
        return describe_error(error)
    return judge_short(results, short, device)


def run_short(peer: Peer, short: Case, device: torch.device) -> tuple[Tensor, ...]:
    """Out and the gradients of a verified form, `[B, M, H, D]`."""
    # What dropout draws is then what the oracle draws.
    torch.manual_seed(_SEED)
    results = bind(peer, short, device)()
    return tuple(x.transpose(1, 2) for x in results) if peer.heads_first else results


def judge_short(results: Sequence[Tensor], short: Case, device: torch.device) -> str:
    """The first of the results that is over the budget, with its figures; empty where none is."""
    exact, eager, floors = _judges(short, device)
    for got, name in zip(results, exact, strict=False):
        report = measure_budget(got, exact[name], eager[name], name=name, floor=floors[name])
        if not report.is_within:
            return str(report)
    return ""


def describe_error(error: Exception) -> str:
    return f"raised {type(error).__name__}: {error}"


_SEED = 0
Named = dict[str, Tensor]


@lru_cache(maxsize=16)
def _judges(case: Case, device: torch.device) -> tuple[Named, Named, dict[str, float]]:
    """The exact and the eager results of a case by the catalog, and the floors of gradients."""
    op = next(op for op in catalog.OPS if op.name == "attention")
    q, k, v, dout = case.draw(device)
    terms = case.terms(device)
    options = {name: x for name, x in terms.items() if not isinstance(x, Tensor)}
    tensors = {"q": q, "k": k, "v": v, **{n: x for n, x in terms.items() if isinstance(x, Tensor)}}
    options["mask"] = case.build_mask(device)
    call = Call("attention", str(case), tensors, options, _SEED)
    wide = {name: x.to(torch.float64) for name, x in tensors.items()}

    def results(form: str, given: Named) -> Named:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
        out = op.load(form)(call, leaves)["out"]
        found = {"out": out.detach()}
        if case.has_gradients:
            learned = ("q", "k", "v", *case.learned)
            asked = [leaves[name] for name in learned]
            gradients = torch.autograd.grad(out, asked, dout.to(out.dtype))
            found |= {f"d{name}": x for name, x in zip(learned, gradients, strict=True)}
        return found

    eps = torch.finfo(torch.float32).eps
    floors = op.load("floors")(call, wide, {"out": dout.to(torch.float64)}, eps)
    named = {"out": 0.0, **{f"d{name}": floors[name] for name in tensors}}
    return results("exact", wide), results("eager", tensors), named
