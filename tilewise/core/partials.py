"""Partial results of attention and their merge: out and log-sum-exp of a part of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .shapes import check_same_device, check_shapes


class Partial(NamedTuple):
    """Attention over some of the keys, normalised over those keys alone.

    out: `[B, M, H, E]`, packed `[T, H, E]`.
    lse: natural log of the sum of exp(score) over those keys, fp32 (fp64 for fp64 inputs),
        `[B, H, M]`, packed `[H, T]`; `-inf` where there was no key.
    """

    out: Tensor
    lse: Tensor


def merge(partials: Sequence[Partial]) -> Partial:
    """Combine partials over disjoint sets of keys into the partial over their union.

    `lse = log(sum_i exp(lse_i))`, `out = sum_i exp(lse_i - lse) out_i`.

    Args:
        partials: one or more `Partial` (or `(out, lse)` pairs) of one shape.
    Returns: a `Partial`; out in the widest dtype of the outs, lse in that of the lses. Rows that
        are empty in every partial stay `(0, -inf)`; what stands in the out of an empty partial
        does not matter.
    Raises: ValueError for an empty sequence, what is no pair of tensors, or shapes that differ.
    Cost: reads each partial once; two fp32 buffers of the shape of out.
    Deterministic: forward and backward, always.
    Differentiable in every out and lse; associative and commutative up to rounding.
    Source: FlashAttention (arXiv 2205.14135), algorithm 1; the oracle is
        `tilewise.dense.reference.merge_reference`.
    """
    if len(partials) == 0:
        raise ValueError("merge: expected at least one partial, got none.")
    for i, p in enumerate(partials):
        if not isinstance(p, tuple | list) or len(p) != 2:
            raise ValueError(
                f"merge: partials[{i}] must be a Partial or a pair (out, lse), "
                f"got {type(p).__name__}."
            )
    parts = [Partial(*p) for p in partials]
    _check_parts(parts)
    lses = [p.lse for p in parts]
    lse_dtype = _widest(lses)
    # The maximum only keeps exp in range, so no gradient goes through it.
    top = torch.stack([lse.detach().to(lse_dtype) for lse in lses]).amax(0)
    shift = torch.where(top.isneginf(), torch.zeros_like(top), top)
    weights = [torch.exp(lse.to(lse_dtype) - shift) for lse in lses]
    total = torch.stack(weights).sum(0)
    is_empty = total == 0
    safe_total = torch.where(is_empty, torch.ones_like(total), total)
    lse = torch.where(is_empty, float("-inf"), shift + torch.log(safe_total))
    out = None
    for part, weight in zip(parts, weights, strict=True):
        share = (weight / safe_total).transpose(-1, -2).unsqueeze(-1)
        # An empty partial owns no value: whatever its buffer holds must not reach the sum.
        value = torch.where(share == 0, 0.0, part.out.to(lse_dtype))
        out = share * value if out is None else out + share * value
    assert out is not None
    return Partial(out.to(_widest([p.out for p in parts])), lse)


def merge_into(total: Partial, part: Partial) -> None:
    """`merge([total, part])`, written over `total`; without gradients, in one pass over out.

    Args:
        total: in the accumulator's dtype. part: its out is finite, in empty rows too, as every op
            writes it.
    """
    # Not exp(part.lse - lse): the rounding of a sum as large as 100 would be a hundred times eps.
    share = torch.sigmoid(part.lse - total.lse)
    # Where both are empty the difference is no number; the row stays as it is.
    share = torch.where(part.lse.isneginf(), 0.0, share)
    total.out.lerp_(part.out, share.transpose(-1, -2).unsqueeze(-1))
    total.lse.copy_(torch.logaddexp(total.lse, part.lse))


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    dtype = tensors[0].dtype
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _check_parts(parts: Sequence[Partial]) -> None:
    packed = isinstance(parts[0].out, Tensor) and parts[0].out.dim() == 3
    out_spec, lse_spec = ("T H E", "H T") if packed else ("B M H E", "B H M")
    tensors = {
        f"partials[{i}].{name}": getattr(p, name) for i, p in enumerate(parts) for name in p._fields
    }
    specs = {name: out_spec if name.endswith("out") else lse_spec for name in tensors}
    check_shapes("merge", tensors, **specs)
    check_same_device("merge", tensors)
