"""Appending and attending in one graph of torch.compile or torch.export: equal to eager."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.decode.budget import unread

pytestmark = pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of graphs on the CPU")
B, N, H, G, D, E, RANK = 2, 24, 6, 2, 16, 8, 12
F8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain(page: int | None = None, dtype: torch.dtype = torch.float32) -> tw.KVCache:
    cache = tw.KVCache.allocate(B, N, G, D, E, page_size=page, dtype=dtype)
    unread(cache.k)
    unread(cache.v)
    return cache


def interleaved() -> tw.KVCache:
    both = torch.full((8, 2, 6, G, D), float("nan"))
    return tw.KVCache(both[:, 0], both[:, 1], ints(0, 0), ints([7, 2, 4, 1], [3, 0, 6, 5]))


def rows() -> tw.KVCache:
    cache = tw.KVCache.allocate(4, N, G, D, E, dtype=torch.float32)
    return tw.KVCache(cache.k, cache.v, ints(0, 0), batch_index=ints(3, 1), starts=ints(0, 2))


def fixed_scales() -> tw.KVCache:
    cache = plain(8, F8)
    scales = torch.rand(G), torch.rand(G)
    return tw.KVCache(cache.k, cache.v, cache.lengths, cache.block_table, None, None, *scales)


def latent(dtype: torch.dtype = torch.float32) -> tw.KVCache:
    cache = tw.KVCache.latent(B, N, rank=RANK, rope_dim=D - RANK, page_size=8, dtype=dtype)
    unread(cache.k)
    return cache


CACHES: dict[str, Callable[[], tw.KVCache]] = {
    "contiguous": plain,
    "pages": lambda: plain(5),
    "pages of one": lambda: plain(1, torch.bfloat16),
    "interleaved": interleaved,
    "rows": rows,
    "float8": lambda: plain(8, F8),
    "fixed scales": fixed_scales,
    "latent": latent,
    "latent float8": lambda: latent(F8),
}
ANGLE = torch.arange(N).unsqueeze(1) * 0.1 ** torch.arange(D // 4)
TABLES = ANGLE.cos().float(), ANGLE.sin().float()


def tokens(cache: tw.KVCache, *shape: int) -> tuple[Tensor, Tensor | None]:
    """New keys and values for a cache."""
    dtype = torch.float32 if cache.k.dtype == F8 else cache.k.dtype
    k, v = (torch.randn(*shape, *x.shape[2:], dtype=dtype) for x in (cache.k, cache.v))
    return k, None if cache.is_latent else v


def bits(cache: tw.KVCache) -> list[Tensor]:
    """All that is stored, as bytes: NaN equals NaN."""
    return [x.contiguous().view(torch.uint8).clone() for x in cache.tensors().values()]


def assert_same_bits(cache: tw.KVCache, other: tw.KVCache) -> None:
    for x, y in zip(bits(cache), bits(other), strict=True):
        assert torch.equal(x, y)


def copied(cache: tw.KVCache) -> tw.KVCache:
    """The same contents and aliases in other memory."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        own = storages.setdefault(storage.data_ptr(), storage.clone())
        return torch.empty(0, dtype=x.dtype).set_(own, x.storage_offset(), x.shape, x.stride())

    return tw.KVCache(**{name: copy(x) for name, x in cache.tensors().items()})


def step(q: Tensor, cache: tw.KVCache, k: Tensor, v: Tensor | None, **options: Any) -> Tensor:
    cache.append(k, v, **options)
    return tw.attention_with_cache(q, cache, mask=tw.causal(), scale=0.3)


@pytest.mark.parametrize("name", CACHES)
def test_steps_in_one_graph_are_eager_ones(name: str) -> None:
    """The cache comes from outside, as an attribute of a model would, and grows step by step."""
    cache = CACHES[name]()
    cache.append(*tokens(cache, B, 3))
    other = copied(cache)
    rotary = tw.Rotary(*TABLES, interleaved=True)
    compiled = torch.compile(
        lambda q, k, v: step(q, cache, k, v, rotary=rotary), fullgraph=True, backend="aot_eager"
    )
    for _ in range(3):
        new = tokens(cache, B, 2)
        q = torch.randn(B, 2, H, D, dtype=new[0].dtype)
        assert torch.equal(compiled(q, *new), step(q, other, *new, rotary=rotary))
        assert_same_bits(cache, other)
    assert cache.lengths.tolist() == [9, 9]


def test_packed_steps_of_any_lengths_in_one_graph() -> None:
    cache = plain(5)
    other = copied(cache)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, first: Tensor) -> Tensor:
        seen = tw.KVCache(cache.k, cache.v, cache.lengths, cache.block_table)
        rotary = tw.Rotary(*TABLES, first=first)
        seen.append(k, v, cu_seqlens=cu, rotary=rotary)
        return tw.attention_with_cache(q, seen, mask=tw.causal(), cu_seqlens_q=cu)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ((3, 4), (1, 9), (7, 2)):
        T = sum(counts) + 1
        k, v = tokens(cache, T)
        assert v is not None
        cu, q = ints(0, *counts).cumsum(0), torch.randn(T, H, D)
        other.append(k, v, cu_seqlens=cu, rotary=tw.Rotary(*TABLES, first=ints(2, 0)))
        expected = tw.attention_with_cache(q, other, mask=tw.causal(), cu_seqlens_q=cu)
        assert torch.equal(compiled(q, k, v, cu, ints(2, 0)), expected)
        assert_same_bits(cache, other)


