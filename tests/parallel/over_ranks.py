"""One call of context parallelism as if it were one function, held against the error budget.

The whole tensors are here; each rank gets its shards, runs forward and keeps the graph; backward
sends each rank its part of the upstream gradient. What comes back is joined: rows and keys by the
layout, gradients of replicated tensors by their sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.parallel.ranks import POOLS, Job, Rank, Ranks
from tilewise.core.case import Case
from tilewise.core.philox import draw_rng
from tilewise.core.tolerance import BudgetReport, assert_within_budget
from tilewise.dense import budget
from tilewise.parallel import comm, prepare, zigzag
from tilewise.parallel.agree import Memo
from tilewise.parallel.layout import Layout
from tilewise.report.verify import verify_case

BY_TOKEN = ("q", "k", "v")


@dataclass(frozen=True)
class Way:
    """How a call is spread: a schedule, a layout, and the mesh where it has two dims.

    pool: of `ranks.POOLS`.
    """

    schedule: str
    layout: Layout
    mesh: tuple[int, int] | None = None
    pool: str = "gloo"

    @property
    def ranks(self) -> int:
        return self.layout.ranks


def place(rank: Rank, way: Way) -> dict[str, Any]:
    where = {"group": rank.groups[way.ranks]} if way.mesh is None else {}
    if way.mesh is not None:
        where = {"mesh": rank.meshes[way.mesh]}
    return {"layout": way.layout, "schedule": way.schedule, **where}


def forward(
    rank: Rank, way: Way, tensors: dict[str, Tensor], options: dict[str, Any], seed: int
) -> tuple[Tensor, Tensor]:
    """A job: this rank's shards in, its rows of out and lse back."""
    from tilewise.parallel import api

    torch.manual_seed(seed)
    # The oracle is on the CPU, and a GPU's generator draws other numbers.
    api.draw_rng = lambda device: draw_rng(torch.device("cpu")).to(device)
    leaves = {n: shard(x, n, way.layout, rank).requires_grad_() for n, x in tensors.items()}
    q, k, v = (leaves[name] for name in BY_TOKEN)
    extras = {name: x for name, x in leaves.items() if name not in BY_TOKEN}
    found = api.context_parallel_attention_partial(q, k, v, **extras, **options, **place(rank, way))
    rank.kept["graph"] = (list(leaves.values()), found)
    return found.out.detach(), found.lse.detach()


def backward(rank: Rank, dout: list[Tensor], dlse: list[Tensor]) -> list[Tensor]:
    """A job: gradients of the leaves of the last forward."""
    leaves, found = rank.kept.pop("graph")
    upstream = [x[rank.index].to(rank.device) for x in (dout, dlse)]
    return list(torch.autograd.grad(found, leaves, upstream))


def alone(
    rank: Rank, way: Way, tensors: dict[str, Tensor], options: dict[str, Any], seed: int
) -> None:
    """A job of one rank: all that it would compute, and so compile, but no message."""
    with no_messages():
        found = forward(rank, way, tensors, options, seed)
        leaves, graph = rank.kept.pop("graph")
        torch.autograd.grad(graph, leaves, [torch.zeros_like(x) for x in found])


@contextmanager
def no_messages() -> Iterator[None]:
    """Inside, links bring zeros, and every rank agrees with this one. Nothing is remembered."""
    kept = {name: getattr(comm.Link, name) for name in vars(Quiet) if not name.startswith("__")}
    remembered = prepare._prepared
    try:
        for name in kept:
            setattr(comm.Link, name, getattr(Quiet, name))
        prepare._prepared = Memo()
        yield
    finally:
        for name, method in kept.items():
            setattr(comm.Link, name, method)
        prepare._prepared = remembered


class Quiet:
    """A link's methods, where nobody answers."""

    def exchange(self: Any, kind: str, sent: Any, received: Any) -> Any:
        received[0].zero_()
        return comm.Pending([], [])

    def all_gather(self: Any, kind: str, x: Tensor) -> Any:
        return x.new_zeros(self.ranks, *x.shape), comm.Pending([], [])

    def all_to_all(self: Any, kind: str, x: Tensor, sent: Any, received: Any) -> Any:
        return x.new_zeros(sum(received)), comm.Pending([], [])

    def broadcast(self: Any, x: Tensor) -> None:
        pass

    def gather_objects(self: Any, value: Any) -> list[Any]:
        return [value] * self.ranks


