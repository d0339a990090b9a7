"""Tilewise as the flash implementation of PyTorch's scaled_dot_product_attention, on CUDA.

    from tilewise.integrations import torch_sdpa

    torch_sdpa.activate()
    ...
    torch_sdpa.restore()

or, on any device and for any call, in the place of PyTorch's function:

    from tilewise.integrations.torch_sdpa import scaled_dot_product_attention

With `activate()` PyTorch goes on choosing among flash, cuDNN, memory-efficient and plain attention;
where it chooses flash, Tilewise computes. `torch.nn.attention.sdpa_kernel` can make it choose so.

Dims: B batch, M query length, N key length, T packed tokens, H query heads, G kv heads, D, E head
    dims. SDPA's ops take `[B, H, M, D]`, the flash ops under them `[B, M, H, D]` or `[T, H, D]`.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import attention as torch_attention

from ..core.mask import Mask
from ..core.mask_leaves import causal, full, window
from ..core.philox import draw_rng
from ..core.shapes import check_broadcastable
from ..dense.api import attention
from ..dense.checks import check_call
from ..dense.choice import choose
from ..dense.ops import Arguments
from ..dense.piece import Piece
from .mask_tensor import visible_elements

NAME = "TILEWISE"


def activate() -> None:
    """Compute SDPA's flash attention with Tilewise until `restore()`. Again is harmless.

    Causal is SDPA's own: query m sees keys n <= m, whatever the lengths. Dropout draws from
    torch's generator as Tilewise does, so the bits are not those of PyTorch's kernels.
    Raises: RuntimeError where there is no CUDA GPU or PyTorch cannot register implementations.
    """
    if not hasattr(torch_attention, "register_flash_attention_impl"):
        raise RuntimeError(
            f"activate: PyTorch must have register_flash_attention_impl (2.11 or later), "
            f"got {torch.__version__}."
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            "activate: SDPA's flash implementation can be replaced on CUDA only, and PyTorch sees "
            "no CUDA GPU here; scaled_dot_product_attention of this module runs on any device."
        )
    torch_attention.register_flash_attention_impl(NAME, register_fn=lambda: Overrides("CUDA"))
    torch_attention.activate_flash_attention_impl(NAME)


def restore() -> None:
    """Give PyTorch its own flash attention back; nothing happens where another one is active."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name, argument for argument, by `tilewise.attention`.

    Args:
        query: `[..., H, M, D]`; key, value: `[..., G, N, D]` and `[..., G, N, E]`; with three
            dims, no heads.
        attn_mask: broadcasts to `[..., H, M, N]`; bool, True where a key is seen, or floating,
            added to the scores, with a gradient. Not beside is_causal.
        is_causal: query m sees keys n <= m.
        enable_gqa: must be True where G < H.
        The others: as in `tilewise.attention`.
    Returns: `[..., H, M, E]`. A query that sees no key gives 0.
    Raises: ValueError for arguments that do not fit.
    """
    op = "scaled_dot_product_attention"
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    if any(x.dim() != query.dim() for x in (key, value)) or query.dim() < 3:
        raise ValueError(
            f"{op}: query, key and value must be [..., H, M, D] alike, got {list(query.shape)}, "
            f"{list(key.shape)} and {list(value.shape)}."
        )
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise ValueError(f"{op}: attn_mask must be a tensor, got {type(attn_mask).__name__}.")
    if attn_mask is not None and is_causal:
        raise ValueError(f"{op}: attn_mask must be None where is_causal is True, got both.")
    H, G = (x.shape[-3] if x.dim() > 3 else 1 for x in (query, key))
    if H != G and not enable_gqa:
        raise ValueError(
            f"{op}: enable_gqa must be True where {H} query heads read {G} key heads, got False."
        )
    leading = query.shape[:-3] if query.dim() > 3 else query.shape[:1]
    q, k, v = (_four(x).transpose(1, 2) for x in (query, key, value))
    mask = causal(offset=0) if is_causal else full()
    bias = None
    if attn_mask is not None:
        M, N = query.shape[-2], key.shape[-2]
        if attn_mask.dim() > 4 or query.dim() > 4:
            sizes = {f"dim {i}": size for i, size in enumerate((*leading, H, M, N))}
            check_broadcastable(op, "attn_mask", attn_mask, sizes)
            attn_mask = attn_mask.expand(*sizes.values()).flatten(0, -4)
        elif query.dim() == 3 and attn_mask.dim() == 3:
            attn_mask = attn_mask.unsqueeze(1)
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        if attn_mask.dtype == torch.bool:
            mask = visible_elements(attn_mask, M, N)
        else:
            bias = attn_mask
    out = attention(q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    out = out.transpose(1, 2)
    return out.squeeze(1) if query.dim() == 3 else out.reshape(*leading, *out.shape[1:])


def _four(x: Tensor) -> Tensor:
    """`[B, H, M, D]`."""
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)


class Overrides:
    """The ops of ATen that are computed here, on one device type, until removed."""

    def __init__(self, key: str) -> None:
        self.library: Library | None = Library("aten", "IMPL", key)
        for name, function in (
            ("_scaled_dot_product_flash_attention", _sdpa_forward),
            ("_scaled_dot_product_flash_attention_backward", _sdpa_backward),
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_backward", _flash_backward),
        ):
            with warnings.catch_warnings():
                # PyTorch says that its own kernel is replaced, which is what was asked for.
                warnings.filterwarnings("ignore", "(?s).*previously registered kernel")
                self.library.impl(name, function, key, allow_override=True)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


class _State(NamedTuple):
    """Arguments that all four ops have in this order; a forward ends at is_causal."""

    cum_seq_q: Tensor | None
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    seed: Any = None
    offset: Any = None


# ---------------------------------------------------------------- SDPA


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """`[B, H, M, D]`; the other results are lse, sizes and the dropout's state."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = causal(offset=0) if is_causal else full()
    out, lse, *rest = _forward(q, k, v, mask, dropout_p, scale, return_debug_mask)
    sizes = (None, None, query.shape[2], key.shape[2])
    return (_like(out.transpose(1, 2), query), lse, *sizes, *rest)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    state = _State(*others)
    dout, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    mask = causal(offset=0) if state.is_causal else full()
    arguments = _arguments(q, k, v, mask, state.dropout_p, scale, {})
    gradients = _backward(dout, q, k, v, o, logsumexp, arguments, state.seed)
    inputs = (query, key, value)
    return tuple(_like(g.transpose(1, 2), x) for g, x in zip(gradients, inputs, strict=True))


