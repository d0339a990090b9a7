"""What must be equal over a cache, and what a call refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.decode import choice as decode_choice
from tilewise.decode.budget import unread
from tilewise.decode.call import Splits, make_call
from tilewise.decode.ops import flatten
from tilewise.dense import choice as dense_choice

H, G, D, E = 6, 2, 16, 8


def on_device(x: Tensor) -> Tensor:
    return x.to(UNDER_TEST.device)


def ints(*values: Any) -> Tensor:
    return on_device(torch.tensor(values, dtype=torch.int32))


def filled(
    lengths: list[int], capacity: int, page: int | None = None, dtype: torch.dtype = torch.float32
) -> tw.KVCache:
    cache = tw.KVCache.allocate(
        len(lengths), capacity, G, D, E, page_size=page, dtype=dtype, device=UNDER_TEST.device
    )
    unread(cache.k)
    unread(cache.v)
    k, v = (torch.randn(sum(lengths), G, x).to(UNDER_TEST.device, dtype) for x in (D, E))
    cache.append(k, v, cu_seqlens=ints(0, *lengths).cumsum(0))
    return cache


def queries(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, H, D).to(UNDER_TEST.device, dtype)


def assert_same(got: tw.Partial, other: tw.Partial) -> None:
    """Two evaluations of one thing: within rounding of each other."""
    exact = other.out.double()
    eps = torch.finfo(other.out.dtype).eps
    floor = 16 * eps * float(exact.abs().max()) if exact.numel() else 0.0
    assert_within_budget(got.out, exact, exact, floor=floor)
    assert_lse_within_budget(got.lse, other.lse.double(), torch.float32)


def test_prefill_in_chunks_is_prefill_at_once() -> None:
    """Chunked prefill: each chunk over what is cached before it, causal."""
    k, v, q = (
        on_device(torch.randn(2, 50, G, D)),
        on_device(torch.randn(2, 50, G, E)),
        queries(2, 50),
    )
    whole = tw.attention_partial(q, k, v, mask=tw.causal())
    cache = tw.KVCache.allocate(2, 64, G, D, E, page_size=16, dtype=q.dtype, device=q.device)
    outs, lses = [], []
    for start, stop in ((0, 17), (17, 18), (18, 50)):
        cache.append(k[:, start:stop], v[:, start:stop])
        part = tw.attention_with_cache_partial(q[:, start:stop], cache, mask=tw.causal())
        outs.append(part.out)
        lses.append(part.lse)
    assert_same(tw.Partial(torch.cat(outs, 1), torch.cat(lses, 2)), whole)


@pytest.mark.parametrize("mask", [tw.causal(), tw.window(20, 0), tw.full()], ids=str)
def test_a_mixed_batch_is_each_sequence_alone(mask: tw.Mask) -> None:
    lengths, counts = [40, 7, 33, 0, 64], [1, 7, 0, 1, 5]
    cache = filled(lengths, 64, 16)
    q, sinks = queries(sum(counts) + 3), on_device(torch.randn(H))
    cu = ints(0, *counts).cumsum(0)
    got = tw.attention_with_cache_partial(q, cache, mask=mask, cu_seqlens_q=cu, sinks=sinks)
    for b, count in enumerate(counts):
        rows = slice(int(cu[b]), int(cu[b]) + count)
        assert cache.block_table is not None
        own = tw.KVCache(cache.k, cache.v, cache.lengths[b : b + 1], cache.block_table[b : b + 1])
        alone = tw.attention_with_cache_partial(q[None, rows], own, mask=mask, sinks=sinks)
        if count:
            assert_same(tw.Partial(got.out[None, rows], got.lse[None, :, rows]), alone)
    assert not got.out[-3:].any() and bool(got.lse[:, -3:].isneginf().all())


def test_a_tree_of_one_branch_is_causal() -> None:
    cache, q = filled([40, 9], 48, 16), queries(2, 4)
    chain = torch.tensor([1, 3, 7, 15])
    causal = tw.attention_with_cache(q, cache, mask=tw.causal())
    assert torch.equal(tw.attention_with_cache(q, cache, mask=tw.tree(on_device(chain))), causal)
    # A branch sees its own path only: as if the other's keys were not there.
    paths = tw.tree(ints(0b0001, 0b0011, 0b0101, 0b1101))
    got = tw.attention_with_cache_partial(q, cache, mask=paths)
    for b in range(2):
        table = cache.block_table
        assert table is not None
        flat_k, flat_v = (x[table[b].long()].flatten(0, 1) for x in (cache.k, cache.v))
        n = int(cache.lengths[b])
        for m, path in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
            keep = torch.tensor([*range(n - 4), *(n - 4 + j for j in path)])
            keep = on_device(keep)
            one = tw.attention_partial(
                q[b : b + 1, m : m + 1], flat_k[None, keep], flat_v[None, keep]
            )
            assert_same(
                tw.Partial(got.out[b : b + 1, m : m + 1], got.lse[b : b + 1, :, m : m + 1]), one
            )


def test_moving_pages_changes_no_bit() -> None:
    cache, q = filled([70, 33, 1], 80, 8), queries(3, 2)
    before = tw.attention_with_cache(q, cache, mask=tw.causal())
    order = on_device(torch.randperm(cache.k.shape[0]))
    moved_k, moved_v = torch.empty_like(cache.k), torch.empty_like(cache.v)
    moved_k[order], moved_v[order] = cache.k, cache.v
    assert cache.block_table is not None
    table = order[cache.block_table.long()].int()
    moved = tw.KVCache(moved_k, moved_v, cache.lengths, table)
    assert torch.equal(tw.attention_with_cache(q, moved, mask=tw.causal()), before)


def test_partials_of_two_caches_merge_to_the_whole() -> None:
    """Keys dealt to two devices: each has its lse, and a sink belongs to one."""
    cache, q = filled([64, 40], 64), queries(2, 1)
    whole = tw.attention_with_cache_partial(q, cache, sinks=on_device(torch.ones(H)))
    halves = []
    for first in (0, 32):
        part = tw.KVCache(
            cache.k[:, first : first + 32], cache.v[:, first : first + 32],
            (cache.lengths - first).clamp(0, 32),
        )  # fmt: skip
        sinks = on_device(torch.ones(H)) if first else None
        halves.append(
            tw.attention_with_cache_partial(q, part, sinks=sinks, out_dtype=torch.float32)
        )
    assert_same(tw.merge(halves), whole)


def test_a_call_that_is_repeated_gives_the_same_bits() -> None:
    cache, q = filled([70, 33, 1], 80, 8, torch.bfloat16), queries(3, 2, dtype=torch.bfloat16)
    first = tw.attention_with_cache_partial(q, cache, mask=tw.causal())
    for _ in range(30):
        again = tw.attention_with_cache_partial(q, cache, mask=tw.causal())
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)


def test_out_is_written_in_place_whatever_its_strides() -> None:
    cache, q = filled([20, 9], 24), queries(2, 3)
    expected = tw.attention_with_cache(q, cache)
    out = torch.full((2, H, 3, 2 * E), float("nan"), device=q.device)
    view = out.transpose(1, 2)[..., :E]
    assert tw.attention_with_cache(q, cache, out=view) is view
    assert torch.equal(view, expected)
    assert bool(out[..., E:].isnan().all())


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_splits", [None, 2])
def test_out_may_be_q(is_packed: bool, num_splits: int | None) -> None:
    lengths, counts = [40, 9, 24], [3, 1, 2]
    cache = tw.KVCache.allocate(
        3, 48, G, D, page_size=8, dtype=torch.float32, device=UNDER_TEST.device
    )
    k, v = (on_device(torch.randn(sum(lengths), G, D)) for _ in "kv")
    unread(cache.k)
    unread(cache.v)
    cache.append(k, v, cu_seqlens=ints(0, *lengths).cumsum(0))
    q = queries(sum(counts) + 2) if is_packed else queries(3, 3)
    options = {"mask": tw.causal(), "num_splits": num_splits}
    if is_packed:
        options["cu_seqlens_q"] = ints(0, *counts).cumsum(0)
    expected = tw.attention_with_cache(q, cache, **options)
    assert tw.attention_with_cache(q, cache, out=q, **options) is q
    assert torch.equal(q, expected)


def test_numbers_of_other_libraries_are_ints() -> None:
    cache, q = filled([20, 9], 24), queries(4)
    given = {"mask": tw.causal(), "cu_seqlens_q": ints(0, 1, 4)}
    others = {"max_seqlen_q": np.int64(3), "num_splits": np.int32(2)}
    plain = {"max_seqlen_q": 3, "num_splits": 2}
    expected = tw.attention_with_cache(q, cache, **given, **plain)
    assert torch.equal(tw.attention_with_cache(q, cache, **given, **others), expected)


def test_compiled_is_eager() -> None:
    """In one graph, with a cache that grows: lengths are data."""
    cache, q = filled([20, 9], 24, 8), queries(2, 1)

    def step(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        seen = tw.KVCache(k, v, lengths, table)
        return tw.attention_with_cache(q, seen, mask=tw.causal(), scale=0.3)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for length in (9, 10, 24):
        cache.lengths[1] = length
        cache.k.nan_to_num_()
        cache.v.nan_to_num_()
        given = (q, cache.k, cache.v, cache.lengths, cache.block_table)
        assert torch.equal(compiled(*given), step(*given))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cache": ({"cache": None}, "cache must be a KVCache, got NoneType"),
    "q": ({"q": None}, "q must be a tensor"),
    "mask": ({"mask": torch.ones(3)}, "mask must be a tilewise Mask, got Tensor"),
    "batch": ({"q": torch.zeros(3, 1, H, D)}, r"q must be \[B, M, H, 16\] with B = 2, got \[3, 1,"),
    "dim": ({"q": torch.zeros(2, 1, H, D + 1)}, r"q must be \[B, M, H, 16\], got \[2, 1, 6, 17\]"),
    "heads": ({"q": torch.zeros(2, 1, 5, D)}, "a multiple of the kv heads of the cache"),
    "dtype": ({"q": torch.zeros(2, 1, H, D).half()}, "q must have the cache's dtype"),
    "int q": ({"q": torch.zeros(2, 1, H, D).int()}, "q must be float16, bfloat16, float32"),
    "packed": ({"cu_seqlens_q": ints(0, 1, 2)}, r"q must be \[T, H, 16\]"),
    "cu": ({"q": torch.zeros(4, H, D), "cu_seqlens_q": ints(0, 3, 5)}, "cu_seqlens_q ends at 5"),
    "no cu": ({"q": torch.zeros(4, H, D), "cu_seqlens_q": [0, 3, 4]},
              "cu_seqlens_q must be a tensor, got list"),
    "cu size": ({"q": torch.zeros(4, H, D), "cu_seqlens_q": ints(0, 4)},
                r"cu_seqlens_q must be \[3\], got \[2\]"),
    "cu dtype": ({"q": torch.zeros(4, H, D), "cu_seqlens_q": torch.zeros(3)}, "cu_seqlens_q must"),
    "longest": ({"q": torch.zeros(4, H, D), "cu_seqlens_q": ints(0, 3, 4), "max_seqlen_q": 2},
                "max_seqlen_q is 2, but a sequence has 3 queries"),
    "max": ({"max_seqlen_q": 1.5}, "max_seqlen_q must be an int >= 0, got 1.5"),
    "splits": ({"num_splits": 0}, "num_splits must be an int >= 1"),
    "scale": ({"scale": float("inf")}, "scale must be finite"),
    "text": ({"scale": "0.3"}, "scale must be a number, got '0.3'"),
    "numbers": ({"softcap": [2.0]}, r"softcap must be a number, got \[2.0\]"),
    "no out": ({"out": [0.0]}, "out must be a tensor, got list"),
    "softcap": ({"softcap": 0.0}, "softcap must be None or lie between"),
    "sinks": ({"sinks": torch.zeros(H + 1)}, r"sinks must be floating \[6\]"),
    "slopes": ({"alibi_slopes": torch.zeros(3, H)}, "alibi_slopes must be floating"),
    "bias": ({"bias": torch.zeros(1, H, 1, 3)}, "bias must broadcast to"),
    "bool bias": ({"bias": torch.ones(1, dtype=torch.bool)}, "bias must be .* got torch.bool"),
    "out": ({"out": torch.zeros(2, 1, H, E + 1)}, r"out must be \[2, 1, 6, 8\]"),
    "out expanded": ({"out": torch.zeros(1, 1, H, E).expand(2, 1, H, E)},
                     "out must have memory for each of its elements"),
    "out dtype": ({"out": torch.zeros(2, 1, H, E).half()}, "out must have q's dtype"),
    "backend": ({"backend": "cuda"}, "backend must be one of"),
    "tree": ({"mask": tw.tree(ints([1], [1], [1]))}, r"tree: expected bits \[2 or 1, M\]"),
}  # fmt: skip


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="the tensors of the table are on the CPU")
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, message = WRONG[name]
    call = {"q": queries(2, 1), "cache": filled([20, 9], 24), **change}
    with pytest.raises(ValueError, match=message):
        tw.attention_with_cache(call.pop("q"), call.pop("cache"), **call)


def test_a_gradient_is_refused_and_no_grad_is_fine() -> None:
    cache, q = filled([20, 9], 24), queries(2, 1).requires_grad_()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        tw.attention_with_cache(q, cache)
    with torch.no_grad():
        assert tw.attention_with_cache(q, cache).isfinite().all()


TERMS = dict.fromkeys(("scale", "softcap", "bias", "alibi_slopes", "sinks"))


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of the choice on a CPU")
def test_the_choice_and_its_reasons() -> None:
    cache, q = filled([20, 9], 24), queries(2, 1)
    choice = tw.explain_cache_backend(q, cache, mask=tw.causal())
    assert choice.name == "tiled" and set(choice.rejected) == {"reference", "triton", "hopper"}
    with pytest.raises(NotImplementedError, match="use backend='tiled'"):
        tw.attention_with_cache(q.double(), tw.KVCache(cache.k.double(), cache.v.double(),
                                cache.lengths), backend="triton")  # fmt: skip
    with pytest.raises(TypeError, match="knows no argument 'window'"):
        tw.explain_cache_backend(q, cache, window=3)


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of the choice as if on a GPU")
@pytest.mark.parametrize(
    ("M", "options", "kernel"),
    [
        (1, {}, "Triton's split-KV kernel"),
        (1280, {}, "dense attention's kernel"),
        (1280, {"num_splits": 2}, "Triton's split-KV kernel"),
        (1, {"mask": tw.chunked(4)}, "dense attention's kernel"),
    ],
)
def test_the_reason_names_the_kernel(
    M: int, options: dict[str, Any], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(decode_choice, "choose", lambda *given: "triton")
    monkeypatch.setattr(dense_choice, "triton_problem", lambda device: "")
    choice = tw.explain_cache_backend(queries(2, M), filled([20, 9], 24), **options)
    assert choice.reason == f"{kernel} runs here, on cpu"


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of the choice as if on a GPU")
@pytest.mark.parametrize("is_latent", [False, True])
def test_a_tree_is_not_hoppers(is_latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so a tree of many rows over latents, which hopper would run, is Triton's."""
    pytest.importorskip("triton")
    for problem in ("triton_problem", "hopper_problem"):
        monkeypatch.setattr(decode_choice, problem, lambda device: "")
    D, dtype = 576 if is_latent else 128, torch.bfloat16
    cache = tw.KVCache.latent(2, 8) if is_latent else tw.KVCache.allocate(2, 8, 1, D, dtype=dtype)
    given = {"mask": tw.tree(torch.tensor([1, 3, 5]))}
    q = torch.zeros(2, 3, 32, D, dtype=dtype)
    with pytest.raises(NotImplementedError, match="takes only windows and key ranges"):
        tw.explain_cache_backend(q, cache, **given, backend="hopper")
    call = make_call("test", q, cache, given["mask"], TERMS, None, None, Splits())
    assert decode_choice.is_faster_on_hopper(call) == is_latent
    assert "windows and key ranges" in decode_choice.why_not_hopper(call)


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of the op's schema")
@pytest.mark.parametrize("packed", [False, True])
def test_the_op_is_what_its_schema_says(packed: bool) -> None:
    cache = filled([20, 9], 24, 8)
    q = queries(4) if packed else queries(2, 3)
    cu = ints(0, 3, 4) if packed else None
    terms = {"scale": 0.3, "softcap": 2.0, "bias": None, "alibi_slopes": None, "sinks": None}
    call = make_call("test", q, cache, tw.window(5, 0), terms, cu, None, Splits(2, True))
    out = q.new_zeros(*q.shape[:-1], E)
    lse = q.new_zeros(H, 4) if packed else q.new_zeros(2, H, 3)
    op = torch.ops.tilewise.attention_with_cache_fwd.default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = torch.library.opcheck(
        op, (out, lse, q, *flatten(call), "tiled", None), test_utils=tests
    )
    assert set(found.values()) == {"SUCCESS"}
