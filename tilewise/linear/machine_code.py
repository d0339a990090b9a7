"""A look at machine code before it runs: one fault of the assembler that older Tritons bring.

ptxas 12.8 (Triton 3.6) sometimes loses the register from which it adds up where an operand of a
Hopper warp group's product stands in shared memory, and reads another: the stack pointer R1, or a
uniform register that nothing has written. The kernel then computes with whatever stands elsewhere,
or reads out of bounds. Of some 60 kernels that ran on an H200 (2026-11-30) just those that show it
were wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

# The low 12 bits of an instruction of sm_90: sums of registers, or of one and a number.
_SUMS = {0x210, 0x810, 0x836}
_STACK_POINTER = 1
# Sums of uniform registers: of 32 bits, and of 64 in two registers.
_UNIFORM_SUMS, _WIDE_SUMS = {0x290, 0x890}, {0x297, 0x897}
# What else writes a uniform register, or two.
_UNIFORM_WRITES = {
    0x287, 0x887, 0x291, 0x891, 0x292, 0x892, 0x299, 0x899, 0x29A, 0x89A, 0x2A4, 0x8A4, 0x2CA,
    0x882, 0xC82, 0x886, 0x9C3, 0x2BD, 0x8BD, 0x3C4,
}  # fmt: skip
_WIDE_WRITES = {0x2A5, 0x8A5}
_CONSTANT_LOAD, _OF_64_BITS = 0xAB9, 5
_ZERO = 63


def loses_an_operand(cubin: bytes) -> bool:
    """Whether a binary for sm_90 adds to the stack pointer what is not meant for it, or to a
    uniform register that no instruction before has written."""
    return any(_loses_an_operand(text) for text in _code(cubin))


def _loses_an_operand(text: bytes) -> bool:
    written = {_ZERO}
    for low, high in struct.iter_unpack("<QQ", text):
        kind, to, source = low & 0xFFF, low >> 16 & 0xFF, low >> 24 & 0xFF
        if kind in _SUMS and source == _STACK_POINTER != to:
            return True
        if kind in _UNIFORM_SUMS or kind in _WIDE_SUMS:
            if source not in written:
                return True
            written |= {to, to + 1} if kind in _WIDE_SUMS else {to}
        elif kind in _WIDE_WRITES or (kind == _CONSTANT_LOAD and high >> 9 & 7 == _OF_64_BITS):
            written |= {to, to + 1}
        elif kind in _UNIFORM_WRITES or kind == _CONSTANT_LOAD:
            written.add(to)
    return False


def _code(cubin: bytes) -> Iterator[bytes]:
    """The code sections of an ELF file, whole instructions of 16 bytes each."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    # Of each section: its name's place, where it begins and its length.
    sections = [
        (struct.unpack_from("<I", cubin, at)[0], *struct.unpack_from("<QQ", cubin, at + 0x18))
        for at in range(start, start + size * count, size)
    ]
    for name, begin, length in sections:
        if cubin[sections[names][1] + name :].startswith(b".text"):
            yield cubin[begin : begin + length // 16 * 16]
