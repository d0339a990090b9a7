"""Warm calls: one like a call that was checked and ran on Triton's kernels goes to them at once.

Checks, the choice of a backend and the registered op take longer than a short call's kernels. A
call is known by the forms of its tensors and its scale. What bounds hold is checked anew, where it
may be read. Whatever is unusual about a call makes it a cold one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.observed import is_observed
from . import choice
from .forms import form_of
from .inputs import Inputs

# Of more forms than these the oldest is forgotten; none holds a tensor.
_MOST_KEPT = 1024
_NUMBERS = (float, int, type(None))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_NAMES = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
_kept: dict[Any, Known] = {}
_keeping = threading.Lock()


class Known(NamedTuple):
    """What a call was found to be. run: its forward, `(out, final_state)` of inputs like its."""

    scale: float
    run: Callable[[Inputs], tuple[Tensor, Tensor]]


class Found(NamedTuple):
    """A call's key, None for one that is never warm; its tensors as `Inputs` has them."""

    key: Any
    tensors: tuple[Any, ...]
    known: Known | None


def find(tensors: dict[str, Any], scale: Any, backend: str, has_vector_gate: bool) -> Found:
    """Of a call's tensors as an op of the family has them."""
    given = tuple(map(tensors.get, _NAMES))
    key = _key_of(given, scale, backend, has_vector_gate)
    return Found(key, given, None if key is None else _kept.get(key))


def _key_of(given: tuple[Any, ...], scale: Any, backend: str, has_vector_gate: bool) -> Any:
    """None for a call that is never warm."""
    if backend not in ("auto", "triton") or type(scale) not in _NUMBERS:
        return None
    if torch.compiler.is_compiling() or is_observed():
        return None
    forms: list[Any] = [scale, backend, has_vector_gate, choice.AUTO_TAKES_TRITON]
    for x in given:
        # A tensor of another kind, or one whose numbers are not what its memory holds.
        if x is not None and (
            type(x) not in _PLAIN_TYPES or x.layout is not torch.strided or x.is_meta or x.is_neg()
        ):
            return None
        forms.append(form_of(x))
    return tuple(forms)


def keep(key: Any, inputs: Inputs) -> None:
    """Make the next call like this one, which has run on Triton's kernels, a warm one."""
    if key is None:
        return
    from .triton_forward import known_forward

    known = Known(inputs.scale, known_forward(inputs))
    with _keeping:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = known
