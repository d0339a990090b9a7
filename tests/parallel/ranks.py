"""Processes that are ranks: eight of them with gloo, started once, each waiting for jobs.

A job is a module-level function that gets a `Rank` first. What it returns comes back by rank; if it
raises on a rank, `RankError` says where and why. The processes are forked from a server that has
imported torch, which takes a second in place of one import each.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

WORLD = 8
SIZES = (1, 2, 3, 4, 8)
MESHES = ((2, 2), (2, 4), (4, 2), (1, 2), (2, 1))
# What ranks import, once, in the server that they are forked from. DeviceMesh imports dynamo.
_PRELOADED = ["torch", "torch._dynamo", "tilewise.parallel.api", "tests.parallel.over_ranks"]
# Of gloo's own waiting, and of the test's for a rank.
TIMEOUT_S, PATIENCE_S = 30, 50


class RankError(Exception):
    """What a rank raised. kinds: the exception's type by rank, None where there was none."""

    def __init__(self, problems: dict[int, tuple[str, str]]) -> None:
        self.kinds = {rank: kind for rank, (kind, _) in problems.items()}
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, (_, text) in problems.items()))


@dataclass
class Rank:
    """What a job knows of where it runs. kept: lives from job to job."""

    index: int
    groups: dict[int, Any]
    meshes: dict[tuple[int, int], DeviceMesh]
    kept: dict[str, Any]


Job = Callable[..., Any]


class Ranks:
    """The pool: `run` sends a job to the first ranks. A failure may end it; it then starts anew."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, ranks: int, job: Job, *arguments: Any) -> list[Any]:
        self._start()
        message = pickle.dumps((job, arguments))
        for pipe in self._pipes[:ranks]:
            pipe.send_bytes(message)
        results, problems = [], {}
        for rank, pipe in enumerate(self._pipes[:ranks]):
            # Once one has failed, the others may wait for it in vain.
            if not pipe.poll(5 if problems else PATIENCE_S):
                problems[rank] = ("Silence", "gave no answer")
                continue
            kind, value = pickle.loads(pipe.recv_bytes())
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
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = tempfile.mktemp(prefix="tilewise-ranks-")
        for rank in range(WORLD):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        atexit.register(self.stop)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _serve(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, WORLD),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    # Buffers that are not written show.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    meshes = {
        shape: DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).reshape(shape).tolist())
        for shape in MESHES
    }
    known = Rank(rank, groups, meshes, {})
    while True:
        try:
            job, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(PATIENCE_S / 2)
        try:
            answer = ("result", job(known, *arguments))
        except Exception as error:
            answer = (type(error).__name__, f"{error}\n{traceback.format_exc()[-1500:]}")
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(answer))


RANKS = Ranks()
