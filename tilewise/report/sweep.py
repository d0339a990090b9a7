"""Time and extra memory over a sweep of lengths: Tilewise, PyTorch's SDPA and eager attention.

Each line goes on as long as a call is affordable: a contestant whose next call would take longer
than the limit, or whose score matrices would not fit, ends there, and the report says why.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..bench.cases import BOTH, FORWARD, Case
from ..bench.harness import REFUSED, Plan, Row, measure
from ..bench.peers import EAGER, MASKED_SDPA, PURE_TILED, SDPA, TILEWISE
from ..bench.progress import Progress

_PEERS = (TILEWISE, PURE_TILED, SDPA, MASKED_SDPA, EAGER)
_WINDOW = 512


@dataclass(frozen=True)
class Budget:
    """What a sweep may cost: lengths, rounds, seconds a call and seconds in all."""

    lengths: tuple[int, ...]
    rounds: int
    call_s: float
    total_s: float


FULL = Budget((256, 512, 1024, 2048, 4096, 8192, 16384), rounds=3, call_s=4.0, total_s=120.0)
QUICK = Budget((256, 512, 1024), rounds=3, call_s=0.3, total_s=8.0)


@dataclass(frozen=True)
class Series:
    """The rows of one mask and direction, by length and contestant."""

    title: str
    rows: list[Row]

    @property
    def refused(self) -> list[Row]:
        return [row for row in self.rows if row.status == REFUSED]

    def ends(self) -> dict[str, tuple[int, str]]:
        """Contestants that were not run to the end: from which length on, and why."""
        found: dict[str, tuple[int, str]] = {}
        for row in self.rows:
            if row.note:
                found.setdefault(row.contestant, (row.case.length, row.note))
        return found


def run(device: torch.device, progress: Progress, budget: Budget) -> list[Series]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    kinds = (
        ("causal, forward", Case("causal", 0, dtype, FORWARD), 0.5),
        ("causal, forward and backward", Case("causal", 0, dtype, BOTH), 0.25),
        (f"causal window of {_WINDOW}, forward", Case("window", 0, dtype, window=_WINDOW), 0.25),
    )
    progress.stage("time and memory", len(kinds) * len(budget.lengths))
    return [
        Series(
            title, _sweep(case, device, progress, replace(budget, total_s=part * budget.total_s))
        )
        for title, case, part in kinds
    ]


def _sweep(case: Case, device: torch.device, progress: Progress, budget: Budget) -> list[Row]:
    rows: list[Row] = []
    plan = Plan(budget.rounds)
    start = time.monotonic()
    for length in budget.lengths:
        at_length = replace(case, length=length)
        spent_s = time.monotonic() - start
        skipped = _too_slow(rows, at_length, budget, budget.total_s - spent_s)
        rows += measure(at_length, _PEERS, device, plan, skipped=skipped)
        progress.step(str(at_length))
    return rows


def _too_slow(rows: Sequence[Row], case: Case, budget: Budget, left_s: float) -> dict[str, str]:
    """Contestants for which the next length costs too much, told from their last time."""
    skipped: dict[str, str] = {}
    last = {row.contestant: row for row in rows}
    # Where the seconds run out, the slow ones end first, and Tilewise last.
    for name, row in sorted(
        last.items(), key=lambda item: (item[0] != TILEWISE.name, _seconds(item[1]))
    ):
        if row.timing is None:
            skipped[name] = row.note
            continue
        is_ours_windowed = row.is_ours and case.mask == "window"
        growth = case.length / row.case.length
        call_s = _seconds(row) * (growth if is_ours_windowed else growth**2)
        # A first call, the rounds, and one under the profiler.
        cost_s = call_s * (budget.rounds + 2)
        if call_s > budget.call_s:
            skipped[name] = f"a call would take more than {budget.call_s:g} s"
        elif cost_s > left_s:
            skipped[name] = "the time for this part was spent"
        else:
            left_s -= cost_s
    return skipped


def _seconds(row: Row) -> float:
    return row.timing.median_s if row.timing is not None else 0.0
