"""A stored run gone on with: its rows as they were, so that only the other cells are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from ..gpu.resume import ResumeError, Stored
from .cells import Cell
from .run import Row

_FIELDS = tuple(x.name for x in fields(Row) if x.name != "cell")


def restore(stored: Stored, cells: Sequence[Cell]) -> list[Row]:
    """The rows of the cells that were measured to the end; others are measured again."""
    by_cell: dict[Cell, list[Row]] = {}
    for found in stored.rows:
        try:
            cell = Cell.of_json(found)
            row = Row(cell, **{name: found[name] for name in _FIELDS})
        except (KeyError, AttributeError, TypeError) as error:
            raise ResumeError(
                f"resume: {stored.name} is no run of tilewise bench linear: "
                f"{type(error).__name__}: {error}."
            ) from None
        if cell not in cells:
            raise ResumeError(
                f"resume: {stored.name} has {cell}, which this run would not measure."
            )
        by_cell.setdefault(cell, []).append(row)
    return [row for rows in by_cell.values() if all(map(_is_done, rows)) for row in rows]


def _is_done(row: Row) -> bool:
    return not row.is_refused and (row.ms is not None or bool(row.note))
