"""Cases of extreme numbers: logits far from 0, softcap, scale of any sign."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    Form,
    causally,
    check,
    clean,
    everything,
    formula,
    is_zero,
    normal,
    on_backends,
    qkv,
    run,
    spoiled,
    visibility,
)
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget


def form(visible: Tensor, **terms: Any) -> Form:
    return lambda **x: formula(**x, visible=visible, **terms)


def partial(backend: str, mask: tw.Mask | None = None, **options: Any) -> Any:
    mask = tw.full() if mask is None else mask
    return lambda **x: tw.attention_partial(**x, mask=mask, backend=backend, **options)


def lowered_logits(x: dict[str, Tensor], by: float) -> dict[str, Tensor]:
    """The same q, k, v with every logit lower by `by`, through a feature of their own."""
    D = x["q"].shape[-1]
    q, k = x["q"].clone(), x["k"].clone()
    q[..., 0], k[..., 0] = 16.0, -by * D**0.5 / 16.0
    return {"q": q, "k": k, "v": x["v"]}


@on_backends
def test_c063_every_logit_far_below_any_sentinel(backend: str) -> None:
    """Raw q.k is about -245,760 on every key; all numbers are exact in bf16."""
    x = qkv(2, 33, 70, (4, 2), 128, dtype=torch.bfloat16)
    sign = normal(128).sign()
    steps = torch.zeros(2, 70, 2, 128)
    steps[..., :16] = torch.randint(-1, 2, (2, 70, 2, 16))
    x["q"] = (40.0 * sign).expand(2, 33, 4, 128).to(torch.bfloat16).contiguous()
    x["k"] = (-(48.0 + 0.25 * steps) * sign).to(torch.bfloat16)
    visible = torch.tensor(True)
    got = check(
        lambda **x: tw.attention(**x, backend=backend), form(visible), x, eager_dtype=torch.float32
    )
    lse = partial(backend)(**x).lse
    assert float(lse.max()) < -21_000
    low, high = (
        f(x["v"], 1, keepdim=True).repeat_interleave(2, dim=2) for f in (torch.amin, torch.amax)
    )
    assert bool((got.out >= low).all()) and bool((got.out <= high).all())


@on_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c064_negative_logits_behind_a_hidden_tile(backend: str, dtype: torch.dtype) -> None:
    x = lowered_logits(qkv(2, 88, 448, (14, 2), 32, dtype=dtype), by=100.0)
    got = check(partial(backend, tw.causal()), form(visibility(causally, 88, 448)), x)
    assert got.lse is not None and float(got.lse.max()) < -80


@on_backends
@pytest.mark.parametrize("shift", [1.0, -1.0, 100.0, -100.0, 1e4, -1e4, 1e5, -1e5])
def test_c064_adding_a_constant_changes_nothing_but_the_lse(backend: str, shift: float) -> None:
    x = qkv(2, 40, 150, (4, 2), 16)
    visible = visibility(causally, 40, 150)
    bias = torch.full((1, 1, 40, 150), shift)
    got = check(partial(backend, tw.causal(), bias=bias), form(visible, bias=bias.double()), x)
    exact, lse = formula(*(t.double() for t in x.values()), visible)
    eager, _ = formula(*x.values(), visible, bias=bias)
    assert got.lse is not None
    assert_within_budget(got.out, exact, eager)
    assert_lse_within_budget(got.lse, lse + shift, torch.float32)


@on_backends
def test_c065_softcap_far_past_saturation(backend: str) -> None:
    """D 1, scale 1, q 1: the keys are the logits before the cap of 50."""
    logits = torch.tensor([4400.0, 5000.0, 1e4, -1e4, 60.0, 0.5])
    x = {"q": torch.ones(2, 3, 2, 1), "k": logits.view(1, 6, 1, 1).repeat(2, 1, 1, 1)}
    x["v"] = normal(2, 6, 1, 4)
    visible = torch.tensor(True)
    options = {"scale": 1.0, "softcap": 50.0}
    got = check(partial(backend, **options), form(visible, **options), x)
    assert is_zero(got.grads["k"][:, :4]) and not is_zero(got.grads["k"][:, 4:5])
    top = tw.attention_partial(x["q"], x["k"][:, :1], x["v"][:, :1], **options, backend=backend)
    assert_lse_within_budget(top.lse, torch.full_like(top.lse, 50.0).double(), torch.float32)


@on_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("S", "D"), [(64, 32), (192, 64), (320, 32), (192, 128), (704, 32)])
def test_c066_lse_below_the_range_of_exp(backend: str, S: int, D: int, dtype: torch.dtype) -> None:
    """All-true mask, S % 128 == 64, lse < -88.7: the padding of the last tile is not a key."""
    x = lowered_logits(qkv(1, S, S, (2, 1), D, dtype=dtype), by=150.0)
    mask = tw.from_function(lambda b, h, m, n: (m >= 0) & (n >= 0))
    got = check(partial(backend, mask), form(visibility(everything, S, S)), x)
    assert got.lse is not None and float(got.lse.max()) < -100


@on_backends
@pytest.mark.parametrize("N", [1, 37])
@pytest.mark.parametrize("scale", [0.0, -1.0, -0.25])
def test_c068_scale_of_zero_and_below(backend: str, scale: float, N: int) -> None:
    x = qkv(2, 5, N, (4, 2), 16)
    lengths = torch.tensor([1, max(1, N - 4)])
    slack = torch.arange(N) >= lengths.view(2, 1)
    x |= {name: spoiled(x[name], slack) for name in "kv"}
    visible = ~slack.view(2, 1, 1, N)
    mask = tw.key_padding(lengths)
    got = check(partial(backend, mask, scale=scale), form(visible, scale=scale), x)
    if scale == 0.0:
        counts = lengths.double().log().view(2, 1, 1).expand(2, 4, 5)
        assert got.lse is not None
        assert_lse_within_budget(got.lse, counts, torch.float32)
        assert is_zero(got.grads["q"]) and is_zero(got.grads["k"])
    else:
        # The same call with q negated is the same product; not to the bit on a matrix unit.
        negated = run(partial(backend, mask, scale=-scale), x | {"q": -x["q"]})
        exact, eager = (
            run(form(visible, scale=scale), {n: clean(t, wide) for n, t in x.items()})
            for wide in (torch.float64, None)
        )
        assert_within_budget(negated.out, exact.out, eager.out)
