"""Padding taken out and put back, against loops."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 1, 1, 1]],
    "none": [[0] * 5] * 3,
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("name", MASKS)
def test_round_trip_with_gradients(name: str, dtype: torch.dtype) -> None:
    mask = torch.tensor(MASKS[name]).to(dtype)
    x = torch.randn(3, 5, 2, 4, requires_grad=True)
    tokens, indices, cu, longest, used = unpad_input(x, mask)
    rows = [[x[b, s] for s in range(5) if mask[b, s]] for b in range(3)]
    expected = [token for row in rows for token in row]
    assert torch.equal(tokens, torch.stack(expected) if expected else x.new_zeros(0, 2, 4))
    lengths = [len(row) for row in rows]
    assert cu.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert cu.dtype == used.dtype == torch.int32
    assert (longest, used.tolist()) == (max(lengths), lengths)
    back = pad_input(tokens, indices, 3, 5)
    seen = (mask != 0)[..., None, None]
    assert torch.equal(back, torch.where(seen, x, 0.0))
    (gradient,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(gradient, seen.expand_as(x).float())


def test_tokens_that_keep_their_place() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 1]])
    x = torch.randn(2, 4, 3)
    tokens, indices, cu, longest, used = unpad_input(x, mask, unused)
    assert torch.equal(tokens, torch.cat([x[0, :3], x[1]]))
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert (cu.tolist(), longest, used.tolist()) == ([0, 3, 7], 4, [2, 1])


def test_rows_of_several_sequences() -> None:
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 4)
    tokens, indices, cu, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert (cu.tolist(), longest) == ([0, 2, 5, 8, 10, 16], 6)
    assert torch.equal(pad_input(tokens, indices, 3, 6)[0, 5], torch.zeros(4))


def test_index_functions_are_each_others_inverse() -> None:
    x = torch.randn(7, 3, requires_grad=True)
    indices = torch.tensor([5, 0, 2])
    put = index_put_first_axis(index_first_axis(x, indices), indices, 7)
    assert torch.equal(put[indices], x[indices]) and int((put == 0).all(-1).sum()) == 4
    (gradient,) = torch.autograd.grad(put.sum(), x)
    expected = torch.zeros(7, 3)
    expected[indices] = 1.0
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": None}, "hidden_states must be a tensor, got NoneType"),
        ({"indices": [0, 1]}, "indices must be a tensor, got list"),
        (
            {"indices": torch.ones(2)},
            r"indices must be int64 \[T\] = \[2\], got torch.float32 \[2\]",
        ),
        (
            {"indices": torch.arange(3)},
            r"indices must be int64 \[T\] = \[2\], got torch.int64 \[3\]",
        ),
        ({"batch": -1}, "batch must be an int >= 0, got -1"),
        ({"seqlen": 2.0}, "seqlen must be an int >= 0, got 2.0"),
    ],
)
def test_what_cannot_be_padded_raises(change: dict[str, Any], message: str) -> None:
    call: dict[str, Any] = {"hidden_states": torch.zeros(2, 3), "indices": torch.arange(2)}
    with pytest.raises(ValueError, match=message):
        pad_input(**{**call, "batch": 2, "seqlen": 4, **change})


@pytest.mark.parametrize("function", [unpad_input, unpad_input_for_concatenated_sequences])
def test_mask_that_is_no_tensor_raises(function: Any) -> None:
    with pytest.raises(ValueError, match="must be a tensor, got list"):
        function(torch.zeros(2, 4, 3), [[1] * 4] * 2)


@pytest.mark.parametrize("function", [unpad_input, unpad_input_for_concatenated_sequences])
def test_mask_of_another_shape_raises(function: object) -> None:
    x: Tensor = torch.zeros(2, 4, 3)
    with pytest.raises(ValueError, match=r"must be \[B, S\] = \[2, 4\], got \[2, 5\]"):
        function(x, torch.ones(2, 5))
