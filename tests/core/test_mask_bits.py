"""Predicates evaluated into bit tiles, and any other mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise.core import mask_bits
from tilewise.core.mask import Index, raise_mask
from tilewise.core.mask_bits import BIT_TILE, materialise
from tilewise.core.positions import Positions

from .brute import Sizes, bounded, brute_storage, expressions, index_of


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


# ---------------------------------------------------------------- any mask as bits


def draw_placement(data: st.DataObject) -> Positions:
    """Padded or packed, in use as a whole or in part, whole calls or pieces."""
    B, H = data.draw(st.sampled_from([(1, 1), (2, 2), (3, 1)]))
    is_packed = data.draw(st.booleans())
    length = st.sampled_from([5, 9, 1, 0, 13])
    M, N = (data.draw(st.sampled_from([7, 1, 11, 16])) for _ in range(2))
    stored_q, stored_k = [M] * B, [N] * B
    placement: dict[str, Any] = {}
    if is_packed:
        stored_q, stored_k = ([data.draw(length) for _ in range(B)] for _ in range(2))
        M, N = (sum(x) + data.draw(st.integers(0, 3)) for x in (stored_q, stored_k))
        placement["cu_seqlens_q"], placement["cu_seqlens_k"] = (
            torch.tensor([0, *x], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for x in (stored_q, stored_k)
        )
    for name, stored in (("seqused_q", stored_q), ("seqused_k", stored_k)):
        if data.draw(st.booleans()):
            placement[name] = torch.tensor([data.draw(st.integers(0, x)) for x in stored])
    if data.draw(st.booleans()):
        start = st.sampled_from([0, 3, 130])
        placement["q_start"] = torch.tensor([data.draw(start) for _ in range(B)])
        placement["k_start"] = data.draw(start)
    return Positions(B, H, M, N, **placement)


@bounded(150)
@given(st.data())
def test_any_mask_of_any_placement_as_bits(data: st.DataObject) -> None:
    """Bit (b, h, m, n) of local queries and keys is what storage shows of that document."""
    at = draw_placement(data)
    extent = Sizes(at.B, at.H, *(max(size, 1) for size in at.extent))
    case = data.draw(expressions(extent, max_leaves=3))
    visible = brute_storage(case.sees, at)
    local = at.unpacked()
    bits = materialise(case.mask.lowered(*extent), at, torch.device("cpu"))
    assert (bits.block_m, bits.block_n) == (BIT_TILE, BIT_TILE)
    dense = bits.dense(at.B, at.H, local.M, local.N)
    for b in range(at.B):
        m0, n0 = (0 if cu is None else int(cu[b]) for cu in (at.cu_seqlens_q, at.cu_seqlens_k))
        M, N = (
            size if used is None else int(used[b])
            for used, size in ((local.seqused_q, local.M), (local.seqused_k, local.N))
        )
        row = 0 if at.is_packed else b
        assert torch.equal(dense[b, :, :M, :N], visible[row, :, m0 : m0 + M, n0 : n0 + N])


@pytest.mark.parametrize("strip_elements", [1, 1 << 24])
def test_masks_over_several_bit_tiles(strip_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, hidden and mixed tiles; one strip of tiles at a time, or all at once."""
    monkeypatch.setattr(mask_bits, "_STRIP_ELEMENTS", strip_elements)
    at = Positions(B=2, H=2, M=130, N=300)
    for mask in (
        tw.causal() & ~tw.window(3, 0),
        tw.from_function(lambda b, h, m, n: (n <= m + 100 * h) & (b == 1)).lowered(*sizes_of(at)),
        tw.full(),
        ~tw.full(),
    ):
        bits = materialise(mask, at, torch.device("cpu"))
        assert bits.kinds.shape[2:] == (2, 3)
        assert torch.equal(bits.dense(*sizes_of(at)), mask.dense(*sizes_of(at)))
        kinds = bits.kinds.expand(2, 2, -1, -1)
        for x in range(2):
            for y in range(3):
                tile = bits.dense(*sizes_of(at))[:, :, 128 * x : 128 * x + 128]
                tile = tile[..., 128 * y : 128 * y + 128].flatten(2)
                # Kind 1 and 0 prove something; only mixed tiles are read.
                assert torch.equal(kinds[:, :, x, y] == 1, tile.all(-1))
                assert torch.equal(kinds[:, :, x, y] == 0, ~tile.any(-1))


def sizes_of(at: Positions) -> Sizes:
    return Sizes(at.B, at.H, at.M, at.N)


@pytest.mark.parametrize("keys", [[3, 0, 7, 40], [5], [9, 10, 12], []])
def test_bits_of_keys_that_are_not_a_run(keys: list[int]) -> None:
    seen = torch.rand(1, 1, 6, 50) < 0.5
    mask = tw.from_function(lambda b, h, m, n: seen[b, h, m, n]).lowered(1, 1, 6, 50)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    rows, columns = torch.arange(6).reshape(1, 1, 6, 1), torch.tensor(keys).reshape(1, 1, 1, -1)
    got = mask.visible(Index(zero, zero, rows, columns.long(), 0))
    assert torch.equal(got.expand(1, 1, 6, len(keys)), seen[..., keys])


@pytest.mark.parametrize(("M", "N"), [(0, 5), (5, 0)])
def test_nothing_as_bits(M: int, N: int) -> None:
    bits = materialise(tw.chunked(2), Positions(B=1, H=1, M=M, N=N), torch.device("cpu"))
    assert bits.kinds.numel() == 0
    assert bits.words.shape[0] == 0
