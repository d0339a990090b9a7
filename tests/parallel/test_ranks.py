"""What holds between ranks: bytes counted, disagreement told, failures that end, PyTorch's ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise as tw
from tests.helpers import UNDER_TEST
from tests.parallel import jobs
from tests.parallel.over_ranks import Way, check_unshard
from tests.parallel.ranks import GPU_RANKS, RANKS, WORLD, RankError
from tilewise.core.tolerance import assert_within_budget
from tilewise.parallel import contiguous, striped, unshard, volumes, zigzag
from tilewise.parallel.volumes import Shape

S = 48


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
@pytest.mark.parametrize("schedule", ("ring", "all_gather", "ulysses"))
def test_bytes_received_are_those_of_the_formula(schedule: str, ranks: int) -> None:
    heads = (12, 12) if schedule == "ulysses" else (4, 2)
    way = Way(schedule, zigzag(S, ranks))
    found = RANKS.run(ranks, jobs.traffic, way, jobs.qkv(S, heads), tw.full())
    volume = getattr(volumes, schedule)(Shape(1, S, *heads, 8, 8, 4), ranks)
    for forward, backward in found:
        assert (sum(forward.values()), sum(backward.values())) == (volume.forward, volume.backward)


@pytest.mark.parametrize("mesh", ((2, 2), (2, 4), (4, 2)))
def test_bytes_of_two_dims(mesh: tuple[int, int]) -> None:
    way = Way("usp", zigzag(64, mesh[0] * mesh[1]), mesh)
    found = RANKS.run(mesh[0] * mesh[1], jobs.traffic, way, jobs.qkv(64, (8, 4)), tw.full())
    volume = volumes.usp(Shape(1, 64, 8, 4, 8, 8, 4), *mesh)
    for forward, backward in found:
        assert (sum(forward.values()), sum(backward.values())) == (volume.forward, volume.backward)


def test_kv_heads_that_several_ranks_need_count() -> None:
    way = Way("ulysses", zigzag(64, 8))
    found = RANKS.run(8, jobs.traffic, way, jobs.qkv(64, (8, 2)), tw.full())
    volume = volumes.ulysses(Shape(1, 64, 8, 2, 8, 8, 4), 8)
    for forward, backward in found:
        assert (sum(forward.values()), sum(backward.values())) == (volume.forward, volume.backward)


def test_a_window_stops_the_ring_early() -> None:
    """Keys more than one shard away are seen by nobody, so they do not travel."""
    tensors, way = jobs.qkv(S), Way("ring", contiguous(S, 4))
    near = RANKS.run(4, jobs.traffic, way, tensors, tw.window(S // 4, 0))
    far = RANKS.run(4, jobs.traffic, way, tensors, tw.causal())
    documents = tw.documents([0, 12, 24, 36, 48])
    alone = RANKS.run(4, jobs.traffic, way, tensors, documents)
    for (one, _), (three, _), (none, back) in zip(near, far, alone, strict=True):
        assert one["kv"] * 3 == three["kv"]
        assert none == back == {}


# ---------------------------------------------------------------- memory


def peak(schedule: str, ranks: int, own: int) -> int:
    """The most that any rank held, with `own` tokens on each."""
    way = Way(schedule, zigzag(own * ranks, ranks))
    return max(RANKS.run(ranks, jobs.weighed, way, jobs.qkv(own * ranks)))


def test_memory_of_a_ring_is_that_of_a_rank_s_share() -> None:
    """With as many tokens on each rank, eight ranks hold no more each than three."""
    few, many = peak("ring", 3, 512), peak("ring", 8, 512)
    assert many <= 1.02 * few
    assert peak("ring", 3, 1024) > few
    # While a gather holds the keys of all.
    assert peak("all_gather", 8, 512) > peak("all_gather", 3, 512)


# ---------------------------------------------------------------- disagreement


DIFFERENCES = {
    "mask": "mask",
    "mask tensors": "mask",
    "schedule": "schedule",
    "scale": "scale",
    "dtype": "q",
    "heads": "q",
    "layout": "layout",
    "gradient": "q",
    "grad mode": "grad mode",
    "sinks": "sinks",
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_disagree_are_told_so(what: str) -> None:
    """At its first use, on every rank, with both sides of it."""
    way = Way("ring", zigzag(8, 3))
    with pytest.raises(
        RankError, match=f"ranks disagree on {DIFFERENCES[what]}: rank 0 has"
    ) as caught:
        RANKS.run(3, jobs.differing, way, what)
    assert caught.value.kinds == dict.fromkeys(range(3), "ValueError")


@pytest.mark.parametrize(
    ("odd", "kind", "words"),
    [
        ({"bias": [1.0]}, "ValueError", "bias must be a tensor, got list"),
        ({"sinks": 1.0}, "ValueError", "sinks must be a tensor, got float"),
        ({"q": None}, "ValueError", "q must be a tensor, got NoneType"),
        ({"schedule": ["ring"]}, "ValueError", "schedule must be one of auto, ring"),
        ({"scale": [1.0]}, "ValueError", "scale must be a number"),
        ({"backend": ["tiled"]}, "ValueError", "backend must be one of auto"),
        ({"out_dtype": "fp32"}, "ValueError", "out_dtype must be one of float16"),
        ({"mask": tw.from_function(jobs.raises_what_it_likes)}, "KeyError", "KeyError: "),
        ({"mask": tw.from_function(jobs.of_another_shape)}, "ValueError", r"3, 3\]"),
    ],
)
def test_whatever_one_rank_passes_no_other_waits(odd: Any, kind: str, words: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of this call failed: .*{words}") as caught:
        RANKS.run(2, jobs.odd_one_out, Way("ring", zigzag(9, 2)), odd)
    assert caught.value.kinds == {0: "RuntimeError", 1: kind}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"k": None}, "k must be a tensor, got NoneType"),
        ({"backend": "cuda"}, "backend must be one of auto"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes must be a tensor, got list"),
    ],
)
def test_whatever_one_rank_decodes_no_other_waits(odd: Any, words: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of this call failed: .*{words}") as caught:
        RANKS.run(2, jobs.odd_decode, zigzag(9, 2), odd)
    assert caught.value.kinds == {0: "RuntimeError", 1: "ValueError"}


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"x": None}, "x must be a tensor, got NoneType"),
        ({"x": torch.zeros(2, 5, 3)}, r"rank 1 holds 4 tokens, got \[2, 5, 3\] along dim 1"),
        ({"layout": zigzag(9, 3)}, "the layout is for 3 ranks"),
        ({"layout": 9}, "layout must be a Layout, got int"),
        ({"dim": 3}, "dim must be one of x's 3, got 3"),
    ],
)
def test_whatever_one_rank_unshards_no_other_waits(odd: Any, words: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of this call failed: .*{words}") as caught:
        RANKS.run(2, jobs.odd_unshard, zigzag(9, 2), odd)
    assert caught.value.kinds == {0: "RuntimeError", 1: "ValueError"}


def test_ranks_that_unshard_differently_are_told_so() -> None:
    odd = {"x": torch.zeros(2, 4, 3, dtype=torch.float64)}
    with pytest.raises(RankError, match="unshard: ranks disagree on x: rank 0 has"):
        RANKS.run(2, jobs.odd_unshard, zigzag(9, 2), odd)


def test_one_rank_s_mistake_is_told_to_all() -> None:
    with pytest.raises(RankError, match="rank 1 of this call failed") as caught:
        RANKS.run(3, jobs.differing, Way("ring", zigzag(9, 3)), "length")
    assert caught.value.kinds == {0: "RuntimeError", 1: "ValueError", 2: "RuntimeError"}


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"layout": zigzag(12, 4)}, "ValueError", "the layout is for 4 ranks"),
        ({"layout": None}, "ValueError", "layout must be a Layout"),
        ({"schedule": "rings"}, "ValueError", "schedule must be one of"),
        ({"schedule": "usp"}, "ValueError", "needs a 2-D mesh"),
        ({"backend": "reference"}, "NotImplementedError", "backend='tiled'"),
        ({"mask": torch.ones(3)}, "ValueError", "must be a tilewise Mask"),
        ({"bias": torch.zeros(3, 5)}, "ValueError", "bias must broadcast"),
        ({"schedule": "ulysses", "bias": torch.zeros(4, 12)}, "NotImplementedError", "bias"),
        ({"dropout_p": 1.5}, "ValueError", "dropout_p"),
        ({"group": "world"}, "ValueError", "group must be a process group .* got 'world'"),
        ({"mask": tw.key_padding([1, 2])}, "ValueError", "entries"),
    ],
)
def test_a_wrong_call_is_refused_on_every_rank(
    options: dict[str, Any], kind: str, words: str
) -> None:
    with pytest.raises(RankError, match=words) as caught:
        RANKS.run(3, jobs.fails, Way("ring", zigzag(12, 3)), options)
    assert caught.value.kinds == dict.fromkeys(range(3), kind)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mesh": (2, 2)}, "takes a mesh or a group, got both"),
        ({"mesh": (2, 2), "group": None}, "needs a 1-D mesh or a group, got 2-D"),
    ],
)
def test_a_mesh_that_does_not_fit(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RankError, match=words) as caught:
        RANKS.run(4, jobs.fails, Way("ring", zigzag(12, 4)), options)
    assert caught.value.kinds == dict.fromkeys(range(4), "ValueError")


def test_a_group_made_anew_is_another() -> None:
    found = RANKS.run(WORLD, jobs.anew, Way("ring", zigzag(12, 2)))
    for first, second in found[:2]:
        assert torch.equal(first, second)


def test_dropout_wants_heads_that_divide() -> None:
    way = Way("ulysses", zigzag(12, 3))
    with pytest.raises(RankError, match="dropout counts heads") as caught:
        RANKS.run(3, jobs.fails, way, {"dropout_p": 0.1}, (4, 4))
    assert caught.value.kinds == dict.fromkeys(range(3), "NotImplementedError")


def test_stripes_refuse_what_counts_by_position() -> None:
    way = Way("ring", striped(256, 3))
    with pytest.raises(RankError, match="use a zigzag or contiguous layout") as caught:
        RANKS.run(3, jobs.fails, way, {"alibi_slopes": torch.ones(4)})
    assert caught.value.kinds == dict.fromkeys(range(3), "NotImplementedError")


def test_no_process_group_is_said() -> None:
    x, layout = list(jobs.qkv(4).values()), zigzag(4, 1)
    for op, call in (
        ("context_parallel_attention", lambda: tw.context_parallel_attention(*x, layout=layout)),
        ("context_parallel_decode", lambda: tw.context_parallel_decode(*x, layout=layout)),
        ("unshard", lambda: unshard(x[0], layout)),
    ):
        with pytest.raises(ValueError, match=f"^{op}: .* call init_process_group first"):
            call()


def test_what_is_prepared_ahead_is_not_asked_again() -> None:
    """One agreement a mask, however many layers and steps it serves."""
    found = RANKS.run(3, jobs.prepared_ahead, Way("ring", zigzag(30, 3)))
    assert found == [[1, 0, 1]] * 3


def test_a_lost_rank_does_not_keep_the_others() -> None:
    """They wait for as long as the process group says."""
    found = RANKS.run(WORLD, jobs.deserted, Way("ring", zigzag(8, 2)), 4.0)
    assert found[:2] == ["told in time", "lost"]


def test_a_wrong_call_is_told_though_nobody_answers() -> None:
    """With the gathering's failure as its cause, and what to try."""
    told = RANKS.run(WORLD, jobs.wrong_alone, Way("ring", zigzag(8, 2)), 3.0)[0]
    error, cause = told.split(" // ")
    assert "softcap must be" in error
    assert "another rank may be in a call that it made before" in cause


