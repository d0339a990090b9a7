"""What the stages' kernels are given, and where a chunk's numbers stand."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...kernels.structs import Operand, decode

NO_GATE, SCALAR_GATE, VECTOR_GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LOG2_E = tl.constexpr(1.4426950408889634)
# Below this a decay is 0 in fp32, and -inf would make NaN of a weight of 0.
LOWEST_LOG2 = tl.constexpr(-1e4)
# Growth stops short of inf (e^80), which would make NaN of a state of 0.
HIGHEST_LOG2 = tl.constexpr(115.4)


class Place(NamedTuple):
    """Where chunks stand. starts, lengths: of each slot's tokens, and first_slot, chunks: of each
    sequence (see `chunks.Table`), None where rows are dense. n_chunks: of a dense row. tokens: of a
    row. H: value heads; group: of them to a head of q and k. Ints are coded.
    """

    starts: Any
    lengths: Any
    first_slot: Any
    chunks: Any
    n_chunks: Any
    tokens: Any
    H: Any
    group: Any


class Call(NamedTuple):
    """The inputs. g and beta have None for a pointer where there are none; a gate's numbers are
    rows `[D]` or one number a head, as a beta's are."""

    place: Place
    q: Operand
    k: Operand
    v: Operand
    g: Operand
    beta: Operand
    scale: Any


class Prepared(NamedTuple):
    """What each chunk's preparation leaves, by slot and head; None where an op has none.

    scores `[C, C]`: of q and k, with scale and decay. inverse: (I + A)^-1 of the delta rule, in
    fp32 or as two of bf16 (`solve.py`), since what it is off by grows from step to step. reached,
    left: decays from a chunk's first step and to its last, `[C]`. entry, total: the first step's
    own decay, which the state gets in fp32 where it enters the chunk, and all others', `[1]` or
    `[D]`. q, seen, k `[C, D]`: with a vector gate, q with scale and k decayed from the first step,
    and k decayed to the last. lower `[C, C]`: with one, the delta rule's A in fp32, not inverted
    yet.
    """

    scores: Any
    inverse: Any
    reached: Any
    left: Any
    entry: Any
    total: Any
    q: Any
    seen: Any
    k: Any
    lower: Any


class Segments(NamedTuple):
    """Parts of each sequence, of as many chunks each, over which the passes over states run side
    by side (`segments.py`). None where sequences are whole.

    count: of a sequence, coded. states `[sequences, count, H, D, E]`, decays `[.., D or 1]`, fp32:
    what each makes of a state of 0, and what is left after it of a state of 1; of gradients what
    stands before it is made of what stands after. No gate has no decays.
    """

    count: Any
    states: Any
    decays: Any


class Pairs(NamedTuple):
    """Gradients of each chunk's pairs, by slot and head; None where an op has none.

    dqk, da `[C, C]`: of the products of q and k, with the scale, and of A / beta, both with a
    scalar gate's decay; dqk_low: what dqk is rounded off by, of a vector gate in 16 bits, whose
    gradient would be off by it. dbeta, dg `[C]`: fp32, what beta and a scalar gate get of them.
    """

    dqk: Any
    dqk_low: Any
    da: Any
    dbeta: Any
    dg: Any


class Build(NamedTuple):
    """What a kernel is compiled for. Everything in it is a constant to the kernel.

    dim, value_dim: D and E; block_d, block_e: the widths that they are worked off in. precision:
    "plain", "split" for fp32 inputs, "interpreted" (see `tiles.dot`).
    """

    chunk: int
    dim: int
    value_dim: int
    block_d: int
    block_e: int
    gate: int
    has_delta: bool
    precision: str


@triton.jit
def locate_chunk(place, pid, CHUNK: tl.constexpr):
    """Of a program: slot and head as one index, the head, its row, its first token, its tokens."""
    H = decode(place.H)
    slot = pid // H
    if place.starts is None:
        n_chunks = decode(place.n_chunks)
        row = slot // n_chunks
        first = (slot % n_chunks) * CHUNK
        count = tl.minimum(decode(place.tokens) - first, CHUNK)
    else:
        row = slot * 0
        first = tl.load(place.starts + slot)
        count = tl.load(place.lengths + slot).to(tl.int32)
    return pid.to(tl.int64), pid % H, row, first, count


@triton.jit
def locate_slot(place, row, n, is_there, CHUNK: tl.constexpr):
    """Of the n-th chunk of a sequence: its slot, its row, its first token, its tokens: none where
    it is not there."""
    if place.starts is None:
        slot = row * decode(place.n_chunks) + n
        first = n * CHUNK
        count = tl.minimum(decode(place.tokens) - first, CHUNK)
        return slot, row, first, tl.where(is_there, count, 0)
    else:
        slot = (tl.load(place.first_slot + row) + n).to(tl.int32)
        first = tl.load(place.starts + slot, mask=is_there, other=0)
        count = tl.load(place.lengths + slot, mask=is_there, other=0).to(tl.int32)
        return slot, row * 0, first, count


@triton.jit
def count_chunks(place, row):
    if place.starts is None:
        return decode(place.n_chunks)
    else:
        return tl.load(place.chunks + row).to(tl.int32)


@triton.jit
def locate_segment(place, segments, part):
    """Of a part of a sequence: the sequence, which of its segments it is, its first chunk, and the
    one after its last. Some of a short sequence are empty."""
    if segments.count is None:
        return part, part * 0, part * 0, count_chunks(place, part)
    else:
        count = decode(segments.count)
        sequence, segment = part // count, part % count
        n_chunks = count_chunks(place, sequence)
        length = tl.cdiv(n_chunks, count)
        begin = tl.minimum(segment * length, n_chunks)
        return sequence, segment, begin, tl.minimum(begin + length, n_chunks)


@triton.jit
def is_last(segments, segment):
    """Of a sequence. A whole one is its only segment."""
    if segments.count is None:
        return segment == 0
    else:
        return segment == decode(segments.count) - 1


@triton.jit
def locate_slice(place, pid, BLOCK_E: tl.constexpr, BUILD: tl.constexpr):
    """Of a program that has all of D and a slice of E: its first column, its head, its sequence (or
    part of one) and its head of q and k. How many slices there are is known to the host too."""
    SLICES: tl.constexpr = (BUILD.value_dim + BLOCK_E - 1) // BLOCK_E
    H = decode(place.H)
    head = (pid // SLICES) % H
    return (pid % SLICES) * BLOCK_E, head, pid // SLICES // H, head // decode(place.group)
