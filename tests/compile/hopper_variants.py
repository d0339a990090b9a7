"""The hopper forward's variants: each a call, and what its kernel may spill.

What is spilled is what a tile keeps for its end, once a tile; none of it is in a loop without a
test (read from the machine code, Triton 3.6 and 3.9, 2026-11-29), except under ALiBi: 10 there at
head dim 128, 15 at 256 and 53 at 64, cause unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tilewise as tw
from tilewise.dense.api import attention_partial_backward

M, N = 256, 320
# Of narrow heads: more than have short tiles.
MANY_ROWS = 1536
_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class HopperVariant:
    """spills: the most bytes a thread, of Triton 3.6 and of later ones. has_start: whether rows may
    not see the first keys, which makes a third loop. n_consumers: warp groups that multiply."""

    name: str
    call: Callable[[], Any]
    spills: tuple[int, int]
    has_start: bool
    n_consumers: int

    @property
    def is_rare(self) -> bool:
        return self.name in RARE


def _variant(
    name: str, D: int, spills: tuple[int, int] = (0, 0), *, dtype: torch.dtype = _BF16,
    E: int | None = None, G: int = 4, op: Callable[..., Any] = tw.attention,
    has_start: bool = False, has_few_rows: bool = False, **options: Any,
) -> HopperVariant:  # fmt: skip
    is_packed, is_tall = "cu_seqlens_q" in options, max(D, E or D) <= 64 and not has_few_rows

    def call() -> Any:
        batch = () if is_packed else (2,)
        rows = MANY_ROWS if is_tall else M
        shapes = ((rows, 4, D), (N, G, D), (N, G, E or D))
        tensors = (torch.zeros(*batch, *shape, dtype=dtype) for shape in shapes)
        return op(*tensors, backend="hopper", **options)

    return HopperVariant(name, call, spills, has_start, 3 if is_tall else 2)


def _learning(*tensors: torch.Tensor, **options: Any) -> Any:
    """A call for whose backward out is kept in two parts."""
    op = tw.attention_varlen if "cu_seqlens_q" in options else tw.attention
    return op(*(x.requires_grad_() for x in tensors), **options)


_LENGTHS = torch.tensor([0, 100, 256], dtype=torch.int32)
_KEYS = torch.tensor([0, 120, 320], dtype=torch.int32)
_PACKED: dict[str, Any] = {"cu_seqlens_q": _LENGTHS, "cu_seqlens_k": _KEYS}
_PADDED: dict[str, Any] = {
    "mask": tw.causal() & tw.key_padding(torch.tensor([320, 9])), "has_start": True
}  # fmt: skip
_WINDOW: dict[str, Any] = {"mask": tw.window(100, 0), "has_start": True}
_PARTIAL: dict[str, Any] = {"op": tw.attention_partial, "out_dtype": _FP32}

# Compiled under `--all-targets` alone: others like them show what theirs would.
RARE = {
    "fp16 D 64", "fp16 D 256", "D 64, E 128", "D 96, E 256", "window D 64", "window D 256",
    "padding D 128", "packed D 64", "packed D 256", "softcap D 128", "softcap D 256", "ALiBi D 128",
    "ALiBi D 256", "scale below 0", "packed fp32 partial", "window D 128", "packed D 128",
    "softcap D 64", "fp32 partial D 64", "fp32 partial D 128", "learning D 128", "D 192",
    "packed D 64, few rows", "padding D 64", "learning D 64", "learning D 256",
}  # fmt: skip
RARE_BACKWARD = {
    "causal D 64", "fp16 D 128", "D 128, E 64", "padding D 128", "packed D 64",
    "into fp32 buffers D 64", "ALiBi D 64", "packed D 256", "D 256, softcap, ALiBi",
    "into fp32 buffers D 256", "documents",
}  # fmt: skip

HOPPER_VARIANTS = [
    # What people run.
    _variant("D 64", 64),
    _variant("D 64, few rows", 64, has_few_rows=True),
    _variant("D 128", 128),
    _variant("D 256", 256, (0, 120)),
    _variant("fp16 D 64", 64, dtype=_FP16),
    _variant("fp16 D 128", 128, dtype=_FP16),
    _variant("fp16 D 256", 256, (0, 120), dtype=_FP16),
    # Head dims.
    _variant("D 64, E 128", 64, E=128),
    _variant("D 192", 192),
    _variant("D 192, E 128", 192, (0, 64), E=128),
    _variant("D 96, E 256", 96, E=256),
    # Where keys and queries stand, and who sees whom.
    _variant("window D 64", 64, (0, 104), **_WINDOW),
    _variant("window D 128", 128, **_WINDOW),
    _variant("window D 256", 256, (0, 136), **_WINDOW),
    _variant("padding D 64", 64, (64, 112), **_PADDED),
    _variant("padding D 128", 128, **_PADDED),
    _variant("packed D 64", 64, (80, 104), op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    _variant("packed D 64, few rows", 64, has_few_rows=True, op=tw.attention_varlen,
             mask=tw.causal(), **_PACKED),
    _variant("packed D 128", 128, op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    _variant("packed D 256", 256, (0, 120), op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    _variant("documents", 128, (0, 72), mask=tw.window(30, 0) & tw.documents(_LENGTHS),
             has_start=True),
    # What else a score is made of.
    _variant("softcap D 64", 64, (0, 72), softcap=30.0),
    _variant("softcap D 128", 128, softcap=30.0),
    _variant("softcap D 256", 256, (0, 120), softcap=30.0),
    _variant("ALiBi D 64", 64, (248, 320), alibi_slopes=torch.zeros(4)),
    _variant("ALiBi D 128", 128, (64, 144), alibi_slopes=torch.zeros(4)),
    _variant("ALiBi D 256", 256, (104, 256), alibi_slopes=torch.zeros(4)),
    _variant("packed window, softcap, ALiBi", 128, (56, 176), softcap=3.0,
             alibi_slopes=torch.zeros(2, 4), op=tw.attention_varlen, mask=tw.window(90, 0),
             has_start=True, **_PACKED),
    _variant("scale below 0", 128, scale=-1.0),
    _variant("sinks, GQA", 128, G=1, sinks=torch.zeros(4)),
    # Results.
    _variant("fp32 partial D 64", 64, (0, 96), **_PARTIAL),
    _variant("fp32 partial D 128", 128, **_PARTIAL),
    _variant("fp32 partial D 256", 256, (0, 168), **_PARTIAL),
    _variant("packed fp32 partial", 128, op=tw.attention_varlen_partial, out_dtype=_FP32,
             **_PACKED),
    _variant("learning D 64", 64, (64, 112), op=_learning),
    _variant("learning D 64, few rows", 64, has_few_rows=True, op=_learning,
             mask=tw.window(100, 0), has_start=True),
    _variant("learning D 128", 128, op=_learning),
    _variant("learning D 256", 256, (0, 160), op=_learning),
    _variant("learning, packed", 128, op=_learning, mask=tw.causal(), **_PACKED),
]  # fmt: skip


@dataclass(frozen=True)
class BackwardVariant:
    """spills: the most bytes a thread of each kernel, of Triton 3.6 and of later ones. has_queries:
    a warp group of its own adds up dQ."""

    name: str
    call: Callable[[], Any]
    spills: tuple[int, int]
    has_queries: bool = False

    @property
    def is_rare(self) -> bool:
        return self.name in RARE_BACKWARD


def _backward(
    name: str, D: int, spills: tuple[int, int], *, dtype: torch.dtype = _BF16, E: int | None = None,
    G: int = 4, op: Callable[..., Any] = tw.attention, has_sinks: bool = False, **options: Any,
) -> BackwardVariant:  # fmt: skip
    def call() -> Any:
        batch = () if "cu_seqlens_q" in options else (2,)
        shapes = ((M, 4, D), (N, G, D), (N, G, E or D))
        tensors = (torch.zeros(*batch, *shape, dtype=dtype) for shape in shapes)
        extras = {"sinks": torch.zeros(4).requires_grad_()} if has_sinks else {}
        x = (x.requires_grad_() for x in tensors)
        op(*x, backend="hopper", **options, **extras).sum().backward()

    has_queries = max(D, E or D) <= 64 and not options.get("deterministic")
    return BackwardVariant(name, call, spills, has_queries)


def _into_buffers(D: int) -> Callable[[], Any]:
    def call() -> None:
        q, k, v = (torch.zeros(2, n, 4, D, dtype=_BF16) for n in (M, N, N))
        statistics = (torch.zeros(2, 4, M) for _ in range(2))
        buffers = {
            f"d{name}": torch.zeros(x.shape) for name, x in zip("qkv", (q, k, v), strict=True)
        }
        attention_partial_backward(q, q, k, v, *statistics, **buffers, backend="hopper")

    return call


# What is spilled is of a tile's beginning and end, and a word that a block reads again.
BACKWARD_VARIANTS = [
    _backward("D 64", 64, (32, 104)),
    _backward("D 128", 128, (152, 40)),
    _backward("causal D 64", 64, (32, 104), mask=tw.causal()),
    _backward("causal D 128, GQA", 128, (152, 40), G=1, mask=tw.causal()),
    _backward("fp16 D 128", 128, (152, 40), dtype=_FP16),
    _backward("D 128, E 64", 128, (16, 32), E=64),
    _backward("padding D 128", 128, (160, 48), mask=_PADDED["mask"]),
    _backward("packed D 64", 64, (40, 104), op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    _backward("packed D 128", 128, (152, 40), op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    BackwardVariant("into fp32 buffers D 64", _into_buffers(64), (24, 104), has_queries=True),
    BackwardVariant("into fp32 buffers D 128", _into_buffers(128), (128, 40)),
    _backward("documents", 128, (160, 40), mask=tw.window(30, 0) & tw.documents(_LENGTHS)),
    _backward("softcap D 128", 128, (256, 184), softcap=30.0),
    _backward("ALiBi D 64", 64, (32, 112), alibi_slopes=torch.zeros(4)),
    _backward("D 256", 256, (0, 40)),
    _backward("packed D 256", 256, (0, 40), op=tw.attention_varlen, mask=tw.causal(), **_PACKED),
    _backward(
        "D 192, E 128, window, sinks", 192, (0, 40), E=128, mask=tw.window(100, 0), has_sinks=True
    ),
    _backward(
        "D 256, softcap, ALiBi",
        256,
        (72, 120),
        mask=tw.causal(),
        softcap=30.0,
        alibi_slopes=torch.zeros(4),
    ),
    _backward("deterministic D 128", 128, (24, 16), deterministic=True),
    BackwardVariant("into fp32 buffers D 256", _into_buffers(256), (8, 56)),
]
