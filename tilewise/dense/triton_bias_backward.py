"""The gradient of a bias in the triton backward.

The gradient of a bias is dS summed over what the bias was broadcast along. Programs that own a tile
of the bias visit everything that it was added to, in order, so the sum has one order: no atomics.
Cost: the two products of S and dP over the visible tiles once more.
Dims: as in `triton_forward.py`; the bias is `[B or 1, H or 1, M or 1, N or 1]`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.masks import visible
from ..kernels.placement import sequence_at
from ..kernels.recompute import Upstream, load_rows, recompute
from ..kernels.structs import code, decode
from ..kernels.tiles import load_tile, row_base
from .config import sums_config
from .triton_call import TritonCall


@triton.jit(do_not_specialize=["n_row_tiles", "n_key_tiles"])
def _attention_bwd_bias_kernel(
    q, k, v, upstream, dbias, call, n_row_tiles, n_key_tiles,
    IS_TILE: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """A tile of the bias's gradient. dbias: an fp32 `Bias`, contiguous.

    IS_TILE: the program owns a tile `[m, n]` and sums over the sequences and heads that share it;
    otherwise it owns keys of one sequence and head and sums over m.
    """
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    pid = tl.program_id(0)
    y = pid % n_key_tiles
    x = pid // n_key_tiles % n_row_tiles
    owner = pid // n_key_tiles // n_row_tiles
    H = decode(call.place.H)
    n = y * BLOCK_N + tl.arange(0, BLOCK_N)
    if IS_TILE:
        owners = _count(dbias.stride_h, H)
        b, n_b = _sharing(dbias.stride_b, owner // owners, decode(call.place.n_sequences))
        h, n_h = _sharing(dbias.stride_h, owner % owners, H)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, n_b * n_h):
            seq = sequence_at(call.place, b + at // n_h, BUILD.place)
            total += _bias_tile(q, k, v, upstream, call, seq, h + at % n_h, x, y, BUILD)
        m = x * BLOCK_M + tl.arange(0, BLOCK_M)
        offsets = m[:, None].to(tl.int64) * decode(dbias.stride_m) + n[None, :]
        inside = (m < decode(dbias.rows))[:, None] & (n < decode(dbias.cols))[None, :]
    else:
        b, h = owner // H, owner % H
        seq = sequence_at(call.place, b, BUILD.place)
        total = tl.zeros((BLOCK_N,), tl.float32)
        for other in range(0, tl.cdiv(seq.q_used, BLOCK_M)):
            total += tl.sum(_bias_tile(q, k, v, upstream, call, seq, h, other, y, BUILD), 0)
        offsets = n
        inside = n < decode(dbias.cols)
    base = dbias.ptr + tl.cast(b, tl.int64) * decode(dbias.stride_b)
    base += tl.cast(h, tl.int64) * decode(dbias.stride_h)
    tl.store(base + offsets, total, mask=inside)


@triton.jit
def _count(stride, size):
    """How many owners a dim has: one where it is broadcast."""
    return tl.where(decode(stride) == 0, 1, size)


@triton.jit
def _sharing(stride, index, size):
    """The first of those that share an owner's tile, and how many they are."""
    is_shared = decode(stride) == 0
    return tl.where(is_shared, 0, index), tl.where(is_shared, size, 1)


