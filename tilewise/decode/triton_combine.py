"""The merge of parts of a unit.

Dims: parts `[slots, G, BLOCK_M, E]` and `[slots, G, BLOCK_M, 2]`, fp32; out and lse as the call's.
Grid: tiles of WIDTH columns x tiles of ROWS rows of a unit x G x units where parts are fixed, else
    groups of teams: each team has left a note of the unit that it began and did not finish. Tiles
    of rows are as many as units are expected to have; of a unit with more a program takes several.
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
from .triton_plan import find_unit, n_sequences, sequence_of, team_of, work_of

# Notes that a program reads at most.
TEAMS = tl.constexpr(64)


@triton.jit
def _merge(
    out, lse, parts, place, sinks, b, tile, g, start, step, column, first, n_parts,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Of a unit ROWS rows from `start` on and those that lie `step` further on each time, WIDTH
    columns from `column` on. first: its first part where they are fixed, else its team."""
    seq = sequence_of(place, b, b < n_sequences(place), BUILD)
    n_rows = tl.minimum(seq.q_stored * BUILD.group - tile * BUILD.block_m, BUILD.block_m)
    offs = tl.arange(0, ROWS)
    if place.cu_q is None:
        # No unit has more than was expected.
        _merge_rows(
            out, lse, parts, place, sinks, seq, tile, g, start + offs, n_rows, column, first,
            n_parts, PARTS, WIDTH, BUILD,
        )  # fmt: skip
    else:
        for row in range(start, n_rows, step):
            _merge_rows(
                out, lse, parts, place, sinks, seq, tile, g, row + offs, n_rows, column, first,
                n_parts, PARTS, WIDTH, BUILD,
            )  # fmt: skip


@triton.jit
def _merge_rows(
    out, lse, parts, place, sinks, seq, tile, g, x, n_rows, column, first, n_parts,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = x.shape[0]
    BLOCK_M: tl.constexpr = BUILD.block_m
    E: tl.constexpr = BUILD.value_dims[0]
    IS_PACKED: tl.constexpr = place.cu_q is not None
    G = decode(place.G)
    m = (tile * BLOCK_M + x) // BUILD.group
    is_stored = x < n_rows
    columns = column + tl.arange(0, WIDTH)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, n_parts, PARTS):
        i = start + tl.arange(0, PARTS)
        exists = i < n_parts
        if BUILD.is_fixed:
            slot = first + i
        else:
            # Where there are more teams than quanta, some between have none.
            begin = tl.load(parts.notes + (first + i) * 8, mask=exists, other=0)
            exists = begin < tl.load(parts.notes + (first + i) * 8 + 1, mask=exists, other=0)
            slot = (first + i).to(tl.int64) * 2 + tl.where(i == 0, 1, 0)
        at = (slot[:, None] * G + g) * BLOCK_M + x[None, :]
        is_part = exists[:, None] & is_stored[None, :]
        part_max = tl.load(parts.state + at * 2, mask=is_part, other=float("-inf"))
        part_sum = tl.load(parts.state + at * 2 + 1, mask=is_part, other=0.0)
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        if BUILD.is_folded:
            weight = tl.exp2(part_max - shift[None, :])
            rescale = tl.exp2(row_max - shift)
        else:
            weight = tl.exp2((part_max - shift[None, :]) * LOG2_E)
            rescale = tl.exp2((row_max - shift) * LOG2_E)
        keep = (weight > 0.0)[:, :, None] & (columns < E)[None, None, :]
        ptrs = parts.out + at[:, :, None] * E + columns[None, None, :]
        value = tl.load(ptrs, mask=keep, other=0.0)
        acc = acc * rescale[:, None] + tl.sum(value * weight[:, :, None], 0)
        row_sum = row_sum * rescale + tl.sum(weight * part_sum, 0)
        row_max = new_max
    row_lse, factor = softmax_end(row_max, row_sum, BUILD.is_folded)
    h = g * BUILD.group + (tile * BLOCK_M + x) % BUILD.group
    if sinks is not None:
        sink = tl.load(sinks + h, mask=is_stored, other=0.0)
        row_lse, shrink = join_sink(row_lse, sink.to(tl.float32))
        factor *= shrink
    at_row = (seq.q_first + m).to(tl.int64) * out.stride_m + h.to(tl.int64) * out.stride_h
    if not IS_PACKED:
        at_row += seq.batch.to(tl.int64) * out.stride_b
    acc = (acc * factor[:, None]).to(out.ptr.dtype.element_ty)
    keep = is_stored[:, None] & (columns < E)[None, :]
    tl.store(out.ptr + at_row[:, None] + columns[None, :], acc, mask=keep)
    if lse.ptr is not None:
        # No two programs write the same number.
        if column == 0:
            at_lse = seq.batch.to(tl.int64) * decode(lse.stride_b)
            at_lse += h.to(tl.int64) * decode(lse.stride_h) + seq.q_first + m
            row_lse = tl.where(m < seq.q_used, row_lse, float("-inf"))
            tl.store(lse.ptr + at_lse, row_lse, mask=is_stored)


@triton.jit
def _cache_combine_kernel(
    out, lse, parts, place, sinks, rows_per_unit, n_programs, teams_per_program,
    ROWS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, BUILD: tl.constexpr,
):  # fmt: skip
    """Rows of one unit, ROWS at a time, where more than one program worked on it."""
    G = decode(place.G)
    # A hint: sequences may have more queries than it was made for.
    n_tiles = tl.cdiv(decode(rows_per_unit), ROWS)
    N_COLUMNS: tl.constexpr = (BUILD.value_dims[0] + WIDTH - 1) // WIDTH
    column = tl.program_id(0) % N_COLUMNS * WIDTH
    pid = tl.program_id(0) // N_COLUMNS
    row = pid % n_tiles * ROWS
    step = n_tiles * ROWS
    g = pid // n_tiles % G
    if BUILD.is_fixed:
        unit = pid // n_tiles // G
        b, tile = find_unit(place, unit, BUILD)
        work = work_of(place, sequence_of(place, b, b < n_sequences(place), BUILD), BUILD)
        if (b < n_sequences(place)) & (tile < work.n_units) & (work.quanta > 1):
            first = unit.to(tl.int64) * decode(parts.per_unit)
            _merge(
                out, lse, parts, place, sinks, b, tile, g, row, step, column, first,
                work.quanta, ROWS, PARTS, WIDTH, BUILD,
            )  # fmt: skip
    else:
        per_program = decode(teams_per_program)
        start = pid // n_tiles // G * per_program
        teams = start + tl.arange(0, TEAMS)
        exists = (teams < start + per_program) & (teams < decode(n_programs) // G)
        is_head = tl.load(parts.notes + teams * 8 + 4, mask=exists, other=0) > 0
        team = start - 1
        for _ in range(tl.sum(is_head.to(tl.int32), 0)):
            team = tl.min(tl.where(is_head & (teams > team), teams, start + TEAMS), 0)
            note = parts.notes + team * 8
            b = tl.load(note + 5).to(tl.int32)
            tile = tl.load(note + 6).to(tl.int32)
            last = team_of(tl.load(note + 4) - 1, tl.load(note + 2), tl.load(note + 3))
            _merge(
                out, lse, parts, place, sinks, b, tile, g, row, step, column, team,
                last - team + 1, ROWS, PARTS, WIDTH, BUILD,
            )  # fmt: skip
