"""Calls over a cache on Hopper: how heads are grouped, which tiles, the launch."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..core.mask import UNBOUNDED
from ..dense.hopper_descriptors import describe
from ..kernels.gluon import TensorDescriptor, gl
from ..kernels.launch import Config
from .cache import KVCache
from .call import CacheCall
from .choice import HOPPER_TILE
from .config import SplitConfig
from .hopper_mla import _mla_cache_fwd_hopper_kernel
from .hopper_mla_producer import HALF, REST, MlaBuild
from .hopper_plan import ROWS
from .hopper_split_kv import SplitBuild, _cache_attention_fwd_hopper_kernel
from .triton_call import Forward, SplitCall, SplitMask

_ROWS, _HALF, _REST = ROWS.value, HALF.value, REST.value
# Registers at launch: of four warp groups, or of two programs of two.
_MOST = 128
# Of the groups of O and of the producer, which leaves 168 to the group of P.
_MLA_REGISTERS = (160, 24)
# Of the producer, which leaves 232 to the consumer.
_PRODUCER_REGISTERS = 24
_BLOCK_N = 64


class MlaConfig(NamedTuple):
    """Keys of a tile, and what `MlaBuild` says. A fifth half of 64 keys fits where more of Q is
    kept, whose registers the group of P then spills at every tile (Triton 3.6)."""

    block_n: int
    halves: int
    kept: int


# Products of 64 keys cost less each; smaller pages hold no such tile.
_WIDE, _NARROW = MlaConfig(64, 4, 1), MlaConfig(HOPPER_TILE, 6, 3)


def heads_together(heads: int, queries: int) -> int:
    """Of the heads of a kv head, how many share a unit with all queries of a sequence; all where
    none fit."""
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * queries <= _ROWS]
    return max(fitting, default=heads)


class HopperSplit(SplitCall):
    """The call as if each group of heads had a kv head of its own."""

    def __init__(self, call: CacheCall, block_n: int, programs: int) -> None:
        super().__init__(call)
        queries = call.most_queries
        # Sequences of packed queries differ: units one after the other keep all programs at work.
        if not call.is_packed:
            self.group = heads_together(call.group, queries)
        self.G = self.H // self.group
        self.block_m = _ROWS
        self.config = SplitConfig(Config(_ROWS, block_n, 4, 1, _MOST), programs)
        self.rows_per_unit = max(1, min(_ROWS, queries * self.group))

    @property
    def has_start(self) -> bool:
        """Whether rows may not see the first keys."""
        mask = SplitMask.of(self.call.mask)
        assert mask is not None
        is_cut = mask.band.left < UNBOUNDED or mask.band.lows is not None
        return is_cut or self.call.cache.starts is not None


class MlaForward(Forward):
    """Latent attention made ready, see `triton_call.Forward`."""

    _kernel = _mla_cache_fwd_hopper_kernel

    def __init__(
        self, call: CacheCall, out: Tensor, lse: Tensor, config: MlaConfig | None = None
    ) -> None:
        k = call.cache.k
        if config is None:
            is_wide = not call.cache.is_paged or k.shape[1] % _WIDE.block_n == 0
            config = _WIDE if is_wide else _NARROW
        block_n, halves, kept = config
        split = HopperSplit(call, block_n, 1)
        super().__init__(split, out, lse)
        self._mla = MlaBuild(halves, kept, split.has_start, _MLA_REGISTERS)
        D = k.shape[3]
        # The stride of a dim of one may be anything, also what no descriptor takes.
        strides = [s if n > 1 else D for n, s in zip(k.shape[:2], k.stride(), strict=False)]
        layout = gl.NVMMASharedLayout(128, 16, rank=3)
        self._described = [
            ([*k.shape[:2], D], [*strides, 1], [1, block_n, columns], layout)
            for columns in (_HALF, _REST)
        ]

    def _arguments(
        self, cache: KVCache, q: Any, k: Any, v: Any, out: Any, lse: Any, parts: Any, place: Any,
        terms: Any, scales: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        keys, rest = (TensorDescriptor(cache.k, *x) for x in self._described)
        scale, sinks = terms[0], terms[5]
        return keys, rest, q, out, lse, parts, place, scale, sinks, self._build, self._mla


class SplitForward(Forward):
    """Attention over keys and values made ready, see `triton_call.Forward`."""

    _kernel = _cache_attention_fwd_hopper_kernel

    def __init__(self, call: CacheCall, out: Tensor, lse: Tensor) -> None:
        split = HopperSplit(call, _BLOCK_N, 2)
        super().__init__(split, out, lse)
        D = call.cache.k.shape[3]
        groups = split.G // call.cache.k.shape[2]
        slots = 3 if D > 64 else 5
        self._split_build = SplitBuild(slots, groups, split.has_start, _PRODUCER_REGISTERS)
        self._block, self._layout = [1, 1, _BLOCK_N, D], gl.NVMMASharedLayout(128, 16, rank=4)

    def _arguments(
        self, cache: KVCache, q: Any, k: Any, v: Any, out: Any, lse: Any, parts: Any, place: Any,
        terms: Any, scales: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        keys, values = (describe(x, self._block, self._layout) for x in (cache.k, cache.v))
        scale, sinks = terms[0], terms[5]
        return keys, values, q, out, lse, parts, place, scale, sinks, self._build, self._split_build
