"""The merge of parts of a unit.

Dims: parts `[slots, G, BLOCK_M, E]` and `[slots, G, BLOCK_M, 2]`, fp32; out and lse as the call's.
Grid: rows of a unit x G x units.
Math: with the maximum m_i, the sum of weights l_i and of weighted values a_i of part i, and their
    maximum m: out = sum_i exp(m_i - m) a_i / sum_i exp(m_i - m) l_i, in the order of the keys; a
    part that saw nothing has m_i = -inf and no weight. A sink joins at the end.
Units: the maximum is in the units of the scores, see `kernels/softmax.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.softmax import LOG2_E, join_sink, softmax_end
from ..kernels.structs import decode
from .triton_plan import find_unit, n_sequences, sequence_of, share_start, team_of, work_of

_PARTS = tl.constexpr(16)


@triton.jit
def _cache_combine_kernel(
    out, lse, parts, place, sinks, rows_per_unit, n_programs, WIDTH: tl.constexpr,
    BUILD: tl.constexpr,
):  # fmt: skip
    """One row of one unit, where more than one program worked on it."""
    BLOCK_M: tl.constexpr = BUILD.block_m
    E: tl.constexpr = BUILD.value_dims[0]
    IS_PACKED: tl.constexpr = place.cu_q is not None
    G = decode(place.G)
    per_unit = decode(rows_per_unit)
    pid = tl.program_id(0)
    x = pid % per_unit
    g = pid // per_unit % G
    b, tile, first, total = find_unit(place, pid // per_unit // G, BUILD)
    n_teams = decode(n_programs) // G
    seq = sequence_of(place, b, b < n_sequences(place), BUILD)
    work = work_of(place, seq, BUILD)
    m = (tile * BLOCK_M + x) // BUILD.group
    first += tile.to(tl.int64) * work.quanta
    head_team = 0
    n_parts = work.quanta
    if not BUILD.is_fixed:
        total = tl.maximum(total, 1)
        head_team = team_of(first, total, n_teams)
        n_parts = team_of(first + work.quanta - 1, total, n_teams) - head_team + 1
    if (b < n_sequences(place)) & (m < seq.q_stored) & (n_parts > 1):
        columns = tl.arange(0, WIDTH)
        row_max = float("-inf")
        row_sum = 0.0
        acc = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, n_parts, _PARTS):
            i = start + tl.arange(0, _PARTS)
            exists = i < n_parts
            slot = first + i
            if not BUILD.is_fixed:
                team = head_team + i
                # Where there are more teams than quanta, some have none.
                begin = share_start(team, total, n_teams)
                exists = exists & (begin < share_start(team + 1, total, n_teams))
                slot = team.to(tl.int64) * 2 + tl.where(i == 0, 1, 0)
            at = (slot * G + g) * BLOCK_M + x
            part_max = tl.load(parts.state + at * 2, mask=exists, other=float("-inf"))
            part_sum = tl.load(parts.state + at * 2 + 1, mask=exists, other=0.0)
            new_max = tl.maximum(row_max, tl.max(part_max, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            if BUILD.is_folded:
                weight = tl.exp2(part_max - shift)
                rescale = tl.exp2(row_max - shift)
            else:
                weight = tl.exp2((part_max - shift) * LOG2_E)
                rescale = tl.exp2((row_max - shift) * LOG2_E)
            keep = (weight > 0.0)[:, None] & (columns < E)[None, :]
            value = tl.load(parts.out + at[:, None] * E + columns[None, :], mask=keep, other=0.0)
            acc = acc * rescale + tl.sum(value * weight[:, None], 0)
            row_sum = row_sum * rescale + tl.sum(weight * part_sum, 0)
            row_max = new_max
        row_lse, factor = softmax_end(row_max, row_sum, BUILD.is_folded)
        h = g * BUILD.group + (tile * BLOCK_M + x) % BUILD.group
        is_owned = m < seq.q_used
        if sinks is not None:
            row_lse, shrink = join_sink(row_lse, tl.load(sinks + h).to(tl.float32))
            factor *= shrink
        at_row = (seq.q_first + m).to(tl.int64) * out.stride_m + h.to(tl.int64) * out.stride_h
        if not IS_PACKED:
            at_row += seq.batch.to(tl.int64) * out.stride_b
        acc = acc * factor
        tl.store(out.ptr + at_row + columns, acc.to(out.ptr.dtype.element_ty), mask=columns < E)
        if lse.ptr is not None:
            at_lse = seq.batch.to(tl.int64) * decode(lse.stride_b)
            at_lse += h.to(tl.int64) * decode(lse.stride_h) + seq.q_first + m
            tl.store(lse.ptr + at_lse, tl.where(is_owned, row_lse, float("-inf")))
