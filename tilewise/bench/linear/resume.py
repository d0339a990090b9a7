"""A stored run gone on with: its rows as they were, so that only the other cells are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..gpu.resume import ResumeError, Stored
from .cells import Cell
from .contestants import Contestant, enlist
from .run import Row

_FIELDS = tuple(x.name for x in fields(Row) if x.name != "cell")


def restore(stored: Stored, cells: Sequence[Cell], known: list[Contestant]) -> list[Row]:
    """The rows of the cells that were measured to the end, with everybody who takes part now;
    others are measured again."""
    by_cell: dict[Cell, list[Row]] = {}
    for found in stored.rows:
        row = _read(stored, found)
        if row.cell not in cells:
            raise ResumeError(
                f"resume: {stored.name} has {row.cell} ({row.cell.grid}, "
                f"{str(row.cell.dtype).removeprefix('torch.')}), which this run would not measure."
            )
        by_cell.setdefault(row.cell, []).append(row)
    return [row for cell, rows in by_cell.items() if _is_done(cell, rows, known) for row in rows]


def _read(stored: Stored, found: Mapping[str, Any]) -> Row:
    try:
        row = Row(Cell.of_json(found), **{name: found[name] for name in _FIELDS})
        times = row.rounds_ms if row.ms is None else [row.ms, *row.rounds_ms]
        if not all(isinstance(x, float) and math.isfinite(x) for x in times):
            raise ValueError("times are finite numbers")
        if row.ms is not None and not row.rounds_ms:
            raise ValueError("a time is the median of rounds")
        return row
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ResumeError(
            f"resume: {stored.name} has a row that is none of tilewise bench linear's: "
            f"{type(error).__name__}: {error}."
        ) from None


def _is_done(cell: Cell, rows: list[Row], known: list[Contestant]) -> bool:
    asked = [(who.name, way) for who in enlist(cell, known) for way in cell.directions]
    has_all = sorted((row.contestant, row.direction) for row in rows) == sorted(asked)
    return has_all and all(
        not row.is_refused and (row.ms is not None or bool(row.note)) for row in rows
    )
