"""Attention of many new queries over a cache on Hopper (sm_90): dense attention's consumers, and a
producer that knows where keys lie.

Dims: q `[B, M, H, D]`, or packed `[T, H, D]` with B = 1 row of storage; k `[pages, P, G, D]` with P
    a multiple of 8, or `[R, N, G, D]`; v the same with E; out as q with E; lse `[B, H, M]`.
Grid: one program a multiprocessor; see `dense/hopper_forward.py`, whose consumers, barriers and
    mathematics these are.
Units: scores and references in log2 units; lse natural, fp32.
"""

from __future__ import annotations

from ..dense.hopper_forward import _mma_partition
from ..dense.hopper_producer import ROWS, Rings
from ..kernels.gluon import fence_async_shared, gl, gluon, mbarrier
from .hopper_prefill_producer import load_partition


@gluon.jit
def _make_rings(q_desc, k_desc, v_desc, out_desc, BUILD: gl.constexpr):
    """All of shared memory, with the barriers ready."""
    N: gl.constexpr = BUILD.n_consumers
    K_SLOTS: gl.constexpr = BUILD.k_slots
    V_SLOTS: gl.constexpr = BUILD.v_slots
    DIM: gl.constexpr = BUILD.dim
    VALUE_DIM: gl.constexpr = BUILD.value_dim
    BLOCK_N: gl.constexpr = BUILD.tile.block_n
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q = gl.allocate_shared_memory(q_desc.dtype, [N, 1, 1, ROWS, DIM], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [K_SLOTS, 1, 1, BLOCK_N, DIM], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [V_SLOTS, 1, 1, BLOCK_N, VALUE_DIM], v_desc.layout)
    stage = q
    if BUILD.is_staged and not BUILD.shares_q:
        stage = gl.allocate_shared_memory(
            out_desc.dtype, [N, 1, 1, ROWS, VALUE_DIM], out_desc.layout
        )
    q_full = gl.allocate_shared_memory(gl.int64, [N, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [K_SLOTS, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [V_SLOTS, 1], BARRIER)
    landing = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    mail = gl.allocate_shared_memory(gl.int32, [4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(N):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(K_SLOTS):
        mbarrier.init(k_full.index(i), count=1)
    for i in gl.static_range(V_SLOTS):
        mbarrier.init(v_full.index(i), count=1)
    mbarrier.init(landing.index(0), count=1)
    fence_async_shared()
    return Rings(q, k, v, stage, q_full, k_full, v_full, landing, mail)


@gluon.jit
def _cache_prefill_fwd_hopper_kernel(
    q_desc, k_desc, v_desc, out_desc, out, remainder, lse, call, stored, tickets,
    BUILD: gl.constexpr, PAGED: gl.constexpr,
):  # fmt: skip
    rings = _make_rings(q_desc, k_desc, v_desc, out_desc, BUILD)
    CONSUMER: gl.constexpr = BUILD.registers[0]
    PRODUCER: gl.constexpr = BUILD.registers[1]
    if BUILD.n_consumers == 2:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 1, BUILD)),
                (load_partition,
                 (q_desc, k_desc, v_desc, rings, call, stored, tickets, BUILD, PAGED)),
            ],
            [4, 1],
            [CONSUMER, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 0, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 1, BUILD)),
                (_mma_partition, (rings, out_desc, out, remainder, lse, call, 2, BUILD)),
                (load_partition,
                 (q_desc, k_desc, v_desc, rings, call, stored, tickets, BUILD, PAGED)),
            ],
            [4, 4, 1],
            [CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip
