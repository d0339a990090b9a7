"""Every mask constructor, and the algebra, against predicates in plain Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise.core.mask import Mask, raise_mask
from tilewise.core.positions import Positions
from tilewise.core.tiles import key_ranges

from .brute import (
    At,
    Case,
    Sizes,
    assert_one_sentence,
    bounded,
    brute_dense,
    exact_leaves,
    expressions,
    index_of,
)

SIZES = Sizes(2, 2, 7, 9)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two interval lists for seven queries: overlapping, touching, apart, empty, reversed, outside.
STARTS = [[0, 2], [0, 3], [1, 6], [4, 0], [5, 7], [-3, 8], [0, 0]]
STOPS = [[4, 6], [3, 5], [2, 9], [4, 0], [2, 9], [1, 20], [9, 0]]
TABLE = [[True, False, True], [False, False, True]]
LOOKUP = torch.arange(2 * 2 * 7 * 9).reshape(2, 2, 7, 9) % 5 < 2


def sees_own(bits: int, at: At) -> bool:
    """A key before the first query, or one whose bit is set."""
    own = at.j - (at.p - at.i)
    return own < 0 or bool(bits >> own & 1)


def in_interval(at: At, shift: int = 0) -> bool:
    """STARTS and STOPS, moved to the right by `shift`."""
    if at.i >= len(STARTS):
        return False
    pairs = zip(STARTS[at.i], STOPS[at.i], strict=True)
    return any(start + shift <= at.j < stop + shift for start, stop in pairs)


def in_block(at: At, table: list[list[bool]] = TABLE) -> bool:
    """TABLE with tiles of 3 queries and 2 keys; what lies beyond is hidden."""
    x, y = at.i // 3, at.j // 2
    return x < 2 and y < 3 and table[x][y]


FLIPPED = [[not seen for seen in row] for row in TABLE]

CONSTRUCTORS: dict[str, tuple[Callable[[], Mask], Callable[[At], bool]]] = {
    "full": (tw.full, lambda at: True),
    "causal": (tw.causal, lambda at: at.j <= at.p),
    "causal, offset 3": (lambda: tw.causal(offset=3), lambda at: at.j <= at.i + 3),
    "causal, offset -2": (lambda: tw.causal(offset=-2), lambda at: at.j <= at.i - 2),
    "causal, offset per batch": (
        lambda: tw.causal(offset=ints([4, -1])),
        lambda at: at.j <= at.i + (4, -1)[at.b],
    ),
    "causal, one offset for all": (
        lambda: tw.causal(offset=ints([2])),
        lambda at: at.j <= at.i + 2,
    ),
    "causal, 0-d offset": (lambda: tw.causal(offset=ints(2)), lambda at: at.j <= at.i + 2),
    "window 2, 1": (lambda: tw.window(2, 1), lambda at: at.p - 2 <= at.j <= at.p + 1),
    "window 0, 0": (lambda: tw.window(0, 0), lambda at: at.j == at.p),
    "window None, None": (lambda: tw.window(None, None), lambda at: True),
    "window None, 2": (lambda: tw.window(None, 2), lambda at: at.j <= at.p + 2),
    "window 0, None": (lambda: tw.window(0, None), lambda at: at.j >= at.p),
    "window 3, None": (lambda: tw.window(3, None), lambda at: at.j >= at.p - 3),
    "window, offset 0": (
        lambda: tw.window(1, 0, offset=0),
        lambda at: at.i - 1 <= at.j <= at.i,
    ),
    "window, offset per batch": (
        lambda: tw.window(1, 2, offset=torch.tensor([0, 5])),
        lambda at: -1 <= at.j - at.i - (0, 5)[at.b] <= 2,
    ),
    "documents": (
        lambda: tw.documents([0, 4, 7, 9]),
        lambda at: any(s <= at.p < e and s <= at.j < e for s, e in ((0, 4), (4, 7), (7, 9))),
    ),
    "documents, some empty": (
        lambda: tw.documents(ints([0, 0, 5, 5, 5, 8, 8])),
        lambda at: any(s <= at.p < e and s <= at.j < e for s, e in ((0, 5), (5, 8))),
    ),
    "documents, all empty": (lambda: tw.documents([0, 0, 0]), lambda at: False),
    "no documents": (lambda: tw.documents([0]), lambda at: False),
    "documents per batch": (
        lambda: tw.documents(ints([[0, 2, 9], [0, 6, 6]])),
        lambda at: any(
            s <= at.p < e and s <= at.j < e for s, e in (((0, 2), (2, 9)), ((0, 6),))[at.b]
        ),
    ),
    "documents, one row for all": (
        lambda: tw.documents(ints([[0, 3, 8]])),
        lambda at: any(s <= at.p < e and s <= at.j < e for s, e in ((0, 3), (3, 8))),
    ),
    "key_padding per batch": (
        lambda: tw.key_padding([4, 0]),
        lambda at: at.j < (4, 0)[at.b],
    ),
    "key_padding for all": (lambda: tw.key_padding(5), lambda at: at.j < 5),
    "key_padding past the end": (lambda: tw.key_padding([50, 9]), lambda at: at.j < 50),
    "left_padding per batch": (
        lambda: tw.left_padding(ints([0, 6])),
        lambda at: at.j >= (0, 6)[at.b],
    ),
    "left_padding for all": (lambda: tw.left_padding(3), lambda at: at.j >= 3),
    "prefix": (lambda: tw.prefix(ints([3, 7])), lambda at: at.j < (3, 7)[at.b]),
    "prefix-LM": (
        lambda: tw.causal() | tw.prefix([3, 7]),
        lambda at: at.j <= at.p or at.j < (3, 7)[at.b],
    ),
    "chunked 1": (lambda: tw.chunked(1), lambda at: at.j == at.p),
    "chunked 4": (lambda: tw.chunked(4), lambda at: at.j // 4 == at.p // 4),
    "chunked larger than all": (lambda: tw.chunked(64), lambda at: at.p // 64 == 0),
    "tree": (
        lambda: tw.tree(ints([1, 3, 5, 13])),
        lambda at: at.i < 4 and sees_own((1, 3, 5, 13)[at.i], at),
    ),
    "tree per batch": (
        lambda: tw.tree(torch.tensor([[1, 0, 6], [7, 1, 1]])),
        lambda at: at.i < 3 and sees_own(((1, 0, 6), (7, 1, 1))[at.b][at.i], at),
    ),
    "intervals [M, I]": (lambda: tw.intervals(ints(STARTS), ints(STOPS)), in_interval),
    "intervals [B, M, I]": (
        lambda: tw.intervals(
            torch.stack([ints(STARTS), ints(STARTS) + 1]),
            torch.stack([ints(STOPS), ints(STOPS) + 1]),
        ),
        lambda at: in_interval(at, shift=at.b),
    ),
    "intervals [1, H, M, I]": (
        lambda: tw.intervals(
            torch.stack([ints(STARTS), ints(STARTS) + 2]).unsqueeze(0),
            torch.stack([ints(STOPS), ints(STOPS) + 2]).unsqueeze(0),
        ),
        lambda at: in_interval(at, shift=2 * at.h),
    ),
    "intervals for fewer queries than there are": (
        lambda: tw.intervals(ints(STARTS[:4]), ints(STOPS[:4])),
        lambda at: at.i < 4 and in_interval(at),
    ),
    "blocks [nM, nN]": (lambda: tw.blocks(torch.tensor(TABLE), 3, 2), in_block),
    "blocks [B, nM, nN]": (
        lambda: tw.blocks(torch.tensor([TABLE, FLIPPED]), 3, 2),
        lambda at: in_block(at, (TABLE, FLIPPED)[at.b]),
    ),
    "blocks [B, H, nM, nN]": (
        lambda: tw.blocks(torch.tensor([[TABLE, FLIPPED], [FLIPPED, TABLE]]), 3, 2),
        lambda at: in_block(at, (TABLE, FLIPPED)[at.b ^ at.h]),
    ),
    "blocks [1, H, nM, nN]": (
        lambda: tw.blocks(torch.tensor([[TABLE, FLIPPED]]), 3, 2),
        lambda at: in_block(at, (TABLE, FLIPPED)[at.h]),
    ),
    "blocks of one default tile": (lambda: tw.blocks(torch.tensor([[True]])), lambda at: True),
    "function of nothing": (lambda: tw.from_function(lambda b, h, m, n: True), lambda at: True),
    "function of b": (lambda: tw.from_function(lambda b, h, m, n: b == 1), lambda at: at.b == 1),
    "function of h": (lambda: tw.from_function(lambda b, h, m, n: h == 1), lambda at: at.h == 1),
    "function of m": (lambda: tw.from_function(lambda b, h, m, n: m < 3), lambda at: at.i < 3),
    "function of n": (lambda: tw.from_function(lambda b, h, m, n: n > 4), lambda at: at.j > 4),
    "function of m, n": (
        lambda: tw.from_function(lambda b, h, m, n: (m * n) % 3 == 1),
        lambda at: at.i * at.j % 3 == 1,
    ),
    "function of b, n": (
        lambda: tw.from_function(lambda b, h, m, n: (n + b) % 2 == 0),
        lambda at: (at.j + at.b) % 2 == 0,
    ),
    "function of h, m": (
        lambda: tw.from_function(lambda b, h, m, n: m > h),
        lambda at: at.i > at.h,
    ),
    "function that indexes a tensor": (
        lambda: tw.from_function(lambda b, h, m, n: LOOKUP[b, h, m, n]),
        lambda at: bool((((at.b * 2 + at.h) * 7 + at.i) * 9 + at.j) % 5 < 2),
    ),
}


def constructor_cases() -> list[Any]:
    return [pytest.param(build, sees, id=name) for name, (build, sees) in CONSTRUCTORS.items()]


@pytest.mark.parametrize(("build", "sees"), constructor_cases())
def test_constructor_says_its_predicate(
    build: Callable[[], Mask], sees: Callable[[At], bool]
) -> None:
    mask = build()
    assert torch.equal(mask.dense(*SIZES), brute_dense(sees, SIZES))
    for offset in (-3, 0, 5):
        expected = brute_dense(sees, SIZES, [offset, offset])
        assert torch.equal(mask.dense(*SIZES, offset=offset), expected)
    per_batch = mask.dense(*SIZES, offset=torch.tensor([6, -4]))
    assert torch.equal(per_batch, brute_dense(sees, SIZES, [6, -4]))


@pytest.mark.parametrize(("build", "sees"), constructor_cases())
@pytest.mark.parametrize(("q_start", "k_start"), [(2, 0), (0, 5), (4, 3)])
def test_a_piece_counts_from_its_starts(
    build: Callable[[], Mask], sees: Callable[[At], bool], q_start: int, k_start: int
) -> None:
    sizes = Sizes(2, 2, SIZES.M - q_start, SIZES.N - k_start)
    got = build().dense(*sizes, offset=1, q_start=q_start, k_start=k_start)
    assert torch.equal(got, brute_dense(sees, sizes, [1, 1], q_start, k_start))


@pytest.mark.parametrize(("M", "N"), [(1, 1), (1, 6), (6, 1), (8, 3), (3, 8)])
def test_default_offset_aligns_bottom_right(M: int, N: int) -> None:
    expected = [[n <= m + N - M for n in range(N)] for m in range(M)]
    assert tw.causal().dense(1, 1, M, N)[0, 0].tolist() == expected


def test_sizes_of_zero() -> None:
    for mask in (tw.causal(), tw.key_padding([1, 2]), tw.chunked(2)):
        assert mask.dense(2, 1, 0, 3).shape == (2, 1, 0, 3)
        assert mask.dense(2, 1, 3, 0).shape == (2, 1, 3, 0)
        assert mask.dense(0, 1, 3, 3).shape == (0, 1, 3, 3)
    predicate = tw.from_function(lambda b, h, m, n: m >= n)
    for B, M, N in ((1, 0, 3), (1, 3, 0), (0, 3, 3)):
        assert predicate.lowered(B, 1, M, N).dense(B, 1, M, N).shape == (B, 1, M, N)


@pytest.mark.parametrize(("rows", "count"), [(7, 0), (0, 2)])
def test_intervals_of_no_entry_hide_everything(rows: int, count: int) -> None:
    none = torch.zeros(rows, count, dtype=torch.int64)
    mask = tw.intervals(none, none)
    assert not bool(mask.dense(*SIZES).any())
    assert bool((~mask).dense(*SIZES).all())


@pytest.mark.parametrize("tiles", [(0, 3), (2, 0), (0, 0)])
def test_blocks_of_no_tile_hide_everything(tiles: tuple[int, int]) -> None:
    mask = tw.blocks(torch.zeros(tiles, dtype=torch.bool), 4, 4)
    assert not bool(mask.dense(*SIZES).any())
    assert bool((~mask).dense(*SIZES).all())


def test_batch_index_names_the_rows() -> None:
    mask = tw.key_padding([1, 2, 3])
    got = mask.dense(2, 1, 1, 4, batch_index=torch.tensor([2, 0]))
    assert got.sum(-1).flatten().tolist() == [3, 1]


# ---------------------------------------------------------------- algebra


@bounded(150)
@given(st.data())
def test_nested_expressions_say_their_predicate(data: st.DataObject) -> None:
    sizes = Sizes(*(data.draw(st.integers(1, top)) for top in (2, 2, 8, 9)))
    case = data.draw(expressions(sizes, max_leaves=6))
    offsets = [data.draw(st.integers(-sizes.M, sizes.N)) for _ in range(sizes.B)]
    got = case.mask.dense(*sizes, offset=torch.tensor(offsets))
    assert torch.equal(got, brute_dense(case.sees, sizes, offsets))


@bounded(150)
@given(st.data())
def test_intervals_of_exact_masks_are_the_predicate(data: st.DataObject) -> None:
    """`visible` of an expression never asks its intervals; a schedule reads nothing else."""
    sizes = Sizes(*(data.draw(st.integers(1, top)) for top in (2, 2, 8, 9)))
    case = data.draw(expressions(sizes, exact_leaves(sizes), max_leaves=5))
    assert case.mask.is_exact
    expected = brute_dense(case.sees, sizes)
    assert torch.equal(Mask.visible(case.mask, index_of(sizes)).expand(*sizes), expected)


@bounded(100)
@given(st.data())
def test_intervals_cover_what_is_visible(data: st.DataObject) -> None:
    """Of any mask: the intervals hold every visible key, the hidden ones every hidden key."""
    sizes = Sizes(*(data.draw(st.integers(1, top)) for top in (2, 2, 8, 9)))
    case = data.draw(expressions(sizes))
    mask = case.mask.lowered(*sizes)
    expected = brute_dense(case.sees, sizes)
    for cover, keys in ((mask, expected), (~mask, ~expected)):
        covered = Mask.visible(cover, index_of(sizes)).expand(*sizes)
        assert not bool((keys & ~covered).any())


@bounded(60)
@given(st.data())
def test_laws_of_the_algebra(data: st.DataObject) -> None:
    a, b = (data.draw(expressions(SIZES, max_leaves=2)).mask for _ in range(2))

    def same(left: Mask, right: Mask) -> bool:
        return torch.equal(left.dense(*SIZES), right.dense(*SIZES))

    assert same(~(a & b), ~a | ~b)
    assert same(~(a | b), ~a & ~b)
    assert same(~~a, a)
    assert same(a & tw.full(), a)
    assert same(a | tw.full(), tw.full())
    assert same(a & ~tw.full(), ~tw.full())
    assert same(a | ~tw.full(), a)
    assert same(a & ~a, ~tw.full())
    assert same(a | ~a, tw.full())
    assert same(a & (a | b), a)


# ---------------------------------------------------------------- lowering


@bounded(100)
@given(st.data())
def test_lower_and_raise_round_trip(data: st.DataObject) -> None:
    case: Case = data.draw(expressions(SIZES, max_leaves=6))
    flags, ints, tensors = case.mask.lowered(*SIZES).lower()
    assert all(type(x) is int for x in (*flags, *ints))
    assert all(isinstance(x, Tensor) and not x.is_floating_point() for x in tensors)
    raised = raise_mask(flags, ints, tensors)
    assert torch.equal(raised.dense(*SIZES), brute_dense(case.sees, SIZES))
    again = raised.lower()
    assert again[:2] == (flags, ints)
    assert all(x is y for x, y in zip(again[2], tensors, strict=True))
    assert all(x is y for x, y in zip(raised.tensors(), tensors, strict=True))


def test_new_lengths_change_tensors_only() -> None:
    def mask(lengths: list[int]) -> Mask:
        return tw.causal() & (tw.key_padding(lengths) | tw.documents([0, *lengths]))

    assert mask([3, 5]).lower()[:2] == mask([2, 8]).lower()[:2]
    assert tw.causal(offset=3).lower()[0] == tw.causal(offset=-4).lower()[0]
    assert tw.window(2, 3).lower()[0] == tw.window(None, 9).lower()[0]


def test_a_predicate_is_lowered_first() -> None:
    mask = ~tw.from_function(lambda b, h, m, n: m == n) & tw.causal()
    assert not mask.is_exact
    with pytest.raises(RuntimeError) as caught:
        mask.lower()
    assert_one_sentence(caught, "from_function:")


def test_the_complement_of_many_intervals_is_cheap_and_right() -> None:
    starts = torch.arange(0, 400, 10).repeat(3, 1) + torch.arange(3)[:, None]
    many = tw.intervals(starts, starts + 4)
    assert torch.equal((~many).dense(1, 1, 3, 400), ~many.dense(1, 1, 3, 400))
    windows = tw.window(0, 0)
    for left in range(30):
        windows = windows | tw.window(left, 0, offset=10 * left)
    at = Positions(B=1, H=1, M=3, N=400)
    ranges = key_ranges(~windows & ~many, at, (0, 3), 64)
    seen = ((~windows) & (~many)).dense(1, 1, 3, 400, offset=397)[0, 0].any(0)
    covered = torch.zeros(400, dtype=torch.bool)
    for start, stop, _ in ranges:
        covered[start:stop] = True
    assert not bool((seen & ~covered).any())
