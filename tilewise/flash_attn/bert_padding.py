"""flash-attn's `bert_padding`: between padded batches `[B, S, ...]` and packed tokens `[T, ...]`.

Dims: B batch, S padded length, T real tokens of all rows.
Plain indexing, with gradients; the longest length is read on the host, as flash-attn does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.shapes import is_integer
from .call import check_tensors


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` `[T]` of `input` `[B S, ...]`."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`[first_axis_dim, ...]` with `values` `[T, ...]` at rows `indices`, 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the padding out.

    Args:
        hidden_states: `[B, S, ...]`.
        attention_mask: `[B, S]`, bool or integer, nonzero where a token is real.
        unused_mask: `[B, S]`, nonzero where a token keeps its place without being in use.
    Returns: the tokens `[T, ...]`; their places in `B S`, `[T]`; cu_seqlens int32 `[B + 1]`; the
        longest length; and how many tokens of each row are in use, int32 `[B]`.
    Raises: ValueError for a mask that is not `[B, S]`.
    """
    op = "unpad_input"
    _check_mask(op, "attention_mask", attention_mask, hidden_states)
    kept = attention_mask != 0
    used = kept.sum(-1, dtype=torch.int32)
    if unused_mask is not None:
        _check_mask(op, "unused_mask", unused_mask, hidden_states)
        kept = kept | (unused_mask != 0)
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulated(lengths), _longest(lengths), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Take the padding out of rows that hold several sequences.

    Args:
        hidden_states: `[B, S, ...]`; the sequences of a row stand one after the other from its
            start.
        attention_mask_in_length: integers `[B, S]`, their lengths in order, then zeros.
    Returns: the tokens, their places, cu_seqlens of all sequences and the longest length, as
        `unpad_input`.
    """
    op = "unpad_input_for_concatenated_sequences"
    _check_mask(op, "attention_mask_in_length", attention_mask_in_length, hidden_states)
    S = hidden_states.shape[1]
    places = torch.arange(S, device=hidden_states.device)
    kept = places < attention_mask_in_length.sum(-1, keepdim=True)
    indices = kept.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths != 0].to(torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulated(lengths), _longest(lengths)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put the padding back: `[batch, seqlen, ...]`, 0 where no token is.

    Args:
        hidden_states: `[T, ...]`.
        indices: `[T]`, from `unpad_input`.
    Raises: ValueError for what has another form.
    """
    op = "pad_input"
    check_tensors(op, {"hidden_states": hidden_states, "indices": indices})
    if indices.shape != hidden_states.shape[:1] or indices.dtype != torch.int64:
        raise ValueError(
            f"{op}: indices must be int64 [T] = {list(hidden_states.shape[:1])}, "
            f"got {indices.dtype} {list(indices.shape)}."
        )
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        if not is_integer(size) or size < 0:
            raise ValueError(f"{op}: {name} must be an int >= 0, got {size!r}.")
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(
        0, (batch, seqlen)
    )


def _check_mask(op: str, name: str, mask: Tensor, hidden_states: Tensor) -> None:
    check_tensors(op, {"hidden_states": hidden_states, name: mask})
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"{op}: {name} must be [B, S] = {list(hidden_states.shape[:2])}, "
            f"got {list(mask.shape)}."
        )


def _cumulated(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _longest(lengths: Tensor) -> int:
    return int(lengths.max()) if lengths.numel() else 0
