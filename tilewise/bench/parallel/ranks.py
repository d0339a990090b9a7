"""Schedules over ranks: verified, then timed beside one GPU, beside PyTorch's, and beside
themselves without messages.

"Without messages" runs the same local work over numbers that did not travel, so it is what the rank
would need if links were free; the difference is the time that messages add.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.case import Case
from ...core.tolerance import measure_budget
from ...dense import budget
from ...parallel.comm import count_traffic
from ...parallel.model import H200, Machine, predict
from ...parallel.volumes import Shape
from ..harness import describe_error
from .cells import LONG, Cell, RankRow, Request
from .contestants import (
    BEST_PEER,
    PEERS,
    REPEATED,
    SCHEDULES,
    Call,
    Contestant,
    build_ours,
    build_peer,
    build_single,
    build_variants,
    work_of,
)
from .meter import LONG_S, RankMeter
from .trace import record, traced_cell

_SINGLE = "one GPU"
_COMPILE_SECONDS = 5.0
# Rounds, above the least, end after so long.
_CELL_SECONDS = 7.0
# A peer that is further from the oracle than so many budgets is wrong; ours may use one.
_WRONG = 4.0


@dataclass
class Session:
    """One run in one process group. seconds_per_pair: of a round, by mask and direction."""

    request: Request
    meter: RankMeter
    urgent: Any = None
    start: float = field(default_factory=time.monotonic)
    rows: list[RankRow] = field(default_factory=list)
    problems: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    singles: dict[Cell, float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def is_late(self, expected_s: float) -> bool:
        """Whether what takes so long would end after the time that there is; alike on all ranks."""
        limit = self.request.seconds
        if limit is None:
            return False
        ends = time.monotonic() - self.start + expected_s
        return bool(gathered(ends > limit)[0])

    def expected_s(self, cell: Cell) -> float:
        """What a cell may take, from those like it."""
        rate = self.cost.get(cell.mask + cell.direction)
        if rate is not None:
            return rate * cell.pairs
        return self.cost.get("causal" + cell.direction, 0.0) * cell.pairs + _COMPILE_SECONDS

    def keep(self, row: RankRow) -> None:
        self.rows.append(row)
        if dist.get_rank() == 0:
            print(describe(row), file=sys.stderr, flush=True)
            store(self.request.output, self.rows)


def measure_here(request: Request) -> list[RankRow]:
    """A job of one rank in a process group that is there; the same rows on all ranks."""
    session = Session(request, RankMeter(request.device, request.sample_s))
    if request.has_variants:
        session.urgent = urgent_group()
    traced = traced_cell(request.cells) if request.trace else None
    for cell in request.cells:
        _measure_cell(session, cell)
        if cell == traced:
            record(request, cell)
    return session.rows


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def urgent_group() -> Any:
    """All ranks again, on a stream of high priority; None where the backend has none."""
    if dist.get_backend() != "nccl":
        return None
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(backend="nccl", pg_options=options)


# ---------------------------------------------------------------- one cell


def _measure_cell(session: Session, cell: Cell) -> None:
    request = session.request
    if session.is_late(session.expected_s(cell)):
        form = (session.ranks, cell.mask, cell.tokens, cell.direction)
        note = "left out: the time did not suffice"
        session.keep(RankRow("all", *form, note=note, is_ours=False))
        return
    contestants, rows = _build(session, cell)
    calls: dict[str, tuple[Call, Any]] = {}
    for one in contestants:
        calls[one.name] = (one.call, one.active)
        calls.update({f"{one.name}/{part}": (call, one.active) for part, call in one.parts.items()})
    calls[_SINGLE] = (_build_single(session, cell), nullcontext)
    times = _time(session, calls, cell)
    singles = [statistics.median(x) for x in gathered(times[_SINGLE])]
    session.singles[cell] = statistics.mean(singles)
    # Of each round the slowest rank.
    slowest = {
        name: [max(turn) for turn in zip(*gathered(found), strict=True)]
        for name, found in times.items()
    }
    for one in contestants:
        session.keep(_row(session, cell, one, rows[one.name], slowest))
    del calls, contestants
    gc.collect()
    if request.device == "cuda":
        torch.cuda.empty_cache()


def _build(session: Session, cell: Cell) -> tuple[list[Contestant], dict[str, RankRow]]:
    """Those that are right, and a row for each to be completed; the others' rows are kept."""
    request, ranks = session.request, session.ranks
    layout = cell.layout(ranks)
    mask = cell.build_mask()
    own = layout.lengths[dist.get_rank()]
    work = work_of(_random(request, own), mask, **_how(request, cell))
    found, rows = [], {}
    form = (cell.mask, cell.tokens, cell.direction)
    for name in _names(session, cell):
        note, used = _verified(session, cell, name)
        is_ours = name in SCHEDULES
        row = RankRow(name, ranks, *form, budget_used=used, note=note, is_ours=is_ours)
        if note:
            session.keep(row)
            continue
        rows[name] = row
        if is_ours:
            found.append(build_ours(work, layout, name))
        else:
            found.append(build_peer(work, cell.tokens, name, is_causal=cell.mask == "causal"))
    has_time = cell.tokens <= (LONG >> 2 if cell.has_gradients else LONG)
    if request.has_variants and "ring" in rows and cell.mask == "causal" and has_time:
        for one in build_variants(work, layout, session.urgent):
            found.append(one)
            rows[one.name] = replace(rows["ring"], contestant=one.name)
    return found, rows


