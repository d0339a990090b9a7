"""From flash-attn's arguments to the library's: shared by the interfaces of its releases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import chunked, full, window
from ..core.shapes import check_shapes
from ..dense.api import (
    attention,
    attention_partial,
    attention_varlen,
    attention_varlen_partial,
)

Window = Sequence[int | None] | None
# out, (out, lse) or (out, lse, None), by the flags. A union would need a cast at every call.
Result = Any


class Options(NamedTuple):
    """What the functions take, in flash-attn's names."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Window
    softcap: float | None
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    sinks: Tensor | None
    return_lse: bool
    # FlashAttention-3's.
    attention_chunk: int = 0


class Packing(NamedTuple):
    """Where the packed sequences are, in the names that both sides share."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None


def attend(
    op: str, q: Tensor, k: Tensor, v: Tensor, options: Options, packing: Packing | None = None
) -> Result:
    _check_returns(op, options)
    scale = options.softmax_scale
    if scale is not None and not abs(checked_number(op, "softmax_scale", scale)) < math.inf:
        raise ValueError(f"{op}: softmax_scale must be finite, got {scale}.")
    keywords: dict[str, Any] = {
        "mask": mask_of(op, options),
        "scale": scale,
        "softcap": softcap_of(op, options),
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        "dropout_p": options.dropout_p,
        "deterministic": options.deterministic,
    }
    if packing is not None:
        keywords |= packing._asdict()
    if not (options.return_lse or options.return_attn_probs):
        run = attention if packing is None else attention_varlen
        return run(q, k, v, **keywords)
    run_partial = attention_partial if packing is None else attention_varlen_partial
    out, lse = run_partial(q, k, v, **keywords)
    return (out, lse) if options.return_lse else (out, lse, None)


def softcap_of(op: str, options: Options) -> float | None:
    """None for 0 and below, which flash-attn takes for none."""
    softcap = options.softcap
    return None if softcap is None or checked_number(op, "softcap", softcap) <= 0.0 else softcap


def checked_number(op: str, name: str, x: float) -> float:
    # What torch.compile holds as a symbol has no __float__, and was a number.
    is_number = torch.compiler.is_compiling() or hasattr(x, "__float__")
    if not is_number or (isinstance(x, Tensor) and x.numel() != 1):
        got = f"a tensor {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{op}: {name} must be a number or None, got {got}.")
    return x


def check_tensors(op: str, tensors: dict[str, Tensor], **specs: str) -> None:
    """Shapes under flash-attn's names; what the library checks too, it says under its own."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}.")
    check_shapes(op, tensors, **specs)


def _check_returns(op: str, options: Options) -> None:
    if not options.return_attn_probs:
        return
    if options.return_lse:
        raise ValueError(
            f"{op}: return_attn_probs and return_lse ask for different tuples; choose one."
        )
    if options.dropout_p > 0.0:
        raise NotImplementedError(
            f"{op}: return_attn_probs with dropout_p > 0 asks for the dropped probabilities, which "
            "no backend ever stores; use return_lse=True for the lse."
        )


def mask_of(op: str, options: Options) -> Mask:
    left, right = _window_bounds(op, options.window_size)
    if options.causal:
        right = 0
    is_bounded = left is not None or right is not None
    chunk = options.attention_chunk
    if not isinstance(chunk, int) or chunk < 0:
        raise ValueError(f"{op}: attention_chunk must be an int >= 0 (0 is none), got {chunk}.")
    if chunk:
        return chunked(chunk) & window(left, right) if is_bounded else chunked(chunk)
    return window(left, right) if is_bounded else full()


def _window_bounds(op: str, window_size: Window) -> tuple[int | None, int | None]:
    if window_size is None:
        return None, None
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ValueError(f"{op}: window_size must be (left, right), got {window_size}.")
    bounds = [None if bound == -1 else bound for bound in window_size]
    for bound in bounds:
        # Below -1 the peers differ: unbounded for one, a shifted window for another.
        if bound is not None and not (isinstance(bound, int) and bound >= 0):
            raise ValueError(
                f"{op}: window_size must hold ints >= 0, or -1 for no bound, got {window_size}."
            )
    return bounds[0], bounds[1]
