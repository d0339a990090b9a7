"""Handing a piece to PyTorch's fused CPU flash op, where the piece means exactly the same.

That op is the same algorithm compiled; it serves full and top-left causal attention with nothing
else in it. Results are called `tiled(torch-flash)` wherever times are shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import Full, Window
from ..core.positions import Positions
from .terms import Terms

_is_enabled: ContextVar[bool] = ContextVar("tilewise_torch_flash", default=True)

# Its fp16 backward ran 10 times slower than its fp32 one (torch 2.13, EPYC, 2026-11-29).
_DTYPES = (torch.float32, torch.bfloat16)


@contextmanager
def disabled() -> Iterator[None]:
    """Compute every piece with Tilewise's own tiles inside this block."""
    token = _is_enabled.set(False)
    try:
        yield
    finally:
        _is_enabled.reset(token)


def _is_causal(mask: Mask) -> bool:
    return type(mask) is Window and mask.right == 0


def is_same_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    positions: Positions,
    terms: Terms,
    out_dtype: torch.dtype,
) -> bool:
    """Whether the fused op would compute just this piece."""
    M, N = positions.M, positions.N
    unbounded = type(mask) is Full or (
        _is_causal(mask) and M == N and isinstance(mask, Window) and mask.left >= N - 1
    )
    no_terms = terms.softcap is terms.bias is terms.alibi_slopes is terms.sinks is None
    return (
        _is_enabled.get()
        and q.device.type == "cpu"
        and q.dtype in _DTYPES
        and out_dtype == q.dtype
        and unbounded
        and positions.is_plain
        and no_terms
        and terms.dropout_p == 0.0
        and q.shape[2] == k.shape[2]
        and q.shape[-1] == v.shape[-1]
        and min(*q.shape, N) > 0
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, _is_causal(mask), scale=scale
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Mask,
    scale: float,
) -> tuple[Tensor, ...]:
    heads_first = (x.transpose(1, 2) for x in (dout.contiguous(), *inputs, out))
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *heads_first, lse, 0.0, _is_causal(mask), scale=scale
    )
    return tuple(x.transpose(1, 2).contiguous() for x in gradients)
