"""Public functions of dense attention: check, choose a backend, run.

Semantics, the same in every backend: `scores = scale q k^T`, softcap, bias and ALiBi, mask,
softmax (with an optional sink in its denominator), dropout, times v.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.autocast import under_autocast
from ..core.backends import BackendChoice, check_backend_name
from ..core.first_derivative import refuse_tangents
from ..core.mask import Mask
from ..core.mask_leaves import full
from ..core.partials import Partial
from ..core.philox import draw_rng
from ..core.shapes import accumulator_of, check_same_device, check_shapes
from . import torch_flash, warm
from .checks import (
    PLACEMENT,
    check_are_tensors,
    check_buffers,
    check_call,
    check_out_dtype,
)
from .choice import BACKENDS, choose, explain
from .mapped import MappedAttention
from .ops import Arguments, Attention, check_contents
from .piece import Piece
from .warm_autograd import run_with_gradients

_FULL = full()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Exact softmax attention, `softmax(scale q k^T) v`, in O(N) memory, with gradients.

    Args:
        q: `[B, M, H, D]`, fp16, bf16, fp32 or fp64; any strides.
        k: `[B, N, G, D]`, same dtype and device; H % G == 0 and query head h reads kv head
            `h // (H // G)`, without K or V being repeated.
        v: `[B, N, G, E]`; E may differ from D.
        mask: what each query sees, a `tilewise.Mask`. Query m stands at key position
            `m + N - M` (bottom-right alignment) unless the mask brings an offset.
        scale: multiplies the scores; `D ** -0.5` when None.
        softcap: c in `c * tanh(scores / c)`; None for none.
        alibi_slopes: `[H]` or `[B, H]`; adds `-slope * |m + N - M - n|`. Has a gradient.
        bias: floating, broadcasts to `[B, H, M, N]`; added after softcap. Has a gradient.
        sinks: `[H]`, one extra logit per head in the denominator only. Has a gradient.
        dropout_p: in [0, 1), the share of probabilities dropped; 0 means no dropout. The bits
            come from torch's generator by way of Philox (see `tilewise.core.philox`).
        deterministic: ask for bitwise equal gradients from run to run. All backends but "hopper"
            give them anyway. torch.use_deterministic_algorithms asks for them too.
        backend: "auto", "hopper", "triton", "tiled", "reference"; a named one never falls back.
    Returns: `[B, M, H, E]` in q's dtype. A query that sees no key gives 0 and has gradient 0.
        Kept for the backward: `out + x`, not `out += x`, which autograd refuses.
    Raises: ValueError for arguments that do not fit, NotImplementedError for what no chosen
        backend can do; before anything is read or written.
    Cost: 4 B H M N D flops over the visible tiles, backward 2.5 times that (3.5 times on "triton",
        4 above head dim 128). Extra memory: an lse `[B, H, M]` and a few tiles; where something
        learns in 16 bits, 2 bytes an element of what is returned; backward, fp32
        buffers of dq, dk and dv on "tiled", of dq on "hopper", and where a bias, slopes or sinks
        learn, out in fp32 on "tiled". On GPUs inputs whose rows do not start at multiples of 16
        elements are copied.
    Deterministic: the forward always; the backward where asked to be, and on every backend but
        "hopper" always.
    Source: FlashAttention-2 (arXiv 2307.08691); the oracle is
        `tilewise.dense.reference.attention_reference`.
    """
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks, dropout_p, deterministic)
    return _attend("attention", q, k, v, mask, terms, {}, backend).out


