"""Every op of the catalog, on every backend and dtype: each output and gradient within budget."""

from functools import cache

import pytest
import torch

from tilewise import catalog
from tilewise.core.shapes import COMPUTE_DTYPES
from tilewise.dense.budget import Case
from tilewise.report.verify import verify_case


@cache
def cases(op: catalog.Op, dtype: torch.dtype) -> dict[str, Case]:
    drawn = op.load("cases")(op.name, dtype, torch.device("cpu"))
    return {case.name: case for case in drawn}


NAMES = [(op, name) for op in catalog.OPS for name in cases(op, torch.float32)]


@pytest.mark.parametrize("dtype", COMPUTE_DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize(("op", "name"), NAMES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_case_is_within_budget(op: catalog.Op, name: str, dtype: torch.dtype) -> None:
    case = cases(op, dtype)[name]
    for backend in op.backends:
        reports = verify_case(op, case, backend)
        failed = [str(report) for report in reports if not report.is_within]
        assert not failed, "\n".join(failed)
        # Outputs, and one gradient for each differentiable input.
        assert len(reports) >= 1 + len(case.tensors)


def test_the_budget_notices_a_wrong_gradient() -> None:
    op = catalog.OPS[0]
    case = cases(op, torch.float32)["full"]

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
