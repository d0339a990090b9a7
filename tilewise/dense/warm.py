"""Warm calls: what was found for a call is kept and serves the next one that is like it.

Checks, the choice of a backend and a kernel's arguments take longer than a small call's kernel. A
call with no other tensors than q, k, v, lengths and those of its mask is known by shapes, strides
and numbers, so all of that is found once. What lengths and masks hold is read anew by every call,
on the device. Whatever is unusual about a call makes it a cold one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask, raise_mask
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
# The same for layouts of what comes from above, of one call.
_MOST_BACKWARDS = 8
_NUMBERS = (float, int, type(None))
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# What a call may have named.
BACKENDS = ("auto", "triton", "hopper")
_EXTRAS = ("alibi_slopes", "bias", "sinks")
_LONGEST = ("max_seqlen_q", "max_seqlen_k")
_STARTS = ("q_start", "k_start")
_NO_LENGTHS = (None,) * len(LENGTHS)
_NOT_RECORDED = object()
_kept: dict[tuple[Any, ...], Warm] = {}
_keeping = threading.Lock()

# The tensors that say where sequences stand and what is seen: lengths as `LENGTHS` names them, then
# the mask's in the order of `Mask.lower`; () where there are none. As they were given: a checkpoint
# may recompute a cold call by a warm one, which has to save the same tensors.
Index = tuple[Tensor | None, ...]


class Warm:
    """What a call left: the ops' arguments, the forward made ready, and what was launched. Nothing
    of it holds a tensor."""

    def __init__(self, arguments: Arguments, forward: Any) -> None:
        self.arguments, self.forward = arguments, forward
        self._is_packed = forward.call.piece.positions.is_packed
        self._dtype = forward.call.piece.q.dtype
        # Hopper's forward keeps its launch itself.
        self._keeps_own = arguments.backend == "hopper"
        # Launches to be made again, as `Tape.finish` leaves them.
        self._forward: Any = None if self._keeps_own else _NOT_RECORDED
        self._backwards: list[tuple[list[Any], Any]] = []

    def run(self, q: Tensor, k: Tensor, v: Tensor, index: Index) -> Result:
        if self._forward is None or self._forward is _NOT_RECORDED:
            return self._run_first(q, k, v, index)
        return Result(*self._forward.run((q, k, v, *index)))

    def check(self, q: Tensor, k: Tensor, v: Tensor, index: Index, longest: list[int]) -> None:
        """See `check_contents`. longest: `Arguments.max_seqlens`."""
        if q.device.type != "cpu" and os.environ.get("TILEWISE_CHECK") != "1":
            return
        if self._is_packed:
            q, k, v = as_rows(q, k, v)
        arguments = self._arguments_of(index)._replace(max_seqlens=longest)
        check_contents(arguments, self._call_on(q, k, v, index).piece)

    def gradients(
        self, saved: Sequence[Any], dout: Tensor, dlse: Tensor | None
    ) -> Sequence[Tensor]:
        """Gradients of q, k and v. saved: q, k, v, out, its remainder, lse, and the index."""
        if torch.compiler.is_compiling():
            # Compiled autograd traces the backward of a call that was not compiled.
            q, k, v, out, remainder, lse = saved[:6]
            rest = (*self._arguments_of(saved[6:]), [False] * 3)
            given = (dout, dlse, out, remainder, lse, q, k, v, *rest)
            return list(torch.ops.tilewise.attention_bwd(*given)[:3])
        if dout.dtype is not self._dtype:
            # Kernels multiply it by v: an fp32 partial's gradient is rounded as q, k and v are.
            dout = dout.to(self._dtype)
        # What has to be copied is copied here, so that the launches serve it.
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        if dlse is not None and dlse.stride(-1) != 1:
            dlse = dlse.contiguous()
        tensors = (*saved, dout, dlse)
        # Hooks may bring what was saved back in another layout.
        key = [
            None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)
            for x in tensors
        ]
        for known, replay in self._backwards:
            if known == key:
                found: Sequence[Tensor] = (
                    self._differentiate(tensors, None) if replay is None else replay.run(tensors)
                )
                return found
        return self._differentiate(tensors, key)

    # ------------------------------------------------------------ the first of its kind

    def _arguments_of(self, index: Sequence[Any]) -> Arguments:
        named: dict[str, Any] = dict(zip(LENGTHS, index, strict=False))
        return self.arguments._replace(**named, mask_tensors=list(index[len(LENGTHS) :]))

    def _call_on(
        self, q: Tensor, k: Tensor, v: Tensor, index: Sequence[Tensor | None], tape: Any = None
    ) -> Any:
        if index and index[1] is None:
            # Self-attention: one packing serves queries and keys.
            index = (index[0], index[0], *index[2:])
        return self.forward.call.on(q, k, v, index, tape)

    def _run_first(self, q: Tensor, k: Tensor, v: Tensor, index: Index) -> Result:
        if self._keeps_own and not index:
            result: Result = self.forward.run(q, k, v)
            return result
        from ..kernels.replay import Tape, distinct

        tensors = (*as_rows(q, k, v), *index) if self._is_packed else (q, k, v, *index)
        given: list[Any] = distinct(tensors)
        tape = None
        if self._forward is _NOT_RECORDED:
            tape = Tape(given, self.forward.call.device)
        q, k, v, *found = given
        call = self._call_on(q, k, v, found, tape)
        result = self.forward.run(q, k, v, call)
        if tape is not None:
            self._forward = tape.finish(result, has_batch=not self._is_packed)
        if self._is_packed:
            for x in result:
                if x is not None:
                    # In place, as the op does.
                    x.squeeze_(0)
        return result

    def _differentiate(
        self, tensors: tuple[Tensor | None, ...], key: list[Any] | None
    ) -> list[Tensor]:
        """key: under which the launches are kept; None where they cannot be."""
        from ..kernels.replay import Tape, distinct

        *saved, dout, dlse = tensors
        if self._is_packed:
            saved[:6], (dout, dlse) = as_rows(*saved[:6]), as_rows(dout, dlse)
        given: list[Any] = distinct((*saved, dout, dlse))
        tape = None if key is None else Tape(given, self.forward.call.device)
        q, k, v, out, remainder, lse, *index = given[:-2]
        call = self._call_on(q, k, v, index, tape)
        upstream, result = (given[-2], given[-1]), Result(out, lse, remainder)
        found = gradients_on_gpu(self.arguments.backend, call, upstream, result, [False] * 3)[:3]
        if tape is not None:
            replay = tape.finish(found, has_batch=not self._is_packed)
            self._backwards = [(key or [], replay), *self._backwards[: _MOST_BACKWARDS - 1]]
        return [x.squeeze(0) for x in found] if self._is_packed else found


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    terms: dict[str, Any],
    placement: dict[str, Any],
    *rest: Any,
) -> tuple[tuple[Any, ...] | None, Index]:
    """What the call is known by, None for one that is never warm; and its index.

    rest: whatever else tells calls apart.
    """
    is_plain = type(q) in _PLAIN_TYPES and type(k) in _PLAIN_TYPES and type(v) in _PLAIN_TYPES
    if not is_plain or not (q.layout is k.layout is v.layout is torch.strided):
        return None, ()
    for name in _EXTRAS:
        if terms[name] is not None:
            return None, ()
    # What is no number is the cold call's to refuse.
    for name in ("scale", "softcap", "dropout_p"):
        if type(terms[name]) not in _NUMBERS:
            return None, ()
    if terms["dropout_p"] != 0.0:
        return None, ()
    form = mask.form if isinstance(mask, Mask) else None
    device = q.device
    if form is None or device.type == "meta" or is_observed():
        return None, ()
    mask_key, tensors = form
    place_key: tuple[Any, ...] | None = ()
    index: Index = ()
    if placement:
        place_key, lengths = _key_of_place(placement)
        if place_key is None:
            return None, ()
        if lengths is not _NO_LENGTHS or tensors:
            index = (*lengths, *tensors)
    elif tensors:
        index = (*_NO_LENGTHS, *tensors)
    if tensors:
        known = [_layout_of(x) for x in tensors]
        # What a list became stands on the CPU, and each call has to read it there.
        if None in known or any(x.device != device for x in tensors):
            return None, ()
        mask_key = mask_key, *known
    # Written out: this is the way of every warm call.
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16 == 0,
        mask_key, terms["scale"], terms["softcap"], terms["is_deterministic"],
        torch_wants_determinism(), place_key, *rest,
    ), index  # fmt: skip


def _layout_of(x: Tensor) -> tuple[Any, ...] | None:
    """What a kernel's binary and launch know of lengths, without what they hold."""
    if type(x) is not Tensor:
        return None
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0


