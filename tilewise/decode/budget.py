"""How attention over a cache is verified: its three forms, as `dense/budget.py` has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.case import Case
from ..core.mask_leaves import full
from ..core.partials import Partial
from . import api
from .call import CacheCall, Splits, make_call
from .choice import why_not_triton
from .reference import cache_eager, cache_reference


def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    given = {name: x.detach() for name, x in tensors.items()}
    q = given.pop("q")
    result = getattr(api, case.op)(q, **given, **case.options, backend=backend)
    return result._asdict() if isinstance(result, Partial) else {"out": result}


def exact(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return _named(case, cache_reference(_call(case, tensors)))


def eager(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return _named(case, cache_eager(_call(case, tensors)))


def takes(case: Case, backend: str) -> bool:
    return backend != "triton" or not why_not_triton(_call(case, case.tensors))


def floors(
    case: Case, tensors: dict[str, Tensor], upstream: dict[str, Tensor], eps: float
) -> dict[str, float]:
    """Nothing cancels in the forward."""
    return {}


def _call(case: Case, tensors: dict[str, Tensor]) -> CacheCall:
    options: dict[str, Any] = dict(case.options)
    names = ("bias", "alibi_slopes", "sinks")
    terms = {name: case.tensors.get(name) for name in names}
    terms |= {name: options.get(name) for name in ("scale", "softcap")}
    splits = Splits(options.get("num_splits"), options.get("batch_invariant", False))
    call = make_call(
        case.op, case.tensors["q"], options["cache"], options.get("mask", full()), terms,
        options.get("cu_seqlens_q"), options.get("max_seqlen_q"), splits,
    )  # fmt: skip
    own: dict[str, Any] = {name: tensors[name].detach() for name in names if name in tensors}
    if "bias" in own and call.terms.bias is not None:
        own["bias"] = own["bias"].reshape(call.terms.bias.shape)
    return replace(call, q=tensors["q"].detach(), terms=replace(call.terms, **own))


def _named(case: Case, partial: Partial) -> dict[str, Tensor]:
    if case.op.endswith("partial"):
        return partial._asdict()
    return {"out": partial.out}


def unread(x: Tensor) -> Tensor:
    """x filled with what must never be read: NaN, also in float8."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x.view(torch.uint8).fill_(0x7F)
        return x
    return x.fill_(float("nan"))
