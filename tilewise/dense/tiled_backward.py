"""Backward of the tiled backend: P is recomputed from the LSE, tile by tile, O(N) memory.

Dims: as in `tiled.py`.
Math: FlashAttention-2 (arXiv 2307.08691), algorithm 2, with the gradient of the LSE:
    delta = rowsum(dO * O) - dLSE;  P = exp(S - lse);  dV += P^T dO;  dP = dO V^T;
    dS = P (dP - delta);  dQ += scale dS K;  dK += scale dS^T Q;  dsink = -exp(sink - lse) delta.
    A softcap c multiplies dS by 1 - tanh(s / c)^2 on its way to dQ and dK.
Query tiles are taken in order, one after the other, so every sum has one order: deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tiles import RowPlan
from . import torch_flash
from .piece import Piece, Result, Terms
from .tiled import ScoreTile, Tile, Units, Visibility, Workspace, cut, full_precision


@dataclass
class Gradients:
    """Buffers that the backward adds into, in the accumulator's dtype, shaped as their inputs.

    None where a gradient is not wanted.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dslopes: Tensor | None = None
    dsinks: Tensor | None = None


def attention_gradients(
    piece: Piece,
    upstream: tuple[Tensor, Tensor | None],
    result: Result,
    wanted: list[bool],
    *,
    hands_over: bool,
) -> list[Tensor]:
    """Gradients of q, k, v, bias, slopes and sinks, in their dtypes; empty where not wanted.

    Args:
        upstream: dout `[B, M, H, E]`, and dlse `[B, H, M]` or None. result: of the forward.
        wanted: whether bias, slopes and sinks need one. hands_over: as in the forward.
    """
    (dout, dlse), terms, dtype = upstream, piece.terms, piece.accumulator
    out, lse, remainder = result
    is_plain = dlse is None and remainder is None
    if hands_over and is_plain and torch_flash.is_same_piece(piece, out.dtype):
        with full_precision():
            dq, dk, dv = torch_flash.backward(piece, dout, out, lse)
        return [dq, dk, dv, *(lse.new_empty(0) for _ in wanted)]
    out = out.to(dtype) if remainder is None else out.to(dtype) + remainder
    delta = row_deltas(out, dout, dlse)
    sources = [piece.q, piece.k, piece.v]
    extras = (terms.bias, terms.alibi_slopes, terms.sinks)
    sources += [x for x, want in zip(extras, wanted, strict=True) if want and x is not None]
    buffers = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in sources]
    own = iter(buffers[3:])
    gradients = Gradients(*buffers[:3], *(next(own) if want else None for want in wanted))
    attention_bwd(piece, dout, lse, delta, gradients, owns_lse=True)
    cast = [buffer.to(x.dtype) for buffer, x in zip(buffers, sources, strict=True)]
    own = iter(cast[3:])
    return [*cast[:3], *(next(own) if want else lse.new_empty(0) for want in wanted)]


def row_deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta = rowsum(dO * O) - dLSE, `[B, H, M]`, of out in the accumulator's dtype."""
    # An out of 0 adds nothing: an empty row is all 0, and its dO may be anything. Nor does a dO of
    # 0: an out that is too large for its dtype is inf, and what rounding took off it is -inf.
    products = torch.where((out == 0) | (dout == 0), 0.0, dout.to(out.dtype) * out)
    delta = products.sum(-1).transpose(1, 2)
    return delta if dlse is None else delta - dlse


def attention_bwd(
    piece: Piece,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    gradients: Gradients,
    *,
    owns_lse: bool = False,
) -> None:
    """Add every gradient of one piece into `gradients`.

    Args:
        dout: `[B, M, H, E]`.
        lse, delta: `[B, H, M]`, those of the whole softmax, which may hold more keys than k.
        owns_lse: the softmax is over these keys alone.
    """
    space = Workspace(piece)
    with full_precision():
        for tile in cut(piece):
            _backward_tile(piece, tile, space, dout, lse, delta, gradients, owns_lse=owns_lse)


