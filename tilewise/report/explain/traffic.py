"""Bytes and steps of plain attention and of the tiled one, counted by tensor.

Plain attention is three kernels forward and five backward, with score matrices in the inputs' dtype
between them. Bytes of device memory count a tensor once for each kernel that reads it: programs
that run together find K and V in the L2 cache. What programs ask for beyond that is counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .gpus import Gpu
from .plan import Plan
from .request import Request
from .tiles import Tiles

_LSE_BYTES = 4
# Of a row of the backward: what Triton's kernels keep, and what Hopper's do.
_ROW_BYTES, _HOPPER_ROW_BYTES = 16, 8
# Where Hopper's backward adds dQ up.
_BUFFER = "dQ in fp32"
# What the forward of a call that learns writes beside what it returns.
REST = "what rounding takes off O"


@dataclass(frozen=True)
class Step:
    """A kernel, or a part of one. reads, writes: bytes of device memory by tensor. asked: bytes
    that programs ask for, through L2."""

    title: str
    flops: int
    exps: int
    reads: dict[str, int]
    writes: dict[str, int]
    asked: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())

    def limits(self, gpu: Gpu, request: Request) -> dict[str, float]:
        """Seconds that each unit needs at its datasheet rate."""
        return {
            "matrix products": self.flops / gpu.matrix_flops(request.dtype),
            "exponentials": self.exps / gpu.exps,
            "device memory": self.bytes / gpu.memory_bytes_s,
        }

    def as_json(self, gpu: Gpu, request: Request) -> dict[str, Any]:
        limits = self.limits(gpu, request)
        return {
            "title": self.title,
            "flops": self.flops,
            "exps": self.exps,
            "read_bytes": self.reads,
            "written_bytes": self.writes,
            "bytes": self.bytes,
            "asked_bytes": self.asked,
            "limits_us": {name: seconds * 1e6 for name, seconds in limits.items()},
            "binds": max(limits, key=lambda name: limits[name]),
        }


def sizes(request: Request) -> dict[str, int]:
    """Bytes of every tensor; S stands for any matrix of scores."""
    r, size = request, request.itemsize
    return {
        "Q": r.B * r.M * r.H * r.D * size,
        "K": r.B * r.N * r.G * r.D * size,
        "V": r.B * r.N * r.G * r.E * size,
        "O": r.B * r.M * r.H * r.E * size,
        "S": r.B * r.H * r.M * r.N * size,
        "LSE": r.B * r.H * r.M * _LSE_BYTES,
    }


def plain_forward(request: Request) -> list[Step]:
    size, pairs = sizes(request), request.B * request.H * request.M * request.N
    Q, K, V, out, S = (size[name] for name in "QKVOS")
    return [
        Step("S = Q Kᵀ", 2 * pairs * request.D, 0, {"Q": Q, "K": K}, {"S": S}),
        Step("P = softmax(S)", 0, pairs, {"S": S}, {"P": S}),
        Step("O = P V", 2 * pairs * request.E, 0, {"P": S, "V": V}, {"O": out}),
    ]


def plain_backward(request: Request) -> list[Step]:
    size, pairs = sizes(request), request.B * request.H * request.M * request.N
    Q, K, V, out, S = (size[name] for name in "QKVOS")
    by_d, by_e = 2 * pairs * request.D, 2 * pairs * request.E
    return [
        Step("dV = Pᵀ dO", by_e, 0, {"P": S, "dO": out}, {"dV": V}),
        Step("dP = dO Vᵀ", by_e, 0, {"dO": out, "V": V}, {"dP": S}),
        Step("dS = P (dP − δ)", 0, 0, {"P": S, "dP": S}, {"dS": S}),
        Step("dQ = dS K", by_d, 0, {"dS": S, "K": K}, {"dQ": Q}),
        Step("dK = dSᵀ Q", by_d, 0, {"dS": S, "Q": Q}, {"dK": K}),
    ]


def tiled_steps(
    request: Request, plan: Plan, counted: dict[tuple[int, int], Tiles]
) -> tuple[list[Step], list[Step]]:
    """One step a launch, forward and backward. counted: tiles by their sizes."""
    forward: list[Step] = []
    backward: list[Step] = []
    size, item = sizes(request), request.itemsize
    Q, K, V, out = (size[name] for name in "QKVO")
    has_buffer = bool(plan.of_role("finish"))
    is_hopper = any("hopper" in launch.name for launch in plan.of_role("delta"))
    row_bytes = _HOPPER_ROW_BYTES if is_hopper else _ROW_BYTES
    rows = request.B * request.H * request.M * row_bytes
    buffer = {_BUFFER: Q // item * 4} if has_buffer else {}
    for launch in plan.launches:
        if launch.role == "delta":
            reads = {"O": out, "dO": out, "LSE": size["LSE"]}
            if rest_bytes(request):
                reads[REST] = rest_bytes(request)
            asked = sum(reads.values())
            made = {"row numbers": rows, **buffer}
            backward.append(Step("δ = rowsum(dO ∘ O)", 0, 0, reads, made, asked))
            continue
        if launch.role == "finish":
            backward.append(Step("dQ from fp32", 0, 0, buffer, {"dQ": Q}, sum(buffer.values())))
            continue
        if launch.role not in ("forward", "keys", "rows", "backward"):
            continue
        tiles = counted[launch.config[0], launch.config[1]]
        D, E = launch.dims or (request.D, request.E)
        area = tiles.visited * tiles.block_m * tiles.block_n
        flops = _flops(launch.role, launch.makes, area, D, E)
        by_row = tiles.key_rows * (request.D + request.E) * item
        by_key = tiles.query_rows * ((request.D + request.E) * item + row_bytes)
        if launch.role == "forward":
            step = Step(
                "forward", flops, area, {"Q": Q, "K": K, "V": V},
                {"O": out, "LSE": size["LSE"]}, Q + by_row,
            )  # fmt: skip
            forward.append(step)
            continue
        reads = {"Q": Q, "K": K, "V": V, "dO": out, "row numbers": rows}
        if launch.role == "rows":
            step = Step("dQ", flops, area, reads, {"dQ": Q}, Q + out + rows + by_row)
        elif launch.role == "keys":
            made = {name: value for name, value in (("dK", K), ("dV", V)) if name in launch.makes}
            step = Step(" and ".join(launch.makes), flops, area, reads, made, K + V + by_key)
        else:
            # What is added to is read and written.
            made = {"dK": K, "dV": V, **buffer}
            asked = K + V + by_key + tiles.query_rows * request.D * 4
            step = Step("dQ, dK and dV", flops, area, reads | buffer, made, asked)
        backward.append(step)
    return forward, backward


def rest_bytes(request: Request) -> int:
    """What the forward keeps of O in 16 bits for a backward, beside O itself."""
    return sizes(request)["O"] if request.itemsize == 2 else 0


def scratch_bytes(steps: list[Step]) -> int:
    """What steps write that is no result."""
    scratch = ("row numbers", _BUFFER)
    written = {name: size for step in steps for name, size in step.writes.items()}
    return sum(size for name, size in written.items() if name in scratch)


def _flops(role: str, makes: tuple[str, ...], area: int, D: int, E: int) -> int:
    """Of whole tiles: S is a product over D; dP over E; dQ and dK over D; O and dV over E."""
    if role == "forward":
        per_pair = D + E
    elif role == "rows":
        per_pair = 2 * D + E
    elif role == "keys":
        per_pair = D + (D + E) * ("dK" in makes) + E * ("dV" in makes)
    else:
        per_pair = 3 * D + 2 * E
    return 2 * area * per_pair
