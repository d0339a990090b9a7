"""Decoding over a cache whose tokens are dealt to ranks: partials merged by their LSE.

Every rank has the queries, attends to the keys it holds, and sends its partial to all others; each
merges them in the order of the ranks, so all get the same bits.

Dims: B batch, M new tokens, H query heads, R ranks, E value dim.
Cost: bytes received per rank (R - 1) B M H (E + 1) 4, whatever the length of the cache.
Source: Tree Attention (arXiv 2408.04093).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import full, key_padding
from ..core.partials import Partial, merge
from ..core.shapes import accumulator_of
from ..dense.api import attention_partial
from .agree import Memo, agree
from .comm import Link, flatten, unflatten
from .layout import Layout
from .prepare import links_of

OP = "context_parallel_decode"
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
        mask, scale, softcap, alibi_slopes, sinks, backend: as for `attention`.
    Returns: `[B, M, H, E]`, the same on every rank.
    Raises: ValueError for what does not fit or differs from rank to rank; NotImplementedError where
        a gradient is asked for, which `context_parallel_attention` gives.
    Cost: bytes received per rank (R - 1) B M H (E + 1) 4; each rank reads the slots it holds.
    Deterministic: always.
    Source: Tree Attention (arXiv 2408.04093).
    """
    links = links_of(mesh, group)
    key = (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        layout.key,
        mask.key,
        scale,
        softcap,
        lengths is None,
    )
    signature = {"q": f"{q.dtype} {list(q.shape)}", "layout": layout.key, "mask": str(mask.key)}
    for name, x in (("k", k), ("v", v)):
        signature[name] = f"{x.dtype} {[*x.shape[:1], *x.shape[2:]]}"
    signature |= {"scale": str(scale), "softcap": str(softcap), "lengths": str(lengths is None)}

    def compare() -> bool:
        error = None
        try:
            _check(q, k, v, layout, links, lengths)
        except (ValueError, NotImplementedError) as found:
            error = found
        agree(OP, links, signature, error)
        return True

    _agreed.recall(links, key, compare)
    (link,) = links
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


def _check(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, links: tuple[Link, ...], lengths: Tensor | None
) -> None:
    if len(links) != 1:
        raise ValueError(f"{OP}: mesh must have one dim, got {len(links)}.")
    if layout.ranks != links[0].ranks:
        raise ValueError(
            f"{OP}: the layout is for {layout.ranks} ranks, the mesh or group has {links[0].ranks}."
        )
    own = layout.lengths[links[0].rank]
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or k.shape[1] != own or v.shape[1] != own:
        raise ValueError(
            f"{OP}: expected q [B, M, H, D], and k and v with the {own} slots of rank "
            f"{links[0].rank}, got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}."
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise NotImplementedError(
            f"{OP}: has no gradient; call it under torch.no_grad(), or train with "
            "context_parallel_attention."
        )
    if lengths is not None and lengths.device.type == "cpu":
        odd = ((lengths < q.shape[1]) & (lengths != 0)) | (lengths > layout.size)
        if bool(odd.any()):
            raise ValueError(
                f"{OP}: lengths must be 0 or from M = {q.shape[1]} to {layout.size}, "
                f"got {lengths.tolist()[:8]}."
            )


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
    for start, stop in layout.runs[link.rank].tolist():
        slots = slice(first, first + stop - start)
        first = slots.stop
        parts.append(
            attention_partial(
                q,
                k[:, slots],
                v[:, slots],
                mask=mask,
                q_start=q_start,
                k_start=start,
                out_dtype=wide,
                **terms,
            )
        )
    if parts:
        return merge(parts)
    (B, _, H), E = q.shape[:3], v.shape[3]
    lse = torch.full((B, H, M), float("-inf"), dtype=wide, device=q.device)
    return Partial(torch.zeros(B, M, H, E, dtype=wide, device=q.device), lse)


def _exchange(own: Partial, link: Link) -> list[Partial]:
    """Every rank's partial, in the order of the ranks."""
    if link.ranks == 1:
        return [own]
    found, pending = link.all_gather("partials", flatten(own))
    pending.wait()
    shapes = [own.out.shape, own.lse.shape]
    return [Partial(*unflatten(part, shapes)) for part in found.unbind(0)]
