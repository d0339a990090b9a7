"""Kernels of caches touch nothing but the tensors they are given, whatever the index tensors hold.

The interpreter says what addresses a kernel loads from and stores to; each must lie in a tensor
among the launch's own arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.backends import is_interpreted
from tilewise.core.tolerance import assert_within_budget
from tilewise.decode.budget import unread
from tilewise.decode.call import Splits, make_call
from tilewise.decode.reference import cache_eager, cache_reference
from tilewise.decode.triton_append import append_tokens
from tilewise.kernels import launch as launching

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        UNDER_TEST.device != "cpu" or not is_interpreted(), reason="watches the interpreter"
    ),
]
F8 = torch.float8_e4m3fn
H, G, D, E = 4, 2, 16, 16


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x]
    return [t for part in x for t in _tensors(part)] if isinstance(x, tuple) else []


def _range(x: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first element to its last."""
    if x.numel() == 0:
        return x.data_ptr(), x.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@pytest.fixture(autouse=True)
def strays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was touched beside the arguments; index tensors are not checked on the host."""
    owned: list[tuple[int, int]] = []
    found: list[str] = []
    run, load, store = (
        launching._run, InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )  # fmt: skip

    def watched(kernel: Any, grid: Any, config: Any, arguments: Any) -> Any:
        owned[:] = [_range(x) for x in _tensors(tuple(arguments))]
        run(kernel, grid, config, arguments)

    def check(what: str, ptrs: Any, mask: Any) -> None:
        at = np.asarray(ptrs.data)[np.asarray(mask.data)].astype(np.int64)
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, dtype=bool)
        for first, end in owned:
            inside |= (at >= first) & (at + size <= end)
        if not inside.all():
            found.append(f"{what} of {int((~inside).sum())} elements")
            mask.data = np.zeros_like(mask.data)

    def watched_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        check("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def watched_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(launching, "_run", watched)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched_load)
    monkeypatch.setattr(InterpreterBuilder, "create_masked_store", watched_store)
    monkeypatch.setattr(tw.KVCache, "is_checked", lambda self, check: False)
    yield found
    assert not found, sorted(set(found))


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def cache_of(lengths: list[int], capacity: int, page: int | None, **options: Any) -> tw.KVCache:
    dtype = options.pop("dtype", torch.float32)
    cache = tw.KVCache.allocate(len(lengths), capacity, G, D, E, page_size=page, dtype=dtype)
    unread(cache.k)
    unread(cache.v)
    k, v = (torch.randn(sum(lengths), G, x) for x in (D, E))
    cache.append(k, v, cu_seqlens=ints(0, *lengths).cumsum(0))
    for name, value in options.items():
        setattr(cache, name, value)
    return cache


# A batch with rows that nobody owns, a sequence without queries and one without keys.
COUNTS, LENGTHS = [1, 3, 0, 2], [40, 33, 12, 0]


def mixed(cache: tw.KVCache, **options: Any) -> tw.Partial:
    q, cu = torch.randn(sum(COUNTS) + 3, H, D), ints(0, *COUNTS).cumsum(0)
    given = {"mask": tw.causal(), "cu_seqlens_q": cu, **options}
    got = tw.attention_with_cache_partial(q, cache, backend="triton", **given)
    assert got.out.isfinite().all() and not got.out[-3:].any()
    return got


@pytest.mark.parametrize(
    ("page", "splits"), [(None, {}), (7, {"num_splits": 3}), (32, {"batch_invariant": True})]
)
def test_a_mixed_batch_with_rows_of_nobody(page: int | None, splits: dict[str, Any]) -> None:
    mixed(cache_of(LENGTHS, 64, page), **splits)


@pytest.mark.parametrize("page", [None, 5])
def test_what_a_batch_may_have_beside(page: int | None) -> None:
    cache = cache_of(LENGTHS, 40, page)
    slopes, sinks = torch.rand(4, H), torch.randn(H)
    bias = torch.randn(4, H, 1, cache.capacity)
    mixed(cache, alibi_slopes=slopes, sinks=sinks, bias=bias, softcap=3.0, mask=tw.window(9, 0))
    bits = ints(*[[1, 3, 5]] * 4)
    mixed(cache, mask=tw.tree(bits))
    cache.starts = ints(3, 0, 12, 5)
    mixed(cache, mask=tw.window(2, 3, offset=ints(5, 90, -7, 0)))
    if page is None:
        rows = {"batch_index": ints(2, 0, 1, 1), "lengths": ints(12, 40, 33, 33)}
        k, v = cache.k[:3], cache.v[:3]
        mixed(tw.KVCache(k, v, rows["lengths"], batch_index=rows["batch_index"]))


@pytest.mark.parametrize(("page", "form"), [(32, "heads"), (None, "batch"), (16, "tokens")])
def test_float8_scales(page: int | None, form: str) -> None:
    cache = cache_of(LENGTHS, 64, page, dtype=F8)
    if form != "tokens":
        size = (G,) if form == "heads" else (4, G)
        cache = tw.KVCache(
            cache.k, cache.v, cache.lengths, cache.block_table,
            k_scale=torch.rand(size), v_scale=torch.rand(size),
        )  # fmt: skip
    mixed(cache)


@pytest.mark.parametrize("page", [None, 6, 32])
def test_wild_indices_stay_inside(page: int | None) -> None:
    """Not what they should be, and nobody checked: the result may be anything."""
    cache = cache_of(LENGTHS, 64, page)
    cache.k.nan_to_num_()
    cache.v.nan_to_num_()
    if cache.block_table is None:
        cache = tw.KVCache(cache.k, cache.v, cache.lengths, batch_index=ints(9, -4, 1 << 30, 2))
    else:
        cache.block_table[:] = torch.randint(-(1 << 31), 1 << 31, cache.block_table.shape)
    cache.lengths.copy_(ints(1 << 30, -5, 64, 2_000_000_000))
    q, k, v = torch.randn(11, H, D), torch.randn(11, G, D), torch.randn(11, G, E)
    options: dict[str, Any] = {"mask": tw.causal(), "max_seqlen_q": 8, "backend": "triton"}
    cu = ints(0, 90, -3, 90, 1 << 30)
    tw.attention_with_cache_partial(q, cache, cu_seqlens_q=cu, **options)
    append_tokens(cache, k, v, cu, None)
    q = torch.randn(4, 1, H, D)
    tw.attention_with_cache_partial(q, cache, **{**options, "batch_invariant": True})


@pytest.mark.parametrize(
    ("page", "splits"), [(16, {}), (32, {"num_splits": 2}), (None, {"batch_invariant": True})]
)
# Parts that nobody wrote are merged, too.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_indices_stay_inside(page: int | None, splits: dict[str, Any]) -> None:
    """As above, with all that a batch may have beside."""
    cache = cache_of(LENGTHS, 64, page)
    cache.k.nan_to_num_()
    cache.v.nan_to_num_()
    generator = torch.Generator().manual_seed(0)
    # All of int32, and what is not far outside.
    high = (1 << 31) - 1 if splits else 100

    def wild(*shape: int) -> Tensor:
        return torch.randint(-high, high, shape, generator=generator, dtype=torch.int32)

    cache.starts = wild(4)
    cache.lengths.copy_(wild(4))
    if cache.block_table is not None:
        cache.block_table.copy_(wild(*cache.block_table.shape))
    q, cu = torch.randn(40, H, D), wild(5)
    cu[0] = 30
    terms = {"alibi_slopes": torch.rand(4, H), "bias": torch.randn(4, H, 5, cache.capacity)}
    bounds = tw.window(5, 3, offset=wild(4)) & tw.prefix(wild(4).clamp_min(0))
    for mask, given in ((tw.causal(), {}), (bounds, terms), (tw.tree(wild(4, 3)), {})):
        tw.attention_with_cache_partial(
            q, cache, mask=mask, cu_seqlens_q=cu, backend="triton", **given, **splits
        )


@pytest.mark.parametrize("page", [None, 32, 8])
def test_a_cache_without_storage(page: int | None) -> None:
    """Whatever its tables say, there is nothing to read."""
    k, lengths = torch.zeros(0, page or 64, G, D), ints(40, 3)
    cache = tw.KVCache(k, k, lengths, ints([5] * 9, [0] * 9)) if page else None
    cache = cache or tw.KVCache(k, k, lengths, batch_index=ints(0, 3))
    for splits in ({}, {"num_splits": 2}):
        got = tw.attention_with_cache_partial(
            torch.randn(2, 1, H, D), cache, backend="triton", check=False, **splits
        )
        assert not got.out.any() and bool(got.lse.isneginf().all())
    append_tokens(cache, torch.randn(2, 1, G, D), torch.randn(2, 1, G, D), None, None)


# Parts that nobody wrote are merged, too.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_parts_of_queries_that_fall_stay_inside() -> None:
    """More units than any right `cu_seqlens_q` could make."""
    cache = tw.KVCache.allocate(3, 128, 1, D, E, dtype=torch.float32)
    cache.k.zero_()
    cache.v.zero_()
    cache.lengths.fill_(128)
    tw.attention_with_cache_partial(
        torch.randn(8, 16, D), cache, cu_seqlens_q=ints(0, 8, 0, 8), num_splits=4, max_seqlen_q=8,
        backend="triton",
    )  # fmt: skip


@pytest.mark.parametrize("page", [None, 8])
def test_without_sequences_slots_or_queries(page: int | None) -> None:
    empty = tw.KVCache.allocate(0, 16, G, D, E, page_size=page, dtype=torch.float32)
    got = tw.attention_with_cache_partial(
        torch.randn(3, H, D), empty, cu_seqlens_q=ints(0), backend="triton"
    )
    assert not got.out.any() and bool(got.lse.isneginf().all())
    small = tw.KVCache.allocate(2, 0, G, D, E, page_size=page, dtype=torch.float32)
    for M in (0, 2):
        got = tw.attention_with_cache_partial(torch.randn(2, M, H, D), small, backend="triton")
        assert not got.out.any() and bool(got.lse.isneginf().all())


def test_small_scales_of_tokens_count_in_fp16() -> None:
    """A weight of 1e-3 times a scale of 2e-5 is nothing in fp16."""
    cache = tw.KVCache.allocate(2, 200, G, D, E, dtype=F8)
    cache.append(torch.randn(2, 170, G, D), 0.01 * torch.randn(2, 170, G, E))
    q = torch.randn(2, 1, H, D).half()
    terms = dict.fromkeys(("scale", "softcap", "bias", "alibi_slopes", "sinks"))
    call = make_call("test", q, cache, tw.causal(), terms, None, None, Splits())
    got = tw.attention_with_cache(q, cache, mask=tw.causal(), backend="triton")
    assert_within_budget(got, cache_reference(call).out, cache_eager(call).out)
