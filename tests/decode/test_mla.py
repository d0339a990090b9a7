"""Latent attention: absorbed equals expanded, over pages, in float8, for any number of heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_within_budget
from tilewise.decode.budget import unread

R, P, NOPE, VALUE = 32, 16, 24, 20
F8 = torch.float8_e4m3fn


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device="cpu").to(UNDER_TEST.device, dtype)


def latent(
    lengths: list[int], page: int | None, dtype: torch.dtype = torch.float32
) -> tuple[tw.KVCache, list[Tensor]]:
    """A cache with NaN in its free slots, and its tokens `[N, R + P]`."""
    cache = tw.KVCache.latent(
        len(lengths), 80, rank=R, rope_dim=P, page_size=page, dtype=dtype, device=UNDER_TEST.device
    )
    unread(cache.k)
    tokens = [draw(n, R + P, dtype=torch.float32 if dtype == F8 else dtype) for n in lengths]
    cu = torch.tensor([0, *lengths], device=UNDER_TEST.device).cumsum(0)
    cache.append(torch.cat(tokens).unsqueeze(1), cu_seqlens=cu)
    return cache, tokens


def expanded(
    q: Tensor, rope: Tensor, tokens: Tensor, up_k: Tensor, up_v: Tensor, dtype: torch.dtype
) -> Tensor:
    """Keys and values of each head, in full: `[M, H, VALUE]`, causal."""
    q, rope, tokens, up_k, up_v = (x.to(dtype) for x in (q, rope, tokens, up_k, up_v))
    c, k_rope = tokens.split([R, P], -1)
    keys = torch.einsum("nr,hdr->hnd", c, up_k)
    keys = torch.cat([keys, k_rope.expand(keys.shape[0], -1, -1)], -1)
    values = torch.einsum("nr,hdr->hnd", c, up_v)
    s = torch.cat([q, rope], -1).transpose(0, 1) @ keys.mT * (NOPE + P) ** -0.5
    M, N = s.shape[1:]
    hidden = torch.ones(M, N, dtype=torch.bool, device=s.device).triu(N - M + 1)
    p = s.masked_fill(hidden, float("-inf")).softmax(-1)
    return (torch.nan_to_num(p) @ values).transpose(0, 1)


def absorbed(
    q: Tensor, rope: Tensor, tokens: Tensor, up_k: Tensor, up_v: Tensor, scale: float
) -> Tensor:
    """The formula of the op and of the products around it, in fp32: `[M, H, VALUE]`, causal."""
    q = torch.cat([torch.einsum("mhd,hdr->mhr", q, up_k), rope], -1)
    s = torch.einsum("mhx,nx->hmn", q, tokens) * scale
    M, N = s.shape[1:]
    hidden = torch.ones(M, N, dtype=torch.bool, device=s.device).triu(N - M + 1)
    p = torch.nan_to_num(s.masked_fill(hidden, float("-inf")).softmax(-1))
    return torch.einsum("mhr,hdr->mhd", torch.einsum("hmn,nr->mhr", p, tokens[:, :R]), up_v)


@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize(("heads", "M"), [(16, 1), (128, 2), (5, 4), (1, 3)])
def test_absorbed_is_expanded(heads: int, M: int, page: int | None) -> None:
    lengths = [70, 4, 33]
    cache, tokens = latent(lengths, page)
    q, rope = draw(3, M, heads, NOPE), draw(3, M, heads, P)
    up_k, up_v = R**-0.5 * draw(heads, NOPE, R), R**-0.5 * draw(heads, VALUE, R)
    q_latent = torch.einsum("bmhd,hdr->bmhr", q, up_k)
    out = tw.mla_with_cache(q_latent, rope, cache, scale=(NOPE + P) ** -0.5, mask=tw.causal())
    got = torch.einsum("bmhr,hdr->bmhd", out, up_v)
    for b in range(3):
        given = (q[b], rope[b], tokens[b], up_k, up_v)
        eager = absorbed(*given, scale=(NOPE + P) ** -0.5)
        assert_within_budget(got[b], expanded(*given, torch.float64), eager)


def test_a_slice_of_the_heads_is_that_slice() -> None:
    """Tensor parallelism: ranks share the cache, each has its heads."""
    cache, _ = latent([70, 9], 16)
    q, rope = draw(2, 1, 16, R), draw(2, 1, 16, P)
    whole = tw.mla_with_cache(q, rope, cache, scale=0.2)
    for first in (0, 5):
        heads = slice(first, first + 5)
        part = tw.mla_with_cache(q[:, :, heads], rope[:, :, heads], cache, scale=0.2)
        exact = whole[:, :, heads].double()
        floor = 16 * 1.2e-7 * float(exact.abs().max())
        assert_within_budget(part, exact, exact, floor=floor)


def test_float8_latents_are_quantised_once() -> None:
    cache, tokens = latent([70, 9], 16, F8)
    assert cache.k_scale is cache.v_scale
    q, rope = draw(2, 1, 6, R), draw(2, 1, 6, P)
    got = tw.mla_with_cache(q, rope, cache, scale=0.2)
    for b, rows in enumerate(tokens):
        scale = rows.abs().amax(-1, keepdim=True) / 448
        stored = (rows / scale).to(F8).double() * scale.double()
        s = torch.cat([q, rope], -1)[b, 0].double() @ stored.T * 0.2
        exact = s.softmax(-1) @ stored[:, :R]
        s = torch.cat([q, rope], -1)[b, 0] @ stored.float().T * 0.2
        eager = s.softmax(-1) @ stored[:, :R].float()
        assert_within_budget(got[b, 0], exact, eager, floor=1e-6 * float(exact.abs().max()))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rope": ({"q_rope": torch.zeros(2, 1, 6, P + 1)}, r"q_rope must be \[B, M, H, 16\]"),
    "latent": ({"q_latent": torch.zeros(2, 1, 6, R + P)}, r"q_latent must be \[B, M, H, 32\]"),
    "heads": ({"q_rope": torch.zeros(2, 1, 5, P)}, "with H = 6"),
    "cache": (
        {"cache": tw.KVCache.allocate(2, 8, 1, R + P, R)},
        "cache must be latent.*got another KVCache",
    ),
    # What attention takes for a default is wrong here.
    "scale": ({"scale": None}, "scale must be a number, which the model defines, got None"),
    "no cache": ({"cache": None}, "cache must be latent.*got NoneType"),
    "no tensor": ({"q_latent": [0.0]}, "q_latent must be a tensor, got list"),
}


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="the tensors of the table are on the CPU")
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, message = WRONG[name]
    given = {
        "q_latent": draw(2, 1, 6, R),
        "q_rope": draw(2, 1, 6, P),
        "cache": latent([9, 3], 4)[0],
    }
    with pytest.raises(ValueError, match=f"mla_with_cache: .*{message}"):
        tw.mla_with_cache(**{"scale": 0.2, **given, **change})


def test_values_of_a_latent_cache_are_not_appended() -> None:
    cache, _ = latent([9, 3], 4)
    with pytest.raises(ValueError, match="v must be None for a latent cache"):
        cache.append(draw(2, 1, 1, R + P), draw(2, 1, 1, R))
