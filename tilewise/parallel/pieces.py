"""What every schedule is made of: calls of the core, their sum, and their gradients.

Forward partials are merged in fp32 (fp64 for fp64 inputs); backward pieces add into fp32 buffers.
Nothing is rounded to the inputs' dtype before the end, so the error does not grow with the ranks.

Math: the pieces of one row share its softmax. With the lse and out of all keys,
    delta = rowsum(dO * O) - dLSE,  P = exp(S - lse),  dS = P (dO v^T - delta)
    of each piece add up to the whole's; a sink is one more logit, whose gradient is
    -sum exp(sink - lse) delta.
Source: FlashAttention-2 (arXiv 2307.08691), Ring Attention (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.partials import Partial, merge_into
from ..core.shapes import accumulator_of
from ..dense import tiled_backward
from ..dense.checks import check_call
from ..dense.choice import choose_for_pieces
from ..dense.ops import Arguments, Attention
from .numbered import Numbering
from .plan import Call

OP = "context_parallel_attention"


class Extras(NamedTuple):
    """Tensors that are on every rank: bias rows of the rank's queries, slopes, sinks."""

    bias: Tensor | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None


@dataclass(frozen=True)
class Terms:
    """What a score is made of besides tensors.

    rng: seed and offset, alike on every rank. numbering: where dropout counts heads that are a
    share of the whole's.
    """

    scale: float
    softcap: float | None
    dropout_p: float
    rng: Tensor | None
    backend: str
    numbering: Numbering | None = None
    is_deterministic: bool = False

    @property
    def has_kernels(self) -> bool:
        """Whether rows are merged by kernels, as pieces are computed."""
        return not self.backend.startswith("tiled")


class Schedule(Protocol):
    """How keys and values reach the queries of this rank, and gradients their owners."""

    @property
    def terms(self) -> Terms: ...

    @property
    def adds_nothing(self) -> bool:
        """Whether one call computes all of a row."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, extras: Extras, dtype: torch.dtype | None
    ) -> Accumulator: ...

    def backward(self, state: Backward) -> None: ...


def arguments_of(
    q: Tensor, k: Tensor, v: Tensor, call: Call, extras: Extras, terms: Terms
) -> Arguments:
    """The op's arguments of one call; q, k and v are its slices."""
    named: dict[str, Any] = {
        "scale": terms.scale,
        "softcap": terms.softcap,
        "alibi_slopes": extras.slopes,
        "bias": extras.bias,
        "sinks": None,
        "dropout_p": terms.dropout_p,
        "is_deterministic": terms.is_deterministic,
    }
    placement: dict[str, Any] = {}
    if call.q_start is not None:
        placement = {"q_start": call.q_start, "k_start": call.k_start}
    if call.edges is not None:
        placement = {"cu_seqlens_q": call.edges[0], "cu_seqlens_k": call.edges[1]}
    numbering = terms.numbering
    if numbering is not None:
        slopes = extras.slopes
        named["bias"] = numbering.expand(extras.bias)
        named["alibi_slopes"] = (
            slopes if slopes is None or slopes.dim() == 1 else numbering.expand(slopes)
        )
        for side, x in (("q", q), ("k", k)):
            length = x.shape[0] // numbering.B
            placement[f"cu_seqlens_{side}"] = numbering.cu_seqlens(length, x.device)
        call = numbering.mask_of(call)
    found = check_call(OP, q, k, v, call.mask, named, placement)
    return found._replace(rng=terms.rng, backend=terms.backend)


def backend_of_pieces(op: str, backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """What pieces of these tensors name as their backend.

    Raises: as `choose_for_pieces`.
    """
    name = choose_for_pieces(op, backend, q, k, v)
    if name == "tiled":
        # Partials are fp32, and of their backward PyTorch's fused op has no part.
        return "tiled(own)"
    # Each piece on the fastest that takes it.
    return "auto" if backend == "auto" and name == "triton" else name


def adds_nothing(calls: Iterable[Call]) -> bool:
    """Whether no row is in two of the calls."""
    rows = sorted((call.q0, call.q1) for call in calls)
    return all(a[1] <= b[0] for a, b in pairwise(rows))


def slice_bias(bias: Tensor | None, call: Call) -> Tensor | None:
    """The part of a bias `[B|1, H|1, local M|1, S|1]` that one call reads."""
    if bias is None:
        return None
    if bias.shape[2] > 1:
        bias = bias[:, :, call.q0 : call.q1]
    if bias.shape[3] > 1:
        first = call.k_start or 0
        bias = bias[..., first : first + call.k1 - call.k0]
    return bias


def slice_heads(extras: Extras, heads: slice) -> Extras:
    """The parts of bias and slopes that belong to some query heads."""
    bias, slopes = extras.bias, extras.slopes
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, heads]
    return Extras(bias, None if slopes is None else slopes[..., heads], extras.sinks)


