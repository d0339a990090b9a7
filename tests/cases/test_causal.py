"""Cases of causal alignment: unequal lengths are bottom-right aligned, in every length."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cases.common import (
    Outcome,
    assert_copied,
    causally,
    check,
    everything,
    formula,
    on_backends,
    qkv,
    run,
    same,
    visibility,
)


def check_causal(
    backend: str,
    x: dict[str, torch.Tensor],
    offset: int | None = None,
    *,
    is_causal: bool = True,
    **options: Any,
) -> Outcome:
    M, N = x["q"].shape[1], x["k"].shape[1]
    mask = tw.causal(offset=offset) if is_causal else tw.full()
    visible = visibility(causally if is_causal else everything, M, N, offset)
    return check(
        lambda **x: tw.attention_partial(**x, mask=mask, backend=backend, **options),
        lambda **x: formula(**x, visible=visible),
        x,
    )


@on_backends
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["equal", "group_of_8"])
@pytest.mark.parametrize(("M", "N"), [(1, 16), (2, 16), (5, 16), (2, 6), (5, 6), (1, 6)])
def test_c020_short_queries_see_all_earlier_keys(
    backend: str, M: int, N: int, heads: tuple[int, int]
) -> None:
    got = check_causal(backend, qkv(2, M, N, heads, 16))
    # The first query must reach key N - M, which a top-left mask hides.
    x = qkv(2, M, N, heads, 16)
    x["v"] = torch.zeros_like(x["v"])
    x["v"][:, N - M] = 1.0
    out = tw.attention(**x, mask=tw.causal(), backend=backend)
    assert bool((out[:, 0] > 0).all()) and got.out.shape == out.shape


@on_backends
def test_c023_one_query_against_a_cache_sees_every_key(backend: str) -> None:
    x = qkv(2, 1, 8, (4, 2), 16)
    check_causal(backend, x)
    # SDPA's convention is a stated offset of 0, and then only key 0 is seen.
    got = check_causal(backend, x, offset=0)
    assert_copied(got.out[:, 0], x["v"][:, 0].repeat_interleave(2, dim=1))


@on_backends
@pytest.mark.parametrize(("M", "N"), [(1, 16), (2, 4), (6, 6)])
def test_c024_the_two_conventions_differ_where_lengths_do(backend: str, M: int, N: int) -> None:
    x = qkv(2, M, N, (4, 2), 64)
    bottom_right, top_left = check_causal(backend, x), check_causal(backend, x, offset=0)
    distance = float((bottom_right.out - top_left.out).abs().max())
    assert distance == 0.0 if M == N else distance > 0.1


@on_backends
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("M", "N"), [(3, 130), (130, 3), (129, 200), (200, 129), (1, 513)])
def test_c025_any_two_lengths(backend: str, M: int, N: int, is_causal: bool) -> None:
    check_causal(backend, qkv(2, M, N, (4, 2), 16, 8), is_causal=is_causal)


@on_backends
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_c028_backward_knows_whether_it_was_causal(backend: str, heads: tuple[int, int]) -> None:
    x = qkv(2, 70, 70, heads, 16)
    causal, full = check_causal(backend, x), check_causal(backend, x, is_causal=False)
    for name in "qkv":
        assert float((causal.grads[name] - full.grads[name]).abs().max()) > 0.1


@on_backends
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_c029_first_call_equals_the_next_ten(
    backend: str, heads: tuple[int, int], is_causal: bool
) -> None:
    """Four short of a round length, as reported; an eighth of it."""
    x = qkv(1, 508, 508, heads, 32)
    options = {"backend": backend, "deterministic": True}
    first = check_causal(x=x, is_causal=is_causal, **options)
    mask = tw.causal() if is_causal else tw.full()
    for _ in range(2 if backend == "reference" else 10):
        same(run(lambda **x: tw.attention_partial(**x, mask=mask, **options), x), first)


@on_backends
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)], ids=["equal", "grouped"])
@pytest.mark.parametrize("N", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193])
def test_c030_any_length_against_the_tile(backend: str, N: int, heads: tuple[int, int]) -> None:
    check_causal(backend, qkv(2, N, N, heads, 16, dtype=torch.bfloat16))
