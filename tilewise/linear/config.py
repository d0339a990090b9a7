"""Tile sizes of the stages, by table: dtype, dims, gate, GPU and heads; never by length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config

# Longer chunks cost more within, shorter ones more between.
CHUNK = 64
# In fp32 a product is six. With as few steps and two warps none is of Hopper's warp groups, whose
# code for so many gave wrong numbers (H200, Triton 3.6, 2026-11-30; cause unknown).
FP32_CHUNK, FP32_WARPS = 32, 2
# With 227 KiB of shared memory.
_LARGE_SHARED = ("sm_90", "sm_100", "sm_103")


class Key(NamedTuple):
    """What a configuration depends on. programs: sequences times heads."""

    dtype: torch.dtype
    D: int
    E: int
    gate: int
    has_delta: bool
    architecture: str
    programs: int


class StageConfig(NamedTuple):
    """chunk: its steps. block_d, block_e: of a chunk's own stages; gradients_d: of the last one.
    slice_e: of the passes over states."""

    chunk: int
    block_d: int
    block_e: int
    gradients_d: int
    prepare: Config
    pairs: Config
    gradients: Config
    slice_e: int
    states: Config


def power_of_two(x: int) -> int:
    """The next power of two, 16 at least."""
    return max(16, 1 << (x - 1).bit_length())


def stage_config(key: Key) -> StageConfig:
    if key.dtype == torch.float32:
        alone = Config(FP32_CHUNK, FP32_CHUNK, FP32_WARPS, 1)
        block_d, block_e = (min(32, power_of_two(x)) for x in (key.D, key.E))
        states = Config(FP32_CHUNK, 16, FP32_WARPS, 1)
        return StageConfig(FP32_CHUNK, block_d, block_e, block_d, alone, alone, alone, 16, states)
    block_d, block_e = (min(64, power_of_two(x)) for x in (key.D, key.E))
    if key.gate == 2:
        block_d = min(32, block_d)
    full = power_of_two(key.D)
    # As many slices as keep the GPU's multiprocessors busy, of as many columns as registers hold.
    has_room = key.architecture in _LARGE_SHARED and full <= 128
    widest = 16 if full > 128 else 64 if key.programs >= 128 and has_room else 32
    slice_e = min(widest, power_of_two(key.E))
    warps = 8 if full > 128 or slice_e > 32 else 4
    # The next chunk is on its way while one is worked on, where both fit.
    stages = 2 if has_room else 1
    alone = Config(CHUNK, CHUNK, 4, 1)
    states = Config(CHUNK, slice_e, warps, stages)
    # Of the delta rule with a vector gate less fits the registers.
    gradients_d = 16 if key.gate == 2 and key.has_delta else block_d
    return StageConfig(
        CHUNK, block_d, block_e, gradients_d, alone, alone, alone, slice_e, states
    )  # fmt: skip
