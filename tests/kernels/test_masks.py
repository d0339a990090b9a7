"""What programs visit: held against every single query and key of storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.core.brute import (
    Sizes,
    both,
    bounded,
    brute_storage,
    exact_leaves,
    expressions,
    paddings,
    windows,
)
from tilewise.core.mask import Mask
from tilewise.core.mask_bits import BIT_TILE
from tilewise.core.positions import Positions
from tilewise.core.tiles import FULL, PARTIAL, SKIP, tile_map
from tilewise.kernels import masks

from .probes import Place, Visits, make_call, visit

pytestmark = pytest.mark.interpreter

BAND, INTERVALS, BITS = (x.value for x in (masks.BAND, masks.INTERVALS, masks.BITS))
BLOCKS = st.sampled_from([16, 8, 32])


def assert_visits(
    mask: Mask, at: Positions, visible: Tensor, blocks: tuple[int, int], group: int = 1
) -> int:
    """Hold a call's visits against `visible` `[batch, H, M, N]` of storage; returns its kind."""
    call = make_call(mask, at, (at.H, at.H // group))
    # Read one element at a time below.
    visible = visible.cpu()
    for by_rows in (True, False):
        found = visit(call, by_rows, *blocks)
        expected = torch.zeros_like(found.seen)
        expected[:, :, : at.M, : at.N] = visible
        # Each visible pair once, and nothing else, also not beyond what is stored.
        assert torch.equal(found.seen, expected)
        exact = call.mask_kind != BITS
        for number, place in enumerate(found.places):
            for head in range(found.tiles.shape[1]):
                h = place.h * found.tiles.shape[1] + head
                tiles = found.tiles[number, head].tolist()
                assert set(tiles) <= {0, 1, 100}
                assert_tiles(tiles, place, visible[place.seq.batch, h], by_rows, blocks, exact)
    return call.mask_kind


def assert_tiles(
    tiles: list[int],
    place: Place,
    visible: Tensor,
    by_rows: bool,
    blocks: tuple[int, int],
    exact: bool,
) -> None:
    """Of one program: a tile is visited if and only if something in it is seen, and without a test
    if and only if every query in use sees all of its keys."""
    seq, (block_m, block_n) = place.seq, blocks
    own = visible[seq.q_first : seq.q_first + seq.q_stored]
    own = own[:, seq.k_first : seq.k_first + seq.k_stored]
    for other, got in enumerate(tiles):
        x, y = (place.tile, other) if by_rows else (other, place.tile)
        tile = own[x * block_m : (x + 1) * block_m, y * block_n : (y + 1) * block_n]
        some = bool(tile.any())
        # The forward's rows past the used ones see nothing and are not written.
        used = min(seq.q_used - x * block_m, block_m)
        rows_whole = used > 0 if by_rows else used == block_m
        whole = rows_whole and tile.shape[1] == block_n and bool(tile[:used].all())
        if exact:
            assert got == (100 if whole else 1 if some else 0)
        else:
            # Bits are known of tiles of 128, so more may be visited or tested, never less.
            assert got > 0 or not some
            assert got != 100 or whole


def draw_sizes(data: st.DataObject, heads: tuple[tuple[int, int], ...] = ((1, 1), (2, 2))) -> Sizes:
    lengths = st.sampled_from([7, 16, 17, 33, 1, 25])
    return Sizes(*data.draw(st.sampled_from(heads)), data.draw(lengths), data.draw(lengths))


def draw_placement(data: st.DataObject) -> tuple[Positions, Sizes]:
    """A call's positions, and how far its masks have to reach."""
    count, H = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 1)]))
    placement: dict[str, Any] = {}
    if data.draw(st.booleans()):
        length = st.sampled_from([9, 17, 0, 5, 16, 1])
        stored_q, stored_k = ([data.draw(length) for _ in range(count)] for _ in range(2))
        M, N = (sum(x) + data.draw(st.sampled_from([0, 3])) for x in (stored_q, stored_k))
        M, N = max(M, 1), max(N, 1)
        placement["cu_seqlens_q"], placement["cu_seqlens_k"] = (
            torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for x in (stored_q, stored_k)
        )
    else:
        _, _, M, N = draw_sizes(data)
        stored_q, stored_k = [M] * count, [N] * count
    for name, stored in (("seqused_q", stored_q), ("seqused_k", stored_k)):
        if data.draw(st.booleans()):
            used = [data.draw(st.integers(0, x)) for x in stored]
            placement[name] = torch.tensor(used, dtype=torch.int64)
    if data.draw(st.booleans()):
        placement["q_start"] = data.draw(st.sampled_from([0, 5, 21]))
        start = st.sampled_from([0, 6, 11])
        placement["k_start"] = torch.tensor([data.draw(start) for _ in range(count)])
    at = Positions(count, H, M, N, **placement)
    return at, Sizes(count, H, *(max(size, 1) for size in at.extent))