def attention_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    q_start: int | Tensor | None = None,
    k_start: int | Tensor | None = None,
) -> Partial:
    """One piece of attention: these queries over these keys, with the LSE to merge it by.

    As `attention`, and:

    Args:
        out_dtype: dtype of out; q's when None. float32 for partials that will be merged.
        q_start, k_start: index of the first query and key in the whole sequence, an int or a
            `[B]` integer tensor. Where either is given, query m stands at key position
            `q_start + m` (plus the mask's own offset) and masks and dropout count from the starts;
            bias is indexed from the piece's own corner.
        sinks: belong to exactly one of the pieces that will be merged.
    Returns: `Partial(out [B, M, H, E], lse [B, H, M])`. Both are differentiable. A row that sees
        no key has out 0 and lse `-inf` (the sink's logit where there is one).
    Raises, Cost, Deterministic, Source: as `attention`.
    """
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks, dropout_p, deterministic)
    placement = {"q_start": q_start, "k_start": k_start}
    return _attend(
        "attention_partial",
        q,
        k,
        v,
        mask,
        terms,
        placement,
        backend,
        out_dtype,
        is_partial=True,
    )


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention over packed sequences: each document attends to its own keys only.

    As `attention` for every document by itself, and:

    Args:
        q: `[T, H, D]`, k: `[Tk, G, D]`, v: `[Tk, G, E]`: the documents one after the other.
        cu_seqlens_q, cu_seqlens_k: int32 or int64 `[B + 1]`, where each document starts, from 0;
            equal neighbours are an empty document. cu_seqlens_k is cu_seqlens_q when None.
        seqused_q, seqused_k: `[B]`, how many rows of each document are in use, from its start.
            Alignment is bottom-right of what is in use.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths; only a help for the launch.
        mask, bias, alibi_slopes: in document coordinates; b counts documents. bias broadcasts to
            `[B, H, longest query, longest key]`.
    Returns: `[T, H, E]`. Rows past `cu_seqlens_q[-1]` or past a used length are 0; what stands
        there in q, k, v reaches no output and no gradient.
    Raises: ValueError as `attention`, and for lengths that do not start at 0, fall, or go past
        what is stored. Contents of GPU tensors are read only with TILEWISE_CHECK=1 in the
        environment, since reading them waits for the GPU.
    Cost, Deterministic, Source: as `attention`.
    """
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks, dropout_p, deterministic)
    placement = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    return _attend("attention_varlen", q, k, v, mask, terms, placement, backend).out


def attention_varlen_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    q_start: int | Tensor | None = None,
    k_start: int | Tensor | None = None,
) -> Partial:
    """`attention_varlen` as a piece: `Partial(out [T, H, E], lse [H, T])`, both differentiable.

    out_dtype, q_start and k_start as in `attention_partial`; the starts count inside documents.
    Raises, Cost, Deterministic, Source: as `attention_varlen`.
    """
    terms = _terms(scale, softcap, alibi_slopes, bias, sinks, dropout_p, deterministic)
    placement = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "q_start": q_start,
        "k_start": k_start,
    }
    return _attend(
        "attention_varlen_partial",
        q,
        k,
        v,
        mask,
        terms,
        placement,
        backend,
        out_dtype,
        is_partial=True,
    )


def attention_partial_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    *,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    q_start: int | Tensor | None = None,
    k_start: int | Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> None:
    """Gradients of one piece of a larger softmax, added into buffers that the caller owns.

    `P = exp(scores - lse)`, `dS = P (dout v^T - delta)`; `dv += P^T dout`, `dq += scale dS k`,
    `dk += scale dS^T q`. Ring attention, split keys and chunked training are made of this. Sinks
    need nothing here, since lse holds them; a bias and dropout are not covered.

    Args:
        dout: `[B, M, H, E]` (packed `[T, H, E]`), the gradient of the final out.
        q, k, v, mask, scale, softcap, alibi_slopes, q_start, k_start: as the piece's forward.
        lse, delta: `[B, H, M]` (packed `[H, T]`), fp32, of the whole softmax:
            `delta = rowsum(dout * out) - dlse`.
        dq, dk, dv: fp32 (fp64 for fp64 inputs), shaped as q, k, v; added to, never overwritten.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: of a packed piece.
        deterministic, backend: as for `attention`.
    Raises: as `attention_partial`, and NotImplementedError for the reference backend, which owns no
        buffers.
    Cost: 10 B H M N D flops over the visible tiles (14 on "triton", 16 above head dim 128); a few
        tiles of extra memory, on "hopper" an fp32 buffer of dq.
    Deterministic: where asked to be, and on every backend but "hopper" always.
    Source: FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    op = "attention_partial_backward"
    terms = _terms(scale, softcap, alibi_slopes, None, None, 0.0, deterministic)
    placement = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q,
        "seqused_k": seqused_k,
        "q_start": q_start,
        "k_start": k_start,
    }
    buffers = {"dq": dq, "dk": dk, "dv": dv}
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
    check_are_tensors(op, inputs)
    check_buffers(op, buffers, inputs)
    arguments = check_call(op, q, k, v, mask, terms, placement)
    piece = Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms)
    chosen = _settle(op, backend, piece)
    if chosen == "reference":
        raise NotImplementedError(
            f"{op}: the reference backend differentiates by autograd and owns no buffers; "
            "use backend='tiled'."
        )
    packed = q.dim() == 3
    rows, keys, values = (
        ("T H D", "S G D", "S G E") if packed else ("B M H D", "B N G D", "B N G E")
    )
    statistics, out = ("H T", "T H E") if packed else ("B H M", "B M H E")
    tensors = {"q": q, "v": v, "dout": dout, "lse": lse, "delta": delta}
    tensors |= buffers
    specs = {"q": rows, "v": values, "dout": out, "lse": statistics, "delta": statistics}
    check_shapes(op, tensors, **specs, dq=rows, dk=keys, dv=values)
    check_same_device(op, tensors)
    wide = accumulator_of(q.dtype)
    for name in ("lse", "delta", "dq", "dk", "dv"):
        if tensors[name].dtype != wide:
            raise ValueError(f"{op}: {name} must be {wide}, got {tensors[name].dtype}.")
    torch.ops.tilewise.attention_bwd_into(
        dq,
        dk,
        dv,
        dout,
        lse,
        delta,
        q,
        k,
        v,
        *arguments._replace(backend=chosen),
    )


