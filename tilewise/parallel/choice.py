"""Which schedule a call runs on, and why not another."""

from __future__ import annotations

from dataclasses import dataclass, field

from .model import H200, predict
from .volumes import Shape, all_gather, ring, ulysses

SCHEDULES = ("ring", "all_gather", "ulysses", "usp")


@dataclass(frozen=True)
class ScheduleChoice:
    """Which schedule runs a call, why, why the others do not, and the bytes each would move.

    received: bytes a rank receives by schedule, with even shards; of the forward pass, and of the
    backward pass too where `has_grad`, which is where something learns.
    predicted_ms: of these passes by `model.py`, of a causal call on H200s.
    """

    name: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)
    received: dict[str, float] = field(default_factory=dict)
    has_grad: bool = False
    predicted_ms: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}"]
        lines += [f"not {name}: {why}" for name, why in self.rejected.items()]
        passes = "forward and backward" if self.has_grad else "forward"
        for name, size in self.received.items():
            line = f"{name} receives {size / 1e6:,.3f} MB a rank, {passes}"
            if name in self.predicted_ms:
                line += f"; predicted {self.predicted_ms[name]:,.3f} ms, causal, on H200s"
            lines.append(line)
        return "\n".join(lines)


def choose(
    schedule: str, shape: Shape, sizes: tuple[int, ...], *, has_grad: bool, why_not_ulysses: str
) -> ScheduleChoice:
    """The schedule of a call.

    Args:
        schedule: "auto" or a name. sizes: of the mesh, outer first. why_not_ulysses: why heads
            cannot be traded, as a clause; empty where they can.
    Raises: ValueError for a name that there is not or that does not fit the mesh,
        NotImplementedError where the named one cannot.
    """
    op = "context_parallel_attention"
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(
            f"{op}: schedule must be one of {', '.join(('auto', *SCHEDULES))}, got {schedule!r}."
        )
    ranks = sizes[-1]
    volumes = {"ring": ring, "all_gather": all_gather, "ulysses": ulysses}
    found = {name: volume(shape, ranks) for name, volume in volumes.items()}
    received = {name: x.total if has_grad else x.forward for name, x in found.items()}
    if len(sizes) == 2 or schedule == "usp":
        if len(sizes) != 2:
            raise ValueError(
                f"{op}: schedule 'usp' needs a 2-D mesh, ring outside, Ulysses inside."
            )
        if schedule not in ("auto", "usp"):
            raise ValueError(f"{op}: schedule {schedule!r} needs a 1-D mesh or a group, got 2-D.")
        if why_not_ulysses:
            raise NotImplementedError(f"{op}: schedule 'usp' cannot run: {why_not_ulysses}.")
        return ScheduleChoice("usp", "the mesh is 2-D: Ulysses inside, a ring outside")
    if schedule == "ulysses" and why_not_ulysses:
        raise NotImplementedError(f"{op}: schedule 'ulysses' cannot run: {why_not_ulysses}.")
    if schedule != "auto":
        return ScheduleChoice(schedule, "named by the caller", {}, received, has_grad)
    predicted = {
        name: 1e3 * predict(name, shape, ranks, H200, backward=has_grad).seconds for name in found
    }
    rejected = {
        # `bench parallel` on two H200s, 2026-11-30: 64k causal tokens 114 ms for both directions
        # beside the ring's 108, 16k 10.2 beside 7.5; documents, by a table then, four times as
        # long.
        "all_gather": f"it holds the keys of {ranks} ranks at a time, and was slower on two H200s",
        "usp": "it needs a 2-D mesh",
    }
    why_not = why_not_ulysses or _why_no_trade(shape, ranks, "ring", received, predicted)
    if not why_not:
        reason = f"trading heads moves fewer bytes than keys do, at {shape.H}:{shape.G} heads"
        reason += f" over {ranks} ranks, and should be no slower"
        rejected["ring"] = "it moves more bytes, and should be no faster"
        return ScheduleChoice("ulysses", reason, rejected, received, has_grad, predicted)
    rejected["ulysses"] = why_not
    reason = "keys and values go round, O(S / R) memory"
    return ScheduleChoice("ring", reason, rejected, received, has_grad, predicted)


def _why_no_trade(
    shape: Shape, ranks: int, other: str, received: dict[str, float], predicted: dict[str, float]
) -> str:
    """Why heads are not traded for tokens though they could be, or nothing."""
    if ranks > shape.H:
        return f"{shape.H} heads leave {ranks - shape.H} of {ranks} ranks without work"
    if received["ulysses"] >= received[other]:
        return "it moves no fewer bytes"
    if predicted["ulysses"] > predicted[other]:
        return (
            f"it should be slower, {predicted['ulysses']:.3f} ms beside {predicted[other]:.3f}: "
            "its messages hide behind nothing"
        )
    return ""