def test_one_graph_serves_any_batch_and_any_number_of_tokens() -> None:
    """What an engine varies, marked as such: PyTorch refuses to compile where any is a constant."""
    cache = tw.KVCache.allocate(9, N, G, D, E, page_size=8, dtype=torch.float32)
    cache.k.normal_()
    cache.v.normal_()
    assert cache.block_table is not None

    def packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, lengths: Tensor, table: Tensor) -> Any:
        seen = tw.KVCache(cache.k, cache.v, lengths, table)
        seen.append(k, v, cu_seqlens=cu)
        options = {"mask": tw.causal(), "cu_seqlens_q": cu, "max_seqlen_q": 9}
        return tw.attention_with_cache_partial(q, seen, **options)

    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    for counts in ((3, 4), (1, 9, 2), (1, 1, 1, 1, 1)):
        n, T = len(counts), sum(counts)
        given = (
            torch.randn(T, H, D), torch.randn(T, G, D), torch.randn(T, G, E),
            ints(0, *counts).cumsum(0), ints(*range(n)), cache.block_table[:n].clone(),
        )  # fmt: skip
        for x in given:
            torch._dynamo.mark_dynamic(x, 0)
        lengths = given[4].clone()
        got = compiled(*given)
        assert given[4].tolist() == [b + count for b, count in enumerate(counts)]
        expected = packed(*given[:4], lengths, given[5])
        assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_full_cache_is_told_so_from_within_the_graph_and_stays_as_it_is() -> None:
    cache = plain(8)
    cache.append(*tokens(cache, B, N - 1))
    compiled = torch.compile(
        lambda q, k, v: step(q, cache, k, v), fullgraph=True, backend="aot_eager"
    )
    q, (k, v) = torch.randn(B, 1, H, D), tokens(cache, B, 1)
    compiled(q, k, v)
    before = copied(cache)
    with pytest.raises(ValueError, match="append: sequence 0 would grow to 25 tokens"):
        compiled(q, k, v)
    assert_same_bits(cache, before)
    assert cache.block_table is not None
    cache.block_table[1, 0] = 99
    cache.rewind(1)
    attend = torch.compile(
        lambda q: tw.attention_with_cache(q, cache), fullgraph=True, backend="aot_eager"
    )
    wrong = r"block_table must hold indices in \[0, 6\), got \[99\]"
    with pytest.raises(ValueError, match=wrong):
        compiled(q, k, v)
    with pytest.raises(ValueError, match=wrong):
        attend(q)


def test_values_that_are_left_out_are_missed_in_a_graph_too() -> None:
    cache, one = plain(), torch.randn(B, 1, G, D)
    append = torch.compile(lambda k, v: cache.append(k, v), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="v must be None for a latent cache"):
        append(one, None)
    with pytest.raises(Exception, match=r"k must be \[B, L, 2, 16\]"):
        append(one[..., :8], one[..., :8])


class Layer(nn.Module):
    """One layer's cache in buffers, as an exported decoder has it."""

    def __init__(self, cache: tw.KVCache) -> None:
        super().__init__()
        for name, x in cache.tensors().items():
            self.register_buffer(name, x)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return step(q, tw.KVCache(**dict(self.named_buffers())), k, v)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_step_writes_its_buffers(strict: bool) -> None:
    cache = plain(8)
    cache.append(*tokens(cache, B, 3))
    other = copied(cache)
    q, (k, v) = torch.randn(B, 1, H, D), tokens(cache, B, 1)
    assert v is not None
    program = torch.export.export(Layer(cache), (q, k, v), strict=strict)
    called = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert "tilewise.cache_append.default" in called
    exported = program.module()
    for _ in range(3):
        q, (k, v) = torch.randn(B, 1, H, D), tokens(cache, B, 1)
        assert torch.equal(exported(q, k, v), step(q, other, k, v))
    held = tw.KVCache(**dict(exported.named_buffers()))
    assert_same_bits(held, other)


@pytest.mark.parametrize("name", ["pages", "float8", "fixed scales", "latent"])
def test_the_op_is_what_its_schema_says(name: str) -> None:
    cache = CACHES[name]()
    k, v = tokens(cache, 5)
    scales = cache.k_scale, cache.v_scale
    chosen, fixed = (scales, (None, None)) if cache.has_token_scales else ((None, None), scales)
    given = (
        cache.k, None if v is None else cache.v, cache.lengths, *chosen, *fixed, cache.block_table,
        None, k, v, ints(0, 2, 5), *TABLES, None, False, None,
    )  # fmt: skip
    tests = ["test_faketensor", "test_aot_dispatch_dynamic"]
    if cache.k.dtype != F8:
        # Its comparison knows no float8.
        tests.append("test_schema")
    op = torch.ops.tilewise.cache_append.default
    found = torch.library.opcheck(op, given, test_utils=tests)
    assert set(found.values()) == {"SUCCESS"}
