"""The hopper backend's backward on its GPU: shapes, placements, isolation, layouts, repeats.

`python -m pytest --device cuda tests/gpu/test_hopper_backward.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import formula
from tests.gpu.common import DEVICE, are_equal, ints, normal
from tests.gpu.hopper import (
    CU_K,
    CU_Q,
    HIDING,
    NEEDS_HOPPER,
    RAGGED,
    WINDOWS,
    band,
    compiled,
    draw,
    no_hang,
)
from tests.helpers import check_call
from tilewise.core.case import Case
from tilewise.core.tolerance import assert_within_budget
from tilewise.dense import hopper_backward_call
from tilewise.dense.api import attention_partial_backward
from tilewise.dense.budget import floors

__all__ = ["compiled", "no_hang"]
pytestmark = [pytest.mark.gpu, NEEDS_HOPPER]
BF16, FP16 = torch.bfloat16, torch.float16
# More than the 128 keys below which Triton's backward runs.
KEYS = (129, 191, 192, 193, 256, 257, 1000)


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the runs of the backward under test; a test without any would show nothing."""
    runs: list[int] = []
    inner = hopper_backward_call.attention_gradients

    def counted(*arguments: Any) -> list[Tensor]:
        runs.append(1)
        return inner(*arguments)

    monkeypatch.setattr(hopper_backward_call, "attention_gradients", counted)
    yield runs
    assert runs


def gradients(x: list[Tensor], dout: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in x]
    out = tw.attention(*leaves, backend="hopper", **options)
    return list(torch.autograd.grad(out, leaves, dout))


def check(x: list[Tensor], dout: Tensor, visible: Tensor, **options: Any) -> list[Tensor]:
    """Gradients within the error budget, the floor of what cancels included."""
    got = gradients(x, dout, **options)

    def differentiate(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in x]
        out, _ = formula(*leaves, visible)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    exact, eager = differentiate(torch.float64), differentiate(x[0].dtype)
    wide = {name: t.double() for name, t in zip("qkv", x, strict=True)}
    case = Case("attention", "windows and lengths", wide, options)
    cancelled = floors(case, wide, {"out": dout.double()}, torch.finfo(torch.float32).eps)
    for name, *three in zip("qkv", got, exact, eager, strict=True):
        assert_within_budget(*three, name=f"d{name}", floor=cancelled[name])
    return got


def dout_of(q: Tensor, v: Tensor) -> Tensor:
    return normal(*q.shape[:-1], v.shape[-1], dtype=q.dtype, seed=77)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("M", RAGGED)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_ragged_lengths(D: int, M: int) -> None:
    for N in KEYS:
        x = draw(2, M, N, D=D, seed=N)
        dout = dout_of(x[0], x[2])
        check(x, dout, band(M, N, None, None))
        check(x, dout, band(M, N, None, 0), mask=tw.causal())


@pytest.mark.parametrize("D", [64, 128, 256])
def test_windows(D: int) -> None:
    for M, N, left, right in WINDOWS:
        shift = min(right, 0)
        mask = tw.window(left + shift, right - shift, offset=N - M + shift)
        x = draw(1, M, N, (3, 3), D=D)
        check(x, dout_of(x[0], x[2]), band(M, N, left, right), mask=mask)


@pytest.mark.parametrize(
    ("D", "E"),
    [
        (16, 16),
        (59, 37),
        (80, 80),
        (64, 128),
        (128, 48),
        (160, 160),
        (192, 128),
        (192, 192),
        (96, 256),
        (256, 64),
        (200, 72),
    ],
)
def test_other_head_dims(D: int, E: int) -> None:
    x = draw(2, 130, 300, D=D, E=E)
    check(x, dout_of(x[0], x[2]), band(130, 300, None, 0), mask=tw.causal())


@pytest.mark.parametrize("D", [64, 128, 256])
def test_fp16_and_grouped_heads(D: int) -> None:
    for heads in ((8, 1), (6, 3), (4, 4), (1, 1)):
        x = draw(2, 700, 900, heads, D=D, dtype=FP16)
        check(x, dout_of(x[0], x[2]), band(700, 900, None, 0), mask=tw.causal())


