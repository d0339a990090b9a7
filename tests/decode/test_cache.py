"""The cache itself: what it refuses, and what appending writes and leaves alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST

pytestmark = pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="of caches on the CPU")
B, N, G, D, E = 3, 24, 2, 8, 6
F8 = torch.float8_e4m3fn


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def parts(page: int | None = None, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return vars(tw.KVCache.allocate(B, N, G, D, E, page_size=page, dtype=dtype))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tensor": ({"k": None}, "k must be a tensor, got NoneType"),
    "dims": ({"k": torch.zeros(B, N, D)}, r"k must be \[R, N, G, D\], got 3 dimensions"),
    "sizes": ({"v": torch.zeros(B, N + 1, G, E)}, r"v must be \[R, N, G, E\] with N = 24"),
    "heads": ({"v": torch.zeros(B, N, G + 1, E)}, r"with G = 2"),
    "dtypes": ({"v": torch.zeros(B, N, G, E).half()}, "k and v must share one floating dtype"),
    "integers": ({"k": torch.zeros(B, N, G, D).int(), "v": torch.zeros(B, N, G, E).int()},
                 "k and v must share one floating dtype"),
    "rows": ({"lengths": ints(1, 2)}, "must have a row for each of the 2 lengths"),
    "length dtype": ({"lengths": torch.zeros(B)}, "lengths must be int32 or int64"),
    "table dtype": ({"block_table": torch.zeros(B, 1)}, "block_table must be int32 or int64"),
    "both": ({"block_table": torch.zeros(B, 1).int(), "batch_index": ints(0, 1, 2)},
             "batch_index must be None beside block_table"),
    "needless scales": ({"k_scale": torch.ones(G), "v_scale": torch.ones(G)},
                        "must be None unless the cache is float8"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, message = WRONG[name]
    with pytest.raises(ValueError, match=f"KVCache: .*{message}"):
        tw.KVCache(**{**parts(), **change})


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ((None, None), "needs k_scale and v_scale, got None"),
        ((torch.ones(G), None), "needs k_scale and v_scale, got None"),
        ((torch.ones(3), torch.ones(3)), r"must be float32 \[G\], \[B, G\]"),
        ((torch.ones(G).half(), torch.ones(G)), r"k_scale must be float32"),
        ((torch.ones(G), torch.ones(B, G)), "must have one form"),
    ],
)
def test_float8_wants_scales_of_one_form(scales: Any, message: str) -> None:
    given = {**parts(dtype=F8), "k_scale": scales[0], "v_scale": scales[1]}
    with pytest.raises(ValueError, match=message):
        tw.KVCache(**given)


def test_pages_without_slots_and_page_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size must be at least 1, got 0"):
        tw.KVCache.allocate(B, N, G, D, page_size=0)
    empty = torch.zeros(4, 0, G, D)
    with pytest.raises(ValueError, match="pages must have at least one slot"):
        tw.KVCache(empty, empty, ints(0), ints([0]))


def filled(page: int | None, dtype: torch.dtype = torch.float32) -> tw.KVCache:
    """Lengths 20, 0, 24, the free slots a number that shows."""
    cache = tw.KVCache.allocate(B, N, G, D, E, page_size=page, dtype=dtype)
    for x in (cache.k, cache.v):
        x.view(torch.uint8).fill_(0x41)
    cache.lengths.copy_(ints(20, 0, 24))
    return cache


APPENDS: dict[str, tuple[dict[str, Any], str]] = {
    "too long": ({}, "sequence 2 would grow to 27 tokens, but the cache holds 2[45]"),
    "dims": ({"k": torch.zeros(B, 3, G, D + 1)}, r"k must be \[B, L, 2, 8\], got"),
    "batch": ({"k": torch.zeros(2, 3, G, D)}, r"k must be \[B, L, 2, 8\] with B = 3, got"),
    "one length": ({"v": torch.zeros(B, 2, G, E)}, "v must be .* with L = 3"),
    "dtype": ({"k": torch.zeros(B, 3, G, D).half()}, "k must have the cache's dtype"),
    "no tensor": ({"v": None}, "v must be None for a latent cache"),
    "cu": ({"k": torch.zeros(9, G, D), "v": torch.zeros(9, G, E), "cu_seqlens": ints(0, 4, 3, 9)},
           "cu_seqlens must never fall, got 4 then 3"),
    "cu too short": ({"k": torch.zeros(9, G, D), "v": torch.zeros(9, G, E),
                      "cu_seqlens": ints(0, 9)}, r"cu_seqlens must be \[4\]"),
    "rotary reach": ({"k": torch.zeros(2, G, D), "v": torch.zeros(2, G, E),
                      "cu_seqlens": ints(0, 2, 2, 2),
                      "rotary": tw.Rotary(torch.ones(21, 2), torch.ones(21, 2))},
                     "rotary cos holds 21 positions, got positions 20 to 21"),
    "rotary width": ({"rotary": tw.Rotary(torch.ones(30, 5), torch.ones(30, 5))}, "R <= D = 8"),
    "no rotary": ({"rotary": 3}, "rotary must be a Rotary, got int"),
    "no table": ({"rotary": tw.Rotary(None, torch.ones(30, 2))},  # type: ignore[arg-type]
                 "rotary cos must be a tensor, got NoneType"),
    "rotary first": ({"rotary": tw.Rotary(torch.ones(30, 2), torch.ones(30, 2), first=ints(1))},
                     r"rotary first must be int32 or int64 \[B\] = \[3\]"),
}  # fmt: skip


@pytest.mark.parametrize("page", [None, 5])
@pytest.mark.parametrize("name", APPENDS)
def test_a_refused_append_changes_nothing(name: str, page: int | None) -> None:
    change, message = APPENDS[name]
    cache = filled(page)
    before = {n: x.clone() for n, x in cache.tensors().items()}
    call = {"k": torch.zeros(B, 3, G, D), "v": torch.zeros(B, 3, G, E), **change}
    with pytest.raises(ValueError, match=f"KVCache.append: .*{message}"):
        cache.append(**call)
    for n, x in before.items():
        assert torch.equal(getattr(cache, n), x)


@pytest.mark.parametrize("name", ["k", "v", "lengths"])
def test_elements_that_share_memory_are_not_written(name: str) -> None:
    given = {n: x for n, x in parts().items() if x is not None}
    for n in ("k", "v"):
        given[n].zero_()
    given[name] = given[name][:1].expand_as(given[name])
    cache = tw.KVCache(**given)
    with pytest.raises(ValueError, match=rf"{name} must have memory for each of its elements"):
        cache.append(torch.ones(B, 3, G, D), torch.ones(B, 3, G, E))
    assert not any(x.any() for x in cache.tensors().values())
    # Reading is another matter.
    assert not tw.attention_with_cache(torch.ones(B, 1, G, D), cache).any()


@pytest.mark.parametrize("learned", ["k", "v"])
def test_keys_and_values_that_are_learned_are_not_stored(learned: str) -> None:
    cache = filled(5)
    cache.lengths.zero_()
    before = {n: x.clone() for n, x in cache.tensors().items()}
    new = {"k": torch.zeros(B, 3, G, D), "v": torch.zeros(B, 3, G, E)}
    new[learned].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"KVCache.append: has no gradient"):
        cache.append(**new)
    for n, x in before.items():
        assert torch.equal(getattr(cache, n), x)
    with torch.no_grad():
        cache.append(**new)
    assert cache.lengths.tolist() == [3] * B


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B": -1}, "B must be an int >= 0, got -1"),
        ({"capacity": 8.5}, "capacity must be an int >= 0, got 8.5"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"dtype": torch.int32}, "dtype must be .* got torch.int32"),
        ({"dtype": "bf16"}, "dtype must be .* got bf16"),
    ],
)
def test_no_cache_has_such_sizes(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"B": 1, "capacity": 8, "G": 2, "D": 8, **change}
    with pytest.raises(ValueError, match=f"KVCache: {message}"):
        tw.KVCache.allocate(**given)


ROWS = torch.ones(B, 1).int()


@pytest.mark.parametrize(
    "tokens", [-1, 1.5, "1", True, torch.tensor([1.0]), ints(1, 1), ROWS, ints(1, -1, 0)], ids=str
)
def test_what_was_never_written_is_not_wound_back_to(tokens: Any) -> None:
    cache = filled(5)
    before = cache.lengths.clone()
    with pytest.raises(ValueError, match="rewind: tokens must be an int >= 0"):
        cache.rewind(tokens)
    assert torch.equal(cache.lengths, before)


def test_indices_that_leave_the_cache_are_named() -> None:
    cache = filled(5)
    q = torch.zeros(B, 1, 4, D)
    assert cache.block_table is not None
    cache.block_table[0, 3] = cache.k.shape[0]
    with pytest.raises(ValueError, match=r"block_table must hold indices in \[0, 15\), got \[15\]"):
        tw.attention_with_cache(q, cache)
    cache.block_table[0, 3] = -1
    with pytest.raises(ValueError, match=r"got \[-1\]"):
        tw.attention_with_cache(q, cache)
    # A page that nothing is in may be anything.
    cache.lengths[0] = 15
    assert tw.attention_with_cache(q, cache).isfinite().all()
    rows = tw.KVCache(cache.k, cache.v, ints(1, 1), batch_index=ints(3, 15))
    with pytest.raises(ValueError, match=r"batch_index must hold indices in \[0, 15\)"):
        tw.attention_with_cache(q[:2], rows)
    cache.starts = ints(0, -2, 0)
    with pytest.raises(ValueError, match="starts must not be negative"):
        tw.attention_with_cache(q, cache)


@pytest.mark.parametrize("page", [None, 1, 5])
def test_tokens_one_by_one_are_all_at_once(page: int | None) -> None:
    k, v = torch.randn(B, 7, G, D), torch.randn(B, 7, G, E)
    rotary = tw.Rotary(torch.randn(N, 3), torch.randn(N, 3), interleaved=True)
    caches = [tw.KVCache.allocate(B, N, G, D, E, page_size=page) for _ in range(3)]
    caches = [tw.KVCache(**{**vars(c), "k": c.k.float(), "v": c.v.float()}) for c in caches]
    for c in caches:
        c.k.zero_()
        c.v.zero_()
    caches[0].append(k, v, rotary=rotary)
    for i in range(7):
        caches[1].append(k[:, i : i + 1], v[:, i : i + 1], rotary=rotary)
    # Packed, with two tokens that belong to nobody.
    flat = [torch.cat([x.flatten(0, 1), x[0, :2]]) for x in (k, v)]
    caches[2].append(*flat, cu_seqlens=ints(0, 7, 14, 21), rotary=rotary)
    for c in caches:
        assert c.lengths.tolist() == [7] * B
        assert torch.equal(c.k, caches[0].k) and torch.equal(c.v, caches[0].v)
    caches[0].rewind(ints(2, 0, 9))
    assert caches[0].lengths.tolist() == [5, 7, 0]


def test_float8_saturates_and_a_token_has_its_own_scale() -> None:
    cache = tw.KVCache.allocate(1, 4, 1, D, E, dtype=F8)
    assert cache.nbytes == 4 * (D + E)
    k = torch.stack([torch.full((1, D), 1e4), torch.zeros(1, D)]).unsqueeze(0)
    cache.append(k, torch.full((1, 2, 1, E), -3.0))
    assert cache.k_scale is not None
    assert cache.k[0, :2, 0].float().tolist() == [[448.0] * D, [0.0] * D]
    assert cache.k_scale[0, :2, 0].tolist() == [(torch.tensor(1e4) / 448).item(), 1.0]
    fixed = tw.KVCache(cache.k, cache.v, ints(2), k_scale=torch.ones(1), v_scale=torch.ones(1))
    fixed.append(k[:, :1], torch.zeros(1, 1, 1, E))
    assert fixed.k[0, 2, 0].float().tolist() == [448.0] * D
