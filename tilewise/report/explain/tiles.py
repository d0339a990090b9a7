"""The tiles of a call under one kernel's tile sizes: which are skipped, tested and taken whole.

Counted over every batch row and query head, exactly. A window without lengths has a closed form,
so a million tokens take no time; every other mask is asked row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ...core.band import Band
from ...core.mask import UNBOUNDED, And, Mask, Not, Or
from ...core.mask_bits import Bits
from ...core.tiles import RowPlan, row_intervals
from .request import Request

# Rows times key tiles that are looked at one by one: some ten seconds on one core.
_MOST_WORK = 1 << 30


@dataclass(frozen=True)
class Tiles:
    """What a kernel's programs visit, over all batch rows and query heads.

    key_rows, query_rows: of visited tiles, their keys and their queries added up. area: of visited
    tiles, their elements; pairs: those of them that are visible.
    """

    block_m: int
    block_n: int
    query_tiles: int
    key_tiles: int
    full: int
    partial: int
    skipped: int
    key_rows: int
    query_rows: int
    area: int
    pairs: int

    @property
    def visited(self) -> int:
        return self.full + self.partial

    @property
    def total(self) -> int:
        return self.visited + self.skipped


@dataclass(frozen=True)
class Edges:
    """Where tiles begin, with the end: tile x holds rows `[rows[x], rows[x + 1])`."""

    rows: list[int]
    keys: list[int]


def edges_of(request: Request, block_m: int, block_n: int, batch: int = 0) -> Edges:
    """The tiles of one batch row. Where documents are places of their own, so are their tiles."""
    band = request.piece.band
    documents = None if band is None else band.documents
    M, N = request.M, request.N
    cuts: Sequence[int] = ()
    if documents is not None:
        row = documents if documents.dim() == 1 else documents[min(batch, documents.shape[0] - 1)]
        cuts = row.tolist()
    return Edges(
        _cut(M, block_m, [x - (N - M) for x in cuts]),
        _cut(N, block_n, cuts),
    )


def _cut(length: int, block: int, cuts: Sequence[int]) -> list[int]:
    starts = sorted({0, length, *(min(max(x, 0), length) for x in cuts)})
    edges = [x for a, b in pairwise(starts) for x in range(a, b, block)]
    return [*edges, length]


def count(request: Request, block_m: int, block_n: int) -> Tiles:
    """Raises: ValueError where that would take minutes."""
    band = request.piece.band
    if band is not None and not band.has_tensors:
        return _count_band(request, band, block_m, block_n)
    if request.M * -(-request.N // block_n) > _MOST_WORK:
        raise ValueError(
            f"the tiles of mask {request.mask_text!r} are counted row by row, and {request.M} x "
            f"{request.N} are too many; a shorter seqlen shows the same"
        )
    totals = [0] * 8
    last = edges_of(request, block_m, block_n)
    documents = None if band is None else band.documents
    differs = documents is not None and documents.dim() == 2 and documents.shape[0] > 1
    spans = [(b, b + 1) for b in range(request.B)] if differs else [(0, request.B)]
    for span in spans:
        last = edges_of(request, block_m, block_n, span[0])
        kinds, pairs = classify(request, last, span)
        repeats = (span[1] - span[0]) * request.H // (kinds.shape[0] * kinds.shape[1])
        for i, found in enumerate(_add_up(kinds, last)):
            totals[i] += found * repeats
        totals[6] += pairs * repeats
    full, partial, skipped, key_rows, query_rows, area, pairs, _ = totals
    return Tiles(
        block_m, block_n, len(last.rows) - 1, len(last.keys) - 1,
        full, partial, skipped, key_rows, query_rows, area, pairs,
    )  # fmt: skip


def classify(request: Request, edges: Edges, batch: tuple[int, int]) -> tuple[Tensor, int]:
    """0, 1 or 2 (skipped, partial, full) of every tile, int8 `[b or 1, h or 1, X, Y]`, and how many
    pairs are visible. `core.tiles.tile_map` with edges of any kind; the axes of batch rows and
    heads are 1 where the mask does not depend on them."""
    mask, positions = request.lowered, request.positions
    n_batch, n_heads = told_apart(request, mask)
    if n_batch == 1:
        batch = (batch[0], batch[0] + 1)
    n0, n1 = torch.tensor(edges.keys[:-1]), torch.tensor(edges.keys[1:])
    strips, pairs = [], 0
    for m in pairwise(edges.rows):
        rows = positions.rows(batch, (0, n_heads), m)
        if mask.is_exact:
            starts, stops = (x.unsqueeze(-1) for x in row_intervals(mask, rows))
            seen = (torch.minimum(stops, n1) - torch.maximum(starts, n0)).clamp(min=0).sum(-2)
        else:
            visible = RowPlan(mask, rows, []).visible(0, positions.N).cumsum(-1, dtype=torch.int32)
            reached = torch.nn.functional.pad(visible, (1, 0))
            seen = reached[..., n1] - reached[..., n0]
        some, whole = (seen > 0).any(-2), (seen == n1 - n0).all(-2)
        strips.append(some.to(torch.int8) + whole.to(torch.int8))
        # Rows that all see the same have one row of intervals.
        pairs += int(seen.sum()) * (m[1] - m[0]) // max(1, seen.shape[-2])
    b, h = (max(s.shape[d] for s in strips) for d in (0, 1))
    return torch.stack([s.expand(b, h, -1) for s in strips], dim=2), pairs


def told_apart(request: Request, mask: Mask) -> tuple[int, int]:
    """How many batch rows and heads a mask tells apart: all of them, or 1."""
    if isinstance(mask, (And, Or)):
        left, right = (told_apart(request, side) for side in (mask.left, mask.right))
        return max(left[0], right[0]), max(left[1], right[1])
    if isinstance(mask, Not):
        return told_apart(request, mask.inner)
    if isinstance(mask, Bits):
        return mask.kinds.shape[0], mask.kinds.shape[1]
    rows = request.positions.rows((0, request.B), (0, request.H), (0, 1))
    shape = row_intervals(mask, rows)[0].shape
    return shape[0], shape[1]


def _add_up(kinds: Tensor, edges: Edges) -> tuple[int, int, int, int, int, int]:
    heights, widths = (torch.tensor(x).diff() for x in (edges.rows, edges.keys))
    visited = (kinds > 0).sum((0, 1))
    return (
        int((kinds == 2).sum()),
        int((kinds == 1).sum()),
        int((kinds == 0).sum()),
        int((visited * widths).sum()),
        int((visited * heights[:, None]).sum()),
        int((visited * widths * heights[:, None]).sum()),
    )


def _count_band(request: Request, band: Band, block_m: int, block_n: int) -> Tiles:
    """Of a window whose position is an int: what a row sees begins and ends one key after what the
    row before it does."""
    M, N = request.M, request.N
    offset = band.offset if isinstance(band.offset, int) else N - M
    left = -UNBOUNDED if band.left == UNBOUNDED else offset - band.left
    right = UNBOUNDED if band.right == UNBOUNDED else offset + band.right + 1

    def start(m: Tensor) -> Tensor:
        return (m + left).clamp(0, N)

    def stop(m: Tensor) -> Tensor:
        return torch.maximum((m + right).clamp(0, N), start(m))

    m0 = torch.arange(0, M, block_m)
    m1 = (m0 + block_m).clamp(max=M)
    # A row that sees nothing is the first or the last of the tile.
    low, high = start(m0), stop(m1 - 1)
    is_some = high > low
    begin = torch.where(is_some, low // block_n, 0)
    end = torch.where(is_some, -(-high // block_n), 0)
    whole_low, whole_high = start(m1 - 1), stop(m0)
    whole_begin = -(-whole_low // block_n)
    whole_end = torch.where(whole_high == N, -(-N // block_n), whole_high // block_n)
    whole = (whole_end - whole_begin).clamp(min=0)
    whole = torch.where(is_some & (whole_high > whole_low), whole, 0)
    keys = (end * block_n).clamp(max=N) - begin * block_n
    rows = torch.arange(M)
    heads, visited = request.B * request.H, int((end - begin).sum())
    n_rows, n_keys, full = m0.numel(), -(-N // block_n), int(whole.sum())
    heights = m1 - m0
    return Tiles(
        block_m,
        block_n,
        n_rows,
        n_keys,
        full * heads,
        (visited - full) * heads,
        (n_rows * n_keys - visited) * heads,
        int(keys.sum()) * heads,
        int(((end - begin) * heights).sum()) * heads,
        int((keys * heights).sum()) * heads,
        int((stop(rows) - start(rows)).sum()) * heads,
    )