def shard(x: Tensor, name: str, layout: Layout, rank: Rank) -> Tensor:
    """This rank's part of one of the tensors of a call, on its device."""
    x = x.detach()
    if name in BY_TOKEN:
        x = layout.shard(x, rank.index)
    elif name == "bias" and x.dim() > 1 and x.shape[-2] > 1:
        x = layout.shard(x, rank.index, dim=-2)
    return x.clone().to(rank.device)


class OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, case: Case, names: tuple[str, ...], *tensors: Tensor) -> Any:
        named = {name: x.detach() for name, x in zip(names, tensors, strict=True)}
        call = (way, named, case.options, case.seed)
        pool = POOLS[way.pool]
        if pool.is_turned:
            pool.rehearse(alone, *call)
        found = pool.run(way.ranks, forward, *call)
        ctx.way, ctx.names, ctx.shapes = way, names, [x.shape for x in tensors]
        outs, lses = zip(*found, strict=True)
        return way.layout.join(outs), way.layout.join(lses, dim=2)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        layout = ctx.way.layout
        parts = [
            [layout.shard(x, r, dim=d).clone() for r in range(layout.ranks)]
            for x, d in ((dout, 1), (dlse, 2))
        ]
        found = POOLS[ctx.way.pool].run(ctx.way.ranks, backward, *parts)
        grads = []
        for name, shape, shares in zip(
            ctx.names, ctx.shapes, zip(*found, strict=True), strict=True
        ):
            if name in BY_TOKEN:
                grads.append(layout.join(shares))
            elif name == "bias" and len(shape) > 1 and shape[-2] > 1:
                grads.append(layout.join(shares, dim=-2))
            else:
                grads.append(torch.stack(shares).sum(0))
        return None, None, None, *grads


@dataclass(frozen=True)
class OpOverRanks:
    """Stands where `verify_case` wants an op of the catalog: the dense partial is the oracle."""

    way: Way
    has_gradients: bool = True

    def load(self, role: str) -> Any:
        return self._run if role == "run" else getattr(budget, role)

    def _run(self, case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
        out, lse = OverRanks.apply(self.way, case, tuple(tensors), *tensors.values())
        return {"out": out, "lse": lse}


def reports_of(
    way: Way, tensors: dict[str, Tensor], seed: int = 0, **options: Any
) -> list[BudgetReport]:
    case = Case("attention_partial", "test", tensors, options, seed)
    return verify_case(OpOverRanks(way), case, "tiled")  # type: ignore[arg-type]


def check_over_ranks(way: Way, tensors: dict[str, Tensor], seed: int = 0, **options: Any) -> None:
    """Fail with the figures unless out, lse and every gradient are within the budget."""
    reports = reports_of(way, tensors, seed, **options)
    failed = [str(report) for report in reports if not report.is_within]
    assert len(reports) == 2 + len(tensors) and not failed, "\n".join(failed)


def outcome(way: Way, tensors: dict[str, Tensor], seed: int = 0, **options: Any) -> list[Tensor]:
    """out, lse and the gradients of their sum, as they come back."""
    case = Case("attention_partial", "test", tensors, options, seed)
    leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
    out, lse = OverRanks.apply(way, case, tuple(tensors), *leaves)
    ones = (torch.ones_like(out), torch.ones_like(lse))
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, ones)]


def check_unshard(pool: Ranks, ranks: int, job: Job) -> None:
    """The whole sequence on each rank, and the sum of all ranks' gradients. job: `jobs.unsharded`,
    which imports from here."""
    layout, x = zigzag(29, ranks), torch.randn(2, 29, 3, dtype=torch.float64)
    weights = [torch.randn_like(x) for _ in range(ranks)]
    found = pool.run(ranks, job, layout, x, weights)
    total = torch.stack(weights).sum(0)
    for rank, (whole, grad) in enumerate(found):
        assert torch.equal(whole, x)
        exact = layout.shard(total, rank)
        assert_within_budget(grad, exact, exact.float())
