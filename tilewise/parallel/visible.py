"""What a mask lets queries at any positions see of keys at any positions. On the host.

`core/tiles.py` answers for consecutive rows and keys; here both are lists of positions in the whole
sequence, ascending, which is how ranks hold them. Query and key positions count from the same
token, so the op's own query offset is 0.

Dims: B batch, H query heads, S tokens of the sequence, M query positions, N key positions, I
    intervals a query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.mask import UNBOUNDED, Index, Mask, raise_mask
from ..core.mask_bits import from_function
from ..core.mask_leaves import causal, full, intervals, window
from ..core.positions import Rows
from ..core.tiles import row_intervals

# Elements of a bool tile or rows of intervals that are computed at once.
_ELEMENTS = 1 << 24
_ROWS = 1 << 16


def on_device(mask: Mask, B: int, H: int, size: int, device: torch.device | str) -> Mask:
    """The mask with its predicates evaluated and all its tensors on `device`."""
    flags, ints, tensors = mask.lowered(B, H, size, size, device).lower()
    # To a device nothing waits; from one, the numbers have to be there.
    waits = torch.device(device).type == "cpu"
    return raise_mask(flags, ints, [x.to(device, non_blocking=not waits) for x in tensors])


def local_intervals(
    mask: Mask, rows: Tensor, columns: Tensor, B: int = 1, H: int = 1
) -> tuple[Tensor, Tensor]:
    """Which of the keys at `columns` the queries at `rows` see, as indices into `columns`.

    Args:
        mask: with its tensors on the CPU. rows `[M]`, columns `[N]`: positions, ascending.
    Returns: lows and highs `[b, h, M, I]`, half-open, disjoint; high == low where empty. b and h
        are 1 where the mask does not tell batches and heads apart. They are what is visible where
        the mask is exact, and cover it otherwise.
    """
    size = int(columns[-1]) + 1 if columns.numel() else 0
    parts = [_intervals_of(mask, part, size, B, H) for part in rows.split(_ROWS)]
    if not parts:
        nothing = torch.zeros(1, 1, 0, 1, dtype=torch.int64, device="cpu")
        return nothing, nothing
    starts, stops = (torch.cat(side, 2) for side in zip(*parts, strict=True))
    used = (stops > starts).flatten(0, 2).any(0)
    if not bool(used.any()):
        used[0] = True
    starts, stops = starts[..., used].contiguous(), stops[..., used].contiguous()
    return torch.searchsorted(columns, starts), torch.searchsorted(columns, stops)


def _intervals_of(mask: Mask, rows: Tensor, size: int, B: int, H: int) -> tuple[Tensor, Tensor]:
    b, h = _axes(B, H)
    return row_intervals(mask, Rows(b, h, rows.reshape(1, 1, -1, 1), 0, 0, 0, size))


def _axes(B: int, H: int) -> tuple[Tensor, Tensor]:
    """Indices of batch rows and heads, on the CPU whatever torch's default device is."""
    b, h = (torch.arange(n, device="cpu") for n in (B, H))
    return b.reshape(-1, 1, 1, 1), h.reshape(1, -1, 1, 1)


def visible(mask: Mask, at: Index) -> Tensor:
    """`mask.visible` for keys that are not consecutive; bit tiles read a flat list as if it was."""
    rows = max(2, at.i.shape[2])
    j = at.j.expand(*at.j.shape[:2], rows, -1)
    if at.i.shape[2] > 1:
        return mask.visible(Index(at.b, at.h, at.i, j, at.offset))
    i = at.i.expand(*at.i.shape[:2], 2, -1)
    return mask.visible(Index(at.b, at.h, i, j, at.offset))[:, :, :1]


