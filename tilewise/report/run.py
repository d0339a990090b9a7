"""The report: verify every op, measure over lengths, run a real model, and say how it went."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..bench import environment
from ..bench.progress import Progress
from ..catalog import OPS
from . import budget, model, sweep
from .model import ModelResult
from .sweep import Series
from .verify import VerifyRow

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Check:
    """One question of the verdict, its answer in a sentence, and whether it is the right one."""

    title: str
    answer: str
    is_well: bool


@dataclass(frozen=True)
class Report:
    """Everything that the report found."""

    is_quick: bool
    environment: dict[str, Any]
    seconds: float
    verified: list[VerifyRow]
    series: list[Series]
    model: ModelResult

    @property
    def is_well(self) -> bool:
        return all(check.is_well for check in self.checks())

    def checks(self) -> list[Check]:
        failed = sum(not row.report.is_within for row in self.verified)
        refused = [row for series in self.series for row in series.refused]
        contestants = {row.contestant for series in self.series for row in series.rows}
        worst = max(report.used for report in self.model.reports.values())
        if refused:
            names = sorted({row.contestant for row in refused})
            measured = f"{', '.join(names)} gave a wrong result and was not timed."
        else:
            measured = f"All {len(contestants)} contestants were verified before they were timed."
        swapped = (
            f"{self.model.swapped} of {self.model.layers} attention layers of {self.model.name} "
            f"ran through Tilewise; its embeddings used {100 * worst:.0f} % of their budget."
        )
        return [
            Check("Every op", budget.describe_verdict(self.verified), failed == 0),
            Check("Time and memory", measured, not refused),
            Check("A real model", swapped, self.model.is_within),
        ]

    def as_json(self) -> dict[str, Any]:
        failures = [row for row in self.verified if not row.report.is_within]
        return {
            "command": "report",
            "is_well": self.is_well,
            "is_quick": self.is_quick,
            "seconds": round(self.seconds, 1),
            "environment": self.environment,
            "checks": [dict(vars(check)) for check in self.checks()],
            "budget": [group.as_json() for group in budget.group(self.verified)],
            "failures": [budget.row_as_json(row) for row in failures],
            "sweep": [
                {"title": series.title, "rows": [row.as_json() for row in series.rows]}
                for series in self.series
            ],
            "model": self.model.as_json(),
        }


def run(device: torch.device, progress: Progress, *, is_quick: bool = False) -> Report:
    """Make the whole report. Quick: a sample of the cases, short lengths, a third of the text."""
    start = time.monotonic()
    targets = budget.targets(OPS, _DTYPES, device.type)
    only = budget.QUICK_CASES if is_quick else None
    verified = budget.verify(targets, device, progress, only=only)
    series = sweep.run(device, progress, sweep.QUICK if is_quick else sweep.FULL)
    embedded = model.run(device, progress, is_quick=is_quick)
    facts = environment.describe(device)
    facts["transformers"] = environment.version_of("transformers")
    return Report(is_quick, facts, time.monotonic() - start, verified, series, embedded)