@bounded(25)
@given(st.data())
def test_bands(data: st.DataObject) -> None:
    """Windows with any offset, padding, and both, over any placement."""
    at, extent = draw_placement(data)
    case = data.draw(windows(extent) | paddings(extent))
    if data.draw(st.booleans()):
        case = both(case, data.draw(paddings(extent)))
    blocks = data.draw(BLOCKS), data.draw(BLOCKS)
    kind = assert_visits(case.mask, at, brute_storage(case.sees, at), blocks)
    assert kind == BAND


@bounded(20)
@given(st.data())
def test_any_mask_over_any_placement(data: st.DataObject) -> None:
    at, extent = draw_placement(data)
    leaves = None if data.draw(st.booleans()) else exact_leaves(extent)
    case = data.draw(expressions(extent, leaves, max_leaves=3))
    blocks = data.draw(BLOCKS), data.draw(BLOCKS)
    assert_visits(case.mask, at, brute_storage(case.sees, at), blocks)


@bounded(12)
@given(st.data())
def test_any_mask_over_plain_storage(data: st.DataObject) -> None:
    """No lengths anywhere, so that sequences are numbers and not a table; heads share keys."""
    sizes = draw_sizes(data, ((1, 4), (2, 2)))
    case = data.draw(expressions(sizes))
    blocks = data.draw(BLOCKS), data.draw(BLOCKS)
    visible = brute_storage(case.sees, Positions(*sizes))
    assert_visits(case.mask, Positions(*sizes), visible, blocks, group=2)


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("right", [0, 6, 7, 8])
@pytest.mark.parametrize("left", [None, 7, 8, 15])
def test_bands_whose_edges_are_those_of_tiles(left: int | None, right: int) -> None:
    """The window's edges fall on a tile's, or one beside; so do the bounds of keys."""
    at = Positions(1, 1, 24, 40)
    window = tw.window(left, right)
    for bounds in (tw.full(), tw.left_padding(8) & tw.key_padding(32), tw.left_padding(9)):
        visible = (window & bounds).dense(1, 1, 24, 40)
        assert assert_visits(window & bounds, at, visible, (8, 8)) == BAND


@pytest.mark.parametrize("used", [15, 16, 17])
def test_used_lengths_that_end_with_a_tile_or_beside_it(used: int) -> None:
    lengths = torch.tensor([used])
    at = Positions(1, 1, 24, 24, seqused_q=lengths, seqused_k=lengths)
    all_bits = tw.blocks(torch.ones(1, 1, dtype=torch.bool))
    for mask in (tw.full(), tw.window(9, 0), tw.causal() | tw.prefix(3), ~tw.causal(), all_bits):
        visible = torch.zeros(1, 1, 24, 24, dtype=torch.bool)
        visible[..., :used, :used] = mask.dense(1, 1, used, used)
        assert_visits(mask, at, visible, (8, 8))


DOCUMENTS = {
    "one row for all": tw.documents([0, 5, 5, 30, 41]),
    "a row each": tw.documents([[0, 41, 41], [0, 3, 12]]),
    "causal": tw.documents([0, 5, 17, 41]) & tw.causal(),
    "padded": tw.documents([0, 5, 17, 41]) & tw.key_padding([41, 10]),
    "in a window of its own offset": tw.documents([0, 20, 41]) & tw.window(6, 2, offset=3),
    "in a window of an offset a row": tw.documents([0, 20, 41])
    & tw.causal(offset=torch.tensor([4, 9])),
    "beyond what is stored": tw.documents([0, 20, 60, 90]),
    "short of it": tw.documents([0, 9]),
}


