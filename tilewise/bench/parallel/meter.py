"""How long a call of all ranks takes on this one: the CPU's clock, or a GPU's events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# GPUs sleep while their hosts get ahead of them, so that no sample holds the wait for a launch.
_CYCLES_PER_SECOND = 1.98e9
_LEAD_SECONDS, _MOST_SECONDS = 2e-3, 0.3
_MOST_REPEATS = 20
# What takes longer is called once a sample, and its first sample counts.
LONG_S = 0.4


class RankMeter:
    """Every rank makes the same calls of it. sample_s: the least time of a sample."""

    def __init__(self, device: str, sample_s: float) -> None:
        self._is_gpu, self._sample_s = device.startswith("cuda"), sample_s
        self._flag = torch.zeros(1, device=device)
        self._host: dict[int, float] = {}

    def warm_up(self, call: Callable[[], Any], *, is_compiled: bool) -> float:
        """The seconds of the slowest rank, once what is set up at first has been.

        is_compiled: whether such a call was made before, of another length.
        """
        seconds = self._slowest(self.sample(call, 1))
        is_settled = is_compiled and seconds > LONG_S
        return seconds if is_settled else self._slowest(self.sample(call, 1))

    def repeats_of(self, seconds: float) -> int:
        """How often a sample calls what takes so long."""
        return min(_MOST_REPEATS, max(1, round(self._sample_s / max(1e-9, seconds))))

    def _slowest(self, seconds: float) -> float:
        found = self._flag.new_tensor(seconds)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def sample(self, call: Callable[[], Any], repeats: int) -> float:
        """Seconds of one call, of so many in a row, from when all ranks are ready."""
        if not self._is_gpu:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - start) / repeats
        torch.cuda.synchronize()
        host = self._host.get(id(call), 0.0)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        lead = min(_LEAD_SECONDS + 1.5 * repeats * host, _MOST_SECONDS)
        torch.cuda._sleep(int(lead * _CYCLES_PER_SECOND))
        # On the stream: the GPUs leave it together, and no host waits.
        dist.all_reduce(self._flag)
        begin.record()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        self._host[id(call)] = (time.perf_counter() - start) / repeats
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeats
