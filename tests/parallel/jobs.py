"""Jobs of the tests in this folder; a rank imports them by name."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import tilewise as tw
from tests.parallel.over_ranks import Way, place, shard
from tests.parallel.ranks import Rank
from tilewise import parallel
from tilewise.parallel import Layout, count_traffic, unshard, zigzag


def qkv(size: int, heads: tuple[int, int] = (4, 2), seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": heads[0], "k": heads[1], "v": heads[1]}
    return {n: torch.randn(1, size, h, 8, generator=generator) for n, h in shapes.items()}


def own(rank: Rank, way: Way, tensors: dict[str, Tensor]) -> list[Tensor]:
    return [shard(x, n, way.layout, rank).requires_grad_() for n, x in tensors.items()]


def there(rank: Rank, x: Any) -> Any:
    """A tensor on the rank's device; anything else as it is."""
    return x.to(rank.device) if isinstance(x, Tensor) else x


def without_waiting(rank: Rank, way: Way, tensors: dict[str, Tensor]) -> None:
    """A call like one before, forward and backward, in which the host must not wait for the GPU."""
    leaves = own(rank, way, tensors)
    options = {**place(rank, way), "mask": tw.causal() & tw.documents([0, 9, way.layout.size])}
    for is_watched in (False, True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if is_watched else "default")
        try:
            out = tw.context_parallel_attention(*leaves, **options)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        finally:
            torch.cuda.set_sync_debug_mode("default")


def traffic(
    rank: Rank, way: Way, tensors: dict[str, Tensor], mask: tw.Mask
) -> list[dict[str, int]]:
    """What this rank received forward and backward, by kind."""
    leaves = own(rank, way, tensors)
    with count_traffic() as forward:
        out = tw.context_parallel_attention(*leaves, mask=mask, **place(rank, way))
    with count_traffic() as backward:
        out.sum().backward()
    return [forward.received, backward.received]


def differing(rank: Rank, way: Way, what: str) -> None:
    """Rank 1 calls something else than the others."""
    odd = rank.index == 1
    leaves = own(rank, way, qkv(way.layout.size))
    options: dict[str, Any] = {"mask": tw.causal(), **place(rank, way)}
    if odd and what == "mask":
        options["mask"] = tw.window(3, 0)
    if odd and what == "mask tensors":
        options["mask"] = tw.key_padding([5])
    elif what == "mask tensors":
        options["mask"] = tw.key_padding([6])
    if odd and what == "schedule":
        options["schedule"] = "all_gather"
    if odd and what == "scale":
        options["scale"] = 0.5
    if odd and what == "dtype":
        leaves = [x.detach().to(torch.bfloat16).requires_grad_() for x in leaves]
    if odd and what == "heads":
        leaves[0] = torch.cat([leaves[0], leaves[0]], 2)
    if odd and what == "layout":
        options["layout"] = Layout("other", way.layout.size, way.layout.runs)
    if odd and what == "gradient":
        leaves = [x.detach() for x in leaves]
    if odd and what == "sinks":
        options["sinks"] = torch.zeros(4)
    if odd and what == "length":
        leaves[1] = leaves[1][:, 1:]
    with torch.set_grad_enabled(not (odd and what == "grad mode")):
        tw.context_parallel_attention(*leaves, **options)


def odd_one_out(rank: Rank, way: Way, odd: dict[str, Any]) -> None:
    """Rank 1 passes something that the others do not, which may be no tensor and no number."""
    options: dict[str, Any] = {**place(rank, way), "mask": tw.causal()}
    q, k, v = own(rank, way, qkv(way.layout.size))
    call = {"q": q, "k": k, "v": v, **options, **(odd if rank.index == 1 else {})}
    parallel.context_parallel_attention_partial(**call)


def odd_decode(rank: Rank, layout: Layout, odd: dict[str, Any]) -> None:
    """The same of a decode step."""
    x = torch.zeros(1, layout.lengths[rank.index], 2, 8, device=rank.device)
    call = {"q": x.new_zeros(1, 1, 4, 8), "k": x, "v": x, "layout": layout}
    call |= {"group": rank.groups[layout.ranks], **(odd if rank.index == 1 else {})}
    tw.context_parallel_decode(**call)


def odd_unshard(rank: Rank, layout: Layout, odd: dict[str, Any]) -> None:
    """The same of `unshard`."""
    x = torch.zeros(2, layout.lengths[rank.index], 3, device=rank.device)
    call = {"x": x, "layout": layout, "group": rank.groups[layout.ranks]}
    unshard(**{**call, **(odd if rank.index == 1 else {})})


