"""Products of 64 rows of a warp group, and sums of them: what the hopper kernels are made of.

Dims: a ring is shared memory `[slots, 1, 1, rows, columns]`, as TMA fills it. A product over 192
    columns has two parts, and a sum of as many is a pair: see `first_columns`.
"""

from __future__ import annotations

from ..kernels.gluon import (
    fence_async_shared,
    gl,
    gluon,
    sync_partition,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ..kernels.placement import PACKED
from ..kernels.tiles import row_base
from .hopper_fresh import fresh_operand
from .hopper_producer import ROWS, first_columns


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def left_operand(columns):
    return gl.DotOperandLayout(0, accumulator(columns), 2)


@gluon.jit
def tile_at(ring, slot, ROWS_OF_TILE: gl.constexpr, DIM: gl.constexpr):
    return ring.index(slot).reshape([ROWS_OF_TILE, DIM])


@gluon.jit
def issue_product(left, ring, slot, WIDTH: gl.constexpr):
    """64 rows of `left` times those of a slot, `[64, rows of the slot]`, on its way."""
    FIRST: gl.constexpr = first_columns(WIDTH)
    N: gl.constexpr = ring.shape[3]
    x = gl.zeros([ROWS, N], gl.float32, accumulator(N))
    right = tile_at(ring, slot, N, ring.shape[4]).permute((1, 0))
    if FIRST == WIDTH:
        return warpgroup_mma(left, right, x, use_acc=False, is_async=True)
    else:
        REST: gl.constexpr = WIDTH - FIRST
        left_first, right_first = left.slice(0, FIRST, 1), right.slice(0, FIRST, 0)
        x = warpgroup_mma(left_first, right_first, x, use_acc=False, is_async=True)
        left_rest, right_rest = left.slice(FIRST, REST, 1), right.slice(FIRST, REST, 0)
        return warpgroup_mma(left_rest, right_rest, x, is_async=True)


@gluon.constexpr_function
def parts_of(width):
    """Of how many a product or a sum over these columns is made."""
    return 1 if first_columns(width) == width else 2


@gluon.jit
def zero_sum(WIDTH: gl.constexpr):
    """A sum of nothing yet; where it is one part, the other is a number that nobody reads."""
    FIRST: gl.constexpr = first_columns(WIDTH)
    x = gl.zeros([ROWS, FIRST], gl.float32, accumulator(FIRST))
    if FIRST == WIDTH:
        return x, 0
    else:
        return x, gl.zeros([ROWS, WIDTH - FIRST], gl.float32, accumulator(WIDTH - FIRST))


@gluon.jit
def issue_sum(left, ring, slot, x, rest, WIDTH: gl.constexpr):
    """A sum with `left` `[64, rows of the slot]` times a slot in it, on its way."""
    FIRST: gl.constexpr = first_columns(WIDTH)
    right = tile_at(ring, slot, ring.shape[3], ring.shape[4])
    operand = gl.convert_layout(left, left_operand(FIRST))
    if FIRST == WIDTH:
        x = warpgroup_mma(operand, right, x, is_async=True)
    else:
        REST: gl.constexpr = WIDTH - FIRST
        x = warpgroup_mma(operand, right.slice(0, FIRST, 1), x, is_async=True)
        operand = gl.convert_layout(left, left_operand(REST))
        rest = warpgroup_mma(operand, right.slice(FIRST, REST, 1), rest, is_async=True)
    return x, rest


@gluon.jit
def wait_for_sum(N_BEHIND: gl.constexpr, x, rest, WIDTH: gl.constexpr):
    """N_BEHIND: parts that were issued since, and need not be there."""
    if parts_of(WIDTH) == 1:
        x = warpgroup_mma_wait(N_BEHIND, [x])
    else:
        x, rest = warpgroup_mma_wait(N_BEHIND, [x, rest])
    return x, rest


# ---------------------------------------------------------------- results


@gluon.jit
def store_result(
    desc, ring, slot, out, at, x, rest, n_rows,
    COLUMNS: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr, BUILD: gl.constexpr,
):  # fmt: skip
    """A sum, of which n_rows are stored: added to what is there, or by way of a slot that nobody
    reads and TMA, which cuts it where storage ends. at: batch, head, row, column."""
    if BUILD.is_added:
        _store_sum(out, at, x, rest, n_rows, COLUMNS, WIDTH, True, BUILD)
    elif BUILD.place >= PACKED:
        # TMA does not know where a document ends.
        if n_rows >= ROWS:
            _stage_sum(desc, ring, slot, at, x, rest, DIM, WIDTH)
        else:
            _store_sum(out, at, x, rest, n_rows, COLUMNS, WIDTH, False, BUILD)
    else:
        _stage_sum(desc, ring, slot, at, x, rest, DIM, WIDTH)


@gluon.jit
def _stage_sum(desc, ring, slot, at, x, rest, DIM: gl.constexpr, WIDTH: gl.constexpr):
    """Rounded, into a slot, and off."""
    FIRST: gl.constexpr = first_columns(WIDTH)
    tile = tile_at(ring, slot, ROWS, DIM)
    if FIRST == WIDTH:
        tile.store(x.to(ring.dtype))
    else:
        tile.slice(0, FIRST, 1).store(x.to(ring.dtype))
        tile.slice(FIRST, WIDTH - FIRST, 1).store(rest.to(ring.dtype))
    fence_async_shared()
    sync_partition()
    tma_store(desc, at, ring.index(slot))


@gluon.jit
def _store_sum(
    out, at, x, rest, n_rows, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, ADD: gl.constexpr,
    BUILD: gl.constexpr,
):  # fmt: skip
    FIRST: gl.constexpr = first_columns(WIDTH)
    store_rows(out, at, x, n_rows, 0, COLUMNS, ADD, BUILD)
    if FIRST < WIDTH:
        store_rows(out, at, rest, n_rows, FIRST, COLUMNS, ADD, BUILD)


@gluon.jit
def store_rows(
    out, at, x, n_rows, START: gl.constexpr, columns, ADD: gl.constexpr, BUILD: gl.constexpr
):  # fmt: skip
    """The first n_rows of x into memory, from column START on, of which there are `columns`; with
    ADD added to what is there."""
    LAYOUT: gl.constexpr = x.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    cols = START + gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    out = fresh_operand(out, BUILD)
    base = row_base(out, at[0], at[2], at[1])
    ptrs = base + (rows.to(gl.int64) * out.stride_m)[:, None] + cols[None, :]
    mask = (rows < n_rows)[:, None] & (cols < columns)[None, :]
    if ADD:
        x += gl.load(ptrs, mask=mask, other=0.0)
    gl.store(ptrs, x.to(out.ptr.dtype.element_ty), mask=mask)
