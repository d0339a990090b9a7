"""Forward of the chunk form by Triton: prepare every chunk by itself, then pass over the states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.structs import Operand, absent
from .inputs import Inputs
from .stages.prepare import _chunk_prepare_kernel
from .stages.solve import _chunk_invert_kernel
from .stages.states import _states_kernel
from .stages.structs import Prepared
from .triton_call import LinearCall


def linear_fwd(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`(out, final_state)`."""
    call = LinearCall(inputs)
    out, final = call.rows_like(inputs.v), call.new_state()
    prepared = _add_preparing(call)
    call.add_states(
        _states_kernel, call.call, prepared, call.initial, final, call.operand(out), None, None,
        None,
    )  # fmt: skip
    call.run()
    return out, final


def _add_preparing(call: LinearCall) -> Prepared:
    prepared = call.prepared()
    call.add_chunks(_chunk_prepare_kernel, call.config.prepare, call.call, prepared)
    if prepared.lower is not None:
        call.add_chunks(_chunk_invert_kernel, call.config.pairs, prepared)
    return prepared


def prepared_pairs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Scores and, of a vector gate, the delta rule's A by chunk and head, for tests."""
    call = LinearCall(inputs)
    prepared = _add_preparing(call)
    call.run()
    return prepared.scores, prepared.lower


class Remade(NamedTuple):
    """What the backward makes again: see `stages/states.py`. errors: None without a delta rule."""

    prepared: Prepared
    states: Tensor
    errors: Tensor | None
    steps: Tensor


def add_remaking(call: LinearCall) -> Remade:
    prepared = _add_preparing(call)
    # The gradient of a chunk's decay is all of the state times its gradient: rounded to 16 bits it
    # would be over the error budget.
    dtype = torch.float32 if call.gate else None
    states, steps = call.buffer(call.D, call.E, dtype=dtype), call.buffer(call.chunk, call.E)
    errors = call.buffer(call.chunk, call.E) if call.has_delta else None
    call.add_states(
        _states_kernel, call.call, prepared, call.initial, call.new_state(), absent(Operand),
        states, errors, steps,
    )  # fmt: skip
    return Remade(prepared, states, errors, steps)
