"""Decoding over a cache spread over ranks, against the whole cache on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.parallel import jobs
from tests.parallel.ranks import RANKS, RankError
from tilewise.core.tolerance import assert_within_budget
from tilewise.parallel import Layout, contiguous, striped

SLOTS, B = 40, 3
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "contiguous": lambda ranks: contiguous(SLOTS, ranks),
    "striped": lambda ranks: striped(SLOTS, ranks, block=8),
}


def tensors(M: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "q": torch.randn(B, M, 4, 16).to(dtype),
        "k": torch.randn(B, SLOTS, 2, 16).to(dtype),
        "v": torch.randn(B, SLOTS, 2, 8).to(dtype),
    }


def one_rank(x: dict[str, Tensor], lengths: Tensor | None, **options: Any) -> Tensor:
    """Each sequence by itself, over the slots that it uses."""
    rows = []
    for b in range(B):
        used = SLOTS if lengths is None else int(lengths[b])
        k, v = (x[name][b : b + 1, :used] for name in "kv")
        rows.append(tw.attention(x["q"][b : b + 1], k, v, **options))
    return torch.cat(rows)


@pytest.mark.parametrize("M", (1, 3))
@pytest.mark.parametrize("ranks", (1, 2, 4, 8))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_spread_cache_is_the_whole_cache(layout: str, ranks: int, M: int) -> None:
    lengths = torch.tensor([SLOTS, 0, 17])
    x = tensors(M)
    for name, row in (("k", 2), ("v", 2)):
        x[name][row, 17:] = float("nan")
    for options in (
        {"mask": tw.causal()},
        {"mask": tw.causal() & tw.window(9, 0), "softcap": 3.0},
        {"mask": tw.causal(), "sinks": torch.randn(4), "alibi_slopes": torch.rand(4)},
    ):
        found = RANKS.run(
            ranks, jobs.decoded, LAYOUTS[layout](ranks), x, {**options, "lengths": lengths}
        )
        wide = {n: t.double() if isinstance(t, Tensor) else t for n, t in options.items()}
        exact = one_rank({n: t.double() for n, t in x.items()}, lengths, **wide)
        eager = one_rank(x, lengths, **options)
        for out, received in found:
            assert_within_budget(out, exact, eager)
            assert torch.equal(out, found[0][0])
            assert sum(received.values()) == (ranks - 1) * B * M * 4 * (8 + 1) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_without_lengths(dtype: torch.dtype) -> None:
    x = tensors(2, dtype)
    exact = one_rank({n: t.double() for n, t in x.items()}, None, mask=tw.causal())
    eager = one_rank(x, None, mask=tw.causal())
    for out, _ in RANKS.run(4, jobs.decoded, contiguous(SLOTS, 4), x, {"mask": tw.causal()}):
        assert out.dtype == dtype
        assert_within_budget(out, exact, eager)


def every_third(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (n + m + b + h) % 3 > 0


COUNTING: dict[str, Callable[[], tw.Mask]] = {
    "offset": lambda: tw.causal(offset=20),
    "offsets": lambda: tw.window(9, 1, offset=torch.tensor([30, 5, 11])),
    "intervals": lambda: tw.intervals(torch.arange(3)[:, None], torch.arange(3)[:, None] + 13),
    "blocks": lambda: (
        tw.blocks(torch.tensor([[True, False, True, False]]), 3, 10) | tw.window(1, 0)
    ),
    "predicate": lambda: tw.from_function(every_third) & tw.causal(),
    "tree": lambda: tw.tree(torch.tensor([1, 3, 5])),
}


@pytest.mark.parametrize("mask", COUNTING)
def test_masks_count_queries_as_on_one_rank(mask: str) -> None:
    """Query m is m to them, wherever it stands."""
    x = tensors(3)
    for lengths in (None, torch.tensor([SLOTS, 0, 17])):
        options = {"mask": COUNTING[mask]()}

        def whole(backend: str, dtype: torch.dtype, lengths: Tensor | None = lengths) -> Tensor:
            q, k, v = (t.to(dtype) for t in x.values())
            used = torch.full((B,), SLOTS) if lengths is None else lengths
            cache = tw.KVCache(k, v, used)
            return tw.attention_with_cache(q, cache, backend=backend, mask=COUNTING[mask]())

        exact, eager = whole("reference", torch.float64), whole("tiled", torch.float32)
        for out, _ in RANKS.run(
            2, jobs.decoded, striped(SLOTS, 2, block=8), x, {**options, "lengths": lengths}
        ):
            assert_within_budget(out, exact, eager)


def test_masks_that_count_queries_take_no_alibi() -> None:
    options = {"mask": tw.causal(offset=20), "alibi_slopes": torch.ones(4)}
    with pytest.raises(RankError, match="alibi_slopes beside a mask that counts") as caught:
        RANKS.run(2, jobs.decoded, contiguous(SLOTS, 2), tensors(3), options)
    assert caught.value.kinds == dict.fromkeys(range(2), "NotImplementedError")


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (torch.tensor([40, 1, 3]), "lengths must be 0 or from M = 2"),
        (torch.tensor([41, 2, 2]), "0 or"),
    ],
)
def test_lengths_that_do_not_fit(lengths: Tensor, words: str) -> None:
    with pytest.raises(RankError, match=words) as caught:
        RANKS.run(2, jobs.decoded, contiguous(SLOTS, 2), tensors(2), {"lengths": lengths})
    assert caught.value.kinds == dict.fromkeys(range(2), "ValueError")


def test_decode_refuses_gradients_and_another_layout() -> None:
    x = tensors(1)
    x["q"].requires_grad_()
    with pytest.raises(RankError, match="has no gradient"):
        RANKS.run(2, jobs.decoded, contiguous(SLOTS, 2), x, {})


ALL, FEW = torch.tensor([SLOTS]), torch.tensor([20])


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([{}, {"odd": {"M": 2}}], "ranks disagree on q: rank 0 has"),
        ([{"lengths": ALL, "odd": {"lengths": FEW}}], r"disagree on lengths: rank 0 has \[40\]"),
        ([{"lengths": ALL}, {"lengths": ALL, "odd": {"lengths": FEW}}], "disagree on lengths"),
        ([{}, {"odd": {"scale": 0.5}}], "disagree on scale"),
        ([{}, {"odd": {"sinks": torch.zeros(4)}}], "disagree on sinks"),
    ],
)
def test_ranks_that_decode_differently_are_told_so(calls: list[dict[str, Any]], words: str) -> None:
    """At any call, not at the first alone."""
    with pytest.raises(RankError, match=words) as caught:
        RANKS.run(3, jobs.decoded_then, contiguous(SLOTS, 3), calls)
    assert caught.value.kinds == dict.fromkeys(range(3), "ValueError")


@pytest.mark.parametrize(
    ("odd", "words"),
    [({"seed": 1}, "disagree on q"), ({"mask": tw.key_padding([7])}, "disagree on mask")],
)
def test_numbers_are_compared_where_asked_for(odd: dict[str, Any], words: str) -> None:
    call = {"mask": tw.key_padding([8]), "odd": odd}
    RANKS.run(2, jobs.decoded_then, contiguous(SLOTS, 2), [call])
    with pytest.raises(RankError, match=words):
        RANKS.run(2, jobs.decoded_then, contiguous(SLOTS, 2), [call], True)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"lengths": torch.tensor([41])}, "ValueError", "lengths must be 0 or from M = 1 to 40"),
        ({"lengths": torch.tensor([40.0])}, "ValueError", "integers"),
        ({"lengths": torch.tensor([40, 40])}, "ValueError", "integers"),
        ({"lengths": [40]}, "ValueError", "lengths must be a tensor, got list"),
        ({"layout": [16]}, "ValueError", "layout must be a Layout, got list"),
        ({"mask": "causal"}, "ValueError", "must be a tilewise Mask"),
        ({"softcap": -1.0}, "ValueError", "softcap"),
        ({"mesh": "cp", "group": None}, "ValueError", "mesh must be a DeviceMesh, got str"),
        ({"requires_grad": True}, "NotImplementedError", "has no gradient"),
    ],
)
@pytest.mark.parametrize("before", [[], [{"lengths": ALL}, {}]])
def test_a_wrong_call_is_refused_whenever_it_is_made(
    before: list[dict[str, Any]], options: dict[str, Any], kind: str, words: str
) -> None:
    with pytest.raises(RankError, match=words) as caught:
        RANKS.run(2, jobs.decoded_then, contiguous(SLOTS, 2), [*before, options])
    assert caught.value.kinds == dict.fromkeys(range(2), kind)


def test_one_rank_s_wrong_lengths_are_told_to_all() -> None:
    calls = [{"lengths": ALL}, {"lengths": ALL, "odd": {"lengths": ALL + 1}}]
    with pytest.raises(RankError, match="rank 1 of this call failed") as caught:
        RANKS.run(2, jobs.decoded_then, contiguous(SLOTS, 2), calls)
    assert caught.value.kinds == {0: "RuntimeError", 1: "ValueError"}
