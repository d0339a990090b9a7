"""Flops of attention for PyTorch's `torch.utils.flop_counter.FlopCounterMode`.

    from tilewise.integrations import flop_counter

    flop_counter.register()
    with FlopCounterMode() as counted:
        model(tokens).sum().backward()

Counted as PyTorch counts scaled_dot_product_attention: two products forward, five backward, of
every query with every key; masks do not count, so a causal call counts twice what it has to do. Of
packed calls only pairs of one sequence count.

Dims: B batch, M query length, N key length, H query heads, D, E head dims.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..dense import ops as _ops  # noqa: F401 - defines them

_FORWARD = ("attention_fwd", "attention_fwd_split")
_BACKWARD = ("attention_bwd", "attention_bwd_into")


def register() -> None:
    """Make `FlopCounterMode`s that are made from now on count attention. Again is harmless.

    Counting a packed call reads its lengths, for which a GPU has to come to rest. Not counted:
    attention over caches and linear attention.
    """
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for names, formula in ((_FORWARD, _forward_flops), (_BACKWARD, _backward_flops)):
        for name in names:
            op = getattr(torch.ops.tilewise, name)
            if op not in flop_registry:
                register_flop_formula(op, get_raw=True)(_bound(op, formula))


def _bound(op: Any, formula: Any) -> Any:
    names = [argument.name for argument in op.default._schema.arguments]

    def count(*given: Any, out_val: Any = None, **named: Any) -> int:
        return int(formula(dict(zip(names, given, strict=False)) | named))

    return count


def _forward_flops(call: dict[str, Any]) -> int:
    """S = Q K^T and O = P V."""
    return 2 * _pairs(call) * (call["q"].shape[-1] + call["v"].shape[-1])


def _backward_flops(call: dict[str, Any]) -> int:
    """S again, dQ and dK; dP and dV."""
    return 2 * _pairs(call) * (3 * call["q"].shape[-1] + 2 * call["v"].shape[-1])


def _pairs(call: dict[str, Any]) -> int:
    """Queries of all heads, times the keys that each could see."""
    q, k = call["q"], call["k"]
    M, H = q.shape[-3:-1]
    if q.dim() == 4:
        return int(q.shape[0] * H * M * k.shape[-3])
    queries = call["cu_seqlens_q"]
    # Self-attention: one packing serves queries and keys.
    keys = queries if call["cu_seqlens_k"] is None else call["cu_seqlens_k"]
    if not all(_is_readable(x) for x in (queries, keys)):
        return int(H * M * k.shape[-3])
    return int(H * (queries.diff().long() * keys.diff()).sum())


def _is_readable(x: Tensor) -> bool:
    return not isinstance(x, FakeTensor) and x.device.type != "meta"
