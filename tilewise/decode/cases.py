"""Cases that attention over a cache is verified on. Free slots and pages hold NaN throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.case import Case
from ..core.mask import Mask
from ..core.mask_leaves import causal, chunked, full, prefix, tree, window
from ..core.shapes import accumulator_of
from .budget import unread
from .cache import FLOAT8, KVCache


class Shape(NamedTuple):
    """H query heads over G kv heads; `capacity` slots a sequence."""

    capacity: int = 160
    H: int = 6
    G: int = 2
    D: int = 16
    E: int = 16


_SHAPE = Shape()


@dataclass(frozen=True)
class Recipe:
    """lengths: of each sequence. queries: the same number for all, or one for each (packed).

    page: slots of a page. layout: see `_LAYOUTS`. storage: of the cache; q's dtype when None.
    """

    name: str
    queries: int | tuple[int, ...] = 1
    mask: Callable[[], Mask] = causal
    lengths: tuple[int, ...] = (149, 64, 1, 0)
    shape: Shape = _SHAPE
    page: int | None = None
    layout: str = "plain"
    storage: torch.dtype | None = None
    token_scales: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)


_MIXED = (1, 21, 0, 5, 1)
_MIXED_LENGTHS = (149, 90, 33, 3, 0)
_TREE = ((1, 3, 5, 13, 21), (1, 3, 7, 15, 31), (1, 2, 4, 8, 16), (0, 0, 0, 0, 0))
_F8 = torch.float8_e4m3fn

RECIPES = (
    Recipe("one query"),
    Recipe("one query, pages of 16", page=16),
    Recipe("pages of 1", 2, page=1),
    Recipe("pages of 7", 3, page=7),
    Recipe("pages of 160", 3, page=160),
    Recipe("five queries, causal", 5),
    Recipe("70 queries (more than keys)", 70),
    Recipe("full", 5, full),
    Recipe("window(20, 0)", 5, lambda: window(20, 0), page=16),
    Recipe("window(9, 0, offset=60)", 5, lambda: window(9, 0, offset=60)),
    Recipe("window(60, 0) & prefix(90)", 5, lambda: window(60, 0) & prefix(90), page=5),
    Recipe("prefix-LM", 5, lambda: causal() | prefix(20), page=16),
    Recipe("chunked(32)", 5, lambda: causal() & chunked(32)),
    Recipe("tree", 5, lambda: tree(torch.tensor(_TREE)), lengths=(149, 64, 9, 5), page=16),
    Recipe("mixed batch", _MIXED, lengths=_MIXED_LENGTHS),
    Recipe("mixed batch, pages of 16", _MIXED, lengths=_MIXED_LENGTHS, page=16),
    Recipe("mixed batch, window, sinks", _MIXED, lambda: window(30, 0), _MIXED_LENGTHS, page=9,
           tensors={"sinks": (6,)}),
    Recipe("batch_index", 2, layout="batch_index"),
    Recipe("left padding", 3, layout="left padding", page=16),
    Recipe("shuffled pages", 3, page=16, layout="shuffled"),
    Recipe("k and v interleaved", 3, page=16, layout="interleaved"),
    Recipe("heads first", 3, layout="heads first"),
    Recipe("softcap", 3, options={"softcap": 3.0}),
    Recipe("ALiBi [H]", 3, tensors={"alibi_slopes": (6,)}),
    Recipe("ALiBi [B, H], softcap", 3, page=16, options={"softcap": 5.0},
           tensors={"alibi_slopes": (4, 6)}),
    Recipe("bias", 3, tensors={"bias": (1, 6, 3, 160)}),
    Recipe("sinks", 3, page=16, tensors={"sinks": (6,)}),
    Recipe("scale 0.5, 3 splits", 1, options={"scale": 0.5, "num_splits": 3}),
    Recipe("batch invariant", 2, page=16, options={"batch_invariant": True}),
    Recipe("MQA 7:1, D 59, E 37", 2, shape=Shape(160, 7, 1, 59, 37), page=16),
    Recipe("MHA, D 80", 2, shape=Shape(160, 3, 3, 80, 80)),
    Recipe("32 heads on one", 1, shape=Shape(160, 32, 1, 32, 32), page=16),
    Recipe("D 576, E 512", 1, shape=Shape(70, 4, 1, 576, 512), lengths=(70, 5), page=16),
    Recipe("float8, scales [G]", 3, storage=_F8),
    Recipe("float8 e5m2, scales [B, G], pages", 3, storage=torch.float8_e5m2, page=16,
           layout="batch scales"),
    Recipe("float8, token scales, pages", 3, storage=_F8, page=16, token_scales=True),
    Recipe("float8, mixed batch, sinks", _MIXED, lengths=_MIXED_LENGTHS, storage=_F8, page=16,
           tensors={"sinks": (6,)}),
    Recipe("float8, D 128, E 64, pages", 2, shape=Shape(96, 8, 1, 128, 64), lengths=(90, 5, 0),
           storage=_F8, page=16, token_scales=True),
    Recipe("latent, 16 heads", 2, shape=Shape(96, 16, 1, 576, 512), lengths=(70, 5), page=64,
           layout="latent"),
)  # fmt: skip


# Without an lse: a sample, since all else is the same.
_OUT_ONLY = (
    "one query, pages of 16",
    "window(20, 0)",
    "tree",
    "mixed batch",
    "left padding",
    "sinks",
    "batch invariant",
    "float8, token scales, pages",
    "latent, 16 heads",
)


def cases(op: str, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every case, drawn from a fixed seed."""
    return [
        _draw(op, recipe, dtype, device, seed)
        for seed, recipe in enumerate(RECIPES)
        if (op.endswith("partial") or recipe.name in _OUT_ONLY)
        # Latents are stored in 16 bits or 8.
        and (recipe.layout != "latent" or dtype.itemsize == 2)
    ]


