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

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.partials import Partial
from ..core.philox import keep_mask
from ..core.positions import Positions
from .terms import Terms


def attention_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: Positions, terms: Terms
) -> Partial:
    """The exact `Partial(out, lse)` in fp64, dense or packed as `positions` says."""
    q, k, v = (x.to(torch.float64) for x in (q, k, v))
    return _dense_or_packed(q, k, v, mask, positions, terms, torch.float64)


def attention_eager(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: Positions, terms: Terms
) -> Partial:
    """The same formula with products in the input dtype and fp32 in between: what eager PyTorch
    models run, and the measure of the error budget."""
    return _dense_or_packed(q, k, v, mask, positions, terms, q.dtype)


def merge_reference(partials: Sequence[tuple[Tensor, Tensor]]) -> Partial:
    """The merge of partials by its definition, in fp64."""
    lses = torch.stack([lse.to(torch.float64) for _, lse in partials])
    lse = torch.logsumexp(lses, dim=0)
    is_empty = lse.isneginf()
    shares = torch.exp(lses - torch.where(is_empty, 0.0, lse)).transpose(-1, -2).unsqueeze(-1)
    outs = torch.stack([out.to(torch.float64) for out, _ in partials])
    return Partial((shares * outs).sum(0), lse)


def _dense_or_packed(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, at: Positions, terms: Terms, dtype: torch.dtype
) -> Partial:
    if not at.is_packed:
        rows = [
            _one_sequence(q[b], k[b], v[b], b, at.M, at.N, mask, at, terms, dtype)
            for b in range(at.B)
        ]
        if not rows:
            empty = q.new_zeros(0, at.M, at.H, v.shape[-1])
            return Partial(empty, q.new_zeros(0, at.H, at.M, dtype=_statistics_dtype(dtype)))
        return Partial(torch.stack([r.out for r in rows]), torch.stack([r.lse for r in rows]))
    assert at.cu_seqlens_q is not None and at.cu_seqlens_k is not None
    outs, lses = [], []
    cu_q, cu_k = at.cu_seqlens_q.tolist(), at.cu_seqlens_k.tolist()
    for b in range(at.B):
        m, n = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        lengths = (m.stop - m.start, n.stop - n.start)
        part = _one_sequence(q[m], k[n], v[n], b, *lengths, mask, at, terms, dtype)
        outs.append(part.out)
        lses.append(part.lse)
    tail = at.M - cu_q[-1]
    outs.append(q.new_zeros(tail, at.H, v.shape[-1]))
    lses.append(q.new_full((at.H, tail), float("-inf"), dtype=_statistics_dtype(dtype)))
    return Partial(torch.cat(outs), torch.cat(lses, dim=-1))


def _statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _one_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: int,
    M: int,
    N: int,
    mask: Mask,
    at: Positions,
    terms: Terms,
    dtype: torch.dtype,
) -> Partial:
    """One batch row or document: q `[M, H, D]` -> out `[M, H, E]`, lse `[H, M]`."""
    used_q = M if at.seqused_q is None else int(at.seqused_q[b])
    used_k = N if at.seqused_k is None else int(at.seqused_k[b])
    q, k, v = q[:used_q], k[:used_k], v[:used_k]
    offset = 0 if at.is_piece else used_k - used_q
    q_start, k_start = (_start(x, b) for x in (at.q_start, at.k_start))
    visible = mask.dense(
        1,
        at.H,
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
    repeat = at.H // k.shape[1]
    kh = k.transpose(0, 1).repeat_interleave(repeat, dim=0)
    vh = v.transpose(0, 1).repeat_interleave(repeat, dim=0)
    kh, vh = _hide(kh, visible.any(-2)), _hide(vh, visible.any(-2))

    statistics = _statistics_dtype(dtype)
    scores = _product(qh, kh, visible).to(statistics) * terms.scale
    scores = _add_terms(scores, terms, b, i + offset - j)
    scores = scores.masked_fill(~visible, float("-inf"))
    logits = scores
    if terms.sinks is not None:
        sink = terms.sinks.to(statistics).reshape(-1, 1, 1).expand(at.H, used_q, 1)
        logits = torch.cat([scores, sink], dim=-1)
    lse = _logsumexp(logits)
    is_empty = lse.isneginf().unsqueeze(-1)
    # Where nothing is visible every score is -inf; the difference is masked before exp.
    gap = torch.where(visible, scores - torch.where(is_empty, 0.0, lse.unsqueeze(-1)), 0.0)
    p = torch.where(visible, torch.exp(gap), 0.0)
    if terms.dropout_p > 0.0:
        assert terms.rng is not None
        row = b * at.H + torch.arange(at.H, device=q.device).reshape(-1, 1, 1)
        keep = keep_mask(terms.rng, terms.dropout_p, row, i, j)
        p = torch.where(keep, p / (1.0 - terms.dropout_p), 0.0)
    out = _weighted_sum(p.to(dtype), vh, visible).transpose(0, 1)
    pad = M - used_q
    if pad:
        out = torch.cat([out, out.new_zeros(pad, *out.shape[1:])])
        lse = torch.cat([lse, lse.new_full((at.H, pad), float("-inf"))], dim=-1)
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
