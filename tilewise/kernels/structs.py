"""What kernels are given, gathered in named tuples: one for each thing that an op speaks of.

Triton passes a named tuple as its fields. It would compile a kernel anew for every int in one that
is 1 or stops being a multiple of 16, so sizes travel coded as `4 x + 3`, which is neither; strides
of tensors stay plain, since their divisibility is what makes wide loads possible.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Operand(NamedTuple):
    """A tensor of rows `[batch, row, head, dim]`, the last dim contiguous; strides in elements."""

    ptr: Any
    stride_b: Any
    stride_m: Any
    stride_h: Any


class Statistics(NamedTuple):
    """Numbers of rows, fp32 `[batch, head, row]`; the strides are coded."""

    ptr: Any
    stride_b: Any
    stride_h: Any


class Bias(NamedTuple):
    """An additive term `[b, h, m, n]`; a broadcast dim has stride 0.

    All ints are coded. rows, cols: sizes, or FAR where the bias is broadcast.
    """

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_m: Any
    stride_n: Any
    rows: Any
    cols: Any


class Slopes(NamedTuple):
    """ALiBi slopes, fp32 `[H]` (stride_b 0) or `[B, H]`."""

    ptr: Any
    stride_b: Any


class ScoreTerms(NamedTuple):
    """What a score is made of besides q . k. A term that is absent has the pointer None.

    scale: multiplies q . k; log2 units where nothing else is added, scale / cap under a softcap.
    gradient_scale: what dS is multiplied by on its way to dQ and dK. cap: the softcap. sinks:
    `[H]`. rng: int64 `[2]`. keep_scale: 1 / (1 - p). drop_high, drop_low: the halves of
    round(p 2^32), coded.
    """

    scale: Any
    gradient_scale: Any
    cap: Any
    bias: Any
    slopes: Any
    sinks: Any
    rng: Any
    keep_scale: Any
    drop_high: Any
    drop_low: Any


class Lengths(NamedTuple):
    """The device tensors that place sequences, None where a call has none.

    cu_q, cu_k: `[B + 1]`; used_q, used_k, q_starts, k_starts: `[B]`. offsets, lows, highs: of a
    window and of key bounds, `[B]` or one entry.
    """

    cu_q: Any
    cu_k: Any
    used_q: Any
    used_k: Any
    q_starts: Any
    k_starts: Any
    offsets: Any
    lows: Any
    highs: Any


class Placement(NamedTuple):
    """Where sequences stand in storage.

    table: int32 `[sequences + 1, FIELDS]` (see `placement.py`), or None where one row of coded
    `fields` serves every batch row. n_tiles: of the axis that programs own, over all sequences
    (packed) or in one. n_batches: rows of storage. H: the heads that programs count, times `group`
    where they count kv heads. together: how many heads take turns, tile by tile. Everything but the
    table is coded.
    """

    table: Any
    fields: Any
    n_tiles: Any
    n_sequences: Any
    n_batches: Any
    H: Any
    group: Any
    together: Any


class Sequence(NamedTuple):
    """One sequence: a batch row or a document, and what its queries may see at most.

    index: b, as masks, dropout and bias count it. batch: its row of padded storage.
    q_first, q_stored, q_used: its query rows in storage, how many are stored and in use; the same
    for keys. Local rows m and keys n count from there.
    low, high: no query sees a key outside [low, high).
    left, right: query m sees m + left <= n <= m + right at most.
    shift: query m stands at local key m + shift (ALiBi). i_base, j_base: index of the first query
    and key in the whole sequence.
    """

    index: Any
    batch: Any
    q_first: Any
    q_stored: Any
    q_used: Any
    k_first: Any
    k_stored: Any
    k_used: Any
    low: Any
    high: Any
    left: Any
    right: Any
    shift: Any
    i_base: Any
    j_base: Any


class MaskData(NamedTuple):
    """What a mask needs beyond a sequence's bounds; all None for a band.

    lists: int32 `[heads or 1, tiles, width]`, for every tile the tiles of the other axis that it
    meets: those seen whole from the front, those in part from the back. counts: int32
    `[heads or 1, tiles, 2]`, how many of each. list_stride_h: 0 where all heads share.
    first, second: starts and stops int32 `[b, h, row, interval]` in stored keys, or kinds and words
    of bit tiles in local indices. stride_b, stride_h: of `first`. extent: its intervals or kinds
    in a row. rows: its rows. All ints are coded.
    """

    lists: Any
    counts: Any
    width: Any
    list_stride_h: Any
    first: Any
    second: Any
    stride_b: Any
    stride_h: Any
    extent: Any
    rows: Any


class Call(NamedTuple):
    """What every kernel of a call gets besides tensors."""

    place: Placement
    mask: MaskData
    terms: ScoreTerms


class Build(NamedTuple):
    """What a kernel is compiled for. Everything in it is a constant to the kernel.

    dims, value_dims: head dims as `tiles.py` has them. place: UNIFORM, PADDED or PACKED. mask:
    BAND, INTERVALS or BITS. n_intervals: of a row, 0 where the number is known at run time only.
    is_folded: a score is nothing but the scaled product. is_capped: there
    is a softcap. is_grouped: see `scores.keep_tile`. bias_rows: see `scores.load_bias`. precision:
    of products. is_wide: offsets inside a tile may pass 2^31. is_added: results are added to what
    is there. few_tiles: see `masks.in_one_loop`; 0 for no such loop.
    """

    dims: tuple[int, ...]
    value_dims: tuple[int, ...]
    place: int
    mask: int
    n_intervals: int
    is_folded: bool
    is_capped: bool
    is_grouped: bool
    bias_rows: int
    precision: str
    is_wide: bool
    is_added: bool
    block_m: int
    block_n: int
    few_tiles: int


def absent(kind: Any) -> Any:
    """The operand of a tensor that is not there: comparing a tuple with None does not compile."""
    return kind(*[None] * len(kind._fields))


_CODE_SHIFT = tl.constexpr(2)


def code(value: int) -> int:
    """See the module's docstring."""
    return 4 * value + 3


@triton.jit
def decode(value):
    return (value - 3) >> _CODE_SHIFT
