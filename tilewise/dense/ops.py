"""The dense ops as PyTorch knows them: schemas, fake kernels, dispatch to a backend, autograd.

Masks and placements travel as plain ints and tensors (`Mask.lower`), so one schema serves every
mask; packed calls are the same ops with `cu_seqlens`. `Arguments` is the one place that knows
their order.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.first_derivative import mark_first_derivatives
from ..core.mask import Mask, raise_mask
from ..core.positions import Positions
from ..core.shapes import accumulator_of, check_cu_seqlens
from .choice import choose, why_not_hopper_backward
from .piece import Piece, Result, Terms, new_remainder

if TYPE_CHECKING:
    from .triton_call import TritonCall

_REST = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? rng, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt[] max_seqlens, SymInt[] starts, Tensor[] start_tensors, "
    "int[] mask_flags, SymInt[] mask_ints, Tensor[] mask_tensors, "
    "float scale, float? softcap, float dropout_p, bool is_deterministic, str backend"
)

library = torch.library.Library("tilewise", "DEF")
library.define(
    f"attention_fwd(Tensor q, Tensor k, Tensor v, {_REST}, ScalarType out_dtype)"
    " -> (Tensor out, Tensor lse)"
)
# For a backward: out in the dtype of q, and what rounding took off it.
library.define(
    f"attention_fwd_split(Tensor q, Tensor k, Tensor v, {_REST})"
    " -> (Tensor out, Tensor lse, Tensor remainder)"
)
library.define(
    "attention_bwd(Tensor dout, Tensor? dlse, Tensor out, Tensor? remainder, Tensor lse, "
    f"Tensor q, Tensor k, Tensor v, {_REST}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dslopes, Tensor dsinks)"
)
library.define(
    "attention_bwd_into(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor dout, Tensor lse, "
    f"Tensor delta, Tensor q, Tensor k, Tensor v, {_REST}) -> ()"
)


class Arguments(NamedTuple):
    """What `_REST` declares, in its order: everything but q, k and v.

    backend is a name, "tiled(own)" where nothing is handed to PyTorch's fused op, or "auto" in a
    compiled call, which chooses when it runs.
    starts is `[]`, or `[q_start, k_start]` for a piece; `start_tensors` are the same per batch
    row. max_seqlens is `[]` or `[q, k]`, with -1 for what was not given.
    """

    bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    rng: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlens: list[int]
    starts: list[int]
    start_tensors: list[Tensor]
    mask_flags: list[int]
    mask_ints: list[int]
    mask_tensors: list[Tensor]
    scale: float
    softcap: float | None
    dropout_p: float
    is_deterministic: bool
    backend: str

    @property
    def terms(self) -> Terms:
        return Terms(
            self.scale,
            self.softcap,
            self.alibi_slopes,
            self.bias,
            self.sinks,
            self.dropout_p,
            self.rng,
            self.is_deterministic,
        )

    @property
    def mask(self) -> Mask:
        return raise_mask(self.mask_flags, self.mask_ints, self.mask_tensors)

    def chosen(self, piece: Piece) -> str:
        """The backend that runs the call; what cannot run was refused before, unless compiled."""
        is_settled = self.backend.startswith("tiled")
        return self.backend if is_settled else choose("attention", self.backend, piece)

    def piece(self, q: Tensor, k: Tensor, v: Tensor) -> Piece:
        """The call put together again, with what its index tensors hold checked."""
        piece = Piece(q, k, v, self.mask, self.positions(q, k), self.terms)
        check_contents(self, piece)
        return piece

    def positions(self, q: Tensor, k: Tensor) -> Positions:
        starts = self.start_tensors or self.starts or (None, None)
        longest = [x if x >= 0 else None for x in self.max_seqlens or (-1, -1)]
        return Positions(
            B=self.cu_seqlens_q.shape[0] - 1 if self.cu_seqlens_q is not None else q.shape[0],
            H=q.shape[-2],
            M=q.shape[-3],
            N=k.shape[-3],
            cu_seqlens_q=self.cu_seqlens_q,
            # Self-attention: one packing serves queries and keys.
            cu_seqlens_k=self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k,
            seqused_q=self.seqused_q,
            seqused_k=self.seqused_k,
            q_start=starts[0],
            k_start=starts[1],
            max_seqlen_q=longest[0],
            max_seqlen_k=longest[1],
        )


def _lse_shape(q: Tensor) -> tuple[int, ...]:
    """`[B, H, M]`, packed `[H, T]`."""
    return (*q.shape[:-3], q.shape[-2], q.shape[-3])


# ---------------------------------------------------------------- dispatch to a backend


_LISTS = ("max_seqlens", "starts", "start_tensors", "mask_flags", "mask_ints", "mask_tensors")


def _read(values: tuple[Any, ...]) -> Arguments:
    """AOTInductor hands over None for an empty list (torch 2.13)."""
    arguments = Arguments(*values)
    missing: dict[str, Any] = {n: [] for n in _LISTS if getattr(arguments, n) is None}
    return arguments._replace(**missing) if missing else arguments


def _attention_fwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out, lse, _ = _forward(q, k, v, _read(rest[:-1]), rest[-1], is_split=False)
    return out, lse


def _attention_fwd_split(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, lse, remainder = _forward(q, k, v, _read(rest), q.dtype, is_split=True)
    assert remainder is not None
    return out, lse, remainder


def _forward(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, out_dtype: torch.dtype, *, is_split: bool
) -> Result:
    piece = arguments.piece(q, k, v).as_batch()
    match arguments.chosen(piece):
        case "triton" | "hopper" as name:
            from .triton_call import TritonCall

            call = TritonCall(piece)
            if is_split:
                from .ahead import begin_to_compile

                begin_to_compile(name, call, gradients_on_gpu)
            ready = forward_of(name)(call, out_dtype, is_split=is_split)
            result = ready.run(piece.q, piece.k, piece.v)
        case name:
            from . import tiled_forward

            result = tiled_forward.attention_fwd(
                piece, out_dtype, is_split=is_split, hands_over=name == "tiled"
            )
    if q.dim() == 3:
        for x in result:
            if x is not None:
                # In place: autograd refuses changes of a view that was made where it does not
                # record.
                x.squeeze_(0)
    return result


def forward_of(backend: str) -> Any:
    """What makes a forward of kernels ready: `triton_forward.Forward` or its like."""
    if backend == "hopper":
        from . import hopper_call

        return hopper_call.Forward
    from .triton_forward import Forward

    return Forward


def _attention_bwd(
    dout: Tensor, dlse: Tensor | None, out: Tensor, remainder: Tensor | None, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    arguments, wanted = _read(rest[:-1]), rest[-1]
    piece = arguments.piece(q, k, v).as_batch()
    upstream, result = (dout, dlse), Result(out, lse, remainder)
    if q.dim() == 3:
        upstream, result = as_rows(*upstream), Result(*as_rows(*result))
    match arguments.chosen(piece):
        # Hopper's forward leaves just what Triton's does.
        case "triton" | "hopper" as name:
            from .triton_call import TritonCall

            gradients = gradients_on_gpu(name, TritonCall(piece), upstream, result, wanted)
        case name:
            from . import tiled_backward

            gradients = tiled_backward.attention_gradients(
                piece, upstream, result, wanted, hands_over=name == "tiled"
            )
    if q.dim() == 4:
        return tuple(gradients)
    return (*(x.squeeze(0) for x in gradients[:3]), *gradients[3:])


def as_rows(*packed: Tensor | None) -> Any:
    """Packed tensors as those of one batch row; None stays."""
    return tuple(None if x is None else x.unsqueeze(0) for x in packed)


def gradients_on_gpu(
    backend: str,
    call: TritonCall,
    upstream: tuple[Tensor, Tensor | None],
    result: Result,
    wanted: list[bool],
) -> list[Tensor]:
    """See `triton_backward.attention_gradients`."""
    from ..kernels.launch import finish_ahead

    if not call.is_rehearsal:
        finish_ahead()
    if backend == "hopper" and not why_not_hopper_backward(call.piece, wanted):
        from . import hopper_backward_call

        return hopper_backward_call.attention_gradients(call, upstream, result, wanted)
    from .triton_backward import attention_gradients

    return attention_gradients(call, upstream, result, wanted)


def _attention_bwd_into(
    dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> None:  # fmt: skip
    arguments = _read(rest)
    piece = arguments.piece(q, k, v).as_batch()
    if q.dim() == 3:
        dout, lse, delta = (x.unsqueeze(0) for x in (dout, lse, delta))
        dq, dk, dv = (x.unsqueeze(0) for x in (dq, dk, dv))
    match arguments.chosen(piece):
        case "hopper" if not why_not_hopper_backward(piece, ()):
            from . import hopper_backward_call

            hopper_backward_call.attention_bwd(piece, dout, lse, delta, (dq, dk, dv))
        case "triton" | "hopper":
            from . import triton_backward

            triton_backward.attention_bwd(piece, dout, lse, delta, (dq, dk, dv))
        case _:
            from . import tiled_backward

            tiled_backward.attention_bwd(
                piece, dout, lse, delta, tiled_backward.Gradients(dq, dk, dv)
            )


def check_contents(arguments: Arguments, piece: Piece) -> None:
    """Check what index tensors hold: always on the CPU, elsewhere if TILEWISE_CHECK=1 (syncs)."""
    positions = piece.positions
    tensors = [*positions.lengths, *arguments.mask_tensors]
    forced = os.environ.get("TILEWISE_CHECK") == "1"
    if not forced and any(t.device.type != "cpu" for t in tensors):
        return
    piece.mask.check_contents(positions.B, positions.H)
    limits = arguments.max_seqlens or [-1, -1]
    for name, start in zip(("q_start", "k_start"), arguments.start_tensors, strict=False):
        if bool((start < 0).any()):
            raise ValueError(f"attention: {name} must not be negative, got {start.tolist()[:8]}.")
    for side, stored, used, limit, total in (
        ("q", positions.cu_seqlens_q, positions.seqused_q, limits[0], positions.M),
        ("k", positions.cu_seqlens_k, positions.seqused_k, limits[1], positions.N),
    ):
        longest = None
        if stored is not None:
            check_cu_seqlens("attention_varlen", f"cu_seqlens_{side}", stored, total)
            longest = stored.diff()
        if used is not None:
            _check_used(f"seqused_{side}", used, longest if longest is not None else total)
            longest = used
        if limit >= 0 and longest is not None and longest.numel() and int(longest.max()) > limit:
            raise ValueError(
                f"attention_varlen: max_seqlen_{side} is {limit}, but a sequence has "
                f"{int(longest.max())} tokens."
            )

    _check_packed_bias(arguments, positions)


def _check_packed_bias(arguments: Arguments, positions: Positions) -> None:
    """A bias in document coordinates must reach as far as the longest document."""
    bias = arguments.bias
    if bias is None or positions.cu_seqlens_q is None or positions.cu_seqlens_k is None:
        return
    for dim, stored, used in (
        (2, positions.cu_seqlens_q, positions.seqused_q),
        (3, positions.cu_seqlens_k, positions.seqused_k),
    ):
        lengths = stored.diff() if used is None else used
        longest = int(lengths.max()) if lengths.numel() else 0
        if 1 < bias.shape[dim] < longest or bias.shape[dim] == 0 < longest:
            raise ValueError(
                f"attention_varlen: bias must reach the longest document, {longest} entries in "
                f"dimension {dim - 4}, got {list(bias.shape)}."
            )


def _check_used(name: str, used: Tensor, stored: Tensor | int) -> None:
    if bool((used < 0).any()) or bool((used > stored).any()):
        raise ValueError(
            f"attention_varlen: {name} must lie between 0 and what each sequence stores, got "
            f"{used.tolist()[:8]}{'...' if used.numel() > 8 else ''}."
        )


# ---------------------------------------------------------------- fake kernels


def _attention_fwd_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=rest[-1])
    return out, q.new_empty(_lse_shape(q), dtype=accumulator_of(q.dtype))


def _attention_fwd_split_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    out, lse = _attention_fwd_fake(q, k, v, *rest, q.dtype)
    return out, lse, new_remainder(out)


def _attention_bwd_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, remainder: Tensor | None, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    arguments, wanted = Arguments(*rest[:-1]), rest[-1]
    extras = (arguments.bias, arguments.alibi_slopes, arguments.sinks)
    gradients = [x.new_empty(x.shape) for x in (q, k, v)]
    gradients += [
        x.new_empty(x.shape) if x is not None and want else lse.new_empty(0)
        for x, want in zip(extras, wanted, strict=True)
    ]
    return tuple(gradients)


def _attention_bwd_into_fake(*arguments: Any) -> None:
    return None


for _name, _implementation, _fake in (
    ("attention_fwd", _attention_fwd, _attention_fwd_fake),
    ("attention_fwd_split", _attention_fwd_split, _attention_fwd_split_fake),
    ("attention_bwd", _attention_bwd, _attention_bwd_fake),
    ("attention_bwd_into", _attention_bwd_into, _attention_bwd_into_fake),
):
    # An exported module calls the op itself, with parameters that want gradients it has none for.
    library.impl(_name, torch.no_grad()(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=library)


# ---------------------------------------------------------------- autograd


# What has no gradient in any case: the last arguments.
_NONE = (None,) * 3


def is_kept_in_two(dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether O is kept for the backward as what the caller gets and what rounding took off it;
    otherwise as it was summed.

    dtype: of q. delta = rowsum(dO * O) of an O in 16 bits alone is off by the same for all keys of
    a row. Where keys have a mean that does not average out of dQ; it is all there is in the
    gradient of a sink, and cancels in that of a bias. All of them would be over the error budget.
    """
    return out_dtype == dtype and dtype in (torch.bfloat16, torch.float16)


