"""Tile sizes of the stages, by table: dtype, dims, gate, GPU generation and heads; never by length.

A chunk has 64 steps everywhere: longer ones cost more within, shorter ones more between.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config

CHUNK = 64
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
    """block_d, block_e: of a chunk's own stages, prepare and gradients. slice_e: of the passes over
    states."""

    block_d: int
    block_e: int
    prepare: Config
    gradients: Config
    slice_e: int
    states: Config


def power_of_two(x: int) -> int:
    """The next power of two, 16 at least."""
    return max(16, 1 << (x - 1).bit_length())


def stage_config(key: Key) -> StageConfig:
    block_d, block_e = (min(64, power_of_two(x)) for x in (key.D, key.E))
    if key.dtype == torch.float32:
        block_d, block_e = min(32, block_d), min(32, block_e)
    if key.gate == 2:
        block_d = min(32, block_d)
    full = power_of_two(key.D)
    is_wide = full > 128 or key.dtype == torch.float32
    # As many slices as keep the GPU's multiprocessors busy, of as many columns as registers hold.
    widest = 16 if is_wide else 32
    has_room = key.architecture in _LARGE_SHARED and not is_wide
    if key.programs >= 128 and has_room:
        widest = 64
    slice_e = min(widest, power_of_two(key.E))
    warps = 8 if full > 128 or slice_e > 32 else 4
    # The next chunk is on its way while one is worked on, where both fit.
    stages = 2 if has_room else 1
    return StageConfig(
        block_d,
        block_e,
        Config(64, 64, 4, 1),
        Config(64, 64, 8, 1),
        slice_e,
        Config(64, slice_e, warps, stages),
    )