# ---------------------------------------------------------------- PyTorch's ways


@pytest.mark.parametrize("how", ("plain", "compile", "checkpoint", "fsdp"))
def test_a_block_of_a_model(how: str) -> None:
    """Parameter gradients, summed over ranks, are those of one rank."""
    layout, x = zigzag(S, 3), torch.randn(1, S, 32)
    exact, eager = (
        jobs.gradients_of_a_block(x.to(dtype)) for dtype in (torch.float64, torch.float32)
    )
    for found in RANKS.run(3, jobs.block_gradients, layout, x, how):
        for got, want, plain in zip(found, exact, eager, strict=True):
            assert_within_budget(got, want, plain, name=how)


def test_autocast_casts_as_it_does_on_one_rank() -> None:
    tensors, layout = jobs.qkv(S), zigzag(S, 2)
    found = layout.join(RANKS.run(2, jobs.under_autocast, layout, tensors))
    assert found.dtype == torch.bfloat16
    narrow = [x.bfloat16() for x in tensors.values()]
    exact = tw.attention(*(x.double() for x in narrow), backend="reference")
    assert_within_budget(found, exact, tw.attention(*narrow))


def test_beside_tensor_parallelism() -> None:
    x = torch.zeros(1, S, 1)
    tensors = jobs.qkv(S)
    exact = tw.attention(*(t.double() for t in tensors.values()), mask=tw.causal())
    eager = tw.attention(*tensors.values(), mask=tw.causal())
    for found in RANKS.run(4, jobs.two_meshes, x):
        assert_within_budget(found, exact, eager)


