"""How the hopper kernels are built, by table: dtype and head dims; never by length."""

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


def forward_config(dim: int, value_dim: int, dtype: torch.dtype) -> ForwardConfig:
    """dim, value_dim: head dims as tiles hold them."""
    # Sums of bf16 P have an exponent's whole range. Those of fp16 P stay below 2^16.
    room, log2_limit = (30.0, 40) if dtype == torch.bfloat16 else (0.0, 15)
    width, shares_q = max(dim, value_dim), dim == value_dim
    if width <= 64:
        most, registers = _THREE
        return ForwardConfig(
            Config(192, 128, 4, 1, most), 3, 3, 3, True, True, False, room, log2_limit, registers
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
            return BackwardConfig(launch, 3, True, True, False, False, registers)
        # Of a third group 72: with 8 more or less of a consumer's, ptxas puts all products one
        # after the other.
        most, _ = _THREE
        return BackwardConfig(Config(64, 128, 4, 1, most), 3, True, True, False, True, (208, 24))
    if width <= 128:
        return BackwardConfig(launch, 2, False, False, False, False, registers)
    return BackwardConfig(Config(64, 64, 4, 1, most), 2, False, False, True, False, registers)


def query_config(dim: int, value_dim: int) -> QueryConfig:
    """dim, value_dim: head dims as tiles hold them."""
    most, _ = _TWO
    width = max(dim, value_dim)
    slots = (4, 4) if width <= 128 else (2, 2) if dim + value_dim < 512 else (2, 1)
    return QueryConfig(Config(128, 64, 4, 1, most), *slots, (240, 24))
