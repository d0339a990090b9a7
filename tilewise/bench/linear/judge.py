"""Whether a contestant is right on a short call of a cell's kind."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ... import catalog
from ...core.case import Case
from ...core.tolerance import measure_budget
from .cells import BOTH, STEP, Cell
from .contestants import COPY, DENSE, Contestant, decode_step, run_once, verify_dense

Named = dict[str, Tensor]


def judge(contestant: Contestant, cell: Cell, direction: str, device: torch.device) -> str:
    """What is over the error budget; empty where nothing is. Raises what the contestant raises."""
    if contestant.name == COPY:
        return ""
    if contestant.name == DENSE:
        return verify_dense(cell, device)
    short = cell.short()
    if direction == STEP:
        return _judge_step(short, device)
    assert contestant.run is not None
    x = short.draw(device)
    if direction != BOTH:
        return _judge(("out",), [contestant.run(short.op, **x).detach()], short, device)
    got = run_once(contestant.run, short.op, x, _upstream(short, device))
    return _judge(("out", *x), got, short, device)


def _judge(names: tuple[str, ...], got: list[Tensor], short: Cell, device: torch.device) -> str:
    """The first that is over the budget, with its figures."""
    exact, eager, floors = _judges(short, device)
    for name, value in zip(names, got, strict=True):
        report = measure_budget(
            value, exact[name], eager[name], name=name, floor=floors.get(name, 0.0)
        )
        if not report.is_within:
            return str(report)
    return ""


def _upstream(short: Cell, device: torch.device) -> Tensor:
    shape = (short.B, short.M, short.H, short.D)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu")
    return drawn.to(device, short.dtype)


@lru_cache(maxsize=16)
def _judges(short: Cell, device: torch.device) -> tuple[Named, Named, dict[str, float]]:
    """Out and gradients by name, exact and of the eager form, and the floors of the gradients."""
    op = next(op for op in catalog.OPS if op.name == f"linear.{short.op}")
    x, dout = short.draw(device), _upstream(short, device)
    case = Case(op.name, str(short), x)
    wide = {name: t.double() for name, t in x.items()}

    def results(form: str, given: Named) -> Named:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        out = op.load(form)(case, leaves)["out"]
        gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    size = (short.B, short.H, short.D, short.D)
    no_state = torch.zeros(size, dtype=torch.float64, device=device)
    upstream = {"out": dout.double(), "final_state": no_state}
    floors = op.load("floors")(case, wide, upstream, torch.finfo(torch.float32).eps)
    floors["out"] = 0.0
    return results("exact", wide), results("eager", x), floors


def _judge_step(short: Cell, device: torch.device) -> str:
    """A step on states, beside the op from the same states."""
    op = next(op for op in catalog.OPS if op.name == f"linear.{short.op}")
    x = replace(short, M=1).draw(device)
    size = (short.B, short.H, short.D, short.D)
    generator = torch.Generator().manual_seed(2)
    states = torch.randn(size, generator=generator, device="cpu").to(device)
    tensors = x | {"initial_state": states}
    case = Case(op.name, str(short), tensors)
    exact, eager = (
        op.load(form)(case, given)
        for form, given in (
            ("exact", {name: t.double() for name, t in tensors.items()}),
            ("eager", tensors),
        )
    )
    # Sequences stand in the pool in the opposite order.
    pool = states.flip(0).contiguous()
    out = decode_step(short, x, device, pool)()
    got = {"out": out, "final_state": pool.flip(0)}
    for name, value in got.items():
        report = measure_budget(value, exact[name], eager[name], name=name)
        if not report.is_within:
            return str(report)
    return ""
