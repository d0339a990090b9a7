"""Which calls of the core compute a rank's queries against a rank's keys.

Both are stored as runs of consecutive positions. Where it can, a plan makes one call for a whole
step: local queries and keys are ascending, so causal attention stays causal, a window of stripes
stays a window, and what is fully visible needs no positions at all. Documents dealt chunk by chunk
are packed sequences of what is left of them. Otherwise each run of queries meets each run of keys
as a piece of its own, with the mask itself and `q_start` and `k_start`. Where that would be many
calls, a few of packed sequences do where all keys of such documents are there at once; or one call
takes a table of intervals over local indices.

Everything here happens on the host, once for a mask and a layout; `api.py` keeps it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import full, intervals
from .layout import Layout
from .visible import as_band, as_packed, as_table, local_intervals, on_device

# More pieces than this become one call with a table. A piece is a launch and a merge.
MOST_PIECES = 8
# Of packed sequences, where one would not do: each goes over all rows once more, and a table's call
# is slower than several of them.
MOST_PACKINGS = 4
# With more runs than this there are more pieces; they are not even counted.
MOST_PAIRS = 64
# Beyond this, pieces that need their positions (ALiBi, bias, dropout) are refused.
MOST_POSITIONED = 1024


class Call(NamedTuple):
    """Local queries `[q0, q1)` against local keys `[k0, k1)`, visible by `mask`.

    q_start, k_start: positions of the first query and key, where the mask counts by them; None
    where it counts local indices. edges: where packed sequences start, of queries and of keys, from
    q0 and k0 on; the mask is then of each of them.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask
    q_start: int | None = None
    k_start: int | None = None
    edges: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Side:
    """The tokens that one side of a step holds: ascending positions and the runs they make."""

    positions: Tensor
    runs: Tensor

    @classmethod
    def of(cls, layout: Layout, rank: int) -> Side:
        return cls(layout.positions(rank), layout.runs[rank])

    @classmethod
    def whole(cls, size: int) -> Side:
        runs = torch.tensor([[0, size]], device="cpu")
        return cls(torch.arange(size, device="cpu"), runs if size else runs[:0])

    def halves(self) -> tuple[Side, Side]:
        """The earlier tokens and the later ones, as many of each."""
        middle = self.positions.numel() // 2
        if middle == 0:
            return Side(self.positions[:0], self.runs[:0]), self
        edge = int(self.positions[middle])
        front, back = self.runs.clamp(max=edge), self.runs.clamp(min=edge)
        front, back = (x[x[:, 1] > x[:, 0]] for x in (front, back))
        return Side(self.positions[:middle], front), Side(self.positions[middle:], back)


@dataclass(frozen=True)
class Request:
    """What a plan depends on besides mask and layout.

    batch, heads: B and H of the call. by_position: whether something besides the mask counts by
    position (ALiBi, bias, dropout). device: where the masks of the calls are needed.
    """

    batch: int
    heads: int
    by_position: bool
    device: torch.device


@dataclass(frozen=True)
class Plan:
    """The calls of one rank for each rank's keys.

    calls: by source rank. hops: after how many steps of a ring no rank needs another's keys.
    halves: the calls of the rank's own keys again, those of its earlier queries and of its later
        ones; where nothing hops, all are among the latter.
    whole: the calls against the keys of the whole sequence, in ascending order.
    """

    calls: tuple[tuple[Call, ...], ...]
    hops: int
    halves: tuple[tuple[Call, ...], tuple[Call, ...]]
    whole: tuple[Call, ...]


def make_plan(
    mask: Mask, layout: Layout, rank: int, request: Request, *, gathers: bool = False
) -> Plan:
    """The plan of one rank.

    Args:
        mask: its predicates evaluated. One whose tensors live on a GPU is read, once: to keep
            forward free of that, build masks from host lengths.
        gathers: whether the queries meet all keys at once, by position, or shard by shard.
    """
    B, H, size = request.batch, request.heads, layout.size
    here = on_device(mask, B, H, size, "cpu")
    rows = Side.of(layout, rank)
    # One copy for all calls that take the mask as it is.
    placed = _Placed({id(here): on_device(here, B, H, size, request.device)}, request)
    if gathers:
        whole = placed.all(plan_calls(here, rows, Side.whole(size), request))
        return Plan((), 0, ((), ()), whole)
    calls = tuple(
        placed.all(plan_calls(here, rows, Side.of(layout, source), request))
        for source in range(layout.ranks)
    )
    hops = _count_hops(here, layout, request)
    if hops == 0:
        return Plan(calls, hops, ((), calls[rank]), ())
    (early, late), first = rows.halves(), rows.positions.numel() // 2
    halves = [plan_calls(here, half, rows, request) for half in (early, late)]
    halves[1] = [call._replace(q0=call.q0 + first, q1=call.q1 + first) for call in halves[1]]
    return Plan(calls, hops, (placed.all(halves[0]), placed.all(halves[1])), ())


@dataclass(frozen=True)
class _Placed:
    """Moves the masks of calls to the device, the mask of the whole sequence only once."""

    known: dict[int, Mask]
    request: Request

    def all(self, calls: list[Call]) -> tuple[Call, ...]:
        found = (call._replace(mask=self.one(call)) for call in calls)
        return tuple(
            call
            if call.edges is None
            else call._replace(edges=(self._move(call.edges[0]), self._move(call.edges[1])))
            for call in found
        )

    def _move(self, edges: Tensor) -> Tensor:
        return edges.to(self.request.device, non_blocking=True)

    def one(self, call: Call) -> Mask:
        if id(call.mask) in self.known or call.mask.key is not None:
            return self.known.get(id(call.mask), call.mask)
        request, N = self.request, call.k1 - call.k0
        lowered = call.mask.lowered(request.batch, request.heads, call.q1 - call.q0, N)
        return on_device(lowered, request.batch, request.heads, N, request.device)