def test_batch_times_heads_of_70000() -> None:
    x = draw(700, 3, 129, (100, 1), D=64)
    check(x, dout_of(x[0], x[2]), band(3, 129, None, 0), mask=tw.causal())


@pytest.mark.parametrize("D", [64, 128, 256])
def test_lse_and_a_sink_that_stays(D: int) -> None:
    """The gradient that comes through the lse, and a sink in it that does not learn."""
    tensors = dict(zip("qkv", draw(2, 300, 500, (4, 2), D=D), strict=True))
    check_call("attention_partial", tensors, backend="hopper", mask=tw.causal())
    x = draw(1, 300, 500, (4, 2), D=D)
    sinks, dout = normal(4, dtype=torch.float32, seed=9), dout_of(x[0], x[2])
    got = gradients(x, dout, sinks=sinks, mask=tw.causal())

    def differentiate(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in x]
        out, _ = formula(*leaves, band(300, 500, None, 0), sinks=sinks)
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    for three in zip(got, differentiate(torch.float64), differentiate(BF16), strict=True):
        assert_within_budget(*three)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_softcap_slopes_and_scales(D: int) -> None:
    slopes = torch.linspace(0.01, 0.4, 4, device=DEVICE)
    window = tw.window(100, 20)
    terms: list[dict[str, Any]] = [
        {"softcap": 2.0}, {"alibi_slopes": slopes}, {"scale": -0.1}, {"scale": 0.0},
        {"softcap": 3.0, "alibi_slopes": slopes.expand(2, 4) * 2, "mask": window},
        {"softcap": 1.0, "scale": -0.3, "mask": window},
    ]  # fmt: skip
    for M, N in ((300, 500), (65, 129), (500, 300)):
        tensors = dict(zip("qkv", draw(2, M, N, (4, 2), D=D), strict=True))
        for some in terms:
            check_call("attention", tensors, backend="hopper", **{"mask": tw.causal(), **some})


@pytest.mark.parametrize("D", [64, 128, 256])
def test_sinks_that_learn(D: int) -> None:
    for M, N, mask in (
        (1000, 1000, tw.causal()), (300, 200, tw.causal()), (65, 257, tw.window(50, 0)),
        (300, 1000, tw.full()),
    ):  # fmt: skip
        tensors = dict(zip("qkv", draw(2, M, N, (4, 2), D=D), strict=True))
        tensors["sinks"] = torch.linspace(-1, 2, 4, device=DEVICE)
        check_call("attention", tensors, backend="hopper", mask=mask)
        check_call("attention_partial", tensors, backend="hopper", mask=mask)
    q, k, v = (x[0] for x in draw(1, 1400, 1500, (4, 2), D=D))
    packed = {"q": q, "k": k, "v": v, "sinks": tensors["sinks"]}
    lengths = {"cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K)}
    check_call("attention_varlen", packed, backend="hopper", mask=tw.causal(), **lengths)


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("D", [64, 80, 128, 256])
def test_pieces_add_into_buffers(
    D: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch, taken: list[int]
) -> None:
    """Two halves of the keys, as a ring visits them, into buffers that held something and whose
    heads come before their rows."""
    inner = hopper_backward_call.attention_bwd
    monkeypatch.setattr(
        hopper_backward_call, "attention_bwd", lambda *x: (taken.append(1), inner(*x))
    )
    x = draw(2, 300, 700, heads, D=D)
    q, k, v = x
    dout, visible = dout_of(q, v), band(300, 700, None, 0)

    def differentiate(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in x]
        return torch.autograd.grad(formula(*leaves, visible)[0], leaves, dout.to(dtype))

    with torch.no_grad():
        out, lse = tw.attention_partial(*x, mask=tw.causal(), backend="hopper")
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.ones(t.transpose(1, 2).shape, device=DEVICE).transpose(1, 2) for t in x)
    for keys in (slice(0, 330), slice(330, 700)):
        attention_partial_backward(
            dout, q, k[:, keys], v[:, keys], lse, delta, dq=dq, dk=dk[:, keys], dv=dv[:, keys],
            mask=tw.causal(), q_start=400, k_start=keys.start, backend="hopper",
        )  # fmt: skip
    three = zip((dq, dk, dv), differentiate(torch.float64), differentiate(BF16), strict=True)
    for got, exact, eager in three:
        assert_within_budget((got - 1).to(BF16), exact, eager)


