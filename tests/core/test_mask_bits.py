"""Predicates evaluated into bit tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core.mask import raise_mask

from .brute import Sizes, index_of


def test_a_predicate_is_evaluated_once_for_given_sizes() -> None:
    calls = []
    mask = tw.from_function(lambda b, h, m, n: calls.append(m) or m >= n)
    first = mask.lowered(1, 1, 5, 5)
    assert mask.lowered(1, 1, 5, 5) is first
    assert len(calls) == 1
    mask.lowered(1, 1, 5, 6)
    assert len(calls) == 2


@pytest.mark.parametrize(
    "predicate",
    [
        # The first and last bit of every word, and rows that are whole or empty.
        lambda b, h, m, n: (n % 32 == 31) | (n % 32 == 0),
        lambda b, h, m, n: m % 2 == 0,
        lambda b, h, m, n: (m * 7 + n * 13 + b * 5 + h * 3) % 11 < 4,
        # Whole tiles of 128, hidden ones and mixed ones in one mask; batch matters in some only.
        lambda b, h, m, n: n <= m,
        lambda b, h, m, n: (m < 128) | (b == 1),
        lambda b, h, m, n: torch.tensor(True),
    ],
)
@pytest.mark.parametrize(("M", "N"), [(1, 1), (127, 129), (130, 257), (256, 128)])
def test_bit_tiles_equal_the_function(
    predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], M: int, N: int
) -> None:
    sizes = Sizes(2, 3, M, N)
    index = index_of(sizes)
    expected = predicate(index.b, index.h, index.i, index.j).expand(*sizes)
    bits = tw.from_function(predicate).lowered(*sizes)
    assert torch.equal(bits.dense(*sizes), expected)
    assert torch.equal((~bits).dense(*sizes), ~expected)
    raised = raise_mask(*bits.lower())
    piece = raised.dense(2, 3, M - M // 2, N - N // 3, q_start=M // 2, k_start=N // 3)
    assert torch.equal(piece, expected[:, :, M // 2 :, N // 3 :])


@pytest.mark.parametrize(
    ("predicate", "mixed"),
    [
        # Three rows and three columns of tiles, the last ones not whole.
        (lambda b, h, m, n: torch.tensor(True), 0),
        (lambda b, h, m, n: n < 0, 0),
        (lambda b, h, m, n: n < 128, 0),
        (lambda b, h, m, n: n <= m, 3),
        (lambda b, h, m, n: n <= m + h, 3 + 4),
        (lambda b, h, m, n: (m != 259) | (n != 257), 1),
    ],
)
def test_bits_are_kept_of_mixed_tiles_only(
    predicate: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], mixed: int
) -> None:
    kinds, words = tw.from_function(predicate).lowered(2, 2, 260, 258).lower()[2]
    assert kinds.shape[2:] == (3, 3)
    assert words.shape[0] == mixed
    assert int((kinds > 1).sum()) == mixed
