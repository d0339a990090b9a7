"""A meter whose clock only the calls move, small grids, and peers that are no kernels."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.bench.cases import Case
from tilewise.bench.gpu.grids import Grid
from tilewise.bench.gpu.measure import Bench
from tilewise.bench.gpu.peers import Roster
from tilewise.bench.peers import TILEWISE, Attend, Peer

CPU = torch.device("cpu")
SHORT = Case("causal", 1100, torch.float32, H=1, D=8)


class Meter:
    """Every call takes `call_s`, or what a fake peer says by moving `now` itself."""

    def __init__(self, call_s: float = 0.001, cache_bytes: int = 0) -> None:
        self.call_s, self.cache_bytes, self.now = call_s, cache_bytes, 0.0
        self.log: list[str] = []
        self.captured: list[int] = []
        self.problem: Exception | None = None

    def active(self) -> Any:
        return nullcontext()

    def sample(self, call: Callable[[], Any], repeats: int) -> float:
        start = self.now
        for _ in range(repeats):
            call()
        return (self.now - start) / repeats or self.call_s

    def sample_host(self, call: Callable[[], Any], repeats: int) -> float:
        self.log.append("host")
        return self.sample(call, min(repeats, 3))

    def capture(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        self.captured.append(len(calls))

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        call()
        return 1_000_000

    def synchronize(self) -> None:
        if self.problem is not None:
            raise self.problem

    def release(self) -> None:
        self.log.append("release")


def ours(meter: Meter, seconds: float, name: str = "Tilewise") -> Peer:
    """Right results, in a time of one's choice."""

    def build(case: Case, device: torch.device) -> Attend:
        right = TILEWISE.build(case, device)

        def attend(q: Tensor, k: Tensor, v: Tensor, **terms: Any) -> Tensor:
            # The plain form of a case takes half.
            meter.now += seconds if case.plain() is not None else seconds / 2
            return right(q, k, v, **terms)

        return attend

    return Peer(name, build, heads_first=False, is_ours=True)


def other(meter: Meter, name: str, seconds: float, factor: float = 1.0) -> Peer:
    """A peer that is right when factor is 1."""

    def build(case: Case, device: torch.device) -> Attend:
        right = TILEWISE.build(case, device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            meter.now += seconds
            return right(q, k, v) * factor

        return attend

    return Peer(name, build, heads_first=False, version=f"{name} 1.0")


def raising(name: str, error: Exception, *, is_ours: bool = False) -> Peer:
    def build(case: Case, device: torch.device) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor, **terms: Any) -> Tensor:
            raise error

        return attend

    return Peer(name, build, heads_first=False, is_ours=is_ours)


def bench(meter: Meter, own: Sequence[Peer], peers: Sequence[Peer] = (), **options: Any) -> Bench:
    return Bench(CPU, meter, Roster(tuple(own), tuple(peers), {}), rounds=3, **options)


def grid(*cases: Case, peers: Sequence[Peer] = ()) -> Grid:
    return Grid("test", cases, tuple(peer.name for peer in peers))


def flash_attn_module(result: Callable[[Tensor], Any]) -> Any:
    """FlashAttention's functions over our own; `calls` records what they were given."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = (None, None)
    ) -> Any:
        calls.append({"causal": causal, "window_size": window_size})
        mask = tilewise.causal() if causal else tilewise.full()
        if window_size[0] is not None:
            mask = mask & tilewise.window(*window_size)
        return result(tilewise.attention(q, k, v, mask=mask))

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool, **lengths: Any
    ) -> Any:
        calls.append({"causal": causal, **lengths})
        mask = tilewise.causal() if causal else tilewise.full()
        return result(tilewise.attention_varlen(q, k, v, mask=mask, **lengths))

    return SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func, calls=calls
    )
