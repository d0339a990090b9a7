"""Kernels that write down what device functions answer, and calls to ask about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.core.mask import Mask
from tilewise.core.positions import Positions
from tilewise.dense.piece import Piece, Terms
from tilewise.dense.triton_call import TritonCall
from tilewise.kernels.launch import Config, launch
from tilewise.kernels.masks import key_span, partial_tile, row_span, visible, whole_tile
from tilewise.kernels.placement import FIRST_K_TILE, FIRST_Q_TILE, locate
from tilewise.kernels.structs import Sequence

DEVICE = torch.empty(0).device
FIELDS = Sequence._fields
# What `_write_place` writes of a program: a sequence's fields, the head, the tile.
PLACE_WIDTH = tl.constexpr(len(FIELDS) + 2)


def make_call(
    mask: Mask, at: Positions, heads: tuple[int, int] | None = None, **terms: Any
) -> TritonCall:
    """A call of one head dim on empty storage. heads: H and G; each query head its own by default.

    The mask is lowered and moved as the public functions do it.
    """
    H, G = heads or (at.H, at.H)
    B = 1 if at.is_packed else at.B
    q, k = torch.zeros(B, at.M, H, 16), torch.zeros(B, at.N, G, 16)
    lowered = mask.lowered(at.B, H, *at.extent, DEVICE)
    return TritonCall(Piece(q, k, k, lowered, at, Terms(1.0, **terms)))


@triton.jit
def _write_place(places, pid, seq, h, tile):
    row = places + pid * PLACE_WIDTH
    tl.store(row, seq.index)
    tl.store(row + 1, seq.batch)
    tl.store(row + 2, seq.q_first)
    tl.store(row + 3, seq.q_stored)
    tl.store(row + 4, seq.q_used)
    tl.store(row + 5, seq.k_first)
    tl.store(row + 6, seq.k_stored)
    tl.store(row + 7, seq.k_used)
    tl.store(row + 8, seq.low)
    tl.store(row + 9, seq.high)
    tl.store(row + 10, seq.left)
    tl.store(row + 11, seq.right)
    tl.store(row + 12, seq.shift)
    tl.store(row + 13, seq.i_base)
    tl.store(row + 14, seq.j_base)
    tl.store(row + 15, h)
    tl.store(row + 16, tile)


@triton.jit
def _place_kernel(places, pids, place, BY_ROWS: tl.constexpr, PLACE: tl.constexpr):
    """Where program `pids[x]` finds itself, for each x of the grid."""
    at = tl.program_id(0)
    pid = tl.load(pids + at)
    if BY_ROWS:
        seq, h, tile, _ = locate(place, pid, PLACE, FIRST_Q_TILE, True)
    else:
        seq, h, tile, _ = locate(place, pid, PLACE, FIRST_K_TILE, False)
    _write_place(places, at, seq, h, tile)


@dataclass(frozen=True)
class Place:
    """One program's place: its sequence's fields, its head and its tile in the sequence."""

    seq: Sequence
    h: int
    tile: int

    @classmethod
    def of(cls, row: list[int]) -> Place:
        return cls(Sequence(*row[:-2]), *row[-2:])


def find_places(
    call: TritonCall, by_rows: bool, block_m: int, block_n: int, step: int = 1
) -> list[Place]:
    """The places of a call's programs, or of every `step`-th of them."""
    config = Config(block_m, block_n, 4, 1)
    plan = call.plan_rows(config) if by_rows else call.plan_keys(config)
    pids = torch.arange(0, plan.n_programs, step, dtype=torch.int32)
    places = torch.full((pids.numel(), len(FIELDS) + 2), -77, dtype=torch.int32)
    arguments = (places, pids, plan.call.place, by_rows, call.place_kind)
    launch(_place_kernel, (pids.numel(),), config, arguments, DEVICE)
    return [Place.of(row) for row in places.tolist()]


# ---------------------------------------------------------------- tiles


