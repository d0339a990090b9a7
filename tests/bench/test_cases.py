"""Grids, what a case is charged for, and the short form in which it is verified."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.cases import BOTH, GRIDS, Case, grid


@pytest.mark.parametrize("case", [Case("full", 37), Case("window", 37, window=9)])
def test_flops_count_what_is_visible(case: Case) -> None:
    visible = int(case.build_mask().dense(1, 1, 37, 37, device=torch.device("cpu")).sum())
    assert case.flops() == 4 * case.B * case.H * case.D * visible
    assert replace(case, direction=BOTH).flops() == 3.5 * case.flops()


def test_causal_is_half() -> None:
    assert Case("causal", 64).flops() == Case("full", 64).flops() / 2


def test_window_longer_than_the_sequence_is_causal_exactly() -> None:
    case = Case("window", 20, window=100)
    assert case.flops() == 4 * case.B * case.H * case.D * 20 * 21 / 2


def test_verified_form_is_short_and_of_the_same_kind() -> None:
    case = Case("window", 8192, torch.bfloat16, BOTH)
    short = case.verified_form()
    assert short == replace(case, length=short.length, window=short.window)
    # The window hides keys there too.
    assert short.window < short.length < 512
    assert Case("full", 5).verified_form().length == 5


def test_grids_are_what_the_issue_asks_for() -> None:
    dense = grid("dense")
    assert len(dense) == len(set(dense)) == 8
    assert {(c.B, c.H, c.D, c.length) for c in dense} == {(1, 8, 64, 4096)}
    assert {(c.mask, c.length, c.window) for c in grid("window")} == {("window", 8192, 512)}
    assert {(c.length, c.dtype) for c in grid("memory")} == {(16384, torch.float32)}


@pytest.mark.parametrize("name", GRIDS)
def test_lengths_and_dtypes_replace_the_grids_own(name: str) -> None:
    cases = grid(name, lengths=[64, 96], dtypes=[torch.float16])
    assert {case.length for case in cases} == {64, 96}
    assert {case.dtype for case in cases} == {torch.float16}
    assert max(c.length for c in grid(name, is_quick=True)) < min(c.length for c in grid(name))


def test_unknown_mask() -> None:
    with pytest.raises(ValueError, match="mask must be full, causal or window, got 'dotted'"):
        Case("dotted", 8).build_mask()
