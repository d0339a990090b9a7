"""Derivatives that are refused, where they would otherwise be 0 or dropped without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def mark_first_derivatives(
    op: str, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The gradients of a backward, as functions of its inputs that raise when differentiated.

    In a backward that nothing differentiates, or that is compiled, they are left as they are.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return gradients
    apply: Any = _FirstDerivative.apply
    marked: tuple[Tensor, ...] = apply(op, len(inputs), *inputs, *gradients)
    return marked


def refuse_tangents(op: str) -> None:
    """Raise inside forward-mode differentiation, whose tangents an op would drop."""
    if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{op}: forward-mode derivatives are not implemented on this backend; "
            "backend='reference' has them."
        )


class _FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, n_inputs: int, *tensors: Tensor | None) -> Any:
        ctx.op = op
        return tuple(x.view_as(x) for x in tensors[n_inputs:] if x is not None)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise NotImplementedError(
            f"{ctx.op}: second derivatives are not implemented on this backend; "
            "backend='reference' has them."
        )
