"""What is read off a GPU: times by events, times of CUDA graphs, the host's share, memory.

Everything of a run goes through one side stream, since only there can a backward be captured:
autograd runs it on the stream of its forward.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

# The GPU sleeps while the host gets ahead of it by a whole sample, so that none holds the wait for
# a launch: a millisecond, and what the host takes for the sample's calls, but no more than a fifth
# of a second. In cycles, at the 1.98 GHz of an H200.
_CYCLES_PER_SECOND = 1.98e9
_LEAD_SECONDS, _MOST_SECONDS = 1e-3, 0.2
# Calls that may wait in the queue while the host's time is read; the queue holds about 1000.
_QUEUED = 16


class Meter(Protocol):
    """How a run reads the device; the tests have one of their own.

    cache_bytes: of the device's last cache.
    """

    cache_bytes: int

    def active(self) -> Any:
        """A context in which everything is bound and measured."""

    def sample(self, call: Call, repeats: int) -> float:
        """Seconds that one call takes on the device, of so many in a row."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that replays all of these, with nothing left to do for the host."""

    def sample_host(self, call: Call, repeats: int) -> float:
        """Seconds for which one call holds the host, not waiting for the device: the median."""

    def peak_bytes(self, call: Call) -> int:
        """The most memory alive during the call, above what was there before it."""

    def synchronize(self) -> None:
        """Wait for the device; raises where it has failed."""

    def release(self) -> None:
        """Give memory back that nothing holds."""


class CudaMeter:
    """See `Meter`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)
        self.cache_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size

    @contextmanager
    def active(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def sample(self, call: Call, repeats: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        lead = _LEAD_SECONDS + 1.5 * repeats * self.sample_host(call, 1)
        torch.cuda._sleep(int(min(lead, _MOST_SECONDS) * _CYCLES_PER_SECOND))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    def capture(self, calls: Sequence[Call]) -> Call:
        # What a first call sets up cannot be captured.
        for call in calls:
            call()
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for call in calls:
                call()

        # Holds the calls too: the graph reads their tensors.
        def replay(_held: Sequence[Call] = calls) -> None:
            graph.replay()

        return replay

    def sample_host(self, call: Call, repeats: int) -> float:
        spent = []
        for turn in range(repeats):
            if turn % _QUEUED == 0:
                self.synchronize()
            start = time.perf_counter()
            result = call()
            spent.append(time.perf_counter() - start)
            del result
        self.synchronize()
        return statistics.median(spent)

    def peak_bytes(self, call: Call) -> int:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        result = call()
        self.synchronize()
        del result
        return int(torch.cuda.max_memory_allocated(self._device) - before)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
