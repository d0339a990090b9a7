"""Writing new keys and values into a cache: checks, rotary, float8, and the store itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.backends import triton_problem
from ..core.shapes import check_cu_seqlens, check_same_device, check_shapes
from .cache import (
    FLOAT8,
    KVCache,
    check_starts,
    check_writable,
    place_new,
    quantise,
    turned_keys,
)
from .rotary import Rotary

_OP = "KVCache.append"


def append(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    check: bool | None,
) -> None:
    """`KVCache.append`."""
    if torch.compiler.is_compiling():
        _append_traced(cache, k, v, cu_seqlens, rotary, check)
        return
    _check_latent(cache.is_latent, v)
    _check(cache, k, v, cu_seqlens, rotary)
    append_checked(cache, k, v, cu_seqlens, rotary, check)


def _append_traced(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    check: bool | None,
) -> None:
    """The op that stands in compiled and exported programs; it checks what tensors hold."""
    # Traced tensors have no address: one whose values may lie in its keys is taken for latent.
    is_latent = v is None
    if is_latent and (cache.k.stride() != cache.v.stride() or cache.k.shape[3] < cache.v.shape[3]):
        is_latent = False
    _check_latent(is_latent, v)
    _check(cache, k, v, cu_seqlens, rotary)
    turn: tuple[Any, ...] = (None, None, None, False)
    if rotary is not None:
        turn = rotary.cos, rotary.sin, rotary.first, rotary.interleaved
    scales = cache.k_scale, cache.v_scale
    chosen, fixed = (scales, (None, None)) if cache.has_token_scales else ((None, None), scales)
    # What is written has one name.
    v_cache, v_chosen = (None, None) if v is None else (cache.v, chosen[1])
    torch.ops.tilewise.cache_append(
        cache.k, v_cache, cache.lengths, chosen[0], v_chosen, *fixed, cache.block_table,
        cache.batch_index, k, v, cu_seqlens, *turn, check,
    )  # fmt: skip


def append_checked(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
    check: bool | None,
) -> None:
    """What is left when shapes are right: contents, and the store."""
    if cache.is_checked(check):
        _check_contents(cache, k, cu_seqlens, rotary)
    _write(cache, k, v, cu_seqlens, rotary)


def _check_latent(is_latent: bool, v: Tensor | None) -> None:
    if is_latent != (v is None):
        raise ValueError(
            f"{_OP}: v must be None for a latent cache, whose values are part of its keys, and a "
            f"tensor for any other, got {'None' if v is None else 'a tensor'}."
        )


def _write(
    cache: KVCache,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens: Tensor | None,
    rotary: Rotary | None,
) -> None:
    """Write new tokens and move the lengths. Nothing is checked here."""
    if k.device.type == "cuda" and not triton_problem(k.device) and _is_kernels(cache, k):
        from .triton_append import append_tokens

        append_tokens(cache, k, v, cu_seqlens, rotary)
        return
    new = place_new(cache, k.shape, cu_seqlens)
    if rotary is not None:
        k = turned_keys(cache, k, new, rotary)
    n = cache.lengths.to(torch.int64)[new["b"]] + new["i"]
    at = cache.slots(new["b"], n)
    exists = new["exists"] & (n >= 0) & (n < cache.capacity)
    if k.device.type != "cpu":
        # What may not be written writes what is there: no shape depends on data.
        _store(cache, "k", k, new["b"], at, exists)
        if v is not None:
            _store(cache, "v", v, new["b"], at, exists)
    else:
        # One slot has one token, so that a token that is dropped stays out of another's way.
        at = at[0][exists], at[1][exists]
        _store(cache, "k", k[exists], new["b"][exists], at, None)
        if v is not None:
            _store(cache, "v", v[exists], new["b"][exists], at, None)
    cache.lengths.add_(new["count"])


def _is_kernels(cache: KVCache, k: Tensor) -> bool:
    return torch.float64 not in (cache.k.dtype, k.dtype)


def _store(
    cache: KVCache,
    name: str,
    x: Tensor,
    b: Tensor,
    at: tuple[Tensor, Tensor],
    exists: Tensor | None,
) -> None:
    storage: Tensor = getattr(cache, name)
    if storage.dtype in FLOAT8:
        fixed = None if cache.has_token_scales else cache.scales_at(name, b, at)
        x, scale = quantise(x, storage.dtype, fixed)
        if fixed is None:
            scales: Tensor = getattr(cache, f"{name}_scale")
            chosen = scale.squeeze(-1)
            if exists is not None:
                chosen = torch.where(exists.unsqueeze(-1), chosen, scales[at])
            scales.index_put_(at, chosen)
        # index_put knows no float8.
        storage, x = storage.view(torch.uint8), x.view(torch.uint8)
    if exists is not None:
        x = torch.where(exists[..., None, None], x, storage[at])
    storage.index_put_(at, x)


def _check(
    cache: KVCache, k: Tensor, v: Tensor | None, cu_seqlens: Tensor | None, rotary: Rotary | None
) -> None:
    tensors: dict[str, Any] = {"k": k, "v": v, "lengths": cache.lengths, "cu_seqlens": cu_seqlens}
    if not isinstance(k, Tensor):
        raise ValueError(f"{_OP}: k must be a tensor, got {type(k).__name__}.")
    (_, _, G, D), E = cache.k.shape, cache.v.shape[3]
    rows = "B L" if cu_seqlens is None else "T"
    spec = {"k": f"{rows} {G} {D}", "v": f"{rows} {G} {E}"}
    check_shapes(_OP, tensors, lengths="B", **spec)
    if cu_seqlens is not None:
        check_starts(_OP, "cu_seqlens", cu_seqlens, cache.B)
    check_same_device(_OP, tensors)
    stored = cache.k.dtype
    for name, x in (("k", k), ("v", v)):
        if x is None or x.dtype == stored:
            continue
        if stored not in FLOAT8 or not x.is_floating_point() or x.dtype in FLOAT8:
            raise ValueError(f"{_OP}: {name} must have the cache's dtype {stored}, got {x.dtype}.")
    if torch.is_grad_enabled() and (k.requires_grad or (v is not None and v.requires_grad)):
        raise NotImplementedError(
            f"{_OP}: has no gradient; call it under torch.no_grad(), or train with attention, "
            "which has one."
        )
    # Asked of every call: sizes only where a stride is 0.
    if 0 in cache.k.stride() or 0 in cache.v.stride() or 0 in cache.lengths.stride():
        for name, x in (("the cache's k", cache.k), ("v", cache.v), ("lengths", cache.lengths)):
            check_writable(_OP, name, x)
    if rotary is not None:
        if not isinstance(rotary, Rotary):
            raise ValueError(f"{_OP}: rotary must be a Rotary, got {type(rotary).__name__}.")
        rotary.check(_OP, D, cache.B)
        check_same_device(_OP, {"k": k, "cos": rotary.cos, "sin": rotary.sin})


def _check_contents(
    cache: KVCache, k: Tensor, cu_seqlens: Tensor | None, rotary: Rotary | None
) -> None:
    new: int | Tensor = k.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    if cu_seqlens is not None:
        check_cu_seqlens(_OP, "cu_seqlens", cu_seqlens, k.shape[0])
    cache.check_contents(_OP, new)
    if rotary is not None:
        first = cache.lengths if rotary.first is None else rotary.first
        grows = torch.as_tensor(new, device=first.device).expand(first.shape) > 0
        last = (first + new - 1)[grows]
        rotary.check_reach(_OP, torch.cat([first[grows], last]))
