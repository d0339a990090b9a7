"""Calls over a cache on Hopper, each beside its oracle. Free slots and pages hold NaN."""

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
class HopperCase:
    """G: kv heads of D columns; 0 where the cache is latent. E: columns of values, where those are
    others. lengths: of each sequence. queries: the same number for all, or one for each (packed).
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
    G: int = 0
    D: int = 128
    E: int = 0
    options: dict[str, Any] = field(default_factory=dict)


CASES = (
    HopperCase("16 heads, ragged, contiguous", 16, lengths=_RAGGED, page=None),
    HopperCase("16 heads, ragged, pages of 64", 16, lengths=_RAGGED),
    HopperCase("16 heads, pages of 32", 16, page=32),
    HopperCase("16 heads, pages of 160", 16, page=160),
    HopperCase("one head", 1),
    HopperCase("128 heads", 128, lengths=_RAGGED),
    HopperCase("128 heads, two queries", 128, 2, _RAGGED),
    HopperCase("128 heads, five queries", 128, 5),
    HopperCase("40 heads, three queries, contiguous", 40, 3, page=None),
    HopperCase("7 heads, two queries, fp16", 7, 2, dtype=torch.float16),
    HopperCase("16 heads, 100 queries (more than keys)", 16, 100),
    HopperCase("16 heads, 70 queries, contiguous", 16, 70, page=None),
    HopperCase("full", 24, 3, mask=tw.full),
    HopperCase("window(20, 0)", 16, 5, mask=lambda: tw.window(20, 0)),
    HopperCase("window(100, 0), contiguous", 128, 2, page=None, mask=lambda: tw.window(100, 0)),
    HopperCase("window(9, 0, offset=60)", 16, 5, mask=lambda: tw.window(9, 0, offset=60)),
    HopperCase("window(60, 0) & prefix(90)", 16, 5,
            mask=lambda: tw.window(60, 0) & tw.prefix(90)),
    HopperCase("left padding", 16, 3, layout="left padding"),
    HopperCase("shuffled pages", 32, 2, layout="shuffled"),
    HopperCase("batch_index", 16, 2, page=None, layout="batch_index"),
    HopperCase("rows apart", 16, 2, page=None, layout="apart"),
    HopperCase("sinks", 32, 3, sinks=True),
    HopperCase("sinks, fp16, rising keys", 16, dtype=torch.float16, growth=30.0, sinks=True),
    HopperCase("rising keys", 128, 2, growth=30.0),
    HopperCase("falling keys", 128, 2, growth=-30.0),
    HopperCase("rising keys, fp16", 128, 2, dtype=torch.float16, growth=30.0),
    HopperCase("scale 0.5", 16, options={"scale": 0.5}),
    HopperCase("3 splits", 16, lengths=_RAGGED, options={"num_splits": 3}),
    HopperCase("one split", 128, 2, options={"num_splits": 1}),
    HopperCase("batch invariant", 128, 2, _RAGGED, options={"batch_invariant": True}),
    HopperCase("mixed batch, batch invariant", 16, (1, 21, 0, 5, 1), (149, 1190, 33, 3, 0),
            options={"batch_invariant": True}),
    HopperCase("mixed batch", 16, (1, 21, 0, 5, 1), (149, 90, 33, 3, 0)),
    HopperCase("mixed batch, 128 heads, window", 128, (1, 9, 0, 5, 1), (149, 90, 33, 3, 0),
            mask=lambda: tw.window(30, 0), sinks=True),
    HopperCase("40 sequences", 16, 2, tuple(range(0, 120, 3))),
    HopperCase("1100 sequences", 2, 1, (1, 2, 0, 3) * 275),
    HopperCase("16 queries", 32, 16, _RAGGED, G=8),
    HopperCase("16 queries, contiguous", 32, 16, page=None, G=8),
    HopperCase("one query, 64 heads on 4, contiguous", 64, 1, _RAGGED, None, G=4),
    HopperCase("5 queries, MHA, D 64, fp16", 3, 5, G=3, D=64, dtype=torch.float16),
    HopperCase("8 queries, 16 heads on 2, rising keys", 16, 8, G=2, growth=30.0),
    HopperCase("70 queries, pages of 192, window", 4, 70, page=192, G=2,
               mask=lambda: tw.window(40, 0)),
    HopperCase("12 heads on 2, 16 queries, window", 12, 16, G=2, mask=lambda: tw.window(33, 0)),
    HopperCase("GQA, left padding, sinks", 32, 3, layout="left padding", sinks=True, G=4),
    HopperCase("GQA, shuffled pages", 32, 2, layout="shuffled", G=4),
    HopperCase("GQA, batch_index", 16, 16, page=None, layout="batch_index", G=2),
    HopperCase("GQA, k and v interleaved", 16, 3, layout="interleaved", G=2),
    HopperCase("GQA, heads first", 16, 3, page=None, layout="heads first", G=2),
    HopperCase("GQA, batch invariant", 16, 4, _RAGGED, G=2, options={"batch_invariant": True}),
    HopperCase("GQA, mixed batch, sinks", 16, (1, 21, 0, 5, 1), (149, 90, 33, 3, 0), G=2,
               sinks=True),
)  # fmt: skip


_LONG = (333, 130, 64, 0, 1)
_MIXED = (100, 1, 0, 70, 63, 64, 140, 5)
_MIXED_KEYS = (149, 90, 33, 70, 3, 0, 333, 200)


def _prefill(name: str, queries: int | tuple[int, ...] = 130, **given: Any) -> HopperCase:
    given = {"lengths": _LONG, "page": 16, "G": 1, **given}
    if isinstance(queries, tuple):
        given["lengths"] = (_MIXED_KEYS * 50)[: len(queries)]
    return HopperCase(f"prefill, {name}", given.pop("H", 2), queries, **given)


# Queries that fill tiles, over keys that are found by a table.
PREFILLS = (
    _prefill("pages of 16"),
    _prefill("pages of 8", page=8),
    _prefill("pages of 24", page=24),
    _prefill("pages of 64", page=64),
    _prefill("pages of 96", page=96),
    _prefill("pages of 128", page=128),
    _prefill("pages of 192", page=192),
    _prefill("pages of 256", page=256),
    _prefill("one page", 70, page=1024, lengths=(90, 0, 1)),
    _prefill("ragged", 65, lengths=_RAGGED),
    _prefill("a query", 1, lengths=_RAGGED),
    _prefill("D 64", D=64),
    _prefill("D 64, pages of 256", D=64, page=256),
    _prefill("D 64, left padding, window", D=64, layout="left padding",
             mask=lambda: tw.window(150, 0)),
    _prefill("D 256", D=256),
    _prefill("D 256, pages of 48", D=256, page=48),
    _prefill("D 192, E 128", D=192, E=128),
    _prefill("D 40, E 200", D=40, E=200),
    _prefill("D 96", D=96),
    _prefill("fp16", dtype=torch.float16),
    _prefill("full", mask=tw.full),
    _prefill("window(40, 0)", mask=lambda: tw.window(40, 0)),
    _prefill("window(30, 5)", mask=lambda: tw.window(30, 5)),
    _prefill("window(9, 0, offset=60)", mask=lambda: tw.window(9, 0, offset=60)),
    _prefill("window(60, 0) & prefix(90)", mask=lambda: tw.window(60, 0) & tw.prefix(90)),
    _prefill("left padding", layout="left padding"),
    _prefill("shuffled", layout="shuffled", H=3),
    _prefill("k and v interleaved", layout="interleaved"),
    _prefill("k and v interleaved, heads first", layout="heads first", page=64),
    _prefill("batch_index", page=None, layout="batch_index"),
    _prefill("contiguous", page=None),
    _prefill("contiguous, rows that end in a tile", page=None, lengths=(97, 3)),
    _prefill("softcap", options={"softcap": 3.0}),
    _prefill("ALiBi", options={"alibi_slopes": torch.tensor([0.5, 0.01], device="cpu")}),
    _prefill("sinks, MHA", sinks=True, G=2),
    _prefill("scale below 0", options={"scale": -0.1}),
    _prefill("rising keys", growth=30.0),
    _prefill("falling keys", growth=-30.0),
    _prefill("rising keys, fp16, sinks", growth=30.0, dtype=torch.float16, sinks=True),
    _prefill("mixed batch", _MIXED),
    _prefill("mixed batch, D 64", _MIXED, D=64, page=64),
    _prefill("mixed batch, contiguous, sinks", _MIXED, page=None, sinks=True),
    _prefill("mixed batch, batch_index", (70, 1, 0, 5, 130), page=None, layout="batch_index",
             lengths=_LONG),
    _prefill("mixed batch, window, softcap, ALiBi", _MIXED, mask=lambda: tw.window(50, 0),
             options={"softcap": 20.0, "alibi_slopes": torch.rand(8, 2, device="cpu")}),
    _prefill("mixed batch, batch invariant", _MIXED, page=48, options={"batch_invariant": True}),
    _prefill("mixed batch, batch invariant, ALiBi", _MIXED,
             options={"batch_invariant": True, "alibi_slopes": torch.rand(8, 2, device="cpu")}),
    _prefill("135 sequences", (70, 1, 0) * 45, page=32, H=1),
)  # fmt: skip
# Each is a kernel of its own, which takes seconds to compile, and differs from others in nothing
# but the size of pages or of heads, or in a term that mixed batches have too: the emulator runs it.
_ALIKE = (
    "pages of 8", "pages of 96", "pages of 128", "pages of 192", "one page", "D 64",
    "D 64, pages of 256", "D 256", "D 40, E 200", "fp16", "softcap", "ALiBi", "sinks, MHA",
    "mixed batch, batch invariant",
)  # fmt: skip
PREFILLS_ON_GPU = tuple(x for x in PREFILLS if x.name.removeprefix("prefill, ") not in _ALIKE)


def draw(case: HopperCase, seed: int = 0) -> tuple[Tensor, tw.KVCache, dict[str, Any]]:
    """q, a cache and options, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(case.dtype)

    options: dict[str, Any] = {"mask": case.mask(), "scale": 192**-0.5, **case.options}
    D = case.D if case.G else 576
    if isinstance(case.queries, int):
        q = normal(len(case.lengths), case.queries, case.H, D)
    else:
        options["cu_seqlens_q"] = torch.tensor([0, *case.queries]).cumsum(0).int()
        # Two rows that belong to nobody.
        q = normal(sum(case.queries) + 2, case.H, D)
        q[-2:] = float("nan")
    if case.sinks:
        options["sinks"] = torch.linspace(-1.0, 3.0, case.H)
    return q, cache_of(case, normal), options


