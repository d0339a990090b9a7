"""What a schedule skips, tests and takes whole, held against every single query and key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise.core.mask import Mask
from tilewise.core.positions import Positions
from tilewise.core.tiles import (
    FULL,
    PARTIAL,
    SKIP,
    KeyRange,
    key_ranges,
    plan_rows,
    row_intervals,
    tile_map,
)

from .brute import Case, Sizes, bounded, brute_storage, exact_leaves, expressions, negated

# 1, primes, and tiles of 8 and 16 give or take one.
LENGTHS = st.sampled_from([7, 16, 17, 9, 1, 2, 3, 8, 13, 15, 19])
# The first value of a list is the one drawn most.
DOCUMENT = st.sampled_from([5, 9, 0, 8, 1, 2])
BLOCKS = st.sampled_from([1, 3, 4, 8, 16, 32])


def assert_plan(mask: Mask, at: Positions, visible: Tensor, tile: Any, block_n: int) -> None:
    """Every property of the plan of one query tile; visible is `[rows, H, M, N]` of storage."""
    batch, heads, m = tile
    seen = visible[slice(*batch), slice(*heads), slice(*m)]
    lowered = mask.lowered(at.B, at.H, *at.extent)
    rows = at.rows(batch, heads, m)
    plan = plan_rows(lowered, rows, at.N, block_n)
    assert key_ranges(mask, at, m, block_n, batch=batch, heads=heads) == plan.ranges
    last, reached = 0, 0
    visited = torch.zeros(at.N, dtype=torch.bool)
    for start, stop, is_full in plan.ranges:
        assert reached <= start < stop <= at.N
        assert stop - start <= max(block_n, 16)
        # A range ends early only where the keys that are seen end.
        assert start > reached or reached - last in (0, block_n) or not mask.is_exact
        last, reached = start, stop
        visited[start:stop] = True
        keys = seen[..., start:stop]
        assert bool(keys.all()) == is_full
        assert bool(keys.any())
        for test in (plan, plan.on(rows)):
            assert torch.equal(test.visible(start, stop).expand(keys.shape), keys)
    anyone = seen.flatten(0, 2).any(0)
    if mask.is_exact:
        assert torch.equal(visited, anyone)
    assert not bool((anyone & ~visited).any())
    starts, stops = row_intervals(lowered, rows)
    assert bool((starts >= 0).all()) and bool((stops <= at.N).all())
    assert bool((starts <= stops).all()) and bool((stops[..., :-1] <= starts[..., 1:]).all())


def assert_tile_map(mask: Mask, at: Positions, visible: Tensor, block_m: int, block_n: int) -> None:
    got = tile_map(mask, at, block_m, block_n)
    n_rows, n_columns = -(-at.M // block_m), -(-at.N // block_n)
    expected = torch.empty(*visible.shape[:2], n_rows, n_columns, dtype=torch.int8)
    for x in range(n_rows):
        for y in range(n_columns):
            strip = visible[:, :, x * block_m : (x + 1) * block_m]
            tile = strip[..., y * block_n : (y + 1) * block_n].flatten(2)
            some, whole = tile.any(-1), tile.all(-1)
            expected[:, :, x, y] = torch.where(whole, FULL, torch.where(some, PARTIAL, SKIP))
    assert got.dtype == torch.int8
    assert torch.equal(got.expand(expected.shape), expected)


def draw_slice(data: st.DataObject, size: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, size - 1))
    return start, data.draw(st.integers(start + 1, size))


def check_tiles(data: st.DataObject, mask: Mask, at: Positions, visible: Tensor) -> None:
    """Plans of all query tiles over all batch rows and heads, one over some, and the tile map."""
    block_m, block_n = data.draw(BLOCKS), data.draw(BLOCKS)
    rows = visible.shape[0]
    for m0 in range(0, at.M, block_m):
        tile = ((0, rows), (0, at.H), (m0, min(at.M, m0 + block_m)))
        assert_plan(mask, at, visible, tile, block_n)
    some = (draw_slice(data, rows), draw_slice(data, at.H), draw_slice(data, at.M))
    assert_plan(mask, at, visible, some, block_n)
    assert_tile_map(mask, at, visible, block_m, block_n)


def draw_sizes(data: st.DataObject) -> Sizes:
    heads = data.draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3)]))
    return Sizes(*heads, data.draw(LENGTHS), data.draw(LENGTHS))


@bounded(120)
@given(st.data())
def test_exact_masks_over_padded_storage(data: st.DataObject) -> None:
    sizes = draw_sizes(data)
    mask = data.draw(expressions(sizes, exact_leaves(sizes))).mask
    check_tiles(data, mask, Positions(*sizes), mask.dense(*sizes))


@bounded(150)
@given(st.data())
def test_any_mask_over_padded_storage(data: st.DataObject) -> None:
    sizes = draw_sizes(data)
    mask = data.draw(expressions(sizes)).mask
    check_tiles(data, mask, Positions(*sizes), mask.dense(*sizes))


@bounded(80)
@given(st.data())
def test_used_lengths_of_padded_storage(data: st.DataObject) -> None:
    """Unused queries see nothing, unused keys are seen by nobody, and alignment follows use."""
    sizes = draw_sizes(data)
    case = data.draw(expressions(sizes))
    at = Positions(*sizes, **draw_used(data, [sizes.M] * sizes.B, [sizes.N] * sizes.B))
    check_tiles(data, case.mask, at, brute_storage(case.sees, at))


@bounded(80)
@given(st.data())
def test_pieces_of_padded_storage(data: st.DataObject) -> None:
    sizes = draw_sizes(data)
    starts, extent = draw_starts(data, sizes)
    mask = data.draw(expressions(extent)).mask
    at = Positions(*sizes, **starts)
    visible = torch.cat(
        [
            mask.dense(
                1,
                *sizes[1:],
                offset=0,
                batch_index=torch.tensor([b]),
                q_start=start_of(at.q_start, b),
                k_start=start_of(at.k_start, b),
            )
            for b in range(sizes.B)
        ]
    )
    check_tiles(data, mask, at, visible)


@bounded(300)
@given(st.data())
def test_packed_storage(data: st.DataObject) -> None:
    """Documents, some of them empty, used lengths, starts, and rows past the last document."""
    count = data.draw(st.sampled_from([3, 2, 4, 1]))
    len_q, len_k = ([data.draw(DOCUMENT) for _ in range(count)] for _ in range(2))
    M, N = (sum(x) + data.draw(st.integers(0, 5)) for x in (len_q, len_k))
    sizes = Sizes(count, data.draw(st.integers(1, 2)), max(M, 1), max(N, 1))
    placement: dict[str, Any] = {
        "cu_seqlens_q": cumulative(len_q),
        "cu_seqlens_k": cumulative(len_k),
    }
    if data.draw(st.booleans()):
        placement |= draw_used(data, len_q, len_k)
    extent = sizes
    if data.draw(st.booleans()):
        starts, extent = draw_starts(data, sizes)
        placement |= starts
    case = data.draw(expressions(extent, max_leaves=3))
    at = Positions(*sizes, **placement)
    check_tiles(data, case.mask, at, brute_storage(case.sees, at))


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw_used(data: st.DataObject, len_q: list[int], len_k: list[int]) -> dict[str, Tensor]:
    used = {}
    for name, stored in (("seqused_q", len_q), ("seqused_k", len_k)):
        if data.draw(st.booleans()):
            used[name] = torch.tensor([draw_length(data, most) for most in stored])
    return used


def draw_length(data: st.DataObject, most: int) -> int:
    return data.draw(st.sampled_from([most, most // 2, max(0, most - 1), 0]))


def draw_starts(data: st.DataObject, sizes: Sizes) -> tuple[dict[str, Any], Sizes]:
    """Starts of a piece, ints or one a batch row, and the indices that they reach."""
    start = st.integers(0, 20)
    starts: dict[str, Any] = {}
    kinds = [
        ("int", "int"),
        ("per batch", "int"),
        ("per batch", "per batch"),
        ("int", ""),
        ("", "int"),
    ]
    for name, kind in zip(("q_start", "k_start"), data.draw(st.sampled_from(kinds)), strict=True):
        if kind == "int":
            starts[name] = data.draw(start)
        elif kind == "per batch":
            starts[name] = torch.tensor([data.draw(start) for _ in range(sizes.B)])
    return starts, Sizes(sizes.B, sizes.H, *Positions(*sizes, **starts).extent)


def start_of(start: int | Tensor | None, b: int) -> int:
    return int(start[b]) if isinstance(start, Tensor) else start or 0


# ---------------------------------------------------------------- by hand


def test_causal_ranges_by_hand() -> None:
    at = Positions(B=1, H=1, M=32, N=32)
    ranges = key_ranges(tw.causal(), at, (8, 16), 8)
    assert ranges == [KeyRange(0, 8, True), KeyRange(8, 16, False)]
    assert key_ranges(tw.full(), at, (8, 16), 24) == [KeyRange(0, 24, True), KeyRange(24, 32, True)]
    assert key_ranges(~tw.full(), at, (8, 16), 24) == []


def test_tile_map_of_causal_by_hand() -> None:
    at = Positions(B=2, H=3, M=12, N=16)
    assert tile_map(tw.causal(), at, 4, 4).tolist() == [
        [[[FULL, PARTIAL, SKIP, SKIP], [FULL, FULL, PARTIAL, SKIP], [FULL, FULL, FULL, PARTIAL]]]
    ]


def test_left_padding_in_every_document() -> None:
    """Key 0 and 1 of each document are hidden, wherever the document stands in storage."""
    cu_seqlens = cumulative([3, 4, 0, 2])
    at = Positions(B=4, H=1, M=9, N=9, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    case = Case(tw.left_padding(2), lambda key: key.j >= 2)
    for mask, sees in (case, negated(case)):
        visible = brute_storage(sees, at)
        for m in range(9):
            assert_plan(mask, at, visible, ((0, 1), (0, 1), (m, m + 1)), 4)
        assert_tile_map(mask, at, visible, 1, 3)


@pytest.mark.parametrize("masked", [tw.full(), tw.causal(), tw.chunked(3), ~tw.window(1, 1)])
def test_no_documents_at_all(masked: Mask) -> None:
    """Rows may be stored where no document is."""
    none = torch.tensor([0])
    at = Positions(B=0, H=2, M=5, N=6, cu_seqlens_q=none, cu_seqlens_k=none)
    visible = torch.zeros(1, 2, 5, 6, dtype=torch.bool)
    assert_plan(masked, at, visible, ((0, 1), (0, 2), (0, 5)), 4)
    assert_tile_map(masked, at, visible, 2, 4)


def test_a_predicate_of_packed_calls_is_asked_about_documents_only() -> None:
    """m and n are indices in a document, so a table for the longest document is large enough."""
    table = torch.tensor([[True, False, False], [True, True, False]])
    cu_seqlens_q, cu_seqlens_k = cumulative([1, 2, 2]), cumulative([3, 1, 2])
    at = Positions(B=3, H=1, M=5, N=6, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    visible = brute_storage(lambda key: bool(table[key.i, key.j]), at)
    mask = tw.from_function(lambda b, h, m, n: table[m, n])
    assert_plan(mask, at, visible, ((0, 1), (0, 1), (0, 5)), 16)
    assert_tile_map(mask, at, visible, 2, 3)


@pytest.mark.parametrize(("M", "N"), [(0, 5), (5, 0), (0, 0)])
def test_sizes_of_zero(M: int, N: int) -> None:
    at = Positions(B=2, H=2, M=M, N=N)
    for mask in (tw.full(), tw.causal(), tw.from_function(lambda b, h, m, n: m >= n)):
        got = tile_map(mask, at, 2, 2)
        assert got.shape[2:] == (-(-M // 2), -(-N // 2))
        assert not bool(got.any())
        if M:
            assert key_ranges(mask, at, (0, M), 4) == []


# ---------------------------------------------------------------- bit tiles


@pytest.mark.parametrize("block_n", [1, 8, 16, 40])
@pytest.mark.parametrize(
    "mask", [tw.causal(), tw.blocks(torch.ones(2, 2, dtype=torch.bool), 32, 8)]
)
def test_ranges_are_no_wider_than_asked(mask: Mask, block_n: int) -> None:
    ranges = key_ranges(mask, Positions(B=1, H=1, M=64, N=64), (0, 64), block_n)
    assert max(stop - start for start, stop, _ in ranges) <= block_n


BITS = {
    # Tiles of 128: whole, hidden, mixed; one of them mixed in a single element.
    "causal": lambda b, h, m, n: n <= m,
    "one hidden": lambda b, h, m, n: (m != 200) | (n != 140),
    "one visible": lambda b, h, m, n: (m == 129) & (n == 0),
    "per batch": lambda b, h, m, n: (b == 0) & (n < 128) | (b == 1) & (n >= 128),
    "per head": lambda b, h, m, n: (h == 0) & (n < 128) | (h == 1) & (n >= 128),
    "checkered": lambda b, h, m, n: (m // 64 + n // 64) % 2 == 0,
}


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("join", ["alone", "not", "and causal", "or window"])
def test_bit_tiles_over_several_tiles(name: str, join: str) -> None:
    sizes = Sizes(2, 2, 257, 259)
    mask = tw.from_function(BITS[name])
    joined: dict[str, Mask] = {
        "alone": mask,
        "not": ~mask,
        "and causal": mask & tw.causal(),
        "or window": ~(mask | tw.window(20, 0)),
    }
    mask, at = joined[join], Positions(*sizes)
    visible = mask.dense(*sizes)
    for m in ((0, 128), (96, 160), (128, 256), (256, 257)):
        for block_n in (64, 128, 192):
            assert_plan(mask, at, visible, ((0, 2), (0, 2), m), block_n)
        assert_plan(mask, at, visible, ((1, 2), (1, 2), m), 128)
    assert_tile_map(mask, at, visible, 64, 96)


@pytest.mark.parametrize(("block_m", "block_n"), [(4, 4), (8, 2), (3, 5)])
def test_tiles_that_reach_past_a_block_list(block_m: int, block_n: int) -> None:
    """What lies beyond its last tile is hidden, so a tile that reaches over is not full."""
    at = Positions(B=1, H=1, M=20, N=20)
    for mask in (tw.blocks(torch.ones(2, 2, dtype=torch.bool), block_m, block_n), tw.full()):
        for either_way in (mask, ~mask, mask & tw.causal(), ~mask | tw.window(1, 1)):
            visible = either_way.dense(1, 1, 20, 20)
            for m in ((0, 4), (4, 8), (5, 12), (8, 20), (16, 20)):
                assert_plan(either_way, at, visible, ((0, 1), (0, 1), m), 16)
            assert_tile_map(either_way, at, visible, 4, 4)


@pytest.mark.parametrize("hidden", [0, 1, 2])
def test_block_lists_of_several_documents_in_one_tile(hidden: int) -> None:
    """A query tile that spans documents asks the block list of each of them."""
    cu_seqlens = cumulative([4, 3, 5])
    at = Positions(B=3, H=1, M=12, N=12, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    table = torch.ones(3, 3, 3, dtype=torch.bool)
    table[hidden] = False
    case = Case(tw.blocks(table, 2, 2), lambda key: key.b != hidden)
    for mask, sees in (case, negated(case)):
        visible = brute_storage(sees, at)
        for m in ((0, 12), (0, 4), (2, 6), (5, 9), (7, 12)):
            for block_n in (2, 16):
                assert_plan(mask, at, visible, ((0, 1), (0, 1), m), block_n)
        assert_tile_map(mask, at, visible, 4, 4)


def test_a_hidden_tile_of_a_bit_mask_is_skipped() -> None:
    """Skipped, not tested: block lists are there to save the work."""
    table = torch.eye(8, dtype=torch.bool)
    at = Positions(B=1, H=1, M=256, N=256)
    mask = tw.blocks(table, 32, 32)
    for x in range(8):
        m = (32 * x, 32 * x + 32)
        assert key_ranges(mask, at, m, 128) == [KeyRange(*m, True)]
        assert key_ranges(mask & tw.causal(), at, m, 128) == [KeyRange(*m, False)]
