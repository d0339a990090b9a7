"""Decoding over a cache whose tokens are dealt to ranks: partials merged by their LSE.

Every rank has the queries, attends to the keys it holds, and sends its partial to all others; each
merges them in the order of the ranks, so all get the same bits.

Dims: B batch, M new tokens, H query heads, R ranks, E value dim.
Cost: bytes received per rank (R - 1) B M H (E + 1) 4, whatever the length of the cache.
Source: Tree Attention (arXiv 2408.04093).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Index, Mask
from ..core.mask_bits import Bits, Function, blocks
from ..core.mask_leaves import (
    BatchShiftedWindow,
    Intervals,
    ShiftedWindow,
    Tree,
    full,
    key_padding,
)
from ..core.partials import Partial, merge
from ..core.shapes import accumulator_of
from ..dense.api import attention_partial
from ..dense.checks import check_are_tensors, check_call
from ..dense.choice import choose_for_pieces
from .agree import (
    Memo,
    Signature,
    agree,
    agree_by_digest,
    describe_mask,
    digest_of,
    is_forced,
)
from .comm import Link, flatten, unflatten
from .layout import Layout, check_layout
from .masks import leaves
from .prepare import link_of

OP = "context_parallel_decode"
# Masks that speak of query m as m, not as the position where it stands.
_COUNTING = (BatchShiftedWindow, Bits, Function, Intervals, ShiftedWindow, Tree)
_FULL = full()
_agreed: Memo[bool] = Memo()


@torch.compiler.disable
def context_parallel_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    mesh: Any = None,
    group: Any = None,
    lengths: Tensor | None = None,
    mask: Mask = _FULL,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention of the newest tokens over a cache that is spread over ranks. For inference.

    Args:
        q: `[B, M, H, D]`, alike on every rank: the last M tokens of each sequence.
        k, v: `[B, own slots, G, D]` and `[B, own slots, G, E]`: the cache's slots that `layout`
            gives this rank, in ascending order.
        layout: of the cache's slots; contiguous, or striped by blocks so that a growing cache
            fills all ranks alike.
        mesh, group: as for `context_parallel_attention`; a mesh of one dim.
        lengths: `[B]` integers, how many slots are in use, the new tokens included; 0, or at least
            M. All slots when None. Query m stands at `lengths[b] - M + m`.
        mask, scale, softcap, alibi_slopes, sinks, backend: as for `attention`. A mask that counts
            queries (a window's offset, intervals, blocks, a tree, a predicate) is evaluated for
            each of a rank's slots.
    Returns: `[B, M, H, E]`, the same on every rank.
    Raises: ValueError for what does not fit or differs from rank to rank; NotImplementedError where
        a gradient is asked for, which `context_parallel_attention` gives. The ranks compare shapes,
        dtypes, layout, scalars and lengths: on the CPU at every call; on a GPU, where it would make
        the host wait, at the first one like it and without what lengths holds. TILEWISE_CHECK=1
        compares every call, and the numbers in q and lengths too.
    Cost: bytes received per rank (R - 1) B M H (E + 1) 4, and on the CPU (R - 1) 32 of a digest;
        each rank reads the slots it holds.
    Deterministic: always.
    Source: Tree Attention (arXiv 2408.04093).
    """
    link = link_of(OP, mesh, group)
    call = Call(q, k, v, layout, mask, lengths, scale, softcap, alibi_slopes, sinks, backend)
    _compare(link, call)
    terms: dict[str, Any] = {
        "scale": scale,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "backend": backend,
    }
    own = _attend_own(q, k, v, layout, link, lengths, mask, terms)
    parts = _exchange(own, link)
    if sinks is not None:
        logits = sinks.to(own.lse.dtype).reshape(1, -1, 1).expand_as(own.lse)
        parts.append(Partial(torch.zeros_like(own.out), logits))
    return merge(parts).out.to(q.dtype)


class Call(NamedTuple):
    """The arguments of one rank that have to fit each other and those of the other ranks."""

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    mask: Mask
    lengths: Tensor | None
    scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    backend: str

    @property
    def device(self) -> str:
        """Of the ranks' tensors, as far as this rank has any."""
        return next((x.device.type for x in self if isinstance(x, Tensor)), "cpu")

    @property
    def reads(self) -> bool:
        """Whether the numbers in lengths are looked at: where nothing waits for a GPU."""
        return self.lengths is not None and (self.lengths.device.type == "cpu" or is_forced())


def _compare(link: Link, call: Call) -> None:
    """Raise on every rank unless each one's call is right and they are alike.

    On the CPU at every call, by a digest. On a GPU that would make the host wait for it: there at
    the first of its kind, and at every one under TILEWISE_CHECK=1.
    """
    error: Exception | None = None
    try:
        _check(call, link)
    # Any: the other ranks wait for this one's word.
    except Exception as found:
        error = found
    signature = {} if error is not None else _sign(call)
    if call.device == "cpu":
        agree_by_digest(OP, link, signature, error)
        return

    def at_first() -> bool:
        agree(OP, (link,), signature, error)
        return True

    _agreed.recall((link,), tuple(_form_of(x) for x in call), at_first)
    # Of a call that the ranks agreed on before, in what is not part of its form: not all may ask.
    if error is not None:
        raise error


def _form_of(x: object) -> object:
    """What is compared of an argument, whatever it is, without a look at its numbers."""
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return x.key if isinstance(x, Layout | Mask) else repr(x)


