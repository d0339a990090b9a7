"""The hopper forward's host side: descriptors, the counter of tiles, the launch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.mask import UNBOUNDED
from ..kernels.launch import compiler_options, relaunch
from ..kernels.structs import Operand, Statistics, absent, code
from . import hopper_forward, hopper_producer
from .hopper_config import (
    ForwardConfig,
    forward_config,
    has_short_tiles,
    product_dim,
    tile_dim,
)
from .hopper_descriptors import describe, described_as, one_key, spread, tile_layout
from .hopper_producer import HopperBuild, SpanBuild, Tickets
from .piece import Result, new_remainder
from .triton_call import L2_BYTES, TritonCall, align_rows, cut_rows, padded_dim
from .triton_placement import DOCUMENTS, PACKED, UNIFORM

_ROWS = hopper_producer.ROWS.value
_KERNEL = hopper_forward._attention_fwd_hopper_kernel


class Forward:
    """A forward made ready: everything but the tensors; see `triton_forward.Forward`."""

    def __init__(
        self,
        call: TritonCall,
        out_dtype: torch.dtype,
        *,
        is_split: bool = False,
        **overrides: Any,
    ) -> None:
        self.call, self._dtype, self._is_split = call, out_dtype, is_split
        q = call.tensors[0]
        (B, M, H, D), self._E = q.shape, call.piece.v.shape[-1]
        dims = tile_dim(D), tile_dim(self._E)
        band = call.band
        is_uneven = band is not None and (band.left < UNBOUNDED or band.right < UNBOUNDED)
        is_short = has_short_tiles(M, is_uneven=is_uneven)
        config = forward_config(*dims, q.dtype, is_short=is_short)._replace(**overrides)
        self._is_staged = out_dtype == q.dtype
        self._config = config
        plan = call.plan_rows(config.launch)
        self._call: Any = plan.call
        self._n_tiles = plan.n_programs
        E = padded_dim(self._E)
        self._out_shape, self._lse_shape = (B, M, H, E), (B, H, M)
        self._out_strides = M * H * E, H * E, E
        self._build = _build(call, config, dims, self._is_staged)
        kv_bytes = max(1, call.N) * sum(dims) * q.element_size() * call.G // H or 1
        n_heads = H if call.place_kind in (PACKED, DOCUMENTS) else B * H
        # Wide heads have long tiles, so that the last ones must be evened out over more heads: 796
        # against 768 TFLOP/s at 16k, 720 against 705 at 4k (D 256, causal, H200, 2026-11-30).
        share = L2_BYTES * (2 if product_dim(max(D, self._E)) == 256 else 1)
        together = max(1, min(n_heads, share // kv_bytes)) if is_uneven else 1
        self._tickets = code(self._n_tiles), code(n_heads), code(together)
        self._layouts = tile_layout(dims[0]), tile_layout(dims[1])
        self._blocks = [1, 1, _ROWS, dims[0]], [1, 1, config.launch.block_n, dims[0]]
        self._value_blocks = [1, 1, config.launch.block_n, dims[1]], [1, 1, _ROWS, dims[1]]
        # Of a reusable call, found by its first run: the binary, and where nothing had to be
        # copied, how q, k, v and out are described.
        self._compiled: Any = None
        self._described: tuple[Any, ...] = ()

    def options(self) -> dict[str, Any]:
        return compiler_options(self._config.launch)

    def release(self) -> None:
        if self.call.place_kind != UNIFORM:
            self._call = None
        self.call.release()

    def arguments(
        self, q: Tensor, k: Tensor, v: Tensor, call: TritonCall | None = None
    ) -> tuple[tuple[Any, ...], Result]:
        """Of the kernel; and what they hold of it. call: see `run`."""
        out = torch.empty(self._out_shape, dtype=self._dtype, device=q.device)
        lse = torch.empty(self._lse_shape, dtype=torch.float32, device=q.device)
        remainder = new_remainder(out) if self._is_split else None
        if self._described:
            tensors = (q, k, v, out) if self._is_staged else (q, k, v)
            descriptors = [
                described_as(x, of) for x, of in zip(self._described, tensors, strict=True)
            ]
        else:
            descriptors = self._describe(q, k, v, out)
        H, M = self._lse_shape[1:]
        arguments = (
            *descriptors[:3],
            descriptors[3] if self._is_staged else None,
            Operand(out, *self._out_strides),
            absent(Operand) if remainder is None else Operand(remainder, *self._out_strides),
            Statistics(lse, code(H * M), code(M)),
            self._call if call is None else call.plan_rows(self._config.launch).call,
            Tickets(_counter(q.device), *self._tickets),
            self._build,
        )
        return arguments, Result(out, lse, remainder)

    def _describe(self, *given: Tensor) -> list[Any]:
        """Of q, k, v, and of out where the kernel stores it by TMA."""
        q, k, v, out = given
        inputs = [spread(align_rows(x)) for x in (q, one_key(k), one_key(v))]
        (q_block, k_block), (v_block, out_block) = self._blocks, self._value_blocks
        layout, value_layout = self._layouts
        found = [
            describe(inputs[0], q_block, layout),
            describe(inputs[1], k_block, layout),
            describe(inputs[2], v_block, value_layout),
        ]
        if self._is_staged:
            found.append(describe(out, out_block, value_layout))
        # Where an input had to be copied, so has one like it.
        if all(x is of for x, of in zip(inputs, given, strict=False)):
            self._described = tuple(described_as(x, None) for x in found)
        return found

    def run(self, q: Tensor, k: Tensor, v: Tensor, call: TritonCall | None = None) -> Result:
        if 0 in self._lse_shape:
            out = q.new_empty((*self._out_shape[:3], self._E), dtype=self._dtype)
            lse = q.new_empty(self._lse_shape, dtype=torch.float32)
            return Result(out, lse, new_remainder(out) if self._is_split else None)
        arguments, (out, lse, remainder) = self.arguments(q, k, v, call)
        grid = (min(self._n_tiles, _multiprocessors(q.device)), 1, 1)
        if self._compiled is not None:
            relaunch(self._compiled, grid, arguments, self.call.device)
        else:
            self._compiled = self.call.launch(_KERNEL, grid, self._config.launch, arguments)
        if remainder is not None:
            remainder = cut_rows(remainder, self._E)
        return Result(cut_rows(out, self._E), lse, remainder)


def _build(
    call: TritonCall, config: ForwardConfig, dims: tuple[int, int], is_staged: bool
) -> HopperBuild:
    band = call.band
    assert band is not None
    has_start = band.left < UNBOUNDED or band.lows is not None
    limit = 2.0**config.log2_limit
    block_m, block_n = config.launch[:2]
    return HopperBuild(
        *dims,
        product_dim(call.piece.q.shape[-1]),
        product_dim(call.piece.v.shape[-1]),
        call.place_kind,
        SpanBuild(call.mask_kind, block_m, block_n),
        SpanBuild(call.mask_kind, _ROWS, block_n),
        has_start,
        call.is_folded,
        call.piece.terms.softcap is not None,
        call.piece.terms.alibi_slopes is not None,
        config.n_consumers,
        config.k_slots,
        config.v_slots,
        config.takes_turns,
        config.is_early,
        is_staged,
        config.shares_q and is_staged,
        config.room,
        _f32(config.log2_limit),
        limit,
        config.registers,
    )


def _f32(log2: int) -> str:
    """2^log2 as PTX writes it."""
    return f"0f{(log2 + 127) << 23:08x}"


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Of a device and stream; of a device, those that graphs and streams may still take, and all:
# a graph holds no reference to what it writes.
_counters: dict[tuple[torch.device, int], Tensor] = {}
_spare: dict[torch.device, list[Tensor]] = {}
_all_spare: dict[torch.device, Tensor] = {}
# Counters that graphs of a device may hold before each of their launches zeroes one of its own.
_MOST_SPARE = 4096


def _counter(device: torch.device) -> Tensor:
    """Two zeros that no other launch uses until this one has left them 0 again.

    Launches of one stream follow each other and share one. A captured launch may run beside any
    other, so it keeps its own for good.
    """
    if device.type != "cuda":
        return torch.zeros(4, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        spare = _spare.get(device)
        return spare.pop() if spare else torch.zeros(4, dtype=torch.int32, device=device)
    if device not in _spare:
        # Rows of 16 bytes, so that Triton compiles one kernel for all.
        rows = _lasting_zeros(_MOST_SPARE, device)
        _spare[device], _all_spare[device] = list(rows.unbind()), rows
    # A `Stream` of torch's takes several microseconds.
    key = (device, torch._C._cuda_getCurrentRawStream(device.index))
    found = _counters.get(key)
    if found is None:
        spare = _spare[device]
        found = _counters[key] = spare.pop() if spare else _lasting_zeros(1, device)[0]
    return found


def _lasting_zeros(n: int, device: torch.device) -> Tensor:
    """int32 `[n, 4]`, there before what the current stream does next.

    Made by a thread of its own. torch.compile's CUDA graphs warm up in a pool that takes all that
    this thread allocates, and hand out again whatever they do not know of.
    """

    def make() -> Tensor:
        zeros = torch.zeros(n, 4, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return zeros

    with ThreadPoolExecutor(1, "tilewise") as worker:
        return worker.submit(make).result()
