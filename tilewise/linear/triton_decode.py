"""Decoding by Triton: see `stages/steps.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.launch import Config, launch
from ..kernels.structs import code
from .config import power_of_two
from .inputs import Inputs
from .stages.steps import _decode_kernel
from .triton_call import LinearCall


def linear_decode(pool: Tensor, inputs: Inputs, slots: Tensor, write_slots: Tensor) -> Tensor:
    """`[B, M, H, E]`; the pool is updated."""
    call = LinearCall(inputs)
    B, M, H, E = inputs.v.shape
    out = torch.empty(B, M, H, E, dtype=call.dtype, device=call.device)
    full_d = power_of_two(call.D)
    # A slice of 64 KiB keeps enough loads in flight; more columns would take more registers.
    block_e = min(power_of_two(E), max(16, 4096 // full_d))
    n_writes = write_slots.shape[1] if write_slots.dim() == 2 else 1
    sizes = (code(pool.shape[0]), code(M), code(n_writes))
    grid = (B * H * -(-E // block_e), 1, 1)
    arguments = (call.call, pool, out, slots.contiguous(), write_slots.contiguous(), *sizes)
    launch(
        _decode_kernel, grid, Config(0, block_e, 1, 1),
        (*arguments, full_d, block_e, call.build), call.device,
    )  # fmt: skip
    return out
