"""The walk through a schedule: the tiles of one head in the kernels' order, and numbers to follow.

The page computes online softmax for one row of each query tile, over the call's own mask and
length, on inputs that it and this module make from the same integers. What the library gives for
those rows goes along, so that the page can end with "the same".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...core.tiles import RowPlan
from . import tiles as tiling
from .explanation import Explanation
from .plan import Launch
from .request import Request
from .tiles import Edges

# Head dims of the inputs that are followed; the schedule keeps the call's own.
D, E = 8, 4
# Cells of a side of the grid that is shown; one then stands for several tiles.
_MOST_CELLS = 64
# In the order of the numbers that inputs are made from.
_TENSORS = ("q", "k", "v", "dout")
_TITLES = {
    "forward": "Forward: O and LSE",
    "rows": "Backward: dQ",
    "backward": "Backward: dQ, dK and dV",
}


def draw(name: str, rows: Tensor, width: int) -> Tensor:
    """`[len(rows), width]` fp64 from integers alone: multiples of 1/64 in [-2, 2)."""
    mask = 0xFFFFFFFF
    at = rows[:, None] * width + torch.arange(width) + (_TENSORS.index(name) << 28)
    for _ in range(2):
        at = ((at ^ (at >> 16)) * 0x45D9F3B) & mask
    at = at ^ (at >> 16)
    return ((at & 255) - 128).double() / 64


@dataclass(frozen=True)
class Pass:
    """One kernel's walk. kinds `[X, Y]` of cells; visits: for each owner in order, its cells."""

    title: str
    kernel: str
    owner: str
    block_m: int
    block_n: int
    edges: Edges
    # Real tiles of a cell, by row and by column.
    row_tiles: list[int]
    kinds: Tensor
    visits: list[tuple[int, list[int]]]
    is_merged: bool
    # Whether dQ is added up over all owners, and so is whole at the end alone.
    adds_dq: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "kernel": self.kernel,
            "owner": self.owner,
            "block_m": self.block_m,
            "block_n": self.block_n,
            "rows": self.edges.rows,
            "keys": self.edges.keys,
            "row_tiles": self.row_tiles,
            "kinds": ["".join(map(str, row)) for row in self.kinds.tolist()],
            "visits": self.visits,
            "is_merged": self.is_merged,
            "adds_dq": self.adds_dq,
        }


def passes(found: Explanation) -> list[Pass]:
    """Of every kernel that goes over tiles; of plain torch, of its forward."""
    launches = [x for x in found.plan.launches if x.role in ("forward", "keys", "rows", "backward")]
    if launches:
        return [_pass(found.request, launch) for launch in launches]
    tiles = found.forward_tiles
    return [_build(found.request, "Forward: O and LSE", "tiled", "rows", tiles.block_m,
                   tiles.block_n, _in_order)]  # fmt: skip


def _pass(request: Request, launch: Launch) -> Pass:
    title = _TITLES.get(launch.role) or f"Backward: {' and '.join(launch.makes)}"
    owner = "keys" if launch.role in ("keys", "backward") else "rows"
    order = _whole_first
    if "hopper" in launch.name:
        order = _from_the_end if launch.role == "forward" else _in_order
    block_m, block_n = launch.config[:2]
    found = _build(request, title, launch.name, owner, block_m, block_n, order)
    return replace(found, adds_dq=launch.role == "backward")


def _build(
    request: Request, title: str, kernel: str, owner: str, block_m: int, block_n: int, order: Any
) -> Pass:
    edges = tiling.edges_of(request, block_m, block_n)
    rows, row_tiles = _merge(edges.rows)
    keys, key_tiles = _merge(edges.keys)
    merged = Edges(rows, keys)
    kinds = tiling.classify(request, merged, (0, 1))[0][0, 0]
    # A tile that the end of its sequence cuts short is tested, also where all of it is seen.
    tested = _is_short(keys, key_tiles, block_n)[None, :]
    if owner == "keys":
        tested = tested | _is_short(rows, row_tiles, block_m)[:, None]
    kinds = torch.where(tested, kinds.clamp(max=1), kinds)
    table: list[list[int]] = kinds.tolist()
    if owner == "keys":
        columns = [list(column) for column in zip(*table, strict=True)]
        visits = [(y, order(columns[y])) for y in range(len(columns))]
    else:
        # Late rows first: under a causal mask they have most to do.
        visits = [(x, order(table[x])) for x in reversed(range(len(table)))]
    is_merged = max(*row_tiles, *key_tiles) > 1
    return Pass(title, kernel, owner, block_m, block_n, merged, row_tiles, kinds, visits, is_merged)


