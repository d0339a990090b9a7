"""Machine code is told by its bytes: instructions as ptxas 12.8 wrote them, in a small ELF file."""

from __future__ import annotations

import struct

import pytest
import torch

from tilewise.linear.machine_code import loses_an_operand

PUSH = 0xFFFFFFC001017836, 0x001FE20000000000  # VIADD R1, R1, -0x40
SUM = 0x0000003F1C1C7810, 0x000FC80007F1E0FF  # IADD3 R28, P0, R28, 0x3f, RZ
DESCRIPTOR = 0x00000001011C7810, 0x000FC80007F1E0FF  # IADD3 R28, P0, R1, 0x1, RZ
UPPER_HALF = 0xC0000010011D7810, 0x000FC800007FE4FF  # IADD3.X R29, R1, -0x3ffffff0, RZ, P0, !PT
SHIFT = 0x000000043F187899, 0x000FE40008011618  # USHF.R.U32.HI UR24, URZ, 0x4, UR24
UNIFORM_SUM = 0x0000004018187890, 0x000FC8000FF1E03F  # UIADD3 UR24, UP0, UR24, 0x40, URZ
REDUX = 0x00000000081873C4, 0x000E64000000C200  # REDUX.SUM.S32 UR24, R8
LOAD = 0x0000820000247AB9, 0x000FE20000000A00  # ULDC.64 UR36, c[0x0][0x208]
WIDE_SUM = 0x0000000224187897, 0x000FE4000FFFE03F  # UIADD3.64 UR24, UR36, 0x2, URZ


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
    assert loses_an_operand(elf(".text.kernel", PUSH, SUM, wrong))
    assert not loses_an_operand(elf(".text.kernel", PUSH, SUM))
    # Data may look like anything.
    assert not loses_an_operand(elf(".nv.constant0", wrong))


def test_a_uniform_register_must_be_written_before_it_is_added_to() -> None:
    assert loses_an_operand(elf(".text.kernel", PUSH, UNIFORM_SUM))
    for write in (SHIFT, REDUX):
        assert not loses_an_operand(elf(".text.kernel", PUSH, write, UNIFORM_SUM))
    assert loses_an_operand(elf(".text.kernel", UNIFORM_SUM, SHIFT))
    assert loses_an_operand(elf(".text.kernel", WIDE_SUM))
    assert not loses_an_operand(elf(".text.kernel", LOAD, WIDE_SUM, UNIFORM_SUM))


@pytest.mark.parametrize("gate", [0, 1, 2])
@pytest.mark.parametrize("has_delta", [False, True])
def test_what_was_wrong_on_warp_groups_is_off_them(gate: int, has_delta: bool) -> None:
    """fp32, wide heads, and the forward's ladder, which sees a product transposed."""
    pytest.importorskip("triton")
    from tilewise.linear.config import FEW_WARPS, Key, stage_config

    def warps(dtype: torch.dtype, D: int) -> dict[str, int]:
        found = stage_config(Key(dtype, D, 64, gate, has_delta, "sm_90"))
        stages = ("prepare", "pairs", "gradients", "states")
        return {name: getattr(found, name).num_warps for name in stages}

    for dtype, D in ((torch.float32, 16), (torch.float32, 128), (torch.bfloat16, 256)):
        assert set(warps(dtype, D).values()) == {FEW_WARPS}
    if gate == 2:
        assert warps(torch.float16, 128)["prepare"] == FEW_WARPS
