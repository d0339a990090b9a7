"""What a score is made of besides q . k, and the softmax's extras, in one argument."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Score and softmax terms of an attention call, after checking.

    scale: multiplies q . k. softcap: c in `c * tanh(s / c)`, None for none.
    alibi_slopes: fp32 `[H]` or `[B, H]`, adds `-slope * |m + offset - n|`.
    bias: `[B or 1, H or 1, M or 1, N or 1]`, added after softcap and before the mask.
    sinks: `[H]`, one extra logit per head in the denominator.
    dropout_p, rng: the probability of dropping, and int64 `[2]` seed and offset.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
