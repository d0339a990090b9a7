"""Attention as its formula: the fp64 oracle and the eager form that the error budget compares.

Dims: B batch, M queries, N keys, H query heads, G kv heads, D q/k dim, E value dim.
Math: S = scale q k^T, capped by c tanh(S / c), plus bias and ALiBi, masked;
    lse = log(sum_n exp S + exp sink); P = exp(S - lse), dropped; O = P v.
Everything is plain torch and differentiable any number of times; memory is O(M N).

`attention_reference` isolates what a query may not see even where it is NaN or Inf, element by
element; the tiled backends do so tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.partials import Partial
from ..core.philox import keep_mask
from .piece import Piece, Terms


def attention_reference(piece: Piece) -> Partial:
    """The exact `Partial(out, lse)` in fp64, dense or packed."""
    q, k, v = (x.to(torch.float64) for x in (piece.q, piece.k, piece.v))
    return _all_sequences(replace(piece, q=q, k=k, v=v))


def attention_eager(piece: Piece) -> Partial:
    """The same formula with products in the input dtype and fp32 in between: what eager PyTorch
    models run, and the measure of the error budget."""
    return _all_sequences(piece)


def merge_reference(partials: list[Partial]) -> Partial:
    """The merge of partials by its definition, in fp64."""
    lses = torch.stack([lse.to(torch.float64) for _, lse in partials])
    lse = logsumexp(lses.movedim(0, -1))
    shares = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse))
    shares = shares.transpose(-1, -2).unsqueeze(-1)
    outs = torch.stack([out.to(torch.float64) for out, _ in partials])
    return Partial((shares * outs).sum(0), lse)


@dataclass(frozen=True)
class Sequence:
    """One batch row or document: q `[M, H, D]`, k `[N, G, D]`, v `[N, G, E]`, used rows only."""

    piece: Piece
    b: int
    q: Tensor
    k: Tensor
    v: Tensor
    stored_q: int

    @property
    def starts(self) -> tuple[int, int]:
        at = self.piece.positions
        return _start(at.q_start, self.b), _start(at.k_start, self.b)

    @property
    def offset(self) -> int:
        return 0 if self.piece.positions.is_piece else self.k.shape[0] - self.q.shape[0]

    @property
    def indices(self) -> tuple[Tensor, Tensor]:
        """i `[1, M, 1]` and j `[1, 1, N]`."""
        (q_start, k_start), device = self.starts, self.q.device
        i = torch.arange(q_start, q_start + self.q.shape[0], device=device)
        j = torch.arange(k_start, k_start + self.k.shape[0], device=device)
        return i.reshape(1, -1, 1), j.reshape(1, 1, -1)

    def visible(self) -> Tensor:
        """The mask, bool `[H, M, N]`."""
        (q_start, k_start), (M, H), N = self.starts, self.q.shape[:2], self.k.shape[0]
        return self.piece.mask.dense(
            1,
            H,
            M,
            N,
            offset=self.offset,
            batch_index=torch.tensor([self.b]),
            q_start=q_start,
            k_start=k_start,
            device=self.q.device,
        )[0]

    def heads(self, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as `[H, L, X]`; what nobody sees is cut off before it spreads as 0 * NaN."""
        k, v = (
            x.transpose(0, 1).repeat_interleave(self.piece.group, dim=0) for x in (self.k, self.v)
        )
        q, seen = self.q.transpose(0, 1), visible.any(-2)
        return _hide(q, visible.any(-1)), _hide(k, seen), _hide(v, seen)


def sequences(piece: Piece) -> list[Sequence]:
    """The batch rows or documents of a piece, each by itself."""
    at = piece.positions
    if at.is_packed:
        assert at.cu_seqlens_q is not None and at.cu_seqlens_k is not None
        m, n = at.cu_seqlens_q.tolist(), at.cu_seqlens_k.tolist()
        stored = [
            (piece.q[m[b] : m[b + 1]], piece.k[n[b] : n[b + 1]], piece.v[n[b] : n[b + 1]])
            for b in range(at.B)
        ]
    else:
        stored = [(piece.q[b], piece.k[b], piece.v[b]) for b in range(at.B)]
    found = []
    for b, (q, k, v) in enumerate(stored):
        used_q = q.shape[0] if at.seqused_q is None else int(at.seqused_q[b])
        used_k = k.shape[0] if at.seqused_k is None else int(at.seqused_k[b])
        found.append(Sequence(piece, b, q[:used_q], k[:used_k], v[:used_k], q.shape[0]))
    return found


def _all_sequences(piece: Piece) -> Partial:
    at, E, lse_dtype = piece.positions, piece.v.shape[-1], piece.accumulator
    parts = [_one_sequence(sequence) for sequence in sequences(piece)]
    # 0, and a function of the inputs even where there is no sequence.
    anchor = sum(x[:0].sum() for x in (piece.q, piece.k, piece.v))
    if at.is_packed:
        owned = sum(p.out.shape[0] for p in parts)
        tail = piece.q.new_zeros(at.M - owned, at.H, E) + anchor
        no_keys = piece.q.new_full((at.H, at.M - owned), float("-inf"), dtype=lse_dtype)
        lses = [*(p.lse for p in parts), no_keys]
        return Partial(torch.cat([*(p.out for p in parts), tail]), torch.cat(lses, dim=-1))
    if not parts:
        no_rows = piece.q.new_zeros(0, at.H, at.M, dtype=lse_dtype)
        return Partial(piece.q.new_zeros(0, at.M, at.H, E) + anchor, no_rows + anchor)
    return Partial(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))