def _merge(edges: Sequence[int]) -> tuple[list[int], list[int]]:
    """Edges of at most so many cells, and how many tiles each holds."""
    step = -(-(len(edges) - 1) // _MOST_CELLS)
    kept = [*range(0, len(edges) - 1, step), len(edges) - 1]
    counts = [b - a for a, b in pairwise(kept)]
    return [edges[i] for i in kept], counts


def _is_short(edges: Sequence[int], tiles: Sequence[int], block: int) -> Tensor:
    return torch.tensor(edges).diff() < block * torch.tensor(tiles)


def _whole_first(kinds: Sequence[int]) -> list[int]:
    """Triton's kernels: tiles without a test, then those with one."""
    return [i for kind in (2, 1) for i, have in enumerate(kinds) if have == kind]


def _from_the_end(kinds: Sequence[int]) -> list[int]:
    """Hopper's: from the last key on, so that the test of the diagonal comes first."""
    return [i for i in reversed(range(len(kinds))) if kinds[i]]


def _in_order(kinds: Sequence[int]) -> list[int]:
    """Hopper's backward, and plain torch."""
    return [i for i, kind in enumerate(kinds) if kind]


def traced_rows(found: Explanation) -> list[int]:
    """The last row of each row of cells, of every pass."""
    rows = {edge - 1 for one in passes(found) for edge in one.edges.rows[1:]}
    return sorted(rows)


def runs(request: Request, row: int) -> list[tuple[int, int]]:
    """The keys that a row of the first batch row and head sees, as intervals."""
    rows = request.positions.rows((0, 1), (0, 1), (row, row + 1))
    plan = RowPlan(request.lowered, rows, [])
    seen = plan.visible(0, request.N).expand(1, 1, 1, request.N).flatten().to(torch.int8)
    edges = torch.nn.functional.pad(seen, (1, 1)).diff()
    starts, stops = (torch.nonzero(edges == sign).flatten().tolist() for sign in (1, -1))
    return list(zip(starts, stops, strict=True))


def library_results(request: Request, rows: list[int]) -> dict[str, Tensor]:
    """out `[R, E]`, lse `[R]` and dq `[R, D]` of these rows in fp64, as the library has them."""
    from ...dense.api import attention_partial

    # The mask of the first batch row and head may be one of many.
    B, H = tiling.told_apart(request, request.lowered)
    keys = torch.arange(request.N)
    k, v = (draw(*x)[None, :, None].expand(B, -1, H, -1) for x in (("k", keys, D), ("v", keys, E)))
    results: list[tuple[Tensor, ...]] = []
    if request.M == request.N:
        for row in rows:
            results.append(_attend(attention_partial, request, [row], k, v, {"q_start": row}))
    else:
        every = _attend(attention_partial, request, list(range(request.M)), k, v, {})
        results.append(tuple(x[rows] for x in every))
    out, lse, dq = (torch.cat(x) for x in zip(*results, strict=True))
    return {"out": out, "lse": lse, "dq": dq}


def _attend(
    op: Any, request: Request, rows: list[int], k: Tensor, v: Tensor, placement: dict[str, Any]
) -> tuple[Tensor, ...]:
    B, H = k.shape[0], k.shape[2]
    index = torch.tensor(rows)
    q = draw("q", index, D)[None, :, None].expand(B, -1, H, -1).clone().requires_grad_()
    dout = draw("dout", index, E)[None, :, None].expand(B, -1, H, -1)
    result = op(q, k, v, mask=request.lowered, backend="tiled", **placement)
    (dq,) = torch.autograd.grad(result.out, q, dout)
    return result.out[0, :, 0].detach(), result.lse[0, 0].detach(), dq[0, :, 0]


def as_json(found: Explanation) -> dict[str, Any]:
    """What the page walks through."""
    request, rows = found.request, traced_rows(found)
    results = library_results(request, rows)
    return {
        "D": D,
        "E": E,
        "M": request.M,
        "N": request.N,
        "head_dim": request.D,
        "value_dim": request.E,
        "itemsize": request.itemsize,
        "heads": request.B * request.H,
        "passes": [one.as_json() for one in passes(found)],
        "traced": {
            str(row): {
                "runs": runs(request, row),
                "out": results["out"][i].tolist(),
                "lse": None if results["lse"][i].isneginf() else results["lse"][i].item(),
                "dq": results["dq"][i].tolist(),
            }
            for i, row in enumerate(rows)
        },
    }