def _draw(op: str, recipe: Recipe, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    shape, B = recipe.shape, len(recipe.lengths)
    options: dict[str, Any] = {"mask": recipe.mask(), **recipe.options}
    if isinstance(recipe.queries, int):
        q = draw(B, recipe.queries, shape.H, shape.D, dtype=dtype)
    else:
        cu = torch.tensor([0, *recipe.queries]).cumsum(0).to(torch.int32)
        options["cu_seqlens_q"] = cu.to(device)
        # Two rows that belong to nobody.
        q = draw(sum(recipe.queries) + 2, shape.H, shape.D, dtype=dtype)
        q[-2:] = float("nan")
    cache = _cache(recipe, draw, recipe.storage or dtype)
    moved = {name: x.to(device) for name, x in cache.tensors().items()}
    if cache.is_latent:
        moved["v"] = moved["k"][..., : shape.E]
    options["cache"] = KVCache(**moved)
    tensors = {"q": q.to(device)}
    for name, size in recipe.tensors.items():
        x = draw(*size, dtype=accumulator_of(dtype)).to(device)
        tensors[name] = x.abs() if name == "alibi_slopes" else x
    return Case(op, recipe.name, tensors, options, seed)


def _cache(recipe: Recipe, draw: Callable[..., Tensor], dtype: torch.dtype) -> KVCache:
    """On the CPU, with NaN in all that is free."""
    shape, B = recipe.shape, len(recipe.lengths)
    cache = KVCache.allocate(
        B, shape.capacity, shape.G, shape.D, shape.E, page_size=recipe.page, dtype=dtype
    )
    if dtype in FLOAT8 and not recipe.token_scales:
        by_batch = recipe.layout == "batch scales"
        size = (B, shape.G) if by_batch else (shape.G,)
        # Larger and smaller than one, so that neither may be forgotten.
        cache.k_scale = torch.linspace(0.02, 0.05, B * shape.G)[: torch.Size(size).numel()]
        cache.k_scale, cache.v_scale = cache.k_scale.reshape(size), 2 * cache.k_scale.reshape(size)
    cache = _LAYOUTS.get(recipe.layout, _plain)(cache)
    for x in (cache.k, cache.v):
        unread(x)
    if cache.block_table is not None:
        P = cache.k.shape[1]
        pages = -(-torch.tensor(recipe.lengths) // P)
        column = torch.arange(cache.block_table.shape[1])
        # What lies beyond is nobody's.
        cache.block_table[column >= pages.unsqueeze(-1)] = -1
    lengths = torch.tensor([0, *recipe.lengths]).cumsum(0)
    total = int(lengths[-1])
    new = [draw(total, shape.G, x, dtype=torch.float32) for x in (shape.D, shape.E)]
    if dtype not in FLOAT8:
        new = [x.to(dtype) for x in new]
    cache.append(new[0], None if cache.is_latent else new[1], cu_seqlens=lengths)
    return cache


def _plain(cache: KVCache) -> KVCache:
    return cache


def _with_rows(cache: KVCache) -> KVCache:
    """Two rows more than sequences, which lie in another order."""
    B = cache.B
    k, v = (torch.cat([x, x[:2]]) for x in (cache.k, cache.v))
    return KVCache(k, v, cache.lengths, batch_index=torch.tensor([3, 0, 5, 1][:B]))


def _left_padded(cache: KVCache) -> KVCache:
    cache.starts = torch.tensor([100, 0, 1, 7], dtype=torch.int32)[: cache.B]
    return cache


def _shuffled(cache: KVCache) -> KVCache:
    assert cache.block_table is not None
    order = torch.randperm(cache.k.shape[0], generator=torch.Generator().manual_seed(0))
    cache.block_table = order.to(torch.int32).reshape(cache.block_table.shape)
    return cache


def _interleaved(cache: KVCache) -> KVCache:
    both = torch.stack([cache.k, cache.v], 1)
    cache.k, cache.v = both.unbind(1)
    return cache


def _heads_first(cache: KVCache) -> KVCache:
    cache.k, cache.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v))
    return cache


def _latent(cache: KVCache) -> KVCache:
    cache.v = cache.k[..., : cache.v.shape[3]]
    return cache


_LAYOUTS: dict[str, Callable[[KVCache], KVCache]] = {
    "batch_index": _with_rows,
    "left padding": _left_padded,
    "shuffled": _shuffled,
    "interleaved": _interleaved,
    "heads first": _heads_first,
    "latent": _latent,
}
