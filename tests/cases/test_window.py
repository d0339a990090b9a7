"""Cases at the edges of sliding windows."""

import pytest
import torch

import tilewise as tw
from tests.cases.common import (
    NAN,
    Outcome,
    Rule,
    assert_copied,
    check,
    everything,
    formula,
    is_zero,
    on_backends,
    packed_formula,
    qkv,
    spoiled,
    visibility,
    windowed,
)


def check_window(backend: str, x: dict[str, torch.Tensor], mask: tw.Mask, rule: Rule) -> Outcome:
    visible = visibility(rule, x["q"].shape[1], x["k"].shape[1])
    return check(
        lambda **x: tw.attention_partial(**x, mask=mask, backend=backend),
        lambda **x: formula(**x, visible=visible),
        x,
    )


@on_backends
@pytest.mark.parametrize("S", [129, 520])
def test_c031_four_ways_to_say_causal(backend: str, S: int) -> None:
    x = qkv(1, S, S, (2, 1), 128, dtype=torch.float16)
    for mask in (tw.causal(), tw.window(None, 0), tw.window(S, 0), tw.window(S - 1, 0)):
        check_window(backend, x, mask, lambda p, j: j <= p)


@on_backends
@pytest.mark.parametrize("bound", [3, 4, 2**31 - 1, 2**31, 2**40, 2**63 - 1])
def test_c032_window_wider_than_both_lengths_is_full(backend: str, bound: int) -> None:
    x = qkv(2, 4, 2, (4, 2), 16)
    for left, right in ((None, bound), (bound, bound), (bound, None)):
        check_window(backend, x, tw.window(left, right), everything)


@on_backends
def test_c032_a_right_bound_of_the_key_length_hides_a_key(backend: str) -> None:
    """M 4, N 2: query 0 stands at -2, so a right bound of 2 does not reach key 1."""
    x = qkv(2, 4, 2, (4, 2), 16)
    hides = check_window(backend, x, tw.window(None, 2), lambda p, j: j <= p + 2)
    assert_copied(hides.out[:, 0], x["v"][:, 0].repeat_interleave(2, dim=1))


@on_backends
def test_c033_zero_is_a_bound(backend: str) -> None:
    x = qkv(2, 9, 9, (4, 2), 16)
    got = check_window(backend, x, tw.window(0, 0), windowed(0, 0))
    assert_copied(got.out, x["v"].repeat_interleave(2, dim=2))
    for left, right in ((3, 0), (0, 3)):
        bounded = check_window(backend, x, tw.window(left, right), windowed(left, right))
        loose = tw.window(left, None) if right == 0 else tw.window(None, right)
        unbounded = tw.attention(**x, mask=loose, backend=backend)
        assert not torch.equal(bounded.out, unbounded)


@on_backends
@pytest.mark.parametrize("N", [17, 40, 129])
def test_c035_rows_whose_window_misses_every_key(backend: str, N: int) -> None:
    M, (left, right) = 129, (32, 64)
    x = qkv(2, M, N, (4, 2), 32)
    got = check_window(backend, x, tw.window(left, right), windowed(left, right))
    sees = visibility(windowed(left, right), M, N).any(-1)
    assert bool(sees.any()) and bool((~sees).any()) == (M - right > N)
    assert got.lse is not None
    assert is_zero(got.out[:, ~sees]) and is_zero(got.grads["q"][:, ~sees])
    assert torch.equal(got.lse.isneginf(), (~sees).expand_as(got.lse))


@on_backends
@pytest.mark.parametrize("left", [0, 7])
def test_c040_windowed_decode_is_a_row_of_the_whole(backend: str, left: int) -> None:
    N = 20
    x = qkv(2, N, N, (4, 2), 16)
    whole = check_window(backend, x, tw.window(left, 0), windowed(left, 0)).out
    cu_q, cu_k = torch.arange(3), torch.arange(3) * N
    for t in range(N):
        # What comes after step t is slack of the cache.
        cache = {n: spoiled(x[n], (slice(None), slice(t + 1, None))).flatten(0, 1) for n in "kv"}
        used = [t + 1, t + 1]
        step = check(
            lambda used=used, **x: tw.attention_varlen_partial(
                **x,
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                seqused_k=torch.tensor(used),
                mask=tw.window(left, 0),
                backend=backend,
            ),
            lambda used=used, **x: packed_formula(
                **x, cu_q=[0, 1, 2], cu_k=cu_k.tolist(), rule=windowed(left, 0), used_k=used
            ),
            {"q": x["q"][:, t], **cache},
        )
        assert step.out.shape == whole[:, t].shape
        if left == 0:
            assert torch.equal(step.out, whole[:, t])


@on_backends
def test_c041_right_window_over_a_long_cache(backend: str) -> None:
    """The 16 queries stand at the end, so they see 16, 15, ..., 1 keys of 20,000; D is odd."""
    N = 20_000
    x = qkv(2, 16, N, (2, 1), 59, dtype=torch.float16)
    x |= {name: spoiled(x[name], (slice(None), slice(0, N - 16))) for name in ("k", "v")}
    got = check_window(backend, x, tw.window(0, 256), windowed(0, 256))
    assert is_zero(got.grads["k"][:, : N - 16]) and is_zero(got.grads["v"][:, : N - 16])
    last = x["v"][:, -1].repeat_interleave(2, dim=1)
    assert torch.equal(got.out[:, -1], last)


@on_backends
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
@pytest.mark.parametrize(("M", "N"), [(20, 8), (140, 11), (300, 150)])
def test_c042_only_empty_rows_are_zero(
    backend: str, M: int, N: int, heads: tuple[int, int]
) -> None:
    """The first M - N rows of every head see nothing, in the middle of a tile."""
    x = qkv(2, M, N, heads, 16)
    x["q"] = spoiled(x["q"], (slice(None), slice(0, M - N)), NAN)
    got = check_window(backend, x, tw.window(5, 0), windowed(5, 0))
    assert got.lse is not None
    assert is_zero(got.out[:, : M - N]) and bool((got.out[:, M - N :] != 0).any(-1).all())
    assert is_zero(got.grads["q"][:, : M - N])
    assert bool(got.lse[..., : M - N].isneginf().all()) and bool(
        got.lse[..., M - N :].isfinite().all()
    )