def area_of_rows(mask: Mask, size: int, B: int = 1, H: int = 1) -> Tensor:
    """How many keys each query of a sequence sees, float64 `[S]`, mean over batch and heads."""
    mask = on_device(mask, B, H, size, "cpu")
    b, h = _axes(B, H)
    strip = _ROWS if mask.is_exact else max(1, _ELEMENTS // max(1, size * B * H))
    areas = []
    for rows in torch.arange(size, device="cpu").split(strip):
        if mask.is_exact:
            starts, stops = _intervals_of(mask, rows, size, B, H)
            seen = (stops - starts).sum(-1)
        else:
            keys = torch.arange(size, device="cpu").reshape(1, 1, 1, -1)
            at = Index(b, h, rows.reshape(1, 1, -1, 1), keys, 0)
            seen = mask.visible(at).sum(-1)
        areas.append(seen.to(torch.float64).mean((0, 1)))
    return torch.cat(areas) if areas else torch.zeros(0, dtype=torch.float64, device="cpu")


def as_band(lows: Tensor, highs: Tensor, N: int) -> Mask | None:
    """Local intervals as the full, causal or window mask over local indices that they are, or None.

    A kernel needs no table for these, and skips and tests fewer tiles.
    """
    if lows.shape[:2] != (1, 1) or lows.shape[-1] != 1:
        return None
    low, high = lows.flatten(), highs.flatten()
    m = torch.arange(low.numel(), device="cpu")
    seen = high > low
    # The distance of each bound from its row, where the bound is not the edge of storage.
    lefts, rights = (m - low)[seen & (low > 0)], (high - m)[seen & (high < N)]
    left = int(lefts[0]) if lefts.numel() else UNBOUNDED
    right = int(rights[0]) - 1 if rights.numel() else UNBOUNDED
    start, stop = (m - left).clamp(0, N), (m + right + 1).clamp(0, N)
    if not torch.equal(stop > start, seen) or left + right < 0:
        return None
    if not torch.equal(start[seen], low[seen]) or not torch.equal(stop[seen], high[seen]):
        return None
    if left == right == UNBOUNDED:
        return full()
    if left == UNBOUNDED:
        return causal() if right == 0 and m.numel() == N else causal(offset=right)
    if right == UNBOUNDED:
        return window(0, None, offset=-left)
    return window(left + right, 0, offset=right)


class Packing(NamedTuple):
    """Sequences that are packed one after the other: queries `[q0, q1)`, keys `[k0, k1)`.

    mask: inside each, full or causal to its last key. edges: where they start and end, int32, of
    queries from q0 on and of keys from k0 on. Some have no keys, or no queries.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    mask: Mask
    edges: tuple[Tensor, Tensor]


def as_packed(lows: Tensor, highs: Tensor, most: int) -> list[Packing] | None:
    """Local intervals as packed sequences, or None.

    most: how many packings they may take. Rows of one document in several chunks, between which
    others are missing, see the same keys: each is of a packing of its own.
    """
    if lows.shape[:2] != (1, 1) or lows.shape[-1] != 1:
        return None
    low, high = lows.flatten(), highs.flatten()
    low, high = (torch.where(high > low, x, -1) for x in (low, high))
    # Inside a sequence that is full all rows end at one key, and in a causal one each a key later.
    steps = torch.where(low >= 0, torch.arange(low.numel(), device="cpu"), 0)
    full_starts, causal_starts = _run_starts(low, high), _run_starts(low, high - steps)
    is_full = full_starts.numel() <= causal_starts.numel()
    starts = full_starts if is_full else causal_starts
    stops = torch.cat([starts[1:], starts.new_tensor([low.numel()])])
    # Each packing: edges of queries and of keys, from the first of either on.
    packings: list[tuple[list[int], list[int]]] = []
    for start, stop, k0, k1 in zip(
        *(x.tolist() for x in (starts, stops, low[starts], high[stops - 1])), strict=True
    ):
        if k0 < 0:
            continue
        free = next((x for x in packings if x[1][-1] <= k0), None)
        if free is None:
            if len(packings) == most:
                return None
            free = ([start], [k0])
            packings.append(free)
        _append(*free, (start, stop), (k0, k1))
    mask = full() if is_full else causal()
    return [_packing(mask, *edges) for edges in packings]


def _run_starts(*numbers: Tensor) -> Tensor:
    """Where runs of rows start that have all numbers alike."""
    is_first = torch.ones_like(numbers[0], dtype=torch.bool)
    is_first[1:] = torch.stack([x[1:] != x[:-1] for x in numbers]).any(0)
    return is_first.nonzero().flatten()


def _append(
    q_edges: list[int], k_edges: list[int], rows: tuple[int, int], keys: tuple[int, int]
) -> None:
    """Put a sequence behind the others, and before it what is between: rows that see nothing here,
    then keys that nobody sees."""
    for row, key in ((rows[0], k_edges[-1]), (rows[0], keys[0]), (rows[1], keys[1])):
        if (row, key) != (q_edges[-1], k_edges[-1]):
            q_edges.append(row)
            k_edges.append(key)


def _packing(mask: Mask, q_edges: list[int], k_edges: list[int]) -> Packing:
    q0, k0 = q_edges[0], k_edges[0]
    edges = (
        torch.tensor([x - first for x in side], dtype=torch.int32, device="cpu")
        for side, first in ((q_edges, q0), (k_edges, k0))
    )
    q_side, k_side = edges
    return Packing(q0, q_edges[-1], k0, k_edges[-1], mask, (q_side, k_side))


def as_table(mask: Mask, rows: Tensor, columns: Tensor, B: int, H: int) -> Mask:
    """The mask over local indices: row m stands at `rows[m]`, key n at `columns[n]`."""
    if mask.is_exact:
        return intervals(*local_intervals(mask, rows, columns, B, H))

    def seen(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return visible(mask, Index(b, h, rows.to(m.device)[m], columns.to(n.device)[n], 0))

    return from_function(seen)
