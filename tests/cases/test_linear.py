"""Linear attention: gates of any strength, passes linked by states, padding, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases.common import NAN, normal
from tests.helpers import on_backend
from tilewise import linear
from tilewise.core.tolerance import assert_within_budget

gla, kda, delta_rule, gated_delta_rule, simple_gla = map(
    on_backend,
    (linear.gla, linear.kda, linear.delta_rule, linear.gated_delta_rule, linear.simple_gla),
)
short_convolution = linear.short_convolution


def draw(
    B: int, M: int, H: int = 2, D: int = 16, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k (normalised) and v of one head each."""
    q, k, v = (normal(B, M, H, D, seed=seed) for seed in (1, 2, 3))
    return [q.to(dtype), (k / k.norm(dim=-1, keepdim=True)).to(dtype), v.to(dtype)]


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence written out again, in the tensors' dtype. g: `[B, M, H, D]`."""
    B, M, H, D = q.shape
    s = q.new_zeros(B, H, D, v.shape[-1]) if state is None else state
    outs = []
    for t in range(M):
        s = s * g[:, t].exp().unsqueeze(-1)
        d = v[:, t]
        if beta is not None:
            d = beta[:, t, :, None] * (d - torch.einsum("bhde,bhd->bhe", s, k[:, t]))
        s = s + torch.einsum("bhd,bhe->bhde", k[:, t], d)
        outs.append(torch.einsum("bhde,bhd->bhe", s, q[:, t]) * D**-0.5)
    return torch.stack(outs, 1), s


def check(op: Any, x: dict[str, Tensor], **options: Any) -> None:
    """out, state and every gradient of a gated op against `step_by_step`."""
    results = []
    for dtype in (None, torch.float64, torch.float32):
        leaves = {n: t.detach().to(dtype or t.dtype).requires_grad_() for n, t in x.items()}
        q, k, v = (leaves[n] for n in ("q", "k", "v"))
        if dtype is None:
            rest = {n: t for n, t in leaves.items() if n not in ("q", "k", "v")}
            found = op(q, k, v, **rest, **options)
        else:
            g = leaves["g"] if leaves["g"].dim() == 4 else leaves["g"].unsqueeze(-1)
            found = step_by_step(q, k, v, g, leaves.get("beta"), leaves.get("initial_state"))
        ups = [normal(*y.shape, seed=9 + i).to(y.dtype) for i, y in enumerate(found)]
        names = ("out", "state", *leaves)
        values = (*found, *torch.autograd.grad(found, list(leaves.values()), ups))
        results.append(dict(zip(names, values, strict=True)))
    got, exact, eager = results
    for name, value in got.items():
        # Sums of some hundred products, rounded in another order than step by step.
        top = float(exact[name].detach().abs().max())
        floor = 32 * torch.finfo(torch.float32).eps * top
        assert_within_budget(value, exact[name], eager[name].to(exact[name].dtype), name=name,
                             floor=floor)  # fmt: skip


def test_c067_a_large_positive_gate_is_huge_or_exact_never_nan() -> None:
    q, k, v = (normal(1, 4, 4, 4, seed=s) for s in (1, 2, 3))
    g = torch.zeros(1, 4, 4, 4)
    g[:, 0] = 176.0
    state = normal(1, 4, 4, 4, seed=4)
    out, last = gla(q, k, v, g=g)
    expected, _ = gla(q, k, v, g=torch.zeros_like(g))
    # A state of zeros has nothing to grow.
    assert torch.equal(out, expected)
    assert bool(last.isfinite().all())
    grown, last = gla(q, k, v, g=g, initial_state=state)
    # Out of the range of fp32: a growth of e^80, where it stops.
    assert not bool(grown.isnan().any()) and not bool(last.isnan().any())
    assert float(last.abs().min()) > 1e30 and float(grown.abs().max()) > 1e30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c184_very_negative_decay_is_finite(dtype: torch.dtype) -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 70, dtype=dtype))
    for strength in (50.0, 1e4, float("inf")):
        g = torch.full((1, 70, 2, 16), -strength).requires_grad_()
        out, state = gla(q, k, v, g=g)
        # Each step sees its own key and value alone.
        own = (q.float() * k.float()).sum(-1, keepdim=True) * v.float() * 0.25
        wide = own.detach().double()
        assert_within_budget(out, wide, own.to(dtype), floor=1e-6)
        for dx in torch.autograd.grad(out.float().sum() + state.sum(), (q, k, v, g)):
            assert bool(dx.isfinite().all())


