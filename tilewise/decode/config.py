"""Tiles of the split-KV kernel, by table: dtype, head dims, rows, GPU; never by length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config

# Keys of a part where parts are of a fixed size.
FIXED_PART = 1024


class SplitConfig(NamedTuple):
    """launch: tiles and what the compiler is told. programs: on one multiprocessor at a time."""

    launch: Config
    programs: int


class Key(NamedTuple):
    """What a configuration depends on. rows: of a unit. dim: of a key, and of a value where that
    is stored apart (0 where values are part of the keys)."""

    dtype: torch.dtype
    storage: torch.dtype
    dim: int
    value_dim: int
    architecture: str
    is_aligned: bool


def block_rows(rows: int, group: int, is_fixed: bool, key: Key) -> int:
    """Rows of a tile, for so many of a unit at most."""
    if is_fixed:
        # A function of the heads alone, not of what else is in the batch.
        rows = group
    if key.dtype == torch.float32 or not key.is_aligned or key.architecture == "interpreter":
        return 16
    most = 64 if key.dim > 256 else 128
    block = 16
    while block < min(rows, most):
        block *= 2
    return block


def split_config(key: Key, block_m: int) -> SplitConfig:
    bytes_of_key = key.storage.itemsize * (key.dim + key.value_dim)
    if key.architecture == "interpreter":
        return SplitConfig(Config(block_m, 32, 4, 1), 1)
    if key.dtype == torch.float32:
        return SplitConfig(Config(block_m, 32 if key.dim <= 128 else 16, 4, 2), 2)
    is_large = key.architecture in ("sm_90", "sm_100", "sm_103")
    if block_m >= 64:
        block_n = 64 if key.dim <= 128 else 32
        return SplitConfig(Config(block_m, block_n, 8 if block_m * key.dim > 8192 else 4, 2), 1)
    # A stage of 32 KiB; two programs on a multiprocessor keep enough loads in flight.
    block_n = 32
    while block_n < 128 and 2 * block_n * bytes_of_key <= 32 << 10:
        block_n *= 2
    return SplitConfig(Config(block_m, block_n, 4, 3 if is_large else 2), 2)
