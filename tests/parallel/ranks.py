"""Processes that are ranks: eight of them with gloo, started once, each waiting for jobs; with NCCL
two or four, a GPU each.

A job is a module-level function that gets a `Rank` first. What it returns comes back by rank; if it
raises on a rank, `RankError` says where and why. The processes are forked from a server that has
imported torch, which takes a second in place of one import each.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.helpers import UNDER_TEST
from tilewise.dense.choice import torch_mode_unheeded

WORLD = 8
SIZES = (1, 2, 3, 4, 8)
MESHES = ((2, 2), (2, 4), (4, 2), (1, 2), (2, 1))
# With NCCL a group is a communicator; one serves all that every rank is in.
GPU_MESHES = {2: ((1, 2), (2, 1)), 4: ((2, 2), (1, 4), (4, 1))}
# What ranks import, once, in the server that they are forked from. DeviceMesh imports dynamo.
_PRELOADED = ["torch", "torch._dynamo", "tilewise.parallel.api", "tests.parallel.over_ranks"]
# Of a backend's own waiting, and of the test's for a rank: on a GPU, kernels are compiled too.
WAITING_S = {"gloo": (30, 50), "nccl": (90, 120)}


class RankError(Exception):
    """What a rank raised. kinds: the exception's type by rank, None where there was none."""

    def __init__(self, problems: dict[int, tuple[str, str]]) -> None:
        self.kinds = {rank: kind for rank, (kind, _) in problems.items()}
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text) in problems.items()))


@dataclass
class Rank:
    """What a job knows of where it runs. kept: lives from job to job."""

    index: int
    device: torch.device
    groups: dict[int, Any]
    meshes: dict[tuple[int, int], DeviceMesh]
    kept: dict[str, Any]


Job = Callable[..., Any]