# ---------------------------------------------------------------- placements


def check_packed(
    D: int, mask: tw.Mask, heads: tuple[int, int] = (2, 1), E: int | None = None, **options: Any
) -> None:
    q, k, v = (x[0] for x in draw(1, 1400, 1500, heads, D=D, E=E))
    tensors = {"q": q, "k": k, "v": v}
    lengths = {"cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K)}
    check_call(
        "attention_varlen_partial", tensors, backend="hopper", mask=mask, **lengths, **options
    )


@pytest.mark.parametrize("D", [64, 128, 256])
def test_packed_documents(D: int) -> None:
    for mask in (tw.full(), tw.causal(), tw.window(40, 3)):
        check_packed(D, mask)
    used = {
        "seqused_q": ints(1, 0, 60, 3, 128, 999, 0, 63),
        "seqused_k": ints(7, 5, 0, 0, 150, 1000, 3, 65),
    }
    check_packed(D, tw.causal(), **used)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3)])
def test_packed_documents_of_other_heads_and_dims(heads: tuple[int, int]) -> None:
    for D, E in ((40, 24), (80, 96)):
        check_packed(D, tw.causal(), heads, E)


@pytest.mark.parametrize("D", [64, 128, 256])
def test_documents_leave_each_other_alone(D: int) -> None:
    """dK and dV to the bit, whatever stands in another document and in rows of none."""
    q, k, v = (x[0] for x in draw(1, 1400, 1500, D=D))
    options = {
        "cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K), "mask": tw.causal(),
    }  # fmt: skip
    dout = dout_of(q, v)

    def run() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = tw.attention_varlen(*leaves, backend="hopper", **options)
        return list(torch.autograd.grad(out, leaves, dout))

    expected = run()
    q[CU_Q[-1] :], k[CU_K[-1] :], v[CU_K[-1] :] = (float("nan"),) * 3
    dout[CU_Q[-1] :] = float("nan")
    found = run()
    assert are_equal(found[1:], expected[1:])
    assert bool(found[0].isfinite().all()) and not bool(found[0][CU_Q[-1] :].any())
    for x, cu in ((q, CU_Q), (k, CU_K), (v, CU_K)):
        x[cu[4] : cu[5]] = float("nan")
    found = run()
    for i, (x, cu) in enumerate(zip(found, (CU_Q, CU_K, CU_K), strict=True)):
        for number, rows in enumerate(pairwise(cu)):
            if number == 4:
                assert bool(x[slice(*rows)].isnan().any())
            elif i == 0:
                assert bool(x[slice(*rows)].isfinite().all())
            else:
                assert torch.equal(x[slice(*rows)], expected[i][slice(*rows)])


@pytest.mark.parametrize("D", [64, 128, 256])
def test_padding_and_masks_of_documents(D: int) -> None:
    tensors = dict(zip("qkv", draw(3, 200, 300, (4, 2), D=D), strict=True))
    lengths = ints(300, 0, 130)
    for mask in (
        tw.causal() & tw.key_padding(lengths),
        tw.causal() & tw.documents(ints(0, 3, 150, 300)),
        tw.window(99, 0, offset=ints(200, 30, -60)),
    ):
        check_call("attention", tensors, backend="hopper", mask=mask)


