"""Backward of short sequences: all gradients from one launch, where a tile holds all keys.

Dims: as in `triton_forward.py`, with N up to one tile.
Grid: programs that own the keys of a sequence and kv head make dK and dV, over all rows of its
    query heads; programs that own a query tile make dQ.
Math: as in `triton_backward.py`, with delta = rowsum(P dP) - dLSE from the tile itself (see
    `triton_row_sums.py` for why): nothing has to be there before. Seven products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import Launch
from ..kernels.masks import key_span, row_span, visible
from ..kernels.placement import FIRST_K_TILE, FIRST_Q_TILE, locate
from ..kernels.recompute import recompute
from ..kernels.structs import code, decode
from ..kernels.tiles import (
    clean_rows,
    dot_add,
    load_tile,
    row_base,
    scale_tile,
    statistics_base,
    store_tile,
    zero_tile,
)
from .config import few_keys_config
from .triton_call import ENOUGH_PROGRAMS, TritonCall
from .triton_placement import UNIFORM
from .triton_row_sums import LARGE_LSE

# Rows that a program which owns keys may visit, one tile after the other.
_MOST_ROWS = 512


@triton.jit
def _attention_bwd_few_keys_kernel(
    q, k, v, dout, lse, dlse, dq, dk, dv, rows_call, keys_call, n_keys, BUILD: tl.constexpr
):
    """n_keys: programs that own keys, coded."""
    pid = tl.program_id(0)
    n_keys = decode(n_keys)
    if pid < n_keys:
        _make_keys(q, k, v, dout, lse, dlse, dk, dv, keys_call, pid, BUILD)
    else:
        _make_rows(q, k, v, dout, lse, dlse, dq, rows_call, pid - n_keys, BUILD)


@triton.jit
def _load_keys(k, v, seq, kv_head, start, stop, BUILD: tl.constexpr):
    """K and V, with zeros outside of [start, stop)."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    n = tl.arange(0, BLOCK_N)
    seen = (n >= start) & (n < stop)
    base = row_base(k, seq.batch, seq.k_first, kv_head)
    k_tile = load_tile(base, k.stride_m, seen, True, BLOCK_N, DIMS, BUILD.is_wide)
    base = row_base(v, seq.batch, seq.k_first, kv_head)
    v_tile = load_tile(base, v.stride_m, seen, True, BLOCK_N, VALUE_DIMS, BUILD.is_wide)
    return k_tile, v_tile


