"""How long a schedule should take: compute, bytes and links, in a few lines of arithmetic.

A prediction is as good as its machine's numbers and no better; it is there to choose a schedule and
to be held against measurements. It leaves out launches, merges and contention.

Dims: S tokens, R ranks, H, G heads, D, E dims. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .volumes import Shape, Volume, all_gather, ring, ulysses, usp

_BACKWARD_FLOPS = 2.5
_GATHER_STRIDES = 4
# What the earlier half of a rank's queries has to do with its own keys under a causal mask.
_EARLY = 0.25


@dataclass(frozen=True)
class Machine:
    """What a GPU computes and its links carry, each way.

    forward_flops, backward_flops: sustained rates of the dense kernel. node_bytes_s, far_bytes_s:
    bandwidth inside a node and beyond it, per GPU. latency_s: of one message. node: GPUs in one.
    """

    name: str
    forward_flops: float
    backward_flops: float
    node_bytes_s: float
    far_bytes_s: float
    latency_s: float = 10e-6
    node: int = 8

    def link(self, ranks: int) -> float:
        return self.node_bytes_s if ranks <= self.node else self.far_bytes_s


# NVLink 4 carries 450 GB/s each way, a 400 Gb/s NIC 50 GB/s; three quarters of it are sustained:
# between two H200s 316 to 355 GB/s. Rates: the dense kernels' at H 32 G 8 D 128 causal 64k, as
# measured on one H200 (2026-11-30).
H200 = Machine("H200, NVLink 4, 400 Gb/s per GPU", 819e12, 532e12, 340e9, 38e9)


@dataclass(frozen=True)
class Prediction:
    """One schedule on one machine, forward and backward together unless asked for forward alone.

    compute_s: of the rank that has most to do. exposed_s: what messages add to it. received: bytes
    per rank.
    """

    schedule: str
    ranks: int
    compute_s: float
    exposed_s: float
    received: float
    flops: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.exposed_s

    @property
    def efficiency(self) -> float:
        """Of the rate that one GPU has on the same local work."""
        return self.compute_s / self.seconds if self.seconds else 1.0

    @property
    def tflops(self) -> float:
        """Per GPU."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0


def flops_of(shape: Shape, *, is_causal: bool = True) -> float:
    """Forward flops of the whole call: 2 B H S S (D + E), half if causal."""
    B, S, H, _, D, E, _ = shape
    return 2.0 * B * H * S * S * (D + E) * (0.5 if is_causal else 1.0)


def predict(
    schedule: str,
    shape: Shape,
    ranks: int,
    machine: Machine,
    *,
    inner: int = 1,
    causal: bool = True,
    backward: bool = True,
    pairs: float | None = None,
) -> Prediction:
    """The prediction for balanced shards.

    Args:
        inner: ranks of a Ulysses group, for "usp".
        backward: False for a forward pass alone.
        pairs: visible pairs of query and key in place of all, or of half where causal.
    """
    flops = flops_of(shape, is_causal=causal) / ranks
    if pairs is not None:
        flops = 2.0 * shape.B * shape.H * (shape.D + shape.E) * pairs / ranks
    trading = {"ulysses": ranks, "usp": inner}.get(schedule, 1)
    busiest = flops / share_at_work(shape.H, trading)
    compute = [busiest / machine.forward_flops]
    if backward:
        compute.append(_BACKWARD_FLOPS * busiest / machine.backward_flops)
    outer = ranks // inner if schedule == "usp" else ranks
    if schedule == "ulysses":
        volume = ulysses(shape, ranks)
        exposed = _swapped(volume, compute, machine.link(ranks), machine.latency_s)
    elif schedule == "all_gather":
        volume = all_gather(shape, ranks)
        exposed = _gathered(volume, compute, machine.link(ranks), machine, ranks)
    elif schedule == "ring":
        volume = ring(shape, ranks)
        exposed = _ringed(volume, compute, machine.link(ranks), machine, ranks)
    else:
        volume = usp(shape, outer, inner)
        part = shape._replace(S=shape.S // outer)
        traded = ulysses(part, inner)
        around = Volume(volume.forward - traded.forward, volume.backward - traded.backward)
        latency = machine.latency_s if inner > 1 else 0.0
        exposed = _swapped(traded, compute, machine.link(inner), latency)
        exposed += _ringed(around, compute, machine.link(ranks), machine, outer)
    if ranks == 1:
        exposed = 0.0
    total = flops * (1 + _BACKWARD_FLOPS * backward)
    received = volume.total if backward else volume.forward
    return Prediction(schedule, ranks, sum(compute), exposed, received, total)


def share_at_work(heads: int, ranks: int) -> float:
    """Of the ranks that trade heads, on average while the one with most heads works."""
    return heads / (ranks * -(-heads // ranks))


def _swapped(volume: Volume, compute: Sequence[float], link: float, latency: float) -> float:
    """Two trades forward, two backward; nothing to hide them behind."""
    moved = (volume.forward, volume.backward)[: len(compute)]
    return sum(moved) / link + 2 * len(moved) * latency


def _ringed(
    volume: Volume, compute: Sequence[float], link: float, machine: Machine, ranks: int
) -> float:
    """Each hop hides behind a step. Backward, the first one and the gradients' way home share the
    rank's own step."""
    if ranks == 1:
        return 0.0
    hops = ranks - 1
    keys = volume.forward / hops / link + machine.latency_s
    exposed = hops * max(0.0, keys - compute[0] / ranks)
    if len(compute) == 1:
        return exposed
    step, gradients = compute[1] / ranks, (volume.backward - volume.forward) / hops / link
    exposed += max(0.0, keys - _EARLY * step)
    # K and V, and their gradients one step behind, share the link.
    exposed += (hops - 1) * max(0.0, keys + gradients - step)
    return exposed + max(0.0, gradients + machine.latency_s - (1 - _EARLY) * step)


def _gathered(
    volume: Volume, compute: Sequence[float], link: float, machine: Machine, ranks: int
) -> float:
    """The first stride of heads waits for its gather, the others hide; the last gradients too."""
    if ranks == 1:
        return 0.0
    n = _GATHER_STRIDES
    gather = volume.forward / n / link + machine.latency_s
    scatter = (volume.backward - volume.forward) / n / link + machine.latency_s
    exposed = gather + (n - 1) * max(0.0, gather - compute[0] / n)
    if len(compute) == 1:
        return exposed
    return exposed + gather + (n - 1) * max(0.0, gather + scatter - compute[1] / n) + scatter


def plan_table(
    shape: Shape,
    machine: Machine = H200,
    ranks: Sequence[int] = (8, 16, 32, 64, 128, 256, 512, 1024),
) -> list[Prediction]:
    """Every schedule at every number of ranks; S of `shape` is the tokens of one rank.

    Schedules that hold too few heads for the ranks are left out; "usp" trades heads in a node.
    """
    found = []
    for count in ranks:
        whole = shape._replace(S=shape.S * count)
        found += [predict(name, whole, count, machine) for name in ("ring", "all_gather")]
        if count <= shape.H:
            found.append(predict("ulysses", whole, count, machine))
        inner = min(machine.node, shape.H)
        if count > inner:
            found.append(predict("usp", whole, count, machine, inner=inner))
    return found
