"""Where the tests run, and one call held against the error budget: every output and gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from tilewise import catalog
from tilewise.core.case import Case
from tilewise.report.verify import verify_case

OPS = {op.name: op for op in catalog.OPS}


@dataclass
class UnderTest:
    """What `--device` and `--backend` chose, before any test was collected.

    device: where tensors are made. backend: None where neither was given, as in `make test`; then
    each test names its own or leaves the choice to the library.
    """

    device: str = "cpu"
    backend: str | None = None


UNDER_TEST = UnderTest()


def backends(*usual: str) -> tuple[str, ...]:
    """The backend under test alone; the usual ones where none was chosen."""
    return usual if UNDER_TEST.backend is None else (UNDER_TEST.backend,)


def runs_kernels() -> bool:
    """Whether the backend under test is one of kernels: no fp64, head dims up to 256."""
    return UNDER_TEST.backend in ("triton", "hopper")


def on_backend(function: Callable[..., Any]) -> Callable[..., Any]:
    """A public function that runs on the backend under test, unless the call names another."""

    @wraps(function)
    def call(*tensors: Any, **options: Any) -> Any:
        return function(*tensors, **{"backend": UNDER_TEST.backend or "auto", **options})

    return call


def check_call(
    op: str,
    tensors: dict[str, Tensor],
    *,
    backend: str | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Fail with the figures unless the call is within budget.

    tensors are the floating arguments by name (q, k, v, bias, alibi_slopes, sinks), options the
    rest; outputs and gradient buffers are filled with NaN before the call. backend: the one under
    test when None.
    """
    case = Case(op, "test", tensors, options, seed)
    reports = verify_case(OPS[op], case, backend or backends("tiled")[0])
    failed = [str(report) for report in reports if not report.is_within]
    assert reports and not failed, "\n".join(failed)
