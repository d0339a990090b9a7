"""Warm calls: what was found for a call is kept and serves the next one that is like it.

A decode step is the same call again and again, on tensors of the same layout whose contents differ;
checks, the choice of a backend and a kernel's arguments take longer than its kernels. Whatever is
unusual about a call makes it a cold one.
"""

from __future__ import annotations

import os
import threading
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
    if os.environ.get("TILEWISE_CHECK") == "1":
        return None
    learned = (q, cache.k, cache.v, given.alibi_slopes, given.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        return None
    # Written out: this is the way of every warm call.
    return (
        _form(q), _form(cache.k), _form(cache.v), _form(cache.lengths), _form(cache.block_table),
        _form(cache.batch_index), _form(cache.starts), _form(cache.k_scale),
        _form(cache.v_scale), _form(given.cu_seqlens_q), _form(given.alibi_slopes),
        _form(given.sinks), _form(given.out), given.wants_lse, cache.is_latent, mask_key, *numbers,
    )  # fmt: skip


def _form(x: Tensor | None) -> Any:
    if x is None:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0


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
