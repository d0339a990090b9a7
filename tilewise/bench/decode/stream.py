"""Reading a cache and doing nothing else: the ceiling of decode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...decode.cache import KVCache

# Bytes that a program takes at a time, and programs of a processor.
_BLOCK_BYTES, _PROGRAMS = 16384, 2


def reader(cache: KVCache) -> Callable[[], Any]:
    """Reads keys and values once, in the order in which they lie."""
    parts = [cache.k] if cache.is_latent else [cache.k, cache.v]
    words = [x.view(torch.uint8).flatten().view(torch.int32) for x in parts]
    if cache.k.device.type == "cpu":
        return lambda: [x.sum() for x in words]
    return _stream(words)


def _stream(words: list[Tensor]) -> Callable[[], Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def read_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        total = tl.zeros((BLOCK,), tl.int32)
        for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            total += tl.load(x_ptr + start + tl.arange(0, BLOCK))
        tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))

    device, block = words[0].device, _BLOCK_BYTES // 4
    programs = _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=device)
    # Whole blocks, and offsets that fit in 32 bits; what is left is less than a millionth.
    parts = [part for x in words for part in x.split(1 << 30)]
    sizes = [part.numel() // block * block for part in parts]

    def read() -> None:
        for part, size in zip(parts, sizes, strict=True):
            read_kernel[(programs,)](part, out, size, block, num_warps=8)

    return read
