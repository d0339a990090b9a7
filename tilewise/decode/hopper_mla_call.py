"""Latent attention over a cache on Hopper: how its heads are grouped, its launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from ..core.mask import UNBOUNDED
from ..kernels.gluon import TensorDescriptor, gl
from ..kernels.launch import Config
from .cache import KVCache
from .call import CacheCall
from .choice import HOPPER_TILE
from .config import SplitConfig
from .hopper_mla import _mla_cache_fwd_hopper_kernel
from .hopper_mla_producer import HALF, REST, ROWS, MlaBuild
from .triton_call import Forward, SplitCall, SplitMask

_ROWS, _HALF, _REST = ROWS.value, HALF.value, REST.value
# At launch, of four warp groups; then of O and of the producer, which leaves 168 to P.
_MOST, _REGISTERS = 128, (160, 24)


class MlaConfig(NamedTuple):
    """Keys of a tile, and what `MlaBuild` says."""

    block_n: int
    halves: int
    kept: int


# Products of 64 keys cost less each; smaller pages hold no such tile.
_WIDE, _NARROW = MlaConfig(64, 5, 2), MlaConfig(HOPPER_TILE, 6, 3)


def heads_together(H: int, queries: int) -> int:
    """Of H heads, how many share a unit with all queries of a sequence; all where none fit."""
    fitting = [n for n in range(1, H + 1) if H % n == 0 and n * queries <= _ROWS]
    return max(fitting, default=H)


class HopperSplit(SplitCall):
    """The call as if each group of heads had a kv head of its own."""

    def __init__(self, call: CacheCall, config: Config) -> None:
        super().__init__(call)
        queries = call.most_queries
        # Sequences of packed queries differ: units one after the other keep all programs at work.
        self.group = self.H if call.is_packed else heads_together(self.H, queries)
        self.G = self.H // self.group
        self.block_m = _ROWS
        self.config = SplitConfig(config, 1)
        self.rows_per_unit = max(1, min(_ROWS, queries * self.group))


class MlaForward(Forward):
    """A forward made ready, see `triton_call.Forward`."""

    _kernel = _mla_cache_fwd_hopper_kernel

    def __init__(
        self, call: CacheCall, out: Tensor, lse: Tensor, config: MlaConfig | None = None
    ) -> None:
        mask, cache = SplitMask.of(call.mask), call.cache
        if config is None:
            is_wide = not cache.is_paged or cache.k.shape[1] % _WIDE.block_n == 0
            config = _WIDE if is_wide else _NARROW
        block_n, halves, kept = config
        super().__init__(HopperSplit(call, Config(_ROWS, block_n, 4, 1, _MOST)), out, lse)
        assert mask is not None
        has_start = mask.band.left < UNBOUNDED or mask.band.lows is not None
        self._mla = MlaBuild(halves, kept, has_start or cache.starts is not None, _REGISTERS)
        k, D = cache.k, cache.k.shape[3]
        # The stride of a dim of one may be anything, also what no descriptor takes.
        strides = [s if n > 1 else D for n, s in zip(k.shape[:2], k.stride(), strict=False)]
        shape, layouts = [*k.shape[:2], D], (_layout(_HALF), _layout(_REST))
        self._described = [
            (shape, [*strides, 1], [1, block_n, columns], layout)
            for columns, layout in zip((_HALF, _REST), layouts, strict=True)
        ]

    def _arguments(
        self, cache: KVCache, q: Any, k: Any, v: Any, out: Any, lse: Any, parts: Any, place: Any,
        terms: Any, scales: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        keys, rest = (TensorDescriptor(cache.k, *x) for x in self._described)
        scale, sinks = terms[0], terms[5]
        return keys, rest, q, out, lse, parts, place, scale, sinks, self._build, self._mla


@lru_cache
def _layout(columns: int) -> Any:
    return gl.NVMMASharedLayout(min(2 * columns, 128), 16, rank=3)
