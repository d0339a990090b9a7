"""flash-attn's attention with a cache, in the library's terms: for its releases 2 and 3."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.shapes import check_shapes, is_integer
from ..decode.api import attention_with_cache_partial
from ..decode.cache import FLOAT8, KVCache
from ..decode.call import Splits, make_call, whole_number
from ..decode.rotary import Rotary, rotate
from .call import Options, Result, mask_of, softcap_of


class New(NamedTuple):
    """New keys and values, and where their sequences start when packed."""

    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None = None


class Turn(NamedTuple):
    """The rotary embedding of new keys and queries. first: positions, where not the lengths."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    first: Tensor | None = None


class Place(NamedTuple):
    """Where the cache's sequences lie, in flash-attn's names."""

    seqlens: int | Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


class Queries(NamedTuple):
    """q `[B, M, H, D]`, or packed `[T, H, D]` with cu_seqlens."""

    q: Tensor
    cu_seqlens: Tensor | None = None
    max_seqlen: int | None = None
    num_splits: int = 0


def attend_cache(
    op: str,
    queries: Queries,
    caches: tuple[Tensor, Tensor],
    new: New,
    turn: Turn,
    place: Place,
    options: Options,
) -> Result:
    """Append, turn, attend: out, or `(out, lse)` where options ask for it."""
    q, cu = queries.q, queries.cu_seqlens
    for name, x in (("q", q), ("k_cache", caches[0]), ("v_cache", caches[1])):
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    names = ("q", "k_cache", "v_cache", "block_table")
    tensors = dict(zip(names, (q, *caches, place.block_table), strict=True))
    rows = "T H D" if cu is not None else "B M H D"
    check_shapes(op, tensors, q=rows, k_cache="R N G D", v_cache="R N G E", block_table="B W")
    if (new.k is None) != (new.v is None):
        raise ValueError(f"{op}: k and v must come together, got one of them.")
    if new.k is not None and place.seqlens is None:
        raise ValueError(f"{op}: cache_seqlens must say where new k and v go, got None.")
    if (turn.cos is None) != (turn.sin is None):
        raise ValueError(f"{op}: rotary_cos and rotary_sin must come together, got one of them.")
    if turn.cos is not None and new.k is None:
        raise ValueError(f"{op}: rotary_cos turns new keys, and k is None.")
    if new.cu_seqlens is not None and new.k is None:
        raise ValueError(f"{op}: cu_seqlens_k_new says where new keys start, and k is None.")
    splits = whole_number(op, "num_splits", queries.num_splits, 0)
    if cu is not None and not isinstance(cu, Tensor):
        raise ValueError(f"{op}: cu_seqlens_q must be a tensor, got {type(cu).__name__}.")
    B = q.shape[0] if cu is None else cu.shape[0] - 1
    cache = _cache(op, caches, place, B)
    first = cache.lengths.clone()
    terms: dict[str, Any] = {
        "scale": options.softmax_scale,
        "softcap": softcap_of(op, options),
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
    }
    mask = mask_of(op, options)
    if new.k is not None and new.v is not None:
        rotary = None
        if turn.cos is not None and turn.sin is not None:
            rotary = Rotary(turn.cos, turn.sin, turn.interleaved, turn.first)
        # A mistake of the attention must not leave new tokens behind.
        forms = (cu, queries.max_seqlen, Splits(splits or None))
        make_call(op, q, cache, mask, {**terms, "bias": None}, *forms)
        cache.append(new.k, new.v, cu_seqlens=new.cu_seqlens, rotary=rotary)
        if rotary is not None:
            q = _turned(q, cu, first if turn.first is None else turn.first, rotary, options)
    out, lse = attention_with_cache_partial(
        q,
        cache,
        mask=mask,
        **terms,
        cu_seqlens_q=cu,
        max_seqlen_q=queries.max_seqlen,
        num_splits=splits or None,
    )
    return (out, lse) if options.return_lse else out


def _cache(op: str, caches: tuple[Tensor, Tensor], place: Place, B: int) -> KVCache:
    k, v = caches
    seqlens = place.seqlens
    if seqlens is None:
        width = 1 if place.block_table is None else place.block_table.shape[1]
        seqlens = k.shape[1] * width
    if not isinstance(seqlens, Tensor):
        if not is_integer(seqlens):
            got = type(seqlens).__name__
            raise ValueError(f"{op}: cache_seqlens must be an int or a tensor, got {got}.")
        seqlens = torch.full((B,), seqlens, dtype=torch.int32, device=k.device)
    scales = (place.k_descale, place.v_descale)
    for name, x in zip(("k_descale", "v_descale"), scales, strict=True):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    if k.dtype in FLOAT8:
        # FlashAttention 3 takes none for 1.
        ones = torch.ones(k.shape[2], device=k.device)
        forms = [x if x is None else x.float() for x in scales]
        if any(x is not None for x in forms):
            ones = ones.expand(B, -1).contiguous()
        scales = (ones if forms[0] is None else forms[0], ones if forms[1] is None else forms[1])
    rows = None if place.block_table is not None else place.batch_idx
    if place.block_table is not None and place.batch_idx is not None:
        raise ValueError(f"{op}: cache_batch_idx must be None beside block_table, got both.")
    if place.block_table is None and rows is None and k.shape[0] != B:
        if k.shape[0] < B:
            raise ValueError(
                f"{op}: k_cache must have a row for each of the {B} sequences of q, or "
                f"cache_batch_idx say which they read, got {k.shape[0]} rows."
            )
        # A cache with more rows than sequences, of which the first are used.
        rows = torch.arange(B, dtype=torch.int32, device=k.device)
    # The caller's lengths are those before the new tokens, and stay so.
    return KVCache(k, v, seqlens.clone(), place.block_table, rows, place.leftpad, *scales)


def _turned(
    q: Tensor, cu: Tensor | None, first: Tensor, rotary: Rotary, options: Options
) -> Tensor:
    """Queries at their positions, or all at the first where nothing tells them apart."""
    first = first.to(torch.int64)
    bounds = options.window_size or (None, None)
    is_local = options.causal or any(bound not in (None, -1) for bound in bounds)
    if cu is None:
        inside = torch.arange(q.shape[1], device=q.device) * int(is_local)
        return rotate(q, first.unsqueeze(-1) + inside, rotary)
    token = torch.arange(q.shape[0], device=q.device)
    row = (torch.searchsorted(cu, token, right=True) - 1).clamp(0, max(0, first.shape[0] - 1))
    inside = token - cu[row] if is_local else torch.zeros_like(token)
    return rotate(q, first[row] + inside, rotary)
