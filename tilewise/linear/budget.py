"""How linear attention is verified: its three forms on a case, and the floor of what cancels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.case import Case
from . import api
from .choice import LARGEST_DIM
from .inputs import Inputs
from .reference import linear_reference
from .transforms import l2_norm, log_gate, step_size

# How often a product is rounded on its way into a result: when it is made and in the sums; and
# where there are gates its decay is, as a sum of gates and as their power.
_ROUNDINGS, _DECAY_ROUNDINGS = 2.0, 2.0


def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    extras = {name: x for name, x in tensors.items() if name not in ("q", "k", "v")}
    function = getattr(api, case.op.rpartition(".")[2])
    q, k, v = (tensors[name] for name in "qkv")
    return _named(function(q, k, v, **extras, **case.options, backend=backend))


def exact(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs in fp64, from fp64 copies of the tensors."""
    return run(case, tensors, "reference")


def eager(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same recurrence with the products of the inputs' dtype."""
    return run(case, tensors, "eager")


def takes(case: Case, backend: str) -> bool:
    """Whether a backend does what a case asks for, given its device and dtype."""
    widest = max(case.tensors[name].shape[-1] for name in "qv")
    return backend != "triton" or widest <= LARGEST_DIM


def floors(
    case: Case, tensors: dict[str, Tensor], upstream: dict[str, Tensor], eps: float
) -> dict[str, float]:
    """The fp32 rounding of what cancels in each gradient, from fp64 tensors.

    Every result is a sum of products, and each is rounded on its own, in the sums it passes and in
    its decay. That adds up like a random walk: eps times the root of the sum of the products'
    squares, which the recurrence of the squared tensors gives with its own gradients, without the
    delta rule's feedback.
    """
    inputs = _prepared(case, tensors)
    squares = [x.detach().square() for x in (*inputs[:3],)]
    g = None if inputs.g is None else 2.0 * inputs.g.detach()
    beta = None if inputs.beta is None else inputs.beta.detach().square().requires_grad_()
    state = inputs.state_or_zeros().detach().square()
    leaves = [x.requires_grad_() for x in (*squares, g, state) if x is not None]
    q, k, v = squares
    stepped = v if beta is None else v * beta.unsqueeze(-1)
    positive = Inputs(q, k, stepped, g, None, state, inputs.cu_seqlens, inputs.scale**2)
    out, last = linear_reference(positive)
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state}
    asked = [x for x in (*leaves, beta) if x is not None]
    found = torch.autograd.grad(
        (out, last), asked, [upstream[name].square() for name in ("out", "final_state")]
    )
    by_id = {id(x): dx for x, dx in zip(asked, found, strict=True)}
    sums = {name: by_id[id(x)] for name, x in named.items() if x is not None}
    all_steps, shared = 0.0, {}
    if inputs.g is not None:
        all_steps = _top(sums["g"].sum(tuple(range(inputs.v.dim() - 2))))
        rate = float(tensors["A_log"].exp().max()) if "A_log" in tensors else 1.0
        sums["g"] = sums["g"] * rate**2
        shared = {"log_decay": 1.0, "A_log": _top(inputs.g.abs()), "dt_bias": rate}
    roots = {name: math.sqrt(_top(x)) for name, x in sums.items()}
    roots |= {name: math.sqrt(all_steps) * factor for name, factor in shared.items()}
    roots["out"], roots["final_state"] = math.sqrt(_top(out)), math.sqrt(_top(last))
    if case.options.get("qk_l2norm"):
        for name in ("q", "k"):
            roots[name] /= float(tensors[name].norm(dim=-1).min())
    roundings = _ROUNDINGS + (_DECAY_ROUNDINGS if inputs.g is not None else 0.0)
    return {name: roundings * eps * root for name, root in roots.items()}


def _prepared(case: Case, tensors: dict[str, Tensor]) -> Inputs:
    """The recurrence's own inputs. What is stored past the last sequence is 0."""
    q, k, v = (tensors[name].nan_to_num(0.0) for name in "qkv")
    g, beta = tensors.get("g"), tensors.get("beta")
    if case.options.get("qk_l2norm"):
        q, k = l2_norm(q), l2_norm(k)
    if "log_decay" in tensors:
        g = tensors["log_decay"].expand(v.shape[:-1])
    if g is not None and "A_log" in tensors:
        rate = tensors["A_log"].unsqueeze(-1) if g.dim() == v.dim() else tensors["A_log"]
        g = log_gate(g, rate, tensors["dt_bias"], case.options.get("lower_bound"))
    if beta is not None:
        flags = (case.options.get(name, False) for name in ("beta_sigmoid", "negative_eigenvalues"))
        beta = step_size(beta, *flags).nan_to_num(0.0)
    D = q.shape[-1]
    return Inputs(
        q, k, v, None if g is None else g.nan_to_num(0.0), beta, tensors.get("initial_state"),
        case.options.get("cu_seqlens"), float(case.options.get("scale", D**-0.5)),
    )  # fmt: skip


def _top(x: Tensor) -> float:
    return float(x.detach().max()) if x.numel() else 0.0


def _named(result: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return dict(zip(("out", "final_state"), result, strict=True))
