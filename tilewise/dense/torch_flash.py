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

from ..core.mask import UNBOUNDED, Mask
from ..core.mask_leaves import Full, Window
from .piece import Piece

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


def is_enabled() -> bool:
    """False inside `disabled()`; a call asks once, so that its backward does as its forward.

    A compiled call always may: torch.compile does not trace context variables.
    """
    return torch.compiler.is_compiling() or _is_enabled.get()


def is_same_piece(piece: Piece, out_dtype: torch.dtype) -> bool:
    """Whether the fused op would compute just this piece."""
    q, k, v, M, N = piece.q, piece.k, piece.v, piece.positions.M, piece.positions.N
    return (
        q.device.type == "cpu"
        and q.dtype in _DTYPES
        and out_dtype == q.dtype
        and (type(piece.mask) is Full or (_is_causal(piece.mask) and M == N))
        and piece.positions.is_plain
        and piece.terms.is_plain
        and piece.group == 1
        and q.shape[-1] == v.shape[-1]
        and min(*q.shape, N) > 0
        and all(x.stride(-1) == 1 for x in (q, k, v))
    )


def _is_causal(mask: Mask) -> bool:
    return type(mask) is Window and mask.right == 0 and mask.left == UNBOUNDED


def forward(piece: Piece) -> tuple[Tensor, Tensor]:
    heads_first = (x.transpose(1, 2) for x in (piece.q, piece.k, piece.v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads_first, 0.0, _is_causal(piece.mask), scale=piece.terms.scale
    )
    # In place: see what `ops._attention_fwd` does to packed results.
    return out.transpose_(1, 2).contiguous(), lse.contiguous()


def backward(piece: Piece, dout: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    """dq, dk, dv."""
    tensors = (dout.contiguous(), piece.q, piece.k, piece.v, out)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(x.transpose(1, 2) for x in tensors),
        lse,
        0.0,
        _is_causal(piece.mask),
        scale=piece.terms.scale,
    )
    return [x.transpose(1, 2).contiguous() for x in gradients]