def raises_what_it_likes(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    raise KeyError


def of_another_shape(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return torch.ones(3, 3, dtype=torch.bool)


def fails(rank: Rank, way: Way, options: dict[str, Any], heads: tuple[int, int] = (4, 2)) -> None:
    """The same wrong call on every rank. A mesh may be given by its shape."""
    if "mesh" in options:
        options = {**options, "mesh": rank.meshes[options["mesh"]]}
    leaves = own(rank, way, qkv(way.layout.size, heads))
    tw.context_parallel_attention(*leaves, **{**place(rank, way), **options})


def deserted(rank: Rank, way: Way, seconds: float) -> str:
    """Rank 1 is lost between two calls: what the others are told, and when."""
    # Made by all ranks of the world, its members or not.
    group = dist.new_group(list(range(way.ranks)), timeout=timedelta(seconds=seconds))
    if rank.index >= way.ranks:
        return "no member"
    options = {**place(rank, way), "mask": tw.causal(), "group": group}
    leaves = own(rank, way, qkv(way.layout.size))
    tw.context_parallel_attention(*leaves, **options)
    if rank.index == 1:
        return "lost"
    start = time.perf_counter()
    try:
        tw.context_parallel_attention(*leaves, **options)
    except RuntimeError as error:
        assert "TILEWISE_CHECK=1 compares every call" in str(error)
        return "told in time" if time.perf_counter() - start < 5 * seconds else "told late"
    return "not told"


def wrong_alone(rank: Rank, way: Way, seconds: float) -> str:
    """Rank 0 makes a wrong call while rank 1 makes none: what rank 0 is told."""
    group = dist.new_group(list(range(way.ranks)), timeout=timedelta(seconds=seconds))
    if rank.index:
        return ""
    leaves = own(rank, way, qkv(way.layout.size))
    options = {**place(rank, way), "group": group, "softcap": -1.0}
    try:
        tw.context_parallel_attention(*leaves, **options)
    except ValueError as error:
        return f"{error} // {error.__cause__}"
    return "not told"


def with_lengths(
    rank: Rank, layout: Layout, tensors: dict[str, Tensor], rows: list[list[int]]
) -> list[Tensor]:
    """out under one mask, whose lengths are written anew before each call."""
    lengths = torch.tensor(rows[0])
    mask = tw.causal() & tw.key_padding(lengths)
    group, found = rank.groups[layout.ranks], []
    for row in rows:
        lengths.copy_(torch.tensor(row))
        q, k, v = (layout.shard(tensors[name], rank.index) for name in "qkv")
        options: dict[str, Any] = {"layout": layout, "group": group, "schedule": "ring"}
        found.append(tw.context_parallel_attention(q, k, v, mask=mask, **options))
    return found


def decoded(
    rank: Rank, layout: Layout, tensors: dict[str, Tensor], options: dict[str, Any]
) -> tuple[Tensor, dict[str, int]]:
    named, options = ({n: there(rank, x) for n, x in y.items()} for y in (tensors, options))
    k, v = (layout.shard(named.pop(name), rank.index) for name in "kv")
    group, q = rank.groups[layout.ranks], named.pop("q")
    with count_traffic() as counted:
        out = tw.context_parallel_decode(q, k, v, layout=layout, group=group, **named, **options)
    return out, counted.received


def decoded_then(
    rank: Rank, layout: Layout, calls: list[dict[str, Any]], checks: bool = False
) -> None:
    """Decoding calls one after the other, the last of them odd on rank 1.

    calls: their M, and arguments of this rank or, by "odd", of rank 1 alone.
    """
    group = rank.groups[layout.ranks]
    os.environ["TILEWISE_CHECK"] = "1" if checks else "0"
    try:
        for call in calls:
            options = dict(call)
            odd = options.pop("odd", {})
            options |= odd if rank.index == 1 else {}
            generator = torch.Generator().manual_seed(options.pop("seed", 0))
            q = torch.randn(1, options.pop("M", 1), 4, 16, generator=generator)
            q.requires_grad_(options.pop("requires_grad", False))
            own = layout.lengths[rank.index]
            k, v = (torch.ones(1, own, 2, size) for size in (16, 8))
            tw.context_parallel_decode(q, k, v, **{"layout": layout, "group": group, **options})
    finally:
        del os.environ["TILEWISE_CHECK"]


def unsharded(rank: Rank, layout: Layout, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The whole from shards, and the gradient of a loss that weighs it by rank."""
    leaf = layout.shard(x, rank.index).clone().to(rank.device).requires_grad_()
    mesh = DeviceMesh.from_group(rank.groups[layout.ranks], rank.device.type)
    whole = unshard(leaf, layout, mesh=mesh)
    (whole * weights[rank.index].to(rank.device)).sum().backward()
    return [whole.detach(), leaf.grad]


class Block(nn.Module):
    """Attention between projections, over a sequence that this rank holds a part of."""

    def __init__(self, way: dict[str, Any], width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.way, self.heads = way, heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = tw.context_parallel_attention(
            q, k, v, mask=tw.causal(), sinks=self.sinks, **self.way
        )
        return x + self.out(torch.relu(mixed.flatten(2)))


def block_gradients(rank: Rank, layout: Layout, x: Tensor, how: str) -> list[Tensor]:
    """Gradients of a block's parameters, summed over ranks, run in some way of PyTorch's."""
    torch.manual_seed(0)
    group = rank.groups[layout.ranks]
    block: Any = Block({"group": group, "layout": layout, "schedule": "ring"}).to(rank.device)
    own_x = layout.shard(x, rank.index).to(rank.device)
    parameters = list(block.parameters())
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, rank.device.type)
        fully_shard(block, mesh=mesh)
        block(own_x).square().sum().backward()
        # FSDP takes the mean over ranks.
        return [p.grad.full_tensor() * layout.ranks for p in block.parameters()]
    run = block
    if how == "compile":
        run = torch.compile(block, backend="eager")
    if how == "checkpoint":
        from torch.utils.checkpoint import checkpoint

        def run(x: Tensor) -> Tensor:
            return checkpoint(block, x, use_reentrant=False)

    run(own_x).square().sum().backward()
    grads = [p.grad for p in parameters]
    for grad in grads:
        dist.all_reduce(grad, group=group)
    return grads


def two_meshes(rank: Rank, x: Tensor) -> Tensor:
    """Tensor parallelism over heads on one dim of a mesh, context parallelism on the other."""
    mesh = rank.meshes[(2, 2)]
    layout = zigzag(x.shape[1], 2)
    tensors = qkv(x.shape[1], (4, 2))
    tp = mesh.get_local_rank(1)
    q, k, v = (
        layout.shard(t, mesh.get_local_rank(0)).chunk(2, 2)[tp].clone() for t in tensors.values()
    )
    group = mesh.get_group(0)
    out = tw.context_parallel_attention(q, k, v, mask=tw.causal(), group=group, layout=layout)
    heads = [torch.empty_like(out) for _ in range(2)]
    dist.all_gather(heads, out.contiguous(), group=mesh.get_group(1))
    return unshard(torch.cat(heads, 2), layout, group=group)


def explained(rank: Rank, ranks: int, size: int, heads: tuple[int, int], mesh: Any) -> list[Any]:
    where = {"group": rank.groups[ranks]} if mesh is None else {"mesh": rank.meshes[mesh]}
    layout = zigzag(size, ranks)
    leaves = [layout.shard(x, rank.index).requires_grad_() for x in qkv(size, heads).values()]
    choice = tw.explain_schedule(*leaves, layout=layout, **where)
    out = tw.context_parallel_attention(*leaves, layout=layout, **where)
    return [choice.name, choice.reason, dict(choice.rejected), dict(choice.received), out.detach()]


def explained_with(rank: Rank, way: Way, heads: tuple[int, int], options: dict[str, Any]) -> str:
    """The schedule that is named, of a call that then runs."""
    leaves = own(rank, way, qkv(way.layout.size, heads))
    name = tw.explain_schedule(*leaves, **options, **place(rank, way)).name
    tw.context_parallel_attention(*leaves, **options, **place(rank, way)).sum().backward()
    return name


def trained_model(
    rank: Rank, ranks: int, config: Any, batch: dict[str, Tensor], mask: Any, way: dict[str, Any]
) -> tuple[Tensor, list[Tensor]]:
    """Loss and parameter gradients of a model of Transformers, summed over ranks."""
    from transformers import AutoModelForCausalLM

    from tilewise.integrations.transformers import ContextParallel, register

    group = rank.groups[ranks]
    spread = ContextParallel(group=group, schedule=way["schedule"])
    register("tilewise_ranks", context_parallel=spread)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tilewise_ranks")
    loss = model(**spread.shard(batch, mask=mask)).loss
    loss.backward()
    results = [loss.detach(), *(p.grad for p in model.parameters())]
    for x in results:
        dist.all_reduce(x, group=group)
    return results[0], results[1:]


def benched(rank: Rank, request: Any) -> list[Any]:
    """The bench's own job, in the process group of all ranks."""
    from tilewise.bench.parallel.ranks import measure_here

    return measure_here(request)


def benched_wrong(rank: Rank, request: Any) -> list[Any]:
    """The same with a ring that is wrong."""
    from tilewise.bench.parallel import contestants
    from tilewise.bench.parallel.ranks import measure_here

    right = contestants.Run.local

    def wrong(run: Any, *arguments: Any) -> Any:
        found = right(run, *arguments)
        is_ring = run.prepared.schedule == "ring"
        return found._replace(out=found.out * 1.01) if is_ring else found

    contestants.Run.local = wrong
    try:
        return measure_here(request)
    finally:
        contestants.Run.local = right


def parted(rank: Rank, cell: Any, form: dict[str, Any]) -> list[dict[str, int]]:
    """How often a ring and its parts call the core, and what they receive."""
    from tilewise.bench.parallel.contestants import build_ours, work_of
    from tilewise.parallel import pieces

    layout = cell.layout(2)
    shapes = [(1, layout.lengths[rank.index], form[h], form["D"]) for h in ("H", "G", "G", "H")]
    work = work_of([torch.randn(s) for s in shapes], cell.build_mask(), has_gradients=True)
    one = build_ours(work, layout, "ring", rank.groups[2])
    right, found = pieces.arguments_of, []

    def counted(*arguments: Any) -> Any:
        found[-1]["calls"] += 1
        return right(*arguments)

    pieces.arguments_of = counted
    try:
        for call in (one.call, *(one.parts[name] for name in ("local", "messages", "neither"))):
            found.append({"calls": 0})
            with count_traffic() as traffic:
                call()
            found[-1]["received"] = traffic.total
    finally:
        pieces.arguments_of = right
    return found


def traced(rank: Rank, request: Any) -> None:
    from tilewise.bench.parallel.trace import record, traced_cell

    record(request, traced_cell(request.cells))


def example(rank: Rank, ranks: int, text: Tensor, settings: Any) -> list[float]:
    """The loss curve of examples/train_long.py."""
    from examples import train_long

    return train_long.train(text, settings, rank.groups[ranks])


def weighed(rank: Rank, way: Way, tensors: dict[str, Tensor]) -> int:
    """The most bytes alive in a step, above the tensors that the rank was given."""
    from tilewise.bench.memory import observe

    leaves = own(rank, way, tensors)

    def step() -> None:
        out = tw.context_parallel_attention(*leaves, mask=tw.causal(), **place(rank, way))
        torch.autograd.grad(out.sum(), leaves)

    # Plans are made before, once for all steps.
    step()
    return observe(step, torch.device("cpu")).peak_bytes


def under_autocast(rank: Rank, layout: Layout, tensors: dict[str, Tensor]) -> Tensor:
    leaves = [layout.shard(x, rank.index) for x in tensors.values()]
    group = rank.groups[layout.ranks]
    with torch.autocast("cpu", torch.bfloat16):
        return tw.context_parallel_attention(*leaves, layout=layout, group=group)


def prepared_ahead(rank: Rank, way: Way) -> list[int]:
    """How many agreements the preparation, a forward and backward, and another mask take."""
    from tilewise.parallel import comm, context_parallel_prepare

    counts = []
    asked = comm.Link.gather_objects

    def counted(link: Any, value: object) -> list[Any]:
        counts[-1] += 1
        return asked(link, value)

    comm.Link.gather_objects = counted
    try:
        leaves = own(rank, way, qkv(way.layout.size))
        options = {**place(rank, way), "mask": tw.documents([0, 5, way.layout.size])}
        counts.append(0)
        context_parallel_prepare(*leaves, **options)
        counts.append(0)
        for _ in range(3):
            tw.context_parallel_attention(*leaves, **options).sum().backward()
        counts.append(0)
        options["mask"] = tw.documents([0, 7, way.layout.size])
        tw.context_parallel_attention(*leaves, **options)
    finally:
        comm.Link.gather_objects = asked
    return counts


def anew(rank: Rank, way: Way) -> list[Tensor]:
    """The same call over groups made one after the other, the first of them gone."""
    found = []
    for _ in range(2):
        group = dist.new_group(list(range(way.ranks)))
        if rank.index < way.ranks:
            leaves = own(rank, way, qkv(way.layout.size))
            options = {**place(rank, way), "mask": tw.causal(), "group": group}
            found.append(tw.context_parallel_attention(*leaves, **options).detach())
            dist.destroy_process_group(group)
    return found


def gradients_of_a_block(x: Tensor) -> list[Tensor]:
    """Of the parameters of `Block` on one rank, in x's dtype."""
    torch.manual_seed(0)
    block = Block({}).to(x.dtype)
    q, k, v = block.project(x).unflatten(-1, (3, 4, -1)).unbind(2)
    mixed = tw.attention(q, k, v, mask=tw.causal(), sinks=block.sinks)
    y = x + block.out(torch.relu(mixed.flatten(2)))
    return list(torch.autograd.grad(y.square().sum(), list(block.parameters())))
