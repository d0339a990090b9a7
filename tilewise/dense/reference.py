"""Attention as its formula: the fp64 oracle and the eager form that the error budget compares.

Dims: B batch, M queries, N keys, H query heads, G kv heads, D q/k dim, E value dim.
Math: S = scale q k^T, capped by c tanh(S / c), plus bias and ALiBi, masked;
    lse = log(sum_n exp S + exp sink); P = exp(S - lse), dropped; O = P v.
Everything is plain torch and differentiable any number of times; memory is O(M N).

`attention_reference` isolates what a query may not see even where it is NaN or Inf, element by
element; the tiled backends do so tile by tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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


def merge_reference(partials: Sequence[tuple[Tensor, Tensor]]) -> Partial:
    """The merge of partials by its definition, in fp64."""
    lses = torch.stack([lse.to(torch.float64) for _, lse in partials])
    lse = torch.logsumexp(lses, dim=0)
    is_empty = lse.isneginf()
    shares = torch.exp(lses - torch.where(is_empty, 0.0, lse)).transpose(-1, -2).unsqueeze(-1)
    outs = torch.stack([out.to(torch.float64) for out, _ in partials])
    return Partial((shares * outs).sum(0), lse)


def _all_sequences(piece: Piece) -> Partial:
    q, k, v, at = piece.q, piece.k, piece.v, piece.positions
    if not at.is_packed:
        parts = [_one_sequence(piece, b, q[b], k[b], v[b]) for b in range(at.B)]
        if not parts:
            empty_lse = q.new_zeros(0, at.H, at.M, dtype=piece.accumulator)
            return Partial(q.new_zeros(0, at.M, at.H, v.shape[-1]), empty_lse)
        return Partial(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    assert at.cu_seqlens_q is not None and at.cu_seqlens_k is not None
    cu_q, cu_k = at.cu_seqlens_q.tolist(), at.cu_seqlens_k.tolist()
    parts = [
        _one_sequence(
            piece,
            b,
            q[cu_q[b] : cu_q[b + 1]],
            k[cu_k[b] : cu_k[b + 1]],
            v[cu_k[b] : cu_k[b + 1]],
        )
        for b in range(at.B)
    ]
    tail = at.M - cu_q[-1]
    outs = [*(p.out for p in parts), q.new_zeros(tail, at.H, v.shape[-1])]
    unowned = q.new_full((at.H, tail), float("-inf"), dtype=piece.accumulator)
    return Partial(torch.cat(outs), torch.cat([*(p.lse for p in parts), unowned], dim=-1))


def _one_sequence(piece: Piece, b: int, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """One batch row or document: q `[M, H, D]` -> out `[M, H, E]`, lse `[H, M]`."""
    at, terms, H = piece.positions, piece.terms, q.shape[1]
    M, statistics = q.shape[0], piece.accumulator
    used_q = M if at.seqused_q is None else int(at.seqused_q[b])
    used_k = k.shape[0] if at.seqused_k is None else int(at.seqused_k[b])
    q, k, v = q[:used_q], k[:used_k], v[:used_k]
    offset = 0 if at.is_piece else used_k - used_q
    q_start, k_start = (_start(x, b) for x in (at.q_start, at.k_start))
    visible = piece.mask.dense(
        1,
        H,
        used_q,
        used_k,
        offset=offset,
        batch_index=torch.tensor([b]),
        q_start=q_start,
        k_start=k_start,
        device=q.device,
    )[0]
    i = torch.arange(q_start, q_start + used_q, device=q.device).reshape(1, -1, 1)
    j = torch.arange(k_start, k_start + used_k, device=q.device).reshape(1, 1, -1)

    # [H, M, D]; what no row sees is cut off before it can spread as 0 * NaN.
    qh = _hide(q.transpose(0, 1), visible.any(-1))
    kh, vh = (x.transpose(0, 1).repeat_interleave(piece.group, dim=0) for x in (k, v))
    kh, vh = _hide(kh, visible.any(-2)), _hide(vh, visible.any(-2))

    scores = _product(qh, kh, visible).to(statistics) * terms.scale
    scores = _add_terms(scores, terms, b, i + offset - j)
    scores = scores.masked_fill(~visible, float("-inf"))
    logits = scores
    if terms.sinks is not None:
        sink = terms.sinks.to(statistics).reshape(-1, 1, 1).expand(H, used_q, 1)
        logits = torch.cat([scores, sink], dim=-1)
    lse = _logsumexp(logits)
    is_empty = lse.isneginf().unsqueeze(-1)
    # Where nothing is visible every score is -inf; the difference is masked before exp.
    gap = torch.where(visible, scores - torch.where(is_empty, 0.0, lse.unsqueeze(-1)), 0.0)
    p = torch.where(visible, torch.exp(gap), 0.0)
    if terms.dropout_p > 0.0:
        assert terms.rng is not None
        row = b * H + torch.arange(H, device=q.device).reshape(-1, 1, 1)
        keep = keep_mask(terms.rng, terms.dropout_p, row, i, j)
        p = torch.where(keep, p / (1.0 - terms.dropout_p), 0.0)
    out = _weighted_sum(p.to(q.dtype), vh, visible).transpose(0, 1)
    pad = M - used_q
    if pad:
        out = torch.cat([out, out.new_zeros(pad, *out.shape[1:])])
        lse = torch.cat([lse, lse.new_full((H, pad), float("-inf"))], dim=-1)
    return Partial(out, lse)


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


def _logsumexp(logits: Tensor) -> Tensor:
    """logsumexp over the last dim: `-inf` with gradient 0 where all are `-inf` or there is none."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], float("-inf")) + 0.0 * logits.sum(-1)
    top = logits.detach().amax(-1, keepdim=True)
    top = torch.where(top.isneginf(), 0.0, top)
    total = torch.exp(logits - top).sum(-1)
    is_empty = total == 0
    log = torch.log(torch.where(is_empty, 1.0, total)) + top.squeeze(-1)
    return torch.where(is_empty, float("-inf"), log)
