"""Tiles of the split-KV kernel, by table: dtype, head dims, rows, pages, GPU; never by length.

Measured on an H200 with Triton 3.6 (2026-11-30), D 128, bf16, one query, cold caches, in TB/s.
Tiles are keys, warps, stages, programs on a multiprocessor; beside them what reading alone reaches,
which for caches of a GB is 4.4.

    32 heads on 8, B 64 N 8k, contiguous    128 4 3 1  4.43   128 8 3 1  4.43
    the same, pages of 64                    64 4 3 2  4.32   128 8 3 1  3.78   128 4 3 1  3.55
    pages of 16                              64 4 3 2  4.07   128 4 3 1  3.42   128 8 3 1  3.29
    pages of 1                               64 4 3 2  4.22   128 8 3 1  3.34
    64 heads on 8, B 128 N 4k               128 4 3 1  4.36   128 8 3 1  4.33    64 4 3 2  4.29
    64 heads on 1, B 16 N 32k (4.22)         64 4 5 1  3.51   128 4 3 1  3.51    64 4 3 2  3.44
    32 heads on 8, B 16 N 8k, 16 queries    128 4 3 1  3.91    64 4 5 1  3.82    64 4 3 2  3.21
    32 heads on 8, B 1 N 8k (2.80)          128 4 3 1  1.94    64 4 6 1  1.81    64 4 3 2  1.66
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config

# Keys of a part where parts are of a fixed size.
FIXED_PART = 1024
# Bytes of keys and values in flight that one multiprocessor needs.
_STAGE = 64 << 10
_LARGE = ("sm_90", "sm_100", "sm_103")
# KiB of shared memory that a program may have; 64 on AMD GPUs and 99 elsewhere.
_SHARED_KIB = {"sm_80": 163, "sm_87": 163, "gfx950": 160, **dict.fromkeys(_LARGE, 227)}


class SplitConfig(NamedTuple):
    """launch: tiles and what the compiler is told. programs: on one multiprocessor at a time."""

    launch: Config
    programs: int


class Key(NamedTuple):
    """What a configuration depends on. dim: of a key, and value_dim of a value where that is stored
    apart (0 where values are part of the keys). is_aligned: rows begin at 16 bytes. is_heavy: a
    score is more than a product. is_gathered: pages do not hold whole tiles."""

    dtype: torch.dtype
    storage: torch.dtype
    dim: int
    value_dim: int
    architecture: str
    is_aligned: bool
    is_heavy: bool
    is_gathered: bool


def block_rows(rows: int, group: int, is_fixed: bool, key: Key) -> int:
    """Rows of a tile, for so many of a unit at most."""
    if is_fixed:
        # A function of the heads alone, not of what else is in the batch.
        rows = group
    if key.dtype == torch.float32 or not key.is_aligned or key.architecture == "interpreter":
        return 16
    most = 128
    if max(key.dim, key.value_dim) > 256:
        most = 64 if key.architecture in _LARGE else 16
    if max(key.dim, key.value_dim) > 512 and key.value_dim:
        # Sums of so many columns leave no registers for more.
        most = 16
    block = 16
    while block < min(rows, most):
        block *= 2
    return block


def split_config(key: Key, block_m: int) -> SplitConfig:
    if key.architecture == "interpreter":
        return SplitConfig(Config(block_m, 32, 4, 1), 1)
    launch, programs = _wanted(key, block_m)
    kib = _SHARED_KIB.get(key.architecture, 64 if key.architecture.startswith("gfx") else 99)
    while _shared_bytes(key, launch) > kib * 1024:
        if launch.num_stages > 2:
            launch = launch._replace(num_stages=launch.num_stages - 1)
        elif launch.block_n > 16:
            launch = launch._replace(block_n=launch.block_n // 2)
        else:
            break
    if programs * (_shared_bytes(key, launch) + 1024) > (kib + 1) * 1024:
        programs = 1
    return SplitConfig(launch, programs)


def _shared_bytes(key: Key, launch: Config) -> int:
    """Of a program: tiles on their way, queries and probabilities, and what the matrix units of
    warp groups get of float8; later the sums on their way out."""
    dim, value_dim = (-(-x // 16) * 16 for x in (key.dim, key.value_dim))
    is_warp_group = launch.block_m >= 64 and key.architecture == "sm_90"
    tiles = launch.num_stages if is_warp_group else max(1, launch.num_stages - 1)
    keys = launch.block_n * (dim + value_dim)
    converted = keys if is_warp_group and key.storage != key.dtype else 0
    rows = launch.block_m * (dim + launch.block_n)
    loop = tiles * keys * key.storage.itemsize + (converted + rows) * key.dtype.itemsize
    sums = 4 * launch.block_m * min(512, value_dim or dim) if is_warp_group else 0
    return max(loop, sums)


def _wanted(key: Key, block_m: int) -> SplitConfig:
    """By what is best, whether it fits or not."""
    bytes_of_key = key.storage.itemsize * (key.dim + key.value_dim)
    if key.dtype == torch.float32:
        return SplitConfig(Config(block_m, 32 if key.dim <= 128 else 16, 4, 2), 2)
    if block_m >= 64:
        return _many_rows(key, block_m)
    if key.architecture not in _LARGE:
        block_n = _tile(bytes_of_key, _STAGE // 2, 64)
        return SplitConfig(Config(block_m, block_n, 4, 2), 2)
    # What each key's row costs hides behind another program.
    is_halved = key.is_gathered and key.dim <= 256
    most = 128 if key.dim <= 256 else 64
    block_n = _tile(bytes_of_key, _STAGE // 2 if is_halved else _STAGE, most)
    # Tiles of half the bytes leave room for a second program.
    programs = 2 if 2 * block_n * bytes_of_key <= _STAGE else 1
    if key.storage != key.dtype and block_m == 32:
        block_n = min(block_n, 64)
    # Conversions, terms of scores and wide accumulators want registers, which two programs of
    # eight warps would not find.
    is_heavy = key.is_heavy or key.dim not in (16, 32, 64, 128) or key.storage != key.dtype
    return SplitConfig(
        Config(block_m, block_n, 8 if is_heavy and programs == 1 else 4, 3), programs
    )


def _many_rows(key: Key, block_m: int) -> SplitConfig:
    """Where products take as long as reading."""
    widest = max(key.dim, key.value_dim)
    if widest > 256:
        # As many stages as there is room for: 2 left every tile's latency to be waited for.
        return SplitConfig(Config(block_m, 32, 8, 4), 1)
    block_n = 64 if widest <= 128 else 32
    if key.architecture not in _LARGE:
        return SplitConfig(Config(block_m, block_n // 2, 8, 2), 1)
    bytes_of_key = key.storage.itemsize * (key.dim + key.value_dim)
    if block_m == 64 and key.dim == 128 and block_n * bytes_of_key == _STAGE // 2:
        # 128 keys are 2 % faster for 16 queries, and spill.
        return SplitConfig(Config(block_m, block_n, 4, 5), 1)
    if block_m == 64:
        return SplitConfig(Config(block_m, block_n, 4, 3), 2 if widest <= 128 else 1)
    return SplitConfig(Config(block_m, block_n, 8, 3), 1)


def _tile(bytes_of_key: int, stage: int, most: int) -> int:
    block = 16
    while block < most and 2 * block * bytes_of_key <= stage * 5 // 4:
        block *= 2
    return block
