"""Warm calls: what was found for a call is kept and serves the next one that is like it.

A decode step is the same call again and again, on tensors of the same layout whose contents differ;
checks, the choice of a backend and a kernel's arguments take longer than its kernels. Whatever is
unusual about a call makes it a cold one.
"""

from __future__ import annotations

import os
import threading
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from .cache import KVCache

# Of more layouts than these the oldest is forgotten.
_MOST_KEPT = 1024
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_kept: dict[tuple[Any, ...], Any] = {}
_keeping = threading.Lock()
# Asking `os.environ` itself encodes the name each time, which takes as long as a tensor's form.
_environment: Any = getattr(os.environ, "_data", os.environ)
_CHECK: Any = os.environ.encodekey("TILEWISE_CHECK") if _environment is not os.environ else ""
_ON: Any = os.environ.encodevalue("1") if _environment is not os.environ else "1"


class Given(NamedTuple):
    """The tensors of a call beside q and the cache. wants_lse: whether an lse is written."""

    cu_seqlens_q: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    out: Tensor | None
    wants_lse: bool


def key_of(
    q: Tensor, cache: KVCache, mask: Mask, given: Given, *numbers: Any
) -> tuple[Any, ...] | None:
    """What the call is known by; None for one that is never warm. numbers: all else."""
    if torch.compiler.is_compiling() or type(q) not in _PLAIN_TYPES or q.device.type != "cuda":
        return None
    if not isinstance(cache, KVCache) or not isinstance(mask, Mask):
        return None
    mask_key = mask.key
    if mask_key is None or torch._C._len_torch_dispatch_stack() > 0:
        return None
    if _environment.get(_CHECK) == _ON:
        return None
    learned = (q, cache.k, cache.v, given.alibi_slopes, given.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        return None
    # Written out: this is the way of every warm call.
    cu, slopes, sinks, out, wants_lse = given
    return (
        _form(q), _cache_form(cache), None if cu is None else _form(cu),
        None if slopes is None else _form(slopes), None if sinks is None else _form(sinks),
        None if out is None else _form(out), wants_lse, mask_key, *numbers,
    )  # fmt: skip


def _cache_form(cache: KVCache) -> Any:
    """The cache's own part of a key, kept with it for as long as its tensors are the same."""
    k, v, lengths, table = cache.k, cache.v, cache.lengths, cache.block_table
    tensors = (
        k, v, lengths, table, cache.batch_index, cache.starts, cache.k_scale, cache.v_scale,
    )  # fmt: skip
    # Another storage under the same tensor has another address.
    places = (k.data_ptr(), v.data_ptr(), lengths.data_ptr(), table is None or table.data_ptr())
    seen = cache.__dict__.get("_form")
    if seen is not None and seen[1] == places and all(map(is_, seen[0], tensors)):
        return seen[2]
    form = (*map(_form, tensors), cache.is_latent)
    cache.__dict__["_form"] = (tensors, places, form)
    return form


def _form(x: Tensor | None) -> Any:
    if x is None:
        return None
    # Where it begins decides how it is read: float8 as pairs from an even address, by TMA or wide
    # loads from a multiple of 16.
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def find(key: tuple[Any, ...] | None) -> Any:
    return None if key is None else _kept.get(key)


def keep(key: tuple[Any, ...] | None, forward: Any) -> None:
    """Make the next call like this one a warm one."""
    if key is None or forward is None:
        return
    with _keeping:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = forward


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether kernels read these as they are, not copies of them."""
    return all(x is None or x.is_contiguous() for x in tensors)
