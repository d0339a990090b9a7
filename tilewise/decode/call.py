"""One call of attention over a cache, checked, as every backend takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import left_padding
from ..core.shapes import (
    COMPUTE_DTYPES,
    check_broadcastable,
    check_cu_seqlens,
    check_head_ratio,
    check_same_device,
    check_shapes,
    is_integer,
)
from ..dense.checks import check_numbers
from ..dense.piece import Terms
from .cache import FLOAT8, KVCache, check_starts


@dataclass(frozen=True)
class Splits:
    """How a kernel cuts the keys of a sequence. It changes rounding only.

    count: into so many parts of the capacity; None lets the kernel fill the GPU evenly.
    is_fixed: parts of a fixed size, so that a sequence's result does not depend on its neighbours.
    """

    count: int | None = None
    is_fixed: bool = False


@dataclass(frozen=True)
class CacheCall:
    """q `[B, M, H, D]`, or packed `[T, H, D]` with cu_seqlens_q `[B + 1]`, over a cache.

    mask: the user's; `whole_mask` has the cache's left padding in it too. max_seqlen_q: the most
    queries of a sequence, where it is known.
    """

    q: Tensor
    cache: KVCache
    mask: Mask
    terms: Terms
    cu_seqlens_q: Tensor | None
    max_seqlen_q: int | None
    # Without a default: torch 2.11 traces no instance that a class holds.
    splits: Splits

    @property
    def is_packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def whole_mask(self) -> Mask:
        starts = self.cache.starts
        return self.mask if starts is None else self.mask & left_padding(starts)

    @property
    def group(self) -> int:
        """Query heads on one kv head."""
        return self.q.shape[-2] // self.cache.k.shape[2]

    @property
    def most_queries(self) -> int:
        """Of one sequence; reads cu_seqlens_q where max_seqlen_q is not known and it may."""
        if self.cu_seqlens_q is None:
            return self.q.shape[1]
        if self.max_seqlen_q is not None:
            return min(self.max_seqlen_q, self.q.shape[0])
        if self.cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling():
            counts = self.cu_seqlens_q.diff()
            return int(counts.max()) if counts.numel() else 0
        return self.q.shape[0]


def make_call(
    op: str,
    q: Tensor,
    cache: KVCache,
    mask: Mask,
    terms: dict[str, Any],
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    splits: Splits,
) -> CacheCall:
    """Everything that can be said without reading tensors."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"{op}: cache must be a KVCache, got {type(cache).__name__}.")
    if not isinstance(q, Tensor):
        raise ValueError(f"{op}: q must be a tensor, got {type(q).__name__}.")
    if not isinstance(mask, Mask):
        raise ValueError(f"{op}: mask must be a tilewise Mask, got {type(mask).__name__}.")
    B, G, D = cache.B, cache.k.shape[2], cache.k.shape[3]
    named = {"q": q, "cu_seqlens_q": cu_seqlens_q, "lengths": cache.lengths}
    q_spec = f"B M H {D}" if cu_seqlens_q is None else f"T H {D}"
    dims = check_shapes(op, named, lengths="B", q=q_spec)
    H = dims["H"]
    check_head_ratio(op, H, G, "the query heads of q", "the kv heads of the cache")
    _check_dtypes(op, q, cache)
    check_starts(op, "cu_seqlens_q", cu_seqlens_q, B)
    if max_seqlen_q is not None:
        max_seqlen_q = whole_number(op, "max_seqlen_q", max_seqlen_q, 0)
    if splits.count is not None:
        splits = replace(splits, count=whole_number(op, "num_splits", splits.count, 1))
    checked = _check_terms(op, terms, H, cache, dims.get("M"))
    tensors = {**named, **{n: getattr(checked, n) for n in ("bias", "alibi_slopes", "sinks")}}
    device = check_same_device(op, tensors)
    call = CacheCall(q, cache, mask, checked, cu_seqlens_q, max_seqlen_q, splits)
    if mask.has_predicate:
        # No key past the longest sequence is asked for, where lengths may be read.
        longest = cache.capacity
        if device.type == "cpu" and B and not torch.compiler.is_compiling():
            longest = int(cache.lengths.max().clamp(0, longest))
        mask = mask.lowered(B, H, call.most_queries, longest, device)
    mask.check_contents(B, H, reads=device.type == "cpu" and not torch.compiler.is_compiling())
    return replace(call, mask=mask)


def whole_number(op: str, name: str, x: Any, least: int) -> int:
    """x as an int, or as the symbol that a traced call has."""
    if not is_integer(x) or x < least:
        raise ValueError(f"{op}: {name} must be an int >= {least}, got {x!r}.")
    is_kept: bool = isinstance(x, (int, torch.SymInt))
    return x if is_kept else int(x)


def check_contents(op: str, call: CacheCall) -> None:
    """What the index tensors hold. Reads them."""
    call.cache.check_contents(op)
    cu = call.cu_seqlens_q
    if cu is None:
        return
    check_cu_seqlens(op, "cu_seqlens_q", cu, call.q.shape[0])
    counts = cu.diff()
    longest = int(counts.max()) if counts.numel() else 0
    if call.max_seqlen_q is not None and longest > call.max_seqlen_q:
        raise ValueError(
            f"{op}: max_seqlen_q is {call.max_seqlen_q}, but a sequence has {longest} queries."
        )


def _check_dtypes(op: str, q: Tensor, cache: KVCache) -> None:
    if q.dtype not in COMPUTE_DTYPES:
        raise ValueError(f"{op}: q must be float16, bfloat16, float32 or float64, got {q.dtype}.")
    if cache.k.dtype not in FLOAT8 and cache.k.dtype != q.dtype:
        raise ValueError(
            f"{op}: q must have the cache's dtype {cache.k.dtype}, got {q.dtype}; cast q, or make "
            "the cache in q's dtype."
        )


def _check_terms(op: str, terms: dict[str, Any], H: int, cache: KVCache, M: int | None) -> Terms:
    scale = cache.k.shape[3] ** -0.5 if terms["scale"] is None else terms["scale"]
    softcap = terms["softcap"]
    check_numbers(op, scale, softcap)
    for name, spec in (("alibi_slopes", [cache.B, H]), ("sinks", [H])):
        x = terms[name]
        if x is None:
            continue
        forms = ([H], spec)
        is_right = isinstance(x, Tensor) and list(x.shape) in forms and x.is_floating_point()
        if not is_right:
            got = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"{op}: {name} must be floating "
                f"{' or '.join(dict.fromkeys(map(str, forms)))}, got {got}."
            )
    bias = terms["bias"]
    if bias is not None:
        if not isinstance(bias, Tensor) or not bias.is_floating_point():
            got = str(bias.dtype) if isinstance(bias, Tensor) else type(bias).__name__
            raise ValueError(
                f"{op}: bias must be a floating tensor, got {got}; a bool mask goes to mask=."
            )
        rows = bias.shape[-2] if bias.dim() >= 2 else 1
        sizes = {"B": cache.B, "H": H, "M": rows if M is None else M, "capacity": cache.capacity}
        bias = check_broadcastable(op, "bias", bias, sizes)
    return Terms(float(scale), softcap, terms["alibi_slopes"], bias, terms["sinks"])