# ---------------------------------------------------------------- the flash ops under it


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *others: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """What `varlen_attn` and nested tensors call: flash-attn's rules, causal bottom-right."""
    if block_table is not None:
        raise NotImplementedError(
            "_flash_attention_forward: paged keys (block_table) are read by "
            "tilewise.attention_with_cache alone; torch_sdpa.restore() gives PyTorch's own kernel "
            "back."
        )
    *sizes, return_debug_mask = others
    state = _State(*sizes)
    mask = _window(state.is_causal, window_size_left, window_size_right)
    packing = _packing(state, seqused_k)
    return _forward(
        query, key, value, mask, state.dropout_p, scale, return_debug_mask, alibi_slopes, packing
    )


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *others: Any,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    state = _State(*others)
    mask = _window(state.is_causal, window_size_left, window_size_right)
    arguments = _arguments(query, key, value, mask, state.dropout_p, scale, _packing(state, None))
    return _backward(grad_out, query, key, value, out, logsumexp, arguments, state.seed)


def _window(is_causal: bool, left: int | None, right: int | None) -> Mask:
    bounds = [None if bound is None or bound < 0 else bound for bound in (left, right)]
    if is_causal:
        bounds[1] = 0
    return full() if bounds == [None, None] else window(*bounds)


def _packing(state: _State, used_k: Tensor | None) -> dict[str, Any]:
    if state.cum_seq_q is None:
        return {}
    return {
        "cu_seqlens_q": state.cum_seq_q,
        "cu_seqlens_k": state.cum_seq_k,
        "max_seqlen_q": state.max_q,
        "max_seqlen_k": state.max_k,
        "seqused_k": used_k,
    }


# ---------------------------------------------------------------- Tilewise's ops


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    dropout_p: float,
    scale: float | None,
    packing: dict[str, Any],
    alibi_slopes: Tensor | None = None,
) -> Arguments:
    terms = {
        "scale": scale,
        "softcap": None,
        "alibi_slopes": alibi_slopes,
        "bias": None,
        "sinks": None,
        "dropout_p": dropout_p,
    }
    op = "attention_varlen" if packing else "attention"
    arguments = check_call(op, q, k, v, mask, terms, packing)
    positions = arguments.positions(q, k)
    name = choose(op, "auto", Piece(q, k, v, mask, positions, arguments.terms))
    # Below this stands PyTorch's dispatcher: its fused op must not be asked again.
    return arguments._replace(backend="tiled(own)" if name == "tiled" else name)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    dropout_p: float,
    scale: float | None,
    return_debug_mask: bool,
    alibi_slopes: Tensor | None = None,
    packing: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:
    """out, lse, the dropout's seed and offset, an unused tensor, an empty debug mask."""
    if return_debug_mask:
        raise NotImplementedError(
            "scaled_dot_product_attention: return_debug_mask asks for the dropped probabilities, "
            "which Tilewise never stores."
        )
    arguments = _arguments(q, k, v, mask, dropout_p, scale, packing or {}, alibi_slopes)
    rng = q.new_zeros(2, dtype=torch.int64)
    if dropout_p > 0.0:
        rng = draw_rng(q.device)
        arguments = arguments._replace(rng=rng)
    out, lse = torch.ops.tilewise.attention_fwd(q, k, v, *arguments, q.dtype)
    unused = q.new_zeros((), dtype=torch.uint64)
    return out, lse, rng.view(torch.uint64), unused, q.new_empty(0)


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    arguments: Arguments,
    rng: Tensor,
) -> tuple[Tensor, ...]:
    if arguments.dropout_p > 0.0:
        arguments = arguments._replace(rng=rng.view(torch.int64))
    gradients: tuple[Tensor, ...] = torch.ops.tilewise.attention_bwd(
        dout, None, out, lse, q, k, v, *arguments, [False] * 3
    )
    return gradients[:3]


def _like(x: Tensor, given: Tensor) -> Tensor:
    """x with the strides that PyTorch's compiler expects: those of `given`."""
    expected = torch.empty_like(given, device="meta").stride()
    return x if x.stride() == expected else torch.empty_like(given).copy_(x)
