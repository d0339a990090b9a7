"""Compiling what a backward will launch while its forward is compiled and runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.launch import UNTILED, compile_ahead
from .piece import Result, new_remainder
from .triton_call import TritonCall

# As `ops.gradients_on_gpu`.
Gradients = Callable[
    [str, TritonCall, tuple[Tensor, Tensor | None], Result, list[bool]], Sequence[Tensor]
]
# Backwards whose compilation was begun.
_begun: set[Any] = set()


def begin_to_compile(backend: str, call: TritonCall, gradients: Gradients) -> None:
    """Of a call of 16 bits that learns. Calls with more tensors than lengths and masks wait for
    their backward."""
    if not call.is_reusable:
        return
    terms = call.piece.terms
    # What mostly settles the binaries; one that it misses is compiled when it is launched.
    key = (
        backend, call.device, call.key, call.dims, call.place_kind, call.mask_kind, call.is_folded,
        terms.softcap is None, terms.is_deterministic, call.has_few_keys,
    )  # fmt: skip
    if key in _begun:
        return
    _begun.add(key)

    def differentiate(shadow: TritonCall) -> None:
        q, v = shadow.piece.q, shadow.piece.v
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = q.new_empty(call.B, call.H, call.M, dtype=torch.float32)
        result = Result(out, lse, new_remainder(out))
        gradients(backend, shadow, (torch.empty_like(out), None), result, [False] * 3)

    # The forward places sequences too, and compiles that kernel itself.
    own = [x for x in call.rehearse(differentiate) if x.config != UNTILED]
    compile_ahead(own, call.device)
