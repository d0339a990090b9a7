"""Forward of the triton backend: one program per query tile, online softmax over key tiles.

Dims: q `[B, M, H, D]`, k `[B, N, G, D]`, v `[B, N, G, E]`, out `[B, M, H, E]`, lse `[B, H, M]`;
    packed tensors have one batch row whose documents are sequences.
Grid: query tiles x heads x batch rows, on axis 0; query heads of one kv head are neighbours.
Math: FlashAttention-2 (arXiv 2307.08691), algorithm 1. Tiles that every row sees whole need no test
    and run first; then those that some rows see in part.
Units: scores as in `kernels/softmax.py`; lse natural, fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.keys import load_keys
from ..kernels.launch import relaunch
from ..kernels.masks import key_span, partial_tile, whole_tile
from ..kernels.placement import FIRST_Q_TILE, locate
from ..kernels.scores import add_terms, keep_tile
from ..kernels.softmax import join_sink, softmax_end, softmax_step
from ..kernels.structs import decode
from ..kernels.tiles import (
    clean_rows,
    dot_add,
    dot_rows,
    load_tile,
    row_base,
    scale_tile,
    statistics_base,
    store_tile,
    zero_tile,
)
from .config import forward_config
from .triton_call import TritonCall, align_rows, cut_rows, padded_dim
from .triton_placement import UNIFORM


@triton.jit
def _attention_fwd_kernel(q, k, v, out, lse, call, BUILD: tl.constexpr):
    """The output of one query tile of one head: out and its lse."""
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
    span = key_span(call.mask, seq, h, tile, list_tile, BUILD)
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
    """A forward made ready: everything but the tensors. That of a reusable call runs again for
    others of the same layout and alignment.

    out is `[B, M, H, E]`, lse `[B, H, M]`. Nothing is checked here.
    """

    def __init__(self, call: TritonCall, out_dtype: torch.dtype) -> None:
        piece = call.piece
        (B, M, H, _), self._E = piece.q.shape, piece.v.shape[-1]
        self.call, self._dtypes = call, (out_dtype, torch.float32)
        E = padded_dim(self._E)
        self._shapes = (B, M, H, E), (B, H, M)
        self._config = forward_config(call.key)
        plan = call.plan_rows(self._config)
        self._grid = (plan.n_programs, 1, 1)
        self._rest: tuple[Any, ...] = (plan.call, call.build(self._config))
        # Found by the first run of a reusable call.
        self._compiled: Any = None
        self._strides: tuple[tuple[Any, ...], ...] = ()

    def release(self) -> None:
        """Let go of all tensors: every further run brings its own, and a packed one its call."""
        if self.call.place_kind != UNIFORM:
            self._rest = (None, self._rest[1])
        self.call.release()

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, call: TritonCall | None = None
    ) -> tuple[Tensor, Tensor]:
        """out and lse, new; of a head dim whose rows were widened out is a view.

        call: `TritonCall.on` these tensors, where sequences stand elsewhere than at first.
        """
        rest = self._rest
        if call is not None:
            rest = (call.plan_rows(self._config).call, rest[1])
        (out_shape, lse_shape), (out_dtype, lse_dtype) = self._shapes, self._dtypes
        out = torch.empty(out_shape, dtype=out_dtype, device=self.call.device)
        lse = torch.empty(lse_shape, dtype=lse_dtype, device=self.call.device)
        if self._compiled is None:
            self._run_first(q, k, v, out, lse, rest)
        else:
            # Written out, and with addresses for tensors: this is the way of every warm call.
            sq, sk, sv, so, sl = self._strides
            tensors = (
                (q.data_ptr(), *sq), (k.data_ptr(), *sk), (v.data_ptr(), *sv),
                (out.data_ptr(), *so), (lse.data_ptr(), *sl),
            )  # fmt: skip
            relaunch(self._compiled, self._grid, (*tensors, *rest), self.call.device)
        return cut_rows(out, self._E), lse

    def _run_first(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...]
    ) -> None:
        operands = [TritonCall.operand(align_rows(x)) for x in (q, k, v)]
        results = TritonCall.operand(out), TritonCall.statistics(lse)
        compiled = self.call.launch(
            _attention_fwd_kernel, self._grid, self._config, (*operands, *results, *rest)
        )
        # Where an input had to be copied, so has one like it.
        if all(operand.ptr is x for operand, x in zip(operands, (q, k, v), strict=True)):
            self._strides = tuple(operand[1:] for operand in (*operands, *results))
            self._compiled = compiled
