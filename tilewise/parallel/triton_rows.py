"""What a rank does to the rows of its own: the merge of a partial into the sum, and delta.

In plain torch the merge is a pass over out and a dozen over the lse, and delta five over out; here
each is one. The last merge may write out in the call's dtype too, which saves a pass.

Dims: B batch, M rows of the rank, H query heads, E value dim.
Grid: ceil(M / BLOCK_M) H B programs, a tile of rows of one head each.
Math: share = exp(part_lse - lse), out += share (part_out - out); delta = rowsum(dO * O) - dLSE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.partials import Partial
from ..dense.triton_call import TritonCall, cut_dim
from ..kernels.launch import Config, launch
from ..kernels.structs import Operand, absent
from ..kernels.tiles import load_tile, row_base, row_product, statistics_base, store_tile

_CONFIG = Config(32, 0, 4, 1)


@triton.jit
def _row_tile(M, H, BLOCK_M: tl.constexpr):
    """Batch row, head, first row of a program, and which of its rows there are."""
    n_tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (pid % n_tiles) * BLOCK_M
    return pid // n_tiles // H, (pid // n_tiles) % H, m0, m0 + tl.arange(0, BLOCK_M) < M


@triton.jit
def _lerp(a, b, share):
    return a + share * (b - a)


@triton.jit(do_not_specialize=["M", "H"])
def _merge_rows_kernel(
    out, part_out, final, lse, part_lse, merged_lse, M, H,
    DIMS: tl.constexpr, IS_WIDE: tl.constexpr, KEEPS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge `part` into `out`; out in the dtype of `final` too, where there is one.

    merged_lse: of the merge, apart from lse. Triton loads a row's number once for each layout that
    it is needed in, by several warps, and nothing keeps one warp from storing over it before.
    """
    b, h, m0, stored = _row_tile(M, H, BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    minus_inf = float("-inf")
    old = tl.load(statistics_base(lse, b, m0, h) + rows, mask=stored, other=minus_inf)
    new = tl.load(statistics_base(part_lse, b, m0, h) + rows, mask=stored, other=float("-inf"))
    top = tl.maximum(old, new)
    # Where both are empty the row stays as it is.
    is_empty = top == float("-inf")
    shift = tl.where(is_empty, 0.0, top)
    weight = tl.exp(new - shift)
    total = tl.where(is_empty, 1.0, tl.exp(old - shift) + weight)
    share = (weight / total)[:, None]
    merged_base = statistics_base(merged_lse, b, m0, h)
    tl.store(merged_base + rows, tl.where(is_empty, top, shift + tl.log(total)), mask=stored)
    base = row_base(out, b, m0, h)
    tile = load_tile(base, out.stride_m, stored, True, BLOCK_M, DIMS, IS_WIDE)
    part_base = row_base(part_out, b, m0, h)
    part = load_tile(part_base, part_out.stride_m, stored, True, BLOCK_M, DIMS, IS_WIDE)
    merged = ()
    for i in tl.static_range(len(DIMS) - 1):
        merged = merged + (_lerp(tile[i], part[i], share),)
    if KEEPS:
        store_tile(base, out.stride_m, merged, stored, BLOCK_M, DIMS, False, IS_WIDE)
    if final.ptr is not None:
        final_base = row_base(final, b, m0, h)
        store_tile(final_base, final.stride_m, merged, stored, BLOCK_M, DIMS, False, IS_WIDE)


@triton.jit(do_not_specialize=["M", "H"])
def _row_deltas_kernel(
    out, dout, dlse, delta, M, H,
    DIMS: tl.constexpr, IS_WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    b, h, m0, stored = _row_tile(M, H, BLOCK_M)
    rows = tl.arange(0, BLOCK_M)
    o_base, do_base = row_base(out, b, m0, h), row_base(dout, b, m0, h)
    o_tile = load_tile(o_base, out.stride_m, stored, True, BLOCK_M, DIMS, IS_WIDE)
    do_tile = load_tile(do_base, dout.stride_m, stored, True, BLOCK_M, DIMS, IS_WIDE)
    total = row_product(o_tile, do_tile, DIMS)
    if dlse.ptr is not None:
        total -= tl.load(statistics_base(dlse, b, m0, h) + rows, mask=stored, other=0.0)
    tl.store(statistics_base(delta, b, m0, h) + rows, total, mask=stored)


def merge_rows(
    total: Partial, part: Partial, final: Tensor | None = None, *, keeps: bool = True
) -> None:
    """`merge_into(total, part)` in one pass; with `final`, out goes there too, rounded.

    keeps: False where total's out is not needed then.
    total, part: out `[B, M, H, E]` fp32, lse `[B, H, M]` fp32 with a contiguous last dim.
    """
    outs = (total.out, part.out)
    _, M, H, E = total.out.shape
    operand = TritonCall.operand
    merged = torch.empty(total.lse.shape, dtype=total.lse.dtype, device=total.lse.device)
    arguments = (
        *(operand(x) for x in outs),
        absent(Operand) if final is None else operand(final),
        TritonCall.statistics(total.lse),
        TritonCall.statistics(part.lse),
        TritonCall.statistics(merged),
        M, H, cut_dim(E), _is_wide(*outs), keeps or final is None, _CONFIG.block_m,
    )  # fmt: skip
    _launch(_merge_rows_kernel, arguments, total.out)
    total.lse.copy_(merged)


def row_deltas(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """delta `[B, H, M]` of out and dout in any dtypes, `[B, M, H, E]`."""
    B, M, H, E = out.shape
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    delta = torch.empty(B, H, M, dtype=torch.float32, device=out.device)
    arguments = (
        TritonCall.operand(out),
        TritonCall.operand(dout),
        TritonCall.statistics(None if dlse is None else dlse.contiguous()),
        TritonCall.statistics(delta),
        M, H, cut_dim(E), _is_wide(out, dout), _CONFIG.block_m,
    )  # fmt: skip
    _launch(_row_deltas_kernel, arguments, out)
    return delta


def _launch(kernel: object, arguments: tuple[object, ...], out: Tensor) -> None:
    B, M, H = out.shape[:3]
    n_programs = -(-M // _CONFIG.block_m) * H * B if out.numel() else 0
    launch(kernel, (n_programs,), _CONFIG, arguments, out.device)


def _is_wide(*tensors: Tensor) -> bool:
    """Whether an offset inside a tile may pass 2^31."""
    return any(_CONFIG.block_m * x.stride(1) >= 1 << 31 for x in tensors)