def _check(call: Call, link: Link) -> None:
    """What one rank can say of its own arguments."""
    q, k, v, layout = call[:4]
    check_are_tensors(OP, {"q": q, "k": k, "v": v})
    check_layout(OP, layout, link.ranks)
    own = layout.lengths[link.rank]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[1] != own or v.shape[1] != own:
        raise ValueError(
            f"{OP}: expected q [B, M, H, D], and k and v with the {own} slots of rank "
            f"{link.rank}, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            f"{OP}: has no gradient; call it under torch.no_grad(), or train with "
            "context_parallel_attention."
        )
    terms = {
        "scale": call.scale,
        "softcap": call.softcap,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "bias": None,
        "dropout_p": 0.0,
    }
    check_call(OP, q, k, v, call.mask, terms, {})
    # Whether Hopper's kernels take a call depends on its slots; they are asked when it is made.
    if call.backend != "hopper":
        choose_for_pieces(OP, call.backend, q, k, v)
    if call.alibi_slopes is not None and _counts_queries(call.mask):
        raise NotImplementedError(
            f"{OP}: alibi_slopes beside a mask that counts queries (a window's offset, intervals, "
            "blocks, a tree, a predicate) are not there; use attention_with_cache on one rank."
        )
    _check_lengths(call)


def _check_lengths(call: Call) -> None:
    lengths, (B, M) = call.lengths, call.q.shape[:2]
    if lengths is None:
        return
    if not isinstance(lengths, Tensor):
        raise ValueError(f"{OP}: lengths must be a tensor, got {type(lengths).__name__}.")
    if lengths.shape != (B,) or lengths.is_floating_point() or lengths.dtype == torch.bool:
        raise ValueError(
            f"{OP}: lengths must be [B] = [{B}] integers, got {lengths.dtype} "
            f"{list(lengths.shape)}."
        )
    if call.reads:
        odd = ((lengths < M) & (lengths != 0)) | (lengths > call.layout.size)
        if bool(odd.any()):
            raise ValueError(
                f"{OP}: lengths must be 0 or from M = {M} to {call.layout.size}, "
                f"got {lengths.tolist()[:8]}."
            )


def _sign(call: Call) -> Signature:
    """What must be alike on every rank, in words; under TILEWISE_CHECK=1, numbers too."""
    forced = is_forced()
    signature = {"layout": call.layout.key, "mask": str(call.mask.key)}
    if forced and not call.mask.has_predicate:
        signature["mask"] = describe_mask(call.mask)
    for name in ("k", "v"):
        x = getattr(call, name)
        signature[name] = f"{x.dtype} {[*x.shape[:1], *x.shape[2:]]}"
    for name in ("q", "lengths", "alibi_slopes", "sinks"):
        x = getattr(call, name)
        signature[name] = "None" if x is None else f"{x.dtype} {list(x.shape)}"
        if x is not None and forced:
            signature[name] += f", digest {digest_of(x)}"
    if call.reads and call.lengths is not None:
        signature["lengths"] = str(call.lengths.tolist())
    return signature | {"scale": str(call.scale), "softcap": str(call.softcap)}


def _attend_own(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout,
    link: Link,
    lengths: Tensor | None,
    mask: Mask,
    terms: dict[str, Any],
) -> Partial:
    """The partial over the slots of this rank."""
    wide = accumulator_of(q.dtype)
    M, parts, first = q.shape[1], [], 0
    q_start: int | Tensor = max(0, layout.size - M)
    if lengths is not None:
        mask = mask & key_padding(lengths)
        # A length of 0 hides every key, so where its queries stand does not matter.
        q_start = (lengths - M).clamp(min=0)
    counts = _counts_queries(mask)
    for start, stop in layout.runs[link.rank].tolist():
        slots = slice(first, first + stop - start)
        first = slots.stop
        placed: dict[str, Any] = {"mask": mask, "q_start": q_start, "k_start": start}
        if counts:
            placed = {"mask": _table(mask, q, (start, stop), q_start)}
        parts.append(
            attention_partial(q, k[:, slots], v[:, slots], out_dtype=wide, **placed, **terms)
        )
    if parts:
        return merge(parts)
    (B, _, H), E = q.shape[:3], v.shape[3]
    lse = torch.full((B, H, M), float("-inf"), dtype=wide, device=q.device)
    return Partial(torch.zeros(B, M, H, E, dtype=wide, device=q.device), lse)


def _counts_queries(mask: Mask) -> bool:
    return any(isinstance(leaf, _COUNTING) for leaf in leaves(mask))


def _table(mask: Mask, q: Tensor, slots: tuple[int, int], offset: int | Tensor) -> Mask:
    """The mask over some slots by itself, element by element."""
    sizes = (q.shape[0], q.shape[2], q.shape[1])
    ends = ((0, sizes[0]), (0, sizes[1]), (0, sizes[2]), slots)
    b, h, m, n = (
        torch.arange(*span, device=q.device).reshape([-1 if axis == i else 1 for i in range(4)])
        for axis, span in enumerate(ends)
    )
    if isinstance(offset, Tensor):
        offset = offset.to(q.device, torch.int64).reshape(-1, 1, 1, 1)
    seen = mask.visible(Index(b, h, m, n, offset))
    shape = torch.broadcast_shapes(seen.shape, (1, 1, m.numel(), n.numel()))
    return blocks(seen.expand(shape), block_m=1, block_n=1)


def _exchange(own: Partial, link: Link) -> list[Partial]:
    """Every rank's partial, in the order of the ranks."""
    if link.ranks == 1:
        return [own]
    found, pending = link.all_gather("partials", flatten(own))
    pending.wait()
    shapes = [own.out.shape, own.lse.shape]
    return [Partial(*unflatten(part, shapes)) for part in found.unbind(0)]