class Accumulator:
    """The running partial of all rows of this rank: out `[B, M, H, E]`, lse `[B, H, M]`.

    dtype: of out, where every row has one call and so nothing is added up; fp32 when None.
    place: where it has to be, a part of another's.
    """

    def __init__(
        self, q: Tensor, E: int, dtype: torch.dtype | None = None, place: Partial | None = None
    ) -> None:
        self._q, self._E, self._partial = q, E, place
        self._dtype = accumulator_of(q.dtype) if dtype is None else dtype
        # Rows that nothing was added to need no merge.
        self._added: list[tuple[int, int]] = []
        # The last partial of rows that had one, which `finish` may merge and round at once.
        self._waiting: tuple[slice, Partial, Terms] | None = None

    @property
    def partial(self) -> Partial:
        """What was added so far; nothing is visible where nothing was."""
        if self._partial is None:
            q, wide = self._q, accumulator_of(self._q.dtype)
            B, M, H = q.shape[:3]
            out = torch.zeros(B, M, H, self._E, dtype=self._dtype, device=q.device)
            lse = torch.full((B, H, M), float("-inf"), dtype=wide, device=q.device)
            self._partial = Partial(out, lse)
        return self._partial

    def of_heads(self, heads: slice) -> Accumulator:
        """A view of some query heads, to which nothing was added yet."""
        out, lse = self.partial
        place = Partial(out[:, :, heads], lse[:, heads])
        return Accumulator(self._q[:, :, heads], self._E, self._dtype, place)

    def add(
        self, q: Tensor, k: Tensor, v: Tensor, calls: Iterable[Call], extras: Extras, terms: Terms
    ) -> None:
        """Merge the partials of some calls into their rows."""
        for call in calls:
            part = run_call(q, k, v, call, extras, terms, self._dtype)
            is_new = all(call.q1 <= q0 or q1 <= call.q0 for q0, q1 in self._added)
            self._added.append((call.q0, call.q1))
            if self._partial is None and (call.q0, call.q1) == (0, q.shape[1]):
                self._partial = part
                continue
            rows = slice(call.q0, call.q1)
            if is_new:
                target = self._of_rows(rows)
                target.out.copy_(part.out)
                target.lse.copy_(part.lse)
            else:
                self.settle()
                self._waiting = (rows, part, terms)

    def _of_rows(self, rows: slice) -> Partial:
        return Partial(self.partial.out[:, rows], self.partial.lse[..., rows])

    def settle(self, final: Tensor | None = None, *, keeps: bool = True) -> None:
        """Merge what waits; into `final` in its dtype too, and without `keeps` nowhere else.

        The last call of a part of another's.
        """
        if self._waiting is not None:
            rows, part, terms = self._waiting
            self._waiting = None
            merge_part(self._of_rows(rows), part, terms, final, keeps=keeps)

    def finish(self, sinks: Tensor | None) -> Partial:
        self.settle()
        whole = self.partial
        if sinks is not None:
            logits = sinks.to(whole.lse.dtype).reshape(1, -1, 1).expand_as(whole.lse)
            merge_into(whole, Partial(torch.zeros_like(whole.out), logits))
        return whole

    def finish_as(
        self, sinks: Tensor | None, dtype: torch.dtype, *, keeps: bool
    ) -> tuple[Tensor, Partial]:
        """out in a dtype, and the partial.

        keeps: whether the partial's out is needed.
        """
        if self._waiting is None or sinks is not None or dtype == self._dtype:
            whole = self.finish(sinks)
            return whole.out.to(dtype), whole
        rows, out = self._waiting[0], self.partial.out
        rounded = torch.empty(out.shape, dtype=dtype, device=out.device)
        for others in (slice(0, rows.start), slice(rows.stop, out.shape[1])):
            rounded[:, others] = out[:, others]
        self.settle(rounded[:, rows], keeps=keeps)
        return rounded, self.partial