@pytest.mark.parametrize("length", [7, 64, 70])
def test_c185_a_gate_of_zero_is_the_delta_rule(length: int) -> None:
    x = draw(1, length)
    beta = torch.rand(1, length, 2)
    plain = delta_rule(*x, beta=beta)
    for zero in (torch.zeros(1, length, 2), -torch.zeros(1, length, 2)):
        gated = gated_delta_rule(*x, g=zero, beta=beta)
        for got, expected in zip(gated, plain, strict=True):
            wide = expected.double()
            assert_within_budget(got, wide, wide, floor=1e-6 * float(wide.abs().max()))
    # Zeros among others.
    g = torch.where(torch.rand(1, length, 2) > 0.5, 0.0, -3.0)
    check(gated_delta_rule, {**dict(zip("qkv", x, strict=True)), "g": g, "beta": beta})


def linked(at: int, B: int, M: int) -> None:
    """Convolution and rule over the whole, and in two passes linked by both states."""
    x = normal(B, M, 32, seed=5).requires_grad_()
    weight = normal(32, 4, seed=6).requires_grad_()
    rest = {"g": -torch.rand(B, M, 2), "beta": torch.rand(B, M, 2)}

    def forward(part: slice, kept: Tensor | None, state: Tensor | None) -> Any:
        y, kept = short_convolution(x[:, part], weight, state=kept, activation="silu")
        y = y.unflatten(-1, (2, 16))
        now = {n: t[:, part] for n, t in rest.items()}
        out, state = gated_delta_rule(y, y, y, **now, initial_state=state, qk_l2norm=True)
        return out, kept, state

    whole, _, last = forward(slice(0, M), None, None)
    first, kept, state = forward(slice(0, at), None, None)
    second, _, state = forward(slice(at, M), kept, state)
    split = torch.cat([first, second], 1)
    up, up_state = normal(*whole.shape, seed=7), normal(*last.shape, seed=8)
    pairs = [(split, whole), (state, last)]
    grads = [
        torch.autograd.grad((y, s), (x, weight), (up, up_state))
        for y, s in ((split, state), (whole, last))
    ]
    for got, expected in [*pairs, *zip(*grads, strict=True)]:
        wide = expected.detach().double()
        floor = 64 * torch.finfo(torch.float32).eps * float(wide.abs().max())
        assert_within_budget(got, wide, wide, floor=floor)


@pytest.mark.parametrize("at", [1, 3, 64, 100])
def test_c188_two_passes_linked_by_states_equal_one(at: int) -> None:
    linked(at, 1, 130)


def test_c189_split_in_the_middle_with_a_batch() -> None:
    linked(64, 3, 128)


@pytest.mark.parametrize("length", [1, 2, 15, 63])
def test_c191_short_sequences_train(length: int) -> None:
    x = dict(zip("qkv", draw(2, length), strict=True))
    g, beta = -torch.rand(2, length, 2, 16), torch.rand(2, length, 2)
    check(kda, {**x, "g": g, "beta": beta})


def test_c193_bounds_and_a_batch_are_refused_by_the_convolution() -> None:
    bounds = torch.tensor([0, 8, 16])
    with pytest.raises(ValueError, match=r"x must be \[T, C\], got 3 dimensions"):
        short_convolution(normal(2, 8, 6), normal(6, 4), cu_seqlens=bounds)
    x, weight = normal(2, 8, 6), normal(6, 4).requires_grad_()
    flat, _ = short_convolution(x.flatten(0, 1), weight, cu_seqlens=bounds)
    rows, _ = short_convolution(x, weight)
    assert torch.equal(flat, rows.flatten(0, 1))
    (a,), (b,) = (torch.autograd.grad(y.square().sum(), weight) for y in (flat, rows))
    wide = b.double()
    assert_within_budget(a, wide, wide, floor=1e-5 * float(wide.abs().max()))


