"""The grids of the GPU: sizes that the design names, and what each feature is compared with."""

import pytest
import torch

from tilewise.bench.cases import BACKWARD, FEATURES, FORWARD, HOST, HOST_GRAD, Case
from tilewise.bench.gpu.grids import GPU_GRIDS, anchor, gpu_grid
from tilewise.bench.gpu.peers import FLEX, find_roster


def test_dense_is_hidden_2048_and_16384_tokens() -> None:
    cases = gpu_grid("dense").cases
    assert len(cases) == len(set(cases)) == 2 * 3 * 2 * 2
    assert {case.H * case.D for case in cases} == {2048}
    assert {case.B * case.length for case in cases} == {16384}
    assert {(case.D, case.length, case.mask, case.direction) for case in cases} >= {
        (64, 1024, "full", FORWARD),
        (128, 16384, "causal", BACKWARD),
    }


def test_both_directions_of_a_shape_are_neighbours() -> None:
    cases = gpu_grid("dense").cases
    for first, second in zip(cases[::2], cases[1::2], strict=True):
        assert first.shape == second.shape and first.mask == second.mask
        assert (first.direction, second.direction) == (FORWARD, BACKWARD)


def test_head_dims() -> None:
    cases = gpu_grid("headdims").cases
    assert {case.D for case in cases} == {64, 80, 96, 128, 160, 192, 256}
    # As near to the hidden size as whole heads allow.
    assert all(0 <= 2048 - case.H * case.D < case.D for case in cases)


def test_groups() -> None:
    assert {(case.H, case.G, case.kv_heads) for case in gpu_grid("gqa").cases} == {(32, 4, 4)}


def test_window_and_documents_at_16k() -> None:
    assert {(c.window, c.length) for c in gpu_grid("window").cases} == {(1024, 16384)}
    for case in gpu_grid("documents").cases:
        assert len(set(case.documents)) == 8
        assert sum(case.documents) == case.length == 16384
    (case, *_) = gpu_grid("documents", lengths=[100]).cases
    assert sum(case.documents) == 100 and min(case.documents) >= 1


def test_every_feature_in_both_directions() -> None:
    cases = gpu_grid("features").cases
    assert {case.feature for case in cases if case.direction == BACKWARD} == {*FEATURES, ""}
    forward = {case.feature for case in cases if case.direction == FORWARD}
    assert forward == {*FEATURES, ""} - {"learned bias"}
    assert {case.mask for case in cases if not case.feature} == {"bits"}
    assert all(case.plain() is not None for case in cases)


def test_small_calls_are_graphs_and_the_host_has_its_own() -> None:
    assert {(c.B, c.H, c.length) for c in gpu_grid("small").cases} == {
        (4, 16, length) for length in (128, 256, 512)
    }
    assert {case.direction for case in gpu_grid("host").cases} == {HOST, HOST_GRAD}


def test_anchor_is_one_case_of_the_dense_grid() -> None:
    assert anchor() in gpu_grid("dense").cases


@pytest.mark.parametrize("name", GPU_GRIDS)
def test_lengths_and_dtypes_replace_the_grids_own(name: str) -> None:
    grid = gpu_grid(name, lengths=[64, 96], dtypes=[torch.float16])
    assert {case.length for case in grid.cases} == {64, 96}
    assert {case.dtype for case in grid.cases} == {torch.float16}
    assert len(gpu_grid(name, is_quick=True).cases) <= len(gpu_grid(name).cases)


def test_peers_of_the_grids_exist_and_flex_stays_in_dense() -> None:
    roster = find_roster()
    known = {peer.name for peer in roster.peers} | set(roster.absent)
    for name in GPU_GRIDS:
        grid = gpu_grid(name)
        assert set(grid.peers) <= known
        assert (FLEX in grid.peers) == (name == "dense")


@pytest.mark.parametrize(
    ("case", "share"),
    [
        (Case("documents", 100, documents=(60, 40)), (60**2 + 40**2) / 100**2),
        (Case("bits", 64), 7 / 8),
        (Case("causal", 64, feature="softcap"), 1.0),
    ],
)
def test_what_the_visible_area_predicts(case: Case, share: float) -> None:
    plain = case.plain()
    assert plain is not None and plain.mask == "causal" and plain.feature == ""
    assert case.flops() == share * plain.flops()
