"""Who computes the cells: these ops, flash-linear-attention, and what a cell is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...linear import api
from ...linear.pool import decode
from .. import cases, harness, peers
from ..environment import version_of
from .cells import BOTH, STEP, Cell

OURS, FLA, DENSE, COPY = "tilewise", "flash-linear-attention", "dense attention", "copy of states"
# What flash-linear-attention says where it holds this Triton's code for Hopper to be wrong.
_GUARD = "produces incorrect results"

Run = Callable[..., Tensor]


@dataclass(frozen=True)
class Contestant:
    """run: an op's out from its name and tensors; None where it computes something else, whose
    time is compared."""

    name: str
    version: str = ""
    run: Run | None = None

    @property
    def is_ours(self) -> bool:
        return self.name == OURS


def find_contestants(device: torch.device) -> tuple[list[Contestant], dict[str, str]]:
    """Whose ops run here, ours first, and whose do not, with the reason."""
    found = [Contestant(OURS, run=_ours)]
    if device.type != "cuda":
        return found, {FLA: "its kernels need a GPU"}
    if find_spec("fla") is None:
        return found, {FLA: "not installed"}
    version = version_of("fla-core") or version_of("flash-linear-attention")
    return [*found, Contestant(FLA, f"fla {version or 'of unknown version'}", theirs)], {}


def enlist(cell: Cell, known: list[Contestant]) -> list[Contestant]:
    """Those whom a cell is put to."""
    if cell.grid == "decode":
        return [known[0], Contestant(COPY, f"torch {torch.__version__}")]
    if cell.grid == "crossover":
        return [known[0], Contestant(DENSE)]
    return known


def _ours(op: str, **x: Tensor) -> Tensor:
    q, k, v = (x.pop(name) for name in "qkv")
    out: Tensor = getattr(api, op)(q, k, v, **x)[0]
    return out


def theirs(op: str, **x: Tensor) -> Tensor:
    ops = import_module("fla.ops")
    out: Tensor = getattr(ops, f"chunk_{op}")(**x)[0]
    return out


def lift_guard(error: Exception) -> str:
    """Let flash-linear-attention run what it refuses to, so that its time is known; what to say of
    its gradients then. Empty where that is not what it raised."""
    if not isinstance(error, RuntimeError) or _GUARD not in str(error):
        return ""
    module: Any = import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True
    return "refuses this Triton on Hopper, where its gradients are wrong; timed all the same"


def run_once(run: Run, op: str, x: dict[str, Tensor], dout: Tensor) -> list[Tensor]:
    """Out and every gradient."""
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    out = run(op, **leaves)
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), dout)]


def bind(
    contestant: Contestant, cell: Cell, direction: str, x: dict[str, Tensor], device: torch.device
) -> Callable[[], Any]:
    """A call of what is timed."""
    if contestant.name == DENSE:
        return peers.bind(dense_peer(), dense_case(cell), device)
    if contestant.name == COPY:
        states = torch.zeros(cell.B, cell.H, cell.D, cell.D, device=device)
        return partial(torch.empty_like(states).copy_, states)
    if direction == STEP:
        return decode_step(cell, x, device)
    if contestant.run is None:
        raise ValueError(f"bench: {contestant.name} has no op to time.")
    if direction == BOTH:
        return partial(run_once, contestant.run, cell.op, x, torch.randn_like(x["v"]))
    return partial(contestant.run, cell.op, **x)


def decode_step(
    cell: Cell, x: dict[str, Tensor], device: torch.device, pool: Tensor | None = None
) -> Callable[[], Tensor]:
    """A step on states of a pool, of which each sequence's stands somewhere."""
    if pool is None:
        pool = torch.zeros(cell.B, cell.H, cell.D, cell.D, device=device)
    slots = torch.arange(cell.B - 1, -1, -1, device=device)
    named: dict[str, Any] = {n: t for n, t in x.items() if n not in ("q", "k", "v")}
    return partial(decode, x["q"], x["k"], x["v"], pool, slots=slots, **named)


def dense_peer() -> peers.Peer:
    return next(peer for peer in peers.PEERS if peer.is_ours)


def dense_case(cell: Cell) -> cases.Case:
    """Causal attention of as many tokens, heads and dims."""
    return cases.Case("causal", cell.M, cell.dtype, cases.FORWARD, B=cell.B, H=cell.H, D=cell.D)


def verify_dense(cell: Cell, device: torch.device) -> str:
    return harness.verify(dense_peer(), dense_case(cell), device)
