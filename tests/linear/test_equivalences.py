"""What must be equal: split in time and whole, packed and alone, members of the family, forms."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import backends, on_backend
from tilewise import linear
from tilewise.core.tolerance import assert_within_budget

OPS = {
    name: on_backend(getattr(linear, name))
    for name in (
        "linear_attention",
        "retention",
        "simple_gla",
        "gla",
        "delta_rule",
        "gated_delta_rule",
        "kda",
    )
}


def draw(
    op: str, *lead: int, H: int = 4, G: int = 2, D: int = 16, E: int = 12
) -> dict[str, Tensor]:
    """Everything an op takes, all leaves; keys are normalised."""
    tensors = {
        "q": torch.randn(*lead, G, D),
        "k": torch.nn.functional.normalize(torch.randn(*lead, G, D), dim=-1),
        "v": torch.randn(*lead, H, E),
    }
    if op in ("simple_gla", "gated_delta_rule"):
        tensors["g"] = -torch.rand(*lead, H)
    if op in ("gla", "kda"):
        tensors["g"] = -torch.rand(*lead, H, D)
    if "delta" in op or op == "kda":
        tensors["beta"] = torch.rand(*lead, H)
    return {name: x.requires_grad_() for name, x in tensors.items()}


def run(op: str, x: dict[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    rest = {name: t for name, t in x.items() if name not in ("q", "k", "v")}
    rest = {**rest, **options}
    return OPS[op](x["q"], x["k"], x["v"], **rest)


def gradients(
    results: tuple[Tensor, Tensor], x: dict[str, Tensor], seed: int = 3
) -> dict[str, Tensor]:
    generator = torch.Generator(results[0].device).manual_seed(seed)
    up = [torch.randn(r.shape, generator=generator, device=r.device) for r in results]
    up = [u.to(r.dtype) for u, r in zip(up, results, strict=True)]
    found = torch.autograd.grad(results, list(x.values()), up, allow_unused=True)
    zeros = (
        torch.zeros_like(t) if dx is None else dx for t, dx in zip(x.values(), found, strict=True)
    )
    return dict(zip(x, zeros, strict=True))


def assert_same(got: Tensor, other: Tensor, name: str = "result", roundings: int = 64) -> None:
    """Two evaluations of one thing: both are sums of some hundred rounded products."""
    wide = other.detach().double()
    top = float(wide.abs().max()) if wide.numel() else 0.0
    floor = roundings * torch.finfo(other.dtype).eps * top
    assert_within_budget(got.detach(), wide, wide, name=name, floor=floor)


def assert_all_same(got: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name in other:
        assert_same(got[name], other[name], name)


@pytest.mark.parametrize("at", [0, 1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("op", OPS)
def test_split_in_time_equals_one_pass(op: str, at: int) -> None:
    x = draw(op, 1, 130)
    x["initial_state"] = torch.randn(1, 4, 16, 12, requires_grad=True)
    whole = run(op, x)
    state = x["initial_state"]
    outs = []
    for part in (slice(0, at), slice(at, 130)):
        cut = {n: t[:, part] for n, t in x.items() if n != "initial_state"}
        out, state = run(op, {**cut, "initial_state": state})
        outs.append(out)
    split = torch.cat(outs, 1), state
    assert_same(split[0], whole[0])
    assert_same(split[1], whole[1])
    assert_all_same(gradients(split, x), gradients(whole, x))


@pytest.mark.parametrize("op", OPS)
def test_packed_equals_each_sequence_alone(op: str) -> None:
    bounds = [0, 3, 3, 68, 69, 140]
    x = draw(op, 150)
    initial = torch.randn(5, 4, 16, 12, requires_grad=True)
    x["initial_state"] = initial
    for name, t in x.items():
        if name != "initial_state":
            t.data[140:] = torch.nan
    packed = run(op, x, cu_seqlens=torch.tensor(bounds))
    got = gradients(packed, x)
    assert torch.equal(packed[0][140:], torch.zeros_like(packed[0][140:]))
    outs, states = [], []
    for b, (start, stop) in enumerate(pairwise(bounds)):
        cut = {n: t[start:stop].unsqueeze(0) for n, t in x.items() if n != "initial_state"}
        out, state = run(op, {**cut, "initial_state": initial[b : b + 1]})
        outs.append(out[0])
        states.append(state)
    alone = torch.cat([*outs, torch.zeros_like(packed[0][140:])]), torch.cat(states)
    assert_same(packed[0], alone[0])
    assert_same(packed[1], alone[1])
    # An empty sequence keeps its state, bit for bit.
    assert torch.equal(packed[1][1], initial[1])
    assert_all_same(got, gradients(alone, x))


def test_members_of_the_family_are_cases_of_each_other() -> None:
    kda = draw("kda", 2, 70)
    scalar = {**kda, "g": kda["g"][..., :1]}
    pairs = [
        # A vector gate of equal numbers is a scalar gate.
        (
            run("kda", {**scalar, "g": scalar["g"].expand_as(kda["g"])}),
            run("gated_delta_rule", {**scalar, "g": scalar["g"][..., 0]}),
        ),
        # No decay.
        (
            run("gated_delta_rule", {**scalar, "g": torch.zeros_like(scalar["g"][..., 0])}),
            run("delta_rule", {n: t for n, t in kda.items() if n != "g"}),
        ),
    ]
    gla = {n: t for n, t in kda.items() if n != "beta"}
    plain = {n: t for n, t in gla.items() if n != "g"}
    decay = -torch.rand(4)
    pairs += [
        (
            run("gla", {**gla, "g": scalar["g"].expand_as(kda["g"])}),
            run("simple_gla", {**gla, "g": scalar["g"][..., 0]}),
        ),
        (
            run("simple_gla", {**plain, "g": decay.expand(2, 70, 4)}),
            run("retention", plain, log_decay=decay),
        ),
        (run("retention", plain, log_decay=torch.zeros(4)), run("linear_attention", plain)),
    ]
    for one, other in pairs:
        assert_same(one[0], other[0])
        assert_same(one[1], other[1])
        for dx, dy in zip(
            gradients(one, plain).values(), gradients(other, plain).values(), strict=True
        ):
            assert_same(dx, dy)


def test_mamba_2_is_simple_gla() -> None:
    """State space duality as its paper's listing has it: h = e^{dt A} h + dt B x, y = C h."""
    b, length, heads, width, n = 2, 70, 4, 12, 16
    x, dt = torch.randn(b, length, heads, width), torch.rand(b, length, heads)
    A, B, C = -torch.rand(heads), torch.randn(b, length, 1, n), torch.randn(b, length, 1, n)
    h = torch.zeros(b, heads, n, width, dtype=torch.float64)
    ys = []
    for t in range(length):
        step = dt[:, t, :, None, None].double()
        h = h * (step * A[:, None, None]).exp() + step * (
            B[:, t, :, :, None].double() * x[:, t, :, None, :].double()
        )
        ys.append((C[:, t, :, None, :].double() @ h).squeeze(-2))
    out, state = OPS["simple_gla"](C, B, x * dt.unsqueeze(-1), g=dt * A, scale=1.0)
    assert_same(out, torch.stack(ys, 1).float())
    assert_same(state, h.float())


