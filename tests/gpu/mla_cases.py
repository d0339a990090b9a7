"""Calls of latent attention on Hopper, each beside its oracle. Free slots and pages hold NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import DEVICE
from tilewise.core.mask import Mask
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.decode.budget import unread
from tilewise.decode.call import CacheCall, Splits, make_call
from tilewise.decode.reference import cache_eager, cache_reference

_RAGGED = (0, 1, 31, 32, 33, 63, 64, 65, 159, 160, 161, 500)
_FEW = (70, 1, 333, 0, 33)


@dataclass(frozen=True)
class MlaCase:
    """lengths: of each sequence. queries: the same number for all, or one for each (packed).

    growth: of keys over a sequence, so that maxima rise from tile to tile. layout: of the storage.
    """

    name: str
    H: int
    queries: int | tuple[int, ...] = 1
    lengths: tuple[int, ...] = _FEW
    page: int | None = 64
    mask: Callable[[], Mask] = tw.causal
    dtype: torch.dtype = torch.bfloat16
    growth: float = 0.0
    layout: str = ""
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    MlaCase("16 heads, ragged, contiguous", 16, lengths=_RAGGED, page=None),
    MlaCase("16 heads, ragged, pages of 64", 16, lengths=_RAGGED),
    MlaCase("16 heads, pages of 32", 16, page=32),
    MlaCase("16 heads, pages of 160", 16, page=160),
    MlaCase("one head", 1),
    MlaCase("128 heads", 128, lengths=_RAGGED),
    MlaCase("128 heads, two queries", 128, 2, _RAGGED),
    MlaCase("128 heads, five queries", 128, 5),
    MlaCase("40 heads, three queries, contiguous", 40, 3, page=None),
    MlaCase("7 heads, two queries, fp16", 7, 2, dtype=torch.float16),
    MlaCase("16 heads, 100 queries (more than keys)", 16, 100),
    MlaCase("16 heads, 70 queries, contiguous", 16, 70, page=None),
    MlaCase("full", 24, 3, mask=tw.full),
    MlaCase("window(20, 0)", 16, 5, mask=lambda: tw.window(20, 0)),
    MlaCase("window(100, 0), contiguous", 128, 2, page=None, mask=lambda: tw.window(100, 0)),
    MlaCase("window(9, 0, offset=60)", 16, 5, mask=lambda: tw.window(9, 0, offset=60)),
    MlaCase("window(60, 0) & prefix(90)", 16, 5,
            mask=lambda: tw.window(60, 0) & tw.prefix(90)),
    MlaCase("left padding", 16, 3, layout="left padding"),
    MlaCase("shuffled pages", 32, 2, layout="shuffled"),
    MlaCase("batch_index", 16, 2, page=None, layout="batch_index"),
    MlaCase("rows apart", 16, 2, page=None, layout="apart"),
    MlaCase("sinks", 32, 3, sinks=True),
    MlaCase("sinks, fp16, rising keys", 16, dtype=torch.float16, growth=30.0, sinks=True),
    MlaCase("rising keys", 128, 2, growth=30.0),
    MlaCase("falling keys", 128, 2, growth=-30.0),
    MlaCase("rising keys, fp16", 128, 2, dtype=torch.float16, growth=30.0),
    MlaCase("scale 0.5", 16, options={"scale": 0.5}),
    MlaCase("3 splits", 16, lengths=_RAGGED, options={"num_splits": 3}),
    MlaCase("one split", 128, 2, options={"num_splits": 1}),
    MlaCase("batch invariant", 128, 2, _RAGGED, options={"batch_invariant": True}),
    MlaCase("mixed batch, batch invariant", 16, (1, 21, 0, 5, 1), (149, 1190, 33, 3, 0),
            options={"batch_invariant": True}),
    MlaCase("mixed batch", 16, (1, 21, 0, 5, 1), (149, 90, 33, 3, 0)),
    MlaCase("mixed batch, 128 heads, window", 128, (1, 9, 0, 5, 1), (149, 90, 33, 3, 0),
            mask=lambda: tw.window(30, 0), sinks=True),
    MlaCase("40 sequences", 16, 2, tuple(range(0, 120, 3))),
    MlaCase("1100 sequences", 2, 1, (1, 2, 0, 3) * 275),
)  # fmt: skip


def draw(case: MlaCase, seed: int = 0) -> tuple[Tensor, tw.KVCache, dict[str, Any]]:
    """q, a cache and options, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(case.dtype)

    options: dict[str, Any] = {"mask": case.mask(), "scale": 192**-0.5, **case.options}
    if isinstance(case.queries, int):
        q = normal(len(case.lengths), case.queries, case.H, 576)
    else:
        options["cu_seqlens_q"] = torch.tensor([0, *case.queries]).cumsum(0).int()
        # Two rows that belong to nobody.
        q = normal(sum(case.queries) + 2, case.H, 576)
        q[-2:] = float("nan")
    if case.sinks:
        options["sinks"] = torch.linspace(-1.0, 3.0, case.H)
    return q, cache_of(case, normal), options


