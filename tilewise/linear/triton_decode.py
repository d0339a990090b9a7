"""Decoding by Triton: see `stages/steps.py`."""

from __future__ import annotations

from torch import Tensor

from ..kernels.launch import Config
from ..kernels.structs import code
from .config import power_of_two
from .forms import form_of
from .inputs import Inputs
from .plan import Plan, keep_plan
from .stages.steps import _decode_kernel
from .triton_call import LinearCall, fit_inputs, forms_of, given_by


def linear_decode(pool: Tensor, inputs: Inputs, slots: Tensor, write_slots: Tensor) -> Tensor:
    """`[B, M, H, E]`; the pool is updated."""
    inputs = fit_inputs(inputs)
    tensors = pool, slots.contiguous(), write_slots.contiguous()
    key = ("decode", *forms_of(inputs), *map(form_of, tensors))
    plan = keep_plan(key, lambda: _plan(tensors, inputs))
    out: Tensor = plan.run([*given_by(inputs), *tensors])[0]
    return out


def _plan(tensors: tuple[Tensor, Tensor, Tensor], inputs: Inputs) -> Plan:
    call = LinearCall(inputs)
    pool, slots, write_slots = map(call.plan.given, tensors)
    B, M, H, E = inputs.v.shape
    out = call.plan.made((B, M, H, E), call.dtype)
    full_d = power_of_two(call.D)
    # A slice of 64 KiB keeps enough loads in flight; more columns would take more registers.
    block_e = min(power_of_two(E), max(16, 4096 // full_d))
    n_writes = tensors[2].shape[1] if tensors[2].dim() == 2 else 1
    sizes = (code(tensors[0].shape[0]), code(M), code(n_writes))
    call.plan.add(
        _decode_kernel, B * H * -(-E // block_e), Config(0, block_e, 1, 1),
        (call.call, pool, out, slots, write_slots, *sizes, full_d, block_e, call.build),
    )  # fmt: skip
    return call.plan.finish(out)
