"""Layouts: every token once, shards and their inverse, segments that are what the mask says,
balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.core.brute import assert_one_sentence
from tilewise.core.mask import Index
from tilewise.core.positions import Positions
from tilewise.core.tiles import key_ranges
from tilewise.parallel import layout as layouts
from tilewise.parallel.layout import Layout, document_zigzag
from tilewise.parallel.plan import Call, Request, make_plan
from tilewise.parallel.visible import as_band, as_table, local_intervals, on_device, visible

RANKS = (1, 2, 3, 4, 8)
SIZES = (0, 1, 3, 8, 61, 256)


def documents_of(size: int) -> list[int]:
    """Uneven documents, an empty one among them, that end before the sequence does."""
    edges = [0, size // 7, size // 7, size // 2, size - size // 5]
    return sorted(edges)


LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": layouts.contiguous,
    "zigzag": layouts.zigzag,
    "striped": layouts.striped,
    "striped by 5": lambda size, ranks: layouts.striped(size, ranks, block=5),
    "documents": lambda s, r: layouts.document_zigzag(documents_of(s), r, s),
    "balanced": lambda s, r: layouts.balanced(tw.causal(), s, r, chunk=7),
}
on_layouts = pytest.mark.parametrize("name", LAYOUTS)

MASKS: dict[str, Callable[[int], tw.Mask]] = {
    "full": lambda size: tw.full(),
    "causal": lambda size: tw.causal(),
    "shifted": lambda size: tw.causal(offset=3),
    "window": lambda size: tw.window(9, 2),
    "documents": lambda size: tw.documents(documents_of(size)) & tw.causal(),
    "prefix": lambda size: tw.causal() | tw.prefix([3, size // 2]),
    "padding": lambda size: tw.key_padding([size, size // 3]) & tw.window(20, None),
    "sink tokens": lambda size: tw.causal() & (tw.window(6, 0) | tw.prefix(2)),
    "predicate": lambda size: tw.from_function(lambda b, h, m, n: (m * 3 + n * h + b) % 5 > 1),
}


@on_layouts
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("size", SIZES)
def test_every_token_is_on_one_rank(name: str, size: int, ranks: int) -> None:
    layout = LAYOUTS[name](size, ranks)
    assert (layout.ranks, layout.size) == (ranks, size)
    held = [layout.positions(rank) for rank in range(ranks)]
    assert layout.lengths == tuple(x.numel() for x in held)
    assert all(torch.equal(x, x.sort().values) for x in held)
    assert torch.equal(torch.cat(held).sort().values, torch.arange(size))
    assert all(bool((runs[:, 1] > runs[:, 0]).all()) for runs in layout.runs)


@pytest.mark.parametrize("ranks", RANKS)
def test_the_parts_of_contiguous_and_zigzag(ranks: int) -> None:
    size = 10 * ranks + 3
    edges = [size * rank // ranks for rank in range(ranks + 1)]
    halves = [size * chunk // (2 * ranks) for chunk in range(2 * ranks + 1)]
    whole = torch.arange(size)
    for rank in range(ranks):
        part = layouts.contiguous(size, ranks).positions(rank)
        assert torch.equal(part, whole[edges[rank] : edges[rank + 1]])
        back = 2 * ranks - 1 - rank
        pair = [whole[halves[c] : halves[c + 1]] for c in (rank, back)]
        assert torch.equal(layouts.zigzag(size, ranks).positions(rank), torch.cat(pair))
        assert torch.equal(layouts.striped(size, ranks).positions(rank), whole[rank::ranks])


@on_layouts
@pytest.mark.parametrize("ranks", (1, 3, 4))
def test_join_undoes_shard(name: str, ranks: int) -> None:
    layout = LAYOUTS[name](61, ranks)
    for shape, dim in (((2, 61, 3), 1), ((61,), 0), ((2, 3, 61), -1)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        shards = [layout.shard(x, rank, dim=dim) for rank in range(ranks)]
        joined = layout.join(shards, dim=dim)
        assert torch.equal(joined, x)
        weight = torch.randn(shape, dtype=torch.float64)
        (joined * weight).sum().backward()
        assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("inner", (1, 2, 4))
@on_layouts
def test_merged_ranks_hold_what_their_members_held(name: str, inner: int) -> None:
    layout = LAYOUTS[name](61, 4)
    merged = layout.merged(inner)
    for group in range(4 // inner):
        members = [layout.positions(group * inner + i) for i in range(inner)]
        assert torch.equal(merged.positions(group), torch.cat(members).sort().values)


def brute_visible(mask: tw.Mask, rows: Tensor, columns: Tensor, B: int, H: int) -> Tensor:
    """The mask element by element, from its dense form."""
    size = int(max(rows.max(), columns.max())) + 1
    return mask.dense(B, H, size, size, offset=0)[:, :, rows][..., columns]


@on_layouts
@pytest.mark.parametrize("mask_name", MASKS)
def test_segments_are_what_the_mask_shows(name: str, mask_name: str) -> None:
    size, ranks, B, H = 29, 3, 2, 3
    layout, mask = LAYOUTS[name](size, ranks), on_device(MASKS[mask_name](size), B, H, size, "cpu")
    for rank in range(ranks):
        for source in range(ranks):
            seen = torch.zeros(size, size, dtype=torch.bool)
            for q0, q1, k0, k1, kind in layout.segments(mask, rank, source, batch=B, heads=H):
                part = mask.dense(B, H, size, size, offset=0)[..., q0:q1, k0:k1]
                if kind == "skip":
                    assert not bool(part.any())
                elif kind == "full":
                    assert bool(part.all())
                else:
                    assert not mask.is_exact or (bool(part.any()) and not bool(part.all()))
                seen[q0:q1, k0:k1] = True
            rows, columns = layout.positions(rank), layout.positions(source)
            assert int(seen.sum()) == rows.numel() * columns.numel()


@pytest.mark.parametrize("mask_name", [name for name in MASKS if name != "predicate"])
def test_segments_agree_with_key_ranges(mask_name: str) -> None:
    """The same answer as the core's own planning of consecutive rows and keys."""
    size, B, H = 61, 2, 3
    mask, layout = MASKS[mask_name](size), layouts.zigzag(size, 3)
    for segment in layout.segments(mask, 1, 2, batch=B, heads=H):
        q0, q1, k0, k1, kind = segment
        at = Positions(B, H, q1 - q0, k1 - k0, q_start=q0, k_start=k0)
        ranges = key_ranges(mask, at, (0, q1 - q0), size)
        is_full = [r.is_full for r in ranges] == [True] and ranges[0].stop - ranges[
            0
        ].start == k1 - k0
        assert kind == ("full" if is_full else "partial" if ranges else "skip")


