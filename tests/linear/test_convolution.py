"""The short convolution against PyTorch's own, and what its state must do."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.linear.test_equivalences import assert_same
from tilewise.linear import short_convolution


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """`[B, M, C]` through conv1d, padded on the left."""
    W = weight.shape[-1]
    padded = F.pad(x.transpose(1, 2), (W - 1, 0))
    out = F.conv1d(padded, weight.unsqueeze(1), bias, groups=x.shape[-1]).transpose(1, 2)
    return F.silu(out) if activation else out


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_equals_conv1d(width: int, activation: str | None) -> None:
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 9, 6), (6, width), (6,))
    )
    got, state = short_convolution(x, weight, bias=bias, activation=activation)
    expected = by_torch(x, weight, bias, activation)
    assert_same(got, expected)
    kept = F.pad(x, (0, 0, width - 1, 0))[:, 9:].transpose(1, 2)
    assert torch.equal(state, kept)
    up = torch.randn_like(got)
    leaves = [x, weight, bias]
    pairs = zip(
        torch.autograd.grad(got, leaves, up), torch.autograd.grad(expected, leaves, up), strict=True
    )
    for dx, dy in pairs:
        assert_same(dx, dy)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9])
def test_a_split_goes_on_from_the_state(at: int) -> None:
    x, weight = torch.randn(2, 9, 6, requires_grad=True), torch.randn(6, 4)
    whole, last = short_convolution(x, weight)
    first, state = short_convolution(x[:, :at], weight)
    second, state = short_convolution(x[:, at:], weight, state=state)
    split = torch.cat([first, second], 1)
    assert torch.equal(split, whole) and torch.equal(state, last)
    up = torch.randn_like(whole)
    (dx,), (dy,) = (torch.autograd.grad(y, x, up) for y in (split, whole))
    assert_same(dx, dy)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_packed_equals_each_sequence_alone(width: int) -> None:
    bounds = [0, 3, 3, 4, 10]
    x, weight = torch.randn(12, 6, requires_grad=True), torch.randn(6, width, requires_grad=True)
    x.data[10:] = torch.nan
    state = torch.randn(4, 6, width - 1, requires_grad=True)
    out, last = short_convolution(x, weight, state=state, cu_seqlens=torch.tensor(bounds))
    outs, lasts = [], []
    for b, (start, stop) in enumerate(pairwise(bounds)):
        y, kept = short_convolution(x[None, start:stop], weight, state=state[b : b + 1])
        outs.append(y[0])
        lasts.append(kept)
    alone = torch.cat([*outs, torch.zeros(2, 6)])
    assert torch.equal(out, alone) and torch.equal(last, torch.cat(lasts))
    ups = torch.randn_like(out), torch.randn_like(last)
    leaves = [x, weight, state]
    got = torch.autograd.grad((out, last), leaves, ups)
    expected = torch.autograd.grad((alone, torch.cat(lasts)), leaves, ups)
    for dx, dy in zip(got, expected, strict=True):
        assert_same(dx, dy)
    assert torch.equal(got[0][10:], torch.zeros(2, 6))


@pytest.mark.parametrize("width", [1, 3])
def test_no_sequence_owns_a_token(width: int) -> None:
    x, weight = torch.full((5, 6), torch.nan), torch.randn(6, width)
    out, state = short_convolution(x, weight, cu_seqlens=torch.tensor([0]))
    assert torch.equal(out, torch.zeros(5, 6)) and state.shape == (0, 6, width - 1)


BAD = [
    ({"x": torch.zeros(9, 6)}, r"x must be \[B, M, C\], got 2 dimensions"),
    ({"weight": torch.zeros(5, 4)}, r"weight must be \[C, W\] with C = 6"),
    ({"weight": torch.zeros(6, 17)}, r"weight must have 1 to 16 taps, got 17"),
    ({"activation": "relu"}, r"activation must be None or 'silu', got 'relu'"),
    ({"state": torch.zeros(2, 6, 4)}, r"state must be \[B, C, W - 1\] = \[2, 6, 3\]"),
    ({"x": torch.zeros(2, 9, 6).long()}, r"x must be floating, got torch.int64"),
    ({"weight": torch.zeros(6, 4).long()}, r"weight must be floating, got torch.int64"),
    ({"bias": torch.zeros(6).long()}, r"bias must be floating, got torch.int64"),
    ({"cu_seqlens": torch.tensor([0, 9])}, r"x must be \[T, C\], got 3 dimensions"),
    ({"x": torch.zeros(9, 6), "cu_seqlens": torch.tensor([1, 9])}, "cu_seqlens must start at 0"),
    ({"x": torch.zeros(9, 6), "cu_seqlens": torch.tensor([0, 7, 5])}, "cu_seqlens must never fall"),
    ({"x": torch.zeros(9, 6), "cu_seqlens": torch.tensor([0, 10])}, "cu_seqlens ends at 10"),
    ({"x": torch.zeros(9, 6), "cu_seqlens": torch.tensor([]).int()}, "cu_seqlens must hold at"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_told(change: dict, message: str) -> None:
    given = {"x": torch.zeros(2, 9, 6), "weight": torch.zeros(6, 4), **change}
    with pytest.raises(ValueError, match=rf"short_convolution: {message}"):
        short_convolution(given.pop("x"), given.pop("weight"), **given)
