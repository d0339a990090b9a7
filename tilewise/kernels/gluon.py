"""Gluon as the Hopper kernels use it: the one place that knows Triton's versions, and PTX.

Units: a named barrier counts threads; 32 to a warp.

Named barriers, of 16 that a program has: Triton takes 0 for the first partition and its workers'
start, and 1 + i for partition i. `FIRST_FREE` and above are the kernels' own.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = [
    "FIRST_FREE",
    "TensorDescriptor",
    "as_atoms",
    "as_blocks",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "sync_partition",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "tma_store_wait",
    "warpgroup_mma",
    "warpgroup_mma_init",
    "warpgroup_mma_wait",
]

FIRST_FREE = gl.constexpr(6)

# Triton 3.7 and later have new names for them.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Waits until shared memory has been read, not until the bytes have arrived.
tma_store_wait = tma.store_wait
# A barrier of all threads of a partition.
sync_partition = getattr(gl, "barrier", None) or gl.thread_barrier
_reinterpret = getattr(
    gl.shared_memory_descriptor,
    "reinterpret",
    getattr(gl.shared_memory_descriptor, "_reinterpret", None),
)


@builtin
def as_atoms(ring, n_atoms, width, _semantic=None):
    """A ring of tiles in an `NVMMASharedLayout` as its atoms of 8 rows, `[n_atoms, 8, width]`.

    They lie one after the other: slots, panels of `width` columns, rows.
    """
    n_atoms, width = _unwrap_if_constexpr(n_atoms), _unwrap_if_constexpr(width)
    layout = gl.NVMMASharedLayout(2 * width, 16, rank=2)
    return _reinterpret(ring, ring.dtype, [n_atoms, 8, width], layout, _semantic=_semantic)


@builtin
def as_blocks(ring, n_blocks, rows, width, _semantic=None):
    """The same as blocks of whole atoms, `[n_blocks, 1, 1, rows, width]`, each as TMA copies it."""
    n_blocks, rows, width = (_unwrap_if_constexpr(x) for x in (n_blocks, rows, width))
    layout = gl.NVMMASharedLayout(2 * width, 16, rank=4)
    shape = [n_blocks, 1, 1, rows, width]
    return _reinterpret(ring, ring.dtype, shape, layout, _semantic=_semantic)


@builtin
def tma_reduce_add(desc, at, tile, _semantic=None):
    """Add a tile in shared memory to device memory; `tma_store_wait` counts it as a store."""
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, at, tile.handle)


# ---------------------------------------------------------------- named barriers


@gluon.jit
def barrier_sync(barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier and wait for all of its threads. WARPS: of this partition."""
    _barrier("bar.sync $1, $2; mov.b32 $0, 0;", barrier, THREADS, WARPS)


