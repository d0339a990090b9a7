"""What models do to q, k, gate and beta before the recurrence, as options of the ops.

All in fp32 (fp64 for fp64 inputs), differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.shapes import accumulator_of

# Under the root of a norm, so that a vector of zeros stays one, with a finite gradient.
NORM_EPS = 1e-6


def l2_norm(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last dim, in x's dtype."""
    wide = x.to(accumulator_of(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()).to(x.dtype)


def log_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """A log gate from what a model's projection gives; A_log and dt_bias broadcast to g.

    `-exp(A_log) softplus(g + dt_bias)`; with a bound `lower_bound sigmoid(exp(A_log) (g +
    dt_bias))`. Without A_log the rate is 1.
    """
    wide = accumulator_of(g.dtype)
    g = g.to(wide)
    if dt_bias is not None:
        g = g + dt_bias.to(wide)
    rate = 1.0 if A_log is None else A_log.to(wide).exp()
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * g)
    return -rate * F.softplus(g)


def step_size(beta: Tensor, is_logit: bool, reaches_two: bool) -> Tensor:
    """beta in (0, 1), or (0, 2) where the state's eigenvalues may be negative."""
    wide = beta.to(accumulator_of(beta.dtype))
    if is_logit:
        wide = torch.sigmoid(wide)
    return 2.0 * wide if reaches_two else wide
