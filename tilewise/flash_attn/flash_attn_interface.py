"""flash-attn 2's functions, argument for argument, computed by Tilewise.

Dims: B batch (or packed sequences), M query length, N key length, T and S packed query and key
tokens, H query heads, G kv heads (H % G == 0), D query/key dim, E value dim (D in flash-attn).

What every function takes, in flash-attn's order and with its defaults:
    dropout_p: in [0, 1), the share of probabilities dropped; 0.0 when not training.
    softmax_scale: multiplies the scores; `D ** -0.5` when None.
    causal: key j is visible to query i where `j <= i + N - M` (bottom-right).
    window_size: `(left, right)`, both inclusive around `i + N - M`; -1 (or None) is unbounded,
        0 is a real bound. Together with causal, right is 0.
    softcap: c in `c * tanh(scores / c)`; 0.0, below, or None is none.
    alibi_slopes: `[H]` or `[B, H]`, adds `-slope * |i + N - M - j|`; has a gradient here.
    deterministic: ask for bitwise equal gradients from run to run.
    return_attn_probs: return `(out, softmax_lse, S_dmask)`; S_dmask is None.
and, by keyword only, beyond flash-attn:
    sinks: `[H]`, one extra logit per head in the denominator; has a gradient.
    return_lse: return `(out, softmax_lse)`.

softmax_lse is fp32 (fp64 for fp64), natural log, `[B, H, M]` or `[H, T]`, `-inf` for a query that
sees no key (whose out is 0), and differentiable.

Raises: ValueError for arguments that do not fit, NotImplementedError for what is not there.
Cost, determinism and source: those of `tilewise.attention` and `tilewise.attention_varlen`.
"""

from __future__ import annotations

from torch import Tensor

