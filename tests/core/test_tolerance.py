"""The error budget to the letter: what is just inside passes, what is just outside does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise.core.tolerance import (
    assert_lse_within_budget,
    assert_within_budget,
    measure_budget,
    measure_lse,
)

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

# In units of eps. Eager is off by 4 eps in seven elements of eight, the exact result has one 1:
#   max:  2 * 4 + 2 * 1               = 10
#   mean: 1.5 * 28 / 8 + 1 / 8        = 43 / 8
EXACT = [1, 0, 0, 0, 0, 0, 0, 0]
EAGER_ERROR = [0, 4, 4, 4, 4, -4, 4, -4]
AT_MAX = [0, 10, 0, 0, 0, 0, 0, 0]
OVER_MAX = [0, 11, 0, 0, 0, 0, 0, 0]
AT_MEAN = [0, 7, 6, -6, 6, 6, -6, 6]
OVER_MEAN = [0, 8, 6, -6, 6, 6, -6, 6]


def case(error: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    eps = torch.finfo(dtype).eps
    exact = torch.tensor(EXACT, dtype=torch.float64)
    return {
        "got": (exact + eps * torch.tensor(error)).to(dtype),
        "exact": exact,
        "eager": (exact + eps * torch.tensor(EAGER_ERROR)).to(dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("error", [[0] * 8, EAGER_ERROR, AT_MAX, AT_MEAN])
def test_at_the_budget_passes(error: list[int], dtype: torch.dtype) -> None:
    assert_within_budget(**case(error, dtype))


def test_results_may_carry_a_graph() -> None:
    tensors = case(AT_MEAN, torch.float32)
    got, eager = (tensors[name].requires_grad_() * 1 for name in ("got", "eager"))
    assert_within_budget(got, tensors["exact"].requires_grad_(), eager)
    assert_lse_within_budget(got, got, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("error", "said"), [(OVER_MAX, "max error"), (OVER_MEAN, "mean error")])
def test_over_the_budget_fails(error: list[int], said: str, dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match=f"{said} over budget"):
        assert_within_budget(**case(error, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_report_holds_the_formula(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    report = measure_budget(**case(AT_MEAN, dtype), name="dq")
    assert (report.max_error, report.max_budget) == (7 * eps, 10 * eps)
    assert (report.mean_error, report.mean_budget) == (43 / 8 * eps, 43 / 8 * eps)
    assert report.is_within and report.used == 1.0
    assert str(report).startswith("dq: max error")
    worse = measure_budget(**case(OVER_MAX, dtype))
    assert not worse.is_within and worse.used == 1.1
    assert "[1]" in str(worse)


def test_eps_is_that_of_the_result() -> None:
    """An fp32 partial of bf16 inputs is held to fp32's eps."""
    exact = torch.ones(4, dtype=torch.float64)
    off = exact + 2**-12
    assert_within_budget(off.to(torch.float16).float(), exact, exact)
    with pytest.raises(AssertionError):
        assert_within_budget(off.float(), exact, exact)
    assert_within_budget(off.half(), exact, exact)


def test_floor_adds_to_both_budgets() -> None:
    exact = torch.zeros(4, dtype=torch.float64)
    for got, floor in (([0.5, 0, 0, 0], 0.5), ([0.25] * 4, 0.25)):
        assert_within_budget(torch.tensor(got), exact, exact, floor=floor)
        with pytest.raises(AssertionError):
            assert_within_budget(torch.tensor(got), exact, exact, floor=floor * 0.99)
        with pytest.raises(AssertionError):
            assert_within_budget(torch.tensor(got), exact, exact)


def test_an_exact_zero_has_no_slack_but_what_gpus_flush() -> None:
    zero = torch.zeros(3)
    assert_within_budget(zero, zero.double(), zero)
    assert measure_budget(zero, zero.double(), zero).used == 0.0
    report = measure_budget(torch.tensor([0, 1e-30, 0]), zero.double(), zero)
    assert not report.is_within and 1e7 < report.used < INF


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_below_the_normal_numbers_of_fp32_may_be_0(dtype: torch.dtype) -> None:
    """Probabilities of 1e-39, say, which eager on a CPU has right."""
    tiny = torch.finfo(torch.float32).tiny
    for size, is_within in ((tiny / 2, True), (tiny, True), (1.01 * tiny, False)):
        exact = torch.full((4,), size, dtype=torch.float64)
        # Eager exactly right, and eps of it far below the floor.
        report = measure_budget(torch.zeros(4), exact, exact)
        assert report.is_within == is_within and (report.used <= 1) == is_within, size
        floor = measure_budget(torch.zeros(4, dtype=dtype), exact, exact, floor=tiny)
        assert floor.is_within and floor.used < 1


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("index", [0, 5])
def test_a_result_that_is_not_finite_fails(value: float, index: int) -> None:
    """Also under a floor that nothing else would break."""
    tensors = case([0] * 8, torch.float32)
    tensors["got"][index] = value
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        assert_within_budget(**tensors, floor=INF)


