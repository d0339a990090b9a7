"""The online softmax: steps in any order, rows that see nothing, sinks."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.kernels.launch import Config, launch
from tilewise.kernels.softmax import (
    join_sink,
    probabilities,
    softmax_end,
    softmax_step,
    split_exponent,
)

from .probes import DEVICE

pytestmark = pytest.mark.interpreter

INF = torch.inf
EPS = torch.finfo(torch.float32).eps
ROWS, KEYS = tl.constexpr(16), tl.constexpr(8)


@triton.jit
def _softmax_kernel(
    s_ptr, p_ptr, again_ptr, lse_ptr, total_ptr, scale, n_tiles, IS_FOLDED: tl.constexpr
):
    """The lse of rows of scores, P by the last maximum and by the lse, and the sum of P."""
    m = tl.arange(0, ROWS)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS,), tl.float32)
    ptrs = m[:, None] * (n_tiles * KEYS) + tl.arange(0, KEYS)[None, :]
    for i in range(0, n_tiles):
        s = tl.load(s_ptr + ptrs + i * KEYS)
        p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, scale, IS_FOLDED)
        acc = acc * rescale + tl.sum(p, 1)
        tl.store(p_ptr + ptrs + i * KEYS, p)
    lse, factor = softmax_end(row_max, row_sum, IS_FOLDED)
    tl.store(lse_ptr + m, lse)
    tl.store(total_ptr + m, acc * factor)
    row_lse = tl.where(lse == float("-inf"), float("inf"), lse)
    for i in range(0, n_tiles):
        s = tl.load(s_ptr + ptrs + i * KEYS)
        tl.store(again_ptr + ptrs + i * KEYS, probabilities(s, row_lse[:, None], scale, IS_FOLDED))


def softmax(s: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P of each step, P by the lse, lse, and each row's sum of P.

    scale: 0 for scores that are natural already; others are folded, and multiplied by it.
    """
    p, again = torch.full_like(s, torch.nan), torch.full_like(s, torch.nan)
    lse, total = torch.full((16,), torch.nan), torch.full((16,), torch.nan)
    is_folded = scale > 0.0
    factor = scale * math.log2(math.e) if is_folded else 1.0
    arguments = (s, p, again, lse, total, factor, s.shape[1] // 8, is_folded)
    launch(_softmax_kernel, (1,), Config(0, 0, 4, 1), arguments, DEVICE)
    return p, again, lse, total


def check(s: Tensor, scale: float) -> None:
    """Every row, some of which see nothing."""
    p, again, lse, total = softmax(s, scale)
    natural = s.double() * (scale or 1.0)
    exact = torch.logsumexp(natural, 1)
    assert_lse_within_budget(lse, exact, torch.float32)
    is_empty = exact.isneginf()
    assert torch.equal(total[is_empty], torch.zeros(int(is_empty.sum())))
    # The sum of what is normalised is one.
    one = torch.ones(16)[~is_empty]
    assert_within_budget(total[~is_empty], one.double(), one, floor=1e-6)
    assert not bool(p.isnan().any()) and not bool(again.isnan().any())
    probability = torch.where(is_empty[:, None], 0.0, (natural - exact[:, None]).exp())
    eager = torch.where(is_empty[:, None], 0.0, (natural.float() - exact.float()[:, None]).exp())
    # The exponent is rounded where it is large, before the larger part of it cancels.
    largest = float(torch.where(is_empty, 0.0, exact).abs().max())
    assert_within_budget(again, probability, eager, floor=EPS * (1.0 + largest))


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.125])
def test_rows_of_any_size(scale: float) -> None:
    for size in (0.01, 1.0, 50.0):
        check(torch.randn(16, 32) * size, scale)


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_rows_that_see_nothing_or_begin_with_nothing(scale: float) -> None:
    s = torch.randn(16, 32)
    s[0] = -INF
    s[1, :8] = -INF
    s[2, 8:] = -INF
    s[3, :31] = -INF
    s[4, 8:24] = -INF
    check(s, scale)
    check(torch.full((16, 16), -INF), scale)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_the_largest_score_may_come_last_or_first(scale: float) -> None:
    s = torch.linspace(-200.0, 200.0, 32).expand(16, 32).contiguous()
    check(s, scale)
    check(s.flip(1).contiguous(), scale)


def test_a_bias_of_the_most_negative_number() -> None:
    """Natural scores: nothing is multiplied before the maximum is taken away."""
    lowest = torch.finfo(torch.float32).min
    s = torch.full((16, 16), lowest)
    _, _, lse, total = softmax(s, 0.0)
    assert torch.equal(lse, torch.full((16,), lowest))
    assert_within_budget(total, torch.ones(16).double(), torch.ones(16))


# ---------------------------------------------------------------- sinks


@triton.jit
def _split_kernel(x, mantissa, exponent):
    at = tl.arange(0, 16)
    m, e = split_exponent(tl.load(x + at))
    tl.store(mantissa + at, m)
    tl.store(exponent + at, e)


def test_a_number_and_its_exponent_are_the_number() -> None:
    x = torch.tensor([1.0, 2.0, 3.5, 0.75, 1e-30, 1e30, 2.0**-126, 1.9999999] * 2)
    mantissa, exponent = torch.empty(16), torch.empty(16)
    launch(_split_kernel, (1,), Config(0, 0, 4, 1), (x, mantissa, exponent), DEVICE)
    assert torch.equal(torch.ldexp(mantissa.double(), exponent.double()), x.double())
    assert bool(((mantissa >= 1.0) & (mantissa < 2.0)).all())


@triton.jit
def _sink_kernel(lse_ptr, sink_ptr, joined_ptr, shrink_ptr):
    m = tl.arange(0, ROWS)
    joined, shrink = join_sink(tl.load(lse_ptr + m), tl.load(sink_ptr + m))
    tl.store(joined_ptr + m, joined)
    tl.store(shrink_ptr + m, shrink)


def join(lse: list[float], sinks: list[float]) -> tuple[Tensor, Tensor]:
    padding = [0.0] * (16 - len(lse))
    inputs = [torch.tensor(x + padding) for x in (lse, sinks)]
    outputs = [torch.full((16,), torch.nan) for _ in range(2)]
    launch(_sink_kernel, (1,), Config(0, 0, 4, 1), (*inputs, *outputs), DEVICE)
    return outputs[0][: len(lse)], outputs[1][: len(lse)]


def test_sinks_join_the_lse_and_shrink_the_row() -> None:
    lse = [0.0, 3.0, -5.0, 80.0, -80.0, 1e4, -1e4, 0.25]
    sinks = [0.0, -2.0, 5.0, -80.0, 80.0, 1e4, 1e4, 0.5]
    joined, shrink = join(lse, sinks)
    pairs = torch.tensor([lse, sinks]).double()
    exact = torch.logsumexp(pairs, 0)
    assert_lse_within_budget(joined, exact, torch.float32)
    share = (pairs[0] - exact).exp()
    assert_within_budget(shrink, share, (pairs[0].float() - exact.float()).exp())


# numpy says so where a GPU does not: the log of 0 is taken and thrown away.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")
def test_a_row_that_sees_nothing_has_the_sink_alone() -> None:
    joined, shrink = join([-INF, -INF, 2.0], [1.5, -INF, -INF])
    assert torch.equal(joined, torch.tensor([1.5, -INF, 2.0]))
    # Its output is 0, not 0 / 0; and where there is no sink nothing shrinks.
    assert torch.equal(shrink, torch.tensor([0.0, 0.0, 1.0]))
