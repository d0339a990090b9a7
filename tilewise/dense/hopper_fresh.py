"""A call's numbers, read anew where a hopper kernel needs them.

The compiler would work out what follows from them once, before warps take their roles, and keep it
for all: more than a producer has registers for. Three consumers, which have 160 each, keep them:
there ptxas spills more when they are read anew (Triton 3.6 and 3.9, 2026-11-30).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..kernels.gluon import gl, gluon
from ..kernels.placement import UNIFORM, sequence_at
from ..kernels.structs import Operand, Statistics, decode


@gluon.constexpr_function
def _is_read_anew(build):
    return getattr(build, "n_consumers", 2) < 3


@gluon.jit
def fresh(x, BUILD: gl.constexpr):
    """x, in a way that what follows from it is worked out here and nowhere else."""
    if not _is_read_anew(BUILD):
        return x
    elif x.dtype == gl.int64:
        return gl.inline_asm_elementwise(
            "mov.b64 $0, $1;", "=l,l", [x], dtype=gl.int64, is_pure=False, pack=1
        )
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def fresh_number(coded, BUILD: gl.constexpr):
    """What was coded by `structs.code`."""
    return decode(fresh(coded, BUILD))


class _Fields(NamedTuple):
    """Of a `Placement`, what `sequence_at` reads where there is no table."""

    fields: Any


@gluon.jit
def fresh_sequence(place, index, BUILD: gl.constexpr):
    """As `sequence_at`."""
    if BUILD.place == UNIFORM:
        f = place.fields
        fields = (
            fresh(f[0], BUILD), fresh(f[1], BUILD), fresh(f[2], BUILD), fresh(f[3], BUILD),
            fresh(f[4], BUILD), fresh(f[5], BUILD), fresh(f[6], BUILD), fresh(f[7], BUILD),
            fresh(f[8], BUILD),
        )  # fmt: skip
        return sequence_at(_Fields(fields), index, BUILD.place)
    else:
        return sequence_at(place, index, BUILD.place)


@gluon.jit
def fresh_statistics(x, BUILD: gl.constexpr):
    return Statistics(x.ptr, fresh(x.stride_b, BUILD), fresh(x.stride_h, BUILD))


@gluon.jit
def fresh_operand(x, BUILD: gl.constexpr):
    """Strides keep what they are divisible by."""
    one = fresh(gl.to_tensor(1), BUILD)
    return Operand(x.ptr, x.stride_b * one, x.stride_m * one, x.stride_h * one)
