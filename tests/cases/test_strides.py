"""Cases of strides: any layout of q, k, v and of the upstream gradient gives the same numbers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

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
from tests.helpers import backends
from tilewise.core.tolerance import assert_within_budget

Layout = Callable[[Tensor], Tensor]


def last_dim_strided(x: Tensor) -> Tensor:
    """Dense, but heads and features are the other way round in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def every_other_feature(x: Tensor) -> Tensor:
    """Stride 2 in the last dim, NaN between."""
    wide = x.new_full((*x.shape, 2), NAN)
    wide[..., 0] = x
    return wide[..., 0]


def inside_a_buffer(x: Tensor) -> Tensor:
    """A slice in every dim of a larger buffer of NaN."""
    buffer = x.new_full([size + 3 for size in x.shape], NAN)
    view = buffer[tuple(slice(1, 1 + size) for size in x.shape)]
    view.copy_(x)
    return view


LAYOUTS: list[Layout] = [last_dim_strided, heads_first, every_other_feature, inside_a_buffer]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)


def check_dense(backend: str, x: dict[str, Tensor], dout: Tensor | None = None) -> Outcome:
    M, N = x["q"].shape[1], x["k"].shape[1]
    return check(
        lambda **x: tw.attention(**x, mask=tw.causal(), deterministic=True, backend=backend),
        lambda **x: formula(**x, visible=visibility(causally, M, N)),
        x,
        dout=dout,
    )


@on_backends
@each_layout
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_c106_last_dim_not_contiguous(backend: str, layout: Layout, heads: tuple[int, int]) -> None:
    x = {name: layout(t) for name, t in qkv(2, 35, 70, heads, 16).items()}
    check_dense(backend, x, dout=layout(normal(2, 35, heads[0], 16)))


@on_backends
@each_layout
def test_c106_packed_and_kv_packed(backend: str, layout: Layout) -> None:
    cu_q, cu_k = [0, 20, 20, 35], [0, 9, 30, 70]
    x = packed_qkv(35, 70, (4, 2), 16)
    kv = layout(torch.stack([x["k"], x["v"]], dim=1))
    x = {"q": layout(x["q"]), "k": kv[:, 0], "v": kv[:, 1]}
    bounds = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    check(
        lambda **x: tw.attention_varlen(**x, **bounds, mask=tw.causal(), backend=backend),
        lambda **x: packed_formula(**x, cu_q=cu_q, cu_k=cu_k, rule=causally),
        x,
        dout=layout(normal(35, 4, 16)),
    )


@on_backends
@pytest.mark.parametrize("strided", ["k", "v", "q", "kv", "qkv"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_c107_each_mix_of_layouts(backend: str, strided: str, heads: tuple[int, int]) -> None:
    x = qkv(2, 65, 65, heads, 64, dtype=torch.float16)
    x |= {name: heads_first(x[name]) for name in strided}
    check_dense(backend, x, dout=heads_first(normal(2, 65, heads[0], 64, dtype=torch.float16)))


@pytest.mark.parametrize("layout", [torch.clone, heads_first], ids=["plain", "heads_first"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_c107_what_the_fake_kernels_promise(heads: tuple[int, int], layout: Layout) -> None:
    """Shapes, strides and dtypes under FakeTensorMode are those of the real call."""
    x = qkv(2, 65, 65, heads, 64, 32)
    x["v"] = layout(x["v"])
    real = run(lambda **x: tw.attention_partial(**x, mask=tw.causal()), x)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in x.items()}
        leaves = {name: t.detach().requires_grad_() for name, t in fakes.items()}
        out, lse = tw.attention_partial(**leaves, mask=tw.causal())
        grads = torch.autograd.grad(
            [out, lse], list(leaves.values()), [torch.empty_like(out), torch.empty_like(lse)]
        )
    assert real.lse is not None
    for fake, got in zip(
        (out, lse, *grads), (real.out, real.lse, *real.grads.values()), strict=True
    ):
        assert (fake.shape, fake.stride(), fake.dtype) == (got.shape, got.stride(), got.dtype)


@on_backends
def test_c109_strides_of_singleton_dims_say_nothing(backend: str) -> None:
    q = normal(1, 1, 1, 2).transpose(2, 3)
    k, v = (normal(1, 1, 1, 1, seed=seed).as_strided((1, 1, 1, 1), (7, 5, 3, 9)) for seed in (1, 2))
    x = {"q": q.transpose(1, 2), "k": k, "v": v}
    assert x["q"].shape == (1, 2, 1, 1) and k.stride(-1) == 9
    check(
        lambda **x: tw.attention(**x, backend=backend),
        lambda **x: formula(**x, visible=torch.tensor(True)),
        x,
    )


@on_backends
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c110_strided_features_where_a_fused_op_could_run(
    backend: str, is_causal: bool, dtype: torch.dtype
) -> None:
    """Equal lengths, heads and dims: what PyTorch's own CPU kernel would also take."""
    x = {n: every_other_feature(t) for n, t in qkv(2, 40, 40, (2, 2), 32, dtype=dtype).items()}
    mask = tw.causal() if is_causal else tw.full()
    visible = visibility(causally if is_causal else everything, 40, 40)
    check(
        lambda **x: tw.attention(**x, mask=mask, backend=backend),
        lambda **x: formula(**x, visible=visible),
        x,
    )


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_c111_output_layout_is_one(heads: tuple[int, int]) -> None:
    """Contiguous from every backend, so that empty_like(out) means the same everywhere."""
    x = {name: heads_first(t) for name, t in qkv(2, 49, 49, heads, 32).items()}
    for backend in backends("tiled", "reference"):
        got = run(lambda backend=backend, **x: tw.attention_partial(**x, backend=backend), x)
        assert got.out.is_contiguous() and got.lse is not None and got.lse.is_contiguous()


@on_backends
@pytest.mark.parametrize("splits", [2, 5])
@pytest.mark.parametrize("layout", [torch.clone, heads_first], ids=["bshd", "bhsd_view"])
def test_c112_split_keys_in_both_layouts(backend: str, splits: int, layout: Layout) -> None:
    x = {name: layout(t) for name, t in qkv(3, 1, 130, (8, 2), 16).items()}
    edges = [130 * s // splits for s in range(splits + 1)]

    def split(q: Tensor, k: Tensor, v: Tensor) -> tw.Partial:
        return tw.merge(
            [
                tw.attention_partial(q, k[:, n0:n1], v[:, n0:n1], backend=backend)
                for n0, n1 in pairwise(edges)
            ]
        )

    check(split, lambda **x: formula(**x, visible=torch.tensor(True)), x)


@on_backends
def test_c113_keys_and_values_interleaved_in_one_cache(backend: str) -> None:
    cache = normal(3, 2, 70, 2, 16)
    views = {"q": normal(3, 5, 4, 16, seed=1), "k": cache[:, 0], "v": cache[:, 1]}
    strided = check_dense(backend, views)
    plain = check_dense(backend, {name: t.contiguous() for name, t in views.items()})
    same(strided, plain)


@on_backends
def test_c115_upstream_gradient_is_a_split_view(backend: str) -> None:
    """One projection is split into q, k and v, and the outputs of two layers are joined again."""
    tokens, weight, upstream = (
        normal(2, 30, 24),
        normal(24, 3 * 24, seed=1),
        normal(2, 30, 48, seed=2),
    )

    def joined(attend: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, w = (t.to(dtype).requires_grad_() for t in (tokens, weight))
        q, k, v = (part.unflatten(-1, (3, 8)) for part in (x @ w).split(24, dim=-1))
        outs = [attend(q, k, v), attend(v, q, k)]
        out = torch.cat([o.flatten(2) for o in outs], dim=-1)
        return torch.autograd.grad(out, (x, w), upstream.to(dtype))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return formula(q, k, v, visibility(causally, 30, 30))[0]

    got = joined(
        lambda q, k, v: tw.attention(q, k, v, mask=tw.causal(), backend=backend), torch.float32
    )
    exact, eager = joined(plain, torch.float64), joined(plain, torch.float32)
    for three in zip(got, exact, eager, strict=True):
        assert_within_budget(*three)
