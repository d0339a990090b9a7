"""Which masks are a band, and that the band says what the mask says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core.band import Band
from tilewise.core.mask import UNBOUNDED, Mask

B, M, N = 2, 5, 9
OFFSETS = torch.tensor([1, 6])
# Beyond what any storage reaches, as unchecked lengths may be.
FAR = torch.tensor([-(1 << 50), 1 << 50])


def per_batch(values: Any) -> Tensor:
    """`[B, 1, 1, 1]` of an int, one entry or `[B]`."""
    return torch.as_tensor(values, dtype=torch.int64).reshape(-1, 1, 1, 1)


def dense(band: Band, op_offset: int) -> Tensor:
    """bool `[B, 1, M, N]`, as the docstring of `Band` has it."""
    offset = per_batch(op_offset if band.offset is None else band.offset)
    p = torch.arange(M).reshape(1, 1, M, 1) + offset
    j = torch.arange(N).reshape(1, 1, 1, N)
    # Unbounded is not a number: a huge offset does not reach it.
    left = -(1 << 62) if band.left == UNBOUNDED else p - band.left
    right = 1 << 62 if band.right == UNBOUNDED else p + band.right
    seen = (left <= j) & (j <= right)
    if band.documents is not None:
        documents = tw.documents(band.documents)
        seen = seen & documents.dense(B, 1, M, N, offset=op_offset)
    if band.lows is not None and band.highs is not None:
        seen = seen & (j >= per_batch(band.lows)) & (j < per_batch(band.highs))
    return seen.expand(B, 1, M, N)


WINDOWS = {
    "full": tw.full(),
    "causal": tw.causal(),
    "window": tw.window(2, 1),
    "window, left alone": tw.window(0, None),
    "window without bounds": tw.window(None, None),
    "offset 0": tw.causal(offset=0),
    "negative offset": tw.window(1, 3, offset=-2),
    "huge offset": tw.causal(offset=1 << 60),
    "offset a row": tw.window(3, 0, offset=OFFSETS),
    "offset of one entry": tw.causal(offset=torch.tensor([2], dtype=torch.int32)),
    "huge offset, unbounded on the left": tw.causal(offset=FAR),
    "huge offset a row": tw.window(4, 4, offset=FAR),
}
BOUNDS = {
    "padding": tw.key_padding([4, 9]),
    "padding, one for all": tw.key_padding(3),
    "left padding": tw.left_padding([0, 7]),
    "prefix": tw.prefix(torch.tensor([2, 0], dtype=torch.int32)),
    "nothing": tw.key_padding(0),
}
DOCUMENTS = {
    "documents": tw.documents([0, 4, 4, 9]),
    "documents a row": tw.documents([[0, 2, 9], [0, 6, 7]]),
}
JOINED = ("full", "causal", "negative offset", "offset a row", "padding")
BANDS: dict[str, Mask] = {
    **WINDOWS,
    **BOUNDS,
    **DOCUMENTS,
    **{f"{x} & {d}": (WINDOWS | BOUNDS)[x] & DOCUMENTS[d] for x in JOINED for d in DOCUMENTS},
    **{f"{w} & {b}": WINDOWS[w] & BOUNDS[b] for w in WINDOWS for b in BOUNDS},
    "two paddings": tw.key_padding([4, 9]) & tw.left_padding(2),
    "three": tw.causal() & tw.key_padding([8, 3]) & tw.left_padding([1, 0]),
    "two windows": tw.causal() & tw.window(3, 2),
    "two windows of one offset": tw.causal(offset=1) & tw.window(2, None, offset=1),
    "two windows of one tensor": tw.causal(offset=OFFSETS) & tw.window(2, None, offset=OFFSETS),
    # What has no bounds has no offset either.
    "a shifted full": tw.window(None, None, offset=5) & tw.causal(),
    "shifted full on the right": tw.causal(offset=2) & tw.window(None, None, offset=OFFSETS),
    "full on both sides": (tw.full() & tw.causal()) & tw.full(),
}


@pytest.mark.parametrize("mask", BANDS.values(), ids=BANDS.keys())
@pytest.mark.parametrize("op_offset", [N - M, 0, -3])
def test_a_band_is_its_mask(mask: Mask, op_offset: int) -> None:
    expected = mask.dense(B, 1, M, N, offset=op_offset)
    for known in (None, op_offset):
        band = Band.of(mask, known)
        assert band is not None
        assert torch.equal(dense(band, op_offset), expected)


NOT_BANDS: dict[str, Mask] = {
    "documents twice": tw.documents([0, 4, 9]) & tw.documents([0, 2, 9]),
    "chunks": tw.chunked(3),
    "intervals": tw.intervals(torch.zeros(M, 1, dtype=torch.int64), torch.ones(M, 1).long()),
    "blocks": tw.blocks(torch.ones(1, 1, dtype=torch.bool)),
    "predicate": tw.from_function(lambda b, h, m, n: n <= m),
    "evaluated predicate": tw.from_function(lambda b, h, m, n: n <= m).lowered(B, 1, M, N),
    "complement": ~tw.causal(),
    "union": tw.causal() | tw.prefix(2),
    "chunks with a window": tw.chunked(3) & tw.causal(),
    "window with chunks": tw.key_padding([3, 4]) & tw.chunked(3),
    "two int offsets": tw.causal(offset=1) & tw.window(2, None, offset=2),
    "an int and a tensor": tw.causal(offset=1) & tw.window(2, None, offset=OFFSETS),
    # Equal today; their contents are not read.
    "two tensors": tw.causal(offset=OFFSETS) & tw.window(2, None, offset=OFFSETS.clone()),
}


@pytest.mark.parametrize("mask", NOT_BANDS.values(), ids=NOT_BANDS.keys())
def test_what_is_no_band(mask: Mask) -> None:
    assert Band.of(mask) is None
    assert Band.of(mask, N - M) is None


def test_a_window_of_its_own_offset_joins_one_whose_offset_is_known() -> None:
    mask = tw.causal() & tw.window(2, None, offset=4)
    assert Band.of(mask) is None
    assert Band.of(mask, 3) is None
    assert Band.of(mask, 4) == Band(2, 0, 4)


def test_only_bounds_and_offsets_on_a_device_are_tensors() -> None:
    for mask in (tw.full(), tw.causal(), tw.window(2, 0, offset=3)):
        band = Band.of(mask)
        assert band is not None and not band.has_tensors
    for mask in (tw.key_padding(3), tw.causal(offset=OFFSETS), tw.causal() & tw.documents([0, 3])):
        band = Band.of(mask)
        assert band is not None and band.has_tensors


def test_bounds_of_a_band_are_what_the_constructor_was_given() -> None:
    assert Band.of(tw.full()) == Band(UNBOUNDED, UNBOUNDED)
    assert Band.of(tw.window(3, None)) == Band(3, UNBOUNDED)
    assert Band.of(tw.window(1 << 50, 2)) == Band(UNBOUNDED, 2)
