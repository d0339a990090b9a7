"""A sequence put together again from all ranks, on every rank, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .agree import Memo, Signature, agree
from .comm import Link, Pending
from .layout import Layout, check_dim, check_layout
from .prepare import link_of

OP = "unshard"
_agreed: Memo[bool] = Memo()


@torch.compiler.disable
def unshard(
    x: Tensor, layout: Layout, *, mesh: Any = None, group: Any = None, dim: int = 1
) -> Tensor:
    """The whole sequence from the shards that the ranks hold; the inverse of `layout.shard`.

    Args:
        x: this rank's tokens along `dim`.
        layout: which tokens each rank holds.
        mesh, group: as for `context_parallel_attention`; a mesh of one dim.
        dim: of x, the tokens'.
    Returns: S tokens along `dim`, the same on every rank. Its gradient is summed over ranks: each
        rank's loss counts.
    Raises: ValueError where x does not hold this rank's tokens or the ranks do not agree, at the
        first use of a call on every rank.
    Cost: receives the others' shards, each as long as the longest.
    Deterministic: forward and backward, always.
    """
    link = link_of(OP, mesh, group)
    _compare(x, layout, link, dim)
    run: Any = _Unshard.apply
    whole: Tensor = run(x.movedim(dim, 0), layout, link)
    return whole.movedim(0, dim)


def _compare(x: Tensor, layout: Layout, link: Link, dim: int) -> None:
    """Raise unless the call is right here; at its first use, on every rank unless all are alike."""
    error: ValueError | None = None
    signature: Signature = {}
    try:
        _check(x, layout, link, dim)
        at = dim % x.dim()
        shape = [*x.shape[:at], "own", *x.shape[at + 1 :]]
        signature = {"layout": layout.key, "x": f"{x.dtype} {shape}", "dim": str(at)}
    except ValueError as found:
        error = found

    def at_first() -> bool:
        agree(OP, (link,), signature, error)
        return True

    _agreed.recall((link,), (*signature.values(), str(error)), at_first)


def _check(x: Tensor, layout: Layout, link: Link, dim: int) -> None:
    check_dim(OP, "x", x, dim)
    check_layout(OP, layout, link.ranks)
    own = layout.lengths[link.rank]
    if x.shape[dim] != own:
        raise ValueError(
            f"{OP}: rank {link.rank} holds {own} tokens, got {list(x.shape)} along dim {dim}."
        )


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, link: Link) -> Tensor:
        ctx.layout, ctx.link = layout, link
        padded = x.new_zeros(max(layout.lengths), *x.shape[1:])
        padded[: x.shape[0]] = x
        found, pending = padded.unsqueeze(0), Pending([], [])
        if link.ranks > 1:
            found, pending = link.all_gather("unshard", padded)
        pending.wait()
        return found.flatten(0, 1).index_select(0, layout.order(x.device, padded=True))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layout, link = ctx.layout, ctx.link
        parts = [grad.index_select(0, layout.positions(r, grad.device)) for r in range(link.ranks)]
        own = parts[link.rank]
        if link.ranks == 1:
            return own, None, None
        sizes = [part.numel() for part in parts]
        flat = torch.cat([part.reshape(-1) for part in parts])
        found, pending = link.all_to_all("unshard", flat, sizes, [own.numel()] * link.ranks)
        pending.wait()
        return found.view(link.ranks, *own.shape).sum(0), None, None