def _backward_tile(
    piece: Piece,
    tile: Tile,
    space: Workspace,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    gradients: Gradients,
    *,
    owns_lse: bool,
) -> None:
    terms, dtype, units = piece.terms, piece.accumulator, Units.of(piece.terms)
    plan = space.plan(tile)
    score = ScoreTile(tile, plan.rows, piece, space)
    q_tile, do_tile = tile.load_rows(piece.q, dtype), tile.load_rows(dout, dtype)
    row_lse = tile.load_statistics(lse).to(dtype)
    is_empty = row_lse.isneginf()
    # The shift of an empty row is free: its scores are all -inf.
    shift = torch.where(is_empty, 0.0, row_lse * units.per_nat).unsqueeze(-1)
    lost = None
    if owns_lse and _may_have_lost_a_sum(terms, row_lse):
        lost = _lost_sum(score, plan, q_tile, shift)
    row_delta = torch.where(is_empty, 0.0, tile.load_statistics(delta).to(dtype)).unsqueeze(-1)
    if gradients.dsinks is not None:
        _add_sink_gradient(tile, terms, row_lse, row_delta, lost, gradients.dsinks)
    dq = space.take("dq", *q_tile.shape).zero_()
    for n0, n1, is_full in plan.ranges:
        k_tile, v_tile = (tile.load_keys(x, n0, n1, dtype) for x in (piece.k, piece.v))
        q_seen, do_seen, visibility = q_tile, do_tile, None
        if not is_full:
            visibility = Visibility.of(plan, tile, n0, n1)
            k_tile, v_tile = visibility.clean_keys(k_tile), visibility.clean_keys(v_tile)
            q_seen, do_seen = visibility.clean_rows(q_tile), visibility.clean_rows(do_tile)
        capped = None
        if terms.softcap is not None:
            capped = space.take("capped", *q_tile.shape[:2], n1 - n0)
        s = score.scores(q_seen, k_tile, n0, n1, capped=capped)
        if visibility is not None:
            visibility.hide(s, tile, float("-inf"))
        p = units.exp(s.sub_(shift), out=s)
        if lost is not None:
            p.div_(lost)
        dp = space.take("dp", *p.shape)
        torch.bmm(do_seen, v_tile.transpose(1, 2), out=dp)
        kept = p
        if terms.dropout_p > 0.0:
            keep = score.keep(n0, n1).to(dtype).mul_(1.0 / (1.0 - terms.dropout_p))
            kept = space.take("kept", *p.shape)
            torch.mul(p.view(*tile.shape, -1), keep, out=kept.view(*tile.shape, -1))
            dp.view(*tile.shape, -1).mul_(keep)
        dv = space.take("dv", *v_tile.shape)
        tile.add_keys(torch.bmm(kept.transpose(1, 2), do_seen, out=dv), gradients.dv, n0, n1)
        ds = dp.sub_(row_delta).mul_(p)
        if visibility is not None:
            # P is 0 there, but delta of a row that nobody owns may be NaN.
            visibility.hide(ds, tile, 0.0)
        _add_term_gradients(score, ds, n0, n1, gradients)
        if capped is not None:
            ds.sub_(capped.square_().mul_(ds))
        torch.baddbmm(dq, ds, k_tile, alpha=terms.scale, out=dq)
        dk = space.take("dk", *k_tile.shape)
        torch.bmm(ds.transpose(1, 2), q_seen, out=dk)
        tile.add_keys(dk.mul_(terms.scale), gradients.dk, n0, n1)
    tile.add_rows(dq, gradients.dq)


# From here on an fp32 lse keeps the log of a row's sum to less than 1e-3.
_LARGE_LSE = float(1 << 13)


def _may_have_lost_a_sum(terms: Terms, row_lse: Tensor) -> bool:
    """Whether some row's lse is too large to hold the log of its sum beside its maximum.

    A row whose bias is the dtype's most negative number has lse = maximum, and exp(S - lse) is 1
    for each of its keys. Off the CPU a look would be a synchronisation, so a bias is enough there.
    """
    if row_lse.device.type != "cpu":
        return terms.bias is not None
    return bool((row_lse.isfinite() & (row_lse.abs() > _LARGE_LSE)).any())


