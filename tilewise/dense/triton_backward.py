"""Backward of the triton backend: P is recomputed from the LSE, tile by tile.

Dims: as in `triton_forward.py`.
Grid: programs that own key tiles make dK and dV of one kv head, over all its query heads or a
    share of them; programs that own query tiles make dQ.
Math: FlashAttention-2 (arXiv 2307.08691), algorithm 2, with the gradient of the LSE:
    delta = rowsum(dO * O) - dLSE;  P = exp(S - lse);  dV += P^T dO;  dP = dO V^T;
    dS = P (dP - delta);  dQ += scale dS K;  dK += scale dS^T Q.
    Scores are computed transposed where keys are owned, so that P^T and dS^T are left operands as
    they are; a transposed accumulator would go through shared memory, and Triton 3.4 to 3.7.0
    miscompiles one on Hopper.
Deterministic: always, since every sum has one owner and one order. That takes seven products. The
    form with five, in which dQ is added up by atomics, was slower: at D 128 and 16k tokens 17.2 ms
    against 15.0 ms (H200, Triton 3.6, 2026-11-29). Where dK and dV together leave too few
    registers, each has a launch of its own, which takes eight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.keys import load_keys
from ..kernels.launch import Launch
from ..kernels.masks import BAND, key_span, partial_tile, row_span, visible, whole_tile
from ..kernels.placement import FIRST_K_TILE, FIRST_Q_TILE, locate
from ..kernels.recompute import Upstream, load_rows, recompute, store_rows
from ..kernels.scores import key_distance
from ..kernels.structs import Operand, absent, decode
from ..kernels.tiles import (
    clean_rows,
    dot_add,
    load_tile,
    row_base,
    row_product,
    scale_tile,
    statistics_base,
    store_tile,
    zero_tile,
)
from .config import KeysConfig, backward_config, delta_config
from .piece import Piece, Result
from .triton_bias_backward import bias_gradient
from .triton_call import TritonCall, align_rows, contiguous_statistics, cut_rows
from .triton_few_keys_backward import few_keys_launch, is_of_few_keys
from .triton_row_sums import row_sums_launch


@triton.jit(do_not_specialize=["n_heads"])
def _attention_bwd_keys_kernel(
    q, k, v, upstream, dk, dv, call, n_heads,
    HAS_K: tl.constexpr, HAS_V: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """dK, dV or both of a key tile, over `n_heads` query heads from `program_id(1)` shares on."""
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    place, terms = call.place, call.terms
    pid = tl.program_id(0)
    seq, kv_head, tile, list_tile = locate(place, pid, BUILD.place, FIRST_K_TILE, False)
    share = tl.program_id(1)
    group = decode(place.group)
    n0 = tile * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    mask_n = (n >= seq.low) & (n < seq.high)
    k_base = row_base(k, seq.batch, seq.k_first + n0, kv_head)
    v_base = row_base(v, seq.batch, seq.k_first + n0, kv_head)
    k_tile = load_tile(k_base, k.stride_m, mask_n, True, BLOCK_N, DIMS, BUILD.is_wide)
    v_tile = load_tile(v_base, v.stride_m, mask_n, True, BLOCK_N, VALUE_DIMS, BUILD.is_wide)
    acc_k = zero_tile(BLOCK_N, DIMS)
    acc_v = zero_tile(BLOCK_N, VALUE_DIMS)
    first = kv_head * group + share * n_heads
    for h in range(first, tl.minimum(first + n_heads, (kv_head + 1) * group)):
        span = row_span(call.mask, seq, h, tile, list_tile, BUILD)
        for i in range(0, span.n_whole):
            m0 = whole_tile(call.mask, span, i, BUILD.mask) * BUILD.block_m
            acc_k, acc_v = _visit_rows(
                q, k_tile, v_tile, acc_k, acc_v, upstream, call, seq, span, h, m0, n0,
                False, HAS_K, HAS_V, BUILD,
            )  # fmt: skip
        for i in range(0, span.n_partial):
            m0 = partial_tile(call.mask, span, i, BUILD.mask) * BUILD.block_m
            acc_k, acc_v = _visit_rows(
                q, k_tile, v_tile, acc_k, acc_v, upstream, call, seq, span, h, m0, n0,
                True, HAS_K, HAS_V, BUILD,
            )  # fmt: skip
    batch = share * decode(place.n_batches) + seq.batch
    stored = n < seq.k_stored
    if HAS_K:
        acc_k = scale_tile(acc_k, terms.gradient_scale, DIMS)
        base = row_base(dk, batch, seq.k_first + n0, kv_head)
        store_tile(base, dk.stride_m, acc_k, stored, BLOCK_N, DIMS, BUILD.is_added, BUILD.is_wide)
    if HAS_V:
        if terms.rng is not None:
            acc_v = scale_tile(acc_v, terms.keep_scale, VALUE_DIMS)
        base = row_base(dv, batch, seq.k_first + n0, kv_head)
        store_tile(
            base, dv.stride_m, acc_v, stored, BLOCK_N, VALUE_DIMS, BUILD.is_added, BUILD.is_wide
        )


@triton.jit
def _visit_rows(
    q, k_tile, v_tile, acc_k, acc_v, upstream, call, seq, span, h, m0, n0,
    IS_PARTIAL: tl.constexpr, HAS_K: tl.constexpr, HAS_V: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """One query tile's share of dK and dV."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    BLOCK_N: tl.constexpr = BUILD.block_n
    m = m0 + tl.arange(0, BLOCK_M)
    # Rows that see no key of the tile may be NaN, or not there.
    mask_m = (m >= span.start) & (m < span.stop)
    seen = m
    if IS_PARTIAL:
        n = (n0 + tl.arange(0, BLOCK_N))[:, None]
        seen = visible(call.mask, seq, h, m[None, :], n, m0, n0, BUILD)
        if BUILD.mask != BAND:
            mask_m = mask_m & (tl.max(seen.to(tl.int32), 0) > 0)
    dout = upstream.dout
    q_base = row_base(q, seq.batch, seq.q_first + m0, h)
    do_base = row_base(dout, seq.batch, seq.q_first + m0, h)
    q_tile = load_tile(q_base, q.stride_m, mask_m, IS_PARTIAL, BLOCK_M, DIMS, BUILD.is_wide)
    do_tile = load_tile(
        do_base, dout.stride_m, mask_m, IS_PARTIAL, BLOCK_M, VALUE_DIMS, BUILD.is_wide
    )
    statistics = load_rows(upstream.rows, seq, m0, h, mask_m, IS_PARTIAL, BLOCK_M)
    has_shares: tl.constexpr = call.terms.bias.ptr is not None
    _, kept, _, ds = recompute(
        q_tile, k_tile, v_tile, do_tile, statistics, seen, call, seq, h, m0, n0,
        IS_PARTIAL, True, has_shares, BUILD,
    )  # fmt: skip
    if HAS_V:
        acc_v = dot_add(kept, do_tile, acc_v, VALUE_DIMS, BUILD)
    if HAS_K:
        acc_k = dot_add(ds, q_tile, acc_k, DIMS, BUILD)
    return acc_k, acc_v


