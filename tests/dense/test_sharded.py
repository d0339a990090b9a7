"""DTensors and FSDP2 around dense attention, on two processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import FileStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.multiprocessing import spawn

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_within_budget

PLACEMENTS = {"heads": Shard(2), "batch rows": Shard(0), "nothing": Replicate()}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sequence": ({"place": Shard(1)}, "context parallelism"),
    "dropout": ({"dropout_p": 0.1}, "same elements on every rank"),
    "lengths": ({"mask": tw.key_padding([3, 4])}, "masks that hold tensors"),
    "predicate": ({"mask": tw.from_function(lambda b, h, m, n: m > n)}, "masks that hold tensors"),
    "plain sinks": ({"sinks": torch.zeros(4, device="cpu")}, "sinks beside DTensors must be one"),
    "odd heads": ({"heads": 1}, "divisible by the 2 ranks"),
}


def qkv(heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, h, 16) for n, h in ((9, 4), (11, heads), (11, heads))]


class Block(nn.Module):
    """Attention of one layer; under tensor parallelism the local heads are all that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 8)) for layer in (self.q, self.k, self.v))
        return self.o(tw.attention(q, k, v, mask=tw.causal()).flatten(-2))


def block_inputs() -> tuple[Block, Tensor]:
    torch.manual_seed(1)
    return Block(), torch.randn(2, 9, 32)


def run_rank(rank: int, folder: str, device: str) -> None:
    """Everything that needs two processes, left in a file."""
    torch.set_num_threads(1)
    torch.set_default_device(device)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    init_process_group(backend, store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh(device, (2,))
    left: dict[str, Any] = {}
    for name, place in PLACEMENTS.items():
        leaves = [distribute_tensor(x, mesh, [place]).requires_grad_() for x in qkv()]
        terms = {}
        if name != "batch rows":
            over = Shard(0) if name == "heads" else Replicate()
            terms["sinks"] = distribute_tensor(torch.ones(4), mesh, [over]).requires_grad_()
        out, lse = tw.attention_partial(*leaves, mask=tw.causal() & tw.window(5, 0), **terms)
        assert isinstance(out, DTensor) and list(out.placements) == [place]
        (out.square().sum() + lse.sum()).full_tensor().backward()
        gradients = [x.grad for x in (*leaves, *terms.values())]
        assert [list(g.placements) for g in gradients[:3]] == [[place]] * 3
        left[name] = [x.full_tensor().detach() for x in (out, lse, *gradients)]
    for name, (given, _) in REFUSED.items():
        given = dict(given)
        place = given.pop("place", Shard(2))
        leaves = [distribute_tensor(x, mesh, [Replicate()]) for x in qkv(given.pop("heads", 2))]
        leaves = [x.redistribute(placements=[place]) for x in leaves]
        try:
            tw.attention(*leaves, **given)
        except (NotImplementedError, ValueError) as error:
            left[f"refused {name}"] = str(error)
    left |= run_models(mesh)
    torch.save(left, f"{folder}/{rank}.pt")
    destroy_process_group()


def run_models(mesh: Any) -> dict[str, Any]:
    left = {}
    block, x = block_inputs()
    fully_shard(block, mesh=mesh)
    block(x).square().sum().backward()
    left["FSDP2"] = [p.grad.full_tensor() for p in block.parameters()]
    block, x = block_inputs()
    plan = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel()}
    parallelize_module(block, mesh, plan)
    block(x).square().sum().backward()
    left["tensor parallel"] = [p.grad.full_tensor() for p in block.parameters()]
    return left


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Sharded is whole: outputs, lse and every gradient; and what cannot be is refused."""
    if UNDER_TEST.device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    spawn(run_rank, (f"{tmp_path}", UNDER_TEST.device), nprocs=2)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", map_location=UNDER_TEST.device)
                for rank in range(2)]  # fmt: skip
    for name in PLACEMENTS:
        leaves = [x.requires_grad_() for x in qkv()]
        terms = {} if name == "batch rows" else {"sinks": torch.ones(4).requires_grad_()}
        out, lse = tw.attention_partial(*leaves, mask=tw.causal() & tw.window(5, 0), **terms)
        learned = [*leaves, *terms.values()]
        gradients = torch.autograd.grad(out.square().sum() + lse.sum(), learned)
        for rank in of_ranks:
            for got, want in zip(rank[name], (out, lse, *gradients), strict=True):
                want = want.detach()
                assert_within_budget(got, want.double(), want, name=name)
    block, x = block_inputs()
    block(x).square().sum().backward()
    for name in ("FSDP2", "tensor parallel"):
        for rank in of_ranks:
            for got, parameter in zip(rank[name], block.parameters(), strict=True):
                want = parameter.grad
                # The ranks' parts of a sum are added in another order.
                floor = 16 * float(want.abs().max()) * torch.finfo(want.dtype).eps
                assert_within_budget(got, want.double(), want, name=name, floor=floor)
    for name, (_, message) in REFUSED.items():
        assert message in of_ranks[0][f"refused {name}"]
