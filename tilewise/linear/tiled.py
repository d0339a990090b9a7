"""The chunk form in plain torch, any device: products of matrices within a chunk, a state between.

Math, in a chunk of C steps that begins with state S (gated delta rule, arXiv 2412.06464, and Kimi
    Delta Attention, arXiv 2510.26692; without beta it is gated linear attention, arXiv 2312.06635):
    M_ij = k_i . (k_j e^{g_{j+1} + ... + g_i}),    A = strictly lower part of beta_i M_ij
    w, u = (I + A)^-1 [beta k e^{g_1 + ... + g_i}, beta v],    d = u - w S    (d = v without beta)
    o = scale (q e^{g_1 + ... + g_i}) S + (scale times the same as M, of q and k) d
    S' = e^{g_1 + ... + g_C} S + (k e^{g_{j+1} + ... + g_C})^T d
Sums of gates are taken over the steps between two, never as a difference of sums from the chunk's
    start: no exponent is above 0 where no gate is, strong gates cost no accuracy, and the gradient
    of a gate is a sum of what passed it, not a difference of two sums that nearly cancel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.shapes import accumulator_of
from .chunks import Chunks
from .inputs import Inputs

# Within so many steps a vector of gates is applied pair by pair; between blocks, by a product.
BLOCK = 16
_LARGEST = 80.0


def linear_tiled(inputs: Inputs, size: int) -> tuple[Tensor, Tensor]:
    """`(out, final_state)`; differentiable by autograd, in memory linear in length.

    size: of a chunk. In chunks of one step it is the recurrent form.
    """
    wide = accumulator_of(inputs.q.dtype)
    chunks = Chunks(inputs.q.shape[-3], size, inputs.cu_seqlens)
    chunk = _prepare(inputs, chunks, wide)
    state, initial = inputs.state_or_zeros(), inputs.state_or_zeros()
    outs: list[Tensor] = []
    states: list[Tensor] = []
    for i in range(chunks.n_chunks):
        if chunks.table is not None:
            at = chunks.table.sequence[i : i + 1]
            begins = chunks.table.number[i : i + 1].eq(0).view(1, 1, 1, 1)
            before = states[-1] if states else torch.zeros_like(initial[:1])
            state = torch.where(begins, initial.index_select(0, at), before)
        d = chunk.u[i] if chunk.w is None else chunk.u[i] - chunk.w[i] @ state
        outs.append(chunk.q[i] @ state + chunk.scores[i] @ d)
        kept = state if chunk.decay is None else chunk.decay[i] * state
        state = kept + chunk.k[i].transpose(-1, -2) @ d
        states.append(state)
    if not outs:
        return inputs.v.clone(), initial.clone()
    out = chunks.join(torch.stack(outs, 1).transpose(2, 3)).to(inputs.q.dtype)
    if chunks.table is not None:
        last = (chunks.table.first_slot + chunks.table.chunks - 1).clamp(min=0)
        has_tokens = chunks.table.chunks.gt(0).view(-1, 1, 1, 1)
        state = torch.where(has_tokens, torch.cat(states)[last], initial)
    return out, state


class _Prepared(NamedTuple):
    """What each chunk brings to the pass over states: lists by chunk of `[R, H, C, ...]`.

    q: scaled and decayed from the chunk's start. k: decayed to its end. scores: of q and k, scaled.
    w, u: of the delta rule; u is v and w None without. decay: of the whole chunk.
    """

    q: tuple[Tensor, ...]
    k: tuple[Tensor, ...]
    scores: tuple[Tensor, ...]
    u: tuple[Tensor, ...]
    w: tuple[Tensor, ...] | None
    decay: tuple[Tensor, ...] | None


def _prepare(inputs: Inputs, chunks: Chunks, wide: torch.dtype) -> _Prepared:
    def cut(x: Tensor) -> Tensor:
        # [R, N, H, C, ...]
        return chunks.cut(x).transpose(2, 3).to(wide)

    q, k = (cut(inputs.by_value_head(x)) for x in (inputs.q, inputs.k))
    v = cut(inputs.v)
    q = q * inputs.scale
    g = None if inputs.g is None else cut(inputs.g)
    if g is not None and not inputs.has_vector_gate:
        g = g.unsqueeze(-1)
    reached = left = None
    if g is not None:
        reached = _decay(g.cumsum(-2))
        left = _decay(_sum_after(g))
    u, w = v, None
    if inputs.beta is not None:
        beta = cut(inputs.beta).unsqueeze(-1)
        a = (beta * pair_scores(k, k, g)).tril(-1)
        k_beta = beta * (k if reached is None else k * reached)
        both = torch.cat([beta * v, k_beta], -1)
        solved = torch.linalg.solve_triangular(a, both, upper=False, unitriangular=True)
        u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    return _Prepared(
        (q if reached is None else q * reached).unbind(1),
        (k if left is None else k * left).unbind(1),
        pair_scores(q, k, g).unbind(1),
        u.unbind(1),
        None if w is None else w.unbind(1),
        None if reached is None else reached[..., -1, :].unsqueeze(-1).unbind(1),
    )


def pair_scores(a: Tensor, b: Tensor, g: Tensor | None) -> Tensor:
    """`a_i . (b_j e^{g_{j+1} + ... + g_i})` for j <= i, 0 elsewhere: `[..., C, C]`.

    a, b: `[..., C, D]`. g: `[..., C, 1]` or `[..., C, D]`.
    """
    if g is None:
        return (a @ b.transpose(-1, -2)).tril()
    if g.shape[-1] == 1:
        return a @ b.transpose(-1, -2) * _decay(_sums_between(g)).squeeze(-1)
    rows = []
    for start in range(0, a.shape[-2], BLOCK):
        stop = min(start + BLOCK, a.shape[-2])
        a_i, g_i, b_i = a[..., start:stop, :], g[..., start:stop, :], b[..., start:stop, :]
        pairs = _decay(_sums_between(g_i)) * a_i.unsqueeze(-2) * b_i.unsqueeze(-3)
        row = [pairs.sum(-1), a.new_zeros(*a.shape[:-2], stop - start, a.shape[-2] - stop)]
        if start:
            # Through the block's first step: from it to row i, and to it from column j.
            after_first = torch.cat([torch.zeros_like(g_i[..., :1, :]), g_i[..., 1:, :]], -2)
            a_i = a_i * _decay(after_first.cumsum(-2))
            to_first = _sum_after(g[..., : start + 1, :])[..., :start, :]
            b_j = b[..., :start, :] * _decay(to_first)
            row.insert(0, a_i @ b_j.transpose(-1, -2))
        rows.append(torch.cat(row, -1))
    return torch.cat(rows, -2)


def _decay(exponent: Tensor) -> Tensor:
    """Growth stops short of inf, which would make NaN of a state of 0."""
    return exponent.clamp(max=_LARGEST).exp()


def _sums_between(g: Tensor) -> Tensor:
    """`g_{j+1} + ... + g_i` at `[..., i, j, :]`, -inf for j > i. g: `[..., C, D]`."""
    C = g.shape[-2]
    ones = torch.ones(C, C, dtype=torch.bool, device=g.device)
    later = ones.tril(-1).unsqueeze(-1)
    sums = torch.where(later, g.unsqueeze(-2), 0.0).cumsum(-3)
    return sums.masked_fill(~ones.tril().unsqueeze(-1), -torch.inf)


def _sum_after(g: Tensor) -> Tensor:
    """`g_{j+1} + ... + g_C` at j. g: `[..., C, D]`."""
    later = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return later.flip(-2).cumsum(-2).flip(-2)