@on_layouts
@pytest.mark.parametrize("mask_name", MASKS)
def test_local_masks_are_the_mask_at_their_positions(name: str, mask_name: str) -> None:
    size, B, H = 61, 2, 3
    layout, mask = LAYOUTS[name](size, 3), on_device(MASKS[mask_name](size), B, H, size, "cpu")
    for rank in range(3):
        rows, columns = layout.positions(rank), layout.positions((rank + 1) % 3)
        want = brute_visible(mask, rows, columns, B, H)
        table = as_table(mask, rows, columns, B, H)
        assert torch.equal(table.dense(B, H, rows.numel(), columns.numel(), offset=0), want)
        if mask.is_exact:
            lows, highs = local_intervals(mask, rows, columns, B, H)
            assert int((highs - lows).expand(B, H, -1, -1).sum()) == int(want.sum())
            band = as_band(lows, highs, columns.numel())
            if band is not None:
                assert torch.equal(band.dense(B, H, rows.numel(), columns.numel(), offset=0), want)


@pytest.mark.parametrize("ranks", (2, 3, 4))
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(10, 3), tw.full()], ids=str)
def test_stripes_of_a_window_are_windows(ranks: int, mask: tw.Mask) -> None:
    layout = layouts.striped(12 * ranks, ranks)
    for rank in range(ranks):
        for source in range(ranks):
            at = (layout.positions(rank), layout.positions(source))
            assert as_band(*local_intervals(mask, *at), at[1].numel()) is not None


