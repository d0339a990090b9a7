"""FlashAttention-3's interface, argument for argument, computed by Tilewise.

    import tilewise.flash_attn.flash_attn_3 as flash_attn_interface

Dims and what every function takes are those of `tilewise.flash_attn.flash_attn_interface`, and:
    qv: not there yet.
    q_descale, k_descale, v_descale: fp32 `[B, G]`, for float8_e4m3fn inputs: each is multiplied by
        its own, per sequence and key/value head, and rounded to bf16; out is bf16.
    attention_chunk: query i sees only keys of the chunk of so many positions in which `i + N - M`
        lies; 0 is none.
    num_splits, pack_gqa, sm_margin: how FlashAttention-3 spreads its work. They do not change what
        is computed, and Tilewise spreads its own.
    return_attn_probs: return `(out, softmax_lse)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.partials import Partial, merge
from ..core.shapes import check_shapes, is_integer
from .call import Options, Packing, Result, Window, attend, check_tensors
from .kvcache import New, Place, Queries, Turn, attend_cache

_FLOAT8 = torch.float8_e4m3fn


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`softmax(softmax_scale q k^T) v` over padded batches.

    Args:
        q: `[B, M, H, D]`; k, v: `[B, N, G, D]` and `[B, N, G, E]`. The others: see the module.
    Returns: out `[B, M, H, E]`, or `(out, lse [B, H, M])`.
    """
    op = "flash_attn_func"
    check_tensors(op, {"q": q, "k": k, "v": v}, q="B M H D", k="B N G D", v="B N G E")
    _check_hints(op, num_splits, pack_gqa, sm_margin, qv)
    descales = (q_descale, k_descale, v_descale)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic,
                       return_attn_probs, attention_chunk)  # fmt: skip
    q, k, v = _dequantised(op, (q, k, v), descales)
    return attend(op, q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of every packed sequence by itself.

    Args:
        q: `[T, H, D]`; k, v: `[S, G, D]` and `[S, G, E]`.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[B + 1]`, where each sequence starts, from 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, or None.
        seqused_q, seqused_k: integers `[B]`, how many tokens of each sequence are in use, from its
            start; positions are bottom-right of what is in use.
        The others: see the module.
    Returns: out `[T, H, E]`, or `(out, lse [H, T])`.
    """
    op = "flash_attn_varlen_func"
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths = {"cu_seqlens_q": "B+1", "cu_seqlens_k": "B+1"}
    check_tensors(op, tensors, q="T H D", k="S G D", v="S G E", **lengths)
    _check_hints(op, num_splits, pack_gqa, sm_margin, qv)
    descales = (q_descale, k_descale, v_descale)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic,
                       return_attn_probs, attention_chunk)  # fmt: skip
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    q, k, v = _dequantised(op, (q, k, v), descales, packing)
    return attend(op, q, k, v, options, packing)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with everything in one tensor, whose gradient is one tensor too.

    Args:
        qkv: `[B, M, 3, H, D]`, or `[B, M, H + 2 G, D]` with num_heads_q = H; read in place.
        The others: see the module.
    """
    op = "flash_attn_qkvpacked_func"
    if num_heads_q is None:
        check_tensors(op, {"qkv": qkv}, qkv="B M 3 H D")
        q, k, v = qkv.unbind(2)
    else:
        check_tensors(op, {"qkv": qkv}, qkv="B M H+2G D")
        G, odd = divmod(qkv.shape[2] - num_heads_q, 2)
        if odd or G <= 0:
            raise ValueError(
                f"{op}: qkv must hold num_heads_q query heads and as many key as value heads, "
                f"got {qkv.shape[2]} heads with num_heads_q = {num_heads_q}."
            )
        q, k, v = qkv.split([num_heads_q, G, G], 2)
    _check_hints(op, 1, None, sm_margin, None)
    descales = (q_descale, k_descale, v_descale)
    options = _options(softmax_scale, causal, window_size, softcap, deterministic,
                       return_attn_probs, attention_chunk)  # fmt: skip
    q, k, v = _dequantised(op, (q, k, v), descales)
    return attend(op, q, k, v, options)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys; has gradients where `out` is not given.

    Args:
        out_partial: `[splits, B, M, H, E]`, or packed `[splits, T, H, E]`.
        lse_partial: `[splits, B, M, H]`, or `[splits, T, H]`: natural logs, any strides.
        out: where to write the result.
        out_dtype: of the result; out's, else out_partial's, when None.
    Returns: out `[B, M, H, E]` and lse `[B, M, H]` (packed `[T, H, E]`, `[T, H]`). Rows that are
        empty in every part are 0 and `-inf`.
    Raises: ValueError for shapes that do not fit.
    """
    op = "flash_attn_combine"
    packed = out_partial.dim() == 4
    rows = "T H" if packed else "B M H"
    tensors = {"out_partial": out_partial, "lse_partial": lse_partial, "out": out}
    shapes = {"out_partial": f"S {rows} E", "lse_partial": f"S {rows}", "out": f"{rows} E"}
    check_shapes(op, tensors, **shapes)
    if out is not None and out_dtype not in (None, out.dtype):
        raise ValueError(f"{op}: out_dtype must be out's, {out.dtype}, got {out_dtype}.")
    lses = lse_partial.transpose(-1, -2).unbind()
    merged = merge([Partial(o, lse) for o, lse in zip(out_partial.unbind(), lses, strict=True)])
    lse = merged.lse.transpose(-1, -2)
    if out is not None:
        return out.copy_(merged.out), lse
    return merged.out.to(out_partial.dtype if out_dtype is None else out_dtype), lse


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Attention over a cache, after writing new keys and values into it; no gradient.

    Args:
        q: `[B, M, H, D]`, or packed `[T, H, D]` with cu_seqlens_q `[B + 1]`.
        k, v: `[B, L, G, .]`, or packed with cu_seqlens_k_new.
        page_table: `[B, W]` pages of each sequence, of any size.
        rotary_seqlens: `[B]`, the position of each sequence's first new token; cache_seqlens when
            None.
        q_descale, k_descale, v_descale: `[B, G]`, of float8 q and caches, 1 when None; out is bf16.
        scheduler_metadata: not needed, and not read.
        The others: as `flash_attn_interface.flash_attn_with_kvcache`, and see the module.
    Returns: out, or `(out, lse)` with lse `[B, H, M]` (packed `[H, T]`).
    """
    op = "flash_attn_with_kvcache"
    _check_hints(op, num_splits, pack_gqa, sm_margin, qv)
    packing = None
    if isinstance(cu_seqlens_q, Tensor):
        packing = Packing(cu_seqlens_q, cu_seqlens_q, max_seqlen_q, None)
    if q.dtype == _FLOAT8 or q_descale is not None:
        # Heads are grouped as the cache's; keys and values keep their own scales.
        like = k_cache[:0, 0] if packing is not None else k_cache[:0]
        q = _dequantised(op, (q, like, like), (q_descale, None, None), packing)[0]
    options = _options(softmax_scale, causal, window_size, softcap, False, False, attention_chunk)
    return attend_cache(
        op,
        Queries(q, cu_seqlens_q, max_seqlen_q, num_splits),
        (k_cache, v_cache),
        New(k, v, cu_seqlens_k_new),
        Turn(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        Place(cache_seqlens, cache_batch_idx, cache_leftpad, page_table, k_descale, v_descale),
        options._replace(return_lse=return_softmax_lse),
    )


# ---------------------------------------------------------------- arguments


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    attention_chunk: int,
) -> Options:
    return Options(
        0.0, softmax_scale, causal, window_size, softcap, None, deterministic, False, None,
        return_lse, attention_chunk,
    )  # fmt: skip


def _check_hints(
    op: str, num_splits: Any, pack_gqa: Any, sm_margin: Any, qv: Tensor | None
) -> None:
    if qv is not None:
        raise NotImplementedError(
            f"{op}: qv is not there yet; concatenate q with qv and k with v along the head dim, "
            "pass v as it is, and give softmax_scale."
        )
    for name, value in (("num_splits", num_splits), ("sm_margin", sm_margin)):
        if not is_integer(value) or value < 0:
            raise ValueError(f"{op}: {name} must be an int >= 0, got {value}.")
    if pack_gqa not in (None, True, False):
        raise ValueError(f"{op}: pack_gqa must be a bool or None, got {pack_gqa}.")


def _dequantised(
    op: str,
    qkv: tuple[Tensor, Tensor, Tensor],
    descales: tuple[Tensor | None, ...],
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """float8 inputs times their descales, in bf16; others as they are."""
    heads, G = qkv[0].shape[-2], qkv[1].shape[-2]
    ends = (None, None) if packing is None else (packing.cu_seqlens_q, packing.cu_seqlens_k)
    B = qkv[0].shape[0] if ends[0] is None else ends[0].shape[0] - 1
    results = []
    of_each = (ends[0], ends[1], ends[1])
    for name, x, descale, cu in zip("qkv", qkv, descales, of_each, strict=True):
        if descale is not None:
            if x.dtype != _FLOAT8:
                raise ValueError(
                    f"{op}: {name}_descale must be None unless {name} is {_FLOAT8}, "
                    f"got {name} in {x.dtype}."
                )
            check_tensors(op, {f"{name}_descale": descale}, **{f"{name}_descale": "B G"})
            if descale.shape != (B, G):
                raise ValueError(
                    f"{op}: {name}_descale must be [B, G] = {[B, G]}, got {list(descale.shape)}."
                )
        if x.dtype != _FLOAT8:
            results.append(x)
            continue
        wide = x.float()
        if descale is not None:
            repeats = heads // G if name == "q" else 1
            factor = descale.float().repeat_interleave(repeats, -1).unsqueeze(-1)
            wide = wide * (factor.unsqueeze(1) if cu is None else factor[_rows(x, cu)])
        results.append(wide.bfloat16())
    q, k, v = results
    return q, k, v


def _rows(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sequence of each packed token."""
    token = torch.arange(x.shape[0], device=x.device)
    row = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return row.clamp(max=cu_seqlens.numel() - 2)
