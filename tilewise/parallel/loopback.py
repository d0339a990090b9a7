"""All ranks of a ring in one process, one after the other: its pieces without its messages.

For tests and benches on a single device, where there is nobody to send to.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.partials import Partial
from .layout import Layout
from .pieces import Accumulator, Backward, Extras, Terms, backend_of_pieces, deltas_of
from .plan import Plan, Request, make_plan
from .visible import on_device


class Looped(NamedTuple):
    """out `[B, S, H, E]` and lse `[B, H, S]` of the whole sequence, and gradients, in fp32.

    dbias, dslopes: where there are any.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dslopes: Tensor | None = None


def plain_terms(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Terms:
    """The terms of a call with none, on the backend that it would run on."""
    name = backend_of_pieces("loopback", backend, q, k, v)
    return Terms(q.shape[-1] ** -0.5, None, 0.0, None, name)


def plans_of(layout: Layout, mask: Mask, q: Tensor, *, by_position: bool = False) -> list[Plan]:
    """The plan of each rank of a ring. by_position: as in `plan.Request`."""
    B, H = q.shape[0], q.shape[2]
    mask = on_device(mask, B, H, layout.size, q.device)
    request = Request(B, H, by_position, q.device)
    return [make_plan(mask, layout, rank, request) for rank in range(layout.ranks)]


def loopback(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    *,
    layout: Layout,
    mask: Mask,
    extras: Extras | None = None,
    backend: str = "auto",
    **terms: Any,
) -> Looped:
    """What the ranks of a ring would compute, forward and backward.

    Args:
        q, k, v: the whole sequence, `[B, S, heads, dim]`. dout: the gradient of out.
        extras: bias `[B|1, H|1, S|1, S|1]` and slopes. terms: of `pieces.Terms`, in place of none.
    """
    extras = Extras() if extras is None else extras
    meant = replace(plain_terms(q, k, v, backend), **terms)
    positioned = meant.dropout_p > 0.0 or extras.bias is not None or extras.slopes is not None
    plans = plans_of(layout, mask, q, by_position=positioned)
    shards = [[layout.shard(x, rank) for x in (q, k, v, dout)] for rank in range(layout.ranks)]
    mine = [_rows_of(extras, layout, rank) for rank in range(layout.ranks)]
    results = []
    for plan, own, (own_q, _, own_v, _) in zip(plans, mine, shards, strict=True):
        total = Accumulator(own_q, own_v.shape[-1])
        for calls, (_, keys, values, _) in zip(plan.calls, shards, strict=True):
            total.add(own_q, keys, values, calls, own, meant)
        results.append(total.finish(None))
    states = [
        _state_of(shard, own, found, meant)
        for shard, own, found in zip(shards, mine, results, strict=True)
    ]
    for plan, state in zip(plans, states, strict=True):
        for calls, source in zip(plan.calls, states, strict=True):
            state.add(source.k, source.v, (source.dk, source.dv), calls, meant)
    dq, dk, dv = (layout.join([getattr(x, name) for x in states]) for name in ("dq", "dk", "dv"))
    out = layout.join([found.out for found in results])
    lse = layout.join([found.lse for found in results], dim=2)
    dbias, dslopes = _joined_extras(states, extras, layout)
    return Looped(out, lse, dq, dk, dv, dbias, dslopes)


def _rows_of(extras: Extras, layout: Layout, rank: int) -> Extras:
    bias = extras.bias
    if bias is not None and bias.shape[2] > 1:
        bias = layout.shard(bias, rank, dim=2)
    return extras._replace(bias=bias)


def _state_of(shard: list[Tensor], extras: Extras, found: Partial, terms: Terms) -> Backward:
    q, k, v, dout = shard
    wide = found.out.dtype
    delta = deltas_of(found.out, dout, None, terms)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    dbias, dslopes = (
        None if x is None else torch.zeros_like(x, dtype=wide) for x in (extras.bias, extras.slopes)
    )
    return Backward(q, k, v, extras, dout, found.lse, delta, dq, dk, dv, dbias, dslopes)


def _joined_extras(
    states: list[Backward], extras: Extras, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of bias and slopes from the ranks' shares."""
    bias = [state.dbias for state in states if state.dbias is not None]
    slopes = [state.dslopes for state in states if state.dslopes is not None]
    dbias = dslopes = None
    if extras.bias is not None:
        has_rows = extras.bias.shape[2] > 1
        dbias = layout.join(bias, dim=2) if has_rows else torch.stack(bias).sum(0)
    if slopes:
        dslopes = torch.stack(slopes).sum(0)
    return dbias, dslopes
