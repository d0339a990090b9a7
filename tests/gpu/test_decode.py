"""Attention over a cache on a GPU: graphs, repeats, batch invariance, warm calls, odd pages."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import BACKEND, DEVICE, ints, normal
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.decode import dense_call, warm
from tilewise.decode.call import Splits, make_call
from tilewise.decode.reference import cache_eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(BACKEND != "triton", reason="caches have one backend of kernels"),
]
H, G, D = 8, 2, 128


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As users run it: nothing is read on the host, and calls are warm."""
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    warm._kept.clear()
    yield
    warm._kept.clear()


def cache_of(lengths: list[int], capacity: int, page: int | None = None) -> tw.KVCache:
    """Pages in a random order, and free slots that are NaN."""
    cache = tw.KVCache.allocate(len(lengths), capacity, G, D, page_size=page, device=DEVICE)
    if cache.block_table is not None:
        order = torch.randperm(cache.block_table.numel(), device=DEVICE)
        cache.block_table = order.int().reshape(cache.block_table.shape)
    cache.k.fill_(float("nan"))
    cache.v.fill_(float("nan"))
    k, v = (normal(sum(lengths), G, D, seed=seed) for seed in (1, 2))
    cache.append(k, v, cu_seqlens=ints(0, *lengths).cumsum(0))
    return cache


def keys_of(cache: tw.KVCache, b: int) -> tuple[Tensor, Tensor]:
    n = int(cache.lengths[b])
    k, v = (
        x[b] if cache.block_table is None else x[cache.block_table[b].long()].flatten(0, 1)
        for x in (cache.k, cache.v)
    )
    return k[:n], v[:n]