def _names(session: Session, cell: Cell) -> list[str]:
    """Who takes part. Of peers that are wrong with fewer kv heads, those that repeat them."""
    is_long = cell.tokens > LONG
    names = [name for name in SCHEDULES if name != "ulysses" or not is_long]
    if session.request.has_peers and cell.mask != "documents":
        for name in PEERS:
            if is_long and name != BEST_PEER:
                continue
            is_wrong = bool(_verified(session, cell, name)[0])
            names += [name, name + REPEATED] if is_wrong else [name]
    return names


def _build_single(session: Session, cell: Cell) -> Call:
    request = session.request
    whole = _random(request, cell.tokens)
    mask = cell.build_mask(request.device)
    return build_single(work_of(whole, mask, **_how(request, cell)))


def _how(request: Request, cell: Cell) -> dict[str, Any]:
    return {"has_gradients": cell.has_gradients, "backend": request.backend}


def _random(request: Request, tokens: int) -> list[Tensor]:
    """q, k, v and dout of so many tokens, drawn where they are used."""
    generator = torch.Generator(request.device).manual_seed(dist.get_rank())
    options: dict[str, Any] = {"dtype": request.torch_dtype, "device": request.device}
    return [
        torch.randn(1, tokens, h, request.D, generator=generator, **options)
        for h in (request.H, request.G, request.G, request.H)
    ]


def _time(
    session: Session, calls: dict[str, tuple[Call, Any]], cell: Cell
) -> dict[str, list[float]]:
    """Seconds of each call in each round, in an order that rotates."""
    request, names = session.request, list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    first: dict[str, float] = {}
    key = cell.mask + cell.direction
    is_compiled = key in session.cost
    for name, (call, active) in calls.items():
        with active():
            first[name] = session.meter.warm_up(call, is_compiled=is_compiled)
    repeats = {name: session.meter.repeats_of(seconds) for name, seconds in first.items()}
    spent = sum(first[name] * repeats[name] for name in names)
    affordable = int(_CELL_SECONDS / max(1e-9, spent))
    rounds = min(request.rounds, max(2, affordable))
    if is_compiled and max(first.values()) > LONG_S:
        times = {name: [seconds] for name, seconds in first.items()}
        rounds = min(request.rounds - 1, affordable)
    for turn in range(rounds):
        if times[_SINGLE] and session.is_late(spent):
            break
        start = time.monotonic()
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            call, active = calls[name]
            with active():
                times[name].append(session.meter.sample(call, repeats[name]))
        spent = time.monotonic() - start
    session.cost[key] = 2 * spent / cell.pairs
    return times


def _row(
    session: Session,
    cell: Cell,
    one: Contestant,
    row: RankRow,
    slowest: dict[str, list[float]],
) -> RankRow:
    request, times = session.request, slowest[one.name]
    ms = 1e3 * statistics.median(times)
    single = 1e3 * session.singles[cell]
    flops = cell.flops(request.H, request.D) / session.ranks
    row = replace(
        row, ms=ms, low_ms=1e3 * min(times), high_ms=1e3 * max(times), rounds=len(times),
        single_ms=single, tflops=flops / ms / 1e9, note=one.note,
    )  # fmt: skip
    if not one.parts:
        return row
    part = {name: 1e3 * statistics.median(slowest[f"{one.name}/{name}"]) for name in one.parts}
    with count_traffic() as counted:
        one.call()
    # What is packed and added without messages is no message.
    messages = max(0.0, part["messages"] - part["neither"])
    row = replace(
        row, local_ms=part["local"], messages_ms=messages, received=counted.total,
        predicted_ms=_predict(session, cell, one.name, H200),
    )  # fmt: skip
    machine = _fitted(session, cell, row)
    if machine is None:
        return row
    return replace(row, fitted_ms=_predict(session, cell, one.name, machine))


def _predict(session: Session, cell: Cell, schedule: str, machine: Machine) -> float:
    request = session.request
    size = request.torch_dtype.itemsize
    shape = Shape(1, cell.tokens, request.H, request.G, request.D, request.D, size)
    found = predict(
        schedule, shape, session.ranks, machine, pairs=cell.pairs, backward=cell.has_gradients
    )
    return found.seconds * 1e3


