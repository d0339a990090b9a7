"""Linear attention as PyTorch knows it: schemas, fake kernels, dispatch to a backend, autograd.

One pair of ops serves every member of the family: a gate of one number or of D numbers a head or
none, a beta or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.first_derivative import mark_first_derivatives
from ..core.observed import is_observed
from ..core.shapes import accumulator_of, check_cu_seqlens, is_read
from .choice import choose
from .inputs import Inputs

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, str backend"
)

# Steps of a chunk in plain torch.
_CHUNKS = {"recurrent": 1, "tiled": 64}

library = torch.library.Library("tilewise", "FRAGMENT")
library.define(f"linear_fwd({_INPUTS}) -> (Tensor out, Tensor final_state)")
library.define(
    f"linear_bwd(Tensor dout, Tensor? dstate, {_INPUTS}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)"
)


def _linear_fwd(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, backend = Inputs(*arguments[:-1]), arguments[-1]
    check_contents(inputs)
    match choose("linear", backend, inputs):
        case "triton":
            from . import triton_forward

            return triton_forward.linear_fwd(inputs)
        case name:
            from . import tiled

            # What autocast is for has been done to q, k and v.
            with torch.autocast(inputs.q.device.type, enabled=False):
                out, state = tiled.linear_tiled(inputs, _CHUNKS[name])
    # An op's outputs may not be its inputs.
    return out, state.clone() if state is inputs.initial_state else state


def _linear_bwd(dout: Tensor, dstate: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    inputs, backend, wanted = Inputs(*rest[:8]), rest[8], rest[9]
    match choose("linear", backend, inputs):
        case "triton":
            from . import triton_backward

            return triton_backward.linear_bwd(dout, dstate, inputs, wanted)
        case name:
            return _recomputed(dout, dstate, inputs, name, wanted)


def _recomputed(
    dout: Tensor, dstate: Tensor | None, inputs: Inputs, name: str, wanted: list[bool]
) -> tuple[Tensor, ...]:
    """Gradients of a form in plain torch, which is run again under autograd."""
    from . import tiled

    no_autocast = torch.autocast(inputs.q.device.type, enabled=False)
    with torch._C._PreserveDispatchKeyGuard(), torch.enable_grad(), no_autocast:
        # Below a dispatch mode, such as a counter of flops, autograd is switched off.
        for key in ("AutogradFunctionality", "ADInplaceOrView"):
            torch._C._dispatch_tls_set_dispatch_key_excluded(
                getattr(torch._C.DispatchKey, key), False
            )
        leaves = inputs.map(lambda x: x.detach().requires_grad_())
        out, state = tiled.linear_tiled(leaves, _CHUNKS[name])
    asked = [x for x, want in zip(leaves.tensors, wanted, strict=True) if want and x is not None]
    pairs = ((out, dout), (state, dstate))
    results = [(x, dx) for x, dx in pairs if x.requires_grad and dx is not None]
    outs, upstream = zip(*results, strict=True)
    found = iter(torch.autograd.grad(outs, asked, upstream, allow_unused=True))
    gradients = []
    for x, want in zip(leaves.tensors, wanted, strict=True):
        dx = next(found) if want and x is not None else None
        if x is None or not want:
            dx = dout.new_empty(0)
        gradients.append(torch.zeros_like(x) if dx is None and x is not None else dx)
    return tuple(gradients)  # type: ignore[arg-type]


def check_contents(inputs: Inputs) -> None:
    """Check what bounds hold, where they may be read."""
    bounds = inputs.cu_seqlens
    if bounds is not None and is_read(bounds):
        check_cu_seqlens("linear", "cu_seqlens", bounds, inputs.q.shape[0])


# ---------------------------------------------------------------- fake kernels


def _linear_fwd_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs = Inputs(*arguments[:-1])
    state = inputs.v.new_empty(inputs.state_shape, dtype=accumulator_of(inputs.v.dtype))
    return inputs.v.new_empty(inputs.v.shape), state


def _linear_bwd_fake(dout: Tensor, dstate: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    inputs, wanted = Inputs(*rest[:8]), rest[9]
    return tuple(
        x.new_empty(x.shape) if x is not None and want else dout.new_empty(0)
        for x, want in zip(inputs.tensors, wanted, strict=True)
    )


for _name, _implementation, _fake in (
    ("linear_fwd", _linear_fwd, _linear_fwd_fake),
    ("linear_bwd", _linear_bwd, _linear_bwd_fake),
):
    library.impl(_name, torch.no_grad()(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=library)


# ---------------------------------------------------------------- autograd


class Linear(torch.autograd.Function):
    """`(out, final_state)` with gradients for every tensor but the bounds. Only inputs are saved:
    states and what chunks prepare are made again in the backward.

    known: a `warm.Known`, which goes to Triton's kernels without the registered ops; or None.
    """

    @staticmethod
    def forward(ctx: Any, known: Any, backend: str, scale: float, *tensors: Tensor | None) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.backend, ctx.scale = backend, scale
        if known is not None:
            return known.run(_inputs(tensors, scale))
        return torch.ops.tilewise.linear_fwd(*tensors, scale, backend)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> Any:
        tensors = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[3:9])
        if dout is None:
            dout = torch.zeros_like(tensors[2])
        with torch.no_grad():
            # Compiled autograd traces the backward of a call that was not compiled.
            is_seen = torch.compiler.is_compiling() or is_observed()
            if ctx.backend == "triton" and not is_seen:
                from .triton_backward import linear_bwd
            else:
                linear_bwd = _registered_bwd(ctx.backend)
            gradients: Any = linear_bwd(dout, dstate, _inputs(tensors, ctx.scale), wanted)
        gradients = mark_first_derivatives("linear", (dout, dstate, *tensors), gradients)
        kept = [
            dx if want and x is not None else None
            for x, dx, want in zip(tensors, gradients, wanted, strict=False)
        ]
        return (None, None, None, *kept, None)


def _registered_bwd(backend: str) -> Any:
    """The op, called as what it is of Triton's kernels."""

    def run(dout: Tensor, dstate: Tensor | None, inputs: Inputs, wanted: list[bool]) -> Any:
        return torch.ops.tilewise.linear_bwd(dout, dstate, *inputs, backend, wanted)

    return run


def _inputs(tensors: Any, scale: float) -> Inputs:
    return Inputs._make((*tensors, scale))