def test_a_causal_zigzag_needs_no_table() -> None:
    """The rule that every zigzag ring writes by hand follows from the mask."""
    layout = layouts.zigzag(48, 3)
    own = (layout.positions(1), layout.positions(1))
    assert as_band(*local_intervals(tw.causal(), *own), 16).lower() == tw.causal().lower()
    earlier = (layout.positions(1), layout.positions(0))
    lows, highs = local_intervals(tw.causal(), *earlier)
    assert bool((lows == 0).all()) and bool((highs == 8).all())
    later = (layout.positions(1), layout.positions(2))
    lows, highs = local_intervals(tw.causal(), *later)
    assert (highs - lows).flatten().tolist() == [0] * 8 + [16] * 8


def test_visible_takes_any_keys() -> None:
    mask = tw.from_function(lambda b, h, m, n: (m + n) % 3 == 0).lowered(1, 1, 200, 200)
    columns = torch.tensor([0, 5, 6, 130, 199])
    for rows in (torch.tensor([7]), torch.tensor([3, 150, 151])):
        zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
        at = Index(zero, zero, rows.reshape(1, 1, -1, 1), columns.reshape(1, 1, 1, -1), 0)
        want = (rows.unsqueeze(1) + columns) % 3 == 0
        assert torch.equal(visible(mask, at)[0, 0], want)


@pytest.mark.parametrize("mask", ("causal", "documents", "padding", "prefix", "by head"))
def test_plans_stay_on_the_host(mask: str) -> None:
    """Whatever torch's default device is; on this one nothing could be read."""
    made = (
        MASKS[mask](61)
        if mask in MASKS
        else tw.intervals(torch.zeros(1, 3, 61, 1).long(), torch.ones(1, 3, 61, 1).long())
    )
    request = Request(2, 3, False, torch.device("cpu"))
    with torch.device("meta"):
        for name in LAYOUTS:
            layout = LAYOUTS[name](61, 3)
            layout.areas(made, batch=2, heads=3)
            layout.order(padded=True)
            plans = [
                make_plan(made, layout, rank, request, gathers=g)
                for rank in range(3)
                for g in (False, True)
            ]
            assert all(call.mask is not None for plan in plans for call in plan.whole)


# ---------------------------------------------------------------- balance


def imbalance(areas: list[float]) -> float:
    return max(areas) / (sum(areas) / len(areas)) - 1


@pytest.mark.parametrize("ranks", RANKS)
def test_zigzag_balances_causal_attention(ranks: int) -> None:
    assert imbalance(layouts.zigzag(16384, ranks).areas(tw.causal())) <= 0.03
    assert imbalance(layouts.striped(16384, ranks).areas(tw.causal())) <= 0.03
    if ranks > 1:
        assert imbalance(layouts.contiguous(16384, ranks).areas(tw.causal())) > 0.4


@pytest.mark.parametrize("ranks", (2, 4, 8))
@pytest.mark.parametrize("spread", ("even", "long tail", "many short"))
def test_balanced_is_balanced_on_documents(ranks: int, spread: str) -> None:
    lengths = {
        "even": [1024] * 16,
        "long tail": [9000, 3000, 1500, 900, 700, 500, 400, 200, 100, 50, 20, 10, 4],
        "many short": [37, 5, 120, 64, 1, 200] * 40,
    }[spread]
    edges = [0, *accumulate(lengths)]
    mask = tw.documents(edges) & tw.causal()
    layout = layouts.balanced(mask, edges[-1], ranks)
    assert imbalance(layout.areas(mask)) <= 0.10
    most = max(layout.lengths) / (edges[-1] / ranks)
    assert most <= 1.0 + 1.5 / 16


def test_documents_of_one_token_do_not_pile_up() -> None:
    layout = layouts.document_zigzag(list(range(65)), 4)
    assert max(layout.lengths) - min(layout.lengths) <= 1


