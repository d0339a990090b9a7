"""Bad arguments of masks: one sentence that names the mask, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.mask import Mask

from .brute import assert_one_sentence


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


# What the sentence starts with, and the bad arguments by name.
BUILT: dict[str, dict[str, Callable[[], Any]]] = {
    "window: left": {
        "negative": lambda: tw.window(-1, 0),
        "float": lambda: tw.window(1.5, 0),
        "text": lambda: tw.window("1", 0),
        "several": lambda: tw.window(ints([1, 2]), 0),
    },
    "window: right": {"negative": lambda: tw.window(0, -2)},
    "window": {
        "float offset": lambda: tw.window(1, 0, offset=0.5),
        "list offset": lambda: tw.causal([1, 2]),
        "float tensor": lambda: tw.causal(torch.tensor([0.5])),
        "offset [B, 2]": lambda: tw.causal(ints([[0, 1], [2, 3]])),
    },
    "chunked:": {
        "zero": lambda: tw.chunked(0),
        "negative": lambda: tw.chunked(-3),
        "float": lambda: tw.chunked(2.5),
        "nothing": lambda: tw.chunked(None),
        "several": lambda: tw.chunked(ints([2, 3])),
        "float tensor": lambda: tw.chunked(torch.tensor(2.5)),
    },
    "key_padding:": {
        "float tensor": lambda: tw.key_padding(torch.tensor([1.0, 2.0])),
        "float list": lambda: tw.key_padding([1.5]),
        "bool": lambda: tw.key_padding(torch.tensor([True])),
        "two dims": lambda: tw.key_padding(ints([[1, 2]])),
        "nothing": lambda: tw.key_padding(None),
        "ragged": lambda: tw.key_padding([[1], [1, 2]]),
    },
    "left_padding:": {
        "float tensor": lambda: tw.left_padding(torch.tensor([0.0])),
        "two dims": lambda: tw.left_padding(ints([[1]])),
    },
    "prefix:": {"float": lambda: tw.prefix(0.5)},
    "documents:": {
        "float list": lambda: tw.documents([0.0, 2.0]),
        "no dims": lambda: tw.documents(ints(5)),
        "three dims": lambda: tw.documents(ints([[[0, 2]]])),
        "no entry": lambda: tw.documents(torch.zeros(0, dtype=torch.int32)),
    },
    "intervals:": {
        "two shapes": lambda: tw.intervals(ints([[0]]), ints([[1, 2]])),
        "one dim": lambda: tw.intervals(ints([0]), ints([1])),
        "five dims": lambda: tw.intervals(ints([[[[[0]]]]]), ints([[[[[1]]]]])),
    },
    "intervals(starts=):": {
        "float": lambda: tw.intervals(torch.zeros(2, 1), ints([[1], [2]])),
        "list": lambda: tw.intervals([[1], [2]], ints([[1], [2]])),
    },
    "intervals(stops=):": {
        "float": lambda: tw.intervals(ints([[1], [2]]), torch.zeros(2, 1)),
    },
    "tree:": {
        "list": lambda: tw.tree([1, 3]),
        "float": lambda: tw.tree(torch.tensor([1.0])),
    },
    "blocks:": {
        "list": lambda: tw.blocks([[True]]),
        "integers": lambda: tw.blocks(ints([[1, 0]])),
        "one dim": lambda: tw.blocks(torch.tensor([True])),
        "five dims": lambda: tw.blocks(torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)),
        "half a key": lambda: tw.blocks(torch.tensor([[True]]), 4, 0.5),
        "tile of 0": lambda: tw.blocks(torch.tensor([[True]]), 0, 4),
        "negative tile": lambda: tw.blocks(torch.tensor([[True]]), 4, -1),
    },
    "from_function:": {
        "no function": lambda: tw.from_function(torch.tensor([[True]])),
        "integers, dense": lambda: tw.from_function(lambda b, h, m, n: m - n).dense(1, 1, 2, 2),
        "floats, lowered": lambda: tw.from_function(lambda b, h, m, n: m.float()).lowered(
            1, 1, 2, 2
        ),
    },
}


@pytest.mark.parametrize(
    ("start", "build"),
    [
        pytest.param(start, build, id=f"{start} {name}")
        for start, builds in BUILT.items()
        for name, build in builds.items()
    ],
)
def test_bad_argument_is_one_sentence(start: str, build: Callable[[], Any]) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert_one_sentence(caught, start)


@pytest.mark.parametrize("other", [None, True, torch.ones(2, 2, dtype=torch.bool), "causal"])
def test_operand_must_be_a_mask(other: Any) -> None:
    for sign, join in (("&", lambda m: m & other), ("|", lambda m: m | other)):
        with pytest.raises(TypeError) as caught:
            join(tw.causal())
        assert_one_sentence(caught, f"mask {sign}:")


CONTENTS = [
    ("documents:", tw.documents([1, 4])),
    ("documents:", tw.documents([0, 4, 3])),
    ("documents:", tw.documents([[0, 4], [0, 2], [0, 3]])),
    ("documents:", tw.documents([[0, 4], [2, 4]])),
    ("mask:", tw.key_padding([3, -1])),
    ("mask:", tw.left_padding([-2, 0])),
    ("key_padding, left_padding or prefix:", tw.key_padding([1, 2, 3])),
    ("window(offset=):", tw.causal(offset=ints([1, 2, 3]))),
    ("mask intervals:", tw.intervals(ints([[[0]]] * 3), ints([[[1]]] * 3))),
    ("mask blocks:", tw.blocks(torch.ones(2, 5, 1, 1, dtype=torch.bool))),
]


@pytest.mark.parametrize(("start", "mask"), CONTENTS)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda mask: mask,
        lambda mask: ~mask,
        lambda mask: tw.causal() & mask,
        lambda mask: mask | tw.causal(),
    ],
)
def test_contents_that_do_not_fit_the_call(
    start: str, mask: Mask, wrap: Callable[[Mask], Mask]
) -> None:
    """`check_contents` for a call of two batch rows and four heads, wherever the leaf stands."""
    with pytest.raises(ValueError) as caught:
        wrap(mask).check_contents(2, 4)
    assert_one_sentence(caught, start)


@pytest.mark.parametrize(
    "mask",
    [
        tw.full(),
        tw.documents([0, 0, 4]),
        tw.documents([[0, 4], [0, 2]]),
        tw.key_padding([3, 0]),
        tw.left_padding(2),
        tw.causal(offset=ints([-1, 2])),
        tw.intervals(ints([[[0]]] * 2), ints([[[1]]] * 2)),
        tw.blocks(torch.ones(1, 4, 1, 1, dtype=torch.bool)),
    ],
)
def test_contents_that_fit(mask: Mask) -> None:
    (~mask & mask).check_contents(2, 4)
