"""Public functions of attention over a KV cache: check, choose a backend, run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.backends import BackendChoice
from ..core.mask import Mask
from ..core.mask_leaves import full
from ..core.partials import Partial
from ..core.shapes import accumulator_of, check_same_device, check_shapes
from . import warm
from .cache import KVCache as KVCache
from .cache import check_writable
from .call import CacheCall, Splits, check_contents, make_call
from .choice import choose, explain
from .ops import flatten, run_kernels
from .rotary import Rotary as Rotary

_FULL = full()
# Backends whose calls may be warm; see `warm.py`.
_KERNELS = ("auto", "triton", "hopper")


def attention_with_cache(
    q: Tensor,
    cache: KVCache,
    *,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention of new queries over the keys and values in use of a cache; no gradient.

    Decode (one query a sequence), speculative decode (a few, `mask=tree(bits)`), chunked prefill
    (many) and any mixture of them (packed, with cu_seqlens_q) are one call. What the queries' own
    tokens are to see of each other has to be in the cache: `append` first.

    Args:
        q: `[B, M, H, D]`, or packed `[T, H, D]`; of the cache's dtype, or any of fp16, bf16, fp32
            over a float8 cache. H % G == 0.
        cache: the keys and values; `cache.lengths` says how many are in use.
        mask: what each query sees. Query m of sequence b, of M_b, stands at key
            `m + lengths[b] - M_b`: `causal()` for M > 1. The cache's left padding is always hidden.
        scale, softcap, alibi_slopes, sinks: as in `attention`; distances are those of positions.
        bias: floating, broadcasts to `[B, H, M, capacity]`.
        cu_seqlens_q: int32 or int64 `[B + 1]`, where each sequence's queries start in a packed q,
            from 0. A sequence may have none.
        max_seqlen_q: the most queries of one sequence; with packed queries on a GPU it helps to
            choose tiles.
        num_splits: into how many parts the kernels cut the capacity; they choose when None.
        batch_invariant: parts of a fixed size: a sequence's result is the same bit for bit whatever
            else is in the batch.
        out: where to write the result: of its shape, in q's dtype, on its device, any strides; it
            may be q.
        check: read lengths and indices and raise for what leaves the cache, which waits for a GPU;
            always done on the CPU and where TILEWISE_CHECK=1 is set. Unchecked kernels cut what
            leaves the cache to it.
        backend: "auto", "hopper", "triton", "tiled" or "reference"; a named one never falls back.
    Returns: `[B, M, H, E]` (packed `[T, H, E]`) in q's dtype. A query that sees no key gives 0.
    Raises: ValueError for what does not fit, NotImplementedError for what the backend cannot do,
        before anything is written.
    Cost: reads the visible keys and values once for each kv head; 4 H D flops each.
    Deterministic: always, given the batch.
    Source: FlashDecoding (split keys), PagedAttention (arXiv 2309.06180); the oracle is
        `tilewise.decode.reference.cache_reference`.
    """
    given = warm.Given(cu_seqlens_q, alibi_slopes, sinks, out, False)
    key = None
    if bias is None and not check and backend in _KERNELS:
        numbers = (scale, softcap, num_splits, batch_invariant, max_seqlen_q, backend)
        key = warm.key_of(q, cache, mask, given, *numbers)
        found = warm.find(key)
        if found is not None:
            return _run_warm(found, q, cache, given, q.dtype).out
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks)
    splits = Splits(num_splits, batch_invariant)
    op = "attention_with_cache"
    call = make_call(op, q, cache, mask, terms, cu_seqlens_q, max_seqlen_q, splits)
    return _attend(op, call, backend, q.dtype, check, given, key).out


def attention_with_cache_partial(
    q: Tensor,
    cache: KVCache,
    *,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    check: bool | None = None,
    backend: str = "auto",
) -> Partial:
    """`attention_with_cache` with the lse to merge it by, across caches or devices.

    As `attention_with_cache`, and:

    Args:
        out_dtype: of out, fp16, bf16, fp32 or fp64; q's when None.
        sinks: belong to exactly one of the partials that will be merged.
    Returns: `Partial(out, lse)` with lse `[B, H, M]` (packed `[H, T]`), natural logs in fp32 (fp64
        for fp64 queries); `-inf` where a query sees no key, or the sink's logit where there is one.
    Raises, Cost, Deterministic, Source: as `attention_with_cache`.
    """
    given = warm.Given(cu_seqlens_q, alibi_slopes, sinks, None, True)
    dtype = q.dtype if out_dtype is None and isinstance(q, Tensor) else out_dtype
    key = None
    if bias is None and not check and backend in _KERNELS:
        numbers = (scale, softcap, num_splits, batch_invariant, max_seqlen_q, backend, dtype)
        key = warm.key_of(q, cache, mask, given, *numbers)
        found = warm.find(key)
        if found is not None:
            return _run_warm(found, q, cache, given, dtype)
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks)
    splits = Splits(num_splits, batch_invariant)
    op = "attention_with_cache_partial"
    call = make_call(op, q, cache, mask, terms, cu_seqlens_q, max_seqlen_q, splits)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            f"{op}: out_dtype must be a floating dtype of 16 bits or more, got {dtype!r}."
        )
    return _attend(op, call, backend, dtype, check, given, key)


