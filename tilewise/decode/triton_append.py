"""Writing new keys and values into a cache: rotary, float8 and the store in one pass.

Dims: k `[B, L, G, D]` or packed `[T, G, D]`; v the same with E; cache as in `cache.py`.
Grid: new tokens; a program has the keys and values of all heads of one.
Math: as in `rotary.py`; float8 by `x / scale`, saturated.
A token whose slot the cache does not have, or that belongs to no sequence, is dropped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dense.triton_call import TritonCall
from ..kernels.launch import Config, launch
from ..kernels.structs import Operand, code, decode
from .cache import FLOAT8, KVCache
from .rotary import Rotary

NONE, HEAD, TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SEARCH = tl.constexpr(128)


class Target(NamedTuple):
    """Where tokens go. Absent tensors are None, ints are coded.

    lengths, first: `[B]`, slots in use, and the positions that rotary starts at. cu: `[B + 1]`.
    table, rows, width: as in `triton_plan.CachePlace`. new: tokens of a sequence, or all packed.
    storage: rows or pages. slots: of a row.
    """

    lengths: Any
    first: Any
    cu: Any
    table: Any
    rows: Any
    width: Any
    B: Any
    new: Any
    capacity: Any
    storage: Any


class Tables(NamedTuple):
    """cos and sin `[positions, half]`, contiguous, or None."""

    cos: Any
    sin: Any
    positions: Any


class AppendBuild(NamedTuple):
    """What a kernel is compiled for. half: of the rotated dims, 0 for none. top: of float8."""

    G: int
    D: int
    E: int
    page: int
    half: int
    interleaved: bool
    scales: int
    top: float
    block_g: int
    block_d: int


@triton.jit
def _sequence_of_token(target, token):
    """The packed token's sequence: how many of cu's entries from the second on it has reached."""
    B = decode(target.B)
    found = 0
    for start in range(0, B, _SEARCH):
        b = start + tl.arange(0, _SEARCH)
        ends = tl.load(target.cu + 1 + b, mask=b < B, other=1 << 30)
        found += tl.sum((ends <= token).to(tl.int32), 0)
    return found


@triton.jit
def _turned(x, base, stride, tables, position, heads, columns, inside, BUILD: tl.constexpr):
    """x with its first dims turned by the angle of the position."""
    HALF: tl.constexpr = BUILD.half
    is_turned = columns < 2 * HALF
    if BUILD.interleaved:
        pair = columns // 2
        partner = columns ^ 1
        sign = tl.where(columns % 2 == 0, -1.0, 1.0)
    else:
        pair = columns % HALF
        partner = tl.where(columns < HALF, columns + HALF, columns - HALF)
        sign = tl.where(columns < HALF, -1.0, 1.0)
    has_angle = is_turned & (position >= 0) & (position < decode(tables.positions))
    at = position.to(tl.int64) * HALF + pair
    cos = tl.load(tables.cos + at, mask=has_angle, other=1.0).to(tl.float32)
    sin = tl.load(tables.sin + at, mask=has_angle, other=0.0).to(tl.float32)
    partner = tl.where(is_turned, partner, columns)
    other = tl.load(base + heads[:, None] * stride + partner[None, :], mask=inside, other=0.0)
    other = other.to(tl.float32)
    return x * cos[None, :] + other * (sign * sin)[None, :]


@triton.jit
def _store(x, cache, scale, row, slot, of_scale, heads, columns, inside, BUILD: tl.constexpr):
    """x, fp32 `[G, D]`, into a slot; float8 by its scale."""
    offsets = row * cache.stride_b + slot.to(tl.int64) * cache.stride_m
    offsets = offsets + heads[:, None].to(tl.int64) * cache.stride_h + columns[None, :]
    is_head = heads < BUILD.G
    if BUILD.scales != NONE:
        if BUILD.scales == TOKEN:
            factor = tl.max(tl.abs(x), 1) / BUILD.top
            factor = tl.where(factor > 0.0, factor, 1.0)
            tl.store(scale + of_scale + heads, factor, mask=is_head)
        else:
            factor = tl.load(scale + of_scale + heads, mask=is_head, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(factor[:, None], x.shape))
        x = tl.minimum(tl.maximum(x, -BUILD.top), BUILD.top)
    tl.store(cache.ptr + offsets, x.to(cache.ptr.dtype.element_ty), mask=inside)


@triton.jit
def _cache_append_kernel(
    k, v, k_cache, v_cache, k_scale, v_scale, scale_strides, target, tables, BUILD: tl.constexpr
):
    """One token."""
    token = tl.program_id(0)
    new = decode(target.new)
    capacity = decode(target.capacity)
    if target.cu is None:
        b = token // new
        i = token % new
        k_row, v_row = b.to(tl.int64) * k.stride_b, b.to(tl.int64) * v.stride_b
        stored = i
    else:
        b = _sequence_of_token(target, token)
        begin = tl.load(target.cu + tl.minimum(b, decode(target.B)))
        i = token - begin.to(tl.int32)
        k_row, v_row = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
        stored = token
    if b < decode(target.B):
        n = tl.load(target.lengths + b).to(tl.int32) + i
        # Where the table ends, so does the cache.
        if (n >= 0) & (n < capacity) & (i >= 0):
            slot = n
            if BUILD.page > 0:
                at = b.to(tl.int64) * decode(target.width) + n // BUILD.page
                row = tl.load(target.table + at).to(tl.int64)
                slot = n % BUILD.page
            else:
                row = b.to(tl.int64)
                if target.rows is not None:
                    row = tl.load(target.rows + b).to(tl.int64)
            if (row >= 0) & (row < decode(target.storage)):
                heads = tl.arange(0, BUILD.block_g)
                columns = tl.arange(0, BUILD.block_d)
                of_scale = tl.zeros((), tl.int64)
                if BUILD.scales == TOKEN:
                    of_scale = row * decode(scale_strides[0])
                    of_scale += slot.to(tl.int64) * decode(scale_strides[1])
                elif BUILD.scales == HEAD:
                    of_scale = b.to(tl.int64) * decode(scale_strides[0])
                is_key = (heads < BUILD.G)[:, None] & (columns < BUILD.D)[None, :]
                base = k.ptr + k_row + stored.to(tl.int64) * k.stride_m
                at_heads = heads[:, None] * k.stride_h
                x = tl.load(base + at_heads + columns[None, :], mask=is_key, other=0.0)
                x = x.to(tl.float32)
                if BUILD.half > 0:
                    position = n
                    if target.first is not None:
                        position = tl.load(target.first + b).to(tl.int32) + i
                    x = _turned(
                        x, base, k.stride_h, tables, position, heads, columns, is_key, BUILD
                    )
                    # Rounded once to the keys' own dtype, as a model that turns them first does.
                    x = x.to(k.ptr.dtype.element_ty).to(tl.float32)
                _store(x, k_cache, k_scale, row, slot, of_scale, heads, columns, is_key, BUILD)
                if v.ptr is not None:
                    is_value = (heads < BUILD.G)[:, None] & (columns < BUILD.E)[None, :]
                    base = v.ptr + v_row + stored.to(tl.int64) * v.stride_m
                    at_heads = heads[:, None] * v.stride_h
                    x = tl.load(base + at_heads + columns[None, :], mask=is_value, other=0.0)
                    x = x.to(tl.float32)
                    _store(
                        x, v_cache, v_scale, row, slot, of_scale, heads, columns, is_value, BUILD
                    )


def append_tokens(
    cache: KVCache, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, rotary: Rotary | None
) -> None:
    """Write new tokens and move the lengths. v: None for a latent cache. Nothing is checked."""
    new = k.shape[1] if cu_seqlens is None else k.shape[0]
    n_tokens = new * (k.shape[0] if cu_seqlens is None else 1)
    operands = []
    for x in (k, v):
        if x is None:
            operands.append(Operand(None, 0, 0, 0))
            continue
        x = x if x.stride(-1) == 1 else x.contiguous()
        operands.append(TritonCall.operand(x if x.dim() == 4 else x.unsqueeze(0)))
    operands += [TritonCall.operand(x) for x in (cache.k, cache.v)]
    kind, strides = NONE.value, (code(0), code(0))
    k_scale, v_scale = cache.k_scale, cache.v_scale
    if k_scale is not None and v_scale is not None:
        kind = TOKEN.value if k_scale.dim() == 3 else HEAD.value
        # Scales that are chosen are written where they lie.
        if k_scale.dim() != 3:
            k_scale, v_scale = k_scale.contiguous(), v_scale.contiguous()
        of_batch = k_scale.stride(0) if k_scale.dim() > 1 else 0
        strides = code(of_batch), code(k_scale.stride(1) if k_scale.dim() == 3 else 0)
    table = cache.block_table
    if table is not None and table.stride(-1) != 1:
        table = table.contiguous()
    target = Target(
        cache.lengths,
        None if rotary is None or rotary.first is None else rotary.first.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        table,
        None if cache.batch_index is None else cache.batch_index.contiguous(),
        code(0 if table is None else table.stride(0)),
        code(cache.B),
        code(new),
        code(cache.capacity),
        code(cache.k.shape[0]),
    )
    tables = Tables(None, None, code(0))
    if rotary is not None:
        tables = Tables(rotary.cos.contiguous(), rotary.sin.contiguous(), code(rotary.cos.shape[0]))
    G, D, E = *cache.k.shape[2:], cache.v.shape[3]
    build = AppendBuild(
        G, D, E,
        cache.k.shape[1] if cache.is_paged else 0,
        0 if rotary is None else rotary.cos.shape[1],
        rotary is not None and rotary.interleaved,
        kind,
        torch.finfo(cache.k.dtype).max if cache.k.dtype in FLOAT8 else 0.0,
        1 << (G - 1).bit_length(),
        max(16, 1 << (max(D, E) - 1).bit_length()),
    )  # fmt: skip
    launch(
        _cache_append_kernel,
        (n_tokens,),
        Config(0, 0, 4, 1),
        (*operands, k_scale, v_scale, strides, target, tables, build),
        k.device,
    )
    count = new if cu_seqlens is None else cu_seqlens.diff()
    cache.lengths.add_(count)
