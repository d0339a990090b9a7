"""The report as one HTML file that needs nothing else: styles, plots and figures are inside."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ..bench.environment import describe_busy
from ..bench.peers import TILEWISE
from . import budget, plots
from .run import Report
from .sweep import Series
from .tables import (
    MEMORY,
    TIME,
    Measure,
    Table,
    collect,
    describe_ends,
    summarize_ops,
    tabulate_model,
    tabulate_series,
    write_bytes,
    write_seconds,
    write_share,
)

_TEMPLATE = "page.html.j2"


@dataclass(frozen=True)
class Figure:
    """A plot, the same figures as a table, and why some lines end early."""

    table: Table
    svg: str
    notes: list[str]


def render(report: Report) -> str:
    """The page."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"share": write_share, "seconds": write_seconds}
    template = resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    series, busy = list(enumerate(report.series)), describe_busy(report.environment)
    return environment.from_string(template).render(
        report=report,
        checks=report.checks(),
        highlights=find_highlights(report),
        ops=summarize_ops(budget.group(report.verified)),
        failures=[budget.describe_row(r) for r in report.verified if not r.report.is_within],
        times=[draw(one, TIME, f"time-{i}", busy) for i, one in series],
        weights=[draw(one, MEMORY, f"memory-{i}") for i, one in series],
        model_tables=tabulate_model(report.model),
    )


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Every plot of the report as an SVG file."""
    paths = []
    for series in report.series:
        for measure in (TIME, MEMORY):
            words = re.findall(r"[a-z0-9]+", f"{measure.title} {series.title}".lower())
            path = folder / f"{'-'.join(words)}.svg"
            svg = plots.standalone(draw(series, measure, path.stem).svg)
            path.write_text(svg, encoding="utf-8")
            paths.append(path)
    return paths


def find_highlights(report: Report) -> list[tuple[str, str]]:
    """A few figures, and what each says."""
    within = sum(row.report.is_within for row in report.verified)
    found = [(f"{within} of {len(report.verified)}", "outputs and gradients within budget")]
    causal, windowed = (
        [row for row in series.rows if row.contestant == TILEWISE.name and row.timing]
        for series in (report.series[0], report.series[-1])
    )
    if causal:
        case, extra = causal[-1].case, causal[-1].extra_peak_bytes or 0
        found.append(
            (
                write_bytes(extra),
                f"extra memory at length {case.length}; the scores alone would take "
                f"{write_bytes(case.scores_bytes)}",
            )
        )
    # A window that hides little is no window, and nor are times of a busy machine a comparison.
    compared = [
        row for row in windowed if row.ratio_to_sdpa and row.case.length >= 2 * row.case.window
    ]
    if compared and not describe_busy(report.environment):
        case, ratio = compared[-1].case, compared[-1].ratio_to_sdpa
        found.append(
            (
                f"{ratio:.1f} × SDPA",
                f"in speed under a causal window of {case.window} at length {case.length}",
            )
        )
    return found


def draw(series: Series, measure: Measure, name: str, busy: str = "") -> Figure:
    """busy: a sentence where times mean little."""
    found = collect(series, measure, lambda row: row.contestant)
    lines = [plots.Line(who, list(values), list(values.values())) for who, values in found.items()]
    if measure is MEMORY and lines:
        lines.append(_scores_line(series))
    table = tabulate_series(series, measure)
    ends = "; ".join(
        f"{line.contestant} {measure.write(line.values[-1])} at {line.lengths[-1]}"
        for line in lines
    )
    alt = f"{table.title}, by length, both axes logarithmic. Where the lines end: {ends}."
    svg = plots.draw(lines, measure.write, name=name, alt=alt)
    # Said once, under the times.
    notes = [busy, *describe_ends(series)] if measure is TIME else []
    return Figure(table, svg, [note for note in notes if note])


def _scores_line(series: Series) -> plots.Line:
    """What one matrix of scores takes, also where it was not made."""
    cases = {row.case.length: row.case for row in series.rows if MEMORY.read(row) is not None}
    sizes = [case.scores_bytes for case in cases.values()]
    return plots.Line("scores alone", list(cases), sizes)
