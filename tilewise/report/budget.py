"""Verification over many ops, and its summary: what each output and gradient used of its budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..bench.progress import Progress
from ..catalog import Op
from ..core.backends import hopper_problem, is_interpreted
from ..core.tolerance import BudgetReport
from .verify import VerifyRow, verify_case

# The other backends of the catalog run anywhere and in every dtype.
_KERNELS = ("triton", "hopper")

# A sample that touches every mask, term and layout once; `tilewise verify` runs all cases.
QUICK_CASES: Mapping[str, Collection[str]] = {
    "attention": (
        "causal, several tiles",
        "sink tokens + window + documents",
        "causal & left_padding",
        "blocks",
        "D 59, E 37",
        "one query",
        "everything at once",
    ),
    "attention_partial": (
        "causal, M > N (empty rows)",
        "piece of a window",
        "piece, dropout",
        "sinks, empty rows",
    ),
    "attention_varlen": ("causal", "softcap, ALiBi [B, H]", "used lengths, sinks, dropout"),
    "attention_varlen_partial": ("window(7, 2)", "bias [1, H, M, N]"),
    "merge": ("two", "five", "packed"),
    **dict.fromkeys(
        ("linear.linear_attention", "linear.retention", "linear.delta_rule"),
        ("three chunks", "packed, one empty"),
    ),
    **dict.fromkeys(
        ("linear.simple_gla", "linear.gla", "linear.gated_delta_rule", "linear.kda"),
        ("three chunks", "packed, one empty", "gates of 0 and -50"),
    ),
    "attention_with_cache": (
        "one query, pages of 16",
        "window(20, 0)",
        "tree",
        "left padding",
        "float8, token scales, pages",
    ),
    "attention_with_cache_partial": ("mixed batch, window, sinks", "ALiBi [B, H], softcap"),
}


@dataclass(frozen=True)
class Target:
    """One op on one backend in one dtype."""

    op: Op
    dtype: torch.dtype
    backend: str


@dataclass(frozen=True)
class Group:
    """One output or gradient of an op over all its cases, in one dtype on one backend."""

    op: str
    backend: str
    dtype_name: str
    tensor: str
    cases: int
    within: int
    worst_used: float
    worst_case: str

    @property
    def is_within(self) -> bool:
        return self.within == self.cases

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


def targets(
    ops: Sequence[Op],
    dtypes: Sequence[torch.dtype],
    device_type: str,
    *,
    backend: str | None = None,
) -> list[Target]:
    """Every op in every dtype on each of its backends that runs there; or on the named one."""
    return [
        Target(op, dtype, name)
        for op in ops
        for name in op.backends
        for dtype in dtypes
        if backend in (None, name) and _runs(name, dtype, device_type)
    ]


def _runs(backend: str, dtype: torch.dtype, device_type: str) -> bool:
    """Kernels want a GPU, or Triton's interpreter, and compute in fp32 at most; Hopper's want
    its GPU and 16 bits."""
    if backend not in _KERNELS:
        return True
    if dtype == torch.float64:
        return False
    if is_interpreted():
        return backend == "triton" and device_type == "cpu"
    if device_type != "cuda" or backend == "triton":
        return device_type == "cuda"
    return dtype != torch.float32 and not hopper_problem(torch.device("cuda", 0))


def verify(
    targets: Sequence[Target],
    device: torch.device,
    progress: Progress,
    *,
    only: Mapping[str, Collection[str]] | None = None,
    part: tuple[int, int] = (1, 1),
) -> list[VerifyRow]:
    """The rows of all cases that the backend takes; a call that raises is a row that failed. only:
    cases by op. part: (2, 3) is the second of three parts of each op's cases, as even as can be."""
    rows: list[VerifyRow] = []
    for target in targets:
        op, dtype = target.op, target.dtype
        takes = op.load("takes")
        cases = [x for x in op.load("cases")(op.name, dtype, device) if takes(x, target.backend)]
        if only is not None:
            cases = [case for case in cases if case.name in only[op.name]]
        cases = cases[part[0] - 1 :: part[1]]
        progress.stage(f"verify {op.name} {_name(dtype)}", len(cases))
        for case in cases:
            try:
                reports = verify_case(op, case, target.backend)
            except Exception as error:
                reports = [_raised(error)]
            rows += [VerifyRow(op.name, case.name, target.backend, dtype, r) for r in reports]
            progress.step(case.name)
    return rows


def group(rows: Sequence[VerifyRow]) -> list[Group]:
    """In the order in which they were met."""
    found: dict[tuple[str, str, str, str], list[VerifyRow]] = {}
    for row in rows:
        tensor = _common_name(row.report.name)
        found.setdefault((row.op, row.backend, _name(row.dtype), tensor), []).append(row)
    groups = []
    for key, members in found.items():
        worst = max(members, key=lambda row: row.report.used)
        within = sum(row.report.is_within for row in members)
        groups.append(Group(*key, len(members), within, worst.report.used, worst.case))
    return groups


def describe_verdict(rows: Sequence[VerifyRow]) -> str:
    """One sentence: how many rows there were, and how many within budget."""
    within = sum(row.report.is_within for row in rows)
    calls = len({(row.op, row.case, row.backend, row.dtype) for row in rows})
    if within == len(rows):
        return f"All {len(rows)} outputs and gradients of {calls} calls are within budget."
    over = len(rows) - within
    return (
        f"{within} of {len(rows)} outputs and gradients of {calls} calls are within budget, "
        f"{over} {'is' if over == 1 else 'are'} not."
    )


def describe_row(row: VerifyRow) -> str:
    return f"{row.op} [{row.case}] {row.backend} {_name(row.dtype)} {row.report}"


def row_as_json(row: VerifyRow) -> dict[str, Any]:
    return {
        "op": row.op,
        "case": row.case,
        "backend": row.backend,
        "dtype": _name(row.dtype),
        "tensor": row.report.name,
        "max_error": row.report.max_error,
        "max_budget": row.report.max_budget,
        "mean_error": row.report.mean_error,
        "mean_budget": row.report.mean_budget,
        "problem": row.report.problem,
    }


def _raised(error: Exception) -> BudgetReport:
    inf = math.inf
    return BudgetReport("call", inf, 0.0, inf, 0.0, f"raised {type(error).__name__}: {error}")


def _common_name(tensor: str) -> str:
    """`out_3` and `out_0` are one kind of input to merge."""
    name, _, number = tensor.rpartition("_")
    return name if number.isdigit() else tensor


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