def explain_cache_backend(
    q: Tensor, cache: KVCache, *, backend: str = "auto", **options: Any
) -> BackendChoice:
    """Which backend a call of `attention_with_cache` with these arguments runs on, and why.

    Args:
        q, cache, backend, options: as the call would get them.
    Returns: a `BackendChoice`: the name, the reason, and why the others were not taken.
    Raises: as the call would, and TypeError for an argument that it does not know.
    """
    names = ("scale", "softcap", "alibi_slopes", "bias", "sinks")
    terms = {name: options.pop(name, None) for name in names}
    splits = Splits(options.pop("num_splits", None), options.pop("batch_invariant", False))
    mask, cu = options.pop("mask", _FULL), options.pop("cu_seqlens_q", None)
    longest = options.pop("max_seqlen_q", None)
    op = "attention_with_cache"
    for name in options:
        if name not in ("out", "check", "out_dtype"):
            raise TypeError(f"explain_cache_backend: {op} knows no argument {name!r}.")
    return explain(op, backend, make_call(op, q, cache, mask, terms, cu, longest, splits))


def _terms(
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
) -> dict[str, Any]:
    return {
        "scale": scale, "softcap": softcap, "alibi_slopes": alibi_slopes, "bias": bias,
        "sinks": sinks,
    }  # fmt: skip


def _run_warm(
    found: Any, q: Tensor, cache: KVCache, given: warm.Given, dtype: torch.dtype
) -> Partial:
    """Run a call that is like one before it."""
    shape, out, lse = q.shape, given.out, None
    if out is None:
        out = torch.empty((*shape[:-1], cache.v.shape[3]), dtype=dtype, device=q.device)
    if given.wants_lse:
        rows = (*shape[:-3], shape[-2], shape[-3])
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    found.run(q, cache, given.cu_seqlens_q, given.alibi_slopes, given.sinks, out, lse)
    return Partial(out, out if lse is None else lse)


def _attend(
    op: str,
    call: CacheCall,
    backend: str,
    out_dtype: torch.dtype,
    check: bool | None,
    given: warm.Given,
    key: tuple[Any, ...] | None,
) -> Partial:
    q, cache, out = call.q, call.cache, given.out
    learned = (q, cache.k, cache.v, call.terms.bias, call.terms.alibi_slopes, call.terms.sinks)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in learned):
        raise NotImplementedError(
            f"{op}: has no gradient; call it under torch.no_grad(), or train with attention, which "
            "has one."
        )
    shape = (*q.shape[:-1], cache.v.shape[3])
    if out is None:
        out = q.new_empty(shape, dtype=out_dtype)
    else:
        check_shapes(op, {"out": out}, out=" ".join(map(str, shape)))
        check_same_device(op, {"q": q, "out": out})
        if out.dtype != q.dtype:
            raise ValueError(f"{op}: out must have q's dtype {q.dtype}, got {out.dtype}.")
        check_writable(op, "out", out)
    if torch.compiler.is_compiling():
        # Whether and what tensors hold is asked where the graph runs; of the CPU's always.
        name, later = backend, None if q.device.type == "cpu" else check
    else:
        name, later = choose(op, backend, call), False
        if cache.is_checked(check):
            check_contents(op, call)
    lse_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    wide = accumulator_of(q.dtype)
    # An lse that nobody asks for has no element.
    lse = q.new_empty(lse_shape if given.wants_lse else (0,), dtype=wide)
    if key is not None and name in _KERNELS and _is_reusable(call):
        warm.keep(key, run_kernels(name, call, out, lse))
        return Partial(out, lse)
    torch.ops.tilewise.attention_with_cache_fwd(out, lse, q, *flatten(call), name, later)
    return Partial(out, lse)


def _is_reusable(call: CacheCall) -> bool:
    """Whether kernels read every tensor of the call as it is."""
    cache, terms = call.cache, call.terms
    table = cache.block_table
    is_row = table is None or table.stride(-1) == 1
    return is_row and call.q.stride(-1) == 1 and warm.is_plain(
        cache.lengths, cache.batch_index, cache.starts, cache.k_scale, cache.v_scale,
        call.cu_seqlens_q, terms.alibi_slopes, terms.sinks,
    )  # fmt: skip
