"""Tile sizes of the triton kernels, by table: dtype, head dims, GPU generation; never by length."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config


class Key(NamedTuple):
    """What a configuration depends on.

    width: the larger head dim as its tiles hold it. is_heavy: a bias, dropout or a test that loads
    takes registers of its own.
    """

    dtype: torch.dtype
    width: int
    architecture: str
    is_heavy: bool


class KeysConfig(NamedTuple):
    """One launch of the programs that own keys: for dK, dV or both."""

    has_k: bool
    has_v: bool
    config: Config


class BackwardConfig(NamedTuple):
    """Of the programs that own keys, launch by launch, and of those that own rows."""

    keys: tuple[KeysConfig, ...]
    rows: Config


def _together(
    block_m: int, block_n: int, num_warps: int, num_stages: int
) -> tuple[KeysConfig, ...]:
    return (KeysConfig(True, True, Config(block_m, block_n, num_warps, num_stages)),)


def _apart(dk: Config, dv: Config) -> tuple[KeysConfig, ...]:
    """Where the accumulators of both would not leave enough registers."""
    return KeysConfig(True, False, dk), KeysConfig(False, True, dv)


def _unpipelined(keys: tuple[KeysConfig, ...]) -> tuple[KeysConfig, ...]:
    return tuple(x._replace(config=x.config._replace(num_stages=1)) for x in keys)


# With 227 KiB of shared memory, and matrix units that want 64 rows at least.
_HOPPER_LIKE = ("sm_90", "sm_100", "sm_103")


class _Row(NamedTuple):
    """Tiles for head dims up to a width."""

    width: int
    forward: Config
    backward: BackwardConfig


# Wherever nothing was measured: what spills little on sm_80, sm_89, sm_120 and CDNA, and fits in
# the 99 KiB of shared memory of sm_86, sm_89 and sm_120 and in the 64 KiB of gfx942
# (`make compile-test`, Triton 3.6 and 3.9).
_ELSEWHERE = (
    _Row(
        64,
        Config(128, 64, 8, 3),
        BackwardConfig(_together(64, 32, 4, 2), Config(64, 64, 4, 2)),
    ),
    _Row(
        96,
        Config(128, 64, 8, 2),
        BackwardConfig(_together(16, 64, 4, 2), Config(64, 64, 4, 2)),
    ),
    _Row(
        128,
        Config(128, 64, 8, 2),
        BackwardConfig(_together(32, 64, 8, 2), Config(64, 64, 8, 2)),
    ),
    _Row(
        192,
        Config(64, 32, 8, 2),
        BackwardConfig(_apart(Config(32, 32, 4, 1), Config(32, 64, 8, 1)), Config(64, 32, 8, 2)),
    ),
    _Row(
        256,
        Config(64, 32, 8, 2),
        BackwardConfig(_apart(Config(32, 32, 4, 1), Config(32, 64, 8, 1)), Config(64, 16, 8, 1)),
    ),
)


def _elsewhere(key: Key) -> _Row:
    row = next(row for row in _ELSEWHERE if key.width <= row.width)
    if not key.is_heavy:
        return row
    # Loads of a bias or a test are pipelined too, and take as much again.
    keys, rows = row.backward
    backward = BackwardConfig(_unpipelined(keys), rows._replace(num_stages=1))
    return _Row(row.width, row.forward._replace(num_stages=1), backward)


# Light 16-bit calls on sm_90 were measured on an H200 with Triton 3.6 (2026-11-29): the best of 7
# to 14 each, at 16k and 4k tokens. Blackwell, heavy calls and fp32 have what `make compile-test`
# shows to fit and to spill little.
def forward_config(key: Key) -> Config:
    if key.architecture == "interpreter":
        return Config(32, 32, 4, 1)
    if key.dtype == torch.float32:
        # Three tf32 products hold each operand in two halves: little fits into registers.
        return Config(32, 32, 4, 1) if key.width <= 128 else Config(16, 16, 4, 1)
    if key.is_heavy and key.width <= 128:
        return Config(64, 64, 8, 2)
    if key.architecture not in _HOPPER_LIKE:
        return _elsewhere(key).forward
    if key.is_heavy:
        return Config(128, 32, 8, 2)
    if key.width <= 128:
        return Config(64, 64, 4, 3)
    if key.width <= 192:
        return Config(128, 64, 8, 3)
    return Config(128, 32, 8, 3)


def backward_config(key: Key) -> BackwardConfig:
    config = _backward_config(key)
    if not key.architecture.startswith("gfx"):
        return config
    # Where loads are pipelined, Triton 3.6 to 3.9 takes the bits of a test or of dropout from one
    # layout to another through shared memory, and fails: AMD's backend stores no single bits.
    return config._replace(keys=_unpipelined(config.keys))


def _backward_config(key: Key) -> BackwardConfig:
    if key.architecture == "interpreter":
        return BackwardConfig(_together(32, 32, 4, 1), Config(32, 32, 4, 1))
    if key.dtype == torch.float32:
        if key.width <= 128:
            return BackwardConfig(_together(32, 16, 4, 1), Config(16, 32, 4, 1))
        return BackwardConfig(_together(16, 16, 4, 1), Config(16, 16, 4, 1))
    if key.is_heavy and key.width <= 128:
        return BackwardConfig(_together(32, 64, 8, 2), Config(64, 64, 8, 2))
    if key.architecture not in _HOPPER_LIKE:
        return _elsewhere(key).backward
    if key.is_heavy:
        apart = _apart(Config(32, 64, 8, 2), Config(32, 64, 8, 2))
        return BackwardConfig(apart, Config(64, 32, 8, 2))
    if key.width <= 64:
        return BackwardConfig(_together(64, 64, 4, 2), Config(64, 64, 4, 3))
    if key.width <= 96:
        return BackwardConfig(_together(32, 64, 4, 3), Config(64, 64, 4, 3))
    if key.width <= 128:
        return BackwardConfig(_together(32, 64, 4, 3), Config(128, 64, 8, 3))
    # On Blackwell one stage more would be more than there is.
    fewer = 0 if key.architecture == "sm_90" else 1
    if key.width <= 192:
        config = Config(64, 128, 8, 2 - fewer)
        return BackwardConfig(_apart(config, config), Config(128, 64, 8, 2 - fewer))
    config = Config(32, 128, 8, 3 - fewer)
    return BackwardConfig(_apart(config, config), Config(128, 64, 8, 1))


def few_tiles(key: Key, config: Config) -> int:
    """Up to how many tiles of a band the forward visits in one loop: see
    `kernels/masks.in_one_loop`."""
    if key.architecture == "interpreter":
        # So that small tests visit tiles in one loop and in two.
        return 3
    # A loop without a pipeline starts at once. Tests weigh most beside small products: at head dim
    # 64 causal calls of 2k and windows took 16 to 25 % more time (H200, Triton 3.6, 2026-11-30).
    return 24 if config.num_stages > 1 and key.width > 64 else 0


def sums_config(key: Key) -> Config:
    """Of the kernels that sum dS: for a learned bias, and over the keys of each row."""
    if key.architecture == "interpreter":
        return Config(32, 32, 4, 1)
    if key.dtype == torch.float32:
        return Config(32, 16, 4, 1) if key.width <= 128 else Config(16, 16, 4, 1)
    return Config(64, 64, 8, 1) if key.width <= 128 else Config(32, 32, 8, 1)


def few_keys_config(key: Key) -> Config:
    """Of the backward whose key tile holds all keys, up to `choice.FEW_KEYS`; on Hopper."""
    return Config(32 if key.architecture == "interpreter" else 64, 128, 8, 1)


def delta_config(key: Key) -> Config:
    """Of the kernel that goes once over the rows of dO and of O, which may be in two parts."""
    return Config(32 if key.architecture == "interpreter" or key.width > 128 else 64, 0, 4, 1)
