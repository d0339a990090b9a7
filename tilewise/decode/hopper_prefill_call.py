"""Calls of many queries over a cache on Hopper: who takes which sequences, tiles, the launches."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from ..core.mask import UNBOUNDED
from ..core.positions import Positions
from ..dense import hopper_call as dense
from ..dense.hopper_config import forward_config, tile_dim
from ..dense.hopper_descriptors import describe, described_as, spread, tile_layout
from ..dense.hopper_producer import ROWS, Tickets
from ..dense.piece import Piece
from ..dense.triton_call import L2_BYTES, TritonCall, align_rows, padded_dim
from ..kernels.launch import UNTILED, Config, launch, relaunch
from ..kernels.placement import FIELDS
from ..kernels.structs import Call, MaskData, Operand, Placement, Statistics, absent, code
from .cache import KVCache
from .call import CacheCall
from .choice import LEAST_QUERIES
from .hopper_prefill import _cache_prefill_fwd_hopper_kernel
from .hopper_prefill_place import PlaceBuild, place_prefill
from .hopper_prefill_producer import PANEL, PagedBuild
from .triton_call import Forward, SplitCall, addresses_of, terms_at

_ROWS, _PANEL, _FIELDS = ROWS.value, PANEL.value, FIELDS.value
# Sequences that are placed at a time.
_BLOCK = 128
_NO_MASK = absent(MaskData)


class PrefillForward:
    """A prefill made ready; as `triton_call.Forward`.

    A contiguous cache in the order of the batch is padded keys, which dense attention's own kernel
    reads. Of packed queries, sequences of few are left to the split-KV kernel, which shares out
    their keys; the two kernels write different rows.
    """

    def __init__(self, call: CacheCall, out: Tensor, lse: Tensor) -> None:
        self._first: Any = call, out, lse
        self.device, cache = call.q.device, call.cache
        few, self._others = 0, None
        if call.is_packed and call.splits.count is None and not call.splits.is_fixed:
            few = LEAST_QUERIES - 1
            self._others = Forward(SplitCall(call, most=few), out, lse)
        split = SplitCall(call)
        self._place: Any = split.place()
        singles = split.build(0)
        as_dense = TritonCall(_piece_of(call))
        (B, M, H, D), E = as_dense.piece.q.shape, cache.v.shape[3]
        dims = tile_dim(D), tile_dim(E)
        config = forward_config(*dims, call.q.dtype)
        block_m, block_n = config.launch[:2]
        self._config: Config = config.launch
        self._is_staged = out.dtype == call.q.dtype
        self._placing = (
            code(few), PlaceBuild(singles.has_own, singles.singles, _BLOCK), block_m
        )  # fmt: skip
        n_tiles, n_sequences = as_dense.count_tiles(M, block_m), as_dense.n_sequences
        self._sizes = [code(x) for x in (n_tiles, n_sequences, B, H, call.group, 1)]
        self._table_shape = n_sequences + 1, _FIELDS
        n_heads = H if call.is_packed else B * H
        self._grid = (min(n_tiles * n_heads, dense._multiprocessors(self.device)), 1, 1)
        together = _heads_together(as_dense, n_heads, dims, call)
        self._tickets = code(n_tiles * n_heads), code(n_heads), code(together)
        self._terms: Any = as_dense.terms
        self._build = dense._build(as_dense, config, dims, self._is_staged)
        self._paged = _paged_build(call, block_n)
        # What kernels write, where that is not what the caller gave.
        self._is_direct = _takes_results(out)
        self._out_shape = (B, M, H, E if self._is_direct else padded_dim(E))
        self._lse_shape = (B, H, M)
        rows, columns = (block_n, dims) if self._paged is None else (self._paged.rows, [_PANEL] * 2)
        layouts = [tile_layout(dim) for dim in dims]
        self._blocks = (
            ([1, 1, _ROWS, dims[0]], layouts[0]),
            ([1, 1, rows, columns[0]], layouts[0]),
            ([1, 1, rows, columns[1]], layouts[1]),
            ([1, 1, _ROWS, dims[1]], layouts[1]),
        )
        # Of the first run, which others need not go through.
        self._described: tuple[Any, ...] = ()
        self._compiled: tuple[Any, Any] | None = None

    def run_first(self) -> bool:
        """Run on the tensors of the call. Returns whether `run` may follow."""
        call, out, lse = self._first
        place, terms = self._place, self._terms
        self._launch(call.q, call.cache, place, terms, out, lse if lse.numel() else None)
        are_ready = self._others is None or self._others.run_first()
        # The tensors belong to the caller; their addresses come anew with each call.
        self._place, self._terms = tuple(place)[9:], tuple(terms)
        del self._first
        return are_ready and self._compiled is not None and None not in self._compiled

    def run(
        self, q: Tensor, cache: KVCache, cu: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """The same on other tensors: addresses in place of tensors, and no look-up."""
        place = addresses_of(cache, cu, self._place)
        self._launch(q, cache, place, terms_at(self._terms, slopes, sinks), out, lse)
        if self._others is not None:
            self._others.run(q, cache, cu, slopes, sinks, out, lse)

    def _launch(
        self, q: Tensor, cache: KVCache, place: Any, terms: Any, out: Tensor, lse: Tensor | None
    ) -> None:
        device = self.device
        table = torch.empty(self._table_shape, dtype=torch.int32, device=device)
        q, results = (x if x.dim() == 4 else x.unsqueeze(0) for x in (q, out))
        q = spread(align_rows(q))
        if not self._is_direct:
            results = torch.empty(self._out_shape, dtype=out.dtype, device=device)
        if lse is None:
            lse = torch.empty(self._lse_shape, dtype=torch.float32, device=device)
        _, M, H, E = self._out_shape
        call = Call(Placement(table, None, *self._sizes), _NO_MASK, terms)
        arguments: tuple[Any, ...] = (
            *self._describe(q, cache.k, cache.v, results),
            Operand(results, M * H * E, H * E, E),
            absent(Operand),
            Statistics(lse, code(H * M), code(M)),
            call,
        )
        tickets = Tickets(dense._counter(device), *self._tickets)
        if self._paged is None:
            arguments = *arguments, tickets, self._build
        else:
            arguments = *arguments, place, tickets, self._build, self._paged
        placing = (table, place, *self._placing)
        if self._compiled is None:
            kernel = dense._KERNEL if self._paged is None else _cache_prefill_fwd_hopper_kernel
            placed = launch(place_prefill, (1, 1, 1), UNTILED, placing, device)
            main = launch(kernel, self._grid, self._config, arguments, device)
            self._compiled = placed, main
        else:
            placed, main = self._compiled
            relaunch(placed, (1, 1, 1), placing, device)
            relaunch(main, self._grid, arguments, device)
        if not self._is_direct:
            out.copy_(results[..., : out.shape[-1]].reshape(out.shape))

    def _describe(self, *tensors: Tensor) -> list[Any]:
        """Of q, k, v, and of out where the kernel stores it by TMA."""
        if not self._is_staged:
            tensors = tensors[:3]
        if not self._described:
            found = [describe(x, *of) for x, of in zip(tensors, self._blocks, strict=False)]
            self._described = tuple(described_as(x, None) for x in found)
        made = [described_as(of, x) for of, x in zip(self._described, tensors, strict=True)]
        return made if self._is_staged else [*made, None]


def _piece_of(call: CacheCall) -> Piece:
    """The call as dense attention sees it; of keys no more than how many there are."""
    cache, q = call.cache, call.q if call.q.dim() == 4 else call.q.unsqueeze(0)
    B, M, H = q.shape[:3]
    k, v = (
        x.new_empty((1, 1, *x.shape[2:]), device="meta").expand(B, cache.capacity, -1, -1)
        for x in (cache.k, cache.v)
    )
    cu = call.cu_seqlens_q
    at = Positions(cache.B, H, M, cache.capacity, cu, None, None, cache.lengths)
    return Piece(q, k, v, call.whole_mask, at, call.terms)


def _paged_build(call: CacheCall, block_n: int) -> PagedBuild | None:
    """None where dense attention's producer finds the keys."""
    cache = call.cache
    if cache.is_paged:
        page = cache.k.shape[1]
        return PagedBuild(page, gcd(page, block_n))
    if call.is_packed or cache.batch_index is not None:
        return PagedBuild(0, block_n)
    return None


def _heads_together(
    as_dense: TritonCall, n_heads: int, dims: tuple[int, int], call: CacheCall
) -> int:
    """How many heads take turns, so that their keys stay in L2, where a mask is uneven."""
    band = as_dense.band
    assert band is not None
    if band.left == band.right == UNBOUNDED:
        return 1
    bytes_of_head = max(1, call.cache.capacity) * sum(dims) * call.q.element_size()
    return max(1, min(n_heads, L2_BYTES * call.group // bytes_of_head))


def _takes_results(out: Tensor) -> bool:
    """Whether kernels may write there: heads are neighbours, rows aligned."""
    is_aligned = out.data_ptr() % 16 == 0 and out.shape[-1] * out.element_size() % 16 == 0
    return out.is_contiguous() and is_aligned
