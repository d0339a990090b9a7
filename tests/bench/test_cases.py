"""Grids, what a case is charged for, and the short form in which it is verified."""

from dataclasses import replace

import pytest
import torch

from tilewise.bench.cases import (
    BACKWARD,
    BOTH,
    FORWARD,
    GRIDS,
    HOST,
    HOST_GRAD,
    Case,
    grid,
)


@pytest.mark.parametrize("case", [Case("full", 37), Case("window", 37, window=9)])
def test_flops_count_what_is_visible(case: Case) -> None:
    visible = int(case.build_mask().dense(1, 1, 37, 37, device=torch.device("cpu")).sum())
    assert case.flops() == 4 * case.B * case.H * case.D * visible
    assert replace(case, direction=BOTH).flops() == 3.5 * case.flops()
    assert replace(case, direction=BACKWARD).flops() == 2.5 * case.flops()


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


def test_verified_form_keeps_two_rows_and_every_document() -> None:
    assert Case("full", 5, B=16).verified_form().B == 2
    short = Case("documents", 16384, documents=(16000, 383, 1)).verified_form()
    assert len(short.documents) == 3 and min(short.documents) == 1
    assert sum(short.documents) == short.length


@pytest.mark.parametrize(
    ("direction", "verified"),
    [(FORWARD, FORWARD), (BACKWARD, BOTH), (BOTH, BOTH), (HOST, FORWARD), (HOST_GRAD, BOTH)],
)
def test_what_has_gradients_is_verified_with_them(direction: str, verified: str) -> None:
    assert Case("full", 5, direction=direction).verified_form().direction == verified


def test_documents_see_their_own_keys_only() -> None:
    case = Case("documents", 9, documents=(4, 5))
    visible = case.build_mask().dense(1, 1, 9, 9, device=torch.device("cpu"))[0, 0]
    assert int(visible.sum()) == 4 * 5 // 2 + 5 * 6 // 2
    assert not visible[4:, :4].any()
    assert case.mask_name == "2 causal documents"


def test_bits_hide_a_part_of_every_tile_and_no_row_whole() -> None:
    visible = Case("bits", 256).build_mask().dense(1, 1, 256, 256, device=torch.device("cpu"))
    assert visible.any(-1).all()
    tile = visible[0, 0, 128:, :128]
    assert 0 < int(tile.sum()) < tile.numel()


def test_grouped_heads_are_drawn_and_named() -> None:
    case = Case("full", 8, H=4, G=2)
    q, k, v, dout = case.draw(torch.device("cpu"))
    assert q.shape[2] == dout.shape[2] == 4 and k.shape[2] == v.shape[2] == 2
    assert "H 4 G 2" in case.shape and "G" not in Case("full", 8).shape


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
    with pytest.raises(ValueError, match=r"mask must be full, .* or bits, got 'dotted'"):
        Case("dotted", 8).build_mask()
