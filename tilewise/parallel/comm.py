"""Messages between ranks, and the count of their bytes.

A thin layer over `torch.distributed`: nothing here waits for a GPU. A `Pending` keeps its buffers
alive until it is waited for; on NCCL that makes the current stream wait, not the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# GPU cycles by which messages start before the kernel after them: 10 us of an H200.
_HEAD_START = 20_000
# torch 2.13 renamed it.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """Bytes that this process received from other ranks, by what they were sent for."""

    received: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.received.values())


# Backward runs on threads of autograd, so this is not a context variable.
_open: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this process receives inside the block, backward included."""
    traffic = Traffic()
    _open.append(traffic)
    try:
        yield traffic
    finally:
        _open.remove(traffic)


def _count(kind: str, n_bytes: int) -> None:
    for traffic in _open:
        traffic.received[kind] = traffic.received.get(kind, 0) + n_bytes


@contextmanager
def _explained() -> Iterator[None]:
    """Say of a message that failed what may be the reason: the backends speak of sockets alone."""
    try:
        yield
    # A message that was meant for another call may fail in any way, while it is unpickled too.
    except Exception as error:
        raise RuntimeError(
            f"A message between ranks failed: {error}\nanother rank may be in a call that it made "
            "before; TILEWISE_CHECK=1 compares every call."
        ) from error


@dataclass
class Pending:
    """Messages under way; `wait` before their buffers are used."""

    works: list[Any]
    buffers: list[Tensor]

    def wait(self) -> None:
        with _explained():
            for work in self.works:
                work.wait()
        self.works, self.buffers = [], []


@dataclass(frozen=True)
class Link:
    """A process group as one rank of it sees it. group is None for a rank by itself."""

    group: Any
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: Any) -> Link:
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def alone(cls) -> Link:
        return cls(None, 0, 1)

    @_explained()
    def exchange(
        self, kind: str, sent: tuple[Tensor, int], received: tuple[Tensor, int]
    ) -> Pending:
        """Send one tensor to a rank and receive one from a rank; empty ones do not travel."""
        ops = []
        for op, (tensor, peer) in ((dist.isend, sent), (dist.irecv, received)):
            if tensor.numel():
                there = dist.get_global_rank(self.group, peer)
                ops.append(dist.P2POp(op, tensor, there, self.group))
        _count(kind, received[0].nbytes)
        works = dist.batch_isend_irecv(ops) if ops else []
        return Pending(works, [sent[0], received[0]])

    def give_way(self, x: Tensor) -> None:
        """Let messages about x that were handed over begin before what is launched next.

        Both wait for the same kernel, and an attention kernel whose programs fill the GPU until its
        end would leave a message no processor to travel with. Nothing on the CPU.
        """
        if x.is_cuda:
            torch.cuda._sleep(_HEAD_START)

    @_explained()
    def all_gather(self, kind: str, x: Tensor) -> tuple[Tensor, Pending]:
        """`[R, *x.shape]`, x alike in shape on every rank."""
        found = x.new_empty(self.ranks, *x.shape)
        if x.numel() == 0:
            return found, Pending([], [])
        rows = found.flatten(0, 1) if x.dim() else found
        work = _all_gather(rows, x.contiguous(), group=self.group, async_op=True)
        _count(kind, (self.ranks - 1) * x.nbytes)
        return found, Pending([work], [x, found])

    @_explained()
    def all_to_all(
        self, kind: str, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Pending]:
        """A flat tensor whose r-th part, of `sent[r]` elements, goes to rank r; parts come back."""
        found = x.new_empty(sum(received))
        works = []
        if sum(sent) or sum(received) or self.ranks > 1:
            work = dist.all_to_all_single(
                found, x, list(received), list(sent), group=self.group, async_op=True
            )
            works.append(work)
        _count(kind, (sum(received) - received[self.rank]) * x.element_size())
        return found, Pending(works, [x, found])

    @_explained()
    def broadcast(self, x: Tensor) -> None:
        """Rank 0's x to every rank, in place."""
        if self.ranks > 1:
            dist.broadcast(x, dist.get_global_rank(self.group, 0), group=self.group)

    @_explained()
    def gather_objects(self, value: object) -> list[Any]:
        """The value of every rank, on every rank. For small things, rarely."""
        if self.ranks == 1:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.group)
        return found

    @_explained()
    def gather_digests(self, digest: bytes) -> list[bytes]:
        """The digest of every rank, all of one length, on every rank. In tensors on the CPU."""
        if self.ranks == 1:
            return [digest]
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        found = torch.empty(self.ranks * len(digest), dtype=torch.uint8, device="cpu")
        _all_gather(found, mine, group=self.group)
        return [bytes(row) for row in found.view(self.ranks, -1).tolist()]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor of all, so that one message carries them."""
    return torch.cat([x.reshape(-1) for x in tensors])


def unflatten(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Views of the parts of a flat tensor."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
