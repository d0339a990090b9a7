"""A stored run gone on with: its cells as they were, so that only the others are measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..cases import Case
from ..harness import Timing
from .cells import Cell, Entry
from .judge import judge

# What must be the same for cells of two processes to stand in one run.
_SAME = ("gpu", "torch", "triton", "tilewise", "commit", "rounds")
_SAME_ON_CPU = ("cpu", "threads")
_KEY = ("grid", "shape", "dtype", "mask", "feature", "direction")
_FIELDS = tuple(x.name for x in fields(Entry) if x.name not in ("is_ours", "timing"))
Key = tuple[Any, ...]


class ResumeError(ValueError):
    """A run that this one cannot go on with; the message is the sentence for the user."""


class Stored(NamedTuple):
    """A run's file. headers: of the processes that it took so far."""

    name: str
    headers: list[dict[str, Any]]
    rows: list[dict[str, Any]]


def read_run(path: Path, command: str) -> Stored:
    """What a run of a command stored; a `ResumeError` where that is not in the file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        headers = [*document.get("earlier", []), document["header"]]
        rows = document["rows"]
        if not all(isinstance(x, dict) for x in (*headers, *rows)):
            raise TypeError("headers and rows are objects")
        if document["command"] != command:
            raise ValueError(f"it is of {document['command']!r}, not of {command!r}")
        return Stored(path.name, headers, rows)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ResumeError(
            f"resume must name a stored run, got {str(path)!r}: {type(error).__name__}: {error}."
        ) from None


def check_same(stored: Stored, header: Mapping[str, Any]) -> None:
    """Raise where it was another machine, or other code, that measured what is stored."""
    earlier = stored.headers[-1]
    for name in (*_SAME, *(() if header.get("gpu") else _SAME_ON_CPU)):
        if earlier.get(name) != header.get(name):
            raise ResumeError(
                f"resume: {stored.name} was measured with {name} {earlier.get(name)}, this run "
                f"has {header.get(name)}; start a new one."
            )


def restore(stored: Stored, cases: Iterable[tuple[str, Case]]) -> list[Cell]:
    """The stored cells, by grid and case; without those that failed, which are measured again."""
    known = {key_of(grid, case): (grid, case) for grid, case in cases}
    cells = []
    for row in stored.rows:
        key = tuple(row[name] for name in _KEY)
        if key not in known:
            raise ResumeError(
                f"resume: {stored.name} has {row['mask']} of {row['shape']} in the grid "
                f"{row['grid']}, which this run would not measure."
            )
        cell = _cell(*known[key], row)
        if not cell.has_failed:
            cells.append(cell)
    return cells


def key_of(grid: str, case: Case) -> Key:
    """What tells a case of a grid from the others, in a row as well."""
    row = judge(Cell(grid, case, ""))
    return tuple(row[name] for name in _KEY)


def _cell(grid: str, case: Case, row: Mapping[str, Any]) -> Cell:
    return Cell(
        grid,
        case,
        row["timed_by"],
        row["buffer_sets"],
        [_entry(entry, True) for entry in row["ours"]],
        [_entry(entry, False) for entry in row["peers"]],
        row["plain"] and _entry(row["plain"], True),
        row["note"],
    )


def _entry(found: Mapping[str, Any], is_ours: bool) -> Entry:
    times = found["time_ms"]
    timing = times and Timing(*(times[name] / 1e3 for name in ("median", "min", "max")))
    return Entry(is_ours=is_ours, timing=timing, **{name: found[name] for name in _FIELDS})
