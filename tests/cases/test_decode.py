"""Cases of decode: what dense attention can meet of a KV cache through used lengths and splits.

A cache is packed storage, `capacity` rows a sequence, of which `seqused_k` are in use; the slack is
NaN. Pages and appending belong to the cache itself, which is not here yet.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    INF,
    MLA,
    Outcome,
    causally,
    check,
    clean,
    formula,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    same,
    sparse_storage,
    spoiled,
    visibility,
)
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

Tensors = dict[str, Tensor]


def cached(
    queries: int, used: list[int], capacity: int, heads: tuple[int, int], D: int,
    E: int | None = None, dtype: torch.dtype = torch.float32,
) -> Tensors:  # fmt: skip
    """q `[B queries, H, D]` and caches `[B capacity, G, .]` with NaN beyond what is used."""
    B = len(used)
    x = packed_qkv(B * queries, B * capacity, heads, D, E, dtype)
    slack = (torch.arange(capacity) >= torch.tensor(used).view(B, 1)).flatten()
    return x | {name: spoiled(x[name], slack) for name in "kv"}


def bounds(B: int, queries: int, capacity: int) -> Tensors:
    steps = torch.arange(B + 1)
    return {"cu_seqlens_q": steps * queries, "cu_seqlens_k": steps * capacity}


def decode(backend: str, used: list[int], queries: int, capacity: int, **options: Any) -> Any:
    at = bounds(len(used), queries, capacity)
    return lambda **x: tw.attention_varlen_partial(
        **x, **at, seqused_k=torch.tensor(used), mask=tw.causal(), backend=backend, **options
    )


def decode_form(used: list[int], queries: int, capacity: int) -> Any:
    at = {name: t.tolist() for name, t in bounds(len(used), queries, capacity).items()}
    return lambda **x: packed_formula(
        **x, cu_q=at["cu_seqlens_q"], cu_k=at["cu_seqlens_k"], rule=causally, used_k=used
    )


def check_decode(backend: str, x: Tensors, used: list[int], queries: int) -> Outcome:
    capacity = x["k"].shape[0] // len(used)
    got = check(decode(backend, used, queries, capacity), decode_form(used, queries, capacity), x)
    slack = x["k"].isnan()
    assert is_zero(got.grads["k"][slack]) and bool(got.out.isfinite().all())
    return got


def split_decode(backend: str, used: list[int], queries: int, capacity: int, splits: int) -> Any:
    """The keys of every sequence in `splits` ranges of the cache, merged by their lse."""
    B = len(used)
    lengths = torch.tensor(used)
    edges = [capacity * s // splits for s in range(splits + 1)]

    def call(q: Tensor, k: Tensor, v: Tensor) -> tw.Partial:
        pieces = []
        for n0, n1 in pairwise(edges):
            part = {
                name: t.unflatten(0, (B, capacity))[:, n0:n1].flatten(0, 1)
                for name, t in (("k", k), ("v", v))
            }
            pieces.append(
                tw.attention_varlen_partial(
                    q,
                    **part,
                    **bounds(B, queries, n1 - n0),
                    seqused_k=(lengths - n0).clamp(0, n1 - n0),
                    # Where a sequence is shorter than its queries, the first ones see nothing.
                    mask=tw.causal(offset=(lengths - queries).clamp(min=-queries)),
                    q_start=0,
                    k_start=n0,
                    out_dtype=torch.promote_types(q.dtype, torch.float32),
                    backend=backend,
                )
            )
        merged = tw.merge(pieces)
        return tw.Partial(merged.out.to(q.dtype), merged.lse)

    return call


@on_backends
def test_c117_reading_slots_of_a_layered_cache(backend: str, tmp_path: Path) -> None:
    """Slots 2^30 elements apart: slots 1 and 2 must not be read from slot 0."""
    stride = 2**30
    storage = sparse_storage(tmp_path, 2 * stride + 4096, torch.float16)
    views = {}
    for at, name in enumerate("kv"):
        views[name] = storage.as_strided((3, 9, 2, 32), (stride, 64, 32, 1), at * 1024)
        views[name].copy_(normal(3, 9, 2, 32, seed=at))
    x = {"q": normal(3, 2, 4, 32, dtype=torch.float16), **views}
    check(
        lambda **x: tw.attention_partial(**x, mask=tw.causal(), backend=backend),
        lambda **x: formula(**x, visible=visibility(causally, 2, 9)),
        x,
    )


@on_backends
def test_c118_used_beyond_what_is_stored(backend: str) -> None:
    x = cached(2, [16, 5], 16, (4, 2), 8)
    check_decode(backend, x, [16, 5], 2)
    with pytest.raises(ValueError, match="seqused_k must lie between 0 and what each sequence"):
        decode(backend, [17, 5], 2, 16)(**x)


def rotated(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding over the whole head width, `[T, H, D]` at positions `[T]`."""
    half = x.shape[-1] // 2
    rates = 1e-4 ** (torch.arange(half, dtype=torch.float64) / half)
    angle = (position.double().unsqueeze(-1) * rates).unsqueeze(1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


@on_backends
@pytest.mark.parametrize("new", [1, 2, 5])
def test_c120_several_new_tokens_after_rotary(backend: str, new: int) -> None:
    """Rotary at cache length + i, causal: the rows of one pass over the whole text."""
    B, total, capacity = 2, [40, 23], 64
    text = [qkv(1, n, n, (16, 4), 16) for n in total]
    position = torch.arange(capacity)
    whole, queries, keys, values = [], [], [], []
    for n, one in zip(total, text, strict=True):
        q, k = (rotated(one[name][0], position[:n]) for name in "qk")
        whole.append(
            formula(
                q[None].double(), k[None].double(), one["v"].double(), visibility(causally, n, n)
            )
        )
        queries.append(q[-new:])
        keys += [k, k.new_full((capacity - n, 4, 16), float("nan"))]
        values += [one["v"][0], k.new_full((capacity - n, 4, 16), float("nan"))]
    x = {"q": torch.cat(queries), "k": torch.cat(keys), "v": torch.cat(values)}
    got = check_decode(backend, x, total, new)
    eager, _ = decode_form(total, new, capacity)(**{n: torch.nan_to_num(t) for n, t in x.items()})
    exact = torch.cat([out[0, -new:] for out, _ in whole])
    assert got.out.shape == (B * new, 16, 16)
    assert_within_budget(got.out, exact, eager)


@on_backends
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_c122_forced_splits_of_a_packed_batch(backend: str, splits: int) -> None:
    used = [70, 3, 128, 0]
    x = cached(3, used, 128, (6, 2), 16)
    check(split_decode(backend, used, 3, 128, splits), decode_form(used, 3, 128), x)


@on_backends
def test_c124_growing_cache_never_gives_nan(backend: str) -> None:
    """Every length from 1 to past a tile, in one pass and in as many splits as fit."""
    x = packed_qkv(2, 2 * 140, (4, 2), 16)
    for step in range(1, 140, 3):
        used = [step, 140 - step]
        slack = (torch.arange(140) >= torch.tensor(used).view(2, 1)).flatten()
        y = x | {name: spoiled(x[name], slack) for name in "kv"}
        one = decode(backend, used, 1, 140)(**y)
        many = split_decode(backend, used, 1, 140, max(1, step // 16))(**y)
        exact, lse = decode_form(used, 1, 140)(**{n: clean(t, torch.float64) for n, t in y.items()})
        eager, _ = decode_form(used, 1, 140)(**{n: clean(t) for n, t in y.items()})
        for got in (one, many):
            assert_within_budget(got.out, exact, eager)
            assert_lse_within_budget(got.lse, lse, torch.float32)


@on_backends
@pytest.mark.parametrize("kv_len", [1, 2, 7, 8, 9, 15, 16, 17])
def test_c126_fewer_keys_than_a_page(backend: str, kv_len: int) -> None:
    """8 queries, 14 heads over 2: where there are fewer keys, the first queries see none."""
    x = cached(8, [kv_len, 17], 17, (14, 2), 64, dtype=torch.float16)
    check_decode(backend, x, [kv_len, 17], 8)


@on_backends
@pytest.mark.parametrize("used", [0, 1, 16])
def test_c127_bounds_of_a_used_length(backend: str, used: int) -> None:
    check_decode(backend, cached(1, [used, 9], 16, (4, 2), 8), [used, 9], 1)
    with pytest.raises(ValueError, match="seqused_k"):
        decode(backend, [-1, 9], 1, 16)(**cached(1, [used, 9], 16, (4, 2), 8))


@on_backends
@pytest.mark.parametrize("dims", [MLA, pytest.param((16, 8), id="small")])
def test_c131_length_zero_among_others(backend: str, dims: tuple[int, int]) -> None:
    used = [0, 33, 0, 1]
    got = check_decode(backend, cached(1, used, 40, (4, 1), *dims), used, 1)
    assert got.lse is not None
    empty = torch.tensor(used) == 0
    assert is_zero(got.out[empty]) and bool(got.lse[:, empty].isneginf().all())
    assert is_zero(got.grads["q"][empty])


@on_backends
@pytest.mark.parametrize("dims", [MLA])
def test_c132_all_lengths_zero_and_nothing_stored(backend: str, dims: tuple[int, int]) -> None:
    x = packed_qkv(16, 0, (16, 1), *dims, dtype=torch.bfloat16)
    got = run(decode(backend, [0] * 16, 1, 0), x)
    assert got.lse is not None and got.out.shape == (16, 16, dims[1])
    assert is_zero(got.out) and bool(got.lse.isneginf().all()) and is_zero(got.grads["q"])


@on_backends
def test_c134_unused_slots_of_a_padded_batch_are_written(backend: str) -> None:
    """One real request among 1024 slots; every buffer starts as NaN."""
    slots, real, capacity = 1024, 700, 4
    used = [0] * slots
    used[real] = 3
    x = cached(1, used, capacity, (4, 2), 8)

    def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Only the one request, put among zeros."""
        keys = slice(real * capacity, real * capacity + used[real])
        at = torch.tensor([real])
        out, lse = formula(q[at, None], k[None, keys], v[None, keys], torch.tensor(True))
        everywhere = torch.full((4, slots), -INF, dtype=lse.dtype).index_copy(1, at, lse[0])
        return torch.zeros_like(q).index_copy(0, at, out[0]), everywhere

    got = check(decode(backend, used, 1, capacity), form, x)
    others = torch.arange(slots) != real
    assert is_zero(got.out[others]) and is_zero(got.grads["q"][others])
    assert bool((got.out[real] != 0).all()) and bool(got.out.abs().amax().isfinite())


@on_backends
@pytest.mark.parametrize("dims", [MLA, (192, 128)])
@pytest.mark.parametrize("kv_len", [5, 700])
def test_c138_keys_wider_than_values(backend: str, dims: tuple[int, int], kv_len: int) -> None:
    """One key tile and more than one; K and V advance by their own widths."""
    used = [kv_len, 1]
    check_decode(backend, cached(1, used, kv_len, (4, 1), *dims), used, 1)


@on_backends
@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("dims", [MLA])
def test_c179_twenty_equal_decodes(backend: str, splits: int, dims: tuple[int, int]) -> None:
    used = [130]
    x = cached(1, used, 160, (16, 1), *dims)
    call = split_decode(backend, used, 1, 160, splits)
    first = check(call, decode_form(used, 1, 160), x)
    for _ in range(19):
        same(run(call, x), first)
