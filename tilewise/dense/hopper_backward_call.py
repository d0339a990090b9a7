"""The hopper backward's host side: buffers, descriptors, launches."""

from __future__ import annotations

from torch import Tensor

from ..kernels.launch import Config, Launch
from ..kernels.structs import code
from . import hopper_backward, hopper_rows
from .hopper_backward import BackwardBuild
from .hopper_config import backward_config, tile_dim
from .hopper_descriptors import describe_numbers, describe_tiles, spread
from .hopper_producer import SpanBuild
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
    piece = call.piece
    q, k, v = (spread(x) for x in call.tensors)
    out, dout = align_rows(out), spread(align_rows(dout.to(piece.q.dtype)))
    dlse = None if dlse is None else contiguous_statistics(dlse)
    dim, value_dim = tile_dim(piece.q.shape[-1]), tile_dim(piece.v.shape[-1])
    config = backward_config(dim, value_dim)
    by_rows, by_keys = call.plan_rows(config.launch), call.plan_keys(config.launch)
    n_blocks, place = by_rows.n_programs, by_rows.call.place
    rows = lse.new_empty(n_blocks * 2 * _M)
    buffer = lse.new_empty(n_blocks * _M * dim // _COLUMNS, _COLUMNS)
    inputs = (piece.q, piece.k, piece.v)
    dq, dk, dv = (new_rows(x.shape, x.dtype, x.device) for x in inputs)
    descriptors = (
        describe_tiles(q, _M, dim),
        describe_tiles(k, _N // 2, dim),
        describe_tiles(v, _N // 2, value_dim),
        describe_tiles(dout, _M, value_dim),
        describe_numbers(rows, [2 * _M]),
        describe_numbers(buffer, [_M * dim // 2 // _COLUMNS, _COLUMNS]),
        describe_tiles(dk, _N // 2, dim),
        describe_tiles(dv, _N // 2, value_dim),
    )
    build = BackwardBuild(
        dim, value_dim, call.place_kind, SpanBuild(call.mask_kind, _M, _N),
        config.slots, config.keeps_keys, config.registers,
    )  # fmt: skip
    by_block = Config(_M, 0, 4, 1)
    operands = call.operand(dk), call.operand(dv)
    call.launch_together(
        [
            Launch(
                hopper_rows._attention_bwd_hopper_prepare_kernel, (n_blocks,), by_block,
                (
                    call.operand(out), call.operand(dout), call.statistics(lse),
                    call.statistics(dlse), rows, buffer, place, dim, call.dims[1],
                    call.place_kind, call.is_wide(out, dout),
                ),
                (out.dtype, dlse is None, call.layout_tag(out, dout)),
            ),
            Launch(
                hopper_backward._attention_bwd_hopper_kernel, (by_keys.n_programs,), config.launch,
                (*descriptors, *operands, by_keys.call, code(n_blocks // call.H), build),
            ),
            Launch(
                hopper_rows._attention_bwd_hopper_finish_kernel, (n_blocks,), by_block,
                (
                    buffer, call.operand(dq), piece.terms.scale, place, dim, call.place_kind,
                ),
            ),
        ]
    )  # fmt: skip
    gradients = zip((dq, dk, dv), inputs, strict=True)
    return [cut_rows(gradient, x.shape[-1]) for gradient, x in gradients]
