"""The calls that are compiled, and for which targets.

Each is small, since a length changes no binary. Nearly all are for Hopper, and the rest is spread
so that every target has its share, and those with the least shared memory (sm_89, gfx942) what
needs most of it. What a variant of more features compiles, or one for a GPU of the same maker, is
not compiled by itself. `--all-targets` compiles all for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tests.compile.offline import TARGETS

M, N = 256, 320
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Variant:
    """A call, forward and backward. spills: bytes a thread on sm_90 that its kernels may spill, by
    kernel, as far as that is asserted. has_forward: False for a backward alone."""

    name: str
    call: Callable[[], None]
    targets: tuple[str, ...]
    dtype: torch.dtype
    spills: dict[str, int] = field(default_factory=dict)
    has_forward: bool = True


def _variant(
    name: str,
    D: int,
    targets: str,
    *,
    dtype: torch.dtype = _BF16,
    op: Callable[..., Any] | None = None,
    spills: dict[str, int] | None = None,
    E: int | None = None,
    G: int = 4,
    N: int = N,
    **options: Any,
) -> Variant:
    """targets: names, "*" for all, "" where `--all-targets` alone compiles it. options: of the
    call; causal where no mask is named."""
    attend, options = op or tw.attention, {"mask": tw.causal(), **options}

    def call() -> None:
        batch = () if "cu_seqlens_q" in options else (2,)
        shapes = ((M, 4, D), (N, G, D), (N, G, E or D))
        tensors = (_leaf(*batch, *shape, dtype=dtype) for shape in shapes)
        out = attend(*tensors, backend="triton", **options)
        out = out.out if isinstance(out, tw.Partial) else out
        out.backward(torch.zeros_like(out))

    chosen = tuple(TARGETS) if targets == "*" else tuple(targets.split())
    return Variant(name, call, chosen, dtype, spills or {})


def _add_gradients(D: int) -> None:
    """A piece's backward, added to buffers of the caller."""
    q, k, v = (torch.zeros(2, rows, 4, D, dtype=_BF16) for rows in (M, N, N))
    buffers = {f"d{name}": x.float() for name, x in zip("qkv", (q, k, v), strict=True)}
    rows = torch.zeros(2, 4, M)
    tw.attention_partial_backward(
        q, q, k, v, rows, rows, q_start=64, k_start=0, mask=tw.causal(), **buffers, backend="triton"
    )


def _leaf(*shape: int, dtype: torch.dtype = _FP32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def _bound(forward: int, keys: int, rows: int) -> dict[str, int]:
    return {
        "attention_fwd": forward,
        "attention_bwd_keys": keys,
        "attention_bwd_rows": rows,
    }


_LENGTHS = torch.tensor([0, 100, 256], dtype=torch.int32)
_KEYS = torch.tensor([0, 120, 320], dtype=torch.int32)
_PREFIX = tw.causal() | tw.prefix(torch.tensor([64, 32]))
_BITS = tw.from_function(lambda b, h, m, n: (m + n) % 3 != 0)


def _variants() -> list[Variant]:
    return [
        # What people run.
        _variant("bf16 D 64", 64, "sm_90", spills=_bound(0, 80, 0)),
        _variant("bf16 D 128", 128, "*", spills=_bound(0, 232, 0)),
        # On sm_90 what the forward keeps of a tile for the second part of O.
        _variant("bf16 D 256", 256, "sm_90 sm_100", spills=_bound(160, 144, 304)),
        # Head dims and dtypes.
        _variant("bf16 D 16", 16, "sm_90"),
        _variant("bf16 D 32", 32, "gfx942"),
        _variant("bf16 D 80", 80, "sm_90"),
        _variant("bf16 D 96", 96, ""),
        _variant("bf16 D 160", 160, ""),
        _variant("bf16 D 192", 192, ""),
        _variant("bf16 D 192, E 128", 192, "gfx942", E=128),
        _variant("fp16 D 128", 128, "sm_80", dtype=_FP16),
        _variant("fp32 D 64", 64, "sm_90 gfx942", dtype=_FP32),
        _variant("fp32 D 128", 128, "", dtype=_FP32),
        _variant("fp32 D 256", 256, "", dtype=_FP32),
        # Where keys and queries stand, and who sees whom.
        _variant("window, padding", 64, "sm_90",
                 mask=tw.window(100, 0) & tw.key_padding(torch.tensor([320, 100]))),
        _variant("documents", 64, "sm_90", N=M,
                 mask=tw.causal() & tw.documents(_LENGTHS)),
        _variant("packed", 128, "", op=tw.attention_varlen,
                 cu_seqlens_q=_LENGTHS, cu_seqlens_k=_KEYS),
        _variant("packed, softcap, sinks", 128, "sm_80", op=tw.attention_varlen,
                 cu_seqlens_q=_LENGTHS, cu_seqlens_k=_KEYS, softcap=30.0, sinks=_leaf(4)),
        _variant("intervals", 128, "", mask=_PREFIX),
        _variant("intervals, ALiBi", 128, "sm_90", mask=_PREFIX, alibi_slopes=_leaf(4)),
        _variant("bits", 128, "gfx950", mask=_BITS),
        _variant("bits, dropout", 128, "sm_90", mask=_BITS, dropout_p=0.1),
        # What else a score is made of.
        _variant("softcap, sinks", 128, "", softcap=30.0, sinks=_leaf(4)),
        _variant("ALiBi", 128, "", alibi_slopes=_leaf(4)),
        _variant("learned bias", 128, "sm_90", bias=_leaf(1, 4, M, N)),
        _variant("learned bias of keys", 64, "sm_120", bias=_leaf(2, 1, 1, N)),
        _variant("dropout", 128, "", dropout_p=0.1),
        _variant("bias, dropout, D 256", 256, "sm_89 gfx942",
                 bias=_leaf(1, 4, M, N).detach(), dropout_p=0.1),
        # Results.
        _variant("fp32 partial, GQA", 128, "sm_90", G=1, op=tw.attention_partial,
                 out_dtype=_FP32, q_start=64, k_start=0),
        Variant("added gradients", lambda: _add_gradients(128), ("sm_80",), _BF16,
                has_forward=False),
    ]  # fmt: skip


VARIANTS = _variants()
