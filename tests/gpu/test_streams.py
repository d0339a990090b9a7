"""Streams and devices: a call runs where its inputs are, after what its stream did before."""

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import DEVICE, are_equal, attention, normal, qkv, run

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def attend(*qkv: Tensor) -> Tensor:
    return attention(*qkv, mask=tw.causal() & tw.window(100, None))


def test_a_call_waits_for_its_own_stream() -> None:
    """Each stream is kept busy and then writes the inputs: a call on another would read zeros."""
    contents = [qkv(2, 200, 300, seed=seed) for seed in (0, 10, 20, 30)]
    expected = [run(attend, leaves) for leaves in contents]
    streams = [torch.cuda.Stream() for _ in contents]
    inputs = [[torch.zeros_like(x).requires_grad_() for x in leaves] for leaves in contents]
    torch.cuda.synchronize()
    got = []
    for stream, leaves, values in zip(streams, inputs, contents, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            with torch.no_grad():
                for x, value in zip(leaves, values, strict=True):
                    x.copy_(value)
            got.append(run(attend, leaves))
    torch.cuda.synchronize()
    assert all(are_equal(x, y) for x, y in zip(got, expected, strict=True))


@two_gpus
def test_tensors_on_the_second_device() -> None:
    """The current device stays the first, before and after."""
    here = qkv(2, 200, 300)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    expected = run(attend, here)
    got = run(attend, there)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda", 1) for x in got)
    assert are_equal([x.to(DEVICE) for x in got], expected)


@two_gpus
def test_packed_tensors_and_masks_on_the_second_device() -> None:
    lengths = torch.tensor([0, 50, 200], dtype=torch.int32)
    results = []
    for device in ("cuda:0", "cuda:1"):
        packed = [normal(200, 4, 64, seed=seed).to(device).requires_grad_() for seed in range(3)]
        on_device = lengths.to(device)

        def call(*qkv: Tensor, on_device: Tensor = on_device) -> Tensor:
            return tw.attention_varlen(
                *qkv, cu_seqlens_q=on_device, mask=tw.causal() | tw.prefix(on_device[1:]),
                deterministic=True,
            )  # fmt: skip

        results.append([x.to(DEVICE) for x in run(call, packed)])
    assert are_equal(*results)