def test_c195_bounds_and_a_batch_are_refused_by_the_ops() -> None:
    q, k, v = draw(2, 8)
    with pytest.raises(ValueError, match=r"gla: q must be \[T, G, D\], got 4 dimensions"):
        gla(q, k, v, g=-torch.rand(2, 8, 2, 16), cu_seqlens=torch.tensor([0, 8, 16]))


def test_c197_an_empty_sequence_keeps_its_state() -> None:
    q, k, v = (x[0] for x in draw(1, 12))
    state = normal(3, 2, 16, 16, seed=4).requires_grad_()
    g, bounds = -torch.rand(12, 2, 16), torch.tensor([0, 5, 5, 12])
    out, last = gla(q, k, v, g=g, initial_state=state, cu_seqlens=bounds)
    assert torch.equal(last[1], state[1]) and bool(out.isfinite().all())
    (dstate,) = torch.autograd.grad(last[1].sum(), state)
    assert torch.equal(dstate[1], torch.ones_like(dstate[1]))
    assert torch.equal(dstate[::2], torch.zeros_like(dstate[::2]))


def test_c198_gradients_past_the_last_sequence_are_zero() -> None:
    x = [t[0].clone() for t in draw(1, 20)]
    x += [-torch.rand(20, 2), torch.rand(20, 2)]
    for t in x:
        t[13:] = NAN
        t.requires_grad_()
    q, k, v, g, beta = x
    out, _ = gated_delta_rule(q, k, v, g=g, beta=beta, cu_seqlens=torch.tensor([0, 6, 13]))
    up = normal(*out.shape)
    up[13:] = NAN
    for dx in torch.autograd.grad(out, x, up):
        assert torch.equal(dx[13:], torch.zeros_like(dx[13:]))
        assert bool(dx.isfinite().all())


def padded(x: Tensor, kept: Tensor, fill: float | Tensor) -> Tensor:
    """x `[1, M, ...]` in the steps that are kept, `fill` in the others."""
    wide = torch.empty(1, len(kept), *x.shape[2:]).copy_(torch.as_tensor(fill))
    wide[:, kept] = x
    return wide


def test_c200_what_padding_holds_does_not_decay_the_state() -> None:
    q, k, v = draw(1, 20)
    g, beta = torch.full((1, 20, 2), -2.0), torch.rand(1, 20, 2)
    kept = torch.ones(30, dtype=torch.bool)
    kept[[4, 5, 6, 7, 8, 14, 15, 16, 17, 29]] = False
    state = normal(1, 2, 16, 16, seed=4)
    alone = gated_delta_rule(q, k, v, g=g, beta=beta, initial_state=state)
    for content in (0.0, 7.0):
        out, last = gated_delta_rule(
            padded(q, kept, content), padded(k, kept, content), padded(v, kept, 0.0),
            g=padded(g, kept, 0.0), beta=padded(beta, kept, 0.0), initial_state=state,
        )  # fmt: skip
        for got, expected in ((out[:, kept], alone[0]), (last, alone[1])):
            wide = expected.double()
            assert_within_budget(got, wide, wide, floor=1e-5 * float(wide.abs().max()))


def test_c201_inputs_of_one_sign() -> None:
    q, k, v = (torch.rand(1, 130, 2, 16) for _ in "qkv")
    k = k / k.norm(dim=-1, keepdim=True)
    x = {"q": q, "k": k, "v": v, "g": -torch.rand(1, 130, 2), "beta": torch.rand(1, 130, 2)}
    check(gated_delta_rule, {**x, "initial_state": torch.rand(1, 2, 16, 16)})


def test_c203_an_unbounded_gate_of_a_projection() -> None:
    q, k, v = draw(1, 33)
    raw, beta = 8.0 * normal(1, 33, 2, 16, seed=4), torch.rand(1, 33, 2)
    A_log, bias = torch.tensor([2.0, -1.0]), 8.0 * normal(2, 16, seed=5)
    out, _ = kda(q, k, v, g=raw, beta=beta, A_log=A_log, dt_bias=bias)
    made = -A_log.exp().unsqueeze(-1) * torch.nn.functional.softplus(raw + bias)
    assert float(made.min()) < -150.0
    expected, _ = step_by_step(*(t.double() for t in (q, k, v, made, beta)))
    eager, _ = step_by_step(q, k, v, made, beta)
    assert_within_budget(out, expected, eager, floor=1e-6)