@pytest.mark.parametrize("ranks", (1, 3, 4))
def test_unshard_and_its_gradient(ranks: int) -> None:
    check_unshard(RANKS, ranks, jobs.unsharded)


# ---------------------------------------------------------------- the choice of a schedule


@pytest.mark.parametrize(
    ("ranks", "heads", "mesh", "name"),
    [
        (2, (4, 2), None, "ring"),
        (8, (8, 8), None, "ulysses"),
        (4, (4, 4), (2, 2), "usp"),
        (1, (4, 2), None, "ring"),
        # Half of the ranks would have no head.
        (4, (2, 2), None, "ring"),
        # Three rounds of heads for two and a half.
        (3, (8, 8), None, "ulysses"),
    ],
)
def test_auto_decides_by_bytes_and_says_why(
    ranks: int, heads: tuple[int, int], mesh: Any, name: str
) -> None:
    found = RANKS.run(ranks, jobs.explained, ranks, S, heads, mesh)
    for choice, reason, rejected, received, _ in found:
        assert choice == name
        assert reason
        assert name not in rejected
        if name == "ulysses":
            assert received["ulysses"] < received["ring"]


def chosen(tokens: int, heads: tuple[int, int], ranks: int, has_grad: bool, why: str = "") -> Any:
    from tilewise.parallel.choice import choose

    shape = Shape(1, tokens * ranks, *heads, 128, 128, 2)
    return choose("auto", shape, (ranks,), has_grad=has_grad, why_not_ulysses=why)


