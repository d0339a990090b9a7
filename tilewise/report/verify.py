"""Hold every output and every gradient of an op against the fp64 oracle within the error budget."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..catalog import Op
from ..core.shapes import accumulator_of
from ..core.tolerance import BudgetReport, measure_budget, measure_lse
from ..dense.choice import torch_mode_unheeded


@dataclass(frozen=True)
class VerifyRow:
    """One tensor of one case: `report` says what it used of its budget."""

    op: str
    case: str
    backend: str
    dtype: torch.dtype
    report: BudgetReport


def verify_case(op: Op, case: Any, backend: str) -> list[BudgetReport]:
    """The reports of each output and each gradient of one case, in that order."""
    got_leaves = _leaves(case.tensors)
    with poisoned_memory():
        got = op.load("run")(case, got_leaves, backend)
        generator = torch.Generator().manual_seed(case.seed + 1)
        upstream = {name: _upstream(x, generator) for name, x in got.items()}
        got_grads = _gradients(op, got, got_leaves, upstream)
    exact_leaves = _leaves(case.tensors, torch.float64)
    exact = op.load("exact")(case, exact_leaves)
    exact_grads = _gradients(op, exact, exact_leaves, upstream)
    eager_leaves = _leaves(case.tensors)
    eager = op.load("eager")(case, eager_leaves)
    eager_grads = _gradients(op, eager, eager_leaves, upstream)

    first = next(iter(case.tensors.values()))
    eps = torch.finfo(accumulator_of(first.dtype)).eps
    wide = {name: x.detach() for name, x in exact_leaves.items()}
    wide_upstream = {name: x.to(torch.float64) for name, x in upstream.items()}
    floors = op.load("floors")(case, wide, wide_upstream, eps)
    reports = []
    for name, value in got.items():
        if name == "lse":
            reports.append(measure_lse(value, exact[name].detach(), first.dtype))
            continue
        floor = _oracle_rounding(value, exact[name])
        if value.dtype == torch.float64:
            floor += floors.get(name, 0.0)
        budget = (value.detach(), exact[name].detach(), eager[name].detach())
        reports.append(measure_budget(*budget, name=name, floor=floor))
    for name, gradient in got_grads.items():
        floor = floors.get(name, 0.0) + _oracle_rounding(gradient, exact_grads[name])
        budget = (gradient, exact_grads[name], eager_grads[name])
        reports.append(measure_budget(*budget, name=f"d{name}", floor=floor))
    return reports


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill every new buffer with NaN, so that what is not written shows.

    torch does so in its deterministic mode, in which cuBLAS wants a workspace of fixed size.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    was_on = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        with torch_mode_unheeded():
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned)
        settings.fill_uninitialized_memory = fill


def _leaves(tensors: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Leaves of the same layout that collect gradients."""
    found = {}
    for name, x in tensors.items():
        leaf = x.detach() if dtype is None else x.detach().to(dtype)
        found[name] = leaf.requires_grad_()
    return found


def _upstream(output: Tensor, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(output.device, output.dtype)


def _gradients(
    op: Op, outputs: dict[str, Tensor], leaves: dict[str, Tensor], upstream: dict[str, Tensor]
) -> dict[str, Tensor]:
    if not op.has_gradients:
        return {}
    names = list(outputs)
    values = torch.autograd.grad(
        [outputs[name] for name in names],
        list(leaves.values()),
        [upstream[name].to(outputs[name].dtype) for name in names],
    )
    return dict(zip(leaves, values, strict=True))


def _oracle_rounding(got: Tensor, exact: Tensor) -> float:
    """In fp64 the oracle rounds as the result does: 16 eps of the largest value."""
    if got.dtype != torch.float64 or exact.numel() == 0:
        return 0.0
    finite = torch.where(exact.isfinite(), exact, 0.0)
    return 16 * torch.finfo(torch.float64).eps * float(finite.detach().abs().max())
