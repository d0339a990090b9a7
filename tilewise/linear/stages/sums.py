"""Sums of what programs found of one result each, in an order that never changes.

Dims: parts `[n, R, W]`, sums `[n, W]`: rows of heads that share q and k, or (W 1) numbers of a head
    that blocks of D share. Grid: blocks of n x one or two results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...kernels.structs import decode
from .tiles import narrow


@triton.jit
def _sum_parts_kernel(
    first, first_out, second, second_out, n_rows,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """second, second_out: of the same shapes, or None."""
    pid = tl.program_id(0)
    n = decode(n_rows)
    if second is None:
        _sum_parts(first, first_out, pid, n, PARTS, WIDTH, ROWS, BLOCK, BUILD)
    else:
        if pid % 2 == 0:
            _sum_parts(first, first_out, pid // 2, n, PARTS, WIDTH, ROWS, BLOCK, BUILD)
        else:
            _sum_parts(second, second_out, pid // 2, n, PARTS, WIDTH, ROWS, BLOCK, BUILD)


@triton.jit
def _sum_parts(
    parts, out, block, n,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    rows = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)[None, :]
    mask = (rows < n) & (cols < WIDTH)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for part in range(0, PARTS):
        acc += tl.load(parts + (rows * PARTS + part) * WIDTH + cols, mask=mask, other=0.0)
    tl.store(out + rows * WIDTH + cols, narrow(acc, out.dtype.element_ty, BUILD), mask=mask)
