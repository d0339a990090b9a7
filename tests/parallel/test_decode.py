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
