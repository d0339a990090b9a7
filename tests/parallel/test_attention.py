"""Every schedule, layout, mask and term over 1 to 8 ranks, against the oracle of one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.parallel import jobs
from tests.parallel.over_ranks import Way, check_over_ranks, outcome
from tests.parallel.ranks import RANKS, RankError
from tilewise.core.tolerance import assert_within_budget
from tilewise.parallel import layout as layouts
from tilewise.parallel.layout import Layout
from tilewise.parallel.plan import Request, make_plan

S, B, H, G, D, E = 61, 2, 6, 2, 16, 8
EDGES = [0, 9, 9, 40, 53]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LAYOUTS: dict[str, Callable[[int, int], Layout]] = {
    "contiguous": layouts.contiguous,
    "zigzag": layouts.zigzag,
    "striped": layouts.striped,
    "striped by 5": lambda size, ranks: layouts.striped(size, ranks, block=5),
    "documents": lambda size, ranks: layouts.document_zigzag(EDGES, ranks, size),
    "balanced": lambda size, ranks: layouts.balanced(tw.causal(), size, ranks, chunk=7),
}


def predicate(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return ((m * 3 + n * (h + 1) + b) % 5 > 1) & (n <= m)


def by_head(size: int) -> tw.Mask:
    starts = (torch.arange(H).reshape(1, H, 1, 1) + torch.arange(size).reshape(1, 1, size, 1)) % 9
    return tw.intervals(starts, starts + 20)


MASKS: dict[str, Callable[[], tw.Mask]] = {
    "full": tw.full,
    "causal": tw.causal,
    "window": lambda: tw.window(9, 2),
    "documents": lambda: tw.documents(EDGES) & tw.causal(),
    "prefix": lambda: tw.causal() | tw.prefix([3, 30]),
    "padding": lambda: tw.key_padding([S, 20]) & tw.causal(),
    "sink tokens": lambda: tw.causal() & (tw.window(6, 0) | tw.prefix(2)),
    "by head": lambda: by_head(S),
    "predicate": lambda: tw.from_function(predicate),
    "nothing": lambda: tw.key_padding([0, 0]),
}


def qkv(
    size: int = S, heads: tuple[int, int] = (H, G), dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    shapes = {"q": (heads[0], D), "k": (heads[1], D), "v": (heads[1], E)}
    return {
        n: torch.randn(B, size, *shape, dtype=torch.float64).to(dtype)
        for n, shape in shapes.items()
    }


def way_of(schedule: str, layout: str, ranks: int, size: int = S) -> Way:
    """The mesh of usp has two ranks inside."""
    mesh = (ranks // 2, 2) if schedule == "usp" else None
    return Way(schedule, LAYOUTS[layout](size, ranks), mesh)


ONE_DIM = ("ring", "all_gather", "ulysses")
ALL = (*ONE_DIM, "usp")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rings_of_three(layout: str, mask: str) -> None:
    check_over_ranks(way_of("ring", layout, 3), qkv(), mask=MASKS[mask]())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", ("zigzag", "striped", "documents"))
@pytest.mark.parametrize("schedule", ("all_gather", "ulysses", "usp"))
def test_other_schedules(schedule: str, layout: str, mask: str) -> None:
    ranks = 3 if schedule == "all_gather" else 4
    check_over_ranks(way_of(schedule, layout, ranks), qkv(), mask=MASKS[mask]())


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("ranks", (1, 2, 4, 8))
@pytest.mark.parametrize("mask", ("causal", "documents"))
def test_any_number_of_ranks(schedule: str, ranks: int, mask: str) -> None:
    # The smallest mesh of two dims that has something to send has two ranks.
    ranks = max(2, ranks) if schedule == "usp" else ranks
    check_over_ranks(way_of(schedule, "zigzag", ranks), qkv(), mask=MASKS[mask]())


# ---------------------------------------------------------------- terms


def terms_of(name: str, tensors: dict[str, Tensor], size: int) -> tuple[dict[str, Tensor], Any]:
    """Further tensors, each with a gradient, and options."""
    heads = tensors["q"].shape[2]
    extra: dict[str, Tensor] = {}
    if name in ("alibi", "all"):
        extra["alibi_slopes"] = torch.rand(heads) * 0.2
    if name == "alibi by row":
        extra["alibi_slopes"] = torch.rand(B, heads) * 0.2
    if name in ("bias", "all"):
        extra["bias"] = torch.randn(B, heads, size, size)
    if name == "key bias":
        extra["bias"] = torch.randn(heads, 1, size)
    if name in ("sinks", "all"):
        extra["sinks"] = torch.randn(heads)
    options: dict[str, Any] = {}
    if name in ("softcap", "all"):
        options |= {"softcap": 3.0, "scale": 0.4}
    if name in ("dropout", "all"):
        options["dropout_p"] = 0.3
    return {**tensors, **extra}, options


TERMS = ("softcap", "alibi", "alibi by row", "bias", "key bias", "sinks", "dropout", "all")


@pytest.mark.parametrize("mask", ("causal", "documents", "by head", "predicate"))
@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("schedule", ("ring", "all_gather"))
def test_every_term(schedule: str, term: str, mask: str) -> None:
    tensors, options = terms_of(term, qkv(), S)
    way = way_of(schedule, "documents" if mask == "documents" else "zigzag", 3)
    check_over_ranks(way, tensors, mask=MASKS[mask](), **options)


@pytest.mark.parametrize("mask", ("causal", "by head"))
@pytest.mark.parametrize("term", ("softcap", "alibi by row", "key bias", "sinks", "dropout"))
@pytest.mark.parametrize("schedule", ("ulysses", "usp"))
def test_every_term_where_heads_are_traded(schedule: str, term: str, mask: str) -> None:
    ranks = 3 if schedule == "ulysses" else 4
    tensors, options = terms_of(term, qkv(), S)
    check_over_ranks(way_of(schedule, "zigzag", ranks), tensors, mask=MASKS[mask](), **options)


@pytest.mark.parametrize("schedule", ALL)
def test_sinks_alone_keep_an_empty_row(schedule: str) -> None:
    tensors, _ = terms_of("sinks", qkv(), S)
    check_over_ranks(way_of(schedule, "zigzag", 4), tensors, mask=tw.key_padding([0, 7]))


# ---------------------------------------------------------------- heads, sizes, dtypes


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (8, 2), (7, 7), (3, 3), (12, 4), (2, 1)])
@pytest.mark.parametrize(("schedule", "ranks"), [("ulysses", 4), ("ulysses", 8), ("usp", 8)])
def test_heads_of_any_number(schedule: str, ranks: int, heads: tuple[int, int]) -> None:
    """Fewer kv heads than ranks, heads that do not divide, ranks without a head."""
    check_over_ranks(way_of(schedule, "zigzag", ranks), qkv(heads=heads), mask=tw.causal())


@pytest.mark.parametrize("size", (0, 1, 3, 4, 7))
@pytest.mark.parametrize("schedule", ALL)
def test_c226_fewer_tokens_than_chunks(schedule: str, size: int) -> None:
    for layout in ("zigzag", "contiguous"):
        way = way_of(schedule, layout, 4, size)
        check_over_ranks(way, qkv(size), mask=tw.causal())


@pytest.mark.parametrize("schedule", ALL)
def test_ranks_without_tokens(schedule: str) -> None:
    runs = [[[0, 20], [30, 61]], [], [[20, 30]], []]
    layout = Layout(
        "odd", S, tuple(torch.tensor(r, dtype=torch.int64).reshape(-1, 2) for r in runs)
    )
    way = Way(schedule, layout, (2, 2) if schedule == "usp" else None)
    check_over_ranks(way, qkv(), mask=tw.causal() & tw.window(25, None))


def uneven(*lengths: int) -> Layout:
    """One run for each rank, one after the other."""
    edges = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    spans = ([[a, b]] if b > a else [] for a, b in pairwise(edges))
    runs = [torch.tensor(span, dtype=torch.int64).reshape(-1, 2) for span in spans]
    return Layout("uneven", edges[-1], tuple(runs))


@pytest.mark.parametrize("lengths", [(1, 0, 4), (1, 0, 1), (0, 1, 1), (0, 3, 2)])
def test_rows_of_bias_where_a_rank_has_one_token_or_none(lengths: tuple[int, ...]) -> None:
    """One row may be a token's or all tokens': ranks choose alike, and none takes one for all."""
    layout, size = uneven(*lengths), sum(lengths)
    tensors = qkv(size, (6, 2)) | {"bias": torch.randn(2, 1, size, size)}
    check_over_ranks(Way("auto", layout), tensors, mask=tw.causal())
    with pytest.raises(RankError, match="a bias with rows of its own") as caught:
        outcome(Way("ulysses", layout), tensors)
    assert caught.value.kinds == dict.fromkeys(range(3), "NotImplementedError")


@pytest.mark.parametrize(
    ("schedule", "inside", "dtype"),
    [
        ("ring", tw.causal, torch.bfloat16),
        ("ring", tw.full, torch.float32),
        ("all_gather", tw.causal, torch.float32),
        ("all_gather", tw.full, torch.bfloat16),
    ],
)
def test_documents_of_one_batch_row_are_packed(
    schedule: str, inside: Callable[[], tw.Mask], dtype: torch.dtype
) -> None:
    """So many documents that pieces would be more than `plan.MOST_PIECES`."""
    edges = list(range(0, 1401, 140))
    layout, mask = layouts.document_zigzag(edges, 2, 1410), inside() & tw.documents(edges)
    request = Request(1, H, False, torch.device("cpu"))
    for rank in range(2):
        plan = make_plan(mask, layout, rank, request, gathers=schedule == "all_gather")
        calls = plan.whole or [call for calls in plan.calls for call in calls]
        assert calls and all(call.edges is not None for call in calls)
    tensors = {n: x[:1] for n, x in qkv(1410, dtype=dtype).items()}
    check_over_ranks(Way(schedule, layout), tensors, mask=mask)


@pytest.mark.parametrize("lengths", [(5, 0, 2), (3, 2, 2)])
def test_one_row_of_bias_for_all_travels_with_the_heads(lengths: tuple[int, ...]) -> None:
    tensors = qkv(sum(lengths), (6, 2)) | {"bias": torch.randn(2, 6, 1, sum(lengths))}
    check_over_ranks(Way("ulysses", uneven(*lengths)), tensors, mask=tw.causal())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("schedule", ALL)
def test_c224_c228_dtypes(schedule: str, dtype: torch.dtype) -> None:
    """Gradients in the dtype of their input, within the budget of one rank."""
    way = way_of(schedule, "zigzag", 4)
    tensors = qkv(dtype=dtype)
    check_over_ranks(way, tensors, mask=tw.causal())
    got = outcome(way, tensors, mask=tw.causal())
    assert [x.dtype for x in got if x.dim() == 4] == [dtype] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", (2, 4, 8))
def test_c219_the_error_does_not_grow_with_the_ranks(ranks: int, dtype: torch.dtype) -> None:
    """A partial in fp32 asked for: out is as exact as fp32 makes it, however many hops."""
    way = way_of("ring", "zigzag", ranks)
    check_over_ranks(way, qkv(dtype=dtype), mask=tw.causal(), out_dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("schedule", ALL)
def test_rows_that_one_call_computes_are_rounded_at_once(schedule: str, dtype: torch.dtype) -> None:
    """Over more than a few keys delta is as good from an out in 16 bits."""
    way = way_of(schedule, "zigzag", 4, 200)
    check_over_ranks(way, qkv(200, dtype=dtype), mask=tw.causal())
    alone = Way("ring", layouts.contiguous(200, 4))
    check_over_ranks(alone, qkv(200, dtype=dtype), mask=tw.documents([0, 50, 100, 150, 200]))


# ---------------------------------------------------------------- bits


@pytest.mark.parametrize("schedule", ALL)
def test_two_runs_are_bitwise_equal(schedule: str) -> None:
    tensors, options = terms_of("sinks", qkv(dtype=torch.bfloat16), S)
    way = way_of(schedule, "striped", 4)
    first, second = (outcome(way, tensors, mask=tw.causal(), **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("schedule", ALL)
def test_dropout_keeps_the_bits_of_one_rank(schedule: str) -> None:
    """v is the identity, so out shows each probability: the same are 0 as on one rank."""
    size = 16
    tensors = {"q": torch.randn(B, size, 4, 8), "k": torch.randn(B, size, 2, 8)}
    tensors["v"] = torch.eye(size).reshape(1, size, 1, size).expand(B, size, 2, size).contiguous()
    way = Way(schedule, layouts.zigzag(size, 4), (2, 2) if schedule == "usp" else None)
    got = outcome(way, tensors, seed=5, dropout_p=0.4)[0]
    torch.manual_seed(5)
    want = tw.attention(*tensors.values(), dropout_p=0.4)
    assert torch.equal(got == 0, want == 0)
    assert 0.3 < float((got == 0).double().mean()) < 0.5


# ---------------------------------------------------------------- everything with everything


def combination(
    index: int, counts: tuple[int, ...] = (1, 2, 3, 4, 8), usp_counts: tuple[int, ...] = (2, 4, 8)
) -> tuple[Way, dict[str, Tensor], dict[str, Any], str]:
    """The index-th choice of all that may be chosen, and the error that it must raise, if any.

    counts, usp_counts: of ranks.
    """
    choose = random.Random(index).choice
    schedule, mask = choose(ALL), choose(list(MASKS))
    ranks = choose(usp_counts if schedule == "usp" else counts)
    term, heads = choose(("none", *TERMS)), choose(((6, 2), (8, 8), (6, 1)))
    counts = term not in ("none", "softcap", "sinks")
    # One token a stripe is hundreds of pieces where something counts by position.
    layout = choose([name for name in LAYOUTS if not (counts and name == "striped")])
    if mask == "by head" and heads[0] != H:
        heads = (H, G)
    tensors, options = terms_of(term, qkv(heads=heads, dtype=choose(DTYPES)), S)
    inner = 2 if schedule == "usp" else ranks
    refusal = ""
    if schedule in ("ulysses", "usp"):
        if term in ("bias", "all"):
            refusal = "bias with rows of its own"
        elif term == "dropout" and heads[0] % inner:
            refusal = "dropout counts heads"
    return way_of(schedule, layout, ranks), tensors, {"mask": MASKS[mask](), **options}, refusal


def check_combination(
    index: int, way: Way, tensors: dict[str, Tensor], options: dict[str, Any], refusal: str
) -> None:
    """Right on every rank, or refused on every rank."""
    if refusal:
        with pytest.raises(RankError, match=refusal) as caught:
            outcome(way, tensors, **options)
        assert caught.value.kinds == dict.fromkeys(range(way.ranks), "NotImplementedError")
    else:
        check_over_ranks(way, tensors, seed=index, **options)


@pytest.mark.parametrize("index", range(60))
def test_any_combination(index: int) -> None:
    check_combination(index, *combination(index))


def test_a_mask_that_is_written_to_is_planned_again() -> None:
    x, layout, rows = qkv(), layouts.zigzag(S, 2), [[S, 20], [7, 33]]
    outs = RANKS.run(2, jobs.with_lengths, layout, x, rows)
    for at, row in enumerate(rows):
        options: dict[str, Any] = {"mask": tw.causal() & tw.key_padding(row)}
        exact = tw.attention(*(t.double() for t in x.values()), backend="reference", **options)
        eager = tw.attention(*x.values(), **options)
        found = layout.join([out[at] for out in outs])
        assert_within_budget(found, exact, eager)
