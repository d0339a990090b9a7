"""The report's figures as tables, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..bench.harness import Row
from ..bench.run import describe_contestant
from .budget import Group
from .model import ModelResult
from .sweep import Series


@dataclass(frozen=True)
class Table:
    """The first `texts` columns are words, the others figures."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    texts: int = 1


@dataclass(frozen=True)
class Measure:
    """One thing measured. read: its value in a row, None where it was not. write: as words."""

    title: str
    read: Callable[[Row], float | None]
    write: Callable[[float], str]


@dataclass(frozen=True)
class OpSummary:
    """What a reader wants of an op first; the rest is in its groups."""

    op: str
    groups: list[Group]

    @property
    def rows(self) -> int:
        return sum(group.cases for group in self.groups)

    @property
    def within(self) -> int:
        return sum(group.within for group in self.groups)

    @property
    def worst(self) -> Group:
        return max(self.groups, key=lambda group: group.worst_used)


def write_share(used: float) -> str:
    """A share of the budget in percent; what is beyond measure says so."""
    return f"{100 * used:.0f} %" if used < 100 else "over"


def write_seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def write_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _median_s(row: Row) -> float | None:
    return None if row.timing is None else row.timing.median_s


TIME = Measure("Time", _median_s, write_seconds)
MEMORY = Measure("Extra memory", lambda row: row.extra_peak_bytes, write_bytes)


def summarize_ops(groups: Sequence[Group]) -> list[OpSummary]:
    names = dict.fromkeys(group.op for group in groups)
    return [OpSummary(name, [group for group in groups if group.op == name]) for name in names]


def tabulate_ops(groups: Sequence[Group]) -> Table:
    rows = [
        [op.op, op.worst.worst_case, str(op.rows), str(op.within), write_share(op.worst.worst_used)]
        for op in summarize_ops(groups)
    ]
    columns = ["op", "worst case", "outputs and gradients", "within budget", "worst share used"]
    return Table("Every op against the fp64 oracle", columns, rows, texts=2)


def tabulate_series(series: Series, measure: Measure) -> Table:
    """One row a length, one column a contestant; a dash where it was not run."""
    found = collect(series, measure, describe_contestant)
    rows = [
        [str(length)]
        + [measure.write(values[length]) if length in values else "-" for values in found.values()]
        for length in sorted({length for values in found.values() for length in values})
    ]
    return Table(f"{measure.title}: {series.title}", ["length", *found], rows, texts=0)


def collect(
    series: Series, measure: Measure, name: Callable[[Row], str]
) -> dict[str, dict[int, float]]:
    """What was measured, by the contestant's name and the length."""
    found: dict[str, dict[int, float]] = {}
    for row in series.rows:
        value = measure.read(row)
        if value is not None:
            found.setdefault(name(row), {})[row.case.length] = value
    return found


def describe_ends(series: Series) -> list[str]:
    """Which lines stop before the last length, and why: a sentence for each reason."""
    by_reason: dict[tuple[int, str], list[str]] = {}
    for name, end in series.ends().items():
        by_reason.setdefault(end, []).append(name)
    return [
        f"From length {length} on without {', '.join(names)}: {why}."
        for (length, why), names in by_reason.items()
    ]


def tabulate_model(result: ModelResult) -> list[Table]:
    checks = [
        [name, f"{report.max_error:.2e}", f"{report.max_budget:.2e}", write_share(report.used)]
        for name, report in result.reports.items()
    ]
    pairs = [
        [pair.first, pair.second, f"{pair.eager:.6f}", f"{pair.tilewise:.6f}"]
        for pair in result.pairs
    ]
    times = [[name, write_seconds(timing.median_s)] for name, timing in result.timings.items()]
    return [
        Table(
            f"Embeddings of {result.name} with its attention swapped",
            ["sentences", "largest error", "budget", "share used"],
            checks,
        ),
        Table(
            "How alike two sentences are: cosine of their embeddings",
            ["sentence", "sentence", "eager", "Tilewise"],
            pairs,
            texts=2,
        ),
        Table("One padded batch through the model", ["attention", "time"], times),
    ]
