"""Every op of the catalog, on every backend and dtype: each output and gradient within budget."""

from functools import cache

import pytest
import torch

from tests.helpers import UNDER_TEST
from tilewise import catalog
from tilewise.core.case import Case
from tilewise.core.shapes import COMPUTE_DTYPES
from tilewise.report import budget
from tilewise.report.verify import verify_case


@cache
def cases(op: catalog.Op, dtype: torch.dtype, device: str) -> dict[str, Case]:
    # They are drawn from a generator of the CPU.
    with torch.device("cpu"):
        drawn = op.load("cases")(op.name, dtype, torch.device(device))
    return {case.name: case for case in drawn}


def backends_of(op: catalog.Op, dtype: torch.dtype) -> list[str]:
    """What runs there; of several, the one under test alone."""
    names = [target.backend for target in budget.targets([op], [dtype], UNDER_TEST.device)]
    return [UNDER_TEST.backend] if UNDER_TEST.backend in names else names


# Small, and between them every term and layout; "causal" alone in 16 bits too.
INTERPRETED = {
    "attention": (
        "causal",
        "key_padding, lengths 0 and 80",
        "blocks",
        "everything at once",
    ),
    "attention_partial": ("causal, M > N (empty rows)", "piece, dropout"),
    "attention_varlen": ("causal", "used lengths, sinks, dropout"),
    "attention_varlen_partial": ("softcap, ALiBi [B, H]",),
    "attention_with_cache": ("tree", "float8, token scales, pages"),
    "attention_with_cache_partial": ("left padding", "scale 0.5, 3 splits", "chunked(32)"),
}


def marks(op: catalog.Op, name: str, dtype: torch.dtype) -> tuple[pytest.MarkDecorator, ...]:
    is_quick = name in INTERPRETED.get(op.name, ())
    in_dtype = dtype == torch.float32 or (dtype == torch.bfloat16 and name == "causal")
    return (pytest.mark.interpreter,) if is_quick and in_dtype else ()


CASES = [
    pytest.param(
        op,
        name,
        dtype,
        id=f"{op.name}-{name}-{str(dtype).removeprefix('torch.')}",
        marks=marks(op, name, dtype),
    )
    for op in catalog.OPS
    for name in cases(op, torch.float32, "cpu")
    for dtype in COMPUTE_DTYPES
    if backends_of(op, dtype)
]


@pytest.mark.parametrize(("op", "name", "dtype"), CASES)
def test_case_is_within_budget(op: catalog.Op, name: str, dtype: torch.dtype) -> None:
    case = cases(op, dtype, UNDER_TEST.device)[name]
    backends = [x for x in backends_of(op, dtype) if op.load("takes")(case, x)]
    if not backends:
        pytest.skip(f"{UNDER_TEST.backend} does not take it")
    for backend in backends:
        reports = verify_case(op, case, backend)
        failed = [str(report) for report in reports if not report.is_within]
        assert not failed, "\n".join(failed)
        # Outputs, and one gradient for each differentiable input.
        assert len(reports) >= 1 + (len(case.tensors) if op.has_gradients else 0)


def test_the_budget_notices_a_wrong_gradient() -> None:
    op = catalog.OPS[0]
    case = cases(op, torch.float32, UNDER_TEST.device)["full"]

    class Wrong(catalog.Op):
        def load(self, role: str):
            if role != "run":
                return super().load(role)
            right = super().load(role)

            def run(case, tensors, backend):
                out = right(case, tensors, backend)["out"]
                return {"out": out + 1e-3 * (tensors["k"].sum() - tensors["k"].sum().detach())}

            return run

    reports = verify_case(Wrong(**vars(op)), case, "tiled")
    assert [report.name for report in reports if not report.is_within] == ["dk"]