def _fitted(session: Session, cell: Cell, row: RankRow) -> Machine | None:
    """A machine with one GPU's rates on this cell, and with the links of its messages."""
    request, forward = session.request, replace(cell, direction="forward")
    if forward not in session.singles or not row.messages_ms or not row.received:
        return None
    flops = forward.flops(request.H, request.D)
    rate = flops / session.singles[forward]
    backward_rate = rate
    if cell.has_gradients:
        rest = max(1e-9, session.singles[cell] - session.singles[forward])
        backward_rate = (cell.flops(request.H, request.D) - flops) / rest
    link = row.received / row.messages_ms * 1e3
    return replace(
        H200, name="this run", forward_flops=rate, backward_flops=backward_rate,
        node_bytes_s=link, far_bytes_s=link, latency_s=0.0,
    )  # fmt: skip


# ---------------------------------------------------------------- right or wrong


def _verified(session: Session, cell: Cell, name: str) -> tuple[str, float]:
    """Why a contestant is not timed, or nothing; and what it used of its budget at most."""
    key = (name, cell.mask)
    if key not in session.problems:
        try:
            text, used = _verify(session.request, replace(cell, tokens=_length(session)), name)
        # A peer may fail in any way.
        except Exception as error:
            text, used = describe_error(error)[:300], float("inf")
        # One rank's problem is everyone's, so that no rank waits for another.
        found = gathered((text, used))
        limit = 1.0 if name in SCHEDULES else _WRONG
        used = max(share for _, share in found)
        text = next((text for text, share in found if text and share > limit), "")
        session.problems[key] = (text, used)
    return session.problems[key]


def _length(session: Session) -> int:
    return session.request.verified_length


def _verify(request: Request, cell: Cell, name: str) -> tuple[str, float]:
    """What this rank's rows and gradients get wrong at a short length, and the budget used."""
    layout, rank = cell.layout(dist.get_world_size()), dist.get_rank()
    mask, whole = cell.build_mask(), _whole(request, cell.tokens)
    shards = [layout.shard(x, rank).clone() for x in whole]
    own = work_of(shards, mask, has_gradients=True, backend=request.backend)
    if name in SCHEDULES:
        one = build_ours(own, layout, name)
    else:
        one = build_peer(own, cell.tokens, name, is_causal=cell.mask == "causal")
    with one.active():
        got = one.call()
    floor = torch.finfo(torch.float32).eps * cell.tokens
    reports = [
        measure_budget(x, *(layout.shard(form, rank) for form in forms), name=what, floor=floor)
        for x, what, *forms in zip(
            got,
            ("out", "dq", "dk", "dv"),
            _oracle(cell, whole, budget.exact, torch.float64),
            _oracle(cell, whole, budget.eager, request.torch_dtype),
            strict=True,
        )
    ]
    failed = "; ".join(str(x) for x in reports if not x.is_within)
    return (f"{name} {failed}" if failed else ""), max(x.used for x in reports)


def _whole(request: Request, tokens: int) -> list[Tensor]:
    """Whole q, k, v and dout, alike on every rank."""
    generator = torch.Generator().manual_seed(tokens)
    heads = (request.H, request.G, request.G, request.H)
    drawn = [torch.randn(1, tokens, h, request.D, generator=generator) for h in heads]
    return [x.to(request.device, request.torch_dtype) for x in drawn]


def _oracle(cell: Cell, whole: list[Tensor], form: Any, dtype: torch.dtype) -> list[Tensor]:
    leaves = dict(
        zip("qkv", (x.to(dtype, copy=True).requires_grad_() for x in whole), strict=False)
    )
    case = Case("attention", str(cell), leaves, {"mask": cell.build_mask(whole[0].device)})
    out = form(case, leaves)["out"]
    return [out.detach(), *torch.autograd.grad(out, list(leaves.values()), whole[3].to(dtype))]


# ---------------------------------------------------------------- rows kept and shown


def describe(row: RankRow) -> str:
    name = f"{row.contestant}, {row.ranks} ranks, {row.mask} {row.tokens} {row.direction}"
    if not row.ms:
        return f"{name}: {row.note}"
    text = f"{name}: {row.ms:.3f} ms, {row.tflops:.3g} TFLOP/s a rank"
    if row.efficiency is not None:
        text += f", {row.efficiency:.1%} of {row.ranks} times one GPU's"
    if row.exposed_ms is not None and row.messages_ms is not None:
        text += f", {row.exposed_ms:.3f} of {row.messages_ms:.3f} ms of messages exposed"
    return text


def store(path: str, rows: Sequence[RankRow]) -> None:
    """Put the rows into the document that is there; it is whole at every moment."""
    if not path:
        return
    place = Path(path)
    document = json.loads(place.read_text()) if place.exists() else {}
    document["ranks"] = [row.as_json() for row in rows]
    part = place.with_name(f"{place.name}.part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    os.replace(part, place)


def as_text(rows: Sequence[RankRow]) -> str:
    return json.dumps([asdict(row) for row in rows])