def _key_of_place(placement: dict[str, Any]) -> tuple[tuple[Any, ...] | None, Index]:
    """What says where rows stand, without what lengths hold, None for what has to be refused, or
    read by a cold call; and the lengths."""
    # Kernels of warm calls make no use of it, and it differs from batch to batch.
    for name in _LONGEST:
        x = placement.get(name)
        if x is not None and (type(x) is not int or x < 0):
            return None, ()
    key: list[Any] = []
    for name in _STARTS:
        x = placement.get(name)
        if x is not None and type(x) is not int:
            return None, ()
        key.append(x)
    lengths = tuple([placement.get(name) for name in LENGTHS])
    is_absent = True
    for x in lengths:
        if x is None:
            key.append(None)
            continue
        is_absent, known = False, _layout_of(x)
        if known is None:
            return None, ()
        key.append(known)
    return tuple(key), _NO_LENGTHS if is_absent else lengths


def longest_of(placement: dict[str, Any]) -> list[int]:
    """`Arguments.max_seqlens`."""
    longest = [placement.get(name) for name in _LONGEST]
    return [-1 if x is None else x for x in longest]


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
    from ..kernels.replay import distinct
    from .triton_call import TritonCall

    # How long sequences may be is each call's own; so is which of a mask's tensors are the same.
    arguments = arguments._replace(max_seqlens=[])
    tensors = [x for x in distinct(arguments.mask_tensors) if x is not None]
    mask = raise_mask(arguments.mask_flags, arguments.mask_ints, tensors)
    piece = Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms)
    call = TritonCall(piece.as_batch())
    if not call.is_reusable:
        return
    forward = forward_of(arguments.backend)(call, dtype, is_split=is_split)
    forward.release()
    no_lengths: dict[str, Any] = dict.fromkeys(LENGTHS)
    arguments = arguments._replace(**no_lengths, mask_tensors=[])
    with _keeping:
        while len(_kept) >= _MOST_KEPT:
            _kept.pop(next(iter(_kept)))
        _kept[key] = Warm(arguments, forward)
