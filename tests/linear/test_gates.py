"""A strong gate at any step of a chunk: every pair of steps decays by what stands between the two.

Scores are compared pair by pair, each with what its own rounding may be: in the sums of an output
one wrong pair may hide behind the others.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.helpers import OPS as CATALOG
from tests.helpers import UNDER_TEST
from tests.linear.test_equivalences import run
from tilewise.core.backends import is_interpreted
from tilewise.linear.cases import Recipe, draw_case
from tilewise.linear.inputs import Inputs
from tilewise.report.verify import verify_case

ON_GPU = UNDER_TEST.device == "cuda"
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        not (ON_GPU or is_interpreted()), reason="of the stages, which run not here"
    ),
]
D = 16
# About the borders of blocks of 8, 16 and 32, and of the chunk itself.
STEPS = (0, 1, 8, 15, 16, 17, 31, 32, 47, 48, 63, 64)
PAIRS = ((0, 16), (15, 16), (8, 24), (16, 32), (31, 63))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Just above what one border is allowed to in 16 bits, far above it, and nothing left at all.
GATES = (-2.9, -45.0, -math.inf)


def strong_at(steps: tuple[tuple[int, ...], ...], value: float, length: int) -> Tensor:
    """`[1, M, heads, D]`, weak but at some steps of each head; one dim in two heads of three."""
    g = torch.full((1, length, len(steps), D), -0.05)
    for head, at in enumerate(steps):
        for step in at:
            g[0, step, head, slice(None) if head % 3 == 0 else head % D] = value
    return g


def exact_pairs(x: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """`sum_d x_id k_jd e^(g_(j+1)d + ... + g_id)` for j <= i, fp64 `[H, M, M]`, and the same sum of
    absolute terms. All `[M, H, D]`."""
    length = x.shape[0]
    ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
    later = ones.tril(-1)[:, :, None, None]
    # [i, j, H, D]
    between = torch.where(later, g.double()[:, None], 0.0).cumsum(0)
    visible = ones.tril()[:, :, None, None]
    terms = torch.where(visible, between.exp(), 0.0) * x.double()[:, None] * k.double()[None]
    return terms.sum(-1).permute(2, 0, 1), terms.abs().sum(-1).permute(2, 0, 1)


@pytest.mark.parametrize("value", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pair_decays_by_the_gates_between(dtype: torch.dtype, value: float) -> None:
    from tilewise.linear.triton_call import LinearCall, given_by
    from tilewise.linear.triton_forward import add_preparing

    length = 65 if ON_GPU else 64
    steps = (*((step,) for step in STEPS if step < length), *PAIRS)
    if not ON_GPU:
        # Some with each gate and dtype, which take the interpreter long enough.
        steps = steps[DTYPES.index(dtype) + 3 * (GATES.index(value) % 2) :: 6]
    H = len(steps)
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, length, H, D, generator=generator, device="cpu").to(dtype) for _ in "qk")
    g = strong_at(steps, value, length).cpu()
    given = [x.to(UNDER_TEST.device) for x in (q, k, q, g, torch.ones(1, length, H, dtype=dtype))]
    inputs = Inputs(*given, None, None, 1.0)
    call = LinearCall(inputs)
    # What would be memory of the run alone is to be seen.
    call.plan.buffer = call.plan.made  # type: ignore[method-assign]
    prepared = add_preparing(call)
    scores, lower = call.plan.finish(prepared.scores, prepared.lower).run(given_by(inputs))
    # An exponent's own rounding is some of fp32's.
    eps = torch.finfo(dtype).eps * (100.0 if dtype == torch.float32 else 2.5)
    chunk = scores.shape[-1]
    for n, start in enumerate(range(0, length, chunk)):
        part = slice(start, min(start + chunk, length))
        size = part.stop - part.start
        for got, x, diagonal in ((scores, q, 0), (lower, k, -1)):
            exact, largest = exact_pairs(x[0, part], k[0, part], g[0, part])
            error = got[n, :, :size, :size].double().cpu() - exact.tril(diagonal)
            # In fp16 a factor may be as small as its least number.
            least = D * 2.0**-23 if dtype == torch.float16 else 1e-30
            worst = (error.abs() / (eps * largest + least)).flatten(1).max(1)
            at = {
                steps[head]: divmod(int(worst.indices[head]), size)
                for head in range(H)
                if not float(worst.values[head]) <= 1.0
            }
            assert not at, f"gates at {list(at)} in chunk {n}: wrong pairs {list(at.values())}"


OPS = ("simple_gla", "gla", "gated_delta_rule", "kda")


@pytest.mark.parametrize("op", OPS)
def test_a_state_is_decayed_before_it_is_rounded(op: str) -> None:
    """What passes chunks with nothing but a decay keeps the digits of fp32, forwards and back."""
    length, H = (64, 1) if is_interpreted() else (256, 2)
    lead, is_vector = (1, length, H), op in ("gla", "kda")
    x = {name: torch.zeros(*lead, D, dtype=torch.bfloat16) for name in "qkv"}
    x["g"] = torch.zeros(*lead, D) if is_vector else torch.zeros(*lead)
    # At one step alone, so that the whole decay is its power and no sum.
    x["g"][:, 7] = -1.3
    if op in ("gated_delta_rule", "kda"):
        x["beta"] = torch.ones(*lead, dtype=torch.bfloat16)
    state = torch.randn(1, H, D, D, requires_grad=True)
    _, last = run(op, {**x, "g": x["g"].requires_grad_()}, initial_state=state, backend="triton")
    up = torch.randn_like(last)
    dstate, dg = torch.autograd.grad(last, (state, x["g"]), up)
    decay, before = math.exp(-1.3), state.detach().double()
    each = decay * (before * up).sum(-1)
    for name, got, exact in (
        ("final_state", last.detach(), decay * before),
        ("dinitial_state", dstate, decay * up.double()),
        ("dg", dg.sum(1), length * (each if is_vector else each.sum(-1))),
    ):
        error = float((got.double() - exact).abs().max() / exact.abs().max())
        assert error < 3e-6, f"{name}: {error}"


@pytest.mark.parametrize("op", OPS if ON_GPU else OPS[1::2])
def test_a_strong_first_gate_leaves_the_state_its_digits(op: str) -> None:
    """e^-30 is no number of fp16, and all that reaches the initial state passes it."""
    recipe = Recipe("first gate", (1, 150 if ON_GPU else 20, 1, 1, D, D), has_state=True)
    device = torch.device(UNDER_TEST.device)
    case = draw_case(f"linear.{op}", recipe, torch.float16, device, 3)
    case.tensors["g"][:, ::64] = -30.0
    reports = verify_case(CATALOG[case.op], case, "triton")
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)


def test_strong_dims_stand_beside_weak_ones() -> None:
    """Blocks of dims are worked off by what their own gates allow."""
    recipe = Recipe("some dims", (1, 150 if ON_GPU else 20, 1, 1, 64, 16), has_state=True)
    case = draw_case("linear.kda", recipe, torch.bfloat16, torch.device(UNDER_TEST.device), 3)
    case.tensors["g"][..., :40] *= 200.0
    reports = verify_case(CATALOG[case.op], case, "triton")
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)


@pytest.mark.parametrize(("op", "gate"), [("kda", -0.08), ("gla", -0.34)])
def test_rows_that_fp16_barely_holds_are_not_multiplied(op: str, gate: float) -> None:
    """By growth from a border to a step before it: of half a chunk, and of half a block of 16."""
    recipe = Recipe("large rows", (1, 64, 1, 1, D, D))
    case = draw_case(f"linear.{op}", recipe, torch.float16, torch.device(UNDER_TEST.device), 3)
    case.tensors["g"].fill_(gate)
    q, k = case.tensors["q"], case.tensors["k"]
    q.mul_(8000.0 / q.abs().amax(-1, keepdim=True))
    k.mul_(1e-3)
    reports = verify_case(CATALOG[case.op], case, "triton")
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)


@pytest.mark.parametrize("is_strong", [False, True])
@pytest.mark.parametrize("op", ["gla", "kda"])
def test_pairs_give_a_gate_more_digits_than_their_dtype_has(op: str, is_strong: bool) -> None:
    """A head may have few of them, over which roundings of pairs do not average."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(1, D, 2, *shape, generator=generator, device="cpu")
        return drawn.to(UNDER_TEST.device).bfloat16()

    # One key a step, decays that are powers of two and no state: nothing else is rounded.
    x = {"q": draw(D), "k": torch.eye(D)[None, :, None].expand(1, D, 2, D), "v": draw(D)}
    x["k"] = x["k"].bfloat16().contiguous()
    if op == "kda":
        x["beta"] = draw().sigmoid()
    up = draw(D)
    powers = torch.arange(D)[:, None, None] % 3 + (4 if is_strong else 0)
    gate = (-math.log(2.0) * powers).expand(1, D, 2, D).contiguous()
    found = []
    for backend in ("triton", "reference"):
        g = gate.double() if backend == "reference" else gate
        g = g.clone().requires_grad_()
        wide = {n: t.double() for n, t in x.items()} if backend == "reference" else x
        out, _ = run(op, {**wide, "g": g}, backend=backend)
        found.append(torch.autograd.grad(out, g, up.to(out.dtype))[0].double())
    got, exact = found
    error = float((got - exact).abs().max() / exact.abs().max())
    assert error < 2.0**-14, error
