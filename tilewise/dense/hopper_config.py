"""How the hopper kernels are built, by table: dtype and head dims, and in one place whether there
are few rows. Nothing is tried out."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..kernels.launch import Config


class ForwardConfig(NamedTuple):
    """See `hopper_forward.HopperBuild`. launch: tile sizes, and what the compiler is told."""

    launch: Config
    n_consumers: int
    k_slots: int
    v_slots: int
    takes_turns: bool
    is_early: bool
    shares_q: bool
    room: float
    log2_limit: int
    registers: tuple[int, int]


class BackwardConfig(NamedTuple):
    """See `hopper_backward_common.BackwardBuild`."""

    launch: Config
    key_slots: int
    slots: int
    keeps_keys: bool
    keeps_values: bool
    takes_turns: bool
    has_queries: bool
    registers: tuple[int, int]


class QueryConfig(NamedTuple):
    """See `hopper_query_backward.QueryBuild`."""

    launch: Config
    k_slots: int
    v_slots: int
    registers: tuple[int, int]


# Registers at launch, of consumers and of the producer: 65536 in all, by warp groups.
_TWO, _THREE = (168, (232, 40)), (128, (160, 32))


def tile_dim(dim: int) -> int:
    """Of a head dim, the columns of its tiles: TMA fills up with zeros."""
    return next(width for width in (64, 128, 256) if dim <= width)


def product_dim(dim: int) -> int:
    """Of a head dim, the columns that products of its tiles are made of: tiles of 256 may leave the
    last 64 out."""
    return 192 if 128 < dim <= 192 else tile_dim(dim)


# Of the tiles of narrow heads.
_TALL, _SHORT = 192, 128
# Up to so many rows tiles are short where a diagonal cuts them.
_FEW_ROWS = 1024


def has_short_tiles(rows: int, *, is_uneven: bool) -> bool:
    """Of narrow heads: whether tiles of 128 rows take less time than tiles of 192, of which a row
    that is not cut off costs less. rows: of a sequence, of a packed call all. is_uneven: rows see
    different keys, so that a diagonal cuts tiles.

    Tiles of 128 and of 192, 16384 rows in all (H200, Triton 3.6, 2026-12-01; stored as
    hopper-steps): of 384 rows 154 and 135 us full, 128 and 140 causal; of 512 rows 191 and 217
    full; of 1024 rows 322 and 353 full; of 1536 rows 421 and 359 full, 267 and 259 causal.
    """
    if is_uneven:
        return rows <= _FEW_ROWS
    tall, short = (-(-rows // tile) * tile for tile in (_TALL, _SHORT))
    return tall > 1.1 * short


def forward_config(
    dim: int, value_dim: int, dtype: torch.dtype, *, is_short: bool = False
) -> ForwardConfig:
    """dim, value_dim: head dims as tiles hold them. is_short: see `has_short_tiles`."""
    # Sums of bf16 P have an exponent's whole range. Those of fp16 P stay below 2^16.
    room, log2_limit = (30.0, 40) if dtype == torch.bfloat16 else (0.0, 15)
    width, shares_q = max(dim, value_dim), dim == value_dim
    if width <= 64:
        if is_short:
            most, registers = _TWO
            return ForwardConfig(
                Config(_SHORT, 128, 4, 1, most), 2, 2, 2, False, False, False, room, log2_limit,
                registers,
            )  # fmt: skip
        most, registers = _THREE
        return ForwardConfig(
            Config(_TALL, 128, 4, 1, most), 3, 3, 3, True, True, False, room, log2_limit, registers
        )
    most, registers = _TWO
    if width <= 128:
        return ForwardConfig(
            Config(128, 128, 4, 1, most), 2, 2, 2, True, False, False, room, log2_limit, registers
        )
    return ForwardConfig(
        Config(128, 64, 4, 1, most), 2, 2, 2, True, False, shares_q, room, log2_limit, registers
    )


def backward_config(dim: int, value_dim: int, *, has_dq: bool) -> BackwardConfig:
    """dim, value_dim: head dims as tiles hold them. has_dq: dQ is added up in the same pass."""
    most, _ = _TWO
    launch, registers = Config(64, 128, 4, 1, most), (240, 24)
    width = max(dim, value_dim)
    if width <= 64:
        if not has_dq:
            return BackwardConfig(launch, 2, 3, True, True, False, False, registers)
        # Of a third group 72: with 8 more or less of a consumer's, ptxas puts all products one
        # after the other.
        most, _ = _THREE
        return BackwardConfig(Config(64, 128, 4, 1, most), 2, 3, True, True, False, True, (208, 24))
    if width <= 128:
        # Of a second tile's keys there is room where no dS is.
        key_slots = 1 if has_dq else 2
        return BackwardConfig(launch, key_slots, 2, False, False, False, False, registers)
    return BackwardConfig(Config(64, 64, 4, 1, most), 1, 2, False, False, True, False, registers)


def query_config(dim: int, value_dim: int) -> QueryConfig:
    """dim, value_dim: head dims as tiles hold them."""
    most, _ = _TWO
    width = max(dim, value_dim)
    slots = (4, 4) if width <= 128 else (2, 2) if dim + value_dim < 512 else (2, 1)
    return QueryConfig(Config(128, 64, 4, 1, most), *slots, (240, 24))


def prepare_config(value_dim: int) -> Config:
    """Of what comes before a backward. value_dim: as tiles hold it."""
    # So few registers that several programs wait for memory beside each other: a backward of 512
    # causal rows takes 31 us less at head dim 64 than with as many as the compiler asks for, 10 at
    # 128 (H200, Triton 3.6, 2026-12-01; stored as hopper-steps).
    return Config(64, 0, 8, 1, {64: 40, 128: 64}.get(value_dim, 0))
