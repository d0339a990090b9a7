"""How `merge` is verified: its forms and cases, as `budget.py` and `cases.py` for attention."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.case import Case
from ..core.partials import Partial, merge
from ..core.shapes import accumulator_of
from .reference import logsumexp, merge_reference


def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    return merge(_partials(tensors))._asdict()


def exact(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return merge_reference(_partials(tensors))._asdict()


def eager(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same formula with the shares and their products in the dtype of out."""
    partials = _partials(tensors)
    lses = torch.stack([lse for _, lse in partials])
    lse = logsumexp(lses.movedim(0, -1))
    shares = torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)).transpose(-1, -2)
    outs = torch.stack([out for out, _ in partials])
    return {"out": (shares.unsqueeze(-1).to(outs.dtype) * outs).sum(0), "lse": lse}


def floors(
    case: Case, tensors: dict[str, Tensor], upstream: dict[str, Tensor], eps: float
) -> dict[str, float]:
    """dlse_i = share_i (dO . (O_i - O) + dLSE) subtracts outs of like size."""
    size = float(upstream["out"].abs().max()) * float(upstream["out"].shape[-1])
    top = max(float(x.abs().max()) for name, x in tensors.items() if name.startswith("out"))
    return {name: eps * size * top for name in tensors if name.startswith("lse")}


def cases(op: str, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Two and five partials, dense and packed, with rows that are empty in some or in all."""
    found = []
    for seed, (name, count, shape) in enumerate(
        (
            ("two", 2, (2, 37, 3, 16)),
            ("five", 5, (2, 37, 3, 16)),
            ("one", 1, (2, 37, 3, 16)),
            ("packed", 3, (41, 3, 16)),
        )
    ):
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        wide = accumulator_of(dtype)
        for i in range(count):
            out = torch.randn(*shape, generator=generator, dtype=torch.float64)
            lse = 5 * torch.randn(*shape[:-3], shape[-2], shape[-3], generator=generator)
            lse[..., :4] = float("-inf")
            lse[..., 4 + i] = float("-inf")
            out.transpose(-3, -2)[lse.isneginf()] = 0.0
            tensors |= {f"out_{i}": out.to(device, dtype), f"lse_{i}": lse.to(device, wide)}
        found.append(Case(op, name, tensors, {}, seed))
    return found


def takes(case: Case, backend: str) -> bool:
    return True


def _partials(tensors: dict[str, Tensor]) -> list[Partial]:
    count = len(tensors) // 2
    return [Partial(tensors[f"out_{i}"], tensors[f"lse_{i}"]) for i in range(count)]
