"""The short causal convolution that stands before q, k and v in models with a state.

Plain torch on any device, differentiable by autograd; lengths stay on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.shapes import (
    accumulator_of,
    check_cu_seqlens,
    check_same_device,
    check_shapes,
    is_read,
)
from .checks import check_bounds

# Taps of a channel.
LARGEST_WIDTH = 16


def short_convolution(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: str | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal convolution per channel: `out_m = sum_w weight_w x_{m - W + 1 + w} + bias`.

    Args:
        x: `[B, M, C]`, fp16, bf16, fp32 or fp64, any strides; packed `[T, C]`.
        weight: `[C, W]`, any floating dtype, W from 1 to 16; the last tap is that of the step
            itself. PyTorch's `Conv1d` has it as `[C, 1, W]`.
        bias: `[C]`, any floating dtype.
        activation: "silu" or None.
        state: `[B, C, W - 1]`, the inputs before the first, oldest first; zeros when None.
        cu_seqlens: `[B + 1]` int32 or int64, where packed sequences begin and end. No sequence
            reads another's inputs; tokens past the last give 0. What it holds is checked on the
            CPU, elsewhere with TILEWISE_CHECK=1; unchecked bounds are cut to what is stored.
    Returns: `(out, state)`: out as x, and the last W - 1 inputs of each sequence, in x's dtype,
        which a later call goes on from. Both differentiable.
    Raises: ValueError for arguments that do not fit.
    Cost: 2 W flops and about 2 numbers read and written a channel and step; sums in fp32.
    Deterministic: forward and backward, always.
    Source: what torch.nn.functional.conv1d gives for rows padded on the left, which is its oracle.
    """
    _check(x, weight, bias, activation, state, cu_seqlens)
    wide = accumulator_of(x.dtype)
    W = weight.shape[-1]
    n = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    before = x.new_zeros(n, x.shape[-1], W - 1) if state is None else state.to(x.dtype)
    # [B, W - 1, C], as x has it.
    before = before.transpose(1, 2)
    if cu_seqlens is None:
        whole = torch.cat([before, x], 1)
        taps = [whole[:, w : w + x.shape[1]] for w in range(W)]
        last = whole[:, x.shape[1] :]
        owned = None
    else:
        taps, last, owned = _packed_taps(x, before, cu_seqlens, W)
    out = taps[0].to(wide) * weight[:, 0].to(wide)
    for w in range(1, W):
        out = out + taps[w].to(wide) * weight[:, w].to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    if activation == "silu":
        out = F.silu(out)
    if owned is not None:
        out = torch.where(owned.unsqueeze(-1), out, 0.0)
    return out.to(x.dtype), last.transpose(1, 2).contiguous()


def _packed_taps(
    x: Tensor, before: Tensor, cu_seqlens: Tensor, W: int
) -> tuple[list[Tensor], Tensor, Tensor]:
    """The input of each tap for every token, the last W - 1 inputs of each sequence, and which
    tokens belong to one. Every sequence is read as its state with its tokens after it."""
    T, B = x.shape[0], before.shape[0]
    bounds = cu_seqlens.to(torch.int64).clamp(0, T).cummax(0).values
    tokens = torch.arange(T, device=x.device)
    sequence = torch.searchsorted(bounds[1:], tokens, right=True)
    owned = sequence < B
    sequence = sequence.clamp(max=max(B - 1, 0))
    # One row of all numbers there are: tokens, states, and a 0 for what is not there.
    C = x.shape[-1]
    rows = torch.cat([x, before.reshape(B * (W - 1), C), x.new_zeros(1, C)])

    def read(sequence: Tensor, place: Tensor, valid: Tensor) -> Tensor:
        # place: in the sequence's own tokens; its state is at -(W - 1), ..., -1.
        first = bounds[:-1][sequence] if B else place
        in_state = T + sequence * (W - 1) + place + W - 1
        row = torch.where(place >= 0, first + place, in_state)
        return rows[torch.where(valid, row, rows.shape[0] - 1)]

    start = bounds[:-1][sequence] if B else tokens
    taps = [read(sequence, tokens - start - (W - 1) + w, owned) for w in range(W)]
    each = torch.arange(B, device=x.device).unsqueeze(1)
    back = torch.arange(W - 1, device=x.device) - (W - 1)
    places = bounds.diff().unsqueeze(1) + back
    last = read(each.expand_as(places), places, torch.ones_like(places, dtype=torch.bool))
    return taps, last, owned


def _check(x: Any, weight: Any, bias: Any, activation: Any, state: Any, cu_seqlens: Any) -> None:
    op = "short_convolution"
    tensors = {"x": x, "weight": weight, "bias": bias, "state": state, "cu_seqlens": cu_seqlens}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("x", "weight")):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}.")
    lead = "B M" if cu_seqlens is None else "T"
    dims = check_shapes(op, tensors, x=f"{lead} C", weight="C W", bias="C", cu_seqlens="B+1")
    W = dims["W"]
    if not 1 <= W <= LARGEST_WIDTH:
        raise ValueError(f"{op}: weight must have 1 to {LARGEST_WIDTH} taps, got {W}.")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias), ("state", state)):
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{op}: {name} must be floating, got {tensor.dtype}.")
    if activation not in (None, "silu"):
        raise ValueError(f"{op}: activation must be None or 'silu', got {activation!r}.")
    if cu_seqlens is not None:
        check_bounds(op, cu_seqlens)
        if is_read(cu_seqlens):
            check_cu_seqlens(op, "cu_seqlens", cu_seqlens, dims["T"])
    expected = [dims["B"] if cu_seqlens is None else dims["B+1"] - 1, dims["C"], W - 1]
    if state is not None and list(state.shape) != expected:
        raise ValueError(
            f"{op}: state must be [B, C, W - 1] = {expected}, got {list(state.shape)}."
        )
    check_same_device(op, {name: t for name, t in tensors.items() if t is not None})
