"""What the tiled backend's forward and backward share: how a call is cut, loaded and scored.

Plain torch on any device. A *lane* is a (batch row, kv head) pair; the query heads of its group are
stacked in its rows, so K and V are read once per group and never repeated.

Dims: B batch, M queries, N keys, H query heads, G kv heads, r = H / G, D q/k dim, E value dim;
    L lanes of a tile, m rows and n keys of a tile.
Units: `Units` says whether scores and their statistics are natural or in log2 units.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.philox import keep_mask, keep_tile
from ..core.positions import Rows
from ..core.tiles import RowPlan, plan_rows
from .piece import Piece, Terms


class Units(NamedTuple):
    """The units of scores: a natural score times `per_nat`, with the matching exp and log."""

    per_nat: float
    exp: Callable[..., Tensor]
    log: Callable[..., Tensor]

    @classmethod
    def of(cls, terms: Terms) -> Units:
        """log2 where the factor goes into the product: exp2 took 0.16 ns an element, exp 0.42.

        With terms that are added to the scores, the multiplication by log2 e would be one more
        rounding, and would overflow where a bias is the dtype's most negative number.
        """
        plain = terms.softcap is None and terms.bias is None and terms.alibi_slopes is None
        return cls(math.log2(math.e), torch.exp2, torch.log2) if plain else _NATURAL


_NATURAL = Units(1.0, torch.exp, torch.log)

# Measured at B 1 H 8 M 4096 D 64 fp32 on 2 cores of an EPYC with AVX-512 (2026-11-29), forward and
# backward in ms: 256 x 512 took 254 + 642 (with a window of 512: 71 + 155), 128 x 512 273 + 678,
# 512 x 128 269 + 621 (window: 95 + 206). Rows cost what a window does not see.
BLOCK_M = 256
BLOCK_N = 512
# The most keys of a product off the CPU, where cuBLAS adds up a row of few queries in one chain:
# 512 terms took fp32 6 % over its budget on an H200.
GPU_BLOCK_N = 256
# Scores of one tile, over all its lanes: 4 MiB in fp32, which the last-level cache holds.
TILE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Tile:
    """Batch rows `[b0, b1)`, kv heads `[g0, g1)` and query rows `[m0, m1)` computed together."""

    b0: int
    b1: int
    g0: int
    g1: int
    m0: int
    m1: int
    group: int

    @property
    def heads(self) -> tuple[int, int]:
        return self.g0 * self.group, self.g1 * self.group

    @property
    def lanes(self) -> int:
        return (self.b1 - self.b0) * (self.g1 - self.g0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(batch rows, query heads, query rows): how `[L, r m]` reads as rows of the call."""
        return self.b1 - self.b0, (self.g1 - self.g0) * self.group, self.m1 - self.m0

    def rows(self, piece: Piece, device: torch.device) -> Rows:
        batch, m = (self.b0, self.b1), (self.m0, self.m1)
        return piece.positions.rows(batch, self.heads, m, device)

    def load_rows(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[B, M, H, X]` -> `[L, r m, X]`; a view where strides and dtype allow."""
        heads = slice(*self.heads)
        part = x[self.b0 : self.b1, self.m0 : self.m1, heads].unflatten(2, (-1, self.group))
        return part.permute(0, 2, 3, 1, 4).reshape(self.lanes, -1, x.shape[-1]).to(dtype)

    def add_rows(self, x: Tensor, target: Tensor) -> None:
        """Add `[L, r m, X]` into `[B, M, H, X]`."""
        heads = slice(*self.heads)
        part = target[self.b0 : self.b1, self.m0 : self.m1, heads].transpose(1, 2)
        part.add_(x.view(*self.shape, x.shape[-1]))

    def store_rows(self, x: Tensor, target: Tensor) -> None:
        heads = slice(*self.heads)
        part = target[self.b0 : self.b1, self.m0 : self.m1, heads].transpose(1, 2)
        part.copy_(x.view(*self.shape, x.shape[-1]))

    def load_statistics(self, x: Tensor) -> Tensor:
        """`[B, H, M]` -> `[L, r m]`."""
        part = x[self.b0 : self.b1, slice(*self.heads), self.m0 : self.m1]
        return part.reshape(self.lanes, -1)

    def store_statistics(self, x: Tensor, target: Tensor) -> None:
        part = target[self.b0 : self.b1, slice(*self.heads), self.m0 : self.m1]
        part.copy_(x.view(self.shape))

    def load_keys(self, x: Tensor, n0: int, n1: int, dtype: torch.dtype) -> Tensor:
        """`[B, N, G, X]` -> `[L, n, X]`; a view where strides and dtype allow."""
        part = x[self.b0 : self.b1, n0:n1, self.g0 : self.g1].transpose(1, 2)
        return part.reshape(self.lanes, n1 - n0, x.shape[-1]).to(dtype)

    def add_keys(self, x: Tensor, target: Tensor, n0: int, n1: int) -> None:
        """Add `[L, n, X]` into `[B, N, G, X]`."""
        part = target[self.b0 : self.b1, n0:n1, self.g0 : self.g1].transpose(1, 2)
        part.add_(x.view(self.b1 - self.b0, self.g1 - self.g0, n1 - n0, x.shape[-1]))


_lowered: list[tuple[Any, str]] = []
_inside = 0
_switching = threading.Lock()


@contextmanager
def full_precision() -> Iterator[None]:
    """fp32 products stay fp32 where the user's setting would let matmuls round to tf32 or bf16.

    The setting belongs to the process: a thread whose own products run meanwhile gets them in fp32.
    The last of the threads that are inside gives it back.
    """
    global _inside
    backends: Any = torch.backends
    with _switching:
        if _inside == 0:
            for matmul in (backends.cuda.matmul, backends.mkldnn.matmul):
                if matmul.fp32_precision not in ("none", "ieee"):
                    _lowered.append((matmul, matmul.fp32_precision))
                    matmul.fp32_precision = "ieee"
        _inside += 1
    try:
        yield
    finally:
        with _switching:
            _inside -= 1
            while _inside == 0 and _lowered:
                matmul, setting = _lowered.pop()
                matmul.fp32_precision = setting


def block_n(device: torch.device) -> int:
    """The most keys that a tile on `device` takes at a time."""
    return BLOCK_N if device.type == "cpu" else min(BLOCK_N, GPU_BLOCK_N)


def cut(piece: Piece) -> Iterator[Tile]:
    """The tiles of a call: lanes so many at a time that a score tile has <= TILE_ELEMENTS."""
    (B, M), (N, G), group = piece.q.shape[:2], piece.k.shape[1:3], piece.group
    m = min(M, BLOCK_M)
    # A tile of few keys still holds its rows of q, out and their gradients.
    n = max(min(N, block_n(piece.q.device)), piece.q.shape[-1], piece.v.shape[-1])
    # Many query heads on one kv head: fewer rows of each.
    while m > 8 and group * m * n > TILE_ELEMENTS:
        m //= 2
    per_lane = max(1, group * m * n)
    g_step = max(1, min(G, TILE_ELEMENTS // per_lane))
    b_step = max(1, TILE_ELEMENTS // (per_lane * G)) if g_step == G else 1
    for b in range(0, B, b_step):
        for g in range(0, G, g_step):
            for m0 in range(0, M, max(1, m)):
                b1, g1, m1 = min(B, b + b_step), min(G, g + g_step), min(M, m0 + m)
                yield Tile(b, b1, g, g1, m0, m1, group)


class Workspace:
    """One call's plans and scratch: buffers by name, allocated once at the largest size asked for.

    Fresh allocations of a tile's size cost more than the arithmetic on it (page faults).
    """

    def __init__(self, piece: Piece) -> None:
        self._piece, self._index_device = piece, piece.index_device
        self._buffers: dict[str, Tensor] = {}

    def plan(self, tile: Tile) -> RowPlan:
        """What a tile visits, with its test on the device of the inputs."""
        piece = self._piece
        rows = tile.rows(piece, self._index_device)
        plan = plan_rows(piece.mask, rows, piece.positions.N, block_n(piece.q.device))
        if self._index_device == piece.q.device:
            return plan
        return plan.on(tile.rows(piece, piece.q.device))

    def take(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            dtype, device = self._piece.accumulator, self._piece.q.device
            buffer = torch.empty(size, dtype=dtype, device=device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


@dataclass
class Visibility:
    """The test of one partial key range on the tile's device, and who is in it at all.

    hidden: bool, broadcasts to `[b, h, m, n]`.
    seen_rows: bool `[L, r m, 1]`, seen_keys: bool `[L, n, 1]`; None where all are seen.
    A NaN in a row or key that is not seen must not be multiplied by 0.
    """

    hidden: Tensor
    seen_rows: Tensor | None
    seen_keys: Tensor | None

    @classmethod
    def of(cls, plan: RowPlan, tile: Tile, n0: int, n1: int) -> Visibility:
        visible = plan.visible(n0, n1)
        b, h, m = tile.shape
        rows = visible.any(-1).expand(b, h, m).reshape(tile.lanes, -1, 1)
        keys = visible.any(-2)
        if keys.shape[1] > 1:
            keys = keys.unflatten(1, (-1, tile.group)).any(2)
        keys = keys.expand(b, tile.g1 - tile.g0, n1 - n0).reshape(tile.lanes, -1, 1)
        # Reading a flag is free on the CPU and a synchronisation elsewhere.
        on_host = visible.device.type == "cpu"
        return cls(
            ~visible,
            None if on_host and bool(rows.all()) else rows,
            None if on_host and bool(keys.all()) else keys,
        )

    def hide(self, scores: Tensor, tile: Tile, value: float) -> None:
        scores.view(*tile.shape, -1).masked_fill_(self.hidden, value)

    def clean_rows(self, x: Tensor) -> Tensor:
        return x if self.seen_rows is None else torch.where(self.seen_rows, x, 0.0)

    def clean_keys(self, x: Tensor) -> Tensor:
        return x if self.seen_keys is None else torch.where(self.seen_keys, x, 0.0)


@dataclass
class ScoreTile:
    """Computes the scores of one query tile against key ranges, with every score term."""

    tile: Tile
    rows: Rows
    piece: Piece
    space: Workspace

    @property
    def terms(self) -> Terms:
        return self.piece.terms

    @property
    def is_packed(self) -> bool:
        return self.piece.positions.is_packed

    def scores(
        self, q: Tensor, k: Tensor, n0: int, n1: int, *, capped: Tensor | None = None
    ) -> Tensor:
        """`[L, r m, n]` scores in the call's units from q `[L, r m, D]` and k `[L, n, D]`.

        capped: takes tanh(s / c) of a softcap c, which the backward needs.
        """
        terms, view = self.terms, (*self.tile.shape, n1 - n0)
        s = self.space.take("scores", q.shape[0], q.shape[1], n1 - n0)
        factor = terms.scale * Units.of(terms).per_nat / (terms.softcap or 1.0)
        # One sum of 576 products rounds worse in fp32 than the formula's own may (H200, torch 2.11,
        # D 576, 2026-11-30): longer ones are made of several.
        D = q.shape[-1]
        width = D if D <= 256 else 128
        for d0 in range(0, D, width):
            q_part, k_part = q[..., d0 : d0 + width], k[..., d0 : d0 + width]
            beta = 0.0 if d0 == 0 else 1.0
            torch.baddbmm(s, q_part, k_part.transpose(1, 2), beta=beta, alpha=factor, out=s)
        if terms.softcap is not None:
            s.tanh_()
            if capped is not None:
                capped.copy_(s)
            s.mul_(terms.softcap)
        if terms.bias is not None:
            s.view(view).add_(self.bias_tile(terms.bias, n0, n1).to(s.dtype))
        if terms.alibi_slopes is not None:
            s.view(view).sub_(
                self.slopes(terms.alibi_slopes, s.dtype) * self.rows.key_distance(n0, n1)
            )
        return s

    def slopes(self, alibi_slopes: Tensor, dtype: torch.dtype) -> Tensor:
        """ALiBi slopes of the rows, broadcastable to `[b, h, m, n]`."""
        h0, h1 = self.tile.heads
        if alibi_slopes.dim() == 1:
            return alibi_slopes[h0:h1].to(dtype).reshape(1, -1, 1, 1)
        return alibi_slopes[self.rows.b, self.rows.h].to(dtype)

    def bias_index(self, bias: Tensor, n0: int, n1: int) -> tuple[Tensor | slice, ...]:
        """How the tile `[b, h, m, n]` reads the bias `[B or 1, H or 1, M or 1, N or 1]`."""
        tile = self.tile
        if not self.is_packed:
            spans = ((tile.b0, tile.b1), tile.heads, (tile.m0, tile.m1), (n0, n1))
            return tuple(
                slice(*span) if size > 1 else slice(0, 1)
                for span, size in zip(spans, bias.shape, strict=True)
            )
        # Documents meet in one tile, so every element has its own place. What no row of the tile
        # sees may lie outside the bias; it is clamped here and masked later.
        rows = self.rows
        at = rows.index(n0, n1)
        index = (rows.b, rows.h, at.i - rows.q_start, at.j - rows.k_start)
        return tuple(
            x.clamp(0, size - 1) if size > 1 else torch.zeros_like(x)
            for x, size in zip(index, bias.shape, strict=True)
        )

    def bias_tile(self, bias: Tensor, n0: int, n1: int) -> Tensor:
        return bias[self.bias_index(bias, n0, n1)]

    def keep(self, n0: int, n1: int) -> Tensor:
        """Dropout's keep mask, bool, broadcastable to `[b, h, m, n]`."""
        rows, terms = self.rows, self.terms
        assert terms.rng is not None
        row = rows.b * self.piece.positions.H + rows.h
        if isinstance(rows.key_base, int):
            keys = (n0 - rows.key_base, n1 - rows.key_base)
            return keep_tile(terms.rng, terms.dropout_p, row, rows.i, keys)
        at = rows.index(n0, n1)
        return keep_mask(terms.rng, terms.dropout_p, row, at.i, at.j)
