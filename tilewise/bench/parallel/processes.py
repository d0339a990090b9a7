"""One process a rank on this machine: NCCL on GPUs, gloo on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from . import ranks as over_ranks
from .cells import RankRow, Request

# A rank that is lost ends the others after so long, in place of holding them for good.
_TIMEOUT = timedelta(seconds=60)


def _start(rank: int, ranks: int, folder: str, request: Request) -> None:
    """One process of `spawn`."""
    stores: Any = dist
    store = stores.FileStore(str(Path(folder) / "store"), ranks)
    options: dict[str, Any] = {"backend": "gloo"}
    if request.device == "cuda":
        torch.cuda.set_device(rank)
        options = {"backend": "nccl"}
    else:
        torch.set_num_threads(1)
    dist.init_process_group(store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT, **options)
    try:
        rows = over_ranks.measure_here(request)
        if rank == 0:
            (Path(folder) / "rows.json").write_text(over_ranks.as_text(rows))
    finally:
        dist.destroy_process_group()


def spawn(ranks: int, request: Request) -> list[RankRow]:
    """The rows of `ranks` processes."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = torch.multiprocessing
        processes.spawn(_start, args=(ranks, folder, request), nprocs=ranks, join=True)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    return [RankRow(**row) for row in rows]
