"""Cases of head dims and of the ratio of query to kv heads."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    NAN,
    Outcome,
    causally,
    check,
    everything,
    formula,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    same,
    visibility,
)
from tilewise.core.tolerance import assert_within_budget


def check_dense(backend: str, x: dict[str, Tensor], *, is_causal: bool = True) -> Outcome:
    M, N = x["q"].shape[1], x["k"].shape[1]
    mask, rule = (tw.causal(), causally) if is_causal else (tw.full(), everything)
    return check(
        lambda **x: tw.attention_partial(**x, mask=mask, backend=backend),
        lambda **x: formula(**x, visible=visibility(rule, M, N)),
        x,
    )


@on_backends
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("D", [40, 72, 80, 96, 112, 136, 144, 160, 176])
def test_c141_head_dims_off_the_powers_of_two(backend: str, D: int, heads: tuple[int, int]) -> None:
    x = qkv(2, 33, 33, heads, D)
    got = check_dense(backend, x)
    padded = {name: torch.nn.functional.pad(t, (0, 256 - D)) for name, t in x.items()}
    wide = run(
        lambda **x: tw.attention(**x, mask=tw.causal(), scale=D**-0.5, backend=backend), padded
    )
    exact, _ = formula(*(t.double() for t in x.values()), visibility(causally, 33, 33))
    assert_within_budget(wide.out[..., :D], exact, got.out)
    assert torch.equal(wide.out[..., D:], torch.zeros_like(wide.out[..., D:]))


@on_backends
@pytest.mark.parametrize("E", [128, 72])
@pytest.mark.parametrize("D", [136, 144, 152, 160, 168, 176])
def test_c144_wide_keys_narrow_values(backend: str, D: int, E: int) -> None:
    check_dense(backend, qkv(2, 20, 35, (4, 2), D, E, dtype=torch.bfloat16))


@on_backends
def test_c145_packed_forgetting_bias_at_dim_100(backend: str) -> None:
    """Decay between two tokens is a difference of a running sum, given as bias; its gradient
    too. The documents are a tenth of the reported ones."""
    cu = [0, 15, 100, 130, 200]
    x = packed_qkv(200, 200, (2, 2), 100)
    x["decay"] = -normal(200, 2, seed=5).abs()

    def table(decay: Tensor) -> Tensor:
        longest = max(n1 - n0 for n0, n1 in pairwise(cu))
        tables = []
        for n0, n1 in pairwise(cu):
            total = decay[n0:n1].cumsum(0).T
            one = total.unsqueeze(-1) - total.unsqueeze(-2)
            pad = longest - (n1 - n0)
            tables.append(torch.nn.functional.pad(one, (0, pad, 0, pad)))
        return torch.stack(tables)

    def call(decay: Tensor, **x: Tensor) -> Tensor:
        return tw.attention_varlen(
            **x, bias=table(decay), cu_seqlens_q=torch.tensor(cu), mask=tw.causal(), backend=backend
        )

    def form(decay: Tensor, **x: Tensor) -> tuple[Tensor, Tensor]:
        bias = table(decay)

        def bias_of(b: int, p: Tensor, j: Tensor) -> Tensor:
            return bias[b, :, : p.shape[0], : j.shape[1]]

        return packed_formula(**x, cu_q=cu, cu_k=cu, rule=causally, bias_of=bias_of)

    check(call, form, x)


@on_backends
@pytest.mark.parametrize("D", [60, 100])
def test_c146_nan_right_after_every_row(backend: str, D: int) -> None:
    """Each row of q, k, v and of the upstream gradient ends where NaN begins."""

    def walled(x: Tensor) -> Tensor:
        wall = x.new_full((*x.shape[:-1], D + 28), NAN)
        wall[..., :D] = x
        return wall[..., :D]

    plain = qkv(2, 37, 70, (4, 2), D)
    options = {"mask": tw.causal(), "deterministic": True, "backend": backend}
    x, dout = {name: walled(t) for name, t in plain.items()}, walled(torch.ones(2, 37, 4, D))
    got = check(
        lambda **x: tw.attention_partial(**x, **options),
        lambda **x: formula(**x, visible=visibility(causally, 37, 70)),
        x,
        dout=dout,
    )
    unwalled = run(
        lambda **x: tw.attention_partial(**x, **options),
        plain,
        dout.contiguous(),
    )
    same(got, unwalled)


@on_backends
@pytest.mark.parametrize("D", [80, 96, 160])
@pytest.mark.parametrize("N", [1, 300])
def test_c148_decode_at_odd_dims(backend: str, D: int, N: int) -> None:
    check_dense(backend, qkv(2, 1, N, (4, 2), D))


@on_backends
@pytest.mark.parametrize("ratio", [3, 5, 6, 7, 12])
def test_c149_any_ratio_of_heads_in_decode(backend: str, ratio: int) -> None:
    check_dense(backend, qkv(2, 1, 600, (2 * ratio, 2), 16))


@on_backends
@pytest.mark.parametrize("M", [1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 126, 127])
def test_c150_short_grouped_queries(backend: str, M: int) -> None:
    check_dense(backend, qkv(1, M, 150, (4, 2), 128), is_causal=M % 2 == 0)


@on_backends
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_c151_every_feature_counts(backend: str, heads: tuple[int, int]) -> None:
    x = qkv(3, 40, 40, heads, 128)
    first = check_dense(backend, x)
    for name in "qkv":
        other = x | {name: torch.cat([x[name][..., :64], -x[name][..., 64:]], dim=-1)}
        second = check_dense(backend, other)
        assert float((first.out - second.out).abs().max()) > 0.1


@on_backends
@pytest.mark.parametrize("ratio", [4, 8])
@pytest.mark.parametrize(("M", "N"), [(300, 300), (130, 400)])
def test_c153_grouped_heads_equal_repeated_ones(backend: str, ratio: int, M: int, N: int) -> None:
    """Several tiles of rows; the causal bound of a row must not depend on the group."""
    x = qkv(1, M, N, (2 * ratio, 2), 16)
    check_dense(backend, x)
    repeated = x | {name: x[name].repeat_interleave(ratio, dim=2) for name in "kv"}
    check_dense(backend, repeated)


@on_backends
def test_c156_value_dim_of_its_own_with_groups(backend: str) -> None:
    got = check_dense(backend, qkv(1, 200, 200, (8, 4), 64, 128))
    assert got.out.shape == (1, 200, 8, 128)
