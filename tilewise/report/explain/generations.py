"""FlashAttention 1 to 4 on the first tiles of this call's own schedule, as timelines.

A model: each unit of one multiprocessor works at its share of the datasheet's rate, K and V count
once for the programs that read them together, and what may overlap in a generation overlaps. It
shows what each of them changed, not what anyone measured.
Sources: arXiv 2205.14135 (1), 2307.08691 (2), 2407.08608 (3), 2603.05451 (4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from . import walk
from .explanation import Explanation

MEMORY, MATRIX, SOFTMAX = "memory", "matrix", "softmax"
# Tiles that are drawn.
_SHOWN = 8
# Of the exponentials, the share that FA4 gives to fused multiply-adds, which run beside the units.
_EMULATED = 0.25
# How far, in log2 units, a row's maximum may rise before FA4 rescales.
_LAZY_LOG2 = 8.0


@dataclass(frozen=True)
class Costs:
    """Seconds of one tile on one multiprocessor. load: of K and V, which count once for all
    programs that read them together."""

    load: float
    product: float
    exps: float
    # Reading the unfinished O, its maximum and its sum, or writing them; and reading Q.
    state: float
    query: float


@dataclass
class Timeline:
    """Bars of a generation: unit, start and end in seconds, what it is, and whose tile."""

    bars: list[tuple[str, float, float, str, int]] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)

    def add(self, unit: str, ready: float, seconds: float, what: str, owner: int) -> float:
        """Work on a unit, as soon as it is free and the work is ready; returns its end."""
        start = max(ready, self.free.get(unit, 0.0))
        self.free[unit] = start + seconds
        self.bars.append((unit, start, start + seconds, what, owner))
        return start + seconds

    @property
    def seconds(self) -> float:
        return max((bar[2] for bar in self.bars), default=0.0)


def first_generation(costs: Costs, tiles: int) -> Timeline:
    """Keys outside, queries inside: O comes and goes with every tile, nothing overlaps."""
    line = Timeline()
    at = line.add(MEMORY, 0.0, costs.load, "K, V in", 0)
    for i in range(tiles):
        at = line.add(MEMORY, at, costs.query + costs.state, "Q, O in", i)
        at = line.add(MATRIX, at, costs.product, "S = Q Kᵀ", i)
        at = line.add(SOFTMAX, at, costs.exps, "softmax", i)
        at = line.add(MATRIX, at, costs.product, "O += P V", i)
        at = line.add(MEMORY, at, costs.state, "O out", i)
    return line


def second_generation(costs: Costs, tiles: int) -> Timeline:
    """Queries outside, keys inside: O stays, the next K and V are copied meanwhile."""
    line, done = Timeline(), 0.0
    for i in range(tiles):
        loaded = line.add(MEMORY, 0.0, costs.load, "K, V in", i)
        scored = line.add(MATRIX, max(loaded, done), costs.product, "S = Q Kᵀ", i)
        weighed = line.add(SOFTMAX, scored, costs.exps, "softmax", i)
        done = line.add(MATRIX, weighed, costs.product, "O += P V", i)
    return line


def third_generation(costs: Costs, tiles: int, emulated: float = 0.0) -> Timeline:
    """Two groups take turns: the products of one run beside the softmax of the other."""
    line, weighed = Timeline(), [0.0, 0.0]
    exps = costs.exps * (1.0 - emulated)
    pending: list[tuple[int, int]] = []
    for i in range(tiles):
        loaded = line.add(MEMORY, 0.0, costs.load, "K, V in", i)
        group = i % 2
        scored = line.add(MATRIX, loaded, costs.product, "S = Q Kᵀ", i)
        weighed[group] = line.add(SOFTMAX, scored, exps, "softmax", i)
        if pending:
            other, number = pending.pop()
            line.add(MATRIX, weighed[other], costs.product, "O += P V", number)
        pending.append((group, i))
    for group, number in pending:
        line.add(MATRIX, weighed[group], costs.product, "O += P V", number)
    return line


def costs_of(found: Explanation) -> Costs:
    """Of a tile of the forward kernel."""
    gpu, request, tiles = found.gpu, found.request, found.forward_tiles
    D, E = request.D, request.E
    element = tiles.block_m * tiles.block_n
    rate, bandwidth = (
        total / gpu.processors for total in (gpu.matrix_flops(request.dtype), gpu.memory_bytes_s)
    )
    together = min(gpu.processors, tiles.query_tiles)
    return Costs(
        tiles.block_n * (D + E) * request.itemsize / bandwidth / together,
        element * (D + E) / rate,
        element / (gpu.exps / gpu.processors),
        tiles.block_m * (4 * E + 8) / bandwidth,
        tiles.block_m * D * request.itemsize / bandwidth,
    )


def count_rescales(found: Explanation, limit_log2: float) -> tuple[int, int]:
    """Of a real row, the last that is followed: tiles visited, and how often its maximum rose by
    more than a limit over what it was last scaled to."""
    import torch

    request = found.request
    forward = walk.passes(found)[0]
    row = forward.edges.rows[-1] - 1
    x = len(forward.edges.rows) - 2
    visits = next(cells for owner, cells in forward.visits if owner == x)
    visible = walk.runs(request, row)
    q = walk.draw("q", torch.tensor([row]), walk.D)[0]
    scale, reference, rises, visited = walk.D**-0.5 * math.log2(math.e), -math.inf, 0, 0
    for y in visits:
        low, high = forward.edges.keys[y], forward.edges.keys[y + 1]
        parts = [(max(a, low), min(b, high)) for a, b in visible if a < high and b > low]
        if not parts:
            continue
        visited += 1
        keys = torch.cat([torch.arange(a, b) for a, b in parts])
        top = float((walk.draw("k", keys, walk.D) @ q).max()) * scale
        if top > reference + (limit_log2 if reference > -math.inf else 0.0):
            rises += reference > -math.inf
            reference = top
    return visited, rises


def as_json(found: Explanation) -> list[dict[str, Any]]:
    """The four, with what each changed."""
    costs, tiles = costs_of(found), found.forward_tiles
    per_row = max(1, -(-tiles.visited // (tiles.query_tiles * found.scores.heads)))
    shown = min(_SHOWN, per_row)
    visited, lazy = count_rescales(found, _LAZY_LOG2)
    item, heads = found.request.itemsize, found.scores.heads
    state = tiles.block_m * (4 * found.request.E + 8)
    once = tiles.query_rows * (found.request.D * item) + 2 * tiles.visited * state
    keys = tiles.key_rows * (found.request.D + found.request.E) * item
    described = (
        ("FlashAttention", "2022", first_generation(costs, shown), once // heads,
         "keys outside, queries inside", "one program a head",
         f"at each of {visited} tiles, and O divided and multiplied again", "none"),
        ("FlashAttention-2", "2023", second_generation(costs, shown), keys // heads,
         "queries outside, keys inside", "one program a query tile",
         f"at each of {visited} tiles; O is divided once", "the next copy"),
        ("FlashAttention-3", "2024", third_generation(costs, shown), keys // heads,
         "queries outside, keys inside", "a producer warp, consumer groups in turns",
         f"at each of {visited} tiles", "copies, and softmax under products"),
        ("FlashAttention-4", "2026", third_generation(costs, shown, _EMULATED), keys // heads,
         "queries outside, keys inside", "a group for each role, two query tiles",
         f"{lazy} times in {visited} tiles: only where the maximum rose 256-fold",
         "as before, and some exponentials are polynomials on other units"),
    )  # fmt: skip
    return [
        {
            "name": name,
            "year": year,
            "loop": loop,
            "work": work,
            "rescales": rescales,
            "overlap": overlap,
            "asked_bytes_per_head": asked,
            "microseconds": line.seconds * 1e6,
            "bars": [
                [unit, start * 1e6, stop * 1e6, what, owner]
                for unit, start, stop, what, owner in line.bars
            ],
        }
        for name, year, line, asked, loop, work, rescales, overlap in described
    ]
