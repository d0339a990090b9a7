"""Machine code is told by its bytes: instructions as ptxas 12.8 wrote them, in a small ELF file."""

from __future__ import annotations

import struct

import pytest

from tests.compile.machine_code import misuses_stack_pointer

PUSH = 0xFFFFFFC001017836, 0x001FE20000000000  # VIADD R1, R1, -0x40
SUM = 0x0000003F1C1C7810, 0x000FC80007F1E0FF  # IADD3 R28, P0, R28, 0x3f, RZ
DESCRIPTOR = 0x00000001011C7810, 0x000FC80007F1E0FF  # IADD3 R28, P0, R1, 0x1, RZ
UPPER_HALF = 0xC0000010011D7810, 0x000FC800007FE4FF  # IADD3.X R29, R1, -0x3ffffff0, RZ, P0, !PT


def elf(section: str, *instructions: tuple[int, int]) -> bytes:
    """An ELF file of two sections: names, and one with the instructions."""
    names = b"\0.shstrtab\0" + section.encode() + b"\0"
    code = b"".join(struct.pack("<QQ", *words) for words in instructions)
    header_size, row_size = 0x40, 0x40
    table = header_size + len(names) + len(code)
    header = bytearray(header_size)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, row_size, 2, 0)
    rows = b""
    for name, begin, length in (
        (1, header_size, len(names)),
        (11, header_size + len(names), len(code)),
    ):
        row = bytearray(row_size)
        struct.pack_into("<I", row, 0, name)
        struct.pack_into("<QQ", row, 0x18, begin, length)
        rows += row
    return bytes(header) + names + code + rows


@pytest.mark.parametrize("wrong", [DESCRIPTOR, UPPER_HALF])
def test_an_operand_that_stands_at_the_stack_pointer_is_found(wrong: tuple[int, int]) -> None:
    assert misuses_stack_pointer(elf(".text.kernel", PUSH, SUM, wrong))
    assert not misuses_stack_pointer(elf(".text.kernel", PUSH, SUM))
    # Data may look like anything.
    assert not misuses_stack_pointer(elf(".nv.constant0", wrong))
