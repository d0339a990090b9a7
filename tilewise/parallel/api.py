"""Public functions of context parallelism: prepare, run a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.autocast import under_autocast
from ..core.mask import Mask
from ..core.mask_leaves import full
from ..core.partials import Partial
from ..core.philox import draw_rng
from ..core.shapes import accumulator_of
from .all_gather import AllGather
from .choice import ScheduleChoice
from .layout import Layout
from .pieces import Attend, Schedule, Terms
from .prepare import Given, Prepared, Where, check, choose, links_of, prepare, scalars_of
from .ring import Ring
from .ulysses import ToHeads, ToTokens, kv_heads_of, share_of

_FULL = full()


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mesh: Any = None,
    group: Any = None,
    schedule: str = "auto",
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Attention over a sequence whose tokens are dealt to ranks: what `attention` gives for it.

    Every rank calls this with its own tokens and gets its own rows of the result; nothing is
    approximate, and gradients of q, k and v are exact on the rank that owns them.

    Args:
        q: `[B, own tokens, H, D]`, those of `layout` in ascending order; k, v: as for `attention`,
            of the same tokens.
        layout: which tokens each rank holds, from `tilewise.parallel`; of as many ranks as the
            mesh or group has.
        mesh: a DeviceMesh of one dim, or of two for "usp": the outer one rings, the inner one
            trades heads; rank `outer * size + inner` of the layout. group: a process group, in
            place of a mesh; the default group where neither is given.
        schedule: "ring", "all_gather", "ulysses", "usp" or "auto"; `explain_schedule` says why.
        mask, scale, softcap, alibi_slopes, sinks, dropout_p, backend: as for `attention`, alike on
            every rank, in positions of the whole sequence. A mask on the host, kept for as long as
            it serves, is planned once and never waited for.
        bias: broadcasts to `[B, H, own tokens, S]`: rows of this rank's queries, all keys.
        deterministic: as for `attention`.
    Returns: `[B, own tokens, H, E]` in q's dtype.
    Gradients of slopes, sinks and bias are this rank's share; their sum over ranks is the whole,
        as for any parameter that is on every rank (FSDP and DDP reduce them).
    Raises: ValueError and NotImplementedError as `attention`, and where the ranks do not agree, on
        every rank. A rank that does not call at all is met by the process group's time-out.
    Cost: the flops of `attention` over all ranks; bytes and memory on each schedule's page.
    Deterministic: as `attention`; messages and sums have one order anyway.
    Source: Ring Attention (arXiv 2310.01889), DeepSpeed Ulysses (arXiv 2309.14509), Llama 3 (arXiv
        2407.21783), USP (arXiv 2405.07719).
    """
    tensors = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    scalars = scalars_of(scale, softcap, dropout_p, deterministic)
    where = Where(mesh, group, layout, schedule, mask, backend)
    return _attend(q, k, v, where, scalars, tensors, None, is_partial=False).out


def context_parallel_attention_partial(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mesh: Any = None,
    group: Any = None,
    schedule: str = "auto",
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
) -> Partial:
    """`context_parallel_attention` with the LSE of its rows: `Partial(out, lse)`.

    out `[B, own tokens, H, E]` in out_dtype (q's when None), lse `[B, H, own tokens]`; both are
    differentiable.
    Args, Raises, Cost, Deterministic, Source: as `context_parallel_attention`.
    """
    tensors = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    scalars = scalars_of(scale, softcap, dropout_p, deterministic)
    where = Where(mesh, group, layout, schedule, mask, backend)
    return _attend(q, k, v, where, scalars, tensors, out_dtype, is_partial=True)


def context_parallel_prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mesh: Any = None,
    group: Any = None,
    schedule: str = "auto",
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> None:
    """Check, agree and plan ahead, so that calls like this one only compute.

    Once a batch, before the model runs: the first call with a new mask or layout does this
    otherwise, on the host, in the middle of the forward pass.

    Args: those of the calls to come; of tensors only their form matters.
    Raises: as `context_parallel_attention`.
    """
    tensors = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    scalars = scalars_of(scale, softcap, dropout_p, deterministic)
    where = Where(mesh, group, layout, schedule, mask, backend)
    q, k, v = under_autocast(q, k, v)
    prepare(Given(q, k, v, where, links_of(mesh, group), scalars, tensors))


def explain_schedule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mesh: Any = None,
    group: Any = None,
    schedule: str = "auto",
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    backend: str = "auto",
) -> ScheduleChoice:
    """Which schedule a call of `context_parallel_attention` runs on, why, and why not others.

    Sends nothing.

    Args: those of the call; of tensors only their form matters, and whether q, k or v learns: then
        bytes and times are of the forward and the backward pass.
    Returns: the schedule, the reasons, and what each schedule would receive; as text by `str`.
    Raises: as `context_parallel_attention` for what this rank can tell by itself.
    """
    tensors = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks}
    scalars = scalars_of(scale, softcap, dropout_p, deterministic)
    where = Where(mesh, group, layout, schedule, mask, backend)
    q, k, v = under_autocast(q, k, v)
    given = Given(q, k, v, where, links_of(mesh, group), scalars, tensors)
    check(given)
    return choose(given)


