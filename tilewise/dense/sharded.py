"""Dense attention of DTensors: each rank attends with its own batch rows and heads.

Batch rows and heads do not meet in attention, so nothing is sent. Sequences sharded over ranks do
meet: that is context parallelism, and raises here.

Dims: B batch, M query length, N key length, H query heads, G kv heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..core.mask import Mask
from ..core.partials import Partial

_BATCH, _HEADS = 0, 2
# The axis of each learned term that goes with the heads.
_HEAD_AXIS = {"sinks": 0, "alibi_slopes": -1, "bias": 1}


def attend_sharded(
    op: str,
    run: Callable[..., Partial],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    terms: dict[str, Any],
    placement: dict[str, Any],
) -> Partial:
    """Run `run(q, k, v, mask, terms)` on the local shards and wrap what it returns.

    Raises: NotImplementedError for placements, masks and terms that would need another rank's
        data or position; ValueError for tensors that do not go together.
    """
    if any(x is not None for x in placement.values()):
        raise NotImplementedError(
            f"{op}: packed sequences and pieces of DTensors are not there; call it on to_local()."
        )
    if not all(isinstance(x, DTensor) for x in (q, k, v)):
        raise ValueError(f"{op}: q, k and v must be DTensors all or none.")
    _check(op, (q, k, v), mask, terms)
    assert isinstance(q, DTensor)
    mesh, placements = q.device_mesh, tuple(q.placements)
    local_terms = dict(terms)
    for name, axis in _HEAD_AXIS.items():
        if terms[name] is not None:
            local_terms[name] = _local_term(op, name, terms[name], axis, q)
    out, lse = run(*(_local(x) for x in (q, k, v)), mask, local_terms)
    # lse is [B, H, M].
    of_lse = [Shard(1) if p == Shard(_HEADS) else p for p in placements]
    shape = torch.Size((*q.shape[:3], v.shape[3]))
    return Partial(
        DTensor.from_local(
            out, mesh, placements, run_check=False, shape=shape, stride=_dense(shape)
        ),
        DTensor.from_local(lse, mesh, of_lse, run_check=False),
    )


def _check(op: str, qkv: tuple[Any, ...], mask: Mask, terms: dict[str, Any]) -> None:
    q = qkv[0]
    if any(x.device_mesh != q.device_mesh or x.placements != q.placements for x in qkv):
        raise ValueError(
            f"{op}: q, k and v must have one mesh and one placement, got "
            f"{[x.placements for x in qkv]}."
        )
    sizes = {"batch rows": (_BATCH, qkv[:1]), "heads of q, k and v": (_HEADS, qkv)}
    for axis, place in enumerate(q.placements):
        if place not in (Replicate(), Shard(_BATCH), Shard(_HEADS)):
            raise NotImplementedError(
                f"{op}: DTensors may be replicated, or sharded over batch rows (Shard(0)) or heads "
                f"(Shard(2)), got {place}; redistribute them, or use context parallelism for "
                "sharded sequences."
            )
        ranks = q.device_mesh.size(axis)
        for what, (dim, tensors) in sizes.items():
            if place == Shard(dim) and any(x.shape[dim] % ranks for x in tensors):
                raise ValueError(
                    f"{op}: the {what} must be divisible by the {ranks} ranks that share them, "
                    f"got {[x.shape[dim] for x in tensors]}."
                )
    is_sharded = any(place != Replicate() for place in q.placements)
    if is_sharded and (mask.has_predicate or mask.lower()[2]):
        raise NotImplementedError(
            f"{op}: masks that hold tensors or a predicate count batch rows and heads, of which "
            "a rank has a part; call it on to_local() with that part's mask."
        )
    if is_sharded and terms["dropout_p"] > 0.0:
        raise NotImplementedError(
            f"{op}: dropout of sharded DTensors would drop the same elements on every rank; call "
            "it on to_local()."
        )


def _local(x: Any) -> Tensor:
    local: Tensor = x.to_local(grad_placements=x.placements)
    return local


def _local_term(op: str, name: str, x: Any, axis: int, q: Any) -> Tensor:
    """A rank's part of what learns: that of its heads."""
    if Shard(_BATCH) in q.placements:
        raise NotImplementedError(
            f"{op}: {name} beside batch rows sharded as DTensors is not there, since its gradient "
            "sums over ranks; call it on to_local()."
        )
    expected: list[Placement] = [
        Shard(axis % x.dim()) if place == Shard(_HEADS) else Replicate() for place in q.placements
    ]
    got = list(x.placements) if isinstance(x, DTensor) else type(x).__name__
    if got != expected:
        raise ValueError(
            f"{op}: {name} beside DTensors must be one, with placements {expected}, got {got}."
        )
    return _local(x)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