from .call import Options, Packing, Result, Window, attend, check_tensors
from .kvcache import New, Place, Queries, Turn, attend_cache


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`softmax(softmax_scale q k^T) v` over padded batches.

    Args:
        q: `[B, M, H, D]`, fp16, bf16, fp32 or fp64, on any device, any strides.
        k, v: `[B, N, G, D]` and `[B, N, G, E]`, of q's dtype.
        The others: see the module.
    Returns: out `[B, M, H, E]` in q's dtype; a tuple as return_attn_probs and return_lse say.
    """
    op = "flash_attn_func"
    check_tensors(op, {"q": q, "k": k, "v": v}, q="B M H D", k="B N G D", v="B N G E")
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    return attend(op, q, k, v, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` with keys and values in one tensor, whose gradient is one tensor too.

    Args:
        q: `[B, M, H, D]`.
        kv: `[B, N, 2, G, D]`, keys first; read in place.
        The others: see the module.
    """
    op = "flash_attn_kvpacked_func"
    check_tensors(op, {"q": q, "kv": kv}, q="B M H D", kv="B N 2 G D")
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    k, v = kv.unbind(2)
    return attend(op, q, k, v, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` with everything in one tensor, whose gradient is one tensor too.

    Args:
        qkv: `[B, M, 3, H, D]`: queries, keys, values; read in place.
        The others: see the module.
    """
    op = "flash_attn_qkvpacked_func"
    check_tensors(op, {"qkv": qkv}, qkv="B M 3 H D")
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    q, k, v = qkv.unbind(2)
    return attend(op, q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_func` of every packed sequence by itself.

    Args:
        q: `[T, H, D]`, the sequences one after the other.
        k, v: `[S, G, D]` and `[S, G, E]`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[B + 1]`, where each sequence starts, from 0;
            equal neighbours are an empty sequence.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, or None: a help for the launch.
        block_table: `[B, W]` pages of each sequence; k and v are then `[pages, P, G, .]`, of any
            page size P, and have no gradient. Lengths are those of cu_seqlens_k.
        The others: see the module.
    Returns: out `[T, H, E]`, 0 past `cu_seqlens_q[-1]`; a tuple as the flags say.
    """
    op = "flash_attn_varlen_func"
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    if block_table is not None:
        return _attend_pages(op, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, options)
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"cu_seqlens_q": "B+1", "cu_seqlens_k": "B+1"}
    check_tensors(op, tensors, q="T H D", k="S G D", v="S G E", **lengths)
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend(op, q, k, v, options, packing)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: `[T, H, D]`.
        kv: `[S, 2, G, D]`, keys first; read in place.
        The others: see `flash_attn_varlen_func` and the module.
    """
    op = "flash_attn_varlen_kvpacked_func"
    tensors = {"q": q, "kv": kv, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"cu_seqlens_q": "B+1", "cu_seqlens_k": "B+1"}
    check_tensors(op, tensors, q="T H D", kv="S 2 G D", **lengths)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    k, v = kv.unbind(1)
    return attend(op, q, k, v, options, packing)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of sequences to themselves, with everything in one tensor.

    Args:
        qkv: `[T, 3, H, D]`: queries, keys, values; read in place.
        cu_seqlens, max_seqlen: of queries and keys alike, as in `flash_attn_varlen_func`.
        The others: see the module.
    """
    op = "flash_attn_varlen_qkvpacked_func"
    check_tensors(op, {"qkv": qkv, "cu_seqlens": cu_seqlens}, qkv="T 3 H D", cu_seqlens="B+1")
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
    packing = Packing(cu_seqlens, None, max_seqlen, max_seqlen)
    q, k, v = qkv.unbind(1)
    return attend(op, q, k, v, options, packing)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention over a cache, after writing new keys and values into it; no gradient.

    Args:
        q: `[B, M, H, D]`.
        k_cache, v_cache: `[R, N, G, D]` and `[R, N, G, E]`, or pages `[pages, P, G, .]` of any size
            P with block_table.
        k, v: `[B, L, G, .]`, written in place behind cache_seqlens, turned by the rotary tables.
        rotary_cos, rotary_sin: `[positions, R / 2]`; they turn q too, at the position of each query
            where causal or a window tells them apart, else at the first.
        cache_seqlens: slots in use before k, an int or `[B]`; all of them when None and no k comes.
        cache_batch_idx: `[B]`, the row of each sequence in the cache.
        cache_leftpad: `[B]`, slots before them are hidden.
        block_table: `[B, W]`, the pages of each sequence.
        rotary_interleaved: pairs are (2j, 2j + 1); else (j, j + R / 2).
        num_splits: into how many parts the keys are cut; 0 chooses.
        return_softmax_lse: return `(out, softmax_lse [B, H, M])`.
        The others: see the module.
    Returns: out `[B, M, H, E]`.
    """
    options = Options(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, False, False, None,
        return_softmax_lse,
    )  # fmt: skip
    return attend_cache(
        "flash_attn_with_kvcache",
        Queries(q, num_splits=num_splits),
        (k_cache, v_cache),
        New(k, v),
        Turn(rotary_cos, rotary_sin, rotary_interleaved),
        Place(cache_seqlens, cache_batch_idx, cache_leftpad, block_table),
        options,
    )


def _attend_pages(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    options: Options,
) -> Result:
    """Packed queries over pages: inference, so nothing is dropped."""
    if options.dropout_p > 0.0:
        raise NotImplementedError(
            f"{op}: dropout_p with block_table is not there; gather each sequence's pages into "
            "packed k and v and leave block_table out."
        )
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    check_tensors(op, lengths, cu_seqlens_q="B+1", cu_seqlens_k="B+1")
    wants_lse = options.return_lse or options.return_attn_probs
    result = attend_cache(
        op,
        Queries(q, cu_seqlens_q),
        (k, v),
        New(None, None),
        Turn(None, None, False),
        Place(cu_seqlens_k.diff(), None, None, block_table),
        options._replace(return_lse=wants_lse),
    )
    return (*result, None) if options.return_attn_probs else result