@triton.jit
def _attention_bwd_rows_kernel(q, k, v, upstream, dq, slopes, call, BUILD: tl.constexpr):
    """dQ of a query tile, and each row's share of the slope's gradient where `slopes` takes it."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    pid = tl.program_id(0)
    seq, h, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
    kv_head = h // decode(call.place.group)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    owned, stored = m < seq.q_used, m < seq.q_stored
    dout = upstream.dout
    q_base = row_base(q, seq.batch, seq.q_first + m0, h)
    do_base = row_base(dout, seq.batch, seq.q_first + m0, h)
    q_tile = load_tile(q_base, q.stride_m, owned, True, BLOCK_M, DIMS, BUILD.is_wide)
    do_tile = load_tile(do_base, dout.stride_m, owned, True, BLOCK_M, VALUE_DIMS, BUILD.is_wide)
    statistics = load_rows(upstream.rows, seq, m0, h, owned, True, BLOCK_M)
    has_shares: tl.constexpr = call.terms.bias.ptr is not None
    has_slopes: tl.constexpr = slopes.ptr is not None
    bases = (
        row_base(k, seq.batch, seq.k_first, kv_head),
        row_base(v, seq.batch, seq.k_first, kv_head),
    )
    acc = zero_tile(BLOCK_M, DIMS)
    slope = tl.zeros((BLOCK_M,), tl.float32)
    span = key_span(call.mask, seq, h, tile, list_tile, BUILD)
    for i in range(0, span.n_whole):
        n0 = whole_tile(call.mask, span, i, BUILD.mask) * BUILD.block_n
        acc, slope = _visit_keys(
            q_tile, do_tile, statistics, bases, k.stride_m, v.stride_m, acc, slope,
            call, seq, span, h, m0, n0, False, has_shares, has_slopes, BUILD,
        )  # fmt: skip
    for i in range(0, span.n_partial):
        n0 = partial_tile(call.mask, span, i, BUILD.mask) * BUILD.block_n
        acc, slope = _visit_keys(
            q_tile, do_tile, statistics, bases, k.stride_m, v.stride_m, acc, slope,
            call, seq, span, h, m0, n0, True, has_shares, has_slopes, BUILD,
        )  # fmt: skip
    acc = clean_rows(scale_tile(acc, call.terms.gradient_scale, DIMS), owned, DIMS)
    dq_base = row_base(dq, seq.batch, seq.q_first + m0, h)
    store_tile(dq_base, dq.stride_m, acc, stored, BLOCK_M, DIMS, BUILD.is_added, BUILD.is_wide)
    if has_slopes:
        slope_base = statistics_base(slopes, seq.batch, seq.q_first + m0, h)
        tl.store(slope_base + tl.arange(0, BLOCK_M), tl.where(owned, slope, 0.0), mask=stored)


@triton.jit
def _visit_keys(
    q_tile, do_tile, statistics, bases, k_stride, v_stride, acc, slope,
    call, seq, span, h, m0, n0,
    IS_PARTIAL: tl.constexpr, HAS_SHARES: tl.constexpr, HAS_SLOPES: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """One key tile's share of dQ."""
    DIMS: tl.constexpr = BUILD.dims
    m = (m0 + tl.arange(0, BUILD.block_m))[:, None]
    k_tile, v_tile, n, seen = load_keys(
        bases, k_stride, v_stride, call, seq, span, h, m, m0, n0, IS_PARTIAL, BUILD
    )
    _, _, ds, ds_inner = recompute(
        q_tile, k_tile, v_tile, do_tile, statistics, seen, call, seq, h, m0, n0,
        IS_PARTIAL, False, HAS_SHARES, BUILD,
    )  # fmt: skip
    if HAS_SLOPES:
        slope -= tl.sum(ds * key_distance(seq, m, n[None, :]), 1)
    return dot_add(ds_inner, k_tile, acc, DIMS, BUILD), slope


