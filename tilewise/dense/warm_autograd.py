"""Gradients of warm calls: the fewest steps from a call to its launches and back.

`ops.Attention` does the same for calls whose ops have to be seen, by a trace or a transform.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.first_derivative import mark_first_derivatives
from .warm import Warm

# What has no gradient: the last arguments of `forward`.
_NONE = (None,) * 4


class WarmAttention(torch.autograd.Function):
    """out, or `(out, lse)` where lse has a gradient too.

    index: see `Warm.run`. What is saved is what `ops.Attention` saves, in its order: a checkpoint
    may recompute a cold call by a warm one.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, warm: Warm, index: tuple[Tensor | None, ...],
        out_dtype: torch.dtype, lse_has_grad: bool,
    ) -> Any:  # fmt: skip
        out, lse, remainder = warm.run(q, k, v, index)
        ctx.warm = warm
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, remainder, lse, *index)
        if out.dtype is not out_dtype:
            out = out.to(out_dtype)
        return (out, lse) if lse_has_grad else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[3])
        if not torch.is_grad_enabled():
            return (*ctx.warm.gradients(saved, dout, dlse), *_NONE)
        with torch.no_grad():
            gradients = ctx.warm.gradients(saved, dout, dlse)
        return (*mark_first_derivatives("attention", (dout, dlse, *saved[:3]), gradients), *_NONE)


# Without what `Function.apply` does for torch.func's transforms, under which no call is warm.
run_with_gradients: Any = super(torch.autograd.Function, WarmAttention).apply