def test_c206_the_gates_gradient_under_strong_decay() -> None:
    q, k, v = draw(1, 70)
    g = torch.full((1, 70, 2), -30.0)
    check(gated_delta_rule, {"q": q, "k": k, "v": v, "g": g, "beta": torch.rand(1, 70, 2)})
    x = [t.requires_grad_() for t in (q, k, v, g)]
    out, state = simple_gla(*x[:3], g=g)
    dg = torch.autograd.grad(out.sum() + state.sum(), x)[3]
    # There is nothing yet that the first gate could decay: exactly 0, not a difference of sums.
    assert torch.equal(dg[:, 0], torch.zeros_like(dg[:, 0]))


def test_c209_left_padding_in_a_second_segment() -> None:
    """Chunked prefill whose second segment is padded with zeros and steps of identity."""
    x, weight = normal(1, 20, 32, seed=5), normal(32, 4, seed=6)
    g, beta = -torch.rand(1, 20, 2), torch.rand(1, 20, 2)

    def layer(x: Tensor, g: Tensor, beta: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        y, _ = short_convolution(x, weight, activation="silu")
        y = y.unflatten(-1, (2, 16))
        return gated_delta_rule(y, y, y, g=g, beta=beta, initial_state=state, qk_l2norm=True)

    _, state = layer(x[:, :9], g[:, :9], beta[:, :9], None)
    expected, last = layer(x[:, 9:], g[:, 9:], beta[:, 9:], state)
    kept = torch.arange(17) >= 6
    out, got = layer(
        padded(x[:, 9:], kept, 0.0), padded(g[:, 9:], kept, 0.0), padded(beta[:, 9:], kept, 0.0),
        state,
    )  # fmt: skip
    for a, b in ((out[:, kept], expected), (got, last)):
        wide = b.double()
        assert_within_budget(a, wide, wide, floor=1e-5 * float(wide.abs().max()))


@pytest.mark.parametrize("pads", [1, 3, 64])
def test_c210_left_padding_at_batch_size_one(pads: int) -> None:
    q, k, v = draw(1, 20)
    g, beta = -torch.rand(1, 20, 2, 16), torch.rand(1, 20, 2)
    kept = torch.arange(20 + pads) >= pads
    out, last = kda(
        padded(q, kept, 1.0), padded(k, kept, 1.0), padded(v, kept, 0.0),
        g=padded(g, kept, 0.0), beta=padded(beta, kept, 0.0),
    )  # fmt: skip
    expected, state = kda(q, k, v, g=g, beta=beta)
    for a, b in ((out[:, kept], expected), (last, state)):
        wide = b.double()
        assert_within_budget(a, wide, wide, floor=1e-5 * float(wide.abs().max()))


def test_c211_zeros_through_convolution_and_norm() -> None:
    x = normal(1, 12, 32, seed=5)
    x[:, :5] = 0.0
    x.requires_grad_()
    weight = normal(32, 4, seed=6)
    y, _ = short_convolution(x, weight)
    y = y.unflatten(-1, (2, 16))
    beta = torch.rand(1, 12, 2)
    out, _ = delta_rule(y, y, y, beta=beta, qk_l2norm=True)
    assert torch.equal(out[:, :5], torch.zeros_like(out[:, :5]))
    (dx,) = torch.autograd.grad(out.sum(), x)
    assert bool(dx.isfinite().all())
    cut, _ = short_convolution(x[:, 5:], weight)
    cut = cut.unflatten(-1, (2, 16))
    alone, _ = delta_rule(cut, cut, cut, beta=beta[:, 5:], qk_l2norm=True)
    wide = alone.detach().double()
    assert_within_budget(out[:, 5:], wide, wide, floor=1e-5 * float(wide.abs().max()))