def _one_sequence(sequence: Sequence) -> Partial:
    """out `[M, H, E]`, lse `[H, M]`, stored rows that are not in use included."""
    terms, H = sequence.piece.terms, sequence.q.shape[1]
    visible = sequence.visible()
    q, k, v = sequence.heads(visible)
    p, lse = softmax(sequence, q, k, visible)
    if terms.dropout_p > 0.0:
        assert terms.rng is not None
        row = sequence.b * H + torch.arange(H, device=q.device).reshape(-1, 1, 1)
        keep = keep_mask(terms.rng, terms.dropout_p, row, *sequence.indices)
        p = torch.where(keep, p / (1.0 - terms.dropout_p), 0.0)
    out = _hide(_weighted_sum(p.to(q.dtype), v, visible), visible.any(-1)).transpose(0, 1)
    pad = sequence.stored_q - sequence.q.shape[0]
    if pad:
        out = torch.cat([out, out.new_zeros(pad, *out.shape[1:])])
        lse = torch.cat([lse, lse.new_full((H, pad), float("-inf"))], dim=-1)
    return Partial(out, lse)


def softmax(sequence: Sequence, q: Tensor, k: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities `[H, M, N]` before dropout, and lse `[H, M]`."""
    piece = sequence.piece
    terms, dtype = piece.terms, piece.accumulator
    scores = _product(q, k, visible).to(dtype) * terms.scale
    i, j = sequence.indices
    scores = _add_terms(scores, terms, sequence.b, i + sequence.offset - j)
    scores = scores.masked_fill(~visible, float("-inf"))
    logits = scores
    if terms.sinks is not None:
        sink = terms.sinks.to(dtype).reshape(-1, 1, 1).expand(*scores.shape[:2], 1)
        logits = torch.cat([scores, sink], dim=-1)
    lse = logsumexp(logits)
    # exp(S - max) / sum, not exp(S - lse): lse cannot hold log N beside the largest of numbers.
    top = logits.detach().amax(-1, keepdim=True) if logits.shape[-1] else logits.sum(-1, True)
    gap = torch.where(visible, scores - torch.where(top.isneginf(), 0.0, top), float("-inf"))
    weights = torch.exp(gap)
    total = weights.sum(-1, keepdim=True)
    if terms.sinks is not None:
        total = total + torch.exp(sink - torch.where(top.isneginf(), 0.0, top))
    return weights / torch.where(total == 0, 1.0, total), lse


def _start(start: int | Tensor | None, b: int) -> int:
    return int(start[b]) if isinstance(start, Tensor) else start or 0


def _add_terms(scores: Tensor, terms: Terms, b: int, distance: Tensor) -> Tensor:
    """Softcap, bias and ALiBi on `[H, M, N]` scores; bias is read from its first row and column."""
    if terms.softcap is not None:
        scores = terms.softcap * torch.tanh(scores / terms.softcap)
    if terms.bias is not None:
        bias = terms.bias[b if terms.bias.shape[0] > 1 else 0].to(scores.dtype)
        scores = scores + bias[:, : scores.shape[1], : scores.shape[2]]
    if terms.alibi_slopes is not None:
        slopes = terms.alibi_slopes.to(scores.dtype)
        slopes = slopes[b] if slopes.dim() == 2 else slopes
        scores = scores - slopes.reshape(-1, 1, 1) * distance.abs()
    return scores


def _hide(x: Tensor, seen: Tensor) -> Tensor:
    """Rows of `x` `[H, L, D]` that nobody sees become 0, with gradient 0."""
    return torch.where(seen.unsqueeze(-1), x, torch.zeros((), dtype=x.dtype, device=x.device))


def _product(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """q k^T; element by element where a key that only some rows see is not finite."""
    if bool(torch.isfinite(k).all()) and bool(torch.isfinite(q).all()):
        return q @ k.transpose(-1, -2)
    pair = visible.unsqueeze(-1)
    return (torch.where(pair, q.unsqueeze(2), 0.0) * torch.where(pair, k.unsqueeze(1), 0.0)).sum(-1)


def _weighted_sum(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """p v, with the same isolation."""
    if bool(torch.isfinite(v).all()):
        return p @ v
    return (p.unsqueeze(-1) * torch.where(visible.unsqueeze(-1), v.unsqueeze(1), 0.0)).sum(2)


def logsumexp(logits: Tensor) -> Tensor:
    """logsumexp over the last dim: `-inf` with gradient 0 where all are `-inf` or there is none."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], float("-inf")) + 0.0 * logits.sum(-1)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    total = torch.exp(logits - top).sum(-1)
    is_empty = total == 0
    log = torch.log(torch.where(is_empty, 1.0, total)) + top.squeeze(-1)
    return torch.where(is_empty, float("-inf"), log)
