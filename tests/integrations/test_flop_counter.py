"""PyTorch's flop counter sees attention as it sees its own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from tilewise.dense.api import attention_partial_backward
from tilewise.integrations import flop_counter


@pytest.fixture(autouse=True)
def registered() -> None:
    flop_counter.register()
    flop_counter.register()


def counted(call: Any, *leaves: Tensor) -> tuple[int, int]:
    """Forward, and both directions."""
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        call()
    with FlopCounterMode(display=False) as both:
        torch.autograd.grad(call().sum(), leaves)
    return forward.get_total_flops(), both.get_total_flops()


def leaves(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("H", "G"), [(4, 4), (6, 2)])
def test_as_pytorch_counts(H: int, G: int, dtype: torch.dtype) -> None:
    x = leaves((2, 12, H, 16), (2, 20, G, 16), (2, 20, G, 16), dtype=dtype)
    heads_first = [t.transpose(1, 2).repeat_interleave(H // t.shape[2], 1) for t in x]

    def plain() -> Tensor:
        scores = heads_first[0] @ heads_first[1].transpose(-1, -2)
        return scores.softmax(-1) @ heads_first[2]

    own = counted(lambda: tw.attention(*x, mask=tw.causal()), *x)
    # Plain attention keeps its scores: one product less.
    forward, both = counted(plain, *x)
    assert own == (forward, both + forward // 2)


def test_packed_calls_count_their_sequences() -> None:
    q, k, v = leaves((10, 4, 16), (14, 2, 16), (14, 2, 8))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 10], [0, 4, 14]))
    pairs = 4 * (3 * 4 + 7 * 10)
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    forward, both = counted(lambda: tw.attention_varlen(q, k, v, **call), q, k, v)
    assert forward == 2 * pairs * (16 + 8)
    assert both == forward + 2 * pairs * (3 * 16 + 2 * 8)
    own = counted(lambda: tw.attention_varlen(q, q, q, cu_seqlens_q=cu_q, cu_seqlens_k=cu_q), q)
    assert own[0] == 2 * 4 * (9 + 49) * 32


def test_lengths_that_nobody_knows_count_as_one_sequence() -> None:
    q = torch.empty(10, 4, 16, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as seen:
        tw.attention_varlen(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert seen.get_total_flops() == 2 * 4 * 10 * 10 * 32


def test_pieces_of_a_ring_count() -> None:
    x, numbers = torch.randn(1, 8, 2, 16), torch.zeros(1, 2, 8)
    buffers = {f"d{n}": torch.zeros(1, 8, 2, 16) for n in "qkv"}
    with FlopCounterMode(display=False) as seen:
        attention_partial_backward(x, x, x, x, numbers, numbers, **buffers)
    assert seen.get_total_flops() == 2 * 2 * 8 * 8 * 5 * 16
