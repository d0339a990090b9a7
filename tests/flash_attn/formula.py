"""Attention in flash-attn's terms, written out: what the drop-in's functions must compute.

In fp64 it is the exact result, in the input dtype the eager one of the error budget: products in
the dtype of its inputs, softmax in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.core.philox import draw_rng, keep_mask

# torch's seed at every call: what dropout draws its bits from.
SEED = 11
LEARNED = ("alibi_slopes", "sinks")


@dataclass
class Call:
    """One call of a function of the drop-in: tensors by name (each gets a gradient), the rest."""

    function: str
    tensors: dict[str, Tensor]
    lengths: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    @property
    def is_varlen(self) -> bool:
        return "varlen" in self.function

    def edges(self, side: str) -> list[int]:
        """cu_seqlens of the queries ("q") or the keys ("k")."""
        name = "cu_seqlens" if "cu_seqlens" in self.lengths else f"cu_seqlens_{side}"
        return self.lengths[name].tolist()


@dataclass
class Sequence:
    """One batch row or packed sequence: q `[H, M, D]`, k and v `[G, N, D]`."""

    call: Call
    b: int
    q: Tensor
    k: Tensor
    v: Tensor
    slopes: Tensor | None
    sinks: Tensor | None

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.k.shape[0]

    @property
    def scale(self) -> float:
        scale = self.call.options.get("softmax_scale")
        return self.q.shape[-1] ** -0.5 if scale is None else scale

    @property
    def dropout_p(self) -> float:
        return self.call.options.get("dropout_p", 0.0)

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """i `[M, 1]`, j `[1, N]`."""
        i, j = torch.arange(self.q.shape[1]), torch.arange(self.k.shape[1])
        return i.unsqueeze(-1), j.unsqueeze(0)

    @property
    def distance(self) -> Tensor:
        """`i + N - M - j`, `[M, N]`."""
        i, j = self.indices
        return i + self.k.shape[1] - self.q.shape[1] - j

    def repeated(self) -> tuple[Tensor, Tensor]:
        """k and v `[H, N, D]`."""
        return self.k.repeat_interleave(self.group, 0), self.v.repeat_interleave(self.group, 0)

    def is_visible(self) -> Tensor:
        options, distance = self.call.options, self.distance
        left, right = options.get("window_size", (-1, -1))
        visible = torch.ones_like(distance, dtype=torch.bool)
        if options.get("causal"):
            visible &= distance >= 0
        if left != -1:
            visible &= distance <= left
        if right != -1:
            visible &= -distance <= right
        return visible

    def softmax(self) -> tuple[Tensor, Tensor]:
        """Probabilities `[H, M, N]` before dropout, and lse `[H, M]`."""
        wide = torch.promote_types(self.q.dtype, torch.float32)
        k, _ = self.repeated()
        scores = (self.q @ k.transpose(-1, -2)).to(wide) * self.scale
        softcap = self.call.options.get("softcap", 0.0)
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        if self.slopes is not None:
            scores = scores - self.slopes.to(wide).reshape(-1, 1, 1) * self.distance.abs()
        scores = scores.masked_fill(~self.is_visible(), float("-inf"))

        # The last column is the sink's. An empty row has lse -inf and lets no gradient through.
        H, M = self.q.shape[:2]
        sink = torch.full((H,), float("-inf")) if self.sinks is None else self.sinks
        logits = torch.cat([scores, sink.to(wide).reshape(-1, 1, 1).expand(H, M, 1)], -1)
        is_empty = (logits == float("-inf")).all(-1, keepdim=True)
        logits = torch.where(is_empty, 0.0, logits)
        lse = logits.logsumexp(-1, keepdim=True)
        p = torch.where(is_empty, 0.0, (logits - lse).exp())[..., :-1]
        return p, torch.where(is_empty, float("-inf"), lse).squeeze(-1)

    def attend(self) -> tuple[Tensor, Tensor]:
        """out `[M, H, D]`, lse `[H, M]`."""
        p, lse = self.softmax()
        if self.dropout_p > 0.0:
            torch.manual_seed(SEED)
            H = self.q.shape[0]
            row = torch.arange(H).reshape(-1, 1, 1) + self.b * H
            keep = keep_mask(draw_rng(self.q.device), self.dropout_p, row, *self.indices)
            p = torch.where(keep, p / (1.0 - self.dropout_p), 0.0)
        _, v = self.repeated()
        return (p.to(v.dtype) @ v).transpose(0, 1), lse


def split(call: Call, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of whatever packing."""
    dim = 1 if call.is_varlen else 2
    if "qkv" in tensors:
        q, k, v = tensors["qkv"].unbind(dim)
    elif "kv" in tensors:
        q, (k, v) = tensors["q"], tensors["kv"].unbind(dim)
    else:
        q, k, v = (tensors[name] for name in "qkv")
    return q, k, v


def sequences(call: Call, tensors: dict[str, Tensor]) -> Iterator[Sequence]:
    q, k, v = split(call, tensors)
    if call.is_varlen:
        m, n = call.edges("q"), call.edges("k")
        stored = [(q[m[b] : m[b + 1]], k[n[b] : n[b + 1]], v[n[b] : n[b + 1]])
                  for b in range(len(m) - 1)]  # fmt: skip
    else:
        stored = list(zip(q, k, v, strict=True))
    slopes, sinks = (tensors.get(name) for name in LEARNED)
    for b, parts in enumerate(stored):
        own = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        yield Sequence(call, b, *(x.transpose(0, 1) for x in parts), own, sinks)


def formula(call: Call, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` by the definition, in the dtype of the tensors."""
    outs, lses = zip(*(s.attend() for s in sequences(call, tensors)), strict=True)
    if not call.is_varlen:
        return torch.stack(outs), torch.stack(lses)
    out, lse = torch.cat(outs), torch.cat(lses, -1)
    slack = split(call, tensors)[0].shape[0] - out.shape[0]
    out = torch.cat([out, out.new_zeros(slack, *out.shape[1:])])
    return out, torch.cat([lse, lse.new_full((lse.shape[0], slack), float("-inf"))], -1)
