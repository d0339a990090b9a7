"""A look at machine code before it runs: one fault of the assembler that older Tritons bring.

ptxas 12.8 (Triton 3.6) sometimes takes the stack pointer, R1, for where an operand of a Hopper warp
group's product stands in shared memory. The kernel then reads out of bounds. All that did so on an
H200 (linear attention's, 2026-11-30) showed it in an addition to R1 whose result is not R1, and no
other kernel did.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_STACK_POINTER = 1
# The low 12 bits of an instruction of sm_90: sums of registers, or of one and a number.
_SUMS = {0x210, 0x810, 0x836}


def misuses_stack_pointer(cubin: bytes) -> bool:
    """Whether a binary for sm_90 adds to the stack pointer what is not meant for it."""
    return any(
        word & 0xFFF in _SUMS
        and word >> 24 & 0xFF == _STACK_POINTER
        and word >> 16 & 0xFF != _STACK_POINTER
        for text in _code(cubin)
        for word, _ in struct.iter_unpack("<QQ", text)
    )


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
