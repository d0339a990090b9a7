"""One call of an op, as it is verified."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Case:
    """One call of an op.

    tensors: the floating arguments by name, each of which gets a gradient.
    options: the others. seed: torch's seed at the call, so that dropout is the same in each form.
    """

    op: str
    name: str
    tensors: dict[str, Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
