"""Forward of the triton backend: one program per query tile, online softmax over key tiles.

Dims: q `[B, M, H, D]`, k `[B, N, G, D]`, v `[B, N, G, E]`, out `[B, M, H, E]`, lse `[B, H, M]`;
    packed tensors have one batch row whose documents are sequences.
Grid: query tiles x heads x batch rows, on axis 0; query heads of one kv head are neighbours.
Math: FlashAttention-2 (arXiv 2307.08691), algorithm 1. Tiles that every row sees whole need no test
    and run first; then those that some rows see in part.
Units: scores as in `kernels/softmax.py`; lse natural, fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.keys import load_keys
from ..kernels.masks import in_one_loop, key_span, partial_tile, whole_tile
from ..kernels.placement import FIRST_Q_TILE, locate
from ..kernels.scores import add_terms, keep_tile
from ..kernels.softmax import join_sink, softmax_end, softmax_step
from ..kernels.structs import Operand, absent, decode
from ..kernels.tiles import (
    clean_rows,
    dot_add,
    dot_rows,
    load_tile,
    rounded_off,
    row_base,
    scale_tile,
    statistics_base,
    store_tile,
    zero_tile,
)
from .config import forward_config
from .piece import Result
from .triton_call import TritonCall, cut_rows


@triton.jit
def _attention_fwd_kernel(q, k, v, out, remainder, lse, call, BUILD: tl.constexpr):
    """The output of one query tile of one head: out and its lse; and what rounding took off out,
    where there is room for it."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    pid = tl.program_id(0)
    seq, h, tile, list_tile = locate(call.place, pid, BUILD.place, FIRST_Q_TILE, True)
    kv_head = h // decode(call.place.group)
    m0 = tile * BLOCK_M
    m = m0 + tl.arange(0, BLOCK_M)
    owned, stored = m < seq.q_used, m < seq.q_stored
    q_base = row_base(q, seq.batch, seq.q_first + m0, h)
    q_tile = load_tile(q_base, q.stride_m, owned, True, BLOCK_M, DIMS, BUILD.is_wide)
    bases = (
        row_base(k, seq.batch, seq.k_first, kv_head),
        row_base(v, seq.batch, seq.k_first, kv_head),
    )
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = zero_tile(BLOCK_M, VALUE_DIMS)
    span = in_one_loop(key_span(call.mask, seq, h, tile, list_tile, BUILD), BUILD)
    for i in range(0, span.n_whole):
        n0 = whole_tile(call.mask, span, i, BUILD.mask) * BUILD.block_n
        row_max, row_sum, acc = _visit(
            q_tile, bases, k.stride_m, v.stride_m, row_max, row_sum, acc,
            call, seq, span, h, m0, n0, False, BUILD,
        )  # fmt: skip
    for i in range(0, span.n_partial):
        n0 = partial_tile(call.mask, span, i, BUILD.mask) * BUILD.block_n
        row_max, row_sum, acc = _visit(
            q_tile, bases, k.stride_m, v.stride_m, row_max, row_sum, acc,
            call, seq, span, h, m0, n0, True, BUILD,
        )  # fmt: skip
    row_lse, factor = softmax_end(row_max, row_sum, BUILD.is_folded)
    if call.terms.sinks is not None:
        row_lse, shrink = join_sink(row_lse, tl.load(call.terms.sinks + h).to(tl.float32))
        factor *= shrink
    if call.terms.rng is not None:
        factor *= call.terms.keep_scale
    # A row that nobody owns may have met keys in a tile without a test.
    acc = clean_rows(scale_tile(acc, factor[:, None], VALUE_DIMS), owned, VALUE_DIMS)
    out_base = row_base(out, seq.batch, seq.q_first + m0, h)
    store_tile(out_base, out.stride_m, acc, stored, BLOCK_M, VALUE_DIMS, False, BUILD.is_wide)
    if remainder.ptr is not None:
        acc = rounded_off(acc, out.ptr.dtype.element_ty, VALUE_DIMS)
        base = row_base(remainder, seq.batch, seq.q_first + m0, h)
        store_tile(base, remainder.stride_m, acc, stored, BLOCK_M, VALUE_DIMS, False, BUILD.is_wide)
    lse_base = statistics_base(lse, seq.batch, seq.q_first + m0, h)
    row_lse = tl.where(owned, row_lse, float("-inf"))
    tl.store(lse_base + tl.arange(0, BLOCK_M), row_lse, mask=stored)


@triton.jit
def _visit(
    q_tile, bases, k_stride, v_stride, row_max, row_sum, acc, call, seq, span, h, m0, n0,
    IS_PARTIAL: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """One key tile: its scores, its step of the softmax, its share of the output."""
    DIMS: tl.constexpr = BUILD.dims
    VALUE_DIMS: tl.constexpr = BUILD.value_dims
    terms = call.terms
    m = (m0 + tl.arange(0, BUILD.block_m))[:, None]
    k_tile, v_tile, n, seen = load_keys(
        bases, k_stride, v_stride, call, seq, span, h, m, m0, n0, IS_PARTIAL, BUILD
    )
    s = dot_rows(q_tile, k_tile, DIMS, BUILD)
    if not BUILD.is_folded:
        s, _ = add_terms(s, terms, seq, h, m, n[None, :], BUILD)
    if IS_PARTIAL:
        s = tl.where(seen, s, float("-inf"))
    p, rescale, row_max, row_sum = softmax_step(s, row_max, row_sum, terms.scale, BUILD.is_folded)
    if terms.rng is not None:
        p = tl.where(keep_tile(call, seq, h, m0, n0, False, BUILD), p, 0.0)
    acc = scale_tile(acc, rescale[:, None], VALUE_DIMS)
    return row_max, row_sum, dot_add(p, v_tile, acc, VALUE_DIMS, BUILD)


class Forward:
    """A forward made ready: everything but the tensors.

    out is `[B, M, H, E]`, lse `[B, H, M]`. is_split: whether what rounding takes off out is kept
    too. Nothing is checked here.
    """

    def __init__(self, call: TritonCall, out_dtype: torch.dtype, *, is_split: bool = False) -> None:
        self.call, self._dtype, self._is_split = call, out_dtype, is_split
        self._config = forward_config(call.key)

    def release(self) -> None:
        """Let go of all tensors: every further run brings its own, and its call."""
        self.call.release()

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: TritonCall | None = None) -> Result:
        """All new; of a head dim whose rows were widened out is a view.

        call: `TritonCall.on` these tensors, where it is not the one that the forward was made for.
        """
        call = self.call if call is None else call
        (B, M, H, _), E = q.shape, v.shape[-1]
        plan = call.plan_rows(self._config)
        out = call.new_rows((B, M, H, E), self._dtype)
        lse = call.new((B, H, M), torch.float32)
        # bf16 whatever out is: see `piece.new_remainder`.
        remainder = call.new(out.shape, torch.bfloat16) if self._is_split else None
        call.launch(
            _attention_fwd_kernel,
            (plan.n_programs,),
            self._config,
            (
                *call.qkv,
                call.operand(out),
                absent(Operand) if remainder is None else call.operand(remainder),
                call.statistics(lse),
                plan.call,
                call.build(self._config, is_forward=True),
            ),
        )
        if remainder is not None:
            remainder = cut_rows(remainder, E)
        return Result(cut_rows(out, E), lse, remainder)