def merge_part(
    total: Partial, part: Partial, terms: Terms, final: Tensor | None = None, *, keeps: bool = True
) -> None:
    """`merge_into`, and then out to `final` in its dtype, where there is one.

    keeps: False where total's out is not needed then.
    """
    if terms.has_kernels:
        from .triton_rows import merge_rows

        merge_rows(total, part, final, keeps=keeps)
        return
    merge_into(total, part)
    if final is not None:
        final.copy_(total.out)


def run_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    extras: Extras,
    terms: Terms,
    dtype: torch.dtype | None = None,
) -> Partial:
    """The partial of one call, of the rows and keys that it names; out in fp32 where no dtype."""
    q = q[:, call.q0 : call.q1]
    k, v = k[:, call.k0 : call.k1], v[:, call.k0 : call.k1]
    extras, numbering = extras._replace(bias=slice_bias(extras.bias, call)), terms.numbering
    if call.edges is not None:
        q, k, v = (x.squeeze(0) for x in (q, k, v))
    if numbering is not None:
        q, k, v = (numbering.pack(x) for x in (q, k, v))
    arguments = arguments_of(q, k, v, call, extras, terms)
    dtype = accumulator_of(q.dtype) if dtype is None else dtype
    out, lse = torch.ops.tilewise.attention_fwd(q, k, v, *arguments, dtype)
    if call.edges is not None:
        out, lse = out.unsqueeze(0), lse.unsqueeze(0)
    if numbering is not None:
        out, lse = numbering.unpack(out), numbering.unpack_rows(lse)
    return Partial(out, lse)


