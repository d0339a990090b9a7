"""Decoding on a pool of states: equal to the ops, and nothing else in the pool is touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import UNDER_TEST
from tests.linear.test_equivalences import assert_same
from tilewise import linear
from tilewise.core.backends import is_interpreted

BACKEND = "triton" if is_interpreted() or UNDER_TEST.device == "cuda" else "tiled"
OPS = ("linear_attention", "simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")


def draw(op: str, B: int, M: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    q, k, v = torch.randn(B, M, 2, 20), torch.randn(B, M, 2, 20), torch.randn(B, M, 4, 12)
    rest = {}
    if op in ("simple_gla", "gated_delta_rule"):
        rest["g"] = -torch.rand(B, M, 4)
    if op in ("gla", "kda"):
        rest["g"] = -torch.rand(B, M, 4, 20)
    if "delta" in op or op == "kda":
        rest["beta"] = torch.rand(B, M, 4)
    return [q, torch.nn.functional.normalize(k, dim=-1), v], rest


def cut(x: list[Tensor], rest: dict[str, Tensor], part: slice) -> tuple[Any, Any]:
    return [t[:, part] for t in x], {n: t[:, part] for n, t in rest.items()}


@pytest.mark.interpreter
@pytest.mark.parametrize("op", OPS)
def test_steps_equal_the_op(op: str) -> None:
    x, rest = draw(op, 2, 7)
    pool = torch.randn(5, 4, 20, 12)
    before, slots = pool.clone(), torch.tensor([3, 1])
    expected, state = getattr(linear, op)(
        *(t.double() for t in x), **{n: t.double() for n, t in rest.items()},
        initial_state=before[slots].double(), backend="reference",
    )  # fmt: skip
    outs = []
    for part in (slice(0, 1), slice(1, 2), slice(2, 7)):
        now, gates = cut(x, rest, part)
        outs.append(linear.decode(*now, pool, slots=slots, **gates, backend=BACKEND))
    assert_same(torch.cat(outs, 1), expected.float())
    assert_same(pool[slots], state.float())
    others = [0, 2, 4]
    assert torch.equal(pool[others], before[others])


@pytest.mark.interpreter
def test_a_rejected_guess_is_not_taken_back_but_left_behind() -> None:
    """Of three guesses the first was right: the next call reads the state after it."""
    x, rest = draw("kda", 1, 4)
    pool = torch.randn(4, 4, 20, 12)
    first = pool[:1].clone()
    guesses, gates = cut(x, rest, slice(0, 3))
    writes = torch.tensor([[1, 2, 3]])
    linear.decode(
        *guesses, pool, slots=torch.tensor([0]), write_slots=writes, **gates, backend=BACKEND
    )
    assert torch.equal(pool[:1], first)
    now, gate = cut(x, rest, slice(3, 4))
    got = linear.decode(*now, pool, slots=writes[:, 0], **gate, backend=BACKEND)
    kept = [torch.cat([t[:, :1], t[:, 3:]], 1) for t in x]
    kept_rest = {n: torch.cat([t[:, :1], t[:, 3:]], 1) for n, t in rest.items()}
    expected, _ = linear.kda(*kept, **kept_rest, initial_state=first, backend="reference")
    assert_same(got, expected[:, 1:])


@pytest.mark.interpreter
def test_no_sequence_writes_nothing_and_pads_with_zeros() -> None:
    x, rest = draw("gated_delta_rule", 3, 2)
    pool = torch.randn(4, 4, 20, 12)
    pool[[0, 2, 3]] = 1e30
    before = pool.clone()
    slots = torch.tensor([-1, 1, -1], dtype=torch.int32)
    out = linear.decode(*x, pool, slots=slots, write_slots=torch.tensor([0, -1, 2]), **rest,
                        backend=BACKEND)  # fmt: skip
    assert torch.equal(out[[0, 2]], torch.zeros_like(out[[0, 2]]))
    assert bool(out[1].isfinite().all()) and bool((out[1] != 0).any())
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sequence_does_not_see_its_neighbours(dtype: torch.dtype) -> None:
    x, rest = draw("kda", 3, 2)
    pool = torch.randn(3, 4, 20, 12).to(dtype)
    slots = torch.tensor([2, 0, 1])
    together, pools = pool.clone(), [pool.clone() for _ in range(3)]
    out = linear.decode(*x, together, slots=slots, **rest, backend=BACKEND)
    for b in range(3):
        one = [t[b : b + 1] for t in x]
        alone = linear.decode(*one, pools[b], slots=slots[b : b + 1], backend=BACKEND,
                              **{n: t[b : b + 1] for n, t in rest.items()})  # fmt: skip
        assert torch.equal(alone, out[b : b + 1])
        assert torch.equal(pools[b][slots[b]], together[slots[b]])


BAD = [
    ({"slots": torch.tensor([0, 4])}, r"slots must lie below the pool's 4 slots, got 4"),
    ({"slots": torch.tensor([0.0, 1.0])}, r"slots must be int32 or int64"),
    ({"pool": torch.zeros(4, 4, 20, 13)}, r"pool must be .* with E = 12"),
    ({"pool": torch.zeros(4, 4, 12, 20).mT}, r"pool must be .* strides \[960, 240, 1, 20\]"),
    ({"pool": torch.zeros(4, 4, 20, 12).double()}, r"pool must be .* got fp64"),
    ({"slots": torch.tensor([1, 1])}, r"write_slots must name a slot once, got 1 twice"),
    (
        {"write_slots": torch.tensor([2, 0])},
        r"write_slots must not .* another sequence reads, got 0",
    ),
    ({"write_slots": torch.zeros(2, 3).long()}, r"write_slots must be \[B, M\] with M = 1"),
    ({"backend": "hopper"}, r"backend must be one of auto, tiled, triton"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_told(change: dict[str, Any], message: str) -> None:
    x, rest = draw("kda", 2, 1)
    given = {"pool": torch.zeros(4, 4, 20, 12), "slots": torch.tensor([0, 1]), **rest, **change}
    with pytest.raises(ValueError, match=rf"decode: {message}"):
        linear.decode(*x, given.pop("pool"), **given)
