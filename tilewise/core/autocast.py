"""Inputs of an op under torch.autocast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def under_autocast(q: Any, *others: Any) -> tuple[Any, ...]:
    """All of them in autocast's dtype where it is on, as torch's own matmuls take them.

    fp64, integers and what is no tensor stay as they are.
    """
    inputs = (q, *others)
    # torch knows no autocast for meta tensors, and 2.11 cannot trace the question whether it does.
    if not isinstance(q, Tensor) or q.device.type == "meta":
        return inputs
    if not torch.is_autocast_enabled(q.device.type):
        return inputs
    dtype = torch.get_autocast_dtype(q.device.type)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in inputs)


def _is_cast(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
