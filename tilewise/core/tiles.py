"""From a mask to the tiles that a schedule visits: which to skip, to test, and to take whole.

`plan_rows` answers for one query tile on the host (a list of `KeyRange`); `tile_map` is its twin
that answers for all tiles at once, on the device, with no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .mask import UNBOUNDED, And, Mask, Not, Or, maximum, minimum
from .mask_bits import Bits
from .mask_leaves import Full
from .positions import Positions, Rows

SKIP, PARTIAL, FULL = 0, 1, 2


class KeyRange(NamedTuple):
    """Stored keys `[start, stop)`; `is_full` where every row of the tile sees all of them."""

    start: int
    stop: int
    is_full: bool


@dataclass
class RowPlan:
    """What one query tile visits, and the test to apply where a range is not full."""

    mask: Mask
    rows: Rows
    ranges: list[KeyRange]
    # Sorted disjoint intervals [b, h, m, I] in storage columns; None where bits decide.
    starts: Tensor | None = None
    stops: Tensor | None = None

    def visible(self, n0: int, n1: int) -> Tensor:
        """bool `[b or 1, h or 1, m, n1 - n0]`: which of the keys each row sees."""
        rows = self.rows
        n = torch.arange(n0, n1, device=rows.i.device).reshape(1, 1, 1, -1)
        if self.starts is None or self.stops is None:
            return self.mask.visible(rows.index(n0, n1)) & (n >= rows.first) & (n < rows.stop)
        seen: Tensor | None = None
        for start, stop in zip(self.starts.unbind(-1), self.stops.unbind(-1), strict=True):
            inside = (n >= start.unsqueeze(-1)) & (n < stop.unsqueeze(-1))
            seen = inside if seen is None else seen | inside
        assert seen is not None
        return seen

    def on(self, rows: Rows) -> RowPlan:
        """The same plan with its test on another device, where `rows` are the same rows."""
        exact = row_intervals(self.mask, rows) if self.mask.is_exact else (None, None)
        return RowPlan(self.mask, rows, self.ranges, *exact)


def row_intervals(mask: Mask, rows: Rows) -> tuple[Tensor, Tensor]:
    """Sorted, disjoint storage intervals of the keys each row may see, `[b, h, m, I]` int64.

    They are the visible set for an exact mask and cover it otherwise. Empty ones have
    stop == start.
    """

    def column(bound: int | Tensor) -> Tensor:
        # Lengths may be as large as their dtype holds; what is beyond storage is all the same.
        bound = minimum(maximum(bound, -UNBOUNDED), UNBOUNDED)
        bound = minimum(maximum(bound + rows.key_base, rows.first), rows.stop)
        if isinstance(bound, Tensor):
            return bound
        return torch.full((1, 1, 1, 1), bound, dtype=torch.int64, device=rows.i.device)

    pairs = mask.intervals(rows.index(0, 0))
    starts, stops = ([column(pair[side]) for pair in pairs] for side in (0, 1))
    shape = rows.i.shape
    shape = torch.broadcast_shapes(shape, *(x.shape for x in (*starts, *stops)))[:3]
    start = torch.cat([x.expand(*shape, 1) for x in starts], dim=-1)
    stop = torch.cat([x.expand(*shape, 1) for x in stops], dim=-1)
    stop = torch.maximum(start, stop)
    if start.shape[-1] == 1:
        return start, stop
    start, order = start.sort(dim=-1)
    stop = stop.gather(-1, order)
    reached = stop.cummax(dim=-1).values
    start[..., 1:] = torch.maximum(start[..., 1:], reached[..., :-1])
    return start, torch.maximum(start, stop)


def _union(starts: Tensor, stops: Tensor) -> list[tuple[int, int]]:
    """The union of all intervals as a sorted list of host pairs. CPU tensors."""
    low, high = starts.flatten(), stops.flatten()
    keep = high > low
    low, order = low[keep].sort()
    if low.numel() == 0:
        return []
    reached = high[keep][order].cummax(0).values
    breaks = torch.nonzero(low[1:] > reached[:-1]).flatten().tolist()
    edges, ends = [0, *(b + 1 for b in breaks)], [*breaks, low.numel() - 1]
    return [(int(low[a]), int(reached[b])) for a, b in zip(edges, ends, strict=True)]


def _are_covered(starts: Tensor, stops: Tensor, pieces: list[tuple[int, int]]) -> list[bool]:
    """For each piece [n0, n1): do the intervals of every row cover it? One host read for all."""
    n0, n1 = torch.tensor(pieces).unbind(-1)
    overlap = torch.minimum(stops.unsqueeze(-1), n1) - torch.maximum(starts.unsqueeze(-1), n0)
    covered = overlap.clamp(min=0).sum(-2) == n1 - n0
    result: list[bool] = covered.flatten(0, 2).all(0).tolist()
    return result


def plan_rows(mask: Mask, rows: Rows, N: int, block_n: int) -> RowPlan:
    """Which stored keys a query tile visits, in ascending order, at most `block_n` at a time.

    Exact: keys that no row sees lie in no range (except inside a partial range), and a range is
    full if and only if every row sees all of it. Masks whose tensors live on another device than
    the CPU are not read: all keys are visited and tested.
    """
    if isinstance(mask, Full) and isinstance(rows.first, int) and isinstance(rows.stop, int):
        ranges = [
            KeyRange(n, min(n + block_n, rows.stop), True) for n in range(0, rows.stop, block_n)
        ]
        return RowPlan(mask, rows, ranges)
    starts, stops = row_intervals(mask, rows)
    exact = (starts, stops) if mask.is_exact else (None, None)
    if starts.device.type != "cpu":
        ranges = [KeyRange(n, min(n + block_n, N), False) for n in range(0, N, block_n)]
        return RowPlan(mask, rows, ranges, *exact)
    step = block_n if mask.is_exact else _bit_step(mask, block_n)
    pieces = [
        (n0, min(high, n0 + step))
        for low, high in _union(starts, stops)
        for n0 in range(low, high, step)
    ]
    if not pieces:
        return RowPlan(mask, rows, [], *exact)
    covered = _are_covered(starts, stops, pieces)
    if mask.is_exact:
        ranges = [KeyRange(n0, n1, c) for (n0, n1), c in zip(pieces, covered, strict=True)]
        return RowPlan(mask, rows, ranges, *exact)
    plan = RowPlan(mask, rows, [])
    for (n0, n1), c in zip(pieces, covered, strict=True):
        kind = _classify(mask, rows, n0, n1)
        if kind == PARTIAL or (kind == FULL and not c):
            seen = plan.visible(n0, n1)
            kind = FULL if bool(seen.all()) else PARTIAL if bool(seen.any()) else SKIP
        if kind != SKIP:
            _append(plan.ranges, KeyRange(n0, n1, kind == FULL), block_n)
    return plan


def _append(ranges: list[KeyRange], new: KeyRange, block_n: int) -> None:
    """Append a range, joined to the last one where they touch, are alike and stay a block."""
    last = ranges[-1] if ranges else None
    if (
        last is not None
        and last.stop == new.start
        and last.is_full == new.is_full
        and new.stop - last.start <= block_n
    ):
        ranges[-1] = KeyRange(last.start, new.stop, new.is_full)
    else:
        ranges.append(new)


def _bit_step(mask: Mask, block_n: int) -> int:
    """Step by the mask's own tiles so that a hidden tile is skipped, not tested."""
    sizes = [leaf.block_n for leaf in _bit_leaves(mask)]
    # Steps of less than 16 keys would cost more than the tests they save.
    return min(block_n, max(16, min(sizes)))


def _bit_leaves(mask: Mask) -> list[Bits]:
    if isinstance(mask, (And, Or)):
        return _bit_leaves(mask.left) + _bit_leaves(mask.right)
    if isinstance(mask, Not):
        return _bit_leaves(mask.inner)
    return [mask] if isinstance(mask, Bits) else []


def _classify(mask: Mask, rows: Rows, n0: int, n1: int) -> int:
    """SKIP or FULL where tile kinds and intervals prove it, PARTIAL where they do not."""
    if isinstance(mask, Not):
        return FULL - _classify(mask.inner, rows, n0, n1)
    if isinstance(mask, (And, Or)):
        kinds = [_classify(side, rows, n0, n1) for side in (mask.left, mask.right)]
        return min(kinds) if isinstance(mask, And) else max(kinds)
    if isinstance(mask, Bits):
        return _classify_bits(mask, rows, n0, n1)
    starts, stops = row_intervals(mask, rows)
    if _are_covered(starts, stops, [(n0, n1)])[0]:
        return FULL
    return PARTIAL if bool(((starts < n1) & (stops > n0) & (stops > starts)).any()) else SKIP


def _classify_bits(mask: Bits, rows: Rows, n0: int, n1: int) -> int:
    j = rows.index(n0, n1).j
    # The corners of the tile in the mask's own grid; a packed tile takes the hull of its documents.
    b0, b1 = (int(rows.b.min()), int(rows.b.max())) if mask.kinds.shape[0] > 1 else (0, 0)
    h0, h1 = (int(rows.h.min()), int(rows.h.max())) if mask.kinds.shape[1] > 1 else (0, 0)
    i0, i1 = int(rows.i.min()), int(rows.i.max())
    j0, j1 = int(j.min()), int(j.max())
    x1, y1 = i1 // mask.block_m, j1 // mask.block_n
    kinds = mask.kinds[
        b0 : b1 + 1,
        h0 : h1 + 1,
        max(0, i0) // mask.block_m : x1 + 1,
        max(0, j0) // mask.block_n : y1 + 1,
    ]
    if kinds.numel() == 0 or not bool(kinds.any()):
        return SKIP
    inside = i0 >= 0 and j0 >= 0 and x1 < mask.kinds.shape[2] and y1 < mask.kinds.shape[3]
    return FULL if inside and bool((kinds == 1).all()) else PARTIAL


def key_ranges(
    mask: Mask,
    positions: Positions,
    m: tuple[int, int],
    block_n: int,
    *,
    batch: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
) -> list[KeyRange]:
    """The key ranges that queries `[m0, m1)` visit, over the given batch rows and heads (all)."""
    batch = (0, 1 if positions.is_packed else positions.B) if batch is None else batch
    heads = (0, positions.H) if heads is None else heads
    if mask.has_predicate:
        mask = mask.lowered(positions.B, positions.H, *positions.extent)
    return plan_rows(mask, positions.rows(batch, heads, m), positions.N, block_n).ranges


def tile_map(mask: Mask, positions: Positions, block_m: int, block_n: int) -> Tensor:
    """SKIP, PARTIAL or FULL for every tile, int8 `[b or 1, h or 1, nM, nN]`, without a sync.

    Tile (x, y) holds query rows `[x block_m, ...)` and stored keys `[y block_n, ...)`. Batch and
    head axes are 1 where the mask does not depend on them.
    """
    M, N = positions.M, positions.N
    device = positions.host_device
    if mask.has_predicate:
        mask = mask.lowered(positions.B, positions.H, *positions.extent, device)
    batch = (0, 1 if positions.is_packed else positions.B)
    n0 = torch.arange(0, N, block_n, device=device)
    n1 = (n0 + block_n).clamp(max=N)
    strips = []
    for m0 in range(0, M, block_m):
        rows = positions.rows(batch, (0, positions.H), (m0, min(M, m0 + block_m)))
        if mask.is_exact:
            starts, stops = (x.unsqueeze(-1) for x in row_intervals(mask, rows))
            seen = (torch.minimum(stops, n1) - torch.maximum(starts, n0)).clamp(min=0).sum(-2)
        else:
            visible = RowPlan(mask, rows, []).visible(0, N).to(torch.int64)
            padded = torch.nn.functional.pad(visible, (0, n0.numel() * block_n - N))
            seen = padded.unflatten(-1, (n0.numel(), block_n)).sum(-1)
        some, whole = (seen > 0).any(-2), (seen == n1 - n0).all(-2)
        strips.append(some.to(torch.int8) + whole.to(torch.int8))
    if not strips or N == 0:
        return torch.zeros(1, 1, len(strips), n0.numel(), dtype=torch.int8, device=device)
    b, h = (max(s.shape[d] for s in strips) for d in (0, 1))
    return torch.stack([s.expand(b, h, -1) for s in strips], dim=2)
