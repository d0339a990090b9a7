"""Plans and warm calls: what is kept serves calls of the same forms, no others, and no tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import UNDER_TEST
from tests.linear.test_equivalences import draw, gradients, run
from tests.linear.test_machine_code import DESCRIPTOR, SUM, elf
from tilewise import linear
from tilewise.core.backends import is_interpreted
from tilewise.linear import choice, warm

ON_GPU = UNDER_TEST.device == "cuda"
runs_kernels = pytest.mark.skipif(
    not (ON_GPU or is_interpreted()), reason="of the stages, which run not here"
)


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    plan = pytest.importorskip("tilewise.linear.plan")
    for kept in (warm._kept, plan._plans):
        kept.clear()
    yield
    for kept in (warm._kept, plan._plans):
        kept.clear()


# ---------------------------------------------------------------- arguments, with no kernel run


class Stub:
    """Kernels that are told of and not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tilewise.kernels import launch as launching
        from tilewise.linear import plan, triton_call

        self.first: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []

        def launch(kernel: Any, grid: Any, config: Any, arguments: Any, device: Any) -> Any:
            if 0 in grid:
                return None
            self.first.append((kernel, grid, arguments))
            return kernel

        def relaunch(compiled: Any, grid: Any, arguments: Any, device: Any) -> None:
            self.again.append((compiled, grid, arguments))

        monkeypatch.setattr(plan, "launch", launch)
        monkeypatch.setattr(plan, "relaunch", relaunch)
        # Nothing is compiled, on a GPU neither.
        monkeypatch.setattr(plan, "compile_together", lambda launches, device: None)
        monkeypatch.setattr(plan.Plan, "_trusted", lambda self, x: x.config)
        monkeypatch.setattr(choice, "triton_problem", lambda device: "")
        monkeypatch.setattr(launching, "_gpu_architecture", lambda device: "sm_90")
        monkeypatch.setattr(triton_call, "_multiprocessors", lambda device: 132)

    def take(self) -> tuple[list[Any], list[Any]]:
        found = self.first, self.again
        self.first, self.again = [], []
        return found


def addresses(node: Any) -> Any:
    """Arguments as a launch that follows has them."""
    if isinstance(node, Tensor):
        return node.data_ptr()
    if isinstance(node, tuple):
        return tuple(map(addresses, node))
    return node


