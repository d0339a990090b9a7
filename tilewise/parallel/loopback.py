"""All ranks of a ring in one process, one after the other: its pieces without its messages.

For tests and benches on a single device, where there is nobody to send to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.shapes import accumulator_of
from ..dense.choice import choose
from .layout import Layout
from .pieces import Accumulator, Backward, Extras, Terms
from .plan import Plan, Request, make_plan
from .visible import on_device


class Looped(NamedTuple):
    """out `[B, S, H, E]` and lse `[B, H, S]` of the whole sequence, and gradients, in fp32."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def plain_terms(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Terms:
    """The terms of a call with none, on the backend that it would run on."""
    name = choose("loopback", backend, q, k, v)
    return Terms(q.shape[-1] ** -0.5, None, 0.0, None, "tiled(own)" if name == "tiled" else name)


def plans_of(layout: Layout, mask: Mask, q: Tensor) -> list[Plan]:
    """The plan of each rank of a ring."""
    B, H = q.shape[0], q.shape[2]
    mask = on_device(mask, B, H, layout.size, q.device)
    request = Request(B, H, False, q.device)
    return [make_plan(mask, layout, rank, request) for rank in range(layout.ranks)]


def loopback(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    layout: Layout,
    mask: Mask,
    backend: str = "auto",
) -> Looped:
    """What the ranks of a ring would compute, forward and backward.

    Args:
        q, k, v: the whole sequence, `[B, S, heads, dim]`. dout: the gradient of out.
    """
    terms, wide = plain_terms(q, k, v, backend), accumulator_of(q.dtype)
    plans = plans_of(layout, mask, q)
    shards = [[layout.shard(x, rank) for x in (q, k, v, dout)] for rank in range(layout.ranks)]
    results = []
    for plan, (own_q, _, own_v, _) in zip(plans, shards, strict=True):
        total = Accumulator.empty(own_q, own_v.shape[-1])
        for calls, (_, keys, values, _) in zip(plan.calls, shards, strict=True):
            total.add(own_q, keys, values, calls, Extras(), terms)
        results.append(total.finish(None))
    sums = [[torch.zeros(x.shape, dtype=wide, device=x.device) for x in s[:3]] for s in shards]
    for rank, plan in enumerate(plans):
        own_q, own_k, own_v, own_dout = shards[rank]
        out, lse = results[rank]
        delta = (own_dout.to(wide) * out).sum(-1).transpose(1, 2).contiguous()
        dq, dk, dv = sums[rank]
        state = Backward(
            own_q, own_k, own_v, Extras(), own_dout, lse, delta, dq, dk, dv, None, None
        )
        for source, calls in enumerate(plan.calls):
            into = (sums[source][1], sums[source][2])
            state.add(shards[source][1], shards[source][2], into, calls, terms)
    grads = [layout.join([part[i] for part in sums]) for i in range(3)]
    lses = [part.lse for part in results]
    return Looped(layout.join([r.out for r in results]), layout.join(lses, dim=2), *grads)
