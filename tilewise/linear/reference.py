"""The oracle of linear attention: the recurrence, step by step.

    S_t = e^{g_t} S_{t-1}                      the decay, before anything else
    S_t += k_t (x) v_t                         or, with beta, the delta rule:
    S_t += k_t (x) beta_t (v_t - k_t^T S_t)
    o_t = scale q_t^T S_t

Dims: q, k `[B, M, G, D]`, v `[B, M, H, E]`, g `[B, M, H]` or `[B, M, H, D]`, beta `[B, M, H]`,
    S `[B, H, D, E]`; packed `[T, ...]` with B sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ..core.shapes import accumulator_of
from .inputs import Inputs


def linear_reference(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """`(out, final_state)` in fp64 throughout; out in the inputs' dtype."""
    wide = inputs.map(lambda x: x.to(torch.float64))
    out, state = _run(wide, lambda x: x)
    return out.to(inputs.q.dtype), state.to(accumulator_of(inputs.q.dtype))


def linear_eager(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The same with the state in fp32, and every product of numbers in the inputs' dtype, rounded
    to it.

    The state is rounded where it is an operand, since such a product has both of that dtype. This
    widens the budget of 16-bit results by less than a tenth. The gradient of the initial state has
    no other rounding in this form; in chunks it has that of the output's gradient.
    """
    dtype, wide = inputs.q.dtype, accumulator_of(inputs.q.dtype)
    out, state = _run(inputs.map(lambda x: x.to(wide)), lambda x: x.to(dtype).to(wide))
    return out.to(dtype), state


def _run(inputs: Inputs, rounded: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    state = inputs.state_or_zeros()
    if inputs.cu_seqlens is None:
        return recurrence(inputs, state, rounded)
    outs, states = [], []
    bounds = inputs.cu_seqlens.tolist()
    for b, (start, stop) in enumerate(pairwise(bounds)):
        one = inputs.cut(start, stop)
        out, last = recurrence(one, state[b : b + 1], rounded)
        outs.append(out[0])
        states.append(last)
    spare = inputs.v.shape[0] - bounds[-1]
    outs.append(inputs.v.new_zeros(spare, *inputs.v.shape[1:]))
    return torch.cat(outs), torch.cat(states) if states else state


def recurrence(
    inputs: Inputs, state: Tensor, rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Dense rows, one step after another. rounded: to the dtype of products."""
    q, k = (inputs.by_value_head(x) for x in (inputs.q, inputs.k))
    steps = zip(
        q.unsqueeze(-2).unbind(1), k.unsqueeze(-1).unbind(1), inputs.v.unbind(1), strict=True
    )
    decays = None
    if inputs.g is not None:
        g = inputs.g if inputs.has_vector_gate else inputs.g.unsqueeze(-1)
        decays = g.exp().unsqueeze(-1).unbind(1)
    betas = None if inputs.beta is None else inputs.beta.unsqueeze(-1).unbind(1)
    outs = []
    for t, (q_t, k_t, d_t) in enumerate(steps):
        if decays is not None:
            state = decays[t] * state
        if betas is not None:
            seen = rounded((k_t.transpose(-1, -2) @ rounded(state)).squeeze(-2))
            d_t = rounded(betas[t] * (d_t - seen))
        state = state + rounded(k_t * d_t.unsqueeze(-2))
        outs.append(rounded(inputs.scale * (q_t @ rounded(state)).squeeze(-2)))
    if not outs:
        return inputs.v.clone(), state.clone()
    return torch.stack(outs, 1), state
