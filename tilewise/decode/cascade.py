"""Cascade: a prefix that a whole batch shares is read once for all of it.

The queries of all sequences are rows over the prefix, and each sequence's own over its cache; the
two partials merge by their lse.

Source: Hydragen (arXiv 2402.05099), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import Full, causal, full
from ..core.partials import Partial, merge
from ..core.shapes import accumulator_of, check_shapes
from .api import attention_with_cache_partial
from .cache import KVCache

_OP = "cascade_attention"
_FULL = full()


def cascade_attention(
    q: Tensor,
    prefix: KVCache,
    cache: KVCache,
    *,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention over a shared prefix and what each sequence has behind it; no gradient.

    Equal, within the error budget, to `attention_with_cache` over caches that each hold the prefix
    and their own tokens.

    Args:
        q: `[B, M, H, D]`, or packed `[T, H, D]` with cu_seqlens_q.
        prefix: a cache of one sequence, all of which every query sees.
        cache: of B sequences: what comes behind the prefix.
        mask: `full()` or `causal()`, of the queries' own part. Others, and ALiBi, speak of
            distances from the beginning of the whole, which a cache does not know.
        scale, softcap, sinks, cu_seqlens_q, max_seqlen_q, check, backend: as
            `attention_with_cache`.
    Returns: as q, with E.
    Raises: ValueError for what does not fit, NotImplementedError for other masks.
    Cost: the prefix is read once, not B times.
    Deterministic: always, given the batch.
    Source: Hydragen (arXiv 2402.05099); the oracle is that of `attention_with_cache`.
    """
    if not isinstance(q, Tensor):
        raise ValueError(f"{_OP}: q must be a tensor, got {type(q).__name__}.")
    if not isinstance(prefix, KVCache) or prefix.B != 1:
        got = f"{prefix.B}" if isinstance(prefix, KVCache) else type(prefix).__name__
        raise ValueError(f"{_OP}: prefix must be a KVCache of one sequence, got {got}.")
    is_causal = isinstance(mask, Mask) and mask.key == causal().key
    if not isinstance(mask, Full) and not is_causal:
        raise NotImplementedError(
            f"{_OP}: mask must be full() or causal(), got {type(mask).__name__}; use "
            "attention_with_cache over whole caches for others."
        )
    check_shapes(_OP, {"q": q}, q="B M H D" if cu_seqlens_q is None else "T H D")
    wide = accumulator_of(q.dtype)
    options: dict[str, Any] = {
        "scale": scale, "softcap": softcap, "out_dtype": wide, "check": check, "backend": backend,
    }  # fmt: skip
    rows = q.flatten(0, -3).unsqueeze(0)
    shared = attention_with_cache_partial(rows, prefix, **options)
    out, lse = shared.out[0], shared.lse[0]
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    else:
        # Rows that no sequence owns see nothing of the prefix either.
        owned = torch.arange(q.shape[0], device=q.device) < cu_seqlens_q[-1]
        lse = torch.where(owned, lse, float("-inf"))
        out = torch.where(owned[:, None, None], out, 0.0)
    # The sink is one logit of the whole.
    own = attention_with_cache_partial(
        q, cache, mask=mask, sinks=sinks, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        **options,
    )  # fmt: skip
    return merge([Partial(out, lse), own]).out.to(q.dtype)
