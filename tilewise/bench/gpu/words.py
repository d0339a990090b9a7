"""A run on a GPU in words: one table a grid, then how each grid is judged."""

from __future__ import annotations

from collections.abc import Sequence

from .cells import HOST_CLOCK, Cell, Entry
from .judge import PASS, Share, is_judged, judge, shares_of_next_power, summarize
from .run import Result

_TEXTS = ("case", "shape", "direction", "contestant")
_FIGURES = (
    "us",
    "spread",
    "TFLOP/s",
    "% of ceiling",
    "best peer",
    "x best peer",
    "x plain",
    "x predicted",
    "first s",
    "extra MB",
)
TEXT_COLUMNS = len(_TEXTS)


def tabulate(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row for each of ours, and a column of TFLOP/s (or us) for each peer."""
    unit = "us" if all(cell.way == HOST_CLOCK for cell in cells) else "TFLOP/s"
    peers = list(dict.fromkeys(entry.name for cell in cells for entry in cell.peers))
    columns = [*_TEXTS, *_FIGURES, *(f"{name} {unit}" for name in peers)]
    rows = []
    for cell in cells:
        rows += [_row(cell, index, entry, peers) for index, entry in enumerate(cell.ours)]
    kept = [i for i in range(len(columns)) if i < TEXT_COLUMNS or any(row[i] for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _row(cell: Cell, index: int, entry: Entry, peers: Sequence[str]) -> list[str]:
    case, judged = cell.case, judge(cell)
    name = f"{entry.name}: {entry.backend}" if entry.backend else entry.name
    feature = f"{case.feature}, " if case.feature else ""
    own = judged["ours"][index]
    timing = entry.timing
    best = own["ratio_best_peer"]
    fails = is_judged(cell) and best is not None and best < PASS
    figures = [
        "" if timing is None else f"{timing.median_s * 1e6:.1f}",
        "" if timing is None else f"{100 * (timing.max_s / timing.min_s - 1):.0f} %",
        _figure(entry.tflops, ".3g"),
        _figure(entry.percent_of_ceiling, ".0f"),
        judged["best_peer"] or "",
        _figure(best, ".2f", "x") + (" FAILS" if fails else ""),
        _figure(own["times_plain"], ".2f", "x"),
        _figure(own["times_predicted"], ".2f", "x"),
        _figure(entry.first_call_s, ".2f"),
        _figure(entry.extra_peak_bytes and entry.extra_peak_bytes / 1e6, ".0f"),
    ]
    found = {peer.name: _rate(cell, peer) for peer in cell.peers}
    texts = [f"{feature}{case.mask_name} {case.length}", _shape(cell), case.direction, name]
    return [*texts, *figures, *(found.get(peer, "") for peer in peers)]


def _rate(cell: Cell, entry: Entry) -> str:
    if cell.way == HOST_CLOCK and entry.timing is not None:
        return f"{entry.timing.median_s * 1e6:.1f}"
    return _figure(entry.tflops, ".3g") or entry.status


def _shape(cell: Cell) -> str:
    case = cell.case
    heads = f"H {case.H} G {case.G}" if case.G else f"H {case.H}"
    return f"B {case.B} {heads} D {case.D} {case.dtype_name}"


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def describe_end(result: Result) -> list[str]:
    """Sentences after the tables: the judgement, what was refused, and what was left out."""
    lines = []
    for summary in summarize(result.cells):
        where = f"{summary.grid}, {summary.direction}"
        lines.append(f"{where}: against the best peer {_describe_share(summary.best_peer)}.")
        lines += [
            f"{where}: against {name} {_describe_share(share)}."
            for name, share in summary.by_peer.items()
        ]
    for name, share in shares_of_next_power(result.cells).items():
        lines.append(f"{name}: {share:.2f} of the next power of two's TFLOP/s.")
    lines += describe_anchor(result.cells)
    for cell in result.cells:
        if cell.note:
            lines.append(f"NOT TIMED {cell.case}: {cell.note}")
    lines += _describe_notes(result.cells)
    versions = {e.name: e.version for cell in result.cells for e in cell.peers if e.version}
    lines += [f"{name} is of {version}." for name, version in versions.items()]
    lines += [f"Not in the tables: {name}: {why}." for name, why in result.absent.items()]
    if result.left_out:
        lines.append(f"Left out, since the time was up: {'; '.join(result.left_out)}.")
    if result.problem:
        lines.append(f"ENDED EARLY: {result.problem}")
    return lines


def _describe_notes(cells: Sequence[Cell]) -> list[str]:
    """A line for each reason of each contestant, with the first case that it was met in."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for entry in cell.entries:
            if entry.note:
                key = (entry.status.upper(), entry.name, entry.note)
                found.setdefault(key, []).append(f"D {cell.case.D} {cell.case}")
    return [
        f"{status} {name} on {cases[0]}"
        + (f" and {len(cases) - 1} more" if len(cases) > 1 else "")
        + f": {note}"
        for (status, name, note), cases in found.items()
    ]


def describe_anchor(cells: Sequence[Cell]) -> list[str]:
    """How far the card moved between the start and the end of the run."""
    times = {
        cell.grid: {e.name: e.timing.median_s for e in cell.entries if e.timing is not None}
        for cell in cells
        if cell.grid.startswith("anchor")
    }
    start, end = times.get("anchor, start", {}), times.get("anchor, end", {})
    moved = [
        f"{name} {100 * (end[name] / start[name] - 1):+.1f} %" for name in start if name in end
    ]
    return [f"From start to end the anchor's time moved: {', '.join(moved)}."] if moved else []


def _describe_share(share: Share) -> str:
    return (
        f"{share.passed} of {share.cells} cells pass, geometric mean {share.geometric_mean:.3f}x, "
        f"worst {share.worst:.3f}x in {share.worst_cell}"
    )