@triton.jit(do_not_specialize=["M", "H"])
def _attention_bwd_delta_kernel(
    out, remainder, dout, lse, dlse, rows, M, H,
    VALUE_DIMS: tl.constexpr, IS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The numbers of every stored row, with delta = rowsum(dO * O) - dLSE. remainder: of O."""
    n_tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (pid % n_tiles) * BLOCK_M
    h = (pid // n_tiles) % H
    b = pid // n_tiles // H
    stored = m0 + tl.arange(0, BLOCK_M) < M
    o_base, do_base = row_base(out, b, m0, h), row_base(dout, b, m0, h)
    o_tile = load_tile(o_base, out.stride_m, stored, True, BLOCK_M, VALUE_DIMS, IS_WIDE)
    do_tile = load_tile(do_base, dout.stride_m, stored, True, BLOCK_M, VALUE_DIMS, IS_WIDE)
    total = row_product(o_tile, do_tile, VALUE_DIMS)
    if remainder.ptr is not None:
        base = row_base(remainder, b, m0, h)
        rest = load_tile(base, remainder.stride_m, stored, True, BLOCK_M, VALUE_DIMS, IS_WIDE)
        total += row_product(rest, do_tile, VALUE_DIMS)
    m = tl.arange(0, BLOCK_M)
    if dlse.ptr is not None:
        total -= tl.load(statistics_base(dlse, b, m0, h) + m, mask=stored, other=0.0)
    row_lse = tl.load(statistics_base(lse, b, m0, h) + m, mask=stored, other=0.0)
    store_rows(rows, b, m0, h, row_lse, total, total * 0.0 + 1.0, stored, BLOCK_M)


class Gradients(NamedTuple):
    """Where dQ, dK and dV go: written, or added to (`is_added`). slopes: `[B, H, M]` for each row's
    share of the slopes' gradient, or None."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    slopes: Tensor | None = None
    is_added: bool = False


def attention_gradients(
    call: TritonCall,
    upstream: tuple[Tensor, Tensor | None],
    result: Result,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v, bias, slopes and sinks, in their dtypes; empty where not wanted.

    Args:
        upstream: dout `[B, M, H, E]`, and dlse `[B, H, M]` or None. result: of the forward.
        wanted: whether bias, slopes and sinks need one.
    """
    (dout, dlse), lse = upstream, result.lse
    piece, terms = call.piece, call.piece.terms
    is_short = is_of_few_keys(call) and not any(wanted)
    if not is_short:
        _place(call)
    # The kernels multiply it by v: an fp32 partial's gradient is rounded as q, k and v are.
    dout = align_rows(dout.to(piece.q.dtype))
    lse = contiguous_statistics(lse)
    dlse = None if dlse is None else contiguous_statistics(dlse)
    inputs = (piece.q, piece.k, piece.v)
    if is_short:
        found = [call.new_rows(x.shape, x.dtype) for x in inputs]
        call.launch_together([few_keys_launch(call, dout, lse, dlse, found)])
        cut = (cut_rows(g, x.shape[-1]) for g, x in zip(found, inputs, strict=True))
        return [*cut, *(lse.new_empty(0) for _ in range(3))]
    rows = call.new((*lse.shape, 4), torch.float32)
    is_summed = piece.q.dtype != torch.float32 and (call.has_few_keys or any(wanted))
    first = []
    if not is_summed:
        first.append(_delta_launch(call, result._replace(lse=lse), dout, dlse, rows))
    if is_summed or terms.bias is not None:
        first.append(row_sums_launch(call, dout, lse, dlse, rows, has_delta=is_summed))
    above = Upstream(call.operand(dout), call.row_numbers(rows))
    dq, dk, dv = (call.new_rows(x.shape, x.dtype) for x in inputs)
    slopes = torch.empty_like(lse) if wanted[1] else None
    _launch_gradients(call, above, Gradients(dq, dk, dv, slopes), first)
    extras = [lse.new_empty(0) for _ in range(3)]
    if wanted[1] and terms.alibi_slopes is not None and slopes is not None:
        extras[1] = _slope_gradient(call, terms.alibi_slopes, slopes)
    if wanted[0] or wanted[2]:
        sink_rows = _sink_rows(terms.sinks, lse, rows)
        if wanted[2] and terms.sinks is not None:
            extras[2] = -sink_rows.sum((0, 2)).to(terms.sinks.dtype)
        if wanted[0] and terms.bias is not None:
            sums = sink_rows if dlse is None else sink_rows + torch.where(lse.isneginf(), 0.0, dlse)
            extras[0] = bias_gradient(call, terms.bias, above, sums).to(terms.bias.dtype)
    cut = (cut_rows(g, x.shape[-1]) for g, x in zip((dq, dk, dv), inputs, strict=True))
    return [*cut, *extras]


def attention_bwd(
    piece: Piece, dout: Tensor, lse: Tensor, delta: Tensor, buffers: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Add one piece's gradients into fp32 buffers shaped as q, k and v.

    lse, delta: `[B, H, M]`, the whole softmax's.
    """
    call = TritonCall(piece)
    _place(call)
    dout, is_empty = align_rows(dout.to(piece.q.dtype)), lse.isneginf()
    lse, delta = torch.where(is_empty, torch.inf, lse), torch.where(is_empty, 0.0, delta)
    rows = torch.stack((lse, delta, torch.ones_like(lse), torch.zeros_like(lse)), -1)
    # A buffer whose rows are not aligned is added to in a copy.
    dq, dk, dv = (align_rows(x) for x in buffers)
    _launch_gradients(
        call,
        Upstream(call.operand(dout), call.row_numbers(rows)),
        Gradients(dq, dk, dv, is_added=True),
    )
    for buffer, target in zip(buffers, (dq, dk, dv), strict=True):
        if buffer is not target:
            buffer.copy_(target[..., : buffer.shape[-1]])


def _place(call: TritonCall) -> None:
    """One table for the programs that own rows and those that own keys."""
    config = backward_config(call.key)
    call.write_table(config.rows.block_m, config.keys[0].config.block_n)


def _delta_launch(
    call: TritonCall, result: Result, dout: Tensor, dlse: Tensor | None, rows: Tensor
) -> Launch:
    """Writes the rows' numbers from what the forward left."""
    config, out = delta_config(call.key), align_rows(result.out)
    remainder = None if result.remainder is None else align_rows(result.remainder)
    given = (out, dout) if remainder is None else (out, remainder, dout)
    return Launch(
        _attention_bwd_delta_kernel,
        (-(-call.M // config.block_m) * call.H * call.B,),
        config,
        (
            call.operand(out), absent(Operand) if remainder is None else call.operand(remainder),
            call.operand(dout), *(call.statistics(x) for x in (result.lse, dlse)),
            call.row_numbers(rows),
            call.M, call.H, call.dims[1], call.is_wide(*given), config.block_m,
        ),
        (out.dtype, remainder is None, dlse is None, call.layout_tag(*given)),
    )  # fmt: skip


def _launch_gradients(
    call: TritonCall, upstream: Upstream, gradients: Gradients, first: Sequence[Launch] = ()
) -> None:
    """first: what makes the numbers in `upstream`."""
    config = backward_config(call.key)
    kernels = [_launch_of_keys(call, upstream, gradients, keys) for keys in config.keys]
    plan = call.plan_rows(config.rows)
    build = call.build(config.rows, gradients.dq, upstream.dout.ptr)
    rows = Launch(
        _attention_bwd_rows_kernel,
        (plan.n_programs,),
        config.rows,
        (
            *call.qkv, upstream, call.operand(gradients.dq), call.statistics(gradients.slopes),
            plan.call, build._replace(is_added=gradients.is_added),
        ),
        (gradients.is_added, call.layout_tag(upstream.dout.ptr, gradients.dq)),
    )  # fmt: skip
    call.launch_together([*first, *(launch for launch, _, _ in kernels), rows])
    for _, wanted, targets in kernels:
        if targets is wanted or call.B == 0:
            continue
        for target, shares in zip(wanted, targets, strict=True):
            if gradients.is_added:
                target.add_(shares.unflatten(0, (-1, call.B)).sum(0))
            else:
                call.sum_shares(target, shares)


def _launch_of_keys(
    call: TritonCall, upstream: Upstream, gradients: Gradients, keys: KeysConfig
) -> tuple[Launch, list[Tensor], list[Tensor]]:
    """For dK, dV or both: the launch, what is wanted of it, and where it writes: the same tensors,
    or the fp32 shares `[shares * B, ...]` of the query heads where programs would be few."""
    config = keys.config
    plan = call.plan_keys(config)
    n_shares = call.count_shares(plan.n_programs)
    wanted = [x for x, want in ((gradients.dk, keys.has_k), (gradients.dv, keys.has_v)) if want]
    targets = wanted
    if n_shares > 1:
        targets = [call.new((n_shares * x.shape[0], *x.shape[1:]), torch.float32) for x in wanted]
    build = call.build(config, *targets, upstream.dout.ptr)
    launch = Launch(
        _attention_bwd_keys_kernel,
        (plan.n_programs, n_shares),
        config,
        (
            *call.qkv, upstream, call.operand(targets[0]), call.operand(targets[-1]), plan.call,
            -(-(call.H // call.G) // n_shares), keys.has_k, keys.has_v,
            build._replace(is_added=gradients.is_added and n_shares == 1),
        ),
        (gradients.is_added, keys.has_k, keys.has_v, call.layout_tag(upstream.dout.ptr, *wanted)),
    )  # fmt: skip
    return launch, wanted, targets


def _slope_gradient(call: TritonCall, slopes: Tensor, rows: Tensor) -> Tensor:
    """Sums of the rows' shares `[B, H, M]`, per head or per sequence and head."""
    if slopes.dim() == 1:
        return rows.sum((0, 2)).to(slopes.dtype)
    if not call.piece.positions.is_packed:
        return rows.sum(2).to(slopes.dtype)
    documents, _ = call.document_rows
    total = torch.zeros(slopes.shape, dtype=torch.float32, device=rows.device)
    if total.numel() == 0:
        return total.to(slopes.dtype)
    place = documents * call.H + torch.arange(call.H, device=rows.device)[:, None]
    total.view(-1).index_put_((place.reshape(-1),), rows.reshape(-1), accumulate=True)
    return total.to(slopes.dtype)


def _sink_rows(sinks: Tensor | None, lse: Tensor, rows: Tensor) -> Tensor:
    """exp(sink - lse) delta of each row, `[B, H, M]`: what the sink takes of a row's gradient."""
    if sinks is None:
        return torch.zeros_like(lse)
    p_sink = torch.exp(sinks.float()[:, None] - lse) * rows[..., 2]
    # A row that nobody owns has no sink.
    return torch.where(lse.isneginf(), 0.0, p_sink * rows[..., 1])
