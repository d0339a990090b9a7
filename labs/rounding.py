"""How far rounding may move attention and its gradients: the bounds that labs 2 and 3 derive.

Each bound is elementwise and to first order in the unit roundoff u; the terms carry the numbers
of the derivations in the labs. They hold for sums in any order and for any tiles, so a larger
difference is a bug and not rounding. Hidden scores are -inf.
"""

import math

import torch
from tiles import FULL, Mask
from torch import Tensor

# Covers the products of errors that "to first order" leaves out, while errors are below 0.005.
SECOND_ORDER = 1.01


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def exact_scores(q: Tensor, k: Tensor, mask: Mask = FULL) -> Tensor:
    """Scaled and masked scores in fp64: what rounding errors are measured against."""
    return mask.apply(q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5)


def score_error_and_range(q: Tensor, k: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
    """Per row `[..., M, 1]`: the largest error `a` of a score, and the range R of the scores.

    `s` are the exact scores in fp64, `scale * q @ k^T` with `scale = D**-0.5`.
    """
    D = q.shape[-1]
    sizes = D**-0.5 * q.double().abs() @ k.double().abs().transpose(-1, -2)
    score_error = (D + 2) * unit_roundoff(q.dtype) * sizes.amax(dim=-1, keepdim=True)
    lowest = s.masked_fill(s == float("-inf"), float("inf")).amin(dim=-1, keepdim=True)
    return score_error, (s.amax(dim=-1, keepdim=True) - lowest).clamp(min=0)


def softmax_and_lse(s: Tensor) -> tuple[Tensor, Tensor]:
    """P `[..., M, N]` and LSE `[..., M, 1]`; both are 0 in a row without a visible key."""
    lse = torch.logsumexp(s, dim=-1, keepdim=True)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    return (s - lse).exp(), lse


def forward_bounds(
    q: Tensor, k: Tensor, v: Tensor, s: Tensor, *, tiles: int, exp_ulps: int = 1
) -> tuple[Tensor, Tensor]:
    """Largest error of out `[..., M, E]` and of lse `[..., M]` in q's dtype (lab 2, section 3)."""
    u, N = unit_roundoff(q.dtype), k.shape[-2]
    score_error, score_range = score_error_and_range(q, k, s)
    weights = score_error + (score_range + (2 * exp_ulps + 1) * (tiles + 1) + N + 1) * u
    assert weights.max() < 0.005
    p, lse = softmax_and_lse(s)
    out_bound = (2 * weights + u) * (p @ v.double().abs())
    # lse = row_max + log(row_sum): a logarithm and a sum are rounded on top.
    lse_bound = weights + u * (3 * lse.abs() + 4 * math.log(N))
    return SECOND_ORDER * out_bound, SECOND_ORDER * lse_bound.squeeze(-1)


def gradient_bounds(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest error of dQ, dK and dV in q's dtype (lab 3, section 4)."""
    u, (M, D), (N, E) = unit_roundoff(q.dtype), q.shape[-2:], v.shape[-2:]
    p, lse = softmax_and_lse(s)
    score_error, score_range = score_error_and_range(q, k, s)
    counted = 2 * score_range + 8 * N + 8 + 3 * lse.abs() + 5 * math.log(N)
    rho = 2 * score_error + counted * u
    kappa = 2 * rho + (E + N + 4) * u
    assert kappa.max() < 0.005

    q_size, k_size, v_size, dout_size = (x.double().abs() for x in (q, k, v, dout))
    delta_size = (dout_size * (p @ v_size)).sum(dim=-1, keepdim=True)
    ds_size = p * (dout_size @ v_size.transpose(-1, -2) + delta_size)
    dq = D**-0.5 * ((kappa + (N + 3) * u) * ds_size) @ k_size
    dk = D**-0.5 * ((kappa + (M + 3) * u) * ds_size).transpose(-1, -2) @ q_size
    dv = ((rho + (M + 2) * u) * p).transpose(-1, -2) @ dout_size
    return SECOND_ORDER * dq, SECOND_ORDER * dk, SECOND_ORDER * dv