@triton.jit
def _bias_tile(q, k, v, upstream, call, seq, h, x, y, BUILD: tl.constexpr):
    """dS of one tile `[m, n]` of one head."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    m0, n0 = x * BLOCK_M, y * BLOCK_N
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    ds = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    is_met = (m0 < seq.q_used) & (n0 < seq.high) & (n0 + BLOCK_N > seq.low)
    # The band is a bound of every mask.
    is_met = is_met & (n0 <= m0 + BLOCK_M - 1 + seq.right) & (n0 + BLOCK_N > m0 + seq.left)
    if is_met:
        kv_head = h // decode(call.place.group)
        mask_m = m < seq.q_used
        mask_n = (n >= seq.low) & (n < seq.high)
        dout = upstream.dout
        wide: tl.constexpr = BUILD.is_wide
        q_base = row_base(q, seq.batch, seq.q_first + m0, h)
        do_base = row_base(dout, seq.batch, seq.q_first + m0, h)
        k_base = row_base(k, seq.batch, seq.k_first + n0, kv_head)
        v_base = row_base(v, seq.batch, seq.k_first + n0, kv_head)
        seen = visible(call.mask, seq, h, m[:, None], n[None, :], m0, n0, BUILD)
        _, _, ds, _ = recompute(
            load_tile(q_base, q.stride_m, mask_m, True, BLOCK_M, DIMS, wide),
            load_tile(k_base, k.stride_m, mask_n, True, BLOCK_N, DIMS, wide),
            load_tile(v_base, v.stride_m, mask_n, True, BLOCK_N, VALUE_DIMS, wide),
            load_tile(do_base, dout.stride_m, mask_m, True, BLOCK_M, VALUE_DIMS, wide),
            load_rows(upstream.rows, seq, m0, h, mask_m, True, BLOCK_M),
            seen, call, seq, h, m0, n0, True, False, True, BUILD,
        )  # fmt: skip
    return ds


def bias_gradient(call: TritonCall, bias: Tensor, upstream: Upstream, row_sums: Tensor) -> Tensor:
    """The gradient of a bias, in fp32 and its shape.

    row_sums: `[B, H, M]`, dS of each row summed over its keys. P sums to 1 less the sink's share,
    so this is dLSE plus what the sink takes, and no pass over the keys comes as close.
    """
    if bias.shape[3] == 1:
        return _sum_to(_rows_by_sequence(call, bias, row_sums).unsqueeze(3), bias)
    config = sums_config(call.key)
    plan = call.plan_rows(config)
    n_sequences = call.piece.positions.B
    rows, cols = bias.shape[2:]
    shape = tuple(bias.shape) if rows != 1 else (n_sequences, call.H, 1, cols)
    gradient = torch.empty(shape, dtype=torch.float32, device=bias.device)
    n_row_tiles, n_key_tiles = -(-rows // config.block_m), -(-cols // config.block_n)
    target = call.bias_operand(gradient)._replace(rows=code(rows), cols=code(cols))
    place = plan.call.place._replace(n_sequences=code(n_sequences))
    call.launch(
        _attention_bwd_bias_kernel,
        (shape[0] * shape[1] * n_row_tiles * n_key_tiles,),
        config,
        (
            *call.qkv, upstream, target, plan.call._replace(place=place), n_row_tiles, n_key_tiles,
            rows != 1, call.build(config, upstream.dout.ptr),
        ),
    )  # fmt: skip
    return _sum_to(gradient, bias)


def _rows_by_sequence(call: TritonCall, bias: Tensor, rows: Tensor) -> Tensor:
    """Numbers of storage rows `[B, H, M]` by sequence, as far as the bias reaches."""
    if not call.piece.positions.is_packed:
        return rows
    documents, local = call.document_rows
    reach = bias.shape[2]
    # Where the bias is one for all rows, a document's rows are summed at once.
    place = documents if reach == 1 else documents * reach + local.clamp(0, reach - 1)
    n_sequences = call.piece.positions.B
    total = torch.zeros(call.H, n_sequences * reach, dtype=torch.float32, device=rows.device)
    if total.numel() > 0:
        place = place + torch.arange(call.H, device=rows.device)[:, None] * total.shape[1]
        total.view(-1).index_put_((place.reshape(-1),), rows.reshape(-1), accumulate=True)
    return total.unflatten(1, (n_sequences, reach)).transpose(0, 1)


def _sum_to(gradient: Tensor, bias: Tensor) -> Tensor:
    reduced = [d for d in range(4) if bias.shape[d] == 1 and gradient.shape[d] != 1]
    return gradient.sum(reduced, keepdim=True) if reduced else gradient
