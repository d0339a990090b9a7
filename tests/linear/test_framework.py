"""torch.compile, opcheck, checkpointing, autocast, second derivatives; sentences for bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.helpers import UNDER_TEST
from tests.linear.test_equivalences import assert_same, draw, gradients, run
from tilewise import linear
from tilewise.core.backends import is_interpreted

# Dynamo makes an autograd.Function of its own and trips over torch's advice against it.
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@compiles
@pytest.mark.parametrize("backend", ["auto", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("op", ["kda", "simple_gla"])
def test_one_graph(op: str, backend: str) -> None:
    if backend == "triton" and UNDER_TEST.device == "cpu" and not is_interpreted():
        pytest.skip("Triton runs on a GPU, or interpreted")
    torch._dynamo.reset()
    x = draw(op, 1, 70)
    options: dict[str, Any] = {"qk_l2norm": True, "beta_sigmoid": True} if op == "kda" else {}
    options["backend"] = backend

    def call(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        rest = {n: t for n, t in x.items() if n not in ("q", "k", "v")}
        return getattr(linear, op)(x["q"], x["k"], x["v"], **rest, **options)

    results = torch.compile(call, fullgraph=True, backend="aot_eager")(x)
    expected = call(x)
    assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])
    for dx, dy in zip(gradients(results, x).values(), gradients(expected, x).values(), strict=True):
        assert_same(dx, dy)


@pytest.mark.filterwarnings("ignore")
def test_the_registered_ops_are_what_their_schemas_say() -> None:
    x = draw("gated_delta_rule", 20)
    bounds = torch.tensor([0, 7, 20])
    arguments = (x["q"], x["k"], x["v"], x["g"], x["beta"], None, bounds, 0.25, "tiled")
    inputs = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewise.linear_fwd, inputs, test_utils=tests)
    out, state = torch.ops.tilewise.linear_fwd(*inputs)
    wanted = [True] * 5 + [False]
    torch.library.opcheck(
        torch.ops.tilewise.linear_bwd, (out, state, *inputs, wanted), test_utils=tests
    )
    q, k, v = (torch.randn(2, 1, 2, 8) for _ in "qkv")
    pool, slots = torch.randn(3, 2, 8, 8), torch.tensor([2, 0])
    # Registered where it is first asked for.
    assert callable(linear.decode)
    torch.library.opcheck(
        torch.ops.tilewise.linear_decode,
        (pool, q, k, v, None, None, slots, slots, 1.0, "tiled"),
        test_utils=tests,
    )


def test_gradients_under_a_dispatch_mode() -> None:
    x = draw("kda", 1, 70)
    expected = gradients(run("kda", x, backend="tiled"), x)
    with FlopCounterMode(display=False):
        counted = gradients(run("kda", x, backend="tiled"), x)
    assert all(torch.equal(expected[n], counted[n]) for n in x)


def test_checkpointing_is_neutral() -> None:
    x = draw("gla", 140)
    bounds = torch.tensor([0, 3, 3, 140])

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return run("gla", dict(zip(x, tensors, strict=True)), cu_seqlens=bounds)

    plain = gradients(call(*x.values()), x)
    saved = gradients(checkpoint(call, *x.values(), use_reentrant=False), x)
    assert all(torch.equal(plain[n], saved[n]) for n in x)


def test_autocast_takes_q_k_and_v_along_and_leaves_gates() -> None:
    x = draw("gated_delta_rule", 1, 20)
    with torch.autocast(UNDER_TEST.device, torch.bfloat16):
        out, state = run("gated_delta_rule", x)
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    low = {n: t.bfloat16() if n in ("q", "k", "v") else t for n, t in x.items()}
    expected, _ = run("gated_delta_rule", low)
    assert torch.equal(out, expected)


def test_second_derivatives_are_refused_except_on_the_reference() -> None:
    x = draw("gla", 1, 5)
    out, _ = run("gla", x, backend="tiled")
    (dq,) = torch.autograd.grad(out.sum(), x["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivatives .* backend='reference'"):
        dq.sum().backward()
    small = [x[n].detach()[:, :3, :1, :4].double().requires_grad_() for n in ("q", "k", "v")]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: linear.linear_attention(q, k, v, backend="reference"), small
    )


def test_a_state_that_is_not_given_gets_no_gradient_and_inputs_are_left_alone() -> None:
    x = draw("kda", 1, 70)
    before = copy.deepcopy({n: t.detach() for n, t in x.items()})
    state = torch.randn(1, 4, 16, 12)
    out, last = run("kda", x, initial_state=state)
    (out.sum() + last.sum()).backward()
    assert all(torch.equal(t, before[n]) for n, t in x.items())
    assert state.grad is None


BAD = [
    ("gla", {"q": torch.zeros(5, 2, 16)}, r"gla: q must be \[B, M, G, D\], got 3 dimensions"),
    ("gla", {"g": torch.zeros(1, 20, 4)}, r"gla: g must be \[B, M, H, D\], got 3 dimensions"),
    ("simple_gla", {"g": torch.zeros(1, 20, 3)}, r"simple_gla: g must be .* with H = 4"),
    ("gla", {"v": torch.zeros(1, 20, 3, 12), "g": torch.zeros(1, 20, 3, 16)},
     r"gla: the heads of v must be a multiple .* H = 3 and G = 2"),
    ("kda", {"initial_state": torch.zeros(1, 4, 16, 12).bfloat16()},
     r"kda: initial_state must be float32 \[B, H, D, E\] = \[1, 4, 16, 12\], got torch.bfloat16"),
    ("kda", {"initial_state": torch.zeros(2, 4, 16, 12)}, r"got torch.float32 \[2, 4, 16, 12\]"),
    ("kda", {"beta": torch.zeros(1, 20, 4).long()}, r"kda: beta must be a floating tensor, got"),
    ("kda", {"A_log": torch.zeros(3)}, r"kda: A_log must be \[4\], got \[3\]"),
    ("kda", {"lower_bound": 5.0}, r"kda: lower_bound must be a number in \[-1e4, 0\), got 5.0"),
    ("gated_delta_rule", {"dt_bias": torch.zeros(4, 16)},
     r"gated_delta_rule: dt_bias must be \[4\], got \[4, 16\]"),
    ("retention", {"log_decay": torch.zeros(2)}, r"retention: log_decay must be .* \[H\] = \[4\]"),
    ("retention", {"log_decay": torch.zeros(4).long()}, r"log_decay must be .* got torch.int64"),
    ("retention", {"log_decay": -1.0}, r"log_decay must be .* got -1.0"),
    ("gla", {"scale": float("nan")}, r"gla: scale must be finite and at most 1e38 in size"),
    ("gla", {"scale": torch.ones(2)}, r"gla: scale must be a number, got \[2\]"),
    ("gla", {"scale": torch.ones((), requires_grad=True)}, r"gla: scale must .* multiply q by it"),
    ("gla", {"backend": "hopper"}, r"gla: backend must be one of auto, reference"),
    ("gla", {"q": torch.zeros(1, 20, 2, 16).double()}, r"gla: q, k and v must share one dtype"),
    ("gla", {"cu_seqlens": torch.tensor([0, 20])}, r"gla: q must be \[T, G, D\], got 4 dimensions"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "change", "message"), BAD)
def test_bad_input_is_told(op: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(op, {**draw(op, 1, 20), **change})


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([1, 20], r"cu_seqlens must start at 0, got 1"),
        ([0, 9, 5, 20], r"cu_seqlens must never fall"),
        ([0, 21], r"cu_seqlens ends at 21, but only 20 tokens are stored"),
    ],
)
def test_bad_bounds_are_told(bounds: list[int], message: str) -> None:
    for backend in ("tiled", "reference"):
        with pytest.raises(ValueError, match=message):
            run("gla", draw("gla", 20), cu_seqlens=torch.tensor(bounds), backend=backend)


@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="what is chosen on a CPU")
def test_explain_backend_says_which_and_why() -> None:
    x = draw("kda", 1, 5)
    choice = linear.explain_backend(**x)
    assert choice.name == "tiled" and choice.rejected["triton"]
    packed = {name: t[0] for name, t in x.items()}
    assert linear.explain_backend(**packed, cu_seqlens=torch.tensor([0, 2, 5])) == choice
    with pytest.raises(NotImplementedError, match=r"backend 'triton' .*use backend='tiled'"):
        linear.gla(*(x[n].double() for n in ("q", "k", "v")), g=x["g"], backend="triton")
