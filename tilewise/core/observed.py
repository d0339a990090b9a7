"""Whether a call has to be made the usual way, though one like it is known."""

from __future__ import annotations

import torch


def is_observed() -> bool:
    """Whether something wants to see the registered op itself: a mode, a transform, a tangent, a
    trace."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )
