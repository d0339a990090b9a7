"""Cases of context parallelism between real ranks: gloo processes on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import is_zero, normal, qkv, spoiled
from tests.helpers import UNDER_TEST
from tests.parallel.over_ranks import Way, check_over_ranks, outcome
from tilewise.parallel import Layout, contiguous, document_zigzag, zigzag

pytestmark = pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="ranks are processes on the CPU")
SCHEDULES = ("ring", "all_gather", "ulysses")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_c219_partials_between_hops_are_fp32(ranks: int) -> None:
    way = Way("ring", zigzag(130, ranks))
    tensors = qkv(1, 130, 130, (4, 2), 32, dtype=torch.bfloat16)
    check_over_ranks(way, tensors, mask=tw.causal(), out_dtype=torch.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c221_tokens_that_one_rank_holds_count_once(schedule: str) -> None:
    """Text before an image: a layout deals each token once, however unevenly."""
    text, image = 11, 30
    runs = [[[0, text], [text, text + 10]], [[text + 10, text + image]]]
    layout = Layout("text first", text + image, tuple(map(torch.tensor, runs)))
    check_over_ranks(Way(schedule, layout), qkv(2, 41, 41, (4, 2), 16))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c223_padding_behind_the_last_document(schedule: str) -> None:
    """Documents of lengths that nothing divides, and NaN after the last: zeros there, repeated."""
    S, edges = 45, [0, 21, 22, 40]
    tensors = qkv(1, S, S, (4, 2), 16)
    mask = tw.documents(edges) & tw.causal()
    way = Way(schedule, document_zigzag(edges, 2, S))
    check_over_ranks(way, tensors, mask=mask)
    spoilt = {n: spoiled(x, (slice(None), slice(40, None))) for n, x in tensors.items()}
    first, again = (outcome(way, spoilt, mask=mask) for _ in range(2))
    for x, y, clean in zip(first, again, outcome(way, tensors, mask=mask), strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, clean)
    assert all(is_zero(x[:, 40:]) for x in (first[0], *first[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c224_gradients_between_ranks(schedule: str, dtype: torch.dtype) -> None:
    tensors = qkv(2, 67, 67, (4, 2), 16, 8, dtype=dtype)
    check_over_ranks(Way(schedule, zigzag(67, 4)), tensors, mask=tw.causal())


@pytest.mark.parametrize("S", [1, 3, 4, 7])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c226_fewer_tokens_than_ranks(schedule: str, S: int) -> None:
    check_over_ranks(Way(schedule, zigzag(S, 4)), qkv(2, S, S, (4, 2), 16), mask=tw.causal())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_c228_gradients_between_ranks_keep_their_dtype(schedule: str, dtype: torch.dtype) -> None:
    tensors = qkv(1, 20, 20, (4, 2), 16, dtype=dtype) | {"sinks": normal(4, dtype=dtype)}
    got = outcome(Way(schedule, contiguous(20, 2)), tensors)
    assert [x.dtype for x in got] == [dtype, torch.float32, *[dtype] * 4]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c229_one_gradient_for_every_argument_between_ranks(schedule: str) -> None:
    """All together, each right: through bias, slopes and sinks too."""
    tensors: dict[str, Tensor] = qkv(2, 20, 20, (4, 2), 8)
    tensors |= {"sinks": normal(4, seed=5), "alibi_slopes": normal(4, seed=6).abs()}
    rows = 1 if schedule == "ulysses" else 20
    tensors["bias"] = normal(1, 4, rows, 20, seed=4)
    options: dict[str, Any] = {"mask": tw.causal(), "softcap": 5.0}
    check_over_ranks(Way(schedule, zigzag(20, 2)), tensors, **options)
