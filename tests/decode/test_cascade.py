"""A shared prefix apart is the prefix in every cache."""

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_within_budget
from tilewise.decode.call import Splits, make_call
from tilewise.decode.reference import cache_eager

H, G, D = 6, 2, 16


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu").to(UNDER_TEST.device)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=UNDER_TEST.device)


def caches(prefix: int, own: list[int]) -> tuple[tw.KVCache, tw.KVCache, tw.KVCache]:
    """The prefix, what comes behind it, and both in one, fp32, in pages of 8."""
    k, v = draw(prefix, G, D), draw(prefix, G, D)
    tails = [(draw(n, G, D), draw(n, G, D)) for n in own]
    found = []
    for parts in ([(k, v)], tails, [(torch.cat([k, a]), torch.cat([v, b])) for a, b in tails]):
        lengths = [x.shape[0] for x, _ in parts]
        cache = tw.KVCache.allocate(
            len(parts), max(8, *lengths, 1), G, D, page_size=8, dtype=torch.float32,
            device=UNDER_TEST.device,
        )  # fmt: skip
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
        both = [torch.cat(x) for x in zip(*parts, strict=True)]
        cache.append(*both, cu_seqlens=ints([0, *lengths]).cumsum(0))
        found.append(cache)
    return found[0], found[1], found[2]


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prefix", [0, 50])
def test_cascade_is_the_whole(prefix: int, packed: bool, has_sinks: bool) -> None:
    own, counts = [20, 3, 9], [3, 3, 3]
    shared, behind, whole = caches(prefix, own)
    q = draw(sum(counts) + 2, H, D) if packed else draw(3, 3, H, D)
    cu = ints([0, *counts]).cumsum(0) if packed else None
    sinks = draw(H) if has_sinks else None
    options = {"mask": tw.causal(), "sinks": sinks, "cu_seqlens_q": cu}
    got = tw.cascade_attention(q, shared, behind, scale=0.4, softcap=3.0, **options)
    exact, _ = tw.attention_with_cache_partial(
        q, whole, scale=0.4, softcap=3.0, backend="reference",
        out_dtype=torch.float64, **options,
    )  # fmt: skip
    terms = {"scale": 0.4, "softcap": 3.0, "sinks": sinks, "bias": None, "alibi_slopes": None}
    call = make_call("test", q, whole, tw.causal(), terms, cu, None, Splits())
    assert_within_budget(got, exact, cache_eager(call).out)


def test_what_it_cannot_say_is_refused() -> None:
    shared, behind, _ = caches(16, [4, 5])
    q = draw(2, 1, H, D)
    with pytest.raises(NotImplementedError, match=r"full\(\) or causal\(\), got Window"):
        tw.cascade_attention(q, shared, behind, mask=tw.window(3, 0))
    with pytest.raises(ValueError, match="prefix must be a KVCache of one sequence, got 2"):
        tw.cascade_attention(q, behind, behind)
    with pytest.raises(ValueError, match=r"cascade_attention: q must be \[B, M, H, D\], got 3 dim"):
        tw.cascade_attention(draw(3, H, D), shared, behind)
    with pytest.raises(ValueError, match="q must be a tensor, got NoneType"):
        tw.cascade_attention(None, shared, behind)  # type: ignore[arg-type]
