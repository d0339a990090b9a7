"""How dense attention is verified: its three forms, the floor of what cancels, and its cases.

The forms take one `Case`: `run` is the op on a backend, `exact` the fp64 oracle, `eager` the same
formula in plain torch with the input dtype's products. Each returns the op's outputs by name.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.case import Case
from ..core.mask_leaves import full
from ..core.partials import Partial
from ..core.philox import draw_rng
from . import api
from .checks import PLACEMENT, check_call
from .choice import why_not_hopper
from .piece import Piece
from .reference import attention_eager, sequences, softmax


def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    torch.manual_seed(case.seed)
    q, k, v = (tensors[name] for name in "qkv")
    extras = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    result = getattr(api, case.op)(q, k, v, **extras, **case.options, backend=backend)
    return _named(result)


def exact(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs in fp64, from fp64 copies of the tensors."""
    return run(case, tensors, "reference")


def eager(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    out, lse = attention_eager(_piece(case, tensors))
    return {"out": out, "lse": lse} if case.op.endswith("partial") else {"out": out}


def takes(case: Case, backend: str) -> bool:
    """Whether a backend does what a case asks for, given its device and dtype."""
    return backend != "hopper" or not why_not_hopper(_piece(case, case.tensors))


def floors(
    case: Case, tensors: dict[str, Tensor], upstream: dict[str, Tensor], eps: float
) -> dict[str, float]:
    """The fp32 rounding of what cancels in each gradient, from fp64 tensors.

    P = exp(S - lse) subtracts logits, and dS = P (dP - delta) subtracts numbers of size |dO|.|V|
    and rowsum(|dO||O|) + |dLSE|, each rounded in fp32; the floor is eps times that first-order
    bound, carried through the products that make the gradient. "out" is the same for the oracle's
    own exponent and counts only where the oracle is no wider than the result.
    """
    piece = _piece(case, tensors)
    parts = dict.fromkeys((*tensors, "out"), 0.0)
    slices = _upstream_by_sequence(piece, upstream)
    for sequence, (dout, dlse) in zip(sequences(piece), slices, strict=True):
        visible = sequence.visible()
        q, k, v = sequence.heads(visible)
        p, lse = softmax(sequence, q, k, visible)
        p_dropped = p / (1.0 - piece.terms.dropout_p)
        used = sequence.q.shape[0]
        dout, dlse = dout[:used].transpose(0, 1).abs(), dlse[:, :used].abs()
        out = p_dropped @ v.abs()
        statistics = (dout * out).sum(-1) + torch.where(lse.isneginf(), 0.0, dlse)
        terms = dout @ v.abs().transpose(-1, -2) + statistics.unsqueeze(-1)
        logit = torch.where(lse.isneginf(), 0.0, lse.abs()).unsqueeze(-1)
        size = p_dropped * terms * (1.0 + logit)
        parts["out"] = max(parts["out"], _top(logit * out))
        dv = ((p_dropped * logit).transpose(-1, -2) @ dout).unflatten(0, (-1, piece.group)).sum(1)
        parts["v"] = max(parts["v"], _top(dv))
        scale = abs(piece.terms.scale)
        parts["q"] = max(parts["q"], _top(scale * size @ k.abs()))
        group = (size.transpose(-1, -2) @ q.abs()).unflatten(0, (-1, piece.group)).sum(1)
        parts["k"] = max(parts["k"], _top(scale * group))
        whole = size.flatten(1).sum(-1)
        for name in ("alibi_slopes", "bias", "sinks"):
            parts[name] = parts.get(name, 0.0) + _extra(name, sequence, size, statistics, whole)
    return {name: eps * value for name, value in parts.items()}


def _extra(name: str, sequence: Any, size: Tensor, statistics: Tensor, whole: Tensor) -> float:
    if name == "alibi_slopes":
        i, j = sequence.indices
        return _top((size * (i + sequence.offset - j).abs()).flatten(1).sum(-1))
    if name == "sinks":
        return _top(statistics.sum(-1))
    bias = sequence.piece.terms.bias
    if bias is None:
        return 0.0
    reduced = [dim for dim in range(3) if bias.shape[dim + 1] == 1]
    return _top(size.sum(reduced) if reduced else size)


def _top(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _upstream_by_sequence(piece: Piece, upstream: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """dout `[M, H, E]` and dlse `[H, M]` of each sequence."""
    at, dout = piece.positions, upstream["out"]
    dlse = upstream.get("lse")
    if dlse is None:
        dlse = dout.new_zeros(*dout.shape[:-3], dout.shape[-2], dout.shape[-3])
    if at.cu_seqlens_q is None:
        return list(zip(dout.unbind(0), dlse.unbind(0), strict=True))
    edges = at.cu_seqlens_q.tolist()
    spans = [slice(a, b) for a, b in pairwise(edges)]
    return [(dout[span], dlse[:, span]) for span in spans]


def _piece(case: Case, tensors: dict[str, Tensor]) -> Piece:
    options = {name: x for name, x in case.options.items() if name not in PLACEMENT}
    placement = {name: x for name, x in case.options.items() if name in PLACEMENT}
    mask = options.pop("mask", full())
    terms: dict[str, Any] = dict.fromkeys(("scale", "softcap", "alibi_slopes", "bias", "sinks"))
    terms |= {"dropout_p": 0.0, **options}
    terms |= {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    terms.pop("out_dtype", None)
    q, k, v = (tensors[name] for name in "qkv")
    arguments = check_call(case.op, q, k, v, mask, terms, placement)
    torch.manual_seed(case.seed)
    if arguments.dropout_p > 0.0:
        arguments = arguments._replace(rng=draw_rng(q.device))
    return Piece(q, k, v, mask, arguments.positions(q, k), arguments.terms)


def _named(result: Tensor | Partial) -> dict[str, Tensor]:
    return result._asdict() if isinstance(result, Partial) else {"out": result}
