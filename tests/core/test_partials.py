"""The merge of partials: its maths, its empty rows, its gradients, its errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import Partial, merge
from tilewise.core.partials import merge_into
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

from .brute import assert_one_sentence

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def random_partials(
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    empty: float = 0.3,
    spread: float = 8.0,
    packed: bool = False,
) -> list[Partial]:
    """Partials of one shape; each row is empty, `(0, -inf)`, with probability `empty`."""
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    partials = []
    for _ in range(count):
        lse = spread * torch.randn(2, 3, 7, dtype=lse_dtype)
        lse[torch.rand(lse.shape) < empty] = -INF
        out = torch.randn(2, 7, 3, 5, dtype=dtype)
        out[lse.transpose(1, 2).isneginf()] = 0
        partials.append(Partial(out[0], lse[0]) if packed else Partial(out, lse))
    return partials


def weighted(partials: Sequence[Partial], dtype: torch.dtype) -> Partial:
    """The definition: weights `exp(lse_i) / sum_j exp(lse_j)`, in the given dtype."""
    lses = torch.stack([p.lse.to(dtype) for p in partials])
    # A row without any key is 0 / 0 here, and 0 by definition.
    weights = torch.softmax(lses, dim=0).nan_to_num(0.0).transpose(-1, -2).unsqueeze(-1)
    outs = torch.stack([p.out.to(dtype) for p in partials])
    return Partial((weights * outs).sum(0), torch.logsumexp(lses, dim=0))


def assert_merged(got: Partial, partials: Sequence[Partial]) -> None:
    exact, eager = weighted(partials, torch.float64), weighted(partials, partials[0].lse.dtype)
    assert_within_budget(got.out, exact.out, eager.out.to(got.out.dtype), name="out")
    assert_lse_within_budget(got.lse, exact.lse, got.lse.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_merge_is_its_formula(dtype: torch.dtype, packed: bool, count: int) -> None:
    partials = random_partials(count, dtype=dtype, packed=packed)
    got = merge(partials)
    assert isinstance(got, Partial)
    assert (got.out.dtype, got.lse.dtype) == (dtype, partials[0].lse.dtype)
    assert_merged(got, partials)


def test_plain_pairs_are_partials() -> None:
    partials = random_partials(3)
    got, expected = merge([tuple(p) for p in partials]), merge(partials)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_rows_empty_everywhere_stay_empty(count: int) -> None:
    partials = random_partials(count, empty=1.0)
    got = merge(partials)
    assert torch.equal(got.out, torch.zeros_like(got.out))
    assert torch.equal(got.lse, torch.full_like(got.lse, -INF))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [False, True])
def test_an_empty_partial_is_the_identity(dtype: torch.dtype, first: bool) -> None:
    (partial,) = random_partials(1, dtype=dtype)
    (empty,) = random_partials(1, dtype=dtype, empty=1.0)
    got = merge([empty, partial] if first else [partial, empty])
    assert torch.equal(got.out, partial.out)
    assert torch.equal(got.lse, partial.lse)


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
def test_what_stands_in_an_empty_partial_does_not_leak(poison: float) -> None:
    partials = random_partials(3, empty=0.4)
    poisoned = []
    for out, lse in partials:
        is_empty = lse.isneginf().transpose(1, 2).unsqueeze(-1)
        out = torch.where(is_empty, poison, out).requires_grad_()
        poisoned.append(Partial(out, lse.clone().requires_grad_()))
    got, expected = merge(poisoned), merge(partials)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)
    (got.out.sum() + got.lse.masked_fill(got.lse.isneginf(), 0).sum()).backward()
    for out, lse in poisoned:
        assert out.grad is not None and lse.grad is not None
        is_empty = lse.isneginf()
        assert bool(torch.isfinite(out.grad).all() & torch.isfinite(lse.grad).all())
        assert not bool(lse.grad[is_empty].any())
        assert not bool(out.grad.transpose(1, 2)[is_empty].any())


@pytest.mark.parametrize("lse", [1e4, -1e4, 80.0, -200.0])
def test_scores_out_of_the_range_of_exp(lse: float) -> None:
    partials = [Partial(p.out, p.lse + lse) for p in random_partials(3, empty=0.2)]
    assert_merged(merge(partials), partials)


def test_a_partial_that_weighs_nothing() -> None:
    """exp of the difference underflows: the larger partial is the answer, bit for bit."""
    large, small = random_partials(2, empty=0.0, spread=1.0)
    got = merge([large, Partial(small.out, small.lse - 1000.0)])
    assert torch.equal(got.out, large.out)
    assert torch.equal(got.lse, large.lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_is_associative(dtype: torch.dtype) -> None:
    partials = random_partials(5, dtype=dtype)
    a, b, c, d, e = partials
    for got in (
        merge([merge([a, b]), c, merge([d, e])]),
        merge([a, merge([b, merge([c, merge([d, e])])])]),
        merge([merge([merge([merge([a, b]), c]), d]), e]),
    ):
        assert_merged(got, partials)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_commutative(dtype: torch.dtype) -> None:
    partials = random_partials(4, dtype=dtype)
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        assert_merged(merge([partials[i] for i in order]), partials)


def test_the_widest_dtype_wins() -> None:
    narrow, wide = random_partials(2)
    mixed = merge([Partial(narrow.out.bfloat16(), narrow.lse), wide])
    assert mixed.out.dtype == torch.float32
    assert_merged(mixed, [Partial(narrow.out.bfloat16(), narrow.lse), wide])
    halves = merge([Partial(narrow.out.half(), narrow.lse), Partial(wide.out.bfloat16(), wide.lse)])
    assert halves.out.dtype == torch.float32
    doubles = merge([Partial(narrow.out, narrow.lse.double()), wide])
    assert (doubles.out.dtype, doubles.lse.dtype) == (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True])
def test_merge_into_is_merge(dtype: torch.dtype, packed: bool) -> None:
    """Rows empty on either side, on both, and sums far apart."""
    partials = random_partials(3, dtype=dtype, packed=packed, empty=0.4)
    total = Partial(*(x.clone() for x in partials[0]))
    for part in partials[1:]:
        merge_into(total, part)
    assert_merged(total, partials)
    none = [Partial(torch.zeros_like(p.out), torch.full_like(p.lse, -INF)) for p in partials[:2]]
    merge_into(*none)
    assert torch.equal(none[0].out, torch.zeros_like(none[0].out))
    assert torch.equal(none[0].lse, torch.full_like(none[0].lse, -INF))


def test_sizes_of_zero() -> None:
    none = Partial(torch.zeros(2, 0, 3, 5), torch.zeros(2, 3, 0))
    got = merge([none, none])
    assert (got.out.shape, got.lse.shape) == (none.out.shape, none.lse.shape)


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_gradients_in_fp64(packed: bool, count: int) -> None:
    """Rows empty in no partial, in some, and in all of them."""
    partials = random_partials(count, dtype=torch.float64, empty=0.4, spread=1.0, packed=packed)
    for _, lse in partials:
        lse[..., 0] = -INF
    inputs = [x.detach().clone().requires_grad_() for p in partials for x in p]

    def merged(*flat: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = merge([Partial(*flat[i : i + 2]) for i in range(0, len(flat), 2)])
        # Finite differences of -inf are no number.
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradcheck(merged, inputs, eps=1e-6, atol=1e-7)


def test_second_derivatives_in_fp64() -> None:
    partials = random_partials(2, dtype=torch.float64, empty=0.3, spread=1.0)
    inputs = [x[:1, :2, :2].detach().clone().requires_grad_() for p in partials for x in p]

    def merged(*flat: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = merge([Partial(*flat[:2]), Partial(*flat[2:])])
        return out, lse.masked_fill(lse.isneginf(), 0.0)

    assert torch.autograd.gradgradcheck(merged, inputs, atol=1e-6)


def test_gradient_into_an_empty_row_is_zero() -> None:
    """Also where the caller's own gradient of an lse of `-inf` is not 0."""
    partials = random_partials(3, empty=0.3)
    for p in partials:
        p.lse[:, :, :2] = -INF
        p.out[:, :2] = 0
    inputs = [x.requires_grad_() for p in partials for x in p]
    out, lse = merge(partials)
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    for x in inputs:
        assert x.grad is not None and bool(torch.isfinite(x.grad).all())
    for p in partials:
        assert p.out.grad is not None and p.lse.grad is not None
        is_empty = p.lse.isneginf()
        assert not bool(p.lse.grad[is_empty].any())
        assert not bool(p.out.grad.transpose(1, 2)[is_empty].any())
        assert bool(p.out.grad.any()) and bool(p.lse.grad.any())


def test_gradients_within_budget() -> None:
    partials = random_partials(4, empty=0.0)

    def gradients(dtype: torch.dtype, merger: Any) -> list[Tensor]:
        parts = [Partial(*(x.to(dtype).requires_grad_() for x in p)) for p in partials]
        got = merger(parts)
        torch.manual_seed(1)
        upstream = [torch.randn(x.shape).to(dtype) for x in got]
        flat = [x for p in parts for x in p]
        return list(torch.autograd.grad(list(got), flat, upstream))

    rows = zip(
        gradients(torch.float32, merge),
        gradients(torch.float64, lambda parts: weighted(parts, torch.float64)),
        gradients(torch.float32, lambda parts: weighted(parts, torch.float32)),
        strict=True,
    )
    for i, (got, exact, eager) in enumerate(rows):
        assert_within_budget(got, exact, eager, name=f"gradient {i}")


# ---------------------------------------------------------------- bad arguments


def zeros(out: tuple[int, ...], lse: tuple[int, ...], device: str = "cpu") -> Partial:
    return Partial(torch.zeros(out, device=device), torch.zeros(lse, device=device))


GOOD = zeros((2, 7, 3, 5), (2, 3, 7))


@pytest.mark.parametrize(
    "partials",
    [
        [],
        [GOOD, zeros((2, 7, 3, 4), (2, 3, 7))],
        [GOOD, zeros((2, 6, 3, 5), (2, 3, 6))],
        [GOOD, zeros((1, 7, 3, 5), (1, 3, 7))],
        [GOOD, zeros((7, 3, 5), (3, 7))],
        [zeros((2, 7, 3, 5), (2, 7, 3))],
        [zeros((7, 3, 5), (7, 3))],
        [zeros((7, 3, 5), (2, 3, 7))],
        [zeros((3, 5), (3,))],
        [GOOD, zeros((2, 7, 3, 5), (2, 3, 7), device="meta")],
        [GOOD.out, GOOD.lse],
        [GOOD, GOOD[:1]],
        [(1.0, 2.0)],
    ],
)
def test_partials_that_do_not_fit(partials: list[Any]) -> None:
    with pytest.raises(ValueError) as caught:
        merge(partials)
    assert_one_sentence(caught, "merge:")
