"""The meter of a GPU on a CUDA that only writes down what it is asked."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewise.bench.gpu import meter as gpu_meter
from tilewise.bench.gpu.meter import CudaMeter

DEVICE = torch.device("cuda")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called, in order; time between two events is 5 ms."""
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("wait for event")

        def elapsed_time(self, end: "Event") -> float:
            return 5.0

    class Graph:
        def replay(self) -> None:
            said.append("replay")

    def graph(captured: Graph, stream: str) -> Any:
        said.append(f"capture on {stream}")
        return nullcontext()

    fakes: dict[str, Any] = {
        "Event": Event,
        "Stream": lambda device: "side stream",
        "CUDAGraph": Graph,
        "graph": graph,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(said.append(f"enter {stream}")),
        "synchronize": lambda device: said.append("synchronize"),
        "_sleep": lambda cycles: said.append("sleep"),
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=60_000_000),
        "memory_allocated": lambda device: 1000,
        "max_memory_allocated": lambda device: 1700,
        "reset_peak_memory_stats": lambda device: said.append("reset"),
        "empty_cache": lambda: said.append("empty"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return said


def test_a_sample_is_timed_by_events_behind_a_sleep(log: list[str]) -> None:
    seconds = CudaMeter(DEVICE).sample(lambda: log.append("call"), 2)
    assert seconds == 0.0025
    assert log == [
        *("synchronize", "call", "synchronize"),
        *("sleep", "record", "call", "call", "record", "wait for event"),
    ]


def test_the_sleep_is_as_long_as_the_host_takes(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    meter = CudaMeter(DEVICE)
    for host in (1e-6, 1e-3, 10.0):
        monkeypatch.setattr(meter, "sample_host", lambda call, repeats, host=host: host)
        meter.sample(lambda: None, 20)
    short, long, longest = (cycles / 1.98e9 for cycles in slept)
    assert short < 0.0011 and 0.03 < long < 0.04 and longest < 0.21


def test_a_graph_is_captured_warm_and_on_the_side_stream(log: list[str]) -> None:
    meter = CudaMeter(DEVICE)
    with meter.active():
        replay = meter.capture([lambda: log.append("a"), lambda: log.append("b")])
        replay()
    assert log == [
        "enter side stream",
        *("a", "b", "synchronize"),
        *("capture on side stream", "a", "b"),
        "replay",
    ]


def test_the_hosts_time_is_the_median_and_the_queue_stays_short(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([0.0, 5.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(gpu_meter.time, "perf_counter", lambda: next(readings))
    monkeypatch.setattr(gpu_meter, "_QUEUED", 2)
    assert CudaMeter(DEVICE).sample_host(lambda: log.append("call"), 3) == 3.0
    assert log == ["synchronize", "call", "call", "synchronize", "call", "synchronize"]


def test_memory_is_the_peak_above_what_was_there(log: list[str]) -> None:
    meter = CudaMeter(DEVICE)
    assert meter.peak_bytes(lambda: log.append("call")) == 700
    assert log == ["synchronize", "reset", "call", "synchronize"]
    meter.release()
    assert log[-1] == "empty"


def test_the_last_cache_is_the_devices(log: list[str]) -> None:
    assert CudaMeter(DEVICE).cache_bytes == 60_000_000