@torch.compiler.disable
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    where: Where,
    scalars: dict[str, Any],
    tensors: dict[str, Tensor | None],
    out_dtype: torch.dtype | None,
    *,
    is_partial: bool,
) -> Partial:
    links = links_of(where.mesh, where.group)
    q, k, v = under_autocast(q, k, v)
    given = Given(q, k, v, where, links, scalars, tensors, out_dtype)
    prepared = prepare(given)
    terms = Terms(
        scale=q.shape[-1] ** -0.5 if scalars["scale"] is None else float(scalars["scale"]),
        softcap=scalars["softcap"],
        dropout_p=scalars["dropout_p"],
        rng=_draw(given) if scalars["dropout_p"] > 0.0 else None,
        backend=prepared.backend,
        is_deterministic=bool(scalars["is_deterministic"]),
        numbering=prepared.numbering,
    )
    bias = tensors["bias"]
    if bias is not None:
        tensors = {**tensors, "bias": bias.reshape((1,) * (4 - bias.dim()) + bias.shape)}
    out_dtype = q.dtype if out_dtype is None else out_dtype
    run = Run(prepared, terms, out_dtype)
    if prepared.swap is None:
        return run.local(q, k, v, tensors)
    return run.swapped(q, k, v, tensors, is_partial=is_partial)


def _draw(given: Given) -> Tensor:
    """Rank 0's draw, on every rank; each draws, so that the generators stay alike."""
    rng = draw_rng(given.q.device)
    for link in given.links:
        link.broadcast(rng)
    return rng


@dataclass(frozen=True)
class Run:
    """One call, prepared."""

    prepared: Prepared
    terms: Terms
    out_dtype: torch.dtype

    @property
    def schedule(self) -> Schedule:
        ready, terms = self.prepared, self.terms
        if ready.schedule == "all_gather":
            return AllGather(ready.ring_link, ready.plan, ready.ring_layout, terms, ready.is_split)
        return Ring(ready.ring_link, ready.plan, ready.ring_layout.lengths, terms)

    def local(self, q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor | None]) -> Partial:
        """Attention of heads that are all here."""
        attend: Any = Attend.apply
        extras = (tensors["bias"], tensors["alibi_slopes"], tensors["sinks"])
        return Partial(*attend(q, k, v, *extras, self.schedule, self.out_dtype))

    def swapped(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: dict[str, Tensor | None],
        *,
        is_partial: bool,
    ) -> Partial:
        """Heads for tokens, attention, tokens for heads."""
        swap = self.prepared.swap
        assert swap is not None
        H, group, ranks = q.shape[2], q.shape[2] // k.shape[2], swap.link.ranks
        shares = [share_of(H, rank, ranks) for rank in range(ranks)]
        q_heads = [list(share) for share in shares]
        kv_heads = [kv_heads_of(share, group) for share in shares]
        to_tokens: Any = ToTokens.apply
        to_heads: Any = ToHeads.apply
        q_all, k_all, v_all = to_tokens(swap, [q_heads, kv_heads, kv_heads], q, k, v)
        own = slice(shares[swap.link.rank].start, shares[swap.link.rank].stop)
        if q_all.shape[2]:
            out, lse = self.local(q_all, k_all, v_all, _of_heads(tensors, own))
        else:
            # A rank without heads still trades, backward too, and its parameters' gradients are 0.
            out = q_all[..., :1].expand(*q_all.shape[:3], v.shape[3]).to(self.out_dtype)
            for x in tensors.values():
                out = out if x is None else out + x[:0].sum().to(self.out_dtype)
            lse = q_all[..., 0].transpose(1, 2).to(accumulator_of(q.dtype))
        (out,) = to_heads(swap, [q_heads], [H], out)
        if is_partial:
            (rows,) = to_heads(swap, [q_heads], [H], lse.transpose(1, 2).unsqueeze(-1))
            lse = rows.squeeze(-1).transpose(1, 2)
        return Partial(out, lse)


def _of_heads(tensors: dict[str, Tensor | None], own: slice) -> dict[str, Tensor | None]:
    bias, slopes, sinks = (tensors[name] for name in ("bias", "alibi_slopes", "sinks"))
    return {
        "bias": bias[:, own] if bias is not None and bias.shape[1] > 1 else bias,
        "alibi_slopes": None if slopes is None else slopes[..., own],
        "sinks": None if sinks is None else sinks[own],
    }