def cache_of(case: HopperCase, normal: Callable[..., Tensor]) -> tw.KVCache:
    B, capacity, G, D = len(case.lengths), max(case.lengths) + 30, case.G, case.D
    stored: dict[str, Any] = {"page_size": case.page, "dtype": case.dtype, "device": "cpu"}
    if G:
        cache = tw.KVCache.allocate(B, capacity, G, D, case.E or D, **stored)
    else:
        cache = tw.KVCache.latent(B, capacity, **stored)
    cache = _laid_out(cache, case.layout)
    unread(cache.k)
    unread(cache.v)
    keys = []
    for n in case.lengths:
        size = torch.linspace(0.0, 1.0, n)[:, None, None] * case.growth
        size = size - min(case.growth, 0.0) + 1.0 if case.growth else torch.ones(())
        keys.append((normal(n, *cache.k.shape[2:]) * size).to(case.dtype))
    k, cu = torch.cat(keys), torch.tensor([0, *case.lengths]).cumsum(0)
    cache.append(k, normal(*k.shape[:2], cache.v.shape[3]) if G else None, cu_seqlens=cu)
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
        k, v = (torch.cat([x, x[:2]]) for x in (cache.k, cache.v))
        index = torch.tensor([3, 0, 5, 1, 6])
        cache = tw.KVCache(k, k[..., :512] if cache.is_latent else v, cache.lengths,
                           batch_index=index)  # fmt: skip
    elif layout == "apart":
        # A row of storage that is wider than what it holds.
        k = torch.zeros(*cache.k.shape[:3], 640, dtype=cache.k.dtype)[..., :576]
        cache = tw.KVCache(k, k[..., :512], cache.lengths)
    elif layout == "interleaved":
        cache.k, cache.v = torch.stack([cache.k, cache.v], 1).unbind(1)
    elif layout == "heads first":
        cache.k, cache.v = (
            x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v)
        )
    return cache


def on_device(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(DEVICE)
    if not isinstance(x, tw.KVCache):
        return x
    # Values stay a view of the keys, and strides what they are.
    k, v = (_moved(t) for t in (x.k, x.v))
    moved = {name: t.to(DEVICE) for name, t in x.tensors().items() if name not in ("k", "v")}
    return tw.KVCache(k, k[..., :512] if x.is_latent else v, **moved)


def _moved(x: Tensor) -> Tensor:
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return moved.copy_(x)


def call_of(q: Tensor, cache: tw.KVCache, options: dict[str, Any]) -> CacheCall:
    terms = {name: options.get(name) for name in ("scale", "softcap", "alibi_slopes", "sinks")}
    splits = Splits(options.get("num_splits"), options.get("batch_invariant", False))
    return make_call(
        "test", q, cache, options["mask"], {**terms, "bias": None}, options.get("cu_seqlens_q"),
        options.get("max_seqlen_q"), splits,
    )  # fmt: skip


def held(case: HopperCase, seed: int = 0, backend: str = "hopper") -> None:
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