def form_to_keep(dtype: torch.dtype, out_dtype: torch.dtype) -> tuple[torch.dtype, bool]:
    """The dtype in which O is kept for the backward, and whether in two parts. dtype: of q.
    out_dtype: of what the caller gets."""
    is_split = is_kept_in_two(dtype, out_dtype)
    return (out_dtype if is_split else accumulator_of(dtype)), is_split


def forward_to_keep(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, out_dtype: torch.dtype
) -> Result:
    """The op of a call that learns: O as `form_to_keep` says."""
    stored, is_split = form_to_keep(q.dtype, out_dtype)
    if is_split:
        return Result(*torch.ops.tilewise.attention_fwd_split(q, k, v, *arguments))
    return Result(*torch.ops.tilewise.attention_fwd(q, k, v, *arguments, stored))


class Attention(torch.autograd.Function):
    """`(out, lse)` with gradients for q, k, v, bias, slopes, sinks, through out and lse.

    rest: what follows sinks in `Arguments`. Calls like one before take `warm_autograd.py`, which
    saves the same tensors in the same order.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, rest: Any, out_dtype: torch.dtype, lse_has_grad: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.lse_has_grad = lse_has_grad
        ctx.set_materialize_grads(False)
        wanted = [ctx.needs_input_grad[i] for i in (3, 4, 5)]
        arguments = Arguments(bias, slopes, sinks, *rest)
        out, lse, remainder = forward_to_keep(q, k, v, arguments, out_dtype)
        ctx.save_for_backward(
            q, k, v, out, remainder, lse, bias, slopes, sinks, *arguments[3:8],
            *arguments.start_tensors, *arguments.mask_tensors,
        )  # fmt: skip
        ctx.n_starts = len(arguments.start_tensors)
        ctx.plain = (arguments.max_seqlens, arguments.starts)
        ctx.mask = (arguments.mask_flags, arguments.mask_ints)
        ctx.scalars = arguments[14:]
        ctx.wanted = wanted
        if not lse_has_grad:
            ctx.mark_non_differentiable(lse)
        # torch 2.11's dynamo loses the gradient through a conversion that converts nothing.
        return (out if out.dtype == out_dtype else out.to(out_dtype)), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        q, k, v, out, remainder, lse, bias, slopes, sinks = saved[:9]
        if dout is None:
            dout = torch.zeros_like(out)
        dlse = dlse if ctx.lse_has_grad else None
        tail = list(saved[14:])
        with torch.no_grad():
            gradients = torch.ops.tilewise.attention_bwd(
                dout, dlse, out, remainder, lse, q, k, v, bias, slopes, sinks, *saved[9:14],
                *ctx.plain, tail[: ctx.n_starts], *ctx.mask, tail[ctx.n_starts :],
                *ctx.scalars, ctx.wanted,
            )  # fmt: skip
        inputs = (dout, dlse, q, k, v, bias, slopes, sinks)
        gradients = mark_first_derivatives("attention", inputs, gradients)
        wanted = (True, True, True, *ctx.wanted)
        kept = [g if want else None for g, want in zip(gradients, wanted, strict=True)]
        return (*kept, *_NONE)