@pytest.mark.parametrize("op", ["gla", "kda"])
def test_ten_runs_are_bitwise_equal(op: str) -> None:
    x = draw(op, 1, 70)

    def once() -> list[Tensor]:
        results = run(op, x)
        return [*(r.detach() for r in results), *gradients(results, x).values()]

    first = once()
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


def test_a_batch_element_alone_equals_itself_in_the_batch() -> None:
    x = draw("kda", 3, 70)
    whole, _ = run("kda", x)
    for b in range(3):
        alone, _ = run("kda", {n: t[b : b + 1] for n, t in x.items()})
        assert_same(whole[b : b + 1], alone)


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_steps_of_the_identity_change_nothing(op: str) -> None:
    """Padding: log gate 0, beta and v 0, whatever q and k hold."""
    x = {n: t.detach() for n, t in draw(op, 1, 20).items()}
    clean, state = run(op, x)
    wide = {n: torch.randn(1, 33, *t.shape[2:]) for n, t in x.items()}
    kept = torch.ones(33, dtype=torch.bool)
    kept[[0, 1, 2, 9, 10, 15, 16, 17, 18, 30, 31, 32, 21]] = False
    for name, t in wide.items():
        if name in ("g", "beta", "v"):
            t.zero_()
        t[:, kept] = x[name]
    padded, padded_state = run(op, wide)
    assert_same(padded[:, kept], clean)
    assert_same(padded_state, state)


@pytest.mark.parametrize("backend", backends("tiled", "recurrent"))
def test_sizes_of_zero(backend: str) -> None:
    state = torch.randn(2, 4, 16, 12)
    q, v = torch.randn(2, 0, 2, 16), torch.randn(2, 0, 4, 12, requires_grad=True)
    out, last = linear.delta_rule(
        q, q, v, beta=torch.rand(2, 0, 4), initial_state=state, backend=backend
    )
    assert out.shape == v.shape and torch.equal(last, state)
    (out.sum() + last.sum()).backward()
    out, last = linear.linear_attention(q[:0], q[:0], v[:0], backend=backend)
    assert out.shape == (0, 0, 4, 12) and last.shape == (0, 4, 16, 12)
