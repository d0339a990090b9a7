"""The hopper backward's host side: buffers, descriptors, launches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..kernels.launch import Config, Launch
from ..kernels.structs import Operand, absent, code
from . import hopper_backward, hopper_rows
from .hopper_backward import BackwardBuild
from .hopper_config import backward_config, tile_dim
from .hopper_descriptors import describe_numbers, describe_tiles, spread
from .hopper_producer import SpanBuild
from .piece import Piece
from .triton_call import TritonCall, align_rows, contiguous_statistics, cut_rows, new_rows

_M, _N = hopper_backward.BLOCK_M.value, hopper_backward.BLOCK_N.value
_COLUMNS = hopper_backward.BUFFER_COLUMNS.value


def attention_gradients(
    call: TritonCall, upstream: tuple[Tensor, Tensor | None], result: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Gradients of q, k and v, in their dtypes.

    upstream: dout `[B, M, H, E]`, and dlse `[B, H, M]` or None. result: out and lse.
    """
    (dout, dlse), (out, lse) = upstream, result
    inputs = (call.piece.q, call.piece.k, call.piece.v)
    gradients = [new_rows(x.shape, x.dtype, x.device) for x in inputs]
    dlse = None if dlse is None else contiguous_statistics(dlse)
    _launch(call, align_rows(out), dout, (lse, dlse), gradients)
    return [cut_rows(grad, x.shape[-1]) for grad, x in zip(gradients, inputs, strict=True)]


def attention_bwd(
    piece: Piece, dout: Tensor, lse: Tensor, delta: Tensor, buffers: tuple[Tensor, Tensor, Tensor]
) -> None:
    """See `triton_backward.attention_bwd`."""
    # A buffer whose rows are not aligned is added to in a copy.
    targets = [align_rows(x) for x in buffers]
    statistics = contiguous_statistics(lse), contiguous_statistics(-delta)
    _launch(TritonCall(piece), None, dout, statistics, targets, is_added=True)
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            buffer.copy_(target[..., : buffer.shape[-1]])


def _launch(
    call: TritonCall,
    out: Tensor | None,
    dout: Tensor,
    statistics: tuple[Tensor, Tensor | None],
    gradients: Sequence[Tensor],
    *,
    is_added: bool = False,
) -> None:
    """Write gradients of q, k and v, or add to them.

    out: where delta comes of it; else it is -dlse. statistics: lse and dlse.
    """
    (lse, dlse), (dq, dk, dv) = statistics, gradients
    piece = call.piece
    q, k, v = (spread(x) for x in call.tensors)
    dout = spread(align_rows(dout.to(piece.q.dtype)))
    dim, value_dim = tile_dim(piece.q.shape[-1]), tile_dim(piece.v.shape[-1])
    config = backward_config(dim, value_dim)
    by_rows, by_keys = call.plan_rows(config.launch), call.plan_keys(config.launch)
    n_blocks, place = by_rows.n_programs, by_rows.call.place
    rows = lse.new_empty(n_blocks * 2 * _M)
    buffer = lse.new_empty(n_blocks * _M * dim // _COLUMNS, _COLUMNS)
    # What is added to is read and written by rows.
    by_tma = (k, v) if is_added else (dk, dv)
    descriptors = (
        describe_tiles(q, _M, dim),
        describe_tiles(k, _N // 2, dim),
        describe_tiles(v, _N // 2, value_dim),
        describe_tiles(dout, _M, value_dim),
        describe_numbers(rows, [2 * _M]),
        describe_numbers(buffer, [_M * dim // 2 // _COLUMNS, _COLUMNS]),
        describe_tiles(by_tma[0], _N // 2, dim),
        describe_tiles(by_tma[1], _N // 2, value_dim),
    )
    build = BackwardBuild(
        dim, value_dim, call.place_kind, SpanBuild(call.mask_kind, _M, _N),
        config.slots, config.keeps_keys, config.registers, dk.shape[-1], dv.shape[-1], is_added,
    )  # fmt: skip
    by_block = Config(_M, 0, 4, 1)
    operands = call.operand(dk), call.operand(dv)
    outs = (dout,) if out is None else (out, dout)
    call.launch_together(
        [
            Launch(
                hopper_rows._attention_bwd_hopper_prepare_kernel, (n_blocks,), by_block,
                (
                    absent(Operand) if out is None else call.operand(out), call.operand(dout),
                    call.statistics(lse), call.statistics(dlse), rows, buffer, place, dim,
                    call.dims[1], call.place_kind, call.is_wide(*outs),
                ),
                (None if out is None else out.dtype, dlse is None, call.layout_tag(*outs)),
            ),
            Launch(
                hopper_backward._attention_bwd_hopper_kernel, (by_keys.n_programs,), config.launch,
                (*descriptors, *operands, by_keys.call, code(n_blocks // call.H), build),
                (is_added, *call.layout_tag(dk, dv)) if is_added else (),
            ),
            Launch(
                hopper_rows._attention_bwd_hopper_finish_kernel, (n_blocks,), by_block,
                (
                    buffer, call.operand(dq), piece.terms.scale, place, dq.shape[-1], dim,
                    call.place_kind, is_added,
                ),
                (is_added, *call.layout_tag(dq)) if is_added else (),
            ),
        ]
    )  # fmt: skip