def test_many_ranks_ring() -> None:
    found = chosen(512, (32, 8), 4, has_grad=False)
    assert found.name == "ring" and found.rejected["ulysses"] == "it moves no fewer bytes"
    assert "all_gather receives 6.291 MB a rank, forward; predicted" in str(found)
    # Gradients of keys travel in fp32, those of heads in the inputs' dtype.
    found = chosen(512, (32, 8), 4, has_grad=True)
    assert found.name == "ulysses"
    assert "ulysses receives 15.729 MB a rank, forward and backward; predicted" in str(found)
    found = chosen(512, (32, 8), 16, has_grad=True, why="a reason")
    assert found.name == "ring" and found.rejected["ulysses"] == "a reason"


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (8, 8), (8, 2)])
def test_auto_takes_no_schedule_that_the_plan_finds_slower(heads: tuple[int, int]) -> None:
    from tilewise.parallel.model import plan_table

    plan = plan_table(Shape(1, 8192, *heads, 128, 128, 2))
    for ranks in (8, 16, 32, 64):
        seconds = {row.schedule: row.seconds for row in plan if row.ranks == ranks}
        name = chosen(8192, heads, ranks, has_grad=True).name
        fastest = min(("ring", "ulysses"), key=lambda n: seconds.get(n, float("inf")))
        assert name == fastest


@pytest.mark.parametrize(("heads", "ranks"), [(2, 4), (8, 64), (4, 5)])
def test_ranks_without_a_head_speak_against_trading(heads: int, ranks: int) -> None:
    for tokens in (16, 8192):
        found = chosen(tokens, (heads, heads), ranks, has_grad=True)
        assert found.name != "ulysses"
        assert f"{ranks - heads} of {ranks} ranks without work" in found.rejected["ulysses"]


def test_the_reasons_of_a_call_with_all_its_arguments() -> None:
    """And of what rules heads out, where the call itself would go another way too."""
    way = Way("auto", zigzag(24, 3))
    for options in ({}, {"mask": tw.causal(), "softcap": 2.0, "sinks": torch.zeros(8)}):
        names = RANKS.run(3, jobs.explained_with, way, (8, 8), options)
        assert names == ["ulysses"] * 3
    assert RANKS.run(3, jobs.explained_with, way, (8, 8), {"dropout_p": 0.5}) == ["ring"] * 3
    with pytest.raises(RankError, match="softcap") as caught:
        RANKS.run(3, jobs.explained_with, way, (8, 8), {"softcap": -2.0})
    assert caught.value.kinds == dict.fromkeys(range(3), "ValueError")


# ---------------------------------------------------------------- the pools themselves


@pytest.mark.parametrize(("count", "ranks"), [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (8, 4)])
def test_the_pool_over_gpus_counts_them_when_asked(
    count: int, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when it is imported, which is before `--device` is read."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert GPU_RANKS.world == 0
    monkeypatch.setattr(UNDER_TEST, "device", "cuda")
    assert GPU_RANKS.world == ranks
    with pytest.raises(AssertionError, match=f"{ranks + 1} ranks of {ranks}"):
        GPU_RANKS.run(ranks + 1, jobs.anew)