@pytest.mark.parametrize("mask", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize(
    "at",
    [
        Positions(2, 1, 41, 41),
        Positions(2, 1, 23, 41),
        Positions(2, 1, 41, 23),
        Positions(2, 1, 30, 17, q_start=7, k_start=12),
        Positions(2, 1, 41, 41, seqused_k=torch.tensor([41, 11])),
    ],
    ids=["M = N", "M < N", "M > N", "piece", "used lengths"],
)
def test_documents_inside_batch_rows(mask: Mask, at: Positions) -> None:
    starts = at.q_start or 0, at.k_start or 0
    offset: Any = 0 if at.is_piece else at.N - at.M
    if at.seqused_k is not None:
        offset = at.seqused_k - at.M
    visible = mask.dense(
        2, 1, at.M, at.N, offset=offset, q_start=int(starts[0]), k_start=int(starts[1])
    ).clone()
    if at.seqused_k is not None:
        visible[1, ..., 11:] = False
    assert_visits(mask, at, visible, (16, 16))


def test_lists_of_more_tiles_than_a_strip() -> None:
    """Lists are made 16 key tiles or 8 query tiles at a time."""
    at = Positions(1, 1, 79, 150)
    mask = tw.causal() & ~tw.window(40, 0) | tw.prefix(3)
    assert assert_visits(mask, at, mask.dense(1, 1, 79, 150), (8, 8)) == INTERVALS


@pytest.mark.parametrize("n_intervals", [1, 4, 5, 9])
def test_few_and_many_intervals_a_row(n_intervals: int) -> None:
    starts = torch.arange(n_intervals).expand(20, n_intervals) * 4 + torch.arange(20)[:, None] % 3
    mask = tw.intervals(starts, starts + 2)
    at = Positions(1, 2, 20, 40)
    assert assert_visits(mask, at, mask.dense(1, 2, 20, 40), (8, 8)) == INTERVALS


def test_bands_are_tiles_as_the_tile_map_has_them() -> None:
    """Where tiles hold no row and key but used ones, whole is what the map calls full."""
    kinds = {0: SKIP, 1: PARTIAL, 100: FULL}
    at = Positions(1, 1, 32, 48)
    for mask in (tw.full(), tw.causal(), tw.window(9, 4), tw.key_padding(20) & tw.causal(offset=3)):
        expected = tile_map(mask, at, 8, 16)[0, 0].tolist()
        for by_rows in (True, False):
            found = visit(make_call(mask, at), by_rows, 8, 16)
            for place, tiles in zip(found.places, found.tiles[:, 0].tolist(), strict=True):
                lines = expected if by_rows else list(zip(*expected, strict=True))
                assert [kinds[x] for x in tiles[:-2]] == list(lines[place.tile])


# ---------------------------------------------------------------- bits


PREDICATES = {
    "whole, hidden and mixed tiles": lambda b, h, m, n: n <= m,
    "a single element": lambda b, h, m, n: (m == 129) & (n == 130),
    "a head": lambda b, h, m, n: (h == 1) & (n < 128) | (m + n) % 7 == 0,
    "all": lambda b, h, m, n: n >= 0,
}


@pytest.mark.parametrize("predicate", PREDICATES.values(), ids=PREDICATES.keys())
@pytest.mark.parametrize("join", ["alone", "in a window"])
def test_bits_over_several_tiles(predicate: Any, join: str) -> None:
    at = Positions(1, 2, 140, 270)
    mask = tw.from_function(predicate)
    if join == "in a window":
        mask = mask & tw.window(150, 3)
    visible = mask.dense(1, 2, 140, 270)
    assert assert_visits(mask, at, visible, (64, 64)) == BITS


@pytest.mark.parametrize("by_rows", [True, False])
def test_hidden_bit_tiles_are_not_visited(by_rows: bool) -> None:
    """And visible ones are not tested."""
    table = torch.tensor([[True, False, True], [False, True, False]])
    mask = tw.blocks(table, BIT_TILE, BIT_TILE)
    found: Visits = visit(make_call(mask, Positions(1, 1, 256, 384)), by_rows, 64, 64)
    each = table.repeat_interleave(2, 0).repeat_interleave(2, 1)
    for place, tiles in zip(found.places, found.tiles[:, 0], strict=True):
        wanted = each[place.tile] if by_rows else each[:, place.tile]
        assert torch.equal(tiles[: len(wanted)] == 100, wanted)
        assert not bool((tiles == 1).any())


def test_a_mask_of_nothing_visits_nothing() -> None:
    for mask in (tw.key_padding(0), ~tw.full(), tw.from_function(lambda b, h, m, n: n < 0)):
        for by_rows in (True, False):
            found = visit(make_call(mask, Positions(1, 1, 20, 20)), by_rows, 8, 8)
            assert not bool(found.tiles.any())


def test_what_masks_come_as() -> None:
    at = Positions(1, 1, 8, 8)
    for kind, mask in (
        (BAND, tw.causal() & tw.key_padding(3)),
        (BAND, tw.documents([0, 3, 8]) & tw.window(2, 0)),
        (INTERVALS, ~tw.causal()),
        (INTERVALS, tw.chunked(3)),
        (BITS, tw.from_function(lambda b, h, m, n: n != m) & tw.causal()),
        (BITS, tw.blocks(torch.ones(1, 1, dtype=torch.bool), 4, 4)),
    ):
        assert make_call(mask, at).mask_kind == kind
