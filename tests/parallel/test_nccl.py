"""What the other files here test over CPUs, over GPUs with NCCL: `--device cuda` and two or four.

Tensors and oracles are on the CPU; every rank runs its shards on a GPU of its own, on whatever
backend the library takes there. `-n 12` compiles on as many cores; messages take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.parallel import jobs
from tests.parallel import test_attention as cases
from tests.parallel.over_ranks import Way, check_over_ranks, check_unshard, outcome
from tests.parallel.ranks import GPU_MESHES, GPU_RANKS, RankError
from tilewise.core.tolerance import assert_within_budget
from tilewise.parallel import document_zigzag, volumes, zigzag
from tilewise.parallel.volumes import Shape

R = GPU_RANKS.world or 2
COUNTS = tuple(sorted({1, 2, R}))
MESHES = GPU_MESHES[R]


@pytest.fixture(autouse=True)
def on_the_host() -> Iterator[None]:
    usual = torch.get_default_device()
    torch.set_default_device("cpu")
    yield
    torch.set_default_device(usual)


def way_of(schedule: str, layout: str, ranks: int = R, size: int = cases.S) -> Way:
    return replace(cases.way_of(schedule, layout, ranks, size), pool="nccl")


def heads_of(schedule: str) -> tuple[int, int]:
    """Heads that the ranks divide, where dropout counts them."""
    return (8, 2) if schedule in ("ulysses", "usp") else (cases.H, cases.G)


# ---------------------------------------------------------------- the tables of test_attention.py


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_rings(layout: str, mask: str) -> None:
    check_over_ranks(way_of("ring", layout), cases.qkv(), mask=cases.MASKS[mask]())


@pytest.mark.parametrize("mask", cases.MASKS)
@pytest.mark.parametrize("layout", ("zigzag", "striped", "documents"))
@pytest.mark.parametrize("schedule", ("all_gather", "ulysses", "usp"))
def test_other_schedules(schedule: str, layout: str, mask: str) -> None:
    check_over_ranks(way_of(schedule, layout), cases.qkv(), mask=cases.MASKS[mask]())


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes(mesh: tuple[int, int]) -> None:
    way = replace(way_of("usp", "zigzag"), mesh=mesh)
    check_over_ranks(way, cases.qkv(), mask=tw.causal())


@pytest.mark.parametrize("schedule", cases.ONE_DIM)
@pytest.mark.parametrize("ranks", [n for n in COUNTS if n < R])
def test_fewer_ranks(schedule: str, ranks: int) -> None:
    check_over_ranks(way_of(schedule, "zigzag", ranks), cases.qkv(), mask=tw.causal())


@pytest.mark.parametrize("mask", ("causal", "documents", "by head", "predicate"))
@pytest.mark.parametrize("term", cases.TERMS)
@pytest.mark.parametrize("schedule", ("ring", "all_gather"))
def test_every_term(schedule: str, term: str, mask: str) -> None:
    tensors, options = cases.terms_of(term, cases.qkv(), cases.S)
    way = way_of(schedule, "documents" if mask == "documents" else "zigzag")
    check_over_ranks(way, tensors, mask=cases.MASKS[mask](), **options)


@pytest.mark.parametrize("mask", ("causal", "documents"))
@pytest.mark.parametrize("term", ("softcap", "alibi by row", "key bias", "sinks", "dropout"))
@pytest.mark.parametrize("schedule", ("ulysses", "usp"))
def test_every_term_where_heads_are_traded(schedule: str, term: str, mask: str) -> None:
    tensors = cases.qkv(heads=heads_of(schedule))
    tensors, options = cases.terms_of(term, tensors, cases.S)
    check_over_ranks(way_of(schedule, "zigzag"), tensors, mask=cases.MASKS[mask](), **options)


@pytest.mark.parametrize("schedule", cases.ALL)
def test_sinks_alone_keep_an_empty_row(schedule: str) -> None:
    tensors, _ = cases.terms_of("sinks", cases.qkv(), cases.S)
    check_over_ranks(way_of(schedule, "zigzag"), tensors, mask=tw.key_padding([0, 7]))


@pytest.mark.parametrize("heads", [(6, 6), (6, 1), (8, 2), (7, 7), (3, 3), (12, 4), (2, 1)])
@pytest.mark.parametrize("schedule", ("ulysses", "usp"))
def test_heads_of_any_number(schedule: str, heads: tuple[int, int]) -> None:
    check_over_ranks(way_of(schedule, "zigzag"), cases.qkv(heads=heads), mask=tw.causal())


@pytest.mark.parametrize("size", (0, 1, 3, 7))
@pytest.mark.parametrize("schedule", cases.ALL)
def test_c226_fewer_tokens_than_chunks(schedule: str, size: int) -> None:
    way = way_of(schedule, "zigzag", size=size)
    check_over_ranks(way, cases.qkv(size), mask=tw.causal())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("schedule", cases.ALL)
def test_c224_c228_dtypes(schedule: str, dtype: torch.dtype) -> None:
    way, tensors = way_of(schedule, "zigzag"), cases.qkv(dtype=dtype)
    check_over_ranks(way, tensors, mask=tw.causal())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("schedule", cases.ALL)
def test_c219_a_partial_in_fp32(schedule: str, dtype: torch.dtype) -> None:
    way, tensors = way_of(schedule, "zigzag"), cases.qkv(dtype=dtype)
    check_over_ranks(way, tensors, mask=tw.causal(), out_dtype=torch.float32)


@pytest.mark.parametrize("schedule", cases.ALL)
def test_two_runs_are_bitwise_equal(schedule: str) -> None:
    tensors, options = cases.terms_of("sinks", cases.qkv(dtype=torch.bfloat16), cases.S)
    way = way_of(schedule, "striped")
    options |= {"mask": tw.causal(), "deterministic": True}
    first, second = (outcome(way, tensors, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("schedule", cases.ALL)
def test_dropout_keeps_the_bits_of_one_rank(schedule: str) -> None:
    """v is the identity, so out shows each probability: the same are 0 whatever the schedule."""
    size = 16
    tensors = {"q": torch.randn(2, size, 4, 8), "k": torch.randn(2, size, 2, 8)}
    tensors["v"] = torch.eye(size).reshape(1, size, 1, size).expand(2, size, 2, size).contiguous()
    alone = outcome(way_of("ring", "zigzag", 1, size), tensors, seed=5, dropout_p=0.4)[0]
    got = outcome(way_of(schedule, "zigzag", size=size), tensors, seed=5, dropout_p=0.4)[0]
    assert torch.equal(got == 0, alone == 0)
    assert 0.3 < float((got == 0).double().mean()) < 0.5


@pytest.mark.parametrize("index", range(60))
def test_any_combination(index: int) -> None:
    way, *call = cases.combination(index, COUNTS, (R,))
    cases.check_combination(index, replace(way, pool="nccl"), *call)


# ---------------------------------------------------------------- tiles of the kernels' own size

LONG, LONG_EDGES = 600, [0, 200, 201, 440, 570]
LONG_MASKS = {
    "full": tw.full,
    "causal": tw.causal,
    "window": lambda: tw.window(200, 0),
    "documents": lambda: tw.documents(LONG_EDGES) & tw.causal(),
}


@pytest.mark.parametrize("mask", LONG_MASKS)
@pytest.mark.parametrize("schedule", cases.ALL)
def test_long(schedule: str, mask: str) -> None:
    """Whole tiles of every kind, in bf16 at head dim 128: what is timed."""
    way = way_of(schedule, "zigzag", size=LONG)
    if mask == "documents":
        way = replace(way, layout=document_zigzag(LONG_EDGES, R, LONG))
    heads = {"q": 4, "k": 2, "v": 2}
    tensors = {n: torch.randn(1, LONG, h, 128).to(torch.bfloat16) for n, h in heads.items()}
    check_over_ranks(way, tensors, mask=LONG_MASKS[mask]())


# ---------------------------------------------------------------- what holds between ranks


@pytest.mark.parametrize("schedule", ("ring", "all_gather", "ulysses"))
def test_bytes_received_are_those_of_the_formula(schedule: str) -> None:
    heads = (12, 12) if schedule == "ulysses" else (4, 2)
    found = GPU_RANKS.run(
        R, jobs.traffic, way_of(schedule, "zigzag", size=48), jobs.qkv(48, heads), tw.full()
    )
    volume = getattr(volumes, schedule)(Shape(1, 48, *heads, 8, 8, 4), R)
    for forward, backward in found:
        assert (sum(forward.values()), sum(backward.values())) == (volume.forward, volume.backward)


@pytest.mark.parametrize("schedule", cases.ONE_DIM)
def test_the_host_never_waits(schedule: str) -> None:
    GPU_RANKS.run(
        R, jobs.without_waiting, way_of(schedule, "zigzag", size=48), jobs.qkv(48, (8, 4))
    )


@pytest.mark.parametrize("what", ("mask", "mask tensors", "schedule", "scale", "dtype"))
def test_ranks_that_disagree_are_told_so(what: str) -> None:
    way = way_of("ring", "zigzag", size=8)
    with pytest.raises(RankError, match="ranks disagree on") as caught:
        GPU_RANKS.run(R, jobs.differing, way, what)
    assert caught.value.kinds == dict.fromkeys(range(R), "ValueError")


def test_one_rank_s_mistake_is_told_to_all() -> None:
    with pytest.raises(RankError, match="rank 1 of this call failed") as caught:
        GPU_RANKS.run(R, jobs.differing, way_of("ring", "zigzag", size=9), "length")
    kinds = dict.fromkeys(range(R), "RuntimeError") | {1: "ValueError"}
    assert caught.value.kinds == kinds


@pytest.mark.parametrize("how", ("plain", "compile", "checkpoint", "fsdp"))
def test_a_block_of_a_model(how: str) -> None:
    layout, x = zigzag(48, R), torch.randn(1, 48, 32)
    exact, eager = (
        jobs.gradients_of_a_block(x.to(dtype)) for dtype in (torch.float64, torch.float32)
    )
    for found in GPU_RANKS.run(R, jobs.block_gradients, layout, x, how):
        for got, want, plain in zip(found, exact, eager, strict=True):
            floor = 16 * torch.finfo(torch.float32).eps * float(want.abs().max())
            assert_within_budget(got, want, plain, name=how, floor=floor)


@pytest.mark.parametrize("ranks", COUNTS)
def test_unshard_and_its_gradient(ranks: int) -> None:
    check_unshard(GPU_RANKS, ranks, jobs.unsharded)


@pytest.mark.parametrize("M", (1, 3))
@pytest.mark.parametrize("layout", ("contiguous", "striped"))
def test_a_spread_cache_is_the_whole_cache(layout: str, M: int) -> None:
    # At collection it would make its tensors on a GPU.
    from tests.parallel import test_decode as decoding

    lengths, x = torch.tensor([decoding.SLOTS, 0, 17]), decoding.tensors(M)
    options: dict[str, Any] = {"mask": tw.causal()}
    call: dict[str, Any] = {**options, "lengths": lengths, "sinks": torch.randn(4)}
    found = GPU_RANKS.run(R, jobs.decoded, decoding.LAYOUTS[layout](R), x, call)
    wide = {n: t.double() for n, t in x.items()}
    exact = decoding.one_rank(wide, lengths, **options, sinks=call["sinks"].double())
    eager = decoding.one_rank(x, lengths, **options, sinks=call["sinks"])
    for out, _ in found:
        assert_within_budget(out, exact, eager)
        assert torch.equal(out, found[0][0])
