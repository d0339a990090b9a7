"""Hugging Face models with linear attention on Tilewise's ops: Qwen3-Next, Kimi Linear and others.

Transformers' models call the chunk form, the recurrent form and the convolution by names of their
own modules, which fall back to plain torch. `use_linear_attention(model)` puts ours there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..linear.api import gated_delta_rule, kda
from ..linear.convolution import short_convolution


def use_linear_attention(model: nn.Module) -> list[str]:
    """Let a model's layers call Tilewise's linear attention and short convolution.

    It holds for every model of the same class from then on.

    Args:
        model: of Transformers; its own file must call the functions that are replaced.
    Returns: their names, as `module.function`.
    Raises: ValueError where the model calls none of them.
    """
    replaced = []
    homes = {type(layer).__module__ for layer in model.modules()}
    for home in sorted(homes):
        if not home.startswith("transformers.models."):
            continue
        module = sys.modules[home]
        for name, ours in _OURS.items():
            if hasattr(module, name):
                setattr(module, name, ours)
                replaced.append(f"{home}.{name}")
    if not replaced:
        raise ValueError(
            f"use_linear_attention: {type(model).__name__} calls none of {', '.join(_OURS)}."
        )
    return replaced


def _rule(op: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """An op behind the signature that the models share, which is that of their own fallbacks."""

    def call(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = [query, key, value, g, beta]
        if cu_seqlens is not None:
            # One row of packed documents.
            tensors = [x.squeeze(0) for x in tensors]
        q, k, v, g, beta = tensors
        out, state = op(
            q, k.to(q.dtype), v.to(q.dtype), g=g, beta=beta, cu_seqlens=cu_seqlens,
            initial_state=None if initial_state is None else initial_state.float(),
            qk_l2norm=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        out = out if cu_seqlens is None else out.unsqueeze(0)
        return out, state if output_final_state else None

    return call


def _convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """`[B, C, M]` to the same."""
    out, _ = short_convolution(
        hidden_states.transpose(1, 2).to(weight.dtype), weight, bias=bias, activation=activation
    )
    return out.transpose(1, 2).to(hidden_states.dtype)


def _convolve_step(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """The same for steps after those in `conv_state`, `[B, C, W]` or longer, which it updates."""
    taps, kept = weight.shape[-1], conv_state.shape[-1]
    x = torch.cat([conv_state, hidden_states], -1).to(weight.dtype)
    new = hidden_states.shape[-1]
    conv_state.copy_(x[:, :, -kept:])
    before = x[:, :, : x.shape[-1] - new][:, :, -(taps - 1) :] if taps > 1 else x[:, :, :0]
    out, _ = short_convolution(
        x[:, :, -new:].transpose(1, 2), weight, bias=bias, activation=activation, state=before
    )
    return out.transpose(1, 2).to(hidden_states.dtype)


# By the names that the models call them by.
_OURS: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _rule(gated_delta_rule),
    "torch_recurrent_gated_delta_rule": _rule(gated_delta_rule),
    "chunk_kimi_delta_attention": _rule(kda),
    "recurrent_kimi_delta_attention": _rule(kda),
    "causal_conv1d_fn": _convolve,
    "causal_conv1d_update": _convolve_step,
}
