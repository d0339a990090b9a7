"""Where a triton call's sequences stand: numbers that its kernels are given, or a table of them.

Plain ints are passed as they are; lengths, bounds and documents on the device go into a table that
a small kernel writes first (`kernels/placement.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.band import Band
from ..core.mask import UNBOUNDED
from ..kernels import placement
from ..kernels.launch import UNTILED
from ..kernels.structs import Lengths, code

if TYPE_CHECKING:
    from .triton_call import TritonCall

FAR = placement.FAR.value
UNIFORM, PADDED, PACKED, DOCUMENTS = (
    x.value for x in (placement.UNIFORM, placement.PADDED, placement.PACKED, placement.DOCUMENTS)
)
_FIELDS = placement.FIELDS.value
# Sequences that the one program takes at a time.
_BLOCK = 128


def starts_of(call: TritonCall) -> tuple[int, int]:
    """q_start and k_start where they are ints, else 0."""
    positions = call.piece.positions
    q_start, k_start = positions.q_start, positions.k_start
    return q_start if isinstance(q_start, int) else 0, k_start if isinstance(k_start, int) else 0


def uniform_fields(call: TritonCall) -> tuple[int, ...]:
    """The fields of every sequence of a call without lengths, coded."""
    i_base, j_base = starts_of(call)
    shift, position = _shifts(call)
    left, right = (max(-FAR, min(FAR, x)) for x in _edges(position, call.band or Band()))
    fields = (call.M, call.N, 0, call.N, left, right, shift, i_base, j_base)
    return tuple(code(x) for x in fields)


def _shifts(call: TritonCall) -> tuple[int, int]:
    """The local key at which query 0 stands, as ALiBi counts it and as the window does."""
    i_base, j_base = starts_of(call)
    shift = i_base - j_base if call.piece.positions.is_piece else call.N - call.M
    offset = None if call.band is None else call.band.offset
    return shift, i_base - j_base + offset if isinstance(offset, int) else shift


def _edges(position: int, band: Band) -> tuple[int, int]:
    """A window's edges for a query at `position`, as int32; beyond every index where unbounded."""
    beyond = 3 * FAR
    left = -beyond if band.left == UNBOUNDED else position - band.left
    right = beyond if band.right == UNBOUNDED else position + band.right
    return max(-beyond, min(beyond, left)), max(-beyond, min(beyond, right))


def write_table(call: TritonCall, block_m: int, block_n: int) -> Tensor | None:
    """The table of a call's sequences, for tiles of these sizes; None where it needs none."""
    if call.place_kind == UNIFORM:
        return None
    table = call.new((call.n_sequences, _FIELDS), torch.int32)
    if call.place_kind == DOCUMENTS:
        _write_documents(call, table, block_m, block_n)
    else:
        _write_sequences(call, table, block_m, block_n)
    return table


def _write_sequences(call: TritonCall, table: Tensor, block_m: int, block_n: int) -> None:
    positions, band = call.piece.positions, call.band or Band()
    offset = band.offset
    offsets = offset if isinstance(offset, Tensor) else None
    own = offset if isinstance(offset, int) else 0
    ones = (offsets, band.lows, band.highs)
    given = (
        positions.cu_seqlens_q,
        positions.cu_seqlens_k,
        positions.seqused_q,
        positions.seqused_k,
        positions.q_start,
        positions.k_start,
        *ones,
    )
    lengths = Lengths(*(x.contiguous() if isinstance(x, Tensor) else None for x in given))
    call.launch(
        placement.place_sequences,
        (1,),
        UNTILED,
        (
            table, lengths, call.n_sequences, call.M, call.N, *starts_of(call),
            *_edges(own, band), positions.is_piece,
            isinstance(offset, int),
            sum(1 << i for i, x in enumerate(ones) if x is not None and x.numel() == 1),
            block_m, block_n, _BLOCK,
        ),
        block_m,
        block_n,
    )  # fmt: skip


def _write_documents(call: TritonCall, table: Tensor, block_m: int, block_n: int) -> None:
    band = call.band
    assert band is not None and band.documents is not None
    cu_seqlens = band.documents.contiguous()
    is_shared = cu_seqlens.dim() == 1 or cu_seqlens.shape[0] == 1
    shift, position = _shifts(call)
    call.launch(
        placement.place_documents,
        (1,),
        UNTILED,
        (
            table, cu_seqlens, call.n_sequences, call.n_documents,
            0 if is_shared else cu_seqlens.shape[1], call.M, call.N, *starts_of(call), shift,
            *_edges(position, band), block_m, block_n, _BLOCK,
        ),
        block_m,
        block_n,
    )  # fmt: skip