def formula(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """One query `[H, D]` over keys `[N, G, D]`."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    wide = torch.promote_types(dtype, torch.float32)
    s = torch.einsum("grd,ngd->grn", q.unflatten(0, (G, -1)), k).to(wide) * D**-0.5
    return torch.einsum("grn,ngd->grd", s.softmax(-1).to(dtype), v).flatten(0, 1)


def held(out: Tensor, q: Tensor, cache: tw.KVCache) -> None:
    for b in range(q.shape[0]):
        k, v = keys_of(cache, b)
        if not k.shape[0]:
            assert not out[b].any()
            continue
        exact, eager = (formula(q[b, 0], k, v, x) for x in (torch.float64, q.dtype))
        assert_within_budget(out[b, 0], exact, eager)


@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_captured_short_is_right_for_any_lengths(page: int | None) -> None:
    capacity = 100_352
    lengths = [100_000, 3, 0, 40_000]
    cache, q = cache_of(lengths, capacity, page), normal(4, 1, H, D)
    cache.lengths.copy_(ints(128, 1, 100, 128))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tw.attention_with_cache(q, cache, mask=tw.causal())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention_with_cache(q, cache, mask=tw.causal())
    for replayed in ([128, 1, 100, 128], lengths, [1, 100_000, 0, 0], lengths):
        # No more than there is: the rest is NaN.
        cache.lengths.copy_(ints(*map(min, replayed, lengths)))
        graph.replay()
        held(out, q, cache)


def test_a_thousand_repeats_give_the_same_bits() -> None:
    cache, q = cache_of([5000, 17, 900], 5120, 16), normal(3, 2, H, D)
    first = tw.attention_with_cache_partial(q, cache, mask=tw.causal())
    differs = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        again = tw.attention_with_cache_partial(q, cache, mask=tw.causal())
        differs += (again.out != first.out).sum() + (again.lse != first.lse).sum()
    assert int(differs) == 0


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """Batch invariance, bit for bit, over 50 batches of random neighbours."""
    own = cache_of([7001], 7168, 16)
    q = normal(1, 1, H, D, seed=9)
    options = {"mask": tw.causal(), "batch_invariant": True}
    alone = tw.attention_with_cache_partial(q, own, **options)
    generator = torch.Generator().manual_seed(0)
    assert own.block_table is not None
    for seed in range(50):
        B = int(torch.randint(2, 40, (), generator=generator, device="cpu"))
        at = int(torch.randint(0, B, (), generator=generator, device="cpu"))
        lengths = torch.randint(0, 7168, (B,), generator=generator, device="cpu").int()
        lengths[at] = 7001
        table = own.block_table.expand(B, -1).contiguous()
        cache = tw.KVCache(own.k, own.v, lengths.to(DEVICE), table)
        # Neighbours read pages that hold NaN too: theirs is not to be looked at.
        queries = normal(B, 1, H, D, seed=seed)
        queries[at] = q[0]
        got = tw.attention_with_cache_partial(queries, cache, **options)
        assert torch.equal(got.out[at], alone.out[0]) and torch.equal(got.lse[at], alone.lse[0])


@pytest.mark.parametrize("page", [None, 1, 7, 64, 256])
def test_warm_calls_are_cold_ones(page: int | None) -> None:
    """The second call takes what the first one left, on other tensors."""
    first, second = cache_of([900, 3, 2000], 2048, page), cache_of([64, 2000, 0], 2048, page)
    sinks = torch.zeros(H, device=DEVICE)
    for options in ({}, {"sinks": sinks}, {"num_splits": 1}, {"num_splits": 3}):
        q, other = normal(3, 1, H, D, seed=3), normal(3, 1, H, D, seed=4)
        cold = tw.attention_with_cache(q, first, mask=tw.causal(), **options)
        kept = len(warm._kept)
        assert kept == 1
        assert torch.equal(tw.attention_with_cache(q, first, mask=tw.causal(), **options), cold)
        got = tw.attention_with_cache(other, second, mask=tw.causal(), **options)
        assert len(warm._kept) == kept
        warm._kept.clear()
        again = tw.attention_with_cache(other, second, mask=tw.causal(), **options)
        assert torch.equal(got, again)
        warm._kept.clear()
        if "sinks" not in options:
            held(got, other, second)


@pytest.mark.parametrize("learned", ["q", "k", "v", "sinks", "alibi_slopes"])
def test_a_warm_call_that_would_learn_is_told_so(learned: str) -> None:
    cache, q = cache_of([900, 3], 1024), normal(2, 1, H, D)
    options = {
        "sinks": torch.zeros(H, device=DEVICE),
        "alibi_slopes": torch.zeros(H, device=DEVICE),
    }
    tw.attention_with_cache(q, cache, mask=tw.causal(), **options)
    {"q": q, "k": cache.k, "v": cache.v, **options}[learned].requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        tw.attention_with_cache(q, cache, mask=tw.causal(), **options)


def test_appending_with_rotary_and_float8_is_the_cpus() -> None:
    rotary = (torch.randn(64, 24, device="cpu"), torch.randn(64, 24, device="cpu"))
    new = [torch.randn(3, 5, G, D, device="cpu").bfloat16() for _ in "kv"]
    for dtype, scaled in ((torch.bfloat16, False), (torch.float8_e4m3fn, True)):
        for page in (None, 7):
            pair = []
            for device in ("cpu", DEVICE):
                cache = tw.KVCache.allocate(3, 40, G, D, page_size=page, dtype=dtype, device=device)
                for x in (cache.k, cache.v):
                    x.view(torch.uint8).zero_()
                cache.lengths.copy_(torch.tensor([3, 0, 35]))
                tables = [x.to(device) for x in rotary]
                cache.append(*(x.to(device) for x in new), rotary=tw.Rotary(*tables, True))
                pair.append(cache)
            here, there = pair
            assert torch.equal(here.lengths, there.lengths.cpu())
            for name in ("k", "v"):
                a, b = (getattr(c, name).cpu() for c in pair)
                # A product may be fused with a sum: neighbours of the last bit.
                bits = torch.uint8 if scaled else torch.int16
                apart = (a.view(bits).int() - b.view(bits).int()).abs()
                assert int(apart.max()) <= 1


@pytest.mark.parametrize("page", [None, 64])
def test_prefill_in_chunks(page: int | None) -> None:
    """Many queries: dense kernels where the cache is contiguous, the split kernel over pages."""
    cache = cache_of([700, 350, 64], 1024, page)
    q = normal(3, 300, 32, D)
    calls = {"mask": tw.causal(), "scale": 0.1}
    got = tw.attention_with_cache_partial(q, cache, **calls)
    exact = tw.attention_with_cache_partial(
        q, cache, **calls, backend="reference", out_dtype=torch.float64
    )
    terms = {"scale": 0.1, "softcap": None, "alibi_slopes": None, "bias": None, "sinks": None}
    call = make_call("test", q, cache, tw.causal(), terms, None, None, Splits())
    assert dense_call.is_faster(call) == (page is None)
    assert_within_budget(got.out, exact.out, cache_eager(call).out)
    assert_lse_within_budget(got.lse, exact.lse.double(), q.dtype)
