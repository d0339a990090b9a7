"""Everything that is said of a call, as one object: numbers first, words elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import plan as planning
from . import tiles as tiling
from . import traffic
from .binaries import Binary, compile_launch
from .gpus import Gpu
from .plan import Launch, Plan
from .request import Request
from .tiles import Tiles
from .traffic import Step

_TILED_ROLES = ("forward", "keys", "rows", "backward")


@dataclass(frozen=True)
class Scores:
    """The score matrices that plain attention keeps, in the inputs' dtype, and one tile of them.

    tile_bytes: of P as the second product takes it. tile_fp32_bytes: of S as it is summed.
    """

    per_head_bytes: int
    all_bytes: int
    heads: int
    query_tiles: int
    key_tiles: int
    tile_bytes: int
    tile_fp32_bytes: int


@dataclass(frozen=True)
class Direction:
    """Forward or backward: plain attention's steps and the tiled ones. useful_flops: of visible
    pairs alone, without what is made again."""

    name: str
    plain: list[Step]
    tiled: list[Step]
    useful_flops: int
    # What is kept beyond inputs and results, at the worst moment.
    plain_extra_bytes: int
    tiled_extra_bytes: int
    measured_us: float | None = None

    @property
    def kinds(self) -> list[tuple[str, list[Step]]]:
        """Plain, and tiled where kernels say what they do."""
        kinds = [("plain", self.plain), ("tiled", self.tiled)]
        return [(name, steps) for name, steps in kinds if steps]

    def seconds(self, steps: list[Step], gpu: Gpu, request: Request) -> float:
        """At best: each step takes what its slowest unit takes."""
        return sum(max(step.limits(gpu, request).values()) for step in steps)

    @staticmethod
    def total(steps: list[Step], name: str) -> int:
        return sum(int(getattr(step, name)) for step in steps)

    def intensity(self, steps: list[Step]) -> float:
        """FLOPs for each byte of device memory."""
        return self.total(steps, "flops") / max(1, self.total(steps, "bytes"))

    def binds(self, steps: list[Step], gpu: Gpu, request: Request) -> str:
        """The unit that most of the time is spent waiting for."""
        waits: dict[str, float] = {}
        for step in steps:
            limits = step.limits(gpu, request)
            name = max(limits, key=lambda key: limits[key])
            waits[name] = waits.get(name, 0.0) + limits[name]
        return max(waits, key=lambda name: waits[name]) if waits else "nothing"


@dataclass(frozen=True)
class Explanation:
    request: Request
    gpu: Gpu
    is_here: bool
    plan: Plan
    # By tile sizes (block_m, block_n).
    tiles: dict[tuple[int, int], Tiles]
    # By the launch's place in the plan; nothing where it was not asked for.
    binaries: dict[int, Binary]
    scores: Scores
    directions: list[Direction]

    @property
    def forward_tiles(self) -> Tiles:
        return next(iter(self.tiles.values()))

    @property
    def input_bytes(self) -> int:
        size = traffic.sizes(self.request)
        return sum(size[name] for name in "QKVO")

    def fits(self, extra_bytes: int) -> bool:
        return self.input_bytes + extra_bytes <= self.gpu.memory_gb * 1e9


def explain(
    request: Request, gpu: Gpu, *, is_here: bool = False, compiles: bool = True
) -> Explanation:
    """compiles: also compile every kernel, which takes seconds the first time.

    Raises: ValueError where the call would raise it, or where tiles are too many to count.
    """
    plan = planning.make(request, gpu)
    counted: dict[tuple[int, int], Tiles] = {}
    for block_m, block_n in _tile_sizes(plan):
        if (block_m, block_n) not in counted:
            counted[block_m, block_n] = tiling.count(request, block_m, block_n)
    binaries = {}
    if compiles:
        binaries = {
            i: compile_launch(launch, gpu)
            for i, launch in enumerate(plan.launches)
            if launch.role in (*_TILED_ROLES, "delta", "finish")
        }
    first = next(iter(counted.values()))
    size = traffic.sizes(request)
    heads, S = request.B * request.H, size["S"]
    tile = first.block_m * first.block_n
    scores = Scores(
        S // heads, S, heads, first.query_tiles, first.key_tiles,
        tile * request.itemsize, tile * 4,
    )  # fmt: skip
    forward, backward = traffic.tiled_steps(request, plan, counted)
    pairs = 2 * first.pairs
    directions = [
        Direction(
            "forward", traffic.plain_forward(request), forward,
            pairs * (request.D + request.E), 2 * S, size["LSE"],
        ),
        Direction(
            "backward", traffic.plain_backward(request), backward,
            pairs * (3 * request.D + 2 * request.E), 3 * S,
            size["LSE"] + traffic.rest_bytes(request) + traffic.scratch_bytes(backward),
        ),
    ]  # fmt: skip
    return Explanation(request, gpu, is_here, plan, counted, binaries, scores, directions)


def _tile_sizes(plan: Plan) -> list[tuple[int, int]]:
    """The forward's first."""
    launches = [x for x in plan.launches if x.role in _TILED_ROLES]
    launches.sort(key=lambda x: x.role != "forward")
    if launches:
        return [(x.config[0], x.config[1]) for x in launches]
    from ...dense.tiled import BLOCK_M, GPU_BLOCK_N

    return [(BLOCK_M, GPU_BLOCK_N)]


