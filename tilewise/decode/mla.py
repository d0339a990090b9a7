"""Multi-head latent attention (DeepSeek) over a latent cache, in its absorbed form.

Dims: B sequences, M queries, H query heads, R rank of the latent (512), P rotated dims (64),
    N tokens. A token is one latent row c `[R]` and one rotated key `[P]`, for all heads.
Math: with keys `k_h = [W_h^UK c, k_rope]` and values `v_h = W_h^UV c`,
    q_h . k_h = (q_nope_h W_h^UK) . c + q_rope_h . k_rope, and
    sum_n p_n v_h(n) = W_h^UV sum_n p_n c(n),
    so heads attend to c itself: one kv head, keys `[c, k_rope]`, values c.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1; `examples/mla.py` shows both forms equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.shapes import check_shapes
from .api import attention_with_cache
from .cache import KVCache

_OP = "mla_with_cache"


def mla_with_cache(
    q_latent: Tensor, q_rope: Tensor, cache: KVCache, *, scale: float, **options: Any
) -> Tensor:
    """Absorbed latent attention over a cache; no gradient.

    Args:
        q_latent: `[B, M, H, R]`, or packed `[T, H, R]`: `q_nope_h W_h^UK` of each head.
        q_rope: the same with P, turned by the positions of the queries.
        cache: of `KVCache.latent`; any number of query heads, so a tensor-parallel slice of them
            too.
        scale: multiplies the scores. It belongs to the keys as the model defines them, not to
            the cache: `(nope dims + P) ** -0.5`, 192 ** -0.5 for DeepSeek, times the square of
            what its rotary scaling asks for. It has no default, since `(R + P) ** -0.5` is wrong.
        options: as `attention_with_cache`: mask (`causal()` for M > 1), cu_seqlens_q, num_splits,
            sinks, out, backend and others.
    Returns: `[B, M, H, R]` (packed `[T, H, R]`), to be multiplied by `W_h^UV`.
    Raises: ValueError for what does not fit; otherwise as `attention_with_cache`.
    Cost: reads `R + P` elements a token, once for all heads; 2 H (2 R + P) flops a token and query.
    Deterministic: always, given the batch.
    Source: DeepSeek-V2 (arXiv 2405.04434); the oracle is that of `attention_with_cache`.
    """
    # Traced tensors have no address to compare.
    is_latent = torch.compiler.is_compiling() or (isinstance(cache, KVCache) and cache.is_latent)
    if not is_latent:
        got = "another KVCache" if isinstance(cache, KVCache) else type(cache).__name__
        raise ValueError(f"{_OP}: cache must be latent, as KVCache.latent makes it, got {got}.")
    if scale is None:
        raise ValueError(f"{_OP}: scale must be a number, which the model defines, got None.")
    R = cache.v.shape[3]
    P = cache.k.shape[3] - R
    rows = "B M H" if options.get("cu_seqlens_q") is None else "T H"
    tensors = {"q_latent": q_latent, "q_rope": q_rope}
    check_shapes(_OP, tensors, q_latent=f"{rows} {R}", q_rope=f"{rows} {P}")
    q = torch.cat([q_latent, q_rope], -1)
    return attention_with_cache(q, cache, scale=scale, **options)
