"""Backward of the chunk form by Triton: make states and d again, pass over the states backwards,
then the gradients of each chunk by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.launch import Config
from ..kernels.structs import code
from .forms import form_of
from .inputs import Inputs
from .plan import Plan, Slot, keep_plan
from .stages.gradients import _chunk_gradients_kernel
from .stages.ladder import _chunk_ladder_kernel
from .stages.middle import _chunk_middle_kernel
from .stages.pairs import _chunk_pairs_kernel
from .stages.states_backward import _states_bwd_kernel
from .stages.sums import _sum_parts_kernel
from .triton_call import LinearCall, fit_inputs, fit_rows, forms_of, given_by
from .triton_forward import add_remaking

# Elements of a program that sums parts.
_SUMMED = 2048


def linear_bwd(
    dout: Tensor, dstate: Tensor | None, inputs: Inputs, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """dq, dk, dv, dg, dbeta, dinitial_state; empty where there is none or none is wanted.

    dstate: None for zeros.
    """
    inputs, dout = fit_inputs(inputs), fit_rows(dout)
    dstate = None if dstate is None else dstate.contiguous()
    state_wanted = bool(wanted[5])
    key = ("backward", *forms_of(inputs), form_of(dout), form_of(dstate), state_wanted)
    plan = keep_plan(key, lambda: _plan(dout, dstate, inputs, state_wanted))
    found = plan.run([*given_by(inputs), dout, dstate])
    D, E = inputs.q.shape[-1], inputs.v.shape[-1]
    if D == 1 or E == 1:
        dims = (D, D, E, D if inputs.has_vector_gate else None, None, None)
        found = [x if x is None else x[..., :d] for x, d in zip(found, dims, strict=True)]
    return tuple(
        dout.new_empty(0) if x is None or not want else x
        for x, want in zip(found, wanted, strict=True)
    )


def _plan(dout: Tensor, dstate: Tensor | None, inputs: Inputs, state_wanted: bool) -> Plan:
    call = LinearCall(inputs)
    upstream, dfinal = call.operand(call.plan.given(dout)), call.plan.given(dstate)
    remade = add_remaking(call)
    dstates = call.buffer(call.D, call.E)
    dsteps = call.buffer(call.chunk, call.E) if call.has_delta else None
    dtotal = None
    if call.gate:
        width = call.D if call.gate == 2 else 1
        dtotal = call.buffer(call.n_slices, width, dtype=torch.float32)
    dv = call.new_rows(inputs.v.shape, call.dtype)
    dinitial = call.new_state() if state_wanted else None
    segments = call.add_segments(
        remade.prepared, upstream, remade.segments.decays, is_reversed=True
    )
    call.add_states(
        _states_bwd_kernel, call.call, remade.prepared, segments, remade.states, upstream, dfinal,
        dinitial, call.operand(dv), dstates, dsteps, dtotal,
    )  # fmt: skip
    # One of its own for each value head: heads that share q and k are summed up in fp32.
    heads = (*call.rows_shape, call.D)
    is_shared = call.group > 1
    shared = torch.float32 if is_shared else call.dtype
    dq_parts, dk_parts = (call.new_rows(heads, shared, is_part=is_shared) for _ in "qk")
    dbeta_parts = dg_parts = None
    if inputs.beta is not None:
        dbeta_parts = _new_numbers(call, inputs.beta)
    if inputs.g is not None:
        is_rows = call.gate == 2
        dg_parts = call.new_rows(heads, inputs.g.dtype) if is_rows else _new_numbers(call, inputs.g)
    results = (
        call.operand(dq_parts),
        call.operand(dk_parts),
        call.operand(dg_parts) if call.gate == 2 else call.numbers(dg_parts),
        call.numbers(dbeta_parts),
    )
    pairs, made = call.pairs(), (remade.prepared, remade.states, remade.steps)
    call.add_pairs(
        _chunk_pairs_kernel, call.call, remade.errors, remade.steps, remade.steps_low, dsteps,
        upstream, pairs,
    )  # fmt: skip
    given = (call.call, made, pairs, (dstates, dsteps, dtotal), upstream, results)
    if call.gate == 2:
        _add_vector_gradients(call, given)
    else:
        call.add_gradients(_chunk_gradients_kernel, *given, call.n_slices)
    dq, dk, dbeta, dg = dq_parts, dk_parts, dbeta_parts, dg_parts
    if is_shared:
        dq, dk = (call.new_rows(inputs.q.shape, call.dtype) for _ in "qk")
        _add_sum(call, ((dq_parts, dq), (dk_parts, dk)), call.group, dq.shape[-1])
    if call.n_blocks > 1:
        summed = []
        if inputs.beta is not None:
            dbeta = call.new_numbers(call.H, inputs.beta.dtype)
            summed.append((dbeta_parts, dbeta))
        if inputs.g is not None and call.gate == 1:
            dg = call.new_numbers(call.H, inputs.g.dtype)
            summed.append((dg_parts, dg))
        if summed:
            _add_sum(call, summed, call.n_blocks, 1)
    return call.plan.finish(dq, dk, dv, dg, dbeta, dinitial)


def _add_vector_gradients(call: LinearCall, given: tuple[Any, ...]) -> None:
    """To be run: what weak gates need, then what is left to the ladder."""
    strong, config = None, call.config.weak_gradients
    build = call.build._replace(block_d=call.config.gradients_d)
    chunks = call.slots * call.H
    programs = chunks * call.n_blocks
    if config is not None:
        strong = call.buffer(call.n_blocks, dtype=torch.int32)
        wide = build._replace(block_e=config.block_n)
        call.plan.add(_chunk_middle_kernel, programs, config, (*given, strong, call.n_slices, wide))
        # Most often none of a chunk's blocks is strong.
        programs = chunks
    call.plan.add(
        _chunk_ladder_kernel, programs, call.config.gradients,
        (*given, strong, call.n_slices, build),
    )  # fmt: skip


def _new_numbers(call: LinearCall, like: Tensor) -> Slot:
    """For the gradient of one number a head. It is a sum over D, which programs share: each has
    one of its own, in fp32 where there are several."""
    is_part = call.n_blocks > 1
    dtype = torch.float32 if is_part else like.dtype
    return call.new_numbers(call.H * call.n_blocks, dtype, is_part=is_part)


def _add_sum(
    call: LinearCall, pairs: Sequence[tuple[Slot | None, Slot | None]], n_parts: int, width: int
) -> None:
    """To be run: sums of parts of one or two results of the same shape, in rows of a width."""
    (first, first_out), (second, second_out) = (*pairs, (None, None))[:2]
    assert first_out is not None
    n_rows, block = math.prod(first_out.shape) // width, 1 << (width - 1).bit_length()
    rows = max(1, _SUMMED // block)
    sizes = code(n_rows), n_parts, width, rows, block
    call.plan.add(
        _sum_parts_kernel, -(-n_rows // rows) * len(pairs), Config(rows, block, 4, 1),
        (first, first_out, second, second_out, *sizes, call.build),
    )  # fmt: skip