def cache_of(case: MlaCase, normal: Callable[..., Tensor]) -> tw.KVCache:
    B, capacity = len(case.lengths), max(case.lengths) + 30
    cache = tw.KVCache.latent(B, capacity, page_size=case.page, dtype=case.dtype, device="cpu")
    cache = _laid_out(cache, case.layout)
    unread(cache.k)
    tokens = []
    for n in case.lengths:
        size = torch.linspace(0.0, 1.0, n).unsqueeze(-1) * case.growth
        size = size - min(case.growth, 0.0) + 1.0 if case.growth else torch.ones(())
        tokens.append((normal(n, 576) * size).to(case.dtype))
    cu = torch.tensor([0, *case.lengths]).cumsum(0)
    cache.append(torch.cat(tokens).unsqueeze(1), cu_seqlens=cu)
    if cache.block_table is not None:
        assert case.page is not None
        pages = -(-torch.tensor(case.lengths) // case.page)
        # What lies beyond is nobody's.
        column = torch.arange(cache.block_table.shape[1])
        cache.block_table[column >= pages.unsqueeze(-1)] = 2147480000
    return cache


def _laid_out(cache: tw.KVCache, layout: str) -> tw.KVCache:
    if layout == "left padding":
        cache.starts = torch.tensor([40, 0, 100, 7, 33], dtype=torch.int32)
    elif layout == "shuffled":
        assert cache.block_table is not None
        order = torch.randperm(cache.k.shape[0], generator=torch.Generator().manual_seed(0))
        cache.block_table = order.int().reshape(cache.block_table.shape)
    elif layout == "batch_index":
        k = torch.cat([cache.k, cache.k[:2]])
        index = torch.tensor([3, 0, 5, 1, 6])
        cache = tw.KVCache(k, k[..., :512], cache.lengths, batch_index=index)
    elif layout == "apart":
        # A row of storage that is wider than what it holds.
        k = torch.zeros(*cache.k.shape[:3], 640, dtype=cache.k.dtype)[..., :576]
        cache = tw.KVCache(k, k[..., :512], cache.lengths)
    return cache


def on_device(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(DEVICE)
    if not isinstance(x, tw.KVCache):
        return x
    # Values stay a view of the keys; strides stay what they are.
    k = torch.empty_strided(x.k.shape, x.k.stride(), dtype=x.k.dtype, device=DEVICE)
    k.copy_(x.k)
    moved = {name: t.to(DEVICE) for name, t in x.tensors().items() if name not in ("k", "v")}
    return tw.KVCache(k, k[..., :512], **moved)


def call_of(q: Tensor, cache: tw.KVCache, options: dict[str, Any]) -> CacheCall:
    terms = {name: options.get(name) for name in ("scale", "softcap", "alibi_slopes", "sinks")}
    splits = Splits(options.get("num_splits"), options.get("batch_invariant", False))
    return make_call(
        "test", q, cache, options["mask"], {**terms, "bias": None}, options.get("cu_seqlens_q"),
        options.get("max_seqlen_q"), splits,
    )  # fmt: skip


def held(case: MlaCase, seed: int = 0, backend: str = "hopper") -> None:
    """The call is within its budget, twice the same, cold and warm."""
    q, cache, options = draw(case, seed)
    call = call_of(q, cache, options)
    exact, eager = cache_reference(call), cache_eager(call)
    q, cache = on_device(q), on_device(cache)
    options = {name: on_device(x) for name, x in options.items()}
    got = tw.attention_with_cache_partial(q, cache, **options, backend=backend)
    assert_within_budget(got.out.cpu(), exact.out, eager.out)
    assert_lse_within_budget(got.lse.cpu(), exact.lse, q.dtype)
    again = tw.attention_with_cache_partial(q, cache, **options, backend=backend)
    assert torch.equal(again.out, got.out) and torch.equal(again.lse, got.lse)
    out = tw.attention_with_cache(q, cache, **options, backend=backend)
    assert torch.equal(out, got.out)
