"""Warm calls: what was found for a call is kept and serves the next one that is like it.

Checks, the choice of a backend and a kernel's arguments take longer than a small call's kernel. A
call with no other tensors than q, k, v and the bounds of packed sequences is known by shapes,
strides and numbers, so all of that is found once. What bounds hold is read anew by every call, on
the device. Whatever is unusual about a call makes it a cold one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.observed import is_observed
from ..core.shapes import accumulator_of
from .choice import torch_wants_determinism
from .ops import (
    Arguments,
    as_rows,
    check_contents,
    forward_of,
    gradients_on_gpu,
    is_kept_in_two,
)
from .piece import LENGTHS, Piece, Result

# Of more layouts than these the oldest is forgotten. Each holds a few kilobytes, and no tensor.
_MOST_KEPT = 1024
_NUMBERS = (float, int, type(None))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What a call may have named.
BACKENDS = ("auto", "triton", "hopper")
_EXTRAS = ("alibi_slopes", "bias", "sinks")
_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_STARTS = ("q_start", "k_start")
_kept: dict[tuple[Any, ...], Warm] = {}
_keeping = threading.Lock()


class Packing(NamedTuple):
    """What a packed call says of its sequences.

    lengths: as `LENGTHS` names them and as they were given: a checkpoint may recompute a cold call
        by a warm one, which has to save the same tensors.
    longest: `Arguments.max_seqlens`.
    """

    lengths: tuple[Tensor | None, ...]
    longest: list[int]


class Warm(NamedTuple):
    """What a call left: the ops' arguments, and the forward made ready. Neither holds a tensor."""

    arguments: Arguments
    forward: Any

    def run(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing | None) -> Result:
        if packing is None:
            result: Result = self.forward.run(q, k, v)
            return result
        call = self._packed(q, k, v, packing.lengths)
        check_contents(self.arguments._replace(max_seqlens=packing.longest), call.piece)
        result = self.forward.run(call.piece.q, call.piece.k, call.piece.v, call)
        for x in result:
            if x is not None:
                # In place, as the op does.
                x.squeeze_(0)
        return result

    def gradients(self, saved: Sequence[Any], dout: Tensor, dlse: Tensor | None) -> list[Tensor]:
        """Gradients of q, k and v. saved: q, k, v, out, its remainder, lse, and lengths of a packed
        call."""
        q, k, v, out, remainder, lse = saved[:6]
        if torch.compiler.is_compiling():
            # Compiled autograd traces the backward of a call that was not compiled.
            named: dict[str, Any] = dict(zip(LENGTHS, saved[6:], strict=False))
            rest = (*self.arguments._replace(**named), [False] * 3)
            given = (dout, dlse, out, remainder, lse, q, k, v, *rest)
            return list(torch.ops.tilewise.attention_bwd(*given)[:3])
        upstream, result = (dout, dlse), Result(out, lse, remainder)
        if len(saved) == 6:
            return self._gradients(self.forward.call.on(q, k, v), upstream, result)
        call = self._packed(q, k, v, saved[6:])
        found = self._gradients(call, as_rows(*upstream), Result(*as_rows(*result)))
        return [x.squeeze(0) for x in found]

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[Tensor | None]) -> Any:
        cu_q, cu_k, *used = lengths
        # Self-attention: one packing serves queries and keys.
        lengths = cu_q, cu_q if cu_k is None else cu_k, *used
        return self.forward.call.on(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), lengths)

    def _gradients(
        self, call: Any, upstream: tuple[Tensor, Tensor | None], result: Result
    ) -> list[Tensor]:
        return gradients_on_gpu(self.arguments.backend, call, upstream, result, [False] * 3)[:3]


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    terms: dict[str, Any],
    placement: dict[str, Any],
    *rest: Any,
) -> tuple[Any, ...] | None:
    """What the call is known by; None for one that is never warm.

    rest: whatever else tells calls apart.
    """
    is_plain = type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES
    if not is_plain or not (q.layout is k.layout is v.layout is torch.strided):
        return None
    for name in _EXTRAS:
        if terms[name] is not None:
            return None
    # What is no number is the cold call's to refuse.
    for name in ("scale", "softcap", "dropout_p"):
        if type(terms[name]) not in _NUMBERS:
            return None
    if terms["dropout_p"] != 0.0:
        return None
    mask_key = mask.key if isinstance(mask, Mask) else None
    device = q.device.type
    if mask_key is None or device == "meta" or is_observed():
        return None
    place_key: tuple[Any, ...] | None = ()
    if placement:
        place_key = _key_of_place(placement)
        if place_key is None:
            return None
    # Written out: this is the way of every warm call.
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
        mask_key, terms["scale"], terms["softcap"], terms["is_deterministic"],
        torch_wants_determinism(), place_key, *rest,
    )  # fmt: skip


def _key_of_place(placement: dict[str, Any]) -> tuple[Any, ...] | None:
    """What says where rows stand, without what bounds hold; None for what has to be refused, or
    read by a cold call."""
    # Kernels of warm calls make no use of it, and it differs from batch to batch.
    for name in _LONGEST:
        x = placement.get(name)
        if x is not None and (type(x) is not int or x < 0):
            return None
    key: list[Any] = []
    for name in LENGTHS:
        x = placement.get(name)
        if x is not None and type(x) is not Tensor:
            return None
        known = x is None or (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)
        key.append(known)
    for name in _STARTS:
        x = placement.get(name)
        if x is not None and type(x) is not int:
            return None
        key.append(x)
    return tuple(key)


def packing_of(placement: dict[str, Any]) -> Packing | None:
    """None where nothing is packed."""
    if placement.get("cu_seqlens_q") is None:
        return None
    longest = [placement.get(name) for name in _LONGEST]
    return Packing(
        tuple(placement.get(name) for name in LENGTHS),
        [-1 if x is None else x for x in longest],
    )


def find(key: tuple[Any, ...] | None) -> Warm | None:
    return None if key is None else _kept.get(key)


def keep(
    key: tuple[Any, ...] | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arguments: Arguments,
    dtype: torch.dtype,
    *,
    learns: bool,
) -> None:
    """Make the next call like this one a warm one. dtype: of out."""
    # A backward wants out as exact as q is, and a warm call stores it once.
    is_exact = torch.promote_types(dtype, q.dtype) == dtype
    if key is None or arguments.backend not in BACKENDS or not is_exact:
        return
    is_split = learns and is_kept_in_two(q.dtype, dtype)
    if learns and not is_split:
        dtype = accumulator_of(q.dtype)
    from .triton_call import TritonCall

    # How long sequences may be is each call's own.
    arguments = arguments._replace(max_seqlens=[])
    piece = Piece(q, k, v, arguments.mask, arguments.positions(q, k), arguments.terms)
    call = TritonCall(piece.as_batch())
    if not call.is_reusable:
        return
    forward = forward_of(arguments.backend)(call, dtype, is_split=is_split)
    forward.release()
    no_lengths: dict[str, Any] = dict.fromkeys(LENGTHS)
    arguments = arguments._replace(**no_lengths)
    with _keeping:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = Warm(arguments, forward)