def test_what_cannot_be_measured_used_more_than_any_budget() -> None:
    """So that nobody who looks at the size of an error alone takes it for a small one."""
    right = case([0] * 8, torch.float32)
    spoiled = right["got"].clone()
    spoiled[3] = NAN
    lse = torch.tensor([1.0, -INF], dtype=torch.float64)
    empty = torch.zeros(0, 2)
    for report in (
        measure_budget(**{**right, "got": spoiled}),
        measure_budget(**{**right, "got": spoiled}, floor=INF),
        measure_budget(**{**right, "got": right["got"][:4]}),
        measure_budget(**{**right, "exact": spoiled.double()}),
        measure_budget(**{**right, "eager": spoiled}),
        measure_budget(torch.zeros(2, 0), empty.double(), empty),
        measure_lse(torch.tensor([1.0, 2.0]), lse, torch.float32),
        measure_lse(torch.tensor([NAN, -INF]), lse, torch.float32),
        measure_lse(lse[:1].float(), lse, torch.float32),
    ):
        assert not report.is_within and not report.is_measured and report.used == INF, report
    for report in (
        measure_budget(**case(OVER_MAX, torch.float32)),
        measure_lse(lse.float() + 1.0, lse, torch.float32),
    ):
        assert not report.is_within and report.is_measured and report.used < INF, report


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["exact", "eager"])
@pytest.mark.parametrize("error", [[0] * 8, [0, 1 << 20, 0, 0, 0, 0, 0, 0]])
def test_a_measure_that_is_not_finite_measures_nothing(
    name: str, value: float, error: list[int]
) -> None:
    """Otherwise the budget itself is NaN or infinite and everything is within it."""
    tensors = case(error, torch.float32)
    tensors[name][3] = value
    with pytest.raises(AssertionError):
        assert_within_budget(**tensors)


def test_an_exact_result_that_mixes_nan_and_minus_inf_measures_nothing() -> None:
    tensors = case([0] * 8, torch.float32)
    tensors["exact"][2], tensors["exact"][3] = NAN, -INF
    with pytest.raises(AssertionError):
        assert_within_budget(**tensors)
    with pytest.raises(AssertionError):
        assert_lse_within_budget(tensors["got"], tensors["exact"], torch.float32)


@pytest.mark.parametrize("name", ["got", "exact", "eager"])
def test_shapes_must_agree(name: str) -> None:
    tensors = case([0] * 8, torch.float32)
    # Each of these would broadcast.
    for shape in ((1, 8), (8, 1)):
        with pytest.raises(AssertionError, match="shapes differ"):
            assert_within_budget(**{**tensors, name: tensors[name].reshape(shape)})
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_within_budget(**{**tensors, name: tensors[name][:1]})


def test_nothing_is_within_any_budget() -> None:
    empty = torch.zeros(2, 0)
    assert_within_budget(empty, empty.double(), empty)
    assert_lse_within_budget(empty, empty.double(), torch.float32)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_within_budget(empty, torch.zeros(0, 2).double(), torch.zeros(0, 2))


# ---------------------------------------------------------------- lse


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float16, 1e-3), (torch.bfloat16, 1e-3), (torch.float32, 1e-5), (torch.float64, 1e-12)],
)
def test_lse_bound_is_absolute_below_one_and_relative_above(
    dtype: torch.dtype, bound: float
) -> None:
    exact = torch.tensor([0.25, -0.5, 40.0, -300.0, -INF], dtype=torch.float64)
    size = torch.tensor([1.0, 1.0, 40.0, 300.0, 0.0])
    for i in range(4):
        one = torch.nn.functional.one_hot(torch.tensor(i), 5)
        for sign in (-1, 1):
            slack = sign * bound * size * one
            assert_lse_within_budget(exact + 0.99 * slack, exact, dtype)
            with pytest.raises(AssertionError, match="error over its bound"):
                assert_lse_within_budget(exact + 1.01 * slack, exact, dtype)


@pytest.mark.parametrize(
    "got", [[1.0, 2.0, 3.0], [-INF, -INF, 3.0], [1.0, NAN, 3.0], [1.0, INF, 3.0]]
)
def test_pattern_of_minus_inf_is_exact(got: list[float]) -> None:
    exact = torch.tensor([1.0, -INF, 3.0], dtype=torch.float64)
    assert_lse_within_budget(exact.float(), exact, torch.bfloat16)
    with pytest.raises(AssertionError, match="pattern of -inf"):
        assert_lse_within_budget(torch.tensor(got), exact, torch.bfloat16)


@pytest.mark.parametrize("value", [NAN, INF])
def test_lse_that_is_no_number_fails(value: float) -> None:
    exact = torch.tensor([1.0, -INF, 3.0], dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_lse_within_budget(torch.tensor([value, -INF, 3.0]), exact, torch.bfloat16)
    with pytest.raises(AssertionError):
        assert_lse_within_budget(exact.float(), torch.tensor([value, -INF, 3.0]), torch.bfloat16)
    with pytest.raises(AssertionError, match="oracle"):
        assert_lse_within_budget(exact[::2].float(), torch.tensor([value, 3.0]), torch.bfloat16)


def test_lse_shapes_must_agree() -> None:
    lse = torch.zeros(3)
    with pytest.raises(AssertionError, match=r"lse of dk: .*shapes differ"):
        assert_lse_within_budget(lse, lse.reshape(1, 3), torch.float32, "lse of dk")
    assert measure_lse(lse, lse.double(), torch.float32).is_within