class Ranks:
    """The pool: `run` sends a job to the first ranks. A failure may end it; it then starts anew.

    is_turned: on GPUs, whether pools of other processes take turns. A GPU gives each process a
    slice of time, and two that wait for each other's messages seldom have theirs at once.
    """

    def __init__(self, backend: str = "gloo") -> None:
        self.backend, self.is_turned = backend, backend == "nccl"
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    @property
    def world(self) -> int:
        """Asked for when it is needed: this module is imported before `--device` is read."""
        return WORLD if self.backend == "gloo" else count_gpu_ranks()

    def run(self, ranks: int, job: Job, *arguments: Any) -> list[Any]:
        assert 0 < ranks <= self.world, f"{ranks} ranks of {self.world}"
        self._start()
        with self._turn():
            return self._run(ranks, job, *arguments)

    def rehearse(self, job: Job, *arguments: Any) -> None:
        """A job of rank 0 by itself, without a turn; what it raises does not matter."""
        self._start()
        with suppress(RankError):
            self._run(1, job, *arguments)

    def _run(self, ranks: int, job: Job, *arguments: Any) -> list[Any]:
        message = pickle.dumps((job, arguments))
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(message)
        results, problems = [], {}
        for rank, pipe in enumerate(self._pipes[:ranks]):
            # Once one has failed, the others may wait for it in vain.
            if not pipe.poll(5 if problems else WAITING_S[self.backend][1]):
                problems[rank] = ("Silence", "gave no answer")
                continue
            try:
                kind, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                kind, value = "Silence", "is gone"
            if kind == "result":
                results.append(value)
            else:
                problems[rank] = (kind, value)
        if problems:
            if (
                any(
                    kind in ("Silence", "DistBackendError", "RuntimeError")
                    for kind, _ in problems.values()
                )
                or len(problems) < ranks
            ):
                self.stop()
            raise RankError(problems)
        return results

    def _start(self) -> None:
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.stop()
        # A process that is forked from one that asked for GPUs may have none.
        context: Any = mp.get_context("spawn" if self.is_turned else "forkserver")
        if not self.is_turned:
            context.set_forkserver_preload(_PRELOADED)
        store = tempfile.mktemp(prefix="tilewise-ranks-")
        for rank in range(self.world):
            here, there = context.Pipe()
            arguments = (self.backend, rank, self.world, store, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        atexit.register(self.stop)
        # Imports run side by side; the first messages are those that make a communicator.
        ready = [pipe.recv_bytes() for pipe in self._pipes]
        with self._turn():
            for pipe, message in zip(self._pipes, ready, strict=True):
                pipe.send_bytes(message)
            for pipe in self._pipes:
                pipe.recv_bytes()

    def _turn(self) -> AbstractContextManager[None]:
        return _turn() if self.is_turned else nullcontext()

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


@contextmanager
def _turn() -> Iterator[None]:
    """One at a time of all the processes of a test run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with open(Path(tempfile.gettempdir()) / f"tilewise-turn-{run}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _serve(backend: str, rank: int, world: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # The ranks compare what they call at its first use, as they do for users.
    os.environ["TILEWISE_CHECK"] = "0"
    if backend == "nccl":
        torch.zeros(1, device=torch.device("cuda", rank))
        torch.cuda.set_device(rank)
    pipe.send_bytes(b"ready")
    pipe.recv_bytes()
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=WAITING_S[backend][0]),
    )
    # Buffers that are not written show. Not all of torch's own has a fixed order on a GPU.
    torch.use_deterministic_algorithms(True, warn_only=backend == "nccl")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    if world == WORLD:
        known = _many(rank)
    else:
        known = _few(rank, world, "cuda" if backend == "nccl" else "cpu")
    pipe.send_bytes(b"joined")
    # New memory is to be filled; the kernels are those of users.
    with torch_mode_unheeded():
        _serve_jobs(known, pipe, WAITING_S[backend][1])


def _serve_jobs(known: Rank, pipe: Any, patience_s: float) -> None:
    while True:
        try:
            job, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(patience_s / 2)
        try:
            answer = ("result", job(known, *arguments))
        except Exception as error:
            answer = (type(error).__name__, f"{error}\n{traceback.format_exc()[-1500:]}")
        faulthandler.cancel_dump_traceback_later()
        try:
            message = pickle.dumps(_on_host(answer))
        except Exception as error:
            message = pickle.dumps((type(error).__name__, str(error)))
        pipe.send_bytes(message)


def _many(rank: int) -> Rank:
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    meshes = {
        shape: DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).reshape(shape).tolist())
        for shape in MESHES
    }
    return Rank(rank, torch.device("cpu"), groups, meshes, {})


def _few(rank: int, world: int, device: str) -> Rank:
    """One communicator for all ranks, one for some of four, none for a rank by itself."""
    alone = [dist.new_group([index]) for index in range(world)][rank]
    everyone: Any = dist.group.WORLD
    groups = {1: alone, world: everyone}
    if world == 4:
        groups[2], groups[3] = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    meshes = {}
    for shape in GPU_MESHES[world]:
        at = torch.arange(world).reshape(shape)
        if 1 in shape:
            pair = [alone, everyone] if shape[0] == 1 else [everyone, alone]
            meshes[shape] = DeviceMesh.from_group(pair, device, at, mesh_dim_names=("r", "u"))
        else:
            meshes[shape] = DeviceMesh(device, at.tolist())
    dist.all_reduce(torch.zeros(1, device=device))
    found = torch.device(device, rank) if device == "cuda" else torch.device(device)
    return Rank(rank, found, groups, meshes, {})


def _on_host(value: Any) -> Any:
    """A copy in which every tensor is on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu() if value.is_cuda else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_on_host(x) for x in value)
    if isinstance(value, list):
        return [_on_host(x) for x in value]
    return {k: _on_host(x) for k, x in value.items()} if isinstance(value, dict) else value


def count_gpu_ranks() -> int:
    """As many as there are GPUs for, two or four; fewer than two are none."""
    count = torch.cuda.device_count() if UNDER_TEST.device == "cuda" else 0
    return 4 if count >= 4 else 2 if count >= 2 else 0


RANKS = Ranks()
GPU_RANKS = Ranks("nccl")
POOLS = {"gloo": RANKS, "nccl": GPU_RANKS}
