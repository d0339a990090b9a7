"""Attention over a cache, and appending to one, as PyTorch knows them: schemas, fake kernels,
dispatch to a backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import raise_mask
from ..dense.piece import Terms
from .append import append_checked, check_latent
from .cache import KVCache
from .call import CacheCall, Splits, check_contents
from .choice import choose, is_latent, is_prefill
from .rotary import Rotary

_REST = (
    "Tensor k, Tensor v, Tensor lengths, Tensor? block_table, Tensor? batch_index, Tensor? starts, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? cu_seqlens_q, Tensor? bias, Tensor? alibi_slopes, "
    "Tensor? sinks, int[] mask_flags, SymInt[] mask_ints, Tensor[] mask_tensors, float scale, "
    "float? softcap, SymInt max_seqlen_q, SymInt num_splits, bool batch_invariant, str backend, "
    "bool? check"
)

# v_cache, v_chosen: None where values are part of the keys. chosen: scales that are written with
# the tokens that they are of.
_APPEND = (
    "Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor(c!) lengths, Tensor(d!)? k_chosen, "
    "Tensor(e!)? v_chosen, Tensor? k_scale, Tensor? v_scale, Tensor? block_table, "
    "Tensor? batch_index, Tensor k, Tensor? v, Tensor? cu_seqlens, Tensor? cos, Tensor? sin, "
    "Tensor? first, bool interleaved, bool? check"
)

library = torch.library.Library("tilewise", "FRAGMENT")
library.define(f"attention_with_cache_fwd(Tensor(a!) out, Tensor(b!) lse, Tensor q, {_REST}) -> ()")
library.define(f"cache_append({_APPEND}) -> ()")


class Arguments(NamedTuple):
    """What `_REST` declares, in its order, up to the backend.

    max_seqlen_q, num_splits: -1 for what was not given.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None
    batch_index: Tensor | None
    starts: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    cu_seqlens_q: Tensor | None
    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    mask_flags: list[int]
    mask_ints: list[int]
    mask_tensors: list[Tensor]
    scale: float
    softcap: float | None
    max_seqlen_q: int
    num_splits: int
    batch_invariant: bool


class AppendArguments(NamedTuple):
    """What `_APPEND` declares, in its order."""

    k_cache: Tensor
    v_cache: Tensor | None
    lengths: Tensor
    k_chosen: Tensor | None
    v_chosen: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    block_table: Tensor | None
    batch_index: Tensor | None
    k: Tensor
    v: Tensor | None
    cu_seqlens: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    first: Tensor | None
    interleaved: bool
    check: bool | None


def flatten(call: CacheCall) -> Arguments:
    """The call as its op takes it."""
    cache, terms = call.cache, call.terms
    flags, ints, tensors = call.mask.lower()
    device = call.q.device
    tensors = [t if t.device == device else t.to(device, non_blocking=True) for t in tensors]
    return Arguments(
        cache.k, cache.v, cache.lengths, cache.block_table, cache.batch_index, cache.starts,
        cache.k_scale, cache.v_scale, call.cu_seqlens_q, terms.bias, terms.alibi_slopes,
        terms.sinks, flags, ints, tensors, terms.scale, terms.softcap,
        -1 if call.max_seqlen_q is None else call.max_seqlen_q,
        -1 if call.splits.count is None else call.splits.count, call.splits.is_fixed,
    )  # fmt: skip


def _call_of(q: Tensor, x: Arguments) -> CacheCall:
    """The call put together again."""
    cache = KVCache(
        x.k, x.v, x.lengths, x.block_table, x.batch_index, x.starts, x.k_scale, x.v_scale
    )
    mask = raise_mask(x.mask_flags or [], x.mask_ints or [], x.mask_tensors or [])
    terms = Terms(x.scale, x.softcap, x.alibi_slopes, x.bias, x.sinks)
    splits = Splits(None if x.num_splits < 0 else x.num_splits, x.batch_invariant)
    longest = None if x.max_seqlen_q < 0 else x.max_seqlen_q
    return CacheCall(q, cache, mask, terms, x.cu_seqlens_q, longest, splits)


def run_kernels(backend: str, call: CacheCall, out: Tensor, lse: Tensor) -> Any:
    """Returns what runs calls like this one again, or None."""
    from . import dense_call, triton_call

    if backend == "hopper":
        return triton_call.cache_attention_fwd(call, out, lse, _hopper_forward(call))
    if dense_call.takes(call):
        return dense_call.dense_forward(call, out, lse)
    return triton_call.cache_attention_fwd(call, out, lse)


def _hopper_forward(call: CacheCall) -> Any:
    """What makes a call of the hopper backend ready."""
    if is_latent(call):
        from .hopper_call import MlaForward

        return MlaForward
    if is_prefill(call):
        from .hopper_prefill_call import PrefillForward

        return PrefillForward
    from .hopper_call import SplitForward

    return SplitForward


def _fwd(out: Tensor, lse: Tensor, q: Tensor, *rest: Any) -> None:
    call, (backend, check) = _call_of(q, Arguments(*rest[:-2])), rest[-2:]
    if check is not False and call.cache.is_checked(check):
        check_contents("attention_with_cache", call)
    match choose("attention_with_cache", backend, call) if backend == "auto" else backend:
        case "reference":
            from .reference import cache_reference

            exact = cache_reference(call)
            out.copy_(exact.out)
            if lse.numel():
                lse.copy_(exact.lse)
        case "triton" | "hopper" as name:
            run_kernels(name, call, out, lse)
        case _:
            from .tiled import cache_attention_fwd

            cache_attention_fwd(call, out, lse)


def _append(*arguments: Any) -> None:
    x = AppendArguments(*arguments)
    # How many columns a latent cache's values have, no token tells.
    v_cache, v_chosen = (x.k_cache, x.k_chosen) if x.v_cache is None else (x.v_cache, x.v_chosen)
    scales = (x.k_scale, x.v_scale) if x.k_chosen is None else (x.k_chosen, v_chosen)
    cache = KVCache(x.k_cache, v_cache, x.lengths, x.block_table, x.batch_index, None, *scales)
    if x.v_cache is not None:
        check_latent(cache.is_latent, x.v)
    rotary = None
    if x.cos is not None and x.sin is not None:
        rotary = Rotary(x.cos, x.sin, x.interleaved, x.first)
    append_checked(cache, x.k, x.v, x.cu_seqlens, rotary, x.check)


def _fake(*arguments: Any) -> None:
    """Nothing is returned."""


for _name, _function in (("attention_with_cache_fwd", _fwd), ("cache_append", _append)):
    library.impl(_name, torch.no_grad()(_function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=library)
