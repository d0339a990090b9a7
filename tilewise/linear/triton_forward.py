"""Forward of the chunk form by Triton: prepare every chunk by itself, then pass over the states."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.structs import Operand, absent
from .inputs import Inputs
from .plan import Plan, Slot, keep_plan
from .stages.prepare import _chunk_prepare_kernel
from .stages.prepare_ladder import _chunk_prepare_ladder_kernel
from .stages.prepare_vector import _chunk_prepare_vector_kernel
from .stages.solve import _chunk_invert_kernel
from .stages.states import _states_kernel
from .stages.structs import Prepared, Segments
from .triton_call import LinearCall, fit_inputs, forms_of, given_by


def linear_fwd(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`(out, final_state)`."""
    inputs = fit_inputs(inputs)
    out, final = _plan_for(inputs).run(given_by(inputs))
    return (out if inputs.v.shape[-1] > 1 else out[..., :1]), final


def known_forward(inputs: Inputs) -> Callable[[Inputs], tuple[Tensor, Tensor]]:
    """`linear_fwd` for inputs of the same forms, which it need not look at."""
    fitted = fit_inputs(inputs)
    if inputs.v.shape[-1] == 1 or not all(map(is_, fitted.tensors, inputs.tensors)):
        return linear_fwd
    plan = _plan_for(inputs)

    def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
        out, final = plan.run(given_by(inputs))
        return out, final

    return run


def _plan_for(inputs: Inputs) -> Plan:
    return keep_plan(("forward", *forms_of(inputs)), lambda: _plan(inputs))


def _plan(inputs: Inputs) -> Plan:
    call = LinearCall(inputs)
    out, final = call.new_rows(inputs.v.shape, call.dtype), call.new_state()
    prepared = add_preparing(call)
    segments = call.add_segments(prepared, call.operand(call.v))
    call.add_states(
        _states_kernel, call.call, prepared, segments, call.initial, final, call.operand(out),
        None, None, None, None,
    )  # fmt: skip
    return call.plan.finish(out, final)


def add_preparing(call: LinearCall) -> Prepared:
    prepared = call.prepared()
    if call.gate == 2:
        strong = None
        if call.config.weak_prepare is not None:
            strong, config = call.buffer(dtype=torch.int32), call.config.weak_prepare
            call.add_chunks(
                _chunk_prepare_vector_kernel, config, call.call, prepared, strong, config.block_n
            )
        call.add_chunks(
            _chunk_prepare_ladder_kernel, call.config.prepare, call.call, prepared, strong
        )
    else:
        call.add_chunks(_chunk_prepare_kernel, call.config.prepare, call.call, prepared)
    if prepared.lower is not None:
        call.add_chunks(_chunk_invert_kernel, call.config.pairs, prepared)
    return prepared


class Remade(NamedTuple):
    """What the backward makes again: see `stages/states.py`. errors: None without a delta rule.
    steps_low: what is rounded off its steps, where a vector gate's gradient needs it."""

    prepared: Prepared
    segments: Segments
    states: Slot
    errors: Slot | None
    steps: Slot
    steps_low: Slot | None


def add_remaking(call: LinearCall) -> Remade:
    prepared = add_preparing(call)
    # The gradient of a chunk's decay is all of the state times its gradient: rounded to 16 bits it
    # would be over the error budget.
    dtype = torch.float32 if call.gate else None
    states, steps = call.buffer(call.D, call.E, dtype=dtype), call.buffer(call.chunk, call.E)
    errors = call.buffer(call.chunk, call.E) if call.has_delta else None
    low = call.buffer(call.chunk, call.E) if call.has_delta and call.has_low else None
    segments = call.add_segments(prepared, call.operand(call.v))
    call.add_states(
        _states_kernel, call.call, prepared, segments, call.initial, None, absent(Operand), states,
        errors, steps, low,
    )  # fmt: skip
    return Remade(prepared, segments, states, errors, steps, low)
