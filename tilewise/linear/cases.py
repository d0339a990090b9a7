"""The cases of linear attention in the catalog: small calls that between them touch everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.case import Case
from ..core.shapes import accumulator_of

# B, M, H, G, D, E; packed: B sequences in M tokens.
Shape = tuple[int, int, int, int, int, int]

_USUAL: Shape = (2, 70, 4, 2, 16, 16)
_BOUNDS = (0, 3, 3, 68, 69, 76)


@dataclass(frozen=True)
class Recipe:
    """One case. gate: how strong, see `_GATES`. has_state: an initial state is given."""

    name: str
    shape: Shape = _USUAL
    gate: str = "usual"
    has_state: bool = False
    is_packed: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"


_ALL = (
    Recipe("one step", (3, 1, 4, 2, 16, 16), has_state=True),
    Recipe("three chunks", (1, 129, 2, 1, 16, 16)),
    Recipe("D 60, E 100, heads first, scale 1", (1, 35, 1, 1, 60, 100),
           layout="heads first", options={"scale": 1.0}),
    Recipe("packed, one empty", (5, 80, 4, 2, 16, 16), has_state=True, is_packed=True),
)  # fmt: skip
_GATED = (
    Recipe("packed, strong gates", (5, 80, 4, 2, 16, 16), "strong", True, True),
    Recipe("gates of 0 and -50", gate="mixed", has_state=True),
)
_DELTA = (
    Recipe("norm, logits, negative eigenvalues", has_state=True,
           options={"qk_l2norm": True, "beta_sigmoid": True, "negative_eigenvalues": True}),
)  # fmt: skip
# Of many heads: a head's A_log is one number, and few tell little of the eager form's error.
_HEADS: Shape = (1, 70, 12, 6, 16, 16)
_MADE_GATES = {
    "gated_delta_rule": (Recipe("gate of a projection", _HEADS, "made", has_state=True),),
    "kda": (
        Recipe("gate of a projection", _HEADS, "made", has_state=True),
        Recipe("gate above a bound", _HEADS, "made", options={"lower_bound": -5.0}),
    ),
}

_DELTA_OPS = ("delta_rule", "gated_delta_rule", "kda")
_VECTOR_OPS = ("gla", "kda")
_GATED_OPS = ("simple_gla", *_VECTOR_OPS, "gated_delta_rule")

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "usual": lambda x: torch.nn.functional.logsigmoid(x) / 4,
    "strong": lambda x: -20.0 * x.abs(),
    "mixed": lambda x: torch.where(x > 1.0, -50.0, torch.where(x > 0.0, -0.0, -0.05)),
    "made": lambda x: x,
}


def cases(op: str, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every case of an op, tensors drawn from a fixed seed."""
    name = op.rpartition(".")[2]
    # The other ops are these with a decay or a beta.
    recipes = list(_ALL if name in (*_GATED_OPS, *_DELTA_OPS) else _ALL[1:])
    if name in _GATED_OPS:
        recipes += _GATED
    if name in _DELTA_OPS:
        recipes += _DELTA
    recipes += _MADE_GATES.get(name, ())
    return [draw_case(op, x, dtype, device, seed) for seed, x in enumerate(recipes)]


def draw_case(op: str, recipe: Recipe, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """One case of an op of the catalog, such as "linear.gla"."""
    name = op.rpartition(".")[2]
    generator = torch.Generator().manual_seed(seed)
    wide = accumulator_of(dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")

    B, M, H, G, D, E = recipe.shape
    lead = (M,) if recipe.is_packed else (B, M)
    options = dict(recipe.options)
    q, k, v = draw(*lead, G, D), draw(*lead, G, D), draw(*lead, H, E)
    if name in _DELTA_OPS and "qk_l2norm" not in options:
        k = k / k.norm(dim=-1, keepdim=True)
    tensors = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype)}
    if recipe.layout == "heads first":
        tensors = {
            n: x.transpose(-3, -2).contiguous().transpose(-3, -2) for n, x in tensors.items()
        }
    if name == "retention":
        tensors["log_decay"] = -draw(H).abs().to(wide)
    if name in _GATED_OPS:
        shape = (*lead, H, D) if name in _VECTOR_OPS else (*lead, H)
        tensors["g"] = _GATES[recipe.gate](draw(*shape)).to(wide)
        if recipe.gate == "made":
            tensors["A_log"] = (draw(H) / 2).to(wide)
            tensors["dt_bias"] = draw(*shape[len(lead) :]).to(wide)
    if name in _DELTA_OPS:
        beta = draw(*lead, H)
        tensors["beta"] = (beta if "beta_sigmoid" in options else beta.sigmoid()).to(dtype)
    if recipe.has_state:
        tensors["initial_state"] = draw(B, H, D, E).to(wide)
    tensors = {n: x.to(device) for n, x in tensors.items()}
    if recipe.is_packed:
        bounds = torch.tensor(_BOUNDS, dtype=torch.int32, device=device)
        options["cu_seqlens"] = bounds
        # Tokens of no sequence, and what must not reach any other.
        for x in (x for n, x in tensors.items() if n in ("q", "k", "v", "g", "beta")):
            x[_BOUNDS[-1] :] = torch.nan
    return Case(op, recipe.name, tensors, options, seed)
