"""How cells are judged: against the best peer of the same rounds, and over a grid.

A ratio is the peer's time over ours, so that above 1 we are faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .cells import HOST_CLOCK, Cell, Entry

# What a cell must reach; the last percent is noise.
PASS = 0.99


@dataclass(frozen=True)
class Share:
    """Ratios of several cells: their geometric mean, the worst, and how many pass."""

    cells: int
    passed: int
    geometric_mean: float
    worst: float
    worst_cell: str


@dataclass(frozen=True)
class Summary:
    """A grid in one direction, against the best peer of each cell and against each by name."""

    grid: str
    direction: str
    best_peer: Share
    by_peer: Mapping[str, Share]

    def as_json(self) -> dict[str, Any]:
        return {
            "grid": self.grid,
            "direction": self.direction,
            "best_peer": vars(self.best_peer),
            "by_peer": {name: vars(share) for name, share in self.by_peer.items()},
        }


def is_judged(cell: Cell) -> bool:
    """The host's time has a bound of its own, and no peer is its measure."""
    return cell.way != HOST_CLOCK


def ratios(cell: Cell, ours: Entry | None = None) -> dict[str, float]:
    """By peer, its time over ours; ours is the first of the cell where none is given."""
    ours = ours or (cell.ours[0] if cell.ours else None)
    if ours is None or ours.timing is None:
        return {}
    own_s = ours.timing.median_s
    return {p.name: p.timing.median_s / own_s for p in cell.peers if p.timing is not None}


def times_plain(cell: Cell, ours: Entry) -> float | None:
    """How many times as long as the plain form of the case it takes."""
    if cell.plain is None or cell.plain.timing is None or ours.timing is None:
        return None
    return ours.timing.median_s / cell.plain.timing.median_s


def times_predicted(cell: Cell, ours: Entry) -> float | None:
    """The same, over what the visible area makes one expect."""
    times, plain = times_plain(cell, ours), cell.case.plain()
    if times is None or plain is None:
        return None
    return times / (cell.case.flops() / plain.flops())


def judge(cell: Cell) -> dict[str, Any]:
    """A cell as JSON, with its judgement."""
    case, by_peer = cell.case, ratios(cell)
    best = min(by_peer, key=lambda name: by_peer[name], default=None)
    return {
        "grid": cell.grid,
        "op": "attention",
        "shape": case.shape,
        **{name: getattr(case, name) for name in ("B", "H", "D", "length")},
        "G": case.kv_heads,
        "dtype": case.dtype_name,
        "mask": case.mask_name,
        "feature": case.feature,
        "direction": case.direction,
        "timed_by": cell.way,
        "buffer_sets": cell.sets,
        "note": cell.note,
        "ours": [_own_json(cell, entry) for entry in cell.ours],
        "plain": cell.plain and cell.plain.as_json(),
        "peers": [entry.as_json() for entry in cell.peers],
        "best_peer": best,
        "ratio_best_peer": best and by_peer[best],
        "ratio_by_peer": by_peer,
        "passes": None if best is None or not is_judged(cell) else by_peer[best] >= PASS,
    }


def _own_json(cell: Cell, entry: Entry) -> dict[str, Any]:
    by_peer = ratios(cell, entry)
    return {
        **entry.as_json(),
        "ratio_best_peer": min(by_peer.values(), default=None),
        "times_plain": times_plain(cell, entry),
        "times_predicted": times_predicted(cell, entry),
    }


def summarize(cells: Sequence[Cell]) -> list[Summary]:
    """Every grid and direction in which ours ran beside a peer."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if is_judged(cell) and ratios(cell):
            groups.setdefault((cell.grid, cell.case.direction), []).append(cell)
    summaries = []
    for (grid, direction), group in groups.items():
        named = [(_name(cell), ratios(cell)) for cell in group]
        peers = dict.fromkeys(name for _, by_peer in named for name in by_peer)
        summaries.append(
            Summary(
                grid,
                direction,
                _share((name, min(by_peer.values())) for name, by_peer in named),
                {p: _share((name, by[p]) for name, by in named if p in by) for p in peers},
            )
        )
    return summaries


def shares_of_next_power(cells: Sequence[Cell]) -> dict[str, float]:
    """For head dims that are no power of two: TFLOP/s over those of the next one, in the grid."""
    rates: dict[tuple[str, int], float] = {}
    for cell in cells:
        rate = cell.ours[0].tflops if cell.ours else None
        if rate is not None:
            rates[f"{cell.grid}, {cell.case}", cell.case.D] = rate
    found = {}
    for (kind, D), rate in rates.items():
        next_power = 1 << (D - 1).bit_length()
        if next_power != D and (kind, next_power) in rates:
            found[f"{kind}, D {D}"] = rate / rates[kind, next_power]
    return found


def _share(named: Iterable[tuple[str, float]]) -> Share:
    pairs = list(named)
    values = [value for _, value in pairs]
    worst_cell, worst = min(pairs, key=lambda pair: pair[1])
    mean = math.exp(sum(map(math.log, values)) / len(values))
    return Share(len(values), sum(v >= PASS for v in values), mean, worst, worst_cell)


def _name(cell: Cell) -> str:
    return f"D {cell.case.D} {cell.case}"