@triton.jit
def _tiles_kernel(
    seen_of, visits, places, call, n_heads, H, rows, cols,
    BY_ROWS: tl.constexpr, WIDTH: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Visit as the forward does (BY_ROWS) or the programs that own keys, and mark what is seen.

    seen_of: int32 `[batch, H, rows, cols]` of storage and some more; one is added for each time
    that a query meets a key. visits: int32 `[programs, n_heads, WIDTH]`; 1 is added for each visit
    that tests a tile, 100 for each that does not.
    """
    pid = tl.program_id(0)
    if BY_ROWS:
        seq, owner, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
    else:
        seq, owner, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_K_TILE, False)
    _write_place(places, pid, seq, owner, tile)
    for head in range(0, n_heads):
        h = owner * n_heads + head
        if BY_ROWS:
            span = key_span(call.mask, seq, h, tile, list_tile, BUILD)
        else:
            span = row_span(call.mask, seq, h, tile, list_tile, BUILD)
        row = visits + (pid * n_heads + head) * WIDTH
        base = seen_of + (seq.batch * H + h) * rows * cols + seq.q_first * cols + seq.k_first
        for i in range(0, span.n_whole):
            other = whole_tile(call.mask, span, i, BUILD.mask)
            tl.store(row + other, tl.load(row + other) + 100)
            _mark(base, call, seq, span, h, tile, other, rows, cols, False, BY_ROWS, BUILD)
        for i in range(0, span.n_partial):
            other = partial_tile(call.mask, span, i, BUILD.mask)
            tl.store(row + other, tl.load(row + other) + 1)
            _mark(base, call, seq, span, h, tile, other, rows, cols, True, BY_ROWS, BUILD)


@triton.jit
def _mark(
    base, call, seq, span, h, tile, other, rows, cols,
    IS_PARTIAL: tl.constexpr, BY_ROWS: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    if BY_ROWS:
        m0, n0 = tile * BUILD.block_m, other * BUILD.block_n
    else:
        m0, n0 = other * BUILD.block_m, tile * BUILD.block_n
    m = (m0 + tl.arange(0, BUILD.block_m))[:, None]
    n = (n0 + tl.arange(0, BUILD.block_n))[None, :]
    # What is loaded without a mask, or what the program owns.
    met = (m + n) >= 0
    if BY_ROWS:
        met = met & (m < seq.q_used)
    if IS_PARTIAL:
        met = met & visible(call.mask, seq, h, m, n, m0, n0, BUILD)
        # Rows of the other axis outside the span are not loaded.
        if BY_ROWS:
            met = met & (n >= span.start) & (n < span.stop)
        else:
            met = met & (m >= span.start) & (m < span.stop)
    inside = (seq.q_first + m < rows) & (seq.k_first + n < cols)
    # Tiles of neighbouring documents overlap in storage, and their programs run at the same time.
    tl.atomic_add(base + m * cols + n, met.to(tl.int32), mask=inside)


@dataclass(frozen=True)
class Visits:
    """What a call's programs visit.

    seen: int32 `[batch, H, M + block_m, N + block_n]`, how often each stored query met each stored
    key; beyond storage all must be 0. places: of each program. tiles: of each program and head,
    `[width]`: 1 a visit with a test, 100 a visit without.
    """

    seen: Tensor
    places: list[Place]
    tiles: Tensor


def visit(call: TritonCall, by_rows: bool, block_m: int, block_n: int) -> Visits:
    config = Config(block_m, block_n, 4, 1)
    plan = call.plan_rows(config) if by_rows else call.plan_keys(config)
    n_heads = 1 if by_rows else call.H // call.G
    rows, cols = call.M + block_m, call.N + block_n
    other, block = (call.N, block_n) if by_rows else (call.M, block_m)
    width = -(-other // block) + 2
    seen = torch.zeros(call.B, call.H, rows, cols, dtype=torch.int32)
    tiles = torch.zeros(plan.n_programs, n_heads, width, dtype=torch.int32)
    places = torch.full((plan.n_programs, len(FIELDS) + 2), -77, dtype=torch.int32)
    build = call.build(config)
    arguments = (
        seen, tiles, places, plan.call, n_heads, call.H, rows, cols, by_rows, width, build,
    )  # fmt: skip
    launch(_tiles_kernel, (plan.n_programs,), config, arguments, DEVICE)
    return Visits(seen, [Place.of(row) for row in places.tolist()], tiles)
