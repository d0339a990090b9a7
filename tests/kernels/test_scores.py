"""Dropout's bits against the plain Philox, and tanh to fp32 accuracy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import tilewise as tw
from tilewise.core import philox
from tilewise.core.positions import Positions
from tilewise.core.tolerance import assert_within_budget
from tilewise.kernels import scores
from tilewise.kernels.launch import Config, launch
from tilewise.kernels.placement import sequence_at
from tilewise.kernels.scores import keep_tile

from .probes import DEVICE, make_call

pytestmark = pytest.mark.interpreter

_tanh = scores._tanh


@triton.jit
def _keep_kernel(kept, call, number, h, m0, n0, TRANSPOSED: tl.constexpr, BUILD: tl.constexpr):
    seq = sequence_at(call.place, tl.program_id(0) + number, BUILD.place)
    keep = keep_tile(call, seq, h, m0, n0, TRANSPOSED, BUILD)
    x = tl.arange(0, BUILD.block_n if TRANSPOSED else BUILD.block_m)[:, None]
    y = tl.arange(0, BUILD.block_m if TRANSPOSED else BUILD.block_n)[None, :]
    width = BUILD.block_m if TRANSPOSED else BUILD.block_n
    tl.store(kept + x * width + y, keep.to(tl.int32))


def keep(
    at: Positions, rng: Tensor, p: float, corner: tuple[int, ...], transposed: bool
) -> tuple[Tensor, bool]:
    """bool `[block_m, block_n]` of the tile whose corner is (b, h, m0, n0); was it grouped?"""
    config = Config(16, 8, 4, 1)
    call = make_call(tw.full(), at, (6, 2), dropout_p=p, rng=rng)
    plan = call.plan_rows(config)
    build = call.build(config)
    kept = torch.full((8, 16) if transposed else (16, 8), 7, dtype=torch.int32)
    launch(_keep_kernel, (1,), config, (kept, plan.call, *corner, transposed, build), DEVICE)
    assert bool(((kept == 0) | (kept == 1)).all())
    return (kept.T if transposed else kept) == 1, build.is_grouped


def expected(rng: Tensor, p: float, row: int, corner: tuple[int, int]) -> Tensor:
    i, j = (torch.arange(start, start + size) for start, size in zip(corner, (16, 8), strict=True))
    return philox.keep_mask(rng, p, torch.tensor(row), i[:, None], j[None, :])


SEED = torch.tensor([0x0123456789ABCDEF, -0x7EDCBA9876543210])
# Each half of the threshold's 32 bits, and its ends.
SHARES = (0.5, 0.1, 1e-7, 0.99999, 2.0**-32, 1e-12, 1 - 2.0**-32)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("k_start", [None, 8, 6])
def test_every_share(p: float, transposed: bool, k_start: int | None) -> None:
    at = Positions(3, 6, 50, 60, k_start=k_start)
    got, is_grouped = keep(at, SEED, p, (2, 5, 32, 24), transposed)
    assert is_grouped == (k_start != 6)
    assert torch.equal(got, expected(SEED, p, 2 * 6 + 5, (32, 24 + (k_start or 0))))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("k_start", [None, 6])
def test_a_word_at_the_threshold_is_kept(k_start: int | None, transposed: bool) -> None:
    """And one below it is not."""
    seed, offset = torch.tensor([5, 9]).unbind(0)
    zero = torch.zeros((), dtype=torch.int64)
    group, lane = divmod(k_start or 0, 4)
    words = philox.philox4x32((offset, zero, zero, zero + group), (seed, zero))
    word = int(words[lane])
    at = Positions(1, 6, 50, 60, k_start=k_start)
    for threshold, is_kept in ((word, True), (word + 1, False)):
        p = threshold / (1 << 32)
        got, _ = keep(at, torch.tensor([5, 9]), p, (0, 0, 0, 0), transposed)
        assert bool(got[0, 0]) == is_kept
        assert torch.equal(got, expected(torch.tensor([5, 9]), p, 0, (0, k_start or 0)))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_share_so_near_one_that_nothing_is_kept(transposed: bool) -> None:
    """round(p 2^32) is 2^32 there, which no 32-bit word reaches."""
    for k_start in (None, 6):
        at = Positions(1, 6, 50, 60, k_start=k_start)
        got, _ = keep(at, SEED, 1 - 1e-12, (0, 0, 0, 0), transposed)
        assert not bool(got.any())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    "rng", [[0, 0], [-1, -1], [1 << 62, 1 << 40], [-(1 << 63), (1 << 63) - 1], [7, 1 << 32]]
)
def test_every_seed(rng: list[int], transposed: bool) -> None:
    """The seed has 64 bits, the offset 32."""
    seed = torch.tensor(rng)
    for k_start in (4, 5):
        at = Positions(2, 6, 50, 60, q_start=3, k_start=k_start)
        got, _ = keep(at, seed, 0.5, (1, 3, 16, 8), transposed)
        assert torch.equal(got, expected(seed, 0.5, 9, (16 + 3, 8 + k_start)))


FAR = 1 << 27
PLACEMENTS: dict[str, tuple[dict[str, Any], bool]] = {
    "starts of ints": ({"q_start": 5, "k_start": 12}, True),
    "one start": ({"q_start": 5}, True),
    "far starts": ({"q_start": FAR + 1, "k_start": FAR + 3}, False),
    "starts a row": ({"q_start": torch.tensor([4, 9]), "k_start": torch.tensor([8, 8])}, False),
    "uneven starts a row": ({"k_start": torch.tensor([1, 3])}, False),
    "used lengths": ({"seqused_q": torch.tensor([40, 33])}, True),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("options", "groups"), PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_bits_belong_to_positions_in_the_whole_sequence(
    options: dict[str, Any], groups: bool, transposed: bool
) -> None:
    at = Positions(2, 6, 50, 60, **options)
    for b in range(2):
        got, is_grouped = keep(at, SEED, 0.4, (b, 1, 16, 40), transposed)
        assert is_grouped == groups
        first = []
        for name, corner in (("q_start", 16), ("k_start", 40)):
            start = options.get(name, 0)
            first.append(corner + int(start[b] if isinstance(start, Tensor) else start))
        assert torch.equal(got, expected(SEED, 0.4, b * 6 + 1, (first[0], first[1])))


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_documents_count_for_themselves(transposed: bool) -> None:
    cu_seqlens = torch.tensor([0, 13, 13, 60])
    at = Positions(3, 6, 60, 60, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    for b, m0, n0 in ((0, 0, 8), (2, 32, 16)):
        got, is_grouped = keep(at, SEED, 0.4, (b, 4, m0, n0), transposed)
        assert is_grouped
        assert torch.equal(got, expected(SEED, 0.4, b * 6 + 4, (m0, n0)))


# ---------------------------------------------------------------- tanh


@triton.jit
def _tanh_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, _tanh(tl.load(x_ptr + at)))


def tanh(x: Tensor) -> Tensor:
    out = torch.full_like(x, torch.nan)
    launch(_tanh_kernel, (x.numel() // 256,), Config(0, 0, 4, 1), (x, out, 256), DEVICE)
    return out


def test_tanh_to_fp32_accuracy() -> None:
    """In every octave by itself, so that a small x is as exact as a large one."""
    for exponent in range(-40, 6):
        octave = torch.linspace(2.0**exponent, 2.0 ** (exponent + 1), 256)
        for x in (octave, -octave):
            exact = torch.tanh(x.double())
            assert_within_budget(tanh(x), exact, exact.float(), name=f"2^{exponent}")
            assert torch.equal(tanh(-x), -tanh(x))


# numpy says so where a GPU does not.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_tanh_at_its_ends() -> None:
    inf = torch.inf
    x = torch.tensor([0.0, -0.0, inf, -inf, 1e30, -1e30, torch.nan, 1e-45]).repeat(32)
    out = tanh(x)[:8]
    assert torch.equal(out[:6], torch.tensor([0.0, -0.0, 1.0, -1.0, 1.0, -1.0]))
    assert bool(out[6].isnan())
    assert float(out[7]) in (0.0, float(x[7]))
