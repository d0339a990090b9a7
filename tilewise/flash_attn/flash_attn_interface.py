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
        block_table: not there yet.
        The others: see the module.
    Returns: out `[T, H, E]`, 0 past `cu_seqlens_q[-1]`; a tuple as the flags say.
    """
    op = "flash_attn_varlen_func"
    if block_table is not None:
        raise NotImplementedError(
            f"{op}: paged keys and values (block_table) are not there yet; gather each sequence's "
            "pages into packed k and v and leave block_table out."
        )
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"cu_seqlens_q": "B+1", "cu_seqlens_k": "B+1"}
    check_tensors(op, tensors, q="T H D", k="S G D", v="S G E", **lengths)
    options = Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, sinks, return_lse,
    )  # fmt: skip
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
    """Not there yet: raises NotImplementedError with what to call instead."""
    raise NotImplementedError(
        "flash_attn_with_kvcache: attention with a cache is not there yet; write k and v into the "
        "cache, then call tilewise.attention(q, k_cache, v_cache, "
        "mask=tilewise.key_padding(lengths) & tilewise.causal(offset=lengths - q.shape[1])), where "
        "lengths counts the new keys too."
    )
