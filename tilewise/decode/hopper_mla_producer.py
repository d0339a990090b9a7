"""Producer of latent attention on Hopper, and what the roles share: see `hopper_mla.py`."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import FIRST_FREE, barrier_sync, gl, gluon, mbarrier, tma_load
from .hopper_plan import advance, row_of_tile, segment_of, sequence

# Columns: of half a value, and of what only keys have.
HALF = gl.constexpr(256)
REST = gl.constexpr(64)
# Columns of Q that registers hold, or do not.
PIECE = gl.constexpr(128)
# Tiles of what only keys have, and of P, in shared memory.
PAIRS = gl.constexpr(2)
# Named barriers: halves of values, what only keys have, P. All threads that meet there.
REST_EMPTY = gl.constexpr(FIRST_FREE.value)
P_EMPTY = gl.constexpr(FIRST_FREE.value + 2)
HALF_EMPTY = gl.constexpr(FIRST_FREE.value + 4)
TO_PRODUCER = gl.constexpr(128 + 32)
FROM_BOTH = gl.constexpr(3 * 128)


class MlaBuild(NamedTuple):
    """halves: of values in shared memory, 6 at most. kept: pieces of Q in registers. has_start:
    rows may not see the first keys. registers: of the groups of O, of the producer; what they leave
    belongs to the group of P."""

    halves: int
    kept: int
    has_start: bool
    registers: tuple[int, int]


class Rings(NamedTuple):
    """Shared memory by slot. q: what registers do not hold. latent: halves of values. rest: what
    only keys have. weights: P. raised: whether a reference was raised. shrink: what O is multiplied
    by then. last: at the unit's end."""

    q: Any
    latent: Any
    rest: Any
    weights: Any
    raised: Any
    shrink: Any
    last: Any
    half_full: Any
    rest_full: Any
    p_full: Any


# ---------------------------------------------------------------- producer


@gluon.jit
def load_partition(
    k_desc, rest_desc, rings, place, share, BUILD: gl.constexpr, MLA: gl.constexpr
):  # fmt: skip
    HALVES: gl.constexpr = MLA.halves
    BLOCK_N: gl.constexpr = BUILD.block_n
    it = 0
    while share.left > 0:
        seq = sequence(place, share, BUILD)
        segment = segment_of(place, share, seq, BUILD)
        # Looked up one tile ahead, so that no copy waits for its table.
        row = row_of_tile(place, seq.index, segment.t0, BUILD)
        for t in range(segment.t0, segment.t1):
            next_row = row_of_tile(place, seq.index, t + 1, BUILD)
            n = t * BLOCK_N
            if BUILD.page > 0:
                n = n % BUILD.page
            pair = it % PAIRS
            if it >= PAIRS:
                barrier_sync(REST_EMPTY + pair, TO_PRODUCER, 1)
            full = rings.rest_full.index(pair)
            mbarrier.expect(full, rest_desc.block_type.nbytes)
            tma_load(rest_desc, [row, n, 2 * HALF], full, rings.rest.index(pair))
            for side in gl.static_range(2):
                half = 2 * it + side
                slot = half % HALVES
                if half >= HALVES:
                    barrier_sync(HALF_EMPTY + slot, TO_PRODUCER, 1)
                full = rings.half_full.index(slot)
                mbarrier.expect(full, k_desc.block_type.nbytes)
                tma_load(k_desc, [row, n, side * HALF], full, rings.latent.index(slot))
            row = next_row
            it += 1
        share = advance(place, share, seq, segment, BUILD)
    # Meet the arrivals that no later copy waits for.
    for i in range(gl.maximum(it - PAIRS, 0), it):
        barrier_sync(REST_EMPTY + i % PAIRS, TO_PRODUCER, 1)
    for i in range(gl.maximum(2 * it - HALVES, 0), 2 * it):
        barrier_sync(HALF_EMPTY + i % HALVES, TO_PRODUCER, 1)