@gluon.jit
def barrier_arrive(barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier and go on."""
    _barrier("bar.arrive $1, $2; mov.b32 $0, 0;", barrier, THREADS, WARPS)


@gluon.jit
def _barrier(PTX: gl.constexpr, barrier, THREADS: gl.constexpr, WARPS: gl.constexpr):
    # One element a thread, so that every thread arrives once.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    x = gl.full([32 * WARPS], 0, gl.int32, LAYOUT)
    gl.inline_asm_elementwise(
        PTX, "=r,r,r", [x + barrier, x + THREADS], dtype=gl.int32, is_pure=False, pack=1
    )


# ---------------------------------------------------------------- launches that overlap


@gluon.jit
def begin_next():
    """Of the next launch, where it is `Config.begins_early`, programs may start once all of this
    one have come by here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_last():
    """Until the launch before has ended, and what it wrote is there."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# ---------------------------------------------------------------- a flag that a warp group shares
#
# A tensor's value cannot become a scalar without a reduction through shared memory. A register of
# the kernel's function can: one asm declares it, the vote of all threads sets it, another reads it.


@gluon.constexpr_function
def _declare_ptx(name):
    return f".reg .b32 {name}; mov.b32 {name}, 0; mov.b32 $0, $1;"


@gluon.constexpr_function
def _vote_ptx(name, barrier, limit):
    return (
        "{ .reg .pred p, q; .reg .f32 t; max.f32 t, $2, $3; "
        f"setp.ge.f32 p, t, {limit}; barrier.cta.red.or.pred q, {barrier}, 128, p; "
        f"selp.b32 {name}, 1, 0, q; mov.b32 $0, 0; mov.b32 $1, 0; }}"
    )


@gluon.constexpr_function
def _read_ptx(name):
    return f"mov.b32 $0, {name};"


@gluon.constexpr_function
def _own_barrier(partition):
    """Triton's barrier of a partition: a vote meets the same threads in the same order."""
    return 0 if partition == 0 else 1 + partition


@gluon.jit
def flag_declare(NAME: gl.constexpr, some_int):
    """Once a partition, before anything else of the flag. some_int: any int32 scalar."""
    ptx: gl.constexpr = _declare_ptx(NAME)
    gl.inline_asm_elementwise(ptx, "=r,r", [some_int], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def flag_vote(NAME: gl.constexpr, PARTITION: gl.constexpr, x, LIMIT: gl.constexpr):
    """Set the flag where some x of the warp group is at least LIMIT, an f32 as PTX writes it.

    x: two elements in each thread, or the barrier would run more than once. A NaN does not count.
    """
    ptx: gl.constexpr = _vote_ptx(NAME, _own_barrier(PARTITION), LIMIT)
    gl.inline_asm_elementwise(ptx, "=r,=r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2)


@gluon.jit
def flag_read(NAME: gl.constexpr, some_int):
    """The flag as a scalar. some_int: one that changes between votes, which pins the order."""
    ptx: gl.constexpr = _read_ptx(NAME)
    return gl.inline_asm_elementwise(ptx, "=r,r", [some_int], dtype=gl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------- a number in each lane of a warp
#
# Of a partition of one warp. In the same way: a register holds a number of each lane's own, and a
# shuffle hands that of any lane to all of them, as a scalar.


@gluon.constexpr_function
def _keep_ptx(name):
    return f"mov.b32 {name}, $1; mov.b32 $0, 0;"


@gluon.constexpr_function
def _shuffle_ptx(name):
    return f"shfl.sync.idx.b32 $0, {name}, $1, 31, 0xffffffff;"


@gluon.jit
def lanes_keep(NAME: gl.constexpr, x):
    """Keep x, int32 `[32]`, in the register that `flag_declare` made."""
    ptx: gl.constexpr = _keep_ptx(NAME)
    gl.inline_asm_elementwise(ptx, "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def lanes_read(NAME: gl.constexpr, lane):
    """What was kept of a lane, a scalar. All lanes have to come by."""
    ptx: gl.constexpr = _shuffle_ptx(NAME)
    return gl.inline_asm_elementwise(ptx, "=r,r", [lane], dtype=gl.int32, is_pure=False, pack=1)


# ---------------------------------------------------------------- accumulators
#
# In a wgmma accumulator `[rows, n]` a thread holds column pairs: n = 8 i + 2 lane + j, for i below
# n / 8, j below 2 and its lane of four in the row.


@gluon.jit
def exp2_fast(x):
    """2^x of normal results; smaller ones are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh_fast(x):
    """tanh to 1e-7, absolutely; tanh.approx would be 5e-4 off."""
    e = exp2_fast(x * 2.8853900817779268)
    r = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [e + 1.0], dtype=gl.float32, is_pure=True, pack=1
    )
    return 1.0 - 2.0 * r


@gluon.jit
def sum_in_thread(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Sums of a row over the columns that each of its four threads holds, `[rows, 4]`."""
    return gl.sum(gl.sum(x.reshape([ROWS, COLS // 8, 4, 2]), 3), 1)


@gluon.constexpr_function
def _columns_of_lanes(n):
    """Where the n columns of an accumulator's row lie: 16 bytes of each lane of four, side by side,
    so that four lanes read 64 bytes of different banks at a time."""
    in_thread = [[1], [2], *([1 << i] for i in range(4, 30) if 1 << i < n)]
    lanes = [[4], [8], [0], [0], [0]]
    return gl.DistributedLinearLayout(in_thread, lanes, [[0], [0]], [], [n])


@gluon.jit
def load_columns(rows, OFFSET: gl.constexpr, COLS: gl.constexpr, LAYOUT: gl.constexpr):
    """A number for each column of an accumulator, fp32, 16 bytes at a time.

    Column 16 t + 8 u + 2 lane + j stands at OFFSET + 16 t + 4 lane + 2 u + j.
    """
    x = rows.slice(OFFSET, COLS, 0).load(_columns_of_lanes(COLS))
    x = x.reshape([COLS // 16, 4, 2, 2]).permute((0, 2, 1, 3)).reshape([COLS])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def subtract_distance(x, position, slope, ROWS: gl.constexpr, COLS: gl.constexpr):
    """x minus slope times the distance of each column from its row's position, an f32."""
    LAYOUT: gl.constexpr = x.type.layout
    x4 = x.reshape([ROWS, COLS // 8, 4, 2])
    QUAD: gl.constexpr = x4.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, QUAD)))
    OF_I: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, QUAD)))
    OF_LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, QUAD)))
    OF_J: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, QUAD)))
    i = gl.arange(0, COLS // 8, layout=OF_I)[None, :][:, :, None][:, :, :, None]
    lane = gl.arange(0, 4, layout=OF_LANE)[None, :][:, None, :][:, :, :, None]
    j = gl.arange(0, 2, layout=OF_J)[None, :][:, None, :][:, :, None, :]
    position = gl.convert_layout(position, OF_ROW)[:, None][:, :, None][:, :, :, None]
    position = position - (lane * 2).to(gl.float32)
    x4 = x4 - slope * gl.abs(position - (i * 8 + j).to(gl.float32))
    return gl.convert_layout(x4.reshape([ROWS, COLS]), LAYOUT)


@gluon.jit
def mask_columns(
    x, start, stop, HAS_START: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """x where start <= column < stop, a bound for each row, and -inf elsewhere.

    The columns of a thread are constants beside its lane, so a test is one comparison.
    """
    LAYOUT: gl.constexpr = x.type.layout
    x4 = x.reshape([ROWS, COLS // 8, 4, 2])
    QUAD: gl.constexpr = x4.type.layout
    OF_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, QUAD)))
    OF_I: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, QUAD)))
    OF_LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, QUAD)))
    OF_J: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, QUAD)))
    i = gl.arange(0, COLS // 8, layout=OF_I)[None, :][:, :, None][:, :, :, None]
    lane = gl.arange(0, 4, layout=OF_LANE)[None, :][:, None, :][:, :, :, None]
    j = gl.arange(0, 2, layout=OF_J)[None, :][:, None, :][:, :, None, :]
    column = i * 8 + j
    stop = gl.convert_layout(stop, OF_ROW)[:, None][:, :, None][:, :, :, None] - lane * 2
    x4 = gl.where(column < stop, x4, float("-inf"))
    if HAS_START:
        start = gl.convert_layout(start, OF_ROW)[:, None][:, :, None][:, :, :, None] - lane * 2
        x4 = gl.where(column >= start, x4, float("-inf"))
    return gl.convert_layout(x4.reshape([ROWS, COLS]), LAYOUT)


@gluon.jit
def pack_pairs(x, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """x rounded to 16 bits, two to an int32 `[rows, cols / 2]`.

    A 16-bit tensor that is carried around a loop would be taken apart into halves.
    """
    low, high = gl.split(x.reshape([ROWS, COLS // 2, 2]))
    if gl.float16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high],
            dtype=gl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def unpack_pairs(
    x, DTYPE: gl.constexpr, LAYOUT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr
):  # fmt: skip
    """What `pack_pairs` packed, in the layout of a left operand; registers stay where they are."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x],
        dtype=(gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    pairs = gl.join(low, high).reshape([ROWS, COLS]).to(DTYPE, bitcast=True)
    return gl.convert_layout(pairs, LAYOUT)
