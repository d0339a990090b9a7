"""Row sums that the triton backward needs where what the forward left is not enough.

delta = rowsum(dO * O) - dLSE has the rounding of O, and of P in P V, to 16 bits. Over many keys
that averages out; over few, and in the gradients of slopes, sinks and a bias, it would be over the
error budget. There delta is the sum of P dP, less dLSE, with P and dP in fp32.

An fp32 lse beyond 8192 keeps too little of the log of a row's sum: a row whose bias is the dtype's
most negative number has lse = maximum, and exp(S - lse) is 1 for each of its keys. P of such a row
is divided by its sum.

Dims: as in `triton_forward.py`. Grid: as the forward's.
Cost: the two products of S and dP over the visible tiles; only S where delta is not asked for, and
    nothing in tiles without a large lse.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.keys import load_keys
from ..kernels.launch import Launch
from ..kernels.masks import key_span, partial_tile, whole_tile
from ..kernels.placement import FIRST_Q_TILE, locate
from ..kernels.recompute import load_rows, recompute, store_rows
from ..kernels.softmax import LOG2_E
from ..kernels.structs import decode
from ..kernels.tiles import load_tile, row_base, statistics_base
from .config import sums_config
from .triton_call import TritonCall

LARGE_LSE = tl.constexpr(8192.0)


@triton.jit
def _attention_bwd_row_sums_kernel(
    q, k, v, dout, lse, dlse, numbers, call, HAS_DELTA: tl.constexpr, BUILD: tl.constexpr
):
    """delta of each row, and 1 / sum(exp(S - lse)), which is 1 unless lse is large.

    Without HAS_DELTA the delta that is there stays.
    """
    BLOCK_M: tl.constexpr = BUILD.block_m
    BLOCK_N: tl.constexpr = BUILD.block_n
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    pid = tl.program_id(0)
    seq, h, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
    m0 = tile * BLOCK_M
    rows = tl.arange(0, BLOCK_M)
    owned, stored = m0 + rows < seq.q_used, m0 + rows < seq.q_stored
    row = seq.q_first + m0
    lse_base = statistics_base(lse, seq.batch, row, h)
    row_lse = tl.load(lse_base + rows, mask=owned, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse)
    is_large = (tl.abs(row_lse) > LARGE_LSE) & (row_lse < float("inf"))
    total_p = tl.zeros((BLOCK_M,), tl.float32)
    total_dp = tl.zeros((BLOCK_M,), tl.float32)
    is_needed = tl.max(is_large.to(tl.int32), 0) > 0
    if HAS_DELTA:
        is_needed = is_needed | True
    if is_needed:
        kv_head = h // decode(call.place.group)
        q_base = row_base(q, seq.batch, row, h)
        do_base = row_base(dout, seq.batch, row, h)
        bases = (
            row_base(k, seq.batch, seq.k_first, kv_head),
            row_base(v, seq.batch, seq.k_first, kv_head),
        )
        m = (m0 + rows)[:, None]
        q_tile = load_tile(q_base, q.stride_m, owned, True, BLOCK_M, DIMS, BUILD.is_wide)
        do_tile = load_tile(do_base, dout.stride_m, owned, True, BLOCK_M, VALUE_DIMS, BUILD.is_wide)
        span = key_span(call.mask, seq, h, tile, list_tile, BUILD)
        # With a delta of 0, dS is P dP.
        statistics = (row_lse, tl.zeros((BLOCK_M,), tl.float32), row_lse)
        for i in range(0, span.n_whole + span.n_partial):
            if i < span.n_whole:
                n0 = whole_tile(call.mask, span, i, BUILD.mask) * BLOCK_N
            else:
                n0 = partial_tile(call.mask, span, i - span.n_whole, BUILD.mask) * BLOCK_N
            k_tile, v_tile, _, seen = load_keys(
                bases, k.stride_m, v.stride_m, call, seq, span, h, m, m0, n0, True, BUILD
            )
            p, _, p_dp, _ = recompute(
                q_tile, k_tile, v_tile, do_tile, statistics, seen, call, seq, h, m0, n0,
                True, False, False, BUILD,
            )  # fmt: skip
            total_p += tl.sum(p, 1)
            if HAS_DELTA:
                total_dp += tl.sum(p_dp, 1)
    if call.terms.sinks is not None:
        sink = tl.load(call.terms.sinks + h).to(tl.float32)
        total_p += tl.exp2((sink - row_lse) * LOG2_E)
    is_lost = is_large & (total_p > 0.0)
    share = tl.where(is_lost, 1.0 / tl.where(is_lost, total_p, 1.0), 1.0)
    delta = total_dp * share
    if HAS_DELTA:
        if dlse.ptr is not None:
            dlse_base = statistics_base(dlse, seq.batch, row, h)
            delta -= tl.load(dlse_base + rows, mask=stored, other=0.0)
    else:
        _, delta, _ = load_rows(numbers, seq, m0, h, stored, True, BLOCK_M)
    row_lse = tl.load(lse_base + rows, mask=stored, other=0.0)
    store_rows(numbers, seq.batch, row, h, row_lse, delta, share, stored, BLOCK_M)


def row_sums_launch(
    call: TritonCall,
    dout: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    rows: Tensor,
    *,
    has_delta: bool,
) -> Launch:
    """Writes the rows' numbers `[B, H, M, 4]`; without `has_delta` the delta in them stays."""
    config = sums_config(call.key)
    plan = call.plan_rows(config)
    return Launch(
        _attention_bwd_row_sums_kernel,
        (plan.n_programs,),
        config,
        (
            *call.qkv, call.operand(dout),
            *(call.statistics(x) for x in (lse, dlse)), call.row_numbers(rows), plan.call,
            has_delta, call.build(config, dout),
        ),
        (has_delta, dlse is None, call.layout_tag(dout)),
    )  # fmt: skip
