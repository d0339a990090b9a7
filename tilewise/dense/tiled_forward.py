"""Forward of the tiled backend: online softmax over key tiles, O(N) memory, any device.

Dims: as in `tiled.py`.
Math: FlashAttention-2 (arXiv 2307.08691), algorithm 1: per row a running maximum, sum and
    numerator over key tiles; out = numerator / sum, lse = max + log(sum). A sink joins at the end:
    lse' = log(exp(lse) + exp(sink)), out' = out exp(lse - lse').
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import torch_flash
from .piece import Piece, Result, new_remainder
from .tiled import (
    ScoreTile,
    Tile,
    Units,
    Visibility,
    Workspace,
    cut,
    full_precision,
)


def attention_fwd(
    piece: Piece, out_dtype: torch.dtype, *, is_split: bool = False, hands_over: bool
) -> Result:
    """Of a padded piece. Nothing is checked here.

    is_split: whether what rounding takes off out is kept too. hands_over: whether PyTorch's fused
        op may compute what it computes just the same.
    """
    if hands_over and not is_split and torch_flash.is_same_piece(piece, out_dtype):
        with full_precision():
            return Result(*torch_flash.forward(piece))
    (B, M, H, _), E = piece.q.shape, piece.v.shape[-1]
    dtype = piece.accumulator if is_split else out_dtype
    out = torch.empty(B, M, H, E, dtype=dtype, device=piece.q.device)
    lse = torch.empty(B, H, M, dtype=piece.accumulator, device=piece.q.device)
    space = Workspace(piece)
    with full_precision():
        for tile in cut(piece):
            _forward_tile(piece, tile, space, out, lse)
    if not is_split:
        return Result(out, lse)
    rounded = out.to(out_dtype)
    return Result(rounded, lse, new_remainder(out).copy_(out.sub_(rounded)))


def _forward_tile(piece: Piece, tile: Tile, space: Workspace, out: Tensor, lse: Tensor) -> None:
    terms, dtype, units = piece.terms, piece.accumulator, Units.of(piece.terms)
    plan = space.plan(tile)
    rows = plan.rows
    score = ScoreTile(tile, rows, piece, space)
    q_tile = tile.load_rows(piece.q, dtype)
    row_max = q_tile.new_full(q_tile.shape[:2], float("-inf"))
    row_sum = q_tile.new_zeros(q_tile.shape[:2])
    acc = space.take("acc", *q_tile.shape[:2], piece.v.shape[-1]).zero_()
    for n0, n1, is_full in plan.ranges:
        k_tile = tile.load_keys(piece.k, n0, n1, dtype)
        v_tile = tile.load_keys(piece.v, n0, n1, dtype)
        s = score.scores(q_tile, k_tile, n0, n1)
        if not is_full:
            visibility = Visibility.of(plan, tile, n0, n1)
            visibility.hide(s, tile, float("-inf"))
            v_tile = visibility.clean_keys(v_tile)
        new_max = torch.maximum(row_max, s.amax(-1))
        # A row that has seen nothing has maximum -inf: subtract 0, not -inf from -inf.
        shift = torch.where(new_max.isneginf(), 0.0, new_max)
        p = units.exp(s.sub_(shift.unsqueeze(-1)), out=s)
        rescale = units.exp(row_max - shift)
        row_sum = row_sum * rescale + p.sum(-1)
        row_max = new_max
        if terms.dropout_p > 0.0:
            p.view(*tile.shape, n1 - n0).mul_(score.keep(n0, n1))
        acc.mul_(rescale.unsqueeze(-1))
        torch.baddbmm(acc, p, v_tile, out=acc)
    is_empty = row_sum == 0
    safe_sum = torch.where(is_empty, 1.0, row_sum)
    acc.div_((safe_sum * (1.0 - terms.dropout_p)).unsqueeze(-1))
    row_lse = torch.where(is_empty, float("-inf"), (row_max + units.log(safe_sum)) / units.per_nat)
    if terms.sinks is not None:
        row_lse = _add_sink(tile, terms.sinks, acc, row_lse)
    if rows.owned is not None:
        owned = rows.owned[..., 0].expand(tile.shape).reshape(row_lse.shape)
        row_lse = torch.where(owned, row_lse, float("-inf"))
    tile.store_rows(acc, out)
    tile.store_statistics(row_lse, lse)


def _add_sink(tile: Tile, sinks: Tensor, acc: Tensor, row_lse: Tensor) -> Tensor:
    """Give the sink its share of each row: shrinks `acc`, returns the lse with the sink in it."""
    sink = sinks[slice(*tile.heads)].to(acc.dtype).reshape(1, -1, 1)
    with_sink = torch.logaddexp(row_lse, sink.expand(tile.shape).reshape(row_lse.shape))
    shift = torch.where(with_sink.isneginf(), 0.0, with_sink)
    acc.mul_(torch.exp(row_lse - shift).unsqueeze(-1))
    return with_sink
