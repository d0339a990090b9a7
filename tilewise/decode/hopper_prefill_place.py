"""Where the sequences of a prefill over a cache stand, as dense attention's kernels are told.

Dims: table int32 `[sequences + 1, FIELDS]`, see `kernels/placement.py`; of packed queries there is
    one sequence more, of rows that nobody owns. The first entry behind the last sequence is how
    many tiles of queries all of them have.
Grid: one program.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ..kernels.placement import FIELDS, _write_rows
from ..kernels.structs import decode
from .triton_plan import n_sequences, sequence_of


class PlaceBuild(NamedTuple):
    """Of `triton_plan.CacheBuild` what says where a sequence stands. block: sequences at a time."""

    has_own: bool
    singles: int
    block: int


@triton.jit
def place_prefill(table, place, few, BUILD: tl.constexpr, BLOCK_M: tl.constexpr):
    """few, coded: sequences of no more queries have no tiles here, and where it is not 0 neither
    have the rows that nobody owns."""
    most = decode(few)
    count = n_sequences(place)
    q_tiles = 0
    for start in range(0, count, BUILD.block):
        b = start + tl.arange(0, BUILD.block)
        exists = b < count
        seq = sequence_of(place, b, exists, BUILD)
        is_here = (seq.q_stored > most) & ((b < decode(place.B)) | (most == 0))
        low = tl.minimum(seq.low, seq.k_used)
        zero = b * 0
        q_tiles, _ = _write_rows(
            table,
            b,
            exists,
            (seq.q_first, tl.where(is_here, seq.q_stored, 0), zero, zero + decode(place.capacity)),
            (seq.q_used, seq.k_used, low, tl.maximum(seq.high, low)),
            (seq.left, seq.right),
            (seq.shift, zero, zero),
            zero,
            (q_tiles, 0),
            BLOCK_M,
            1,
        )
    tl.store(table + count.to(tl.int64) * FIELDS, q_tiles)
