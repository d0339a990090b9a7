"""One call held against the error budget: every output and every gradient."""

from typing import Any

from torch import Tensor

from tilewise import catalog
from tilewise.dense.budget import Case
from tilewise.report.verify import verify_case

OPS = {op.name: op for op in catalog.OPS}


def check_call(
    op: str, tensors: dict[str, Tensor], *, backend: str = "tiled", seed: int = 0, **options: Any
) -> None:
    """Fail with the figures unless the call is within budget.

    tensors are the floating arguments by name (q, k, v, bias, alibi_slopes, sinks), options the
    rest; outputs and gradient buffers are filled with NaN before the call.
    """
    case = Case(op, "test", tensors, options, seed)
    reports = verify_case(OPS[op], case, backend)
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)
