"""What is looked for in the instructions of a binary for NVIDIA's GPUs, told by their bits.

NVIDIA's own disassembler takes half a second a kernel, which was a sixth of the time of all tests
here. The bits are the GPU's: no release of the tools changes them, and `test_sass.py` holds
what is read here to what the disassembler says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tilewise.linear.machine_code import _code

# The low 12 bits of an instruction, of sm_80 to sm_120. The newest matrix instruction comes first.
_PRODUCTS = {"UTCHMMA": (0x5EA, 0x9EA), "HGMMA": (0x9F0, 0xDF0), "HMMA": (0x23C,)}
_LOCAL = (0x387, 0x983)
# Of Hopper's warp groups; one bit tells a wait from an arrival.
_WARP_GROUP, _IS_WAIT = 0x9C5, 1 << 47


@dataclass(frozen=True)
class Instructions:
    """mma: the newest matrix instruction for 16-bit operands, "" where there is none. waits: for
    products of Hopper's warp groups. is_local: whether a thread's own memory is touched."""

    mma: str
    waits: int
    is_local: bool


def read_instructions(cubin: bytes) -> Instructions:
    words = np.concatenate([np.frombuffer(text, "<u8")[::2] for text in _code(cubin)])
    kinds = words & 0xFFF
    mma = next((name for name, codes in _PRODUCTS.items() if np.isin(kinds, codes).any()), "")
    waits = np.count_nonzero((kinds == _WARP_GROUP) & (words & _IS_WAIT != 0))
    return Instructions(mma, int(waits), bool(np.isin(kinds, _LOCAL).any()))