def _count_hops(mask: Mask, layout: Layout, request: Request) -> int:
    """The farthest that any rank's keys travel until nobody further on sees them."""
    R, held = layout.ranks, [layout.positions(rank) for rank in range(layout.ranks)]
    whole = torch.arange(layout.size, device="cpu")
    sizes = (request.batch, request.heads)
    hulls = [
        _trim(local_intervals(mask, rows, whole, *sizes), (0, rows.numel()), (0, layout.size))
        for rows in held
    ]
    ends = [(int(keys[0]), int(keys[-1])) if keys.numel() else None for keys in held]
    for hops in range(R - 1, 0, -1):
        for rank in range(R):
            hull, source = hulls[rank], (rank - hops) % R
            keys = ends[source]
            # Most pairs are apart, and that takes no tensors to see.
            if hull is None or keys is None or keys[1] < hull[2] or keys[0] >= hull[3]:
                continue
            lows, highs = local_intervals(mask, held[rank], held[source], *sizes)
            if bool((highs > lows).any()):
                return hops
    return 0


def plan_calls(mask: Mask, rows: Side, columns: Side, request: Request) -> list[Call]:
    """The calls that compute `rows` against `columns`; none where nothing is visible."""
    M, N = rows.positions.numel(), columns.positions.numel()
    if M == 0 or N == 0:
        return []
    at = (rows.positions, columns.positions, request.batch, request.heads)
    bounds = local_intervals(mask, *at)
    whole = _trim(bounds, (0, M), (0, N))
    if whole is None:
        return []
    q0, q1, k0, k1 = whole
    local = mask.is_exact and not request.by_position
    if local:
        band = as_band(*_inside(bounds, whole), k1 - k0)
        if band is not None:
            return [Call(q0, q1, k0, k1, band)]
        packed = _packed(bounds, whole, 1) if request.batch == 1 else None
        if packed is not None:
            return packed
    pairs = rows.runs.shape[0] * columns.runs.shape[0]
    if pairs <= (MOST_POSITIONED if request.by_position else MOST_PAIRS):
        calls = _pieces(mask, rows, columns, bounds, request)
        if request.by_position or len(calls) <= MOST_PIECES:
            return calls
    if request.by_position:
        raise NotImplementedError(
            "context_parallel_attention: ALiBi, bias and dropout count by position, and this "
            f"layout cuts them into {pairs} pieces (at most {MOST_POSITIONED}); use a zigzag or "
            "contiguous layout."
        )
    if not mask.is_exact:
        table = as_table(mask, *at)
        return [Call(0, M, 0, N, table)]
    packed = _packed(bounds, whole, MOST_PACKINGS) if request.batch == 1 else None
    if packed is not None:
        return packed
    return [Call(q0, q1, k0, k1, intervals(*(x.to(torch.int32) for x in _inside(bounds, whole))))]


Bounds = tuple[Tensor, Tensor]
Box = tuple[int, int, int, int]


def _packed(bounds: Bounds, box: Box, most: int) -> list[Call] | None:
    """Calls of packed sequences, at most so many."""
    found = as_packed(*_inside(bounds, box), most)
    if found is None:
        return None
    q0, _, k0, _ = box
    return [Call(q0 + x.q0, q0 + x.q1, k0 + x.k0, k0 + x.k1, x.mask, edges=x.edges) for x in found]


def _pieces(mask: Mask, rows: Side, columns: Side, bounds: Bounds, request: Request) -> list[Call]:
    """A call for each run of queries and run of keys that see each other."""
    calls = []
    for m, q_start in _spans(rows.runs):
        for n, k_start in _spans(columns.runs):
            box = _trim(bounds, m, n)
            if box is None:
                continue
            width = box[3] - box[2]
            lows, highs = _inside(bounds, box)
            starts: tuple[int | None, int | None]
            starts = (q_start + box[0] - m[0], k_start + box[2] - n[0])
            piece = mask
            if mask.is_exact and bool(((highs - lows).sum(-1) == width).all()):
                piece = full()
            elif mask.is_exact and not request.by_position:
                band = as_band(lows, highs, width)
                piece = mask if band is None else band
            if piece is not mask and not request.by_position:
                starts = (None, None)
            calls.append(Call(*box, piece, *starts))
    return calls


def _spans(runs: Tensor) -> list[tuple[tuple[int, int], int]]:
    """Each run's local indices `[from, to)` and its first position."""
    found, at = [], 0
    for start, stop in runs.tolist():
        found.append(((at, at + stop - start), start))
        at += stop - start
    return found


def _trim(bounds: Bounds, m: tuple[int, int], n: tuple[int, int]) -> Box | None:
    """The smallest box inside rows m and keys n that holds all that is visible there."""
    lows, highs = (x[:, :, m[0] : m[1]].clamp(*n) for x in bounds)
    seen = highs > lows
    rows = seen.any(-1).any(0).any(0).nonzero()
    if rows.numel() == 0:
        return None
    q0, q1 = m[0] + int(rows[0]), m[0] + int(rows[-1]) + 1
    return q0, q1, int(lows[seen].min()), int(highs[seen].max())


def _inside(bounds: Bounds, box: Box) -> Bounds:
    """The bounds of a box's rows, as indices from its first key on."""
    q0, q1, k0, k1 = box
    lows, highs = (x[:, :, q0:q1].clamp(k0, k1) - k0 for x in bounds)
    return lows, highs