@triton.jit
def _load_rows(q, dout, lse, dlse, seq, span, h, m0, BUILD: tl.constexpr):
    """Q and dO of a tile, lse (+inf where P is to be 0) and dLSE. Rows that see no key may be
    NaN."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    rows = tl.arange(0, BLOCK_M)
    alive = (m0 + rows >= span.start) & (m0 + rows < span.stop)
    row = seq.q_first + m0
    base = row_base(q, seq.batch, row, h)
    q_tile = load_tile(base, q.stride_m, alive, True, BLOCK_M, DIMS, BUILD.is_wide)
    base = row_base(dout, seq.batch, row, h)
    do_tile = load_tile(base, dout.stride_m, alive, True, BLOCK_M, VALUE_DIMS, BUILD.is_wide)
    row_lse = tl.load(
        statistics_base(lse, seq.batch, row, h) + rows, mask=alive, other=float("-inf")
    )
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    row_dlse = tl.zeros((BLOCK_M,), tl.float32)
    if dlse.ptr is not None:
        row_dlse = tl.load(statistics_base(dlse, seq.batch, row, h) + rows, mask=alive, other=0.0)
    return q_tile, do_tile, row_lse, row_dlse


@triton.jit
def _differentiate(
    q_tile, k_tile, v_tile, do_tile, row_lse, row_dlse, call, seq, h, m0,
    TRANSPOSED: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """P, and dS from products of its own rows."""
    m, n = m0 + tl.arange(0, BUILD.block_m), tl.arange(0, BUILD.block_n)
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    if TRANSPOSED:
        m, n = m[None, :], n[:, None]
    else:
        m, n = m[:, None], n[None, :]
    seen = visible(call.mask, seq, h, m, n, m0, 0, BUILD)
    # With a delta of 0, dS is P dP.
    statistics = row_lse, tl.zeros_like(row_lse), row_lse
    p, _, p_dp, _ = recompute(
        q_tile, k_tile, v_tile, do_tile, statistics, seen, call, seq, h, m0, 0,
        True, TRANSPOSED, False, BUILD,
    )  # fmt: skip
    delta, total = tl.sum(p_dp, AXIS), tl.sum(p, AXIS)
    is_lost = (tl.abs(row_lse) > LARGE_LSE) & (row_lse < float("inf")) & (total > 0.0)
    delta = delta / tl.where(is_lost, total, 1.0) - row_dlse
    delta = tl.where(row_lse == float("inf"), 0.0, delta)
    if TRANSPOSED:
        return p, p_dp - p * delta[None, :]
    else:
        return p, p_dp - p * delta[:, None]


@triton.jit
def _make_keys(q, k, v, dout, lse, dlse, dk, dv, call, pid, BUILD: tl.constexpr):
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    seq, kv_head, _, _ = locate(call.place, pid, BUILD.place, FIRST_K_TILE, False)
    k_tile, v_tile = _load_keys(k, v, seq, kv_head, seq.low, seq.high, BUILD)
    acc_k, acc_v = zero_tile(BLOCK_N, DIMS), zero_tile(BLOCK_N, VALUE_DIMS)
    span = row_span(call.mask, seq, kv_head, 0, 0, BUILD)
    n_tiles = tl.cdiv(seq.q_stored, BUILD.block_m)
    group = decode(call.place.group)
    for i in range(0, group * n_tiles):
        h, m0 = kv_head * group + i // n_tiles, i % n_tiles * BUILD.block_m
        q_tile, do_tile, row_lse, row_dlse = _load_rows(q, dout, lse, dlse, seq, span, h, m0, BUILD)
        p, ds = _differentiate(
            q_tile, k_tile, v_tile, do_tile, row_lse, row_dlse, call, seq, h, m0, True, BUILD
        )
        acc_v = dot_add(p, do_tile, acc_v, VALUE_DIMS, BUILD)
        acc_k = dot_add(ds, q_tile, acc_k, DIMS, BUILD)
    stored = tl.arange(0, BLOCK_N) < seq.k_stored
    acc_k = scale_tile(acc_k, call.terms.gradient_scale, DIMS)
    base = row_base(dk, seq.batch, seq.k_first, kv_head)
    store_tile(base, dk.stride_m, acc_k, stored, BLOCK_N, DIMS, False, BUILD.is_wide)
    base = row_base(dv, seq.batch, seq.k_first, kv_head)
    store_tile(base, dv.stride_m, acc_v, stored, BLOCK_N, VALUE_DIMS, False, BUILD.is_wide)


@triton.jit
def _make_rows(q, k, v, dout, lse, dlse, dq, call, pid, BUILD: tl.constexpr):
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    seq, h, tile, _ = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
    kv_head, m0 = h // decode(call.place.group), tile * BLOCK_M
    # What none of these rows sees may be NaN.
    keys = key_span(call.mask, seq, h, tile, 0, BUILD)
    k_tile, v_tile = _load_keys(k, v, seq, kv_head, keys.start, keys.stop, BUILD)
    span = row_span(call.mask, seq, kv_head, 0, 0, BUILD)
    q_tile, do_tile, row_lse, row_dlse = _load_rows(q, dout, lse, dlse, seq, span, h, m0, BUILD)
    _, ds = _differentiate(
        q_tile, k_tile, v_tile, do_tile, row_lse, row_dlse, call, seq, h, m0, False, BUILD
    )
    acc = dot_add(ds, k_tile, zero_tile(BLOCK_M, DIMS), DIMS, BUILD)
    m = m0 + tl.arange(0, BLOCK_M)
    alive = (m >= span.start) & (m < span.stop)
    acc = clean_rows(scale_tile(acc, call.terms.gradient_scale, DIMS), alive, DIMS)
    base = row_base(dq, seq.batch, seq.q_first + m0, h)
    store_tile(base, dq.stride_m, acc, m < seq.q_stored, BLOCK_M, DIMS, False, BUILD.is_wide)


def is_of_few_keys(call: TritonCall) -> bool:
    """Whether a call's gradients of q, k and v, and no others, come from this kernel: where a GPU
    has room for all of its programs at once, what counts is how many launches there are."""
    terms = call.piece.terms
    n_tiles = -(-call.M // few_keys_config(call.key).block_m)
    return (
        call.has_few_keys
        and call.is_folded
        and terms.sinks is None
        and terms.rng is None
        and call.piece.q.dtype != torch.float32
        and call.place_kind == UNIFORM
        and call.band is not None
        and call.key.width <= 128
        and call.key.architecture in ("sm_90", "interpreter")
        and call.M * (call.H // call.G) <= _MOST_ROWS
        and call.B * (call.G + call.H * n_tiles) <= ENOUGH_PROGRAMS
    )


def few_keys_launch(
    call: TritonCall, dout: Tensor, lse: Tensor, dlse: Tensor | None, gradients: list[Tensor]
) -> Launch:
    """gradients: of q, k and v, to be written."""
    config = few_keys_config(call.key)
    rows, keys = call.plan_rows(config), call.plan_keys(config)
    return Launch(
        _attention_bwd_few_keys_kernel,
        (keys.n_programs + rows.n_programs,),
        config,
        (
            *call.qkv, call.operand(dout), call.statistics(lse), call.statistics(dlse),
            *(call.operand(x) for x in gradients), rows.call, keys.call, code(keys.n_programs),
            call.build(config, dout, *gradients),
        ),
        (dlse is None, call.layout_tag(dout, *gradients)),
    )  # fmt: skip