def explain_backend(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str = "auto", **options: Any
) -> BackendChoice:
    """Which backend a call of `attention` with these arguments runs on, why, and why not others.

    Args:
        q, k, v, backend, options: as the call would get them.
    Returns: a `BackendChoice`: the name, the reason, and why the others were not taken.
    Raises: as the call would.
    """
    names = ("scale", "softcap", "alibi_slopes", "bias", "sinks", "dropout_p")
    values = {name: options.pop(name, 0.0 if name == "dropout_p" else None) for name in names}
    values["deterministic"] = options.pop("deterministic", False)
    mask, out_dtype = options.pop("mask", _FULL), options.pop("out_dtype", None)
    for name in options:
        if name not in PLACEMENT:
            raise TypeError(f"explain_backend: no call of attention knows the argument {name!r}.")
    check_are_tensors("attention", {"q": q, "k": k, "v": v})
    q, k, v = under_autocast(q, k, v)
    arguments = check_call("attention", q, k, v, mask, _terms(**values), options)
    piece = Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms)
    choice = explain("attention", backend, piece)
    hands_over = choice.name == "tiled" and torch_flash.is_enabled()
    if hands_over and torch_flash.is_same_piece(piece, out_dtype or q.dtype):
        handed = "this piece goes to PyTorch's fused CPU op, which computes just the same"
        return replace(choice, reason=f"{choice.reason}; {handed}")
    return choice


# ---------------------------------------------------------------- check, choose, run


def _terms(
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    deterministic: bool,
) -> dict[str, Any]:
    return {
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "bias": bias,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "is_deterministic": bool(deterministic),
    }


