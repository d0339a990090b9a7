"""Two reports beside each other: what became more exact or less, faster or slower, larger or not.

Times of one machine move by a few percent from run to run. A time counts as changed where the two
runs' rounds do not overlap: the slowest of one is faster than the fastest of the other.
"""

from __future__ import annotations

import html
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .explain.page import table_as_html
from .tables import Table, write_bytes, write_seconds, write_share

# Memory is counted, not timed: what differs by less is an allocator's rounding.
_SAME_BYTES = 0.01
_MACHINE = ("gpu", "cpu", "threads", "torch", "python", "tilewise", "commit")
FASTER, SLOWER, SAME = "faster", "slower", "same"


@dataclass(frozen=True)
class Comparison:
    """accuracy, speed and memory: the rows that changed. counts: of rows in both reports, how many.
    worse: checks that the first passed and the second did not."""

    names: tuple[str, str]
    machine: Table
    accuracy: Table
    speed: Table
    memory: Table
    counts: dict[str, int]
    worse: list[str]

    @property
    def tables(self) -> list[Table]:
        return [self.machine, self.accuracy, self.speed, self.memory]

    def sentences(self) -> list[str]:
        c = self.counts
        lines = [
            f"Of {c['times']} times in both reports {c[FASTER]} are faster, {c[SLOWER]} slower, "
            f"and {c[SAME]} the same within their rounds.",
            f"Of {c['bytes']} figures of memory {len(self.memory.rows)} changed; of "
            f"{c['budgets']} shares of the budget {len(self.accuracy.rows)} did.",
        ]
        lines += [f"FAILED now, and not before: {title}." for title in self.worse]
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "command": "report --compare",
            "reports": list(self.names),
            "counts": self.counts,
            "worse": self.worse,
            **{
                name: [dict(zip(table.columns, row, strict=True)) for row in table.rows]
                for name, table in (
                    ("machine", self.machine),
                    ("accuracy", self.accuracy),
                    ("speed", self.speed),
                    ("memory", self.memory),
                )
            },
        }


def load(path: Path) -> dict[str, Any]:
    """A report that `tilewise report --json` wrote.

    Raises: ValueError with half a sentence for a file that is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ValueError(f"{str(path)!r} is not JSON") from None
    if not isinstance(document, dict) or document.get("command") != "report":
        raise ValueError(f"{str(path)!r} is no report that tilewise report --json wrote")
    return document


def compare(
    before: dict[str, Any], after: dict[str, Any], names: tuple[str, str] = ("before", "after")
) -> Comparison:
    """What both reports have, where it changed."""
    counts = dict.fromkeys(("times", FASTER, SLOWER, SAME, "bytes", "budgets"), 0)
    machine = [
        [name, str(one), str(other)]
        for name in _MACHINE
        if (one := before["environment"].get(name)) != (other := after["environment"].get(name))
    ]
    first, second = (_by_key(document["budget"], _budget_key) for document in (before, after))
    accuracy = []
    for key in first.keys() & second.keys():
        counts["budgets"] += 1
        shares = [write_share(x[key]["worst_used"] or 0.0) for x in (first, second)]
        if shares[0] != shares[1]:
            accuracy.append([*key, *shares])
    speed, memory = [], []
    rows, others = (_rows(document) for document in (before, after))
    for key, row in rows.items():
        other = others.get(key)
        if other is None:
            continue
        if row["time_ms"] and other["time_ms"]:
            verdict = judge(row["time_ms"], other["time_ms"])
            counts["times"] += 1
            counts[verdict] += 1
            if verdict != SAME:
                medians = [x["time_ms"]["median"] for x in (row, other)]
                times = [write_seconds(ms / 1e3) for ms in medians]
                speed.append([*key, *times, f"{medians[0] / medians[1]:.2f} ×", verdict])
        sizes = [x["extra_peak_bytes"] for x in (row, other)]
        if None not in sizes:
            counts["bytes"] += 1
            if abs(sizes[1] - sizes[0]) > _SAME_BYTES * max(sizes[0], 1):
                memory.append([*key, *(write_bytes(size) for size in sizes)])
    passed = {check["title"] for check in before["checks"] if check["is_well"]}
    worse = [x["title"] for x in after["checks"] if not x["is_well"] and x["title"] in passed]
    where = ["part", "contestant", "length"]
    return Comparison(
        names,
        Table("What was different about the runs", ["what", *names], machine, texts=3),
        Table("Share of the error budget used, where it changed",
              ["op", "tensor", "dtype", "backend", *names], sorted(accuracy), texts=4),
        Table("Times that changed", [*where, *names, "speed", "now"], speed, texts=2),
        Table("Extra memory that changed", [*where, *names], memory, texts=2),
        counts,
        worse,
    )  # fmt: skip


def judge(before: dict[str, float], after: dict[str, float]) -> str:
    """By their rounds: overlapping ones say nothing."""
    if after["max"] < before["min"]:
        return FASTER
    return SLOWER if after["min"] > before["max"] else SAME


def _budget_key(group: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(group[name]) for name in ("op", "tensor", "dtype_name", "backend"))


def _by_key(rows: list[dict[str, Any]], key: Any) -> dict[tuple[str, ...], dict[str, Any]]:
    return {key(row): row for row in rows}


def _rows(document: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    return {
        (series["title"], row["contestant"], str(row["length"])): row
        for series in document["sweep"]
        for row in series["rows"]
    }


def render(found: Comparison) -> str:
    """The comparison as a page, in the style of the explanation's."""
    style = resources.files(__package__).joinpath("explain/page.css").read_text(encoding="utf-8")
    said = "".join(f"<p>{html.escape(line)}</p>" for line in found.sentences())
    shown = [table_as_html(table) for table in found.tables if table.rows]
    title = html.escape(" and ".join(found.names))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tilewise: {title}</title><style>{style}</style></head>"
        f"<body><header><h1>{title}</h1>{said}</header><main>{''.join(shown)}</main></body></html>"
    )