def launch_as_json(found: Explanation, index: int, launch: Launch) -> dict[str, Any]:
    config, binary = launch.config, found.binaries.get(index)
    has_tiles = launch.role in _TILED_ROLES
    tiles = found.tiles[config[0], config[1]] if has_tiles else None
    return {
        "kernel": launch.name,
        "role": launch.role,
        "direction": "backward" if launch.is_backward else "forward",
        "programs": launch.programs,
        "block_m": config[0] or None,
        "block_n": config[1] or None,
        "warps": config[2],
        "stages": config[3],
        "products_per_tile": launch.products or None,
        "registers": binary and binary.registers,
        "spill_bytes": binary and binary.spill_bytes,
        "shared_bytes": binary and binary.shared_bytes,
        "tiles": tiles and tiles_as_json(tiles),
    }


def tiles_as_json(tiles: Tiles) -> dict[str, int]:
    return {
        "query_tiles": tiles.query_tiles,
        "key_tiles": tiles.key_tiles,
        "total": tiles.total,
        "full": tiles.full,
        "partial": tiles.partial,
        "skipped": tiles.skipped,
        "visible_pairs": tiles.pairs,
    }


def as_json(found: Explanation) -> dict[str, Any]:
    gpu, request, choice = found.gpu, found.request, found.plan.choice
    ridge = gpu.matrix_flops(request.dtype) / gpu.memory_bytes_s
    return {
        "command": "explain",
        "request": request.as_json(),
        "gpu": {
            "name": gpu.name,
            "title": gpu.title,
            "is_here": found.is_here,
            "architecture": gpu.architecture,
            "processors": gpu.processors,
            "matrix_tflops": gpu.matrix_flops(request.dtype) / 1e12,
            "exps_t": gpu.exps / 1e12,
            "memory_tbps": gpu.memory_tbps,
            "memory_gb": gpu.memory_gb,
            "shared_kib": gpu.shared_kib,
            "ridge_flops_per_byte": ridge,
            "source": gpu.source,
        },
        "backend": {
            "name": choice.name, "reason": choice.reason, "rejected": choice.rejected,
        },
        "kernels": [
            launch_as_json(found, i, launch) for i, launch in enumerate(found.plan.launches)
        ],
        "tiles": tiles_as_json(found.forward_tiles),
        "scores": dict(vars(found.scores)),
        "memory": {
            "inputs_and_output_bytes": found.input_bytes,
            "gpu_bytes": int(gpu.memory_gb * 1e9),
        },
        **{x.name: _direction_as_json(found, x) for x in found.directions},
    }  # fmt: skip


def _direction_as_json(found: Explanation, x: Direction) -> dict[str, Any]:
    gpu, request = found.gpu, found.request
    floor_s = x.seconds(x.tiled, gpu, request)
    document: dict[str, Any] = {"useful_flops": x.useful_flops}
    extras = {"plain": x.plain_extra_bytes, "tiled": x.tiled_extra_bytes}
    document["tiled"] = None
    for name, steps in x.kinds:
        extra = extras[name]
        document[name] = {
            "steps": [step.as_json(gpu, request) for step in steps],
            "flops": x.total(steps, "flops"),
            "bytes": x.total(steps, "bytes"),
            "asked_bytes": x.total(steps, "asked"),
            "flops_per_byte": x.intensity(steps),
            "binds": x.binds(steps, gpu, request),
            "at_best_us": x.seconds(steps, gpu, request) * 1e6,
            "extra_bytes": extra,
            "fits": found.fits(extra),
        }
    document["measured_us"] = x.measured_us
    document["share_of_floor"] = floor_s * 1e6 / x.measured_us if x.measured_us else None
    return document
