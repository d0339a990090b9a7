"""The hopper backward's host side: buffers, descriptors, launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.mask import UNBOUNDED
from ..kernels.launch import Config, Launch
from ..kernels.structs import Operand, absent, code
from . import (
    hopper_backward,
    hopper_backward_common,
    hopper_call,
    hopper_producer,
    hopper_query_backward,
    hopper_rows,
    hopper_wide_backward,
)
from .hopper_backward_common import BackwardBuild, Heads
from .hopper_config import backward_config, prepare_config, product_dim, query_config, tile_dim
from .hopper_descriptors import describe_numbers, describe_tiles, spread
from .hopper_producer import SpanBuild
from .hopper_query_backward import Numbers, Outputs, QueryBuild
from .piece import Piece, Result
from .triton_call import L2_BYTES, TritonCall, align_rows, contiguous_statistics, cut_rows
from .triton_placement import DOCUMENTS, PACKED

# Rows of a block, and keys of a tile.
_M, _ROWS = hopper_backward_common.BLOCK_M.value, hopper_producer.ROWS.value
_COLUMNS = hopper_backward.BUFFER_COLUMNS.value
# Head dims up to which dK and dV of two tiles of keys fit into registers.
_WIDEST_OF_ONE_PASS = 128


def attention_gradients(
    call: TritonCall,
    upstream: tuple[Tensor, Tensor | None],
    result: Result,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """See `triton_backward.attention_gradients`; bias and slopes have none."""
    (dout, dlse), lse = upstream, contiguous_statistics(result.lse)
    inputs = (call.piece.q, call.piece.k, call.piece.v)
    gradients = [call.new_rows(x.shape, x.dtype) for x in inputs]
    dlse = None if dlse is None else contiguous_statistics(dlse)
    # All there is in the gradient of a sink is delta, for which P in `out` is too rounded.
    sums = torch.empty_like(lse) if wanted[2] else None
    _Backward(call, dout, gradients, sums=sums).run(result, lse, dlse)
    extras = [lse.new_empty(0) for _ in range(3)]
    if sums is not None and call.piece.terms.sinks is not None:
        extras[2] = _sink_gradient(call.piece.terms.sinks, lse, dlse, sums)
    cut = (cut_rows(grad, x.shape[-1]) for grad, x in zip(gradients, inputs, strict=True))
    return [*cut, *extras]


def _sink_gradient(sinks: Tensor, lse: Tensor, dlse: Tensor | None, sums: Tensor) -> Tensor:
    """sums: rowsum(P dP) `[B, H, M]`."""
    delta = sums if dlse is None else sums - dlse
    shares = torch.exp(sinks.float()[:, None] - lse) * delta
    # A row that nobody owns has no sink.
    return -torch.where(lse.isneginf(), 0.0, shares).sum((0, 2)).to(sinks.dtype)


def attention_bwd(
    piece: Piece, dout: Tensor, lse: Tensor, delta: Tensor, buffers: tuple[Tensor, Tensor, Tensor]
) -> None:
    """See `triton_backward.attention_bwd`."""
    # A buffer whose rows are not aligned is added to in a copy.
    targets = [align_rows(x) for x in buffers]
    backward = _Backward(TritonCall(piece), dout, targets, is_added=True)
    backward.run(None, contiguous_statistics(lse), contiguous_statistics(-delta))
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            buffer.copy_(target[..., : buffer.shape[-1]])


class _Backward:
    """One call's gradients of q, k and v, written or added to."""

    def __init__(
        self,
        call: TritonCall,
        dout: Tensor,
        gradients: Sequence[Tensor],
        *,
        sums: Tensor | None = None,
        is_added: bool = False,
    ) -> None:
        """sums: where rowsum(P dP) of each row `[B, H, M]` is written, if it is wanted."""
        self._call, self._is_added, self._sums = call, is_added, sums
        self._dq, self._dk, self._dv = gradients
        self._q, self._k, self._v = (spread(x) for x in call.tensors)
        self._dout = spread(align_rows(dout.to(call.piece.q.dtype)))
        self._dims = tile_dim(call.piece.q.shape[-1]), tile_dim(call.piece.v.shape[-1])
        self._widths = product_dim(call.piece.q.shape[-1]), product_dim(call.piece.v.shape[-1])
        self._is_wide = max(self._dims) > _WIDEST_OF_ONE_PASS
        # Where dQ is added up by whoever comes, its rows have no owner.
        needs_owners = call.piece.terms.is_deterministic or sums is not None
        self._is_one_pass = not (self._is_wide or needs_owners)
        self._config = backward_config(*self._dims, has_dq=self._is_one_pass)
        self._has_queries = self._config.has_queries
        # Consumers share the columns, or one group has them all.
        self._dq_columns = self._dims[0] if self._has_queries else self._dims[0] // 2
        self._by_rows = call.plan_rows(self._config.launch)
        self._n_blocks = self._by_rows.n_programs
        self._rows = self._dout.new_empty(self._n_blocks * 2 * _M, dtype=torch.float32)

    def run(self, result: Result | None, lse: Tensor, dlse: Tensor | None) -> None:
        """result: of the forward, where delta comes of it; else it is -dlse."""
        given = () if result is None else (result.out, result.remainder)
        outs = [align_rows(x) for x in given if x is not None]
        if self._is_one_pass:
            dim = self._dims[0]
            buffer = self._rows.new_empty(self._n_blocks * _M * dim // _COLUMNS, _COLUMNS)
            of_part = _M * self._dq_columns // _COLUMNS
            columns = describe_numbers(buffer, [of_part, _COLUMNS])
            first, last = self._prepare(outs, lse, dlse, buffer, dim), self._finish(buffer)
        else:
            columns = None
            first, last = self._prepare(outs, lse, dlse, self._rows, 0), self._queries()
        self._call.launch_together([first, self._keys(columns), last])

    def _prepare(
        self,
        outs: Sequence[Tensor],
        lse: Tensor,
        dlse: Tensor | None,
        buffer: Tensor,
        dim: int,
    ) -> Launch:
        """outs: out and what rounding took off it, or fewer. dim: of dQ in the buffer, 0 for
        none."""
        call, dout = self._call, self._dout
        operands = [*map(call.operand, outs), absent(Operand), absent(Operand)]
        read = (*outs, dout)
        return Launch(
            hopper_rows._attention_bwd_hopper_prepare_kernel,
            (self._n_blocks,),
            prepare_config(self._dims[1]),
            (
                *operands[:2], call.operand(dout),
                call.statistics(lse), call.statistics(dlse), self._rows, buffer,
                self._by_rows.call.place, dim, call.dims[1], call.place_kind, call.is_wide(*read),
            ),
            (*(x.dtype for x in outs), dlse is None, call.layout_tag(*read)),
        )  # fmt: skip

    def _keys(self, buffer: Any) -> Launch:
        """dK and dV. buffer: the descriptor of the one that dQ is added up in, if it is."""
        call, config, terms = self._call, self._config, self._call.piece.terms
        (dim, value_dim), block_n = self._dims, config.launch.block_n
        plan = call.plan_keys(config.launch)
        order = self._order(call.G, call.M * call.H // max(1, call.G))
        n_programs = plan.n_programs
        if not self._is_wide:
            device = call.device
            counter = hopper_call._counter(device)
            order = order._replace(ptr=counter, n_tiles=code(n_programs))
            n_programs = min(n_programs, hopper_call._multiprocessors(device))
        # What is added to is read and written by rows.
        by_tma = (self._k, self._v) if self._is_added else (self._dk, self._dv)
        build = BackwardBuild(
            dim, value_dim, *self._widths, call.place_kind, SpanBuild(call.mask_kind, _M, block_n),
            call.is_folded, terms.softcap is not None, terms.alibi_slopes is not None,
            self._is_one_pass, self._has_queries, self._dq_columns, config.key_slots, config.slots,
            config.keeps_keys, config.keeps_values, config.takes_turns, config.registers,
            self._dk.shape[-1], self._dv.shape[-1], self._is_added,
        )  # fmt: skip
        return Launch(
            hopper_wide_backward._attention_bwd_hopper_wide_kernel
            if self._is_wide
            else hopper_backward._attention_bwd_hopper_kernel,
            (n_programs,),
            config.launch._replace(begins_early=True),
            (
                describe_tiles(self._q, _M, dim),
                describe_tiles(self._k, _ROWS, dim),
                describe_tiles(self._v, _ROWS, value_dim),
                describe_tiles(self._dout, _M, value_dim),
                describe_numbers(self._rows, [2 * _M]),
                buffer,
                describe_tiles(by_tma[0], _ROWS, dim),
                describe_tiles(by_tma[1], _ROWS, value_dim),
                call.operand(self._dk), call.operand(self._dv), plan.call, order, build,
            ),
            (self._is_one_pass, *self._tag(self._dk, self._dv)),
        )  # fmt: skip

    def _tag(self, *outputs: Tensor) -> tuple[bool, ...]:
        """Of a launch that writes them by TMA, or adds to them by rows."""
        return (True, *self._call.layout_tag(*outputs)) if self._is_added else ()

    def _order(self, heads: int, rows: int) -> Heads:
        """Of programs that own keys or rows of `heads` heads, and read `rows` rows for each (of Q
        and dO, or of K and V): tiles that see most first, as far as those rows stay in L2."""
        call, band = self._call, self._call.band
        n_heads = heads * (1 if call.place_kind in (PACKED, DOCUMENTS) else call.B)
        is_uneven = band is not None and (band.left < UNBOUNDED or band.right < UNBOUNDED)
        head_bytes = max(1, rows * sum(self._dims) * self._q.element_size())
        together = max(1, min(n_heads, L2_BYTES // head_bytes)) if is_uneven else 1
        return Heads(None, None, code(n_heads), code(together), code(self._n_blocks // call.H))

    def _finish(self, buffer: Tensor) -> Launch:
        """dQ from the buffer."""
        call, dq = self._call, self._dq
        return Launch(
            hopper_rows._attention_bwd_hopper_finish_kernel,
            (self._n_blocks,),
            Config(_M, 0, 4, 1, begins_early=True),
            (
                buffer, call.operand(dq), call.piece.terms.scale, self._by_rows.call.place,
                dq.shape[-1], self._dims[0], call.place_kind, self._is_added,
            ),
            self._tag(dq),
        )  # fmt: skip

    def _queries(self) -> Launch:
        """dQ by programs that own its rows, and the sums."""
        call, dq, terms, band = self._call, self._dq, self._call.piece.terms, self._call.band
        dim, value_dim = self._dims
        config = query_config(*self._dims)
        plan = call.plan_rows(config.launch)
        block_m, block_n = config.launch[:2]
        assert band is not None
        build = QueryBuild(
            dim, value_dim, *self._widths, call.place_kind,
            SpanBuild(call.mask_kind, block_m, block_n),
            SpanBuild(call.mask_kind, _ROWS, block_n),
            band.left < UNBOUNDED or band.lows is not None,
            call.is_folded, terms.softcap is not None, terms.alibi_slopes is not None,
            self._sums is not None, config.k_slots, config.v_slots, config.registers,
            dq.shape[-1], self._is_added,
        )  # fmt: skip
        return Launch(
            hopper_query_backward._attention_bwd_hopper_query_kernel,
            (plan.n_programs,),
            config.launch,
            (
                describe_tiles(self._q, _ROWS, dim),
                describe_tiles(self._k, block_n, dim),
                describe_tiles(self._v, block_n, value_dim),
                describe_tiles(self._dout, _ROWS, value_dim),
                describe_tiles(self._q if self._is_added else dq, _ROWS, dim),
                Outputs(call.operand(dq), call.statistics(self._sums)),
                Numbers(self._rows, self._by_rows.call.place.table, code(self._n_blocks // call.H)),
                plan.call, self._order(call.H, call.N * call.G // max(1, call.H)), build,
            ),
            (self._sums is not None, *self._tag(dq)),
        )  # fmt: skip