def _attend(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    terms: dict[str, Any],
    placement: dict[str, Any],
    backend: str,
    out_dtype: torch.dtype | None = None,
    *,
    is_partial: bool = False,
) -> Partial:
    q, k, v = under_autocast(q, k, v)
    key, learns = None, False
    if not torch.compiler.is_compiling() and backend in warm.BACKENDS:
        learns = _learns(q, k, v)
        key, index = warm.key_of(q, k, v, mask, terms, placement, out_dtype, backend, learns)
        found = warm.find(key)
        if found is not None:
            if index:
                found.check(q, k, v, index, warm.longest_of(placement))
            if not learns:
                return Partial(*found.run(q, k, v, index)[:2])
            rest = (found, index, out_dtype or q.dtype, is_partial)
            result = run_with_gradients(q, k, v, *rest)
            # Nobody asks for the lse of what is no partial.
            return Partial(*result) if is_partial else Partial(result, result)
    check_are_tensors(op, {"q": q, "k": k, "v": v})
    if _is_distributed(q, k, v):
        from .sharded import attend_sharded

        def run_local(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: dict[str, Any]
        ) -> Partial:
            return _attend(
                op, q, k, v, mask, terms, placement, backend, out_dtype, is_partial=is_partial
            )

        return attend_sharded(op, run_local, q, k, v, mask, terms, placement)
    arguments = check_call(op, q, k, v, mask, terms, placement)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    check_out_dtype(op, out_dtype)
    name = _settle(op, backend, Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms))
    if terms["dropout_p"] > 0.0:
        arguments = arguments._replace(rng=draw_rng(q.device))
    if name == "reference":
        return _run_reference(q, k, v, mask, arguments, out_dtype)
    refuse_tangents(op)
    if name == "tiled" and not torch_flash.is_enabled():
        name = "tiled(own)"
    # Decided here, once, so that the backward does as the forward did.
    arguments = arguments._replace(backend=name)
    result = Partial(*_run_op(q, k, v, arguments, out_dtype, is_partial))
    # Only what has run serves calls after it.
    warm.keep(key, q, k, v, arguments, out_dtype, learns=learns)
    return result


def _learns(*tensors: Any) -> bool:
    """Whether one has a gradient that is wanted; anything may be asked."""
    if torch.is_grad_enabled():
        for x in tensors:
            if isinstance(x, Tensor) and x.requires_grad:
                return True
    return False


def _run_op(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, out_dtype: torch.dtype, is_partial: bool
) -> tuple[Tensor, Tensor]:
    """The registered op, with gradients where something learns."""
    if is_transformed():
        mapped: Any = MappedAttention.apply
        out, lse, *_ = mapped(q, k, v, *arguments[:3], arguments[3:], out_dtype)
        return out.to(out_dtype), lse
    learned: tuple[Tensor | None, ...] = (q, k, v, *arguments[:3])
    if _learns(*learned):
        if torch.compiler.is_compiling():
            learned, arguments = _distinct(learned, arguments)
        run: Any = Attention.apply
        out, lse = run(*learned, arguments[3:], out_dtype, is_partial)
    else:
        out, lse = torch.ops.tilewise.attention_fwd(q, k, v, *arguments, out_dtype)
    return out, lse


def _is_distributed(*tensors: Tensor) -> bool:
    """Whether one is a DTensor, without importing what defines it."""
    dtensor = sys.modules.get("torch.distributed.tensor")
    return dtensor is not None and any(isinstance(x, dtensor.DTensor) for x in tensors)


def is_transformed() -> bool:
    """Whether torch.func's vmap, grad or another of them is around the call.

    torch.compile cannot trace a yes (2.11 to 2.14) and raises: traced, the gradient would be lost.
    """
    return torch._C._functorch.maybe_current_level() is not None


def _distinct(
    learned: tuple[Tensor | None, ...], arguments: Arguments
) -> tuple[tuple[Tensor | None, ...], Arguments]:
    """A view of each tensor that comes twice: torch.compile refuses repeats (v is k, say)."""
    seen: list[Tensor] = []

    def once(x: Any) -> Any:
        if isinstance(x, list):
            return [once(item) for item in x]
        if not isinstance(x, Tensor):
            return x
        if any(x is other for other in seen):
            return x.view_as(x)
        seen.append(x)
        return x

    first = tuple(once(x) for x in learned)
    return first, Arguments(*first[3:], *(once(x) for x in arguments[3:]))


def _run_reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, arguments: Arguments, out_dtype: torch.dtype
) -> Partial:
    from .reference import attention_reference

    piece = Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms)
    check_contents(arguments, piece)
    out, lse = attention_reference(piece)
    return Partial(out.to(out_dtype), lse if q.dtype == torch.float64 else lse.float())


def _settle(op: str, backend: str, piece: Piece) -> str:
    """The backend's name; a compiled call leaves "auto" to the op, which sees the real device."""
    if torch.compiler.is_compiling():
        check_backend_name(op, backend, BACKENDS)
        return backend
    return choose(op, backend, piece)