def test_many_short_documents() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 9, (400,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(DEVICE, torch.int32)
    total = int(cu[-1])
    q, k, v = (x[0] for x in draw(1, total, total, D=64))
    options = {"cu_seqlens_q": cu, "mask": tw.causal()}
    check_call("attention_varlen", {"q": q, "k": k, "v": v}, backend="hopper", **options)


# ---------------------------------------------------------------- isolation and layouts


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_no_query_sees_does_not_exist(D: int, name: str) -> None:
    """Nor do rows that see nothing."""
    M, N, mask, edges = HIDING[name]
    x = draw(1, M, N, (2, 2), D=D)
    q, k, v = x
    visible, dout = band(M, N, *edges), dout_of(q, v)
    expected = check(x, dout, visible, mask=mask)
    hidden, empty = ~visible.any(0), ~visible.any(1)
    for value in (float("nan"), float("inf")):
        k[:, hidden], v[:, hidden] = value, value
        q[:, empty], dout[:, empty] = value, value
        found = gradients(x, dout, mask=mask)
        assert are_equal(found[1:], expected[1:])
        clean = [t.nan_to_num(0.0, 0.0, 0.0) for t in (*x, dout)]
        check(clean[:3], clean[3], visible, mask=mask)
        assert bool(found[0].isfinite().all()) and not bool(found[0][:, empty].any())


LAYOUTS: dict[str, Callable[[int], list[Tensor]]] = {
    "fused qkv": lambda D: list(normal(2, 500, 3, 4, D).unbind(2)),
    "heads first": lambda D: [normal(2, 4, 500, D, seed=i).transpose(1, 2) for i in range(3)],
    "heads repeat": lambda D: [
        normal(2, 500, 4, D), *(normal(2, 500, 1, D, seed=i).expand(2, 500, 4, D) for i in (1, 2)),
    ],
    "unaligned": lambda D: [normal(2, 500, 4, D + 1, seed=i)[..., 1:] for i in range(3)],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_strides_change_no_bit_of_dk_and_dv(D: int, name: str) -> None:
    x = LAYOUTS[name](D)
    for dout in (
        dout_of(x[0], x[2]),
        normal(1, 1, 1, 1).expand(2, 500, 4, D),
        normal(2, 4, D, 500).permute(0, 3, 1, 2),
    ):
        expected = gradients([t.contiguous() for t in x], dout.contiguous(), mask=tw.causal())
        found = gradients(x, dout, mask=tw.causal())
        assert are_equal(found[1:], expected[1:])
        check(x, dout, band(500, 500, None, 0), mask=tw.causal())


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("D", [64, 128, 256])
def test_dk_and_dv_are_the_same_in_every_run(D: int) -> None:
    x = draw(2, 1000, 1500, (6, 2), D=D)
    dout = dout_of(x[0], x[2])
    first = gradients(x, dout, mask=tw.causal())
    for _ in range(100):
        assert are_equal(gradients(x, dout, mask=tw.causal())[1:], first[1:])


@pytest.mark.parametrize("D", [64, 128, 256])
def test_deterministic_gradients_are_the_same_in_every_run(D: int, taken: list[int]) -> None:
    x = draw(2, 1000, 1500, (6, 2), D=D)
    dout = dout_of(x[0], x[2])
    first = check(x, dout, band(1000, 1500, None, 0), mask=tw.causal(), deterministic=True)
    runs = len(taken)
    for _ in range(100):
        assert are_equal(gradients(x, dout, mask=tw.causal(), deterministic=True), first)
    torch.use_deterministic_algorithms(True)
    try:
        assert are_equal(gradients(x, dout, mask=tw.causal()), first)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(taken) == runs + 101


def test_a_graph_replays_with_the_contents_of_the_moment() -> None:
    x = draw(2, 500, 700, (4, 2), D=128)
    dout = dout_of(x[0], x[2])
    gradients(x, dout, mask=tw.causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(x, dout, mask=tw.causal())
    for seed in range(3):
        for i, t in enumerate((*x, dout)):
            t.copy_(normal(*t.shape, seed=10 * seed + i))
        graph.replay()
        expected = check(x, dout, band(500, 700, None, 0), mask=tw.causal())
        assert are_equal(found[1:], expected[1:])
        assert_within_budget(found[0], expected[0].double(), expected[0])


def test_streams_side_by_side() -> None:
    inputs = [draw(2, 900, 900, (4, 4), D=128, seed=10 * i) for i in range(3)]
    douts = [dout_of(x[0], x[2]) for x in inputs]
    expected = [gradients(x, dout, mask=tw.causal()) for x, dout in zip(inputs, douts, strict=True)]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        found = []
        for stream, x, dout in zip(streams, inputs, douts, strict=True):
            with torch.cuda.stream(stream):
                found.append(gradients(x, dout, mask=tw.causal()))
        torch.cuda.synchronize()
        for got, one in zip(found, expected, strict=True):
            assert are_equal(got[1:], one[1:])
