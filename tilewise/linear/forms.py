"""What is the same in tensors that one plan serves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# AMD's compiler makes use of a tensor's size.
_IS_AMD = torch.version.hip is not None


def form_of(x: Tensor | None) -> Any:
    """What kernels and what they are given may depend on of a tensor, as a part of a key."""
    if x is None:
        return None
    is_small = not _IS_AMD or x.untyped_storage().nbytes() < 1 << 31
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0, is_small