OPS = (
    "linear_attention",
    "retention",
    "simple_gla",
    "gla",
    "delta_rule",
    "gated_delta_rule",
    "kda",
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_a_run_that_follows_has_the_arguments_of_a_first_one(
    op: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.linear import plan as plans

    seen = []
    run_first = plans.Plan._run_first

    def run_both(self: Any, given: Any, made: Any, space: Any) -> None:
        run_first(self, given, made, space)
        self._ready.run(given, made, space, self.device)
        seen.append(self)

    stub = Stub(monkeypatch)
    monkeypatch.setattr(plans.Plan, "_run_first", run_both)
    x = draw(op, *((70,) if packed else (2, 70)), D=80, E=48)
    options = {"cu_seqlens": torch.tensor([0, 30, 30, 70])} if packed else {}
    out, state = run(op, x, backend="triton", **options)
    torch.autograd.grad((out.sum() + state.sum(),), list(x.values()))
    first, again = stub.take()
    assert len(seen) == 2 and len(first) >= 6
    assert [(k, g, addresses(a)) for k, g, a in first] == again


def test_a_known_call_launches_the_same_kernels_on_its_own_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub(monkeypatch)

    def call(x: dict[str, Tensor]) -> None:
        out, _ = run("gated_delta_rule", x, backend="triton")
        torch.autograd.grad(out, list(x.values()), torch.ones_like(out))

    call(draw("gated_delta_rule", 1, 70))
    first, again = stub.take()
    assert first and not again
    monkeypatch.setattr("tilewise.linear.api.check_call", None)
    second = draw("gated_delta_rule", 1, 70)
    call(second)
    nothing, again = stub.take()
    assert not nothing and [x[:2] for x in again] == [x[:2] for x in first]
    call_of_first_kernel = again[0][2][0]
    assert call_of_first_kernel[1][0] == second["q"].data_ptr()
    assert call_of_first_kernel[3][0] == second["v"].data_ptr()


def other(name: str, change: Any) -> Any:
    return pytest.param(name, change, id=name)


def heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def misaligned(x: Tensor) -> Tensor:
    wide = x.new_zeros(x.numel() + 1)
    return wide[1:].view(x.shape)


UNLIKE = [
    other("k of another stride", lambda x: x | {"k": heads_first(x["k"])}),
    other("another length", lambda x: {n: t[:, :69] for n, t in x.items()}),
    other("another dtype of beta", lambda x: x | {"beta": x["beta"].double()}),
    other("an address that is not aligned", lambda x: x | {"v": misaligned(x["v"])}),
    other("a state", lambda x: x | {"initial_state": torch.zeros(1, 4, 16, 12)}),
    other("a scale", lambda x: x | {"scale": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change"), UNLIKE)
def test_a_call_that_differs_is_not_known(
    name: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = Stub(monkeypatch)
    x = {n: t.detach() for n, t in draw("gated_delta_rule", 1, 70).items()}
    run("gated_delta_rule", x, backend="triton")
    run("gated_delta_rule", x, backend="triton")
    first, again = stub.take()
    assert len(first) == len(again) == 2
    run("gated_delta_rule", change(x), backend="triton")
    first, again = stub.take()
    assert len(first) == 2 and not again


def test_an_upstream_gradient_of_another_form_has_another_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = Stub(monkeypatch)
    x = draw("kda", 1, 70)
    out, state = run("kda", x, backend="triton")
    leaves = list(x.values())
    up = torch.ones_like(out)
    torch.autograd.grad(out, leaves, up, retain_graph=True)
    stub.take()
    torch.autograd.grad(out, leaves, up, retain_graph=True)
    assert not stub.take()[0]
    for outs, ups in (((out,), (heads_first(up),)), ((out, state), (up, torch.ones_like(state)))):
        torch.autograd.grad(outs, leaves, ups, retain_graph=True)
        first, again = stub.take()
        assert first and not again
    # A fewer gradient is another plan only where a kernel does less.
    torch.autograd.grad(out, leaves[:1], up, retain_graph=True)
    assert not stub.take()[0]


# ---------------------------------------------------------------- with kernels


@runs_kernels
@pytest.mark.interpreter
def test_a_warm_call_is_as_a_cold_one_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = draw("gated_delta_rule", 9), draw("gated_delta_rule", 9)
    bounds = {"first": torch.tensor([0, 4, 9]), "then": torch.tensor([0, 7, 8])}

    def call(x: dict[str, Tensor], which: str) -> list[Tensor]:
        results = run("gated_delta_rule", x, cu_seqlens=bounds[which], backend="triton")
        return [*results, *gradients(results, x).values()]

    expected = call(y, "then")
    warm._kept.clear()
    call(x, "first")
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.linear.api.check_call", None)
        got = call(y, "then")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@runs_kernels
@pytest.mark.interpreter
def test_nothing_of_a_call_is_kept_alive() -> None:
    x = {n: t.detach() * 1 for n, t in draw("gla", 1, 3).items()}
    for _ in range(2):
        leaves = {n: t.requires_grad_() for n, t in x.items()}
        out, state = run("gla", leaves, backend="triton")
        (out.sum() + state.sum()).backward()
    assert len(warm._kept) == 1
    alive = [weakref.ref(t) for t in (*x.values(), out, state)]
    del x, leaves, out, state
    gc.collect()
    assert all(ref() is None for ref in alive)


@pytest.mark.skipif(not is_interpreted(), reason="bounds are read there")
@pytest.mark.interpreter
def test_a_warm_call_checks_its_bounds() -> None:
    x = {n: t.detach() for n, t in draw("linear_attention", 9).items()}
    for _ in range(2):
        run("linear_attention", x, cu_seqlens=torch.tensor([0, 4, 9]), backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens must never fall"):
        run("linear_attention", x, cu_seqlens=torch.tensor([0, 7, 4]), backend="triton")


def test_modes_and_transforms_see_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    Stub(monkeypatch)
    x = {n: t.detach() for n, t in draw("kda", 1, 70).items()}
    run("kda", x, backend="triton")
    given = {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["g"], "beta": x["beta"]}
    assert warm.find(given, None, "triton", True).known is not None
    with FlopCounterMode(display=False):
        assert warm.find(given, None, "triton", True).known is None
    with torch.autograd.forward_ad.dual_level():
        assert warm.find(given, None, "triton", True).known is None
    assert warm.find(given, None, "tiled", True).known is None
    assert callable(linear.kda)


# ---------------------------------------------------------------- what the assembler made


class Kernel:
    """One whose binary is wrong on more than two warps, where its number is a multiple of 16."""

    params = (SimpleNamespace(is_constexpr=False), SimpleNamespace(is_constexpr=True))

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def warmup(self, number: int, constant: int, *, grid: Any, num_warps: int, **rest: Any) -> Any:
        self.asked.append((number, num_warps))
        is_wrong = number % 16 == 0 and num_warps > 2
        return SimpleNamespace(asm={"cubin": elf(".text.k", DESCRIPTOR if is_wrong else SUM)})


def test_each_binary_is_looked_at_once_and_a_wrong_one_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilewise.kernels.launch import Config
    from tilewise.linear import plan

    ran: list[tuple[int, int]] = []
    kernel = Kernel()

    def launch(kernel: Any, grid: Any, config: Any, arguments: Any, device: Any) -> Any:
        ran.append((arguments[0], config.num_warps))
        return kernel

    monkeypatch.setattr(plan, "launch", launch)
    monkeypatch.setattr(plan, "compile_together", lambda launches, device: None)
    monkeypatch.setattr(plan, "architecture_of", lambda device: "sm_90")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(plan, "_looked_at", {})
    for number in (32, 48, 7, 9):
        made = plan.Plan(torch.device("cuda", 0))
        made.add(kernel, 1, Config(64, 64, 4, 1), (number, 5))
        made._run_first([], [], torch.empty(0, dtype=torch.uint8))
    assert ran == [(32, 2), (48, 2), (7, 4), (9, 4)]
    assert kernel.asked == [(32, 4), (7, 4)]
