"""Backward of the chunk form by Triton: make states and d again, pass over the states backwards,
then the gradients of each chunk by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import Inputs
from .stages.gradients import _chunk_gradients_kernel
from .stages.ladder import _chunk_ladder_kernel
from .stages.pairs import _chunk_pairs_kernel
from .stages.states_backward import _states_bwd_kernel
from .triton_call import LinearCall
from .triton_forward import add_remaking


def linear_bwd(
    dout: Tensor, dstate: Tensor, inputs: Inputs, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dg, dbeta, dinitial_state; empty where there is none or none is wanted."""
    call = LinearCall(inputs)
    remade = add_remaking(call)
    dstates = call.buffer(call.D, call.E)
    dsteps = call.buffer(call.chunk, call.E) if call.has_delta else None
    dtotal = None
    if call.gate:
        width = call.D if call.gate == 2 else 1
        dtotal = call.buffer(call.n_slices, width, dtype=torch.float32)
    dv = call.rows_like(inputs.v)
    dinitial = call.new_state()
    upstream = call.operand(dout)
    call.add_states(
        _states_bwd_kernel, call.call, remade.prepared, remade.states, upstream,
        dstate.contiguous(), dinitial, call.operand(dv), dstates, dsteps, dtotal,
    )  # fmt: skip
    # One of its own for each value head: heads that share q and k are summed up in fp32.
    heads = (*inputs.v.shape[:-1], call.D)
    shared = torch.float32 if call.group > 1 else call.dtype
    dq, dk = (call.new_rows(heads, shared) for _ in "qk")
    # Numbers of a head are sums over D, which programs share.
    numbers = (*inputs.v.shape[:-2], call.H * call.n_blocks)
    dbeta = call.new_rows(numbers, torch.float32) if call.has_delta else None
    dg = None
    if inputs.g is not None:
        dg = call.rows_like(inputs.g) if call.gate == 2 else call.new_rows(numbers, torch.float32)
    results = (
        call.operand(dq),
        call.operand(dk),
        call.operand(dg) if call.gate == 2 else call.numbers(dg),
        call.numbers(dbeta),
    )
    pairs, made = call.pairs(), (remade.prepared, remade.states, remade.steps)
    call.add_chunks(
        _chunk_pairs_kernel, call.config.pairs, call.call, remade.errors, remade.steps, dsteps,
        upstream, pairs,
    )  # fmt: skip
    kernel = _chunk_ladder_kernel if call.gate == 2 else _chunk_gradients_kernel
    call.add_gradients(
        kernel, call.call, made, pairs,
        (dstates, dsteps, dtotal), upstream, results, call.n_slices,
    )  # fmt: skip
    call.run()
    dbeta = call.sum_blocks(dbeta, inputs.beta)
    dg = dg if call.gate == 2 else call.sum_blocks(dg, inputs.g)
    if call.group > 1:
        dq, dk = (x.unflatten(-2, (-1, call.group)).sum(-2).to(call.dtype) for x in (dq, dk))
    nothing = dout.new_empty(0)
    found = (dq, dk, dv, dg, dbeta, dinitial)
    return tuple(
        nothing if x is None or not want else x for x, want in zip(found, wanted, strict=True)
    )
