"""Cases of the KV cache itself: pages, appending, splits, slots that nobody uses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    INF,
    causally,
    everything,
    formula,
    is_zero,
    normal,
    on_backends,
    sparse_storage,
    visibility,
)
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

quick = pytest.mark.interpreter


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=UNDER_TEST.device)


def filled(
    keys: list[int], capacity: int, heads: int, dims: tuple[int, int], page: int | None,
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> tuple[tw.KVCache, list[Tensor], list[Tensor]]:  # fmt: skip
    """A cache with NaN in its free slots, pages in a random order, and its keys and values."""
    cache = tw.KVCache.allocate(
        len(keys), capacity, heads, *dims, page_size=page, dtype=dtype, device=UNDER_TEST.device
    )
    if page is not None and cache.block_table is not None:
        order = torch.randperm(
            cache.block_table.numel(), generator=torch.Generator().manual_seed(3), device="cpu"
        )
        cache.block_table = ints(order.tolist()).reshape(cache.block_table.shape)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    k = [normal(n, heads, dims[0], dtype=dtype, seed=seed + 2 * b) for b, n in enumerate(keys)]
    v = [normal(n, heads, dims[1], dtype=dtype, seed=seed + 2 * b + 1) for b, n in enumerate(keys)]
    cu = ints([0, *keys]).cumsum(0)
    cache.append(torch.cat(k), torch.cat(v), cu_seqlens=cu)
    return cache, k, v


def held(got: tw.Partial, q: Tensor, k: list[Tensor], v: list[Tensor], **terms: Any) -> None:
    """Every sequence against the formula over its own keys, causal."""
    for b in range(q.shape[0]):
        seen = visibility(causally, q.shape[1], k[b].shape[0])
        one = [x.unsqueeze(0) for x in (q[b], k[b], v[b])]
        exact, exact_lse = formula(*(x.double() for x in one), seen, **terms)
        eager, _ = formula(*one, seen, **terms)
        assert_within_budget(got.out[b : b + 1], exact, eager)
        assert_lse_within_budget(got.lse[b : b + 1], exact_lse, q.dtype)


def attend(q: Tensor, cache: tw.KVCache, backend: str, **options: Any) -> tw.Partial:
    options = {"mask": tw.causal(), **options}
    return tw.attention_with_cache_partial(q, cache, backend=backend, **options)


@on_backends
def test_c098_pages_around_the_32_bit_limit(backend: str, tmp_path: Path) -> None:
    """Page 65,536 begins at element 2^31: equal content gives equal results."""
    per_page = 16 * 8 * 256
    pages = 65_538
    storage = sparse_storage(tmp_path, pages * per_page, torch.bfloat16)
    both = storage.as_strided((pages, 2, 16, 8, 128), (per_page, per_page // 2, 1024, 128, 1))
    content = normal(2, 16, 8, 128, dtype=torch.bfloat16)
    q = normal(1, 1, 16, 128, dtype=torch.bfloat16).expand(3, 1, 16, 128)
    table = ints([[0], [65_535], [65_536]])
    for page in (0, 65_535, 65_536):
        both[page] = content
    cache = tw.KVCache(both[:, 0], both[:, 1], ints([16, 16, 16]), table)
    got = attend(q, cache, backend)
    held(got, q[:1], [content[0]], [content[1]])
    assert torch.equal(got.out[0], got.out[1]) and torch.equal(got.out[0], got.out[2])


@on_backends
def test_c113_reading_and_writing_interleaved_keys_and_values(backend: str) -> None:
    """k and v are views of one buffer of pages: equal to copies, in what is read and written."""
    pages, new = normal(12, 2, 4, 2, 16), normal(2, 3, 3, 2, 16, seed=5)
    table = ints([[7, 2, 9], [0, 11, 4], [3, 5, 8]])
    views = pages.clone()
    k, v = views[:, 0], views[:, 1]
    cache = tw.KVCache(k, v, ints([8, 0, 5]), table)
    copy = tw.KVCache(k.contiguous(), v.contiguous(), ints([8, 0, 5]), table)
    for one in (cache, copy):
        one.append(*new)
    assert torch.equal(views[:, 0], copy.k) and torch.equal(views[:, 1], copy.v)
    changed = (views != pages).flatten(3).any(-1).sum(2)
    assert changed.sum() == 2 * 3 * 3
    q = normal(3, 2, 4, 16)
    assert torch.equal(attend(q, cache, backend).out, attend(q, copy, backend).out)


def test_c117_writing_slots_of_a_layered_cache(tmp_path: Path) -> None:
    """Slots 2^30 elements apart: only the named ones change."""
    stride = 2**30
    storage = sparse_storage(tmp_path, 2 * stride + 4096, torch.float16)
    k, v = (storage.as_strided((3, 9, 2, 32), (stride, 64, 32, 1), at * 1024) for at in range(2))
    new = normal(2, 2, 4, 2, 32, dtype=torch.float16)
    cache = tw.KVCache(k, v, ints([0, 3]), batch_index=ints([2, 1]))
    cache.append(*new)
    assert is_zero(k[0]) and is_zero(v[0])
    for x, y in ((k, new[0]), (v, new[1])):
        assert torch.equal(x[2, :4], y[0]) and torch.equal(x[1, 3:7], y[1])
        assert is_zero(x[2, 4:]) and is_zero(x[1, :3]) and is_zero(x[1, 7:])


@on_backends
def test_c118_lengths_beyond_the_table(backend: str) -> None:
    """Exactly full is fine; one token more is refused, in reading and in appending."""
    cache, k, v = filled([32, 5], 32, 2, (16, 16), 16)
    q = normal(2, 1, 4, 16)
    held(attend(q, cache, backend), q, k, v)
    before = cache.k.clone(), cache.lengths.clone()
    one = normal(2, 1, 2, 16)
    with pytest.raises(ValueError, match="would grow to 33 tokens, but the cache holds 32"):
        cache.append(one, one)
    assert torch.equal(cache.k.isnan(), before[0].isnan()) and torch.equal(cache.lengths, before[1])
    cache.lengths.add_(1)
    with pytest.raises(ValueError, match="lengths must lie between 0 and the capacity of 32"):
        attend(q, cache, backend, check=True)


@on_backends
@pytest.mark.parametrize("new", [1, 2])
def test_c120_new_tokens_with_rotary_over_a_cache(backend: str, new: int) -> None:
    """Positions are the cache's length + i; tables of another width are refused."""
    before, D = [37, 5], 16
    angle = torch.arange(64).unsqueeze(1) * 0.1 ** torch.arange(D // 2)
    rotary = tw.Rotary(angle.cos().float(), angle.sin().float())
    cache, k, v = filled(before, 64, 4, (D, D), 16)
    added = normal(2, 2, new, 4, D, seed=7)
    cache.append(added[0], added[1], rotary=rotary)
    for b, n in enumerate(before):
        at = angle[n : n + new].unsqueeze(1).double()
        left, right = added[0, b].double().chunk(2, -1)
        turned = torch.cat(
            [left * at.cos() - right * at.sin(), left * at.sin() + right * at.cos()], -1
        )
        k[b] = torch.cat([k[b], turned.float()])
        v[b] = torch.cat([v[b], added[1, b]])
    q = normal(2, new, 16, D)
    held(attend(q, cache, backend), q, k, v)
    wide = tw.Rotary(torch.ones(64, D), torch.ones(64, D))
    with pytest.raises(ValueError, match="R <= D = 16"):
        cache.append(added[0], added[1], rotary=wide)


@on_backends
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_c122_packed_queries_over_pages_in_splits(backend: str, splits: int) -> None:
    keys, counts = [70, 3, 128], [5, 3, 2]
    cache, k, v = filled(keys, 128, 2, (16, 16), 16)
    q = normal(sum(counts), 6, 16)
    cu = ints([0, *counts]).cumsum(0)
    got = attend(q, cache, backend, cu_seqlens_q=cu, num_splits=splits)
    for b, count in enumerate(counts):
        rows = slice(int(cu[b]), int(cu[b]) + count)
        part = tw.Partial(got.out[None, rows], got.lse[None, :, rows])
        held(part, q[None, rows], [k[b]], [v[b]])


@on_backends
def test_c124_growing_pages_never_give_nan(backend: str) -> None:
    """Token by token, with and without a number of splits: never NaN, and the same each time."""
    cache, k, v = filled([1, 30], 48, 2, (16, 16), 16)
    for step in range(12):
        q, new = normal(2, 1, 4, 16, seed=step), normal(2, 2, 1, 2, 16, seed=50 + step)
        cache.append(*new)
        for b in range(2):
            k[b], v[b] = torch.cat([k[b], new[0, b]]), torch.cat([v[b], new[1, b]])
        for splits in (None, 1, 3):
            held(attend(q, cache, backend, num_splits=splits), q, k, v)


@quick
@on_backends
@pytest.mark.parametrize("page", [1, 7, 16, 128, 256])
def test_c125_the_page_size_changes_nothing(backend: str, page: int) -> None:
    keys = [40, 9] if UNDER_TEST.backend == "triton" else [300, 9]
    contiguous, k, v = filled(keys, max(keys), 2, (16, 16), None)
    cache, _, _ = filled(keys, max(keys), 2, (16, 16), page)
    q = normal(2, 2, 4, 16)
    got = attend(q, cache, backend)
    held(got, q, k, v)
    assert torch.equal(got.out, attend(q, contiguous, backend).out)


@on_backends
@pytest.mark.parametrize("kv_len", [1, 2, 7, 8, 9, 15, 16, 17])
def test_c126_fewer_keys_than_a_page_in_pages(backend: str, kv_len: int) -> None:
    cache, k, v = filled([kv_len, 17], 32, 2, (64, 64), 16, torch.float16)
    q = normal(2, 8, 14, 64, dtype=torch.float16)
    held(attend(q, cache, backend), q, k, v)


@on_backends
@pytest.mark.parametrize("used", [0, 1, 15, 16, 17])
def test_c127_a_last_page_of_any_fill(backend: str, used: int) -> None:
    """Lengths say how full the last page is, so that no number can be out of its range."""
    cache, k, v = filled([used, 9], 32, 2, (8, 8), 16)
    q = normal(2, 1, 4, 8)
    held(attend(q, cache, backend), q, k, v)
    cache.lengths[0] = -1
    with pytest.raises(ValueError, match="lengths must lie between 0"):
        attend(q, cache, backend, check=True)


@on_backends
def test_c131_length_zero_in_a_latent_cache(backend: str) -> None:
    cache, k, v = filled([0, 33, 0, 1], 40, 1, (576, 512), 8, torch.bfloat16)
    q = normal(4, 1, 4, 576, dtype=torch.bfloat16)
    got = attend(q, cache, backend)
    held(got, q, k, v)
    empty = cache.lengths == 0
    assert is_zero(got.out[empty]) and bool(got.lse[empty].isneginf().all())


@on_backends
def test_c132_a_table_without_columns(backend: str) -> None:
    k = normal(0, 64, 1, 576, dtype=torch.bfloat16)
    cache = tw.KVCache(k, k[..., :512], ints([0] * 16), ints([[]] * 16).reshape(16, 0))
    got = attend(normal(16, 1, 16, 576, dtype=torch.bfloat16), cache, backend)
    assert got.out.shape == (16, 1, 16, 512)
    assert is_zero(got.out) and bool(got.lse.isneginf().all())


@on_backends
def test_c134_unused_slots_of_a_graph_are_written(backend: str) -> None:
    """One request among 1024 slots, the caller's buffer full of NaN."""
    slots, real = 1024, 700
    keys = [0] * slots
    keys[real] = 3
    cache, k, v = filled(keys, 4, 2, (8, 8), 4)
    q = normal(slots, 1, 4, 8)
    out = torch.full_like(q, float("nan"))
    assert tw.attention_with_cache(q, cache, out=out, backend=backend) is out
    got = attend(q, cache, backend)
    assert torch.equal(out, got.out)
    held(tw.Partial(out[real][None], got.lse[real][None]), q[real][None], [k[real]], [v[real]])
    others = torch.arange(slots) != real
    assert is_zero(out[others]) and bool((got.lse[others] == -INF).all())


@on_backends
@pytest.mark.parametrize("drafted", [1, 4])
def test_c136_drafts_over_pages_of_any_size(backend: str, drafted: int) -> None:
    """Speculative decoding with pages of 1 and of 16: the same numbers."""
    keys, outs = [70, 33], []
    q = normal(2, drafted, 4, 16)
    for page in (1, 16):
        cache, k, v = filled(keys, 80, 2, (16, 16), page)
        got = attend(q, cache, backend)
        held(got, q, k, v)
        outs.append(got.out)
    assert torch.equal(*outs)


@on_backends
@pytest.mark.parametrize("page", [1, 48, 64, 128, 200])
@pytest.mark.parametrize("keys", [100, 300])
def test_c139_pages_at_wider_keys_than_values(backend: str, keys: int, page: int) -> None:
    cache, k, v = filled([keys, 1], keys, 4, (192, 128), page, torch.bfloat16)
    q = normal(2, 2, 4, 192, dtype=torch.bfloat16)
    held(attend(q, cache, backend), q, k, v)


@on_backends
def test_c149_any_ratio_of_heads_in_decode(backend: str) -> None:
    for heads in ((12, 2), (3, 1), (5, 1), (12, 4), (7, 1), (12, 1)):
        cache, k, v = filled([129, 4], 140, heads[1], (16, 16), 16)
        q = normal(2, 1, heads[0], 16)
        held(attend(q, cache, backend), q, k, v)


@on_backends
def test_c166_slopes_of_a_decode_step_are_the_last_row(backend: str) -> None:
    """ALiBi over a cache is the last row of the whole matrix, for each sequence by its length."""
    keys = [40, 17]
    cache, k, v = filled(keys, 48, 3, (16, 16), 16)
    q, slopes = normal(2, 1, 6, 16), torch.rand(2, 6)
    got = attend(q, cache, backend, alibi_slopes=slopes)
    for b, n in enumerate(keys):
        bias = -slopes[b].view(6, 1, 1) * (n - 1 - torch.arange(n)).abs()
        one = [x.unsqueeze(0) for x in (q[b], k[b], v[b])]
        seen = visibility(everything, 1, n)
        exact, exact_lse = formula(*(x.double() for x in one), seen, bias=bias.double())
        eager, _ = formula(*one, seen, bias=bias)
        assert_within_budget(got.out[b : b + 1], exact, eager)
        assert_lse_within_budget(got.lse[b : b + 1], exact_lse, torch.float32)
