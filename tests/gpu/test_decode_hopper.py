"""Caches on Hopper: ragged shapes within the budget, graphs, repeats, neighbours, and a
guard against a protocol that hangs."""

import faulthandler
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import DEVICE, ints
from tests.gpu.hopper_caches import (
    CASES,
    PREFILLS_ON_GPU,
    HopperCase,
    call_of,
    draw,
    held,
    on_device,
)
from tilewise.core.backends import hopper_problem
from tilewise.core.tolerance import assert_within_budget
from tilewise.decode import warm
from tilewise.decode.reference import cache_eager, cache_reference


def _is_here() -> bool:
    return torch.cuda.is_available() and not hopper_problem(DEVICE)


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _is_here(), reason="needs a Hopper GPU"),
]


@pytest.fixture(autouse=True)
def no_hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    warm._kept.clear()
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
    warm._kept.clear()


@pytest.mark.parametrize("case", [*CASES, *PREFILLS_ON_GPU], ids=lambda case: case.name)
def test_within_the_budget(case: HopperCase) -> None:
    held(case)


def here(case: HopperCase, seed: int = 0) -> tuple[Tensor, tw.KVCache, dict[str, Any]]:
    """q, a cache and options, on the GPU."""
    q, cache, options = draw(case, seed)
    return on_device(q), on_device(cache), {name: on_device(x) for name, x in options.items()}


def test_auto_takes_it_for_many_rows() -> None:
    q, cache, options = here(HopperCase("auto", 128))
    assert tw.explain_cache_backend(q, cache, **options).name == "hopper"
    chosen = tw.attention_with_cache(q, cache, **options)
    named = tw.attention_with_cache(q, cache, **options, backend="hopper")
    other = tw.attention_with_cache(q, cache, **options, backend="triton")
    # Each backend rounds in its own way, and a warm call is that of its backend.
    assert torch.equal(chosen, named) and not torch.equal(chosen, other)
    assert torch.equal(tw.attention_with_cache(q, cache, **options, backend="triton"), other)
    assert tw.explain_cache_backend(q[:, :, :16], cache, **options).name == "triton"


@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("queries", [2, 70])
def test_a_graph_captured_short_is_right_for_any_lengths(queries: int, page: int | None) -> None:
    # Many queries over keys and values, few over latents.
    G = 2 if queries > 2 else 0
    case = HopperCase("graph", 16, queries, (700, 3, 0, 333, 33, 64, 1), page, G=G)
    q, cache, options = draw(case)
    q_here, cache_here = on_device(q), on_device(cache)
    cache_here.lengths.copy_(ints(1, 1, 0, 32, 1, 0, 1))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        tw.attention_with_cache(q_here, cache_here, **options, backend="hopper")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tw.attention_with_cache(q_here, cache_here, **options, backend="hopper")
    for lengths in (case.lengths, (0, 0, 0, 0, 0, 0, 0), (65, 3, 0, 96, 2, 64, 0), case.lengths):
        cache.lengths.copy_(torch.tensor(lengths))
        cache_here.lengths.copy_(ints(*lengths))
        graph.replay()
        call = call_of(q, cache, options)
        assert_within_budget(out.cpu(), cache_reference(call).out, cache_eager(call).out)


@pytest.mark.parametrize(
    "case",
    [
        HopperCase("repeats", 128, 2, (5000, 17, 900)),
        HopperCase("repeats of a prefill", 16, (300, 1, 512), (5000, 17, 900), 16, G=4),
    ],
    ids=lambda case: case.name,
)
def test_repeats_give_the_same_bits(case: HopperCase) -> None:
    q, cache, options = here(case)
    if case.G:
        # Rows that nobody owns are drawn as NaN.
        q = q[:-2]
    first = tw.attention_with_cache_partial(q, cache, **options, backend="hopper")
    differs = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(500):
        again = tw.attention_with_cache_partial(q, cache, **options, backend="hopper")
        differs += (again.out != first.out).sum() + (again.lse != first.lse).sum()
    assert int(differs) == 0


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    case = HopperCase("neighbours", 16, 2, (3001,), options={"batch_invariant": True})
    q, own, options = here(case)
    alone = tw.attention_with_cache_partial(q, own, **options, backend="hopper")
    generator = torch.Generator().manual_seed(0)
    assert own.block_table is not None
    for _ in range(30):
        B = int(torch.randint(2, 40, (), generator=generator, device="cpu"))
        at = int(torch.randint(0, B, (), generator=generator, device="cpu"))
        lengths = torch.randint(0, 3001, (B,), generator=generator, device="cpu").int()
        lengths[at] = 3001
        table = own.block_table.expand(B, -1).contiguous()
        cache = tw.KVCache(own.k, own.v, lengths.to(DEVICE), table)
        queries = torch.randn(B, *q.shape[1:], device=DEVICE).to(q.dtype)
        queries[at] = q[0]
        got = tw.attention_with_cache_partial(queries, cache, **options, backend="hopper")
        assert torch.equal(got.out[at], alone.out[0]) and torch.equal(got.lse[at], alone.lse[0])


_LENGTHS, _FIVE = (900, 3, 333), (900, 3, 333, 0, 64)


@pytest.mark.parametrize(
    "case",
    [
        HopperCase("latent", 16, 2, _LENGTHS, sinks=True),
        HopperCase("pages of 16", 4, 130, _LENGTHS, 16, sinks=True, G=2),
        HopperCase("contiguous", 4, 130, _LENGTHS, None, G=2),
        HopperCase("batch_index", 4, 130, _FIVE, None, layout="batch_index", G=2),
        HopperCase("mixed batch", 4, (130, 1, 70), _LENGTHS, 16, G=2),
        HopperCase("D 40", 4, 130, _LENGTHS, 16, G=2, D=40),
    ],
    ids=lambda case: case.name,
)
def test_warm_calls_are_cold_ones(case: HopperCase) -> None:
    q, first, options = here(case)
    other, second, _ = here(case, seed=1)
    tw.attention_with_cache(q, first, **options, backend="hopper")
    assert len(warm._kept) == 1
    got = tw.attention_with_cache(other, second, **options, backend="hopper")
    assert len(warm._kept) == 1
    warm._kept.clear()
    assert torch.equal(tw.attention_with_cache(other, second, **options, backend="hopper"), got)


def test_many_queries_over_contiguous_keys_are_warm() -> None:
    """Dense attention's kernel runs them, whichever backend was named."""
    case = HopperCase("contiguous", 32, 512, _LENGTHS, None, G=8)
    q, first, options = here(case)
    other, second, _ = here(case, seed=1)
    for backend in ("auto", "triton", "hopper"):
        warm._kept.clear()
        tw.attention_with_cache(q, first, **options, backend=backend)
        assert len(warm._kept) == 1
        got = tw.attention_with_cache(other, second, **options, backend=backend)
        assert len(warm._kept) == 1
        call = call_of(*draw(case, seed=1))
        assert_within_budget(got.cpu(), cache_reference(call).out, cache_eager(call).out)
