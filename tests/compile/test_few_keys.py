"""The backward of short sequences compiles for Hopper, in one launch, and spills little."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.compile.offline import TARGETS, compile_call

_MOST_SPILLS = {64: 0, 128: 136}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("D", _MOST_SPILLS)
def test_all_gradients_come_from_one_launch(D, backend, record_property):
    def call():
        x = [torch.zeros(2, 128, 4, D, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
        out = tw.attention(*x, mask=tw.causal(), backend=backend)
        torch.autograd.grad(out, x, torch.zeros_like(out))

    (kernel,) = compile_call(call, "sm_90", "_bwd_")
    assert kernel.name == "attention_bwd_few_keys" and kernel.mma == "HGMMA"
    assert kernel.shared_bytes <= TARGETS["sm_90"].shared_kib * 1024
    assert kernel.spills <= _MOST_SPILLS[D]
    row = (
        f"few keys D {D}", "sm_90", kernel.name.removeprefix("attention_"), kernel.registers,
        kernel.spills, round(kernel.shared_bytes / 1024, 1), kernel.mma,
    )  # fmt: skip
    record_property("compiled", [row])