def test_areas_count_pairs() -> None:
    size, B, H = 61, 2, 3
    layout = layouts.zigzag(size, 3)
    for name, make in MASKS.items():
        mask = make(size)
        dense = mask.dense(B, H, size, size, offset=0).double().mean((0, 1)).sum(-1)
        want = [float(dense[layout.positions(rank)].sum()) for rank in range(3)]
        got = layout.areas(mask, batch=B, heads=H)
        assert [round(x, 6) for x in got] == [round(x, 6) for x in want], name


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("start", "call"),
    [
        ("layout", lambda: layouts.zigzag(8, 0)),
        ("layout", lambda: layouts.contiguous(-1, 2)),
        ("striped", lambda: layouts.striped(8, 2, block=0)),
        ("document_zigzag", lambda: layouts.document_zigzag([1, 5], 2)),
        ("document_zigzag", lambda: layouts.document_zigzag([0, 5, 3], 2)),
        ("document_zigzag", lambda: layouts.document_zigzag([0, 5], 2, 4)),
        ("document_zigzag", lambda: layouts.document_zigzag(5, 2)),
        ("balanced", lambda: layouts.balanced(tw.causal(), 8, 2, chunk=-1)),
        ("shard", lambda: layouts.zigzag(8, 2).shard(torch.zeros(1, 7), 0)),
        ("layout zigzag", lambda: layouts.zigzag(8, 2).positions(2)),
        ("join", lambda: layouts.zigzag(8, 2).join([torch.zeros(1, 4), torch.zeros(1, 3)])),
        ("join", lambda: layouts.zigzag(8, 2).join([torch.zeros(1, 4)])),
        ("layout", lambda: layouts.zigzag(8, 3).merged(2)),
    ],
)
def test_what_does_not_fit_is_said(start: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError) as caught:
        call()
    assert_one_sentence(caught, start)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: layouts.balanced(16, 2, tw.causal()),
            "balanced: mask must be a tilewise Mask, got int",
        ),
        (lambda: layouts.zigzag(16.0, 1), "size must be an integer, got 16.0"),
        (lambda: layouts.contiguous("16", 1), "size must be an integer, got '16'"),
        (lambda: layouts.striped(16, 2.0), "ranks must be an integer, got 2.0"),
        (
            lambda: layouts.zigzag(16, 1).segments(tw.causal(), 0, 3),
            r"rank must be in \[0, 1\), got 3",
        ),
        (
            lambda: layouts.zigzag(16, 1).segments(tw.causal(), -1, 0),
            r"rank must be in \[0, 1\), got -1",
        ),
        (
            lambda: layouts.zigzag(16, 1).segments("x", 0, 0),
            "segments: mask must be a tilewise Mask",
        ),
        (lambda: layouts.zigzag(torch.ones(2), 1), "size must be an integer, got tensor"),
        (lambda: layouts.striped(16, 2, block=1.5), "block must be an integer .* got 1.5"),
        (lambda: layouts.document_zigzag([0, 2.5], 2), r"hold integers .* got \[0, 2.5\]"),
        (lambda: layouts.document_zigzag(torch.tensor(4), 2), "hold integers .* got 4"),
        (lambda: layouts.document_zigzag([0, 4], 2, "4"), "size must be an integer, got '4'"),
        (lambda: layouts.balanced(tw.causal(), 8, 2, chunk=1.5), "chunk must be an integer"),
        (lambda: layouts.balanced(tw.causal(), 8, 2, batch=-1), "batch must be an integer >= 0"),
        (lambda: layouts.zigzag(8, 2).positions("0"), r"rank must be in \[0, 2\), got 0"),
        (lambda: layouts.zigzag(8, 2).shard([1], 0), "shard: x must be a tensor, got list"),
        (lambda: layouts.zigzag(8, 2).shard(torch.ones(8), 0), "dim must be one of x's 1, got 1"),
        (lambda: layouts.zigzag(8, 2).join(torch.ones(2, 4)), "2 shards in a list, got Tensor"),
        (lambda: layouts.zigzag(16, 1).areas("x"), "areas: mask must be a tilewise Mask, got str"),
    ],
)
def test_what_is_no_size_rank_or_mask_is_said(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------- documents dealt chunk by chunk


def seen_by(calls: Sequence[Call], M: int, N: int) -> torch.Tensor:
    """What calls of packed sequences let M queries see of N keys; no two of them the same."""
    seen = torch.zeros(M, N, dtype=torch.bool)
    for call in calls:
        assert call.edges is not None
        q_edges, k_edges = (x.tolist() for x in call.edges)
        assert (q_edges[-1], k_edges[-1]) == (call.q1 - call.q0, call.k1 - call.k0)
        for (m0, m1), (n0, n1) in zip(pairwise(q_edges), pairwise(k_edges), strict=True):
            inner = call.mask.dense(1, 1, m1 - m0, n1 - n0)[0, 0]
            target = seen[call.q0 + m0 : call.q0 + m1, call.k0 + n0 : call.k0 + n1]
            assert not bool((target & inner).any())
            target |= inner
    return seen


@pytest.mark.parametrize("mask", (tw.causal, tw.full))
@pytest.mark.parametrize("ranks", (2, 3))
def test_documents_in_chunks_are_packed_sequences(ranks: int, mask: Callable[[], tw.Mask]) -> None:
    """One call a step, whose edges and mask say what the table says that they stand for."""
    edges = [0, 40, 41, 90, 130]
    layout, whole = document_zigzag(edges, ranks, 140), mask() & tw.documents(edges)
    request = Request(1, 1, False, torch.device("cpu"))
    for rank in range(ranks):
        plan = make_plan(whole, layout, rank, request)
        for source, calls in enumerate(plan.calls):
            rows, columns = layout.positions(rank), layout.positions(source)
            want = whole.dense(1, 1, 140, 140)[0, 0][rows][:, columns]
            assert len(calls) == 1 and torch.equal(seen_by(calls, *want.shape), want)


@pytest.mark.parametrize("mask", (tw.causal, tw.full))
@pytest.mark.parametrize("ranks", (2, 3))
def test_chunks_of_many_documents_meet_all_keys_in_packed_calls(
    ranks: int, mask: Callable[[], tw.Mask]
) -> None:
    """Not in one with a table, which is slow; two, since both chunks of a document see its keys."""
    edges = [0, 40, 41, 90, 130, 170, 180, 260, 300]
    layout, whole = document_zigzag(edges, ranks, 310), mask() & tw.documents(edges)
    request = Request(1, 1, False, torch.device("cpu"))
    for rank in range(ranks):
        calls = make_plan(whole, layout, rank, request, gathers=True).whole
        want = whole.dense(1, 1, 310, 310)[0, 0][layout.positions(rank)]
        # Where all is seen, both chunks see the same.
        assert len(calls) <= (2 if mask is tw.causal else 1)
        assert torch.equal(seen_by(calls, *want.shape), want)


def test_rows_that_would_take_many_packed_calls_take_a_table() -> None:
    """Every second row, and keys that grow by none or by three."""
    layout = layouts.striped(200, 2)
    whole = tw.intervals(*(x.reshape(1, 1, 200, 1) for x in spread_bounds(200)))
    request = Request(1, 1, False, torch.device("cpu"))
    (call,) = make_plan(whole, layout, 0, request, gathers=True).whole
    assert call.edges is None
    want = whole.dense(1, 1, 200, 200)[0, 0][layout.positions(0)]
    got = torch.zeros_like(want)
    inner = call.mask.dense(1, 1, call.q1 - call.q0, call.k1 - call.k0)[0, 0]
    got[call.q0 : call.q1, call.k0 : call.k1] = inner
    assert torch.equal(got, want)


def spread_bounds(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(size, dtype=torch.int32)
    return torch.zeros_like(at), (at // 7 * 7 + 1).clamp(max=size)
