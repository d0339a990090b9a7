"""Which backend runs a call of linear attention, and why not another."""

from __future__ import annotations

from ..core.backends import BackendChoice, check_backend_name, describe_device
from .inputs import Inputs

# eager: the oracle's recurrence in the inputs' precision, which the error budget is measured by.
BACKENDS = ("reference", "eager", "recurrent", "tiled")


def choose(op: str, backend: str) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not.
    """
    check_backend_name(op, backend, BACKENDS)
    return "tiled" if backend == "auto" else backend


def explain(op: str, backend: str, inputs: Inputs) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend), describe_device(inputs.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    rejected = {
        "reference": "the fp64 oracle runs only when it is named",
        "recurrent": "step by step it is slower than by chunks",
    }
    return BackendChoice(name, f"plain torch runs on any device, here {where}", rejected)
