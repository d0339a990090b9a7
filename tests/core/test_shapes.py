"""Shape, device and dtype checks: what they bind, what they refuse, in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core.shapes import (
    check_broadcastable,
    check_same_device,
    check_same_dtype,
    check_shapes,
)

from .brute import assert_one_sentence

SPECS = {"q": "B M H D", "k": "B N G D", "v": "B N G E", "slopes": "B|1 H", "rng": "2"}


def tensors(**shapes: tuple[int, ...]) -> dict[str, Tensor | None]:
    good = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6)}
    return {name: torch.empty(shape) for name, shape in {**good, **shapes}.items()}


def test_letters_are_bound_in_order() -> None:
    dims = check_shapes("attention", tensors(slopes=(2, 4), rng=(2,)), **SPECS)
    assert dims == {"B": 2, "M": 5, "H": 4, "D": 8, "N": 7, "G": 2, "E": 6}


def test_absent_tensors_are_passed_over() -> None:
    got = check_shapes("attention", {**tensors(), "slopes": None}, **SPECS)
    assert got == check_shapes("attention", tensors(), **SPECS)
    assert check_shapes("attention", tensors(extra=(1, 2, 3)), **SPECS) == got


def test_sizes_of_zero_are_sizes() -> None:
    assert check_shapes("op", {"x": torch.empty(0, 3)}, x="B M") == {"B": 0, "M": 3}
    with pytest.raises(ValueError):
        check_shapes("op", {"x": torch.empty(0, 3), "y": torch.empty(2)}, x="B M", y="B")


def test_an_alternative_takes_one_and_binds_nothing() -> None:
    assert "B" not in check_shapes("op", {"x": torch.empty(1, 4)}, x="B|1 H")
    assert check_shapes("op", {"x": torch.empty(3, 4)}, x="B|1 H")["B"] == 3
    check_shapes("op", tensors(slopes=(1, 4)), **SPECS)
    with pytest.raises(ValueError) as caught:
        check_shapes("op", tensors(slopes=(3, 4)), **SPECS)
    assert_one_sentence(caught, "op: slopes")


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("q", (2, 5, 4), "3 dimensions [2, 5, 4]"),
        ("q", (), "0 dimensions []"),
        ("k", (3, 7, 2, 8), "B = 2, got [3, 7, 2, 8]"),
        ("k", (2, 7, 2, 9), "D = 8, got [2, 7, 2, 9]"),
        ("v", (2, 6, 2, 6), "N = 7, got [2, 6, 2, 6]"),
        ("v", (2, 7, 1, 6), "G = 2, got [2, 7, 1, 6]"),
        ("slopes", (2, 3), "H = 4, got [2, 3]"),
        ("rng", (3,), "must be [2], got [3]"),
    ],
)
def test_a_tensor_that_does_not_fit(name: str, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_shapes("attention", tensors(**{name: shape}), **SPECS)
    assert_one_sentence(caught, f"attention: {name} must be [{', '.join(SPECS[name].split())}]")
    assert said in str(caught.value)


def test_what_is_no_tensor() -> None:
    given: dict[str, Any] = {**tensors(), "k": [1.0]}
    with pytest.raises(ValueError) as caught:
        check_shapes("attention", given, **SPECS)
    assert_one_sentence(caught, "attention: k must be a tensor, got list")


def test_one_device() -> None:
    x, y = torch.empty(1), torch.empty(1, device="meta")
    assert check_same_device("op", {"x": x, "none": None, "z": x}) == torch.device("cpu")
    with pytest.raises(ValueError) as caught:
        check_same_device("op", {"x": x, "none": None, "y": y})
    assert_one_sentence(caught, "op: all tensors must be on one device")
    assert "x on cpu" in str(caught.value) and "y on meta" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_one_dtype(dtype: torch.dtype) -> None:
    x = torch.empty(1, dtype=dtype)
    assert check_same_dtype("op", {"q": x, "k": x}) == dtype


def test_mixed_dtypes() -> None:
    q, k = torch.empty(1), torch.empty(1, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        check_same_dtype("op", {"q": q, "k": k})
    assert_one_sentence(caught, "op:")
    assert "q torch.float32" in str(caught.value) and "k torch.bfloat16" in str(caught.value)


def test_dtypes_that_no_backend_computes() -> None:
    with pytest.raises(NotImplementedError) as caught:
        check_same_dtype("op", {"q": torch.empty(1, dtype=torch.float8_e4m3fn)})
    assert_one_sentence(caught, "op: torch.float8_e4m3fn")
    for dtype in (torch.int32, torch.bool, torch.complex64):
        with pytest.raises(ValueError) as refused:
            check_same_dtype("op", {"q": torch.empty(1, dtype=dtype)})
        assert_one_sentence(refused, "op: q must be a floating tensor")


SHAPE = {"B": 2, "H": 4, "M": 5, "N": 7}


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((), (1, 1, 1, 1)),
        ((7,), (1, 1, 1, 7)),
        ((5, 1), (1, 1, 5, 1)),
        ((4, 1, 7), (1, 4, 1, 7)),
        ((2, 1, 5, 7), (2, 1, 5, 7)),
        ((2, 4, 5, 7), (2, 4, 5, 7)),
    ],
)
def test_what_broadcasts(shape: tuple[int, ...], seen: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    got = check_broadcastable("op", "bias", tensor, SHAPE)
    assert got.shape == seen
    # A view, so that gradients find their way.
    assert got.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("shape", [(5,), (7, 5), (2, 1, 1), (3, 4, 5, 7), (1, 1, 1, 1, 1), (0,)])
def test_what_does_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        check_broadcastable("op", "bias", torch.empty(shape), SHAPE)
    assert_one_sentence(caught, "op: bias must broadcast to [B, H, M, N] = [2, 4, 5, 7]")
    assert str(list(shape)) in str(caught.value)


def test_what_is_sparse_is_refused_by_name() -> None:
    cache = tw.KVCache.allocate(1, 4, 1, 8)
    with pytest.raises(ValueError, match=r"q must be a strided tensor, got torch.sparse_coo"):
        tw.attention_with_cache(torch.zeros(1, 1, 1, 8).to_sparse(), cache)
    part = tw.Partial(torch.zeros(1, 2, 1, 8).to_sparse(), torch.zeros(1, 1, 2))
    with pytest.raises(ValueError, match=r"partials\[0\].out must be a strided tensor"):
        tw.merge([part, part])
