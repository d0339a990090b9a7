"""One cell of a grid: first calls, verification, then interleaved rounds of all contestants.

A contestant of ours that is wrong or raises is refused; a peer that is wrong is refused too, and
one that raises is said not to run the case.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..cases import BOTH, HOST, HOST_GRAD, Case
from ..harness import (
    NOT_RUN,
    REFUSED,
    TIMED,
    Timing,
    describe_error,
    judge_short,
    lacks_memory,
    run_short,
    time_rounds,
)
from ..peers import Peer, bind, explain_choice
from .cells import GRAPH, HOST_CLOCK, STREAM, Cell, Entry
from .grids import Grid
from .meter import Call, Meter
from .peers import Roster

# Up to this length the host's time would be longer than the GPU's.
_GRAPH_LENGTH = 1024
_GRAPH_CALLS = 10
# Tensors take turns until together they are this many times the last cache.
_CACHES = 2
_MOST_SETS = 32
_SAMPLE_S = 0.01
# The first line of a compiler's complaint says enough.
_NOTE_LENGTH = 300


@dataclass
class Bench:
    """What the cells of one run share.

    ceiling_tflops: what a matrix product reaches in the same run. verdicts: by contestant and
    verified form, since many cases have the same one.
    """

    device: torch.device
    meter: Meter
    roster: Roster
    rounds: int = 7
    ceiling_tflops: float | None = None
    verdicts: dict[tuple[str, Case], tuple[str, str]] = field(default_factory=dict)


@dataclass
class _Contestant:
    """Who runs what: the case itself or its plain form. run: what is timed, so many calls."""

    peer: Peer
    case: Case
    entry: Entry
    single: Call | None = None
    run: Call | None = None
    calls_per_run: int = 1


def measure_cell(bench: Bench, grid: Grid, case: Case) -> Cell:
    """Measure a case with everybody who is asked and serves it."""
    bench.meter.release()
    cell = Cell(grid.name, case, _way(case), count_sets(case, bench.meter.cache_bytes))
    contestants = _enlist(cell, grid, bench)
    # What goes wrong in one cell, such as tensors that do not fit, is no reason to lose the others.
    try:
        drawn = [case.draw(bench.device, seed) for seed in range(cell.sets)]
        for contestant in contestants:
            _make_ready(contestant, drawn, cell.way, bench)
        ready = {c.entry.name: c for c in contestants if c.run is not None}
        for name, timing in _time(ready, cell.way, bench).items():
            contestant = ready[name]
            _enter_time(contestant, timing, cell.way, bench)
            if contestant.single is not None:
                contestant.entry.extra_peak_bytes = bench.meter.peak_bytes(contestant.single)
    except Exception as error:
        cell.note = _short(describe_error(error))
    return cell


def count_sets(case: Case, cache_bytes: int) -> int:
    """How many sets of q, k, v and dout take turns: more than one where they fit in the cache."""
    heads = 2 * (case.H + case.kv_heads)
    set_bytes = case.B * case.length * heads * case.D * case.dtype.itemsize
    if set_bytes > cache_bytes:
        return 1
    return min(_MOST_SETS, math.ceil(_CACHES * cache_bytes / set_bytes))


def _way(case: Case) -> str:
    if case.direction in (HOST, HOST_GRAD):
        return HOST_CLOCK
    return GRAPH if case.length <= _GRAPH_LENGTH else STREAM


def _enlist(cell: Cell, grid: Grid, bench: Bench) -> list[_Contestant]:
    """The contestants in order, each with an entry in the cell."""
    case, found = cell.case, []
    for peer in bench.roster.ours:
        if peer.serves(case, bench.device):
            cell.ours.append(Entry(peer.name, peer.version, True))
            found.append(_Contestant(peer, case, cell.ours[-1]))
    plain, ours = case.plain(), bench.roster.ours[0]
    if plain is not None:
        cell.plain = Entry(f"{ours.name}, plain", ours.version, True)
        found.append(_Contestant(ours, plain, cell.plain))
    for peer in bench.roster.peers:
        if peer.name in grid.peers and peer.serves(case, bench.device):
            cell.peers.append(Entry(peer.name, peer.version, False))
            found.append(_Contestant(peer, case, cell.peers[-1]))
    return found


def _make_ready(
    contestant: _Contestant, drawn: Sequence[tuple[Tensor, ...]], way: str, bench: Bench
) -> None:
    """First call, verification, and one call bound to each set of tensors."""
    peer, case, entry = contestant.peer, contestant.case, contestant.entry
    entry.note = lacks_memory(peer, case, bench.device)
    if entry.note:
        return
    try:
        start = time.perf_counter()
        calls: list[Call] = [bind(peer, case, bench.device, drawn[0])]
        calls[0]()
        bench.meter.synchronize()
        first_call_s = time.perf_counter() - start
        entry.status, entry.note = _verdict(peer, case, bench)
        if entry.note:
            return
        calls += [bind(peer, case, bench.device, tensors) for tensors in drawn[1:]]
        if way == GRAPH:
            calls *= math.ceil(_GRAPH_CALLS / len(calls))
            contestant.run, contestant.calls_per_run = bench.meter.capture(calls), len(calls)
        else:
            contestant.run = _take_turns(calls)
        contestant.single = calls[0]
    # Peers raise whatever their compilers raise.
    except Exception as error:
        entry.status, entry.note = _failure(peer, error)
        return
    if peer.is_ours:
        entry.first_call_s = first_call_s
        entry.backend = explain_choice(case, bench.device, peer.backend).name


def _verdict(peer: Peer, case: Case, bench: Bench) -> tuple[str, str]:
    """Status and note after a short call was held against the oracle; no note if it is right."""
    short = case.verified_form()
    if peer.keeps_grad:
        # It compiles for seconds: one form for both directions and for every batch size.
        short = replace(short, direction=BOTH, B=2)
    key = (peer.name, short)
    if key not in bench.verdicts:
        try:
            note = judge_short(run_short(peer, short, bench.device), short, bench.device)
            bench.verdicts[key] = (REFUSED if note else NOT_RUN, note)
        except Exception as error:
            bench.verdicts[key] = _failure(peer, error)
    return bench.verdicts[key]


def _failure(peer: Peer, error: Exception) -> tuple[str, str]:
    return (REFUSED if peer.is_ours else NOT_RUN), _short(describe_error(error))


def _short(note: str) -> str:
    return note.strip().split("\n")[0][:_NOTE_LENGTH]


def _take_turns(calls: Sequence[Call]) -> Call:
    following = itertools.cycle(calls)

    def run() -> Any:
        return next(following)()

    return run


def _time(ready: dict[str, _Contestant], way: str, bench: Bench) -> dict[str, Timing]:
    runs = {name: contestant.run for name, contestant in ready.items() if contestant.run}
    sample = bench.meter.sample_host if way == HOST_CLOCK else bench.meter.sample
    # A round that does not count, in which the GPU's clocks settle on the work.
    time_rounds(runs, rounds=1, sample=sample, sample_s=_SAMPLE_S)
    return time_rounds(runs, rounds=bench.rounds, sample=sample, sample_s=_SAMPLE_S)


def _enter_time(contestant: _Contestant, timing: Timing, way: str, bench: Bench) -> None:
    entry, calls = contestant.entry, contestant.calls_per_run
    entry.status = TIMED
    entry.timing = Timing(timing.median_s / calls, timing.min_s / calls, timing.max_s / calls)
    if way == HOST_CLOCK:
        return
    entry.tflops = contestant.case.flops() / entry.timing.median_s / 1e12
    if bench.ceiling_tflops:
        entry.percent_of_ceiling = 100 * entry.tflops / bench.ceiling_tflops