def _lost_sum(score: ScoreTile, plan: RowPlan, q_tile: Tensor, shift: Tensor) -> Tensor:
    """What P = exp(S - lse) adds up to, `[L, r m, 1]`; 1 where lse lost nothing, or for no key."""
    tile, terms, units = score.tile, score.terms, Units.of(score.terms)
    total = torch.zeros_like(shift)
    for n0, n1, is_full in plan.ranges:
        k_tile = tile.load_keys(score.piece.k, n0, n1, q_tile.dtype)
        s = score.scores(q_tile, k_tile, n0, n1)
        if not is_full:
            Visibility.of(plan, tile, n0, n1).hide(s, tile, float("-inf"))
        total += units.exp(s.sub_(shift), out=s).sum(-1, keepdim=True)
    if terms.sinks is not None:
        total += _sink_probability(tile, terms, shift / units.per_nat).reshape(total.shape)
    return torch.where(total > 0, total, 1.0)


def _sink_probability(tile: Tile, terms: Terms, row_lse: Tensor) -> Tensor:
    """exp(sink - lse) of the rows, `tile.shape`; 0 for rows with nothing to see and no owner."""
    assert terms.sinks is not None
    lse = row_lse.view(tile.shape)
    sink = terms.sinks[slice(*tile.heads)].to(lse.dtype).reshape(1, -1, 1)
    return torch.where(lse.isneginf(), 0.0, torch.exp(sink - lse))


def _add_sink_gradient(
    tile: Tile,
    terms: Terms,
    row_lse: Tensor,
    row_delta: Tensor,
    lost: Tensor | None,
    dsinks: Tensor,
) -> None:
    p_sink = _sink_probability(tile, terms, row_lse)
    if lost is not None:
        p_sink = p_sink / lost.view(tile.shape)
    dsinks[slice(*tile.heads)] -= (p_sink * row_delta.view(tile.shape)).sum((0, 2))


def _add_term_gradients(
    score: ScoreTile, ds: Tensor, n0: int, n1: int, gradients: Gradients
) -> None:
    """dS is the gradient of what bias and ALiBi were added to."""
    ds = ds.view(*score.tile.shape, n1 - n0)
    if gradients.dbias is not None:
        _add_bias_gradient(score, ds, n0, n1, gradients.dbias)
    if gradients.dslopes is not None:
        per_row = (ds * score.rows.key_distance(n0, n1)).sum(-1)
        heads = slice(*score.tile.heads)
        if gradients.dslopes.dim() == 1:
            gradients.dslopes[heads] -= per_row.sum((0, 2))
        elif not score.is_packed:
            gradients.dslopes[score.tile.b0 : score.tile.b1, heads] -= per_row.sum(-1)
        else:
            b, h = score.rows.b[..., 0], score.rows.h[..., 0]
            place = b * gradients.dslopes.shape[1] + h
            _add_at(gradients.dslopes, place.expand(per_row.shape), -per_row)


def _add_bias_gradient(score: ScoreTile, ds: Tensor, n0: int, n1: int, dbias: Tensor) -> None:
    index = score.bias_index(dbias, n0, n1)
    if not score.is_packed:
        reduced = [dim for dim in range(4) if dbias.shape[dim] == 1]
        dbias[index] += ds.sum(reduced, keepdim=True) if reduced else ds
        return
    flat = torch.zeros((), dtype=torch.int64, device=ds.device)
    for x, size in zip(index, dbias.shape, strict=True):
        assert isinstance(x, Tensor)
        flat = flat * size + x
    _add_at(dbias, flat.expand(ds.shape), ds)


def _add_at(target: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values at flat places of a contiguous target, repeated ones in one fixed order.

    index_add_ of 1-d tensors runs serially on the CPU; index_put_ sorts on CUDA.
    """
    flat, places, values = target.view(-1), places.reshape(-1), values.reshape(-1)
    if values.device.type == "cpu":
        flat.index_add_(0, places, values)
    else:
        flat.index_put_((places,), values, accumulate=True)
