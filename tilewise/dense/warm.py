"""Warm calls: what was found for a call is kept and serves the next one that is like it.

Checks, the choice of a backend and a kernel's arguments take longer than a small call's kernel. A
call with no other tensors than q, k and v is known by its shapes, strides and numbers, so all of
that is found once. Whatever is unusual about a call makes it a cold one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from .choice import torch_wants_determinism
from .ops import Arguments, gradients_on_gpu
from .piece import Piece

# Of more layouts than these the oldest is forgotten. Each holds a few kilobytes, and no tensor.
_MOST_KEPT = 1024
_NUMBERS = (float, int, type(None))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What a call may have named.
BACKENDS = ("auto", "triton", "hopper")
_EXTRAS = ("alibi_slopes", "bias", "sinks")
_kept: dict[tuple[Any, ...], Warm] = {}
_keeping = threading.Lock()


class Warm(NamedTuple):
    """What a call left: the ops' arguments, and the forward made ready."""

    arguments: Arguments
    forward: Any

    def gradients(self, saved: Sequence[Tensor], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
        """Gradients of q, k and v. saved: q, k, v, out, lse."""
        q, k, v, out, lse = saved
        call, backend = self.forward.call.on(q, k, v), self.arguments.backend
        return gradients_on_gpu(backend, call, (dout, dlse), (out, lse), [False] * 3)[:3]


def key_of(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, terms: dict[str, Any], *rest: Any
) -> tuple[Any, ...] | None:
    """What the call is known by; None for one that is never warm.

    rest: whatever else tells calls apart.
    """
    is_plain = type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES
    if not is_plain or terms["dropout_p"] != 0.0:
        return None
    for name in _EXTRAS:
        if terms[name] is not None:
            return None
    if type(terms["scale"]) not in _NUMBERS or type(terms["softcap"]) not in _NUMBERS:
        return None
    mask_key = mask.key if isinstance(mask, Mask) else None
    device = q.device.type
    if mask_key is None or device == "meta" or _is_observed() or torch.is_autocast_enabled(device):
        return None
    # Written out: this is the way of every warm call.
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
        mask_key, terms["scale"], terms["softcap"], terms["is_deterministic"],
        torch_wants_determinism(), *rest,
    )  # fmt: skip


def _is_observed() -> bool:
    """Whether something wants to see the registered op itself: a mode, a transform, a tangent."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def find(key: tuple[Any, ...] | None) -> Warm | None:
    return None if key is None else _kept.get(key)


def keep(
    key: tuple[Any, ...] | None, q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, dtype: Any
) -> None:
    """Make the next call like this one a warm one."""
    # A backward wants out as exact as q is, and a warm call stores it once.
    is_exact = torch.promote_types(dtype, q.dtype) == dtype
    if key is None or arguments.backend not in BACKENDS or not is_exact:
        return
    from .triton_call import TritonCall

    piece = Piece(q, k, v, arguments.mask, arguments.positions(q, k), arguments.terms)
    call = TritonCall(piece)
    if not call.is_reusable:
        return
    forward = _forward_of(arguments.backend)(call, dtype)
    call.release()
    with _keeping:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = Warm(arguments, forward)


def _forward_of(backend: str) -> Any:
    if backend == "hopper":
        from . import hopper_call

        return hopper_call.Forward
    from .triton_forward import Forward

    return Forward