@dataclass
class Backward:
    """The state of a backward pass: what the rank has, and buffers that pieces add into.

    dq `[B, M, H, D]`; dk, dv: of the rank's own keys; dbias, dslopes: None where not wanted. All in
    fp32 (fp64 for fp64 inputs).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    extras: Extras
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dslopes: Tensor | None

    def of_heads(self, heads: slice, dk: Tensor, dv: Tensor) -> Backward:
        """A view of some query heads, with buffers of its own for their keys."""
        q, dq, dout = (x[:, :, heads] for x in (self.q, self.dq, self.dout))
        lse, delta = self.lse[:, heads], self.delta[:, heads]
        extras = slice_heads(self.extras, heads)
        dextras = slice_heads(Extras(self.dbias, self.dslopes), heads)
        return Backward(
            q, dk, dv, extras, dout, lse, delta, dq, dk, dv, dextras.bias, dextras.slopes
        )

    def add(
        self, k: Tensor, v: Tensor, into: tuple[Tensor, Tensor], calls: Iterable[Call], terms: Terms
    ) -> None:
        """Add the gradients of some calls against keys `k`, `v` into dq and `into` = (dk, dv)."""
        for call in calls:
            rows, keys = slice(call.q0, call.q1), slice(call.k0, call.k1)
            extras = self.extras._replace(bias=slice_bias(self.extras.bias, call), sinks=None)
            tensors = [self.dout[:, rows], self.q[:, rows], k[:, keys], v[:, keys]]
            statistics = [self.lse[..., rows], self.delta[..., rows]]
            buffers = [self.dq[:, rows], into[0][:, keys], into[1][:, keys]]
            numbering = terms.numbering
            if call.edges is not None:
                tensors, statistics, buffers = (
                    [x.squeeze(0) for x in part] for part in (tensors, statistics, buffers)
                )
            if numbering is not None:
                tensors = [numbering.pack(x) for x in tensors]
                statistics = [numbering.pack_rows(x) for x in statistics]
                targets = buffers
                buffers = [torch.zeros_like(numbering.pack(x)) for x in targets]
            dout, *qkv = tensors
            q, k_part, v_part = qkv
            arguments = arguments_of(q, k_part, v_part, call, extras, terms)
            torch.ops.tilewise.attention_bwd_into(*buffers, dout, *statistics, *qkv, *arguments)
            if numbering is not None:
                for target, buffer in zip(targets, buffers, strict=True):
                    target.add_(numbering.unpack(buffer))
            if self.dbias is not None or self.dslopes is not None:
                self._add_extras(call, (*qkv, dout, *statistics), arguments, numbering)

    def _add_extras(
        self,
        call: Call,
        piece: tuple[Tensor, ...],
        arguments: Arguments,
        numbering: Numbering | None,
    ) -> None:
        """Gradients of bias and slopes: the piece's own, which its forward run again gives.

        With share = exp(lse_piece - lse), the merge hands a piece dO share and
        share (rowsum(dO * O_piece) - delta) for its lse.
        """
        q, k, v, dout, lse, delta = piece
        bias, slopes = (
            x.detach().requires_grad_() if x is not None and target is not None else x
            for x, target in ((arguments.bias, self.dbias), (arguments.alibi_slopes, self.dslopes))
        )
        wide = lse.dtype
        with torch.enable_grad():
            run: Any = Attention.apply
            out, own = run(q, k, v, bias, slopes, None, arguments[3:], wide, True)
        with torch.no_grad():
            share = torch.where(own.isneginf(), 0.0, torch.exp(own - lse))
            weighed = dout.to(wide) * share.transpose(-1, -2).unsqueeze(-1)
            dlse = (weighed * out).sum(-1).transpose(-1, -2) - share * delta
        leaves = [x for x in (bias, slopes) if x is not None and x.requires_grad]
        found = torch.autograd.grad((out, own), leaves, (weighed, dlse))
        targets = [x for x in (slice_bias(self.dbias, call), self.dslopes) if x is not None]
        for target, grad in zip(targets, found, strict=True):
            target.add_(grad if numbering is None else numbering.own(grad, target))


def deltas_of(out: Tensor, dout: Tensor, dlse: Tensor | None, terms: Terms) -> Tensor:
    """rowsum(dO * O) - dLSE of each row, `[B, H, M]`."""
    if terms.has_kernels:
        from .triton_rows import row_deltas

        return row_deltas(out, dout, dlse)
    return tiled_backward.row_deltas(out.to(accumulator_of(out.dtype)), dout, dlse).contiguous()


class Attend(torch.autograd.Function):
    """`(out, lse)` of a schedule, with gradients through both.

    Those of bias, slopes and sinks, which are on every rank, are this rank's share: like any
    parameter's, they are summed over ranks by whoever owns them.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, schedule: Schedule, out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        extras = Extras(bias, slopes, sinks)
        keeps = any(ctx.needs_input_grad)
        # Parts that are added up are wide, and so is what delta comes of, as in the dense forward.
        is_settled = schedule.adds_nothing and sinks is None and not keeps
        dtype = out_dtype if is_settled and out_dtype == q.dtype else None
        total = schedule.forward(q, k, v, extras, dtype)
        rounded, (out, lse) = total.finish_as(sinks, out_dtype, keeps=keeps)
        ctx.schedule = schedule
        if out is rounded and dtype is None:
            # What is saved must stay as it is.
            rounded = out.clone()
        ctx.save_for_backward(q, k, v, out, lse, bias, slopes, sinks)
        ctx.set_materialize_grads(False)
        return rounded, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, bias, slopes, sinks = ctx.saved_tensors
        wide = lse.dtype
        if dout is None:
            dout = torch.zeros_like(out, dtype=q.dtype)
        delta = deltas_of(out, dout, dlse, ctx.schedule.terms)
        wanted = [
            x if x is not None and want else None
            for x, want in zip((bias, slopes), ctx.needs_input_grad[3:5], strict=True)
        ]
        sums: list[Any] = [
            None if x is None else torch.zeros(x.shape, dtype=wide, device=x.device)
            for x in (q, k, v, *wanted)
        ]
        extras = Extras(bias, slopes, sinks)
        state = Backward(q, k, v, extras, dout, lse, delta, *sums)
        ctx.schedule.backward(state)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:
            logits = sinks.to(wide).reshape(1, -1, 1)
            dsinks = -torch.where(lse.isneginf(), 0.0, torch.exp(logits - lse) * delta).sum((0, 2))
        results = (state.dq, state.dk, state.dv, state.dbias, state.dslopes, dsinks)
        return *(
            None if grad is None else grad.to(x.dtype)
            for grad, x in zip(results, (q, k, v, bias, slopes, sinks), strict=True)
        ), None, None  # fmt: skip
