"""Tile sizes of the stages, by table: dtype, dims, gate and GPU; never by length."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..kernels.launch import Config

# Longer chunks cost more within, shorter ones more between.
CHUNK = 64
# So few that no product is of Hopper's warp groups, which ptxas 12.8 may get wrong: see
# `machine_code.py`.
FEW_WARPS = 2
# In fp32 a product is six: fewer steps, so that less is held.
FP32_CHUNK = 32
# With 227 KiB of shared memory.
_LARGE_SHARED = ("sm_90", "sm_100", "sm_103")

# What one launch more takes, in chunks' time.
_MORE_LAUNCHES = 4


class Key(NamedTuple):
    """What a configuration depends on."""

    dtype: torch.dtype
    D: int
    E: int
    gate: int
    has_delta: bool
    architecture: str


class StageConfig(NamedTuple):
    """chunk: its steps. block_d, block_e: of a chunk's own stages; pairs_e: of `pairs`;
    gradients_d: of the last one. slice_e: of the passes over states. weak_prepare, weak_gradients:
    of a vector gate that is not strong, None where it has no kernels of its own."""

    chunk: int
    block_d: int
    block_e: int
    pairs_e: int
    gradients_d: int
    prepare: Config
    pairs: Config
    gradients: Config
    slice_e: int
    states: Config
    weak_prepare: Config | None = None
    weak_gradients: Config | None = None


def power_of_two(x: int) -> int:
    """The next power of two, 16 at least."""
    return max(16, 1 << (x - 1).bit_length())


def stage_config(key: Key) -> StageConfig:
    if key.dtype == torch.float32:
        alone = Config(FP32_CHUNK, FP32_CHUNK, FEW_WARPS, 1)
        block_d, block_e = (min(32, power_of_two(x)) for x in (key.D, key.E))
        states = Config(FP32_CHUNK, 16, FEW_WARPS, 1)
        return StageConfig(
            FP32_CHUNK, block_d, block_e, block_e, block_d, alone, alone, alone, 16, states
        )  # fmt: skip
    full = power_of_two(key.D)
    if full > 128:
        return _wide_config(key)
    # All dims of q and k at once in what is made before the gradients: one wait for memory.
    block_d, gradients_d, block_e = full, min(64, full), min(64, power_of_two(key.E))
    pairs_e = block_e
    prepare = pairs = gradients = Config(CHUNK, CHUNK, 4, 1)
    weak_prepare = weak_gradients = None
    if key.gate == 1 and key.has_delta and key.architecture == "sm_90":
        # As many registers as let two programs stand on a multiprocessor: 155 us, 258 us of one,
        # 194 us of two on four warps each (H200, 32 heads, 8192 tokens, 2026-11-30).
        pairs_e, pairs = min(128, power_of_two(key.E)), Config(CHUNK, CHUNK, 8, 1, 128)
    if key.gate == 2:
        block_d = gradients_d = min(32, full)
        # Three programs to a multiprocessor: blocks of 64 dims, or 128 registers, took longer, and
        # gradients in blocks of 16 or 64 or of fewer registers did too (H200, 2026-11-30).
        registers = 168 if key.architecture == "sm_90" else 0
        weak_prepare = Config(CHUNK, block_d, 4, 1, registers)
        weak_gradients = Config(CHUNK, min(128, power_of_two(key.E)), 4, 1)
        # The ladder's forward sees a product transposed, which Hopper's warp groups may not (see
        # `kernels/README.md`); its backward has tiles of 32 rows, which are none of theirs.
        prepare, gradients = Config(CHUNK, CHUNK, FEW_WARPS, 1), Config(CHUNK, CHUNK, 8, 1)
    # Slices of as many columns as keep the GPU's multiprocessors busy: of 64 on eight warps take
    # longer where there are few heads (H200, 2026-11-30). So do, on one warp group, 64 columns of
    # transposed tiles, where a product's result is in registers as the next one's left factor: 448
    # us instead of 306 (32 heads, 8192 tokens).
    has_room = key.architecture in _LARGE_SHARED
    slice_e = min(32, power_of_two(key.E))
    warps = 4 if slice_e == 32 else FEW_WARPS
    # The next chunk's tiles are on their way while one is worked on, where both fit: of the three
    # sets, one is being read by products. With two, loads would begin when a chunk is done.
    stages = 1 if not has_room else 2 if key.gate == 2 and key.has_delta else 3
    states = Config(CHUNK, slice_e, warps, stages)
    return StageConfig(
        CHUNK, block_d, block_e, pairs_e, gradients_d, prepare, pairs, gradients, slice_e, states,
        weak_prepare, weak_gradients,
    )  # fmt: skip


def count_segments(programs: int, n_chunks: int, processors: int) -> int:
    """Into how many segments the passes over states cut each sequence, so that as many programs
    as multiprocessors run; 1 where that takes no less time. programs: of whole sequences."""
    # The first pass over a segment is counted as if it did as much as the second. A program then
    # reads what each segment before its own makes of a state: a chunk's time for each.
    n = min(processors // max(1, programs), math.isqrt(2 * n_chunks))
    if programs == 0 or n < 2:
        return 1
    return n if 2 * -(-n_chunks // n) + n + _MORE_LAUNCHES < n_chunks else 1


def _wide_config(key: Key) -> StageConfig:
    """Of more than 128 dims. On Hopper's warp groups a kernel read out of bounds (D 256, E 60,
    H200, Triton 3.6, 2026-11-30; cause unknown)."""
    few = Config(CHUNK, CHUNK, FEW_WARPS, 1)
    block_e = min(64, power_of_two(key.E))
    states = Config(CHUNK, 16, FEW_WARPS, 1)
    return StageConfig(CHUNK, 32, block_e, block_e, 16, few, few, few, 16, states)
