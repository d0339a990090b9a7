"""The kernels that a call launches on a GPU that need not be here, as the library launches them.

The call runs on tensors without memory, its launches are written down instead of made, and each
can then be compiled for that GPU. So nothing here knows which tiles a backend takes: it is read
from what the backend would launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ...core.backends import BackendChoice, is_interpreted
from ...core.mask import Mask
from ...core.mask_bits import from_function
from ...dense.choice import explain_elsewhere
from .gpus import Gpu
from .request import Request

# What a kernel does, by a part of its name; the first that fits.
_ROLES = (
    ("bwd_hopper_prepare", "delta"),
    ("bwd_hopper_finish", "finish"),
    ("bwd_hopper_query", "rows"),
    ("bwd_hopper_wide", "keys"),
    ("bwd_delta", "delta"),
    ("bwd_keys", "keys"),
    ("bwd_rows", "rows"),
    ("_fwd", "forward"),
    ("place_", "prepare"),
    ("list_", "prepare"),
    ("sum", "sums"),
    ("bwd_bias", "sums"),
    ("bwd", "backward"),
)
# Matrix products of a tile, by the gradient that they are for; S is made again for each kernel.
_PRODUCTS = {"forward": 2, "rows": 3, "backward": 5}


@dataclass(frozen=True)
class Launch:
    """One launch that was not made. programs: how many run, on all axes of the grid."""

    kernel: Any
    config: Any
    arguments: tuple[Any, ...]
    programs: int
    is_backward: bool

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).strip("_").removesuffix("_kernel")

    @property
    def role(self) -> str:
        role = next((role for part, role in _ROLES if part in self.name), "other")
        # Hopper's kernel of keys leaves dQ to another where it is built so.
        return "keys" if role == "backward" and not self._has_dq else role

    @property
    def products(self) -> int:
        """Matrix products of a visited tile: S and, in the backward, dP are made again."""
        if self.role == "keys":
            return 1 + 2 * ("dK" in self.makes) + ("dV" in self.makes)
        return _PRODUCTS.get(self.role, 0)

    @property
    def _has_dq(self) -> bool:
        return all(getattr(argument, "has_dq", True) for argument in self.arguments)

    @property
    def dims(self) -> tuple[int, int] | None:
        """Head dims as its products take them, filled up; None where it has no tiles."""
        for argument in reversed(self.arguments):
            if hasattr(argument, "value_dims"):
                return sum(argument.dims[1:]), sum(argument.value_dims[1:])
            if hasattr(argument, "value_dim"):
                return argument.width, getattr(argument, "value_width", argument.value_dim)
        return None

    @property
    def makes(self) -> tuple[str, ...]:
        """The gradients that a kernel which owns keys makes."""
        if self.role != "keys":
            return ()
        names = list(self.kernel.arg_names)
        wanted = (("HAS_K", "dK"), ("HAS_V", "dV"))
        return tuple(
            made for name, made in wanted
            if name not in names or self.arguments[names.index(name)]
        )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The backend, why, and its launches, forward and backward; none where it is plain torch."""

    choice: BackendChoice
    launches: list[Launch]

    @property
    def forward(self) -> Launch | None:
        return next((x for x in self.launches if x.role == "forward"), None)

    def of_role(self, role: str) -> list[Launch]:
        return [x for x in self.launches if x.role == role]


def why_not() -> str:
    """Why nothing can be planned here, as the end of a sentence; empty where it can."""
    if find_spec("triton") is None:
        return "needs Triton to plan its kernels: pip install 'tilewise[gpu]'"
    if is_interpreted():
        return "plans kernels for a GPU, and TRITON_INTERPRET is set; unset it"
    return ""


def make(request: Request, gpu: Gpu) -> Plan:
    """The plan of a call with its backward."""
    choice = explain_elsewhere(request.piece, gpu.architecture, gpu.title)
    if choice.name == "tiled":
        return Plan(choice, [])
    from ...dense import ops

    arguments = request.arguments._replace(backend=choice.name)
    terms = request.score_terms("meta")
    terms.pop("scale")
    arguments = arguments._replace(
        **terms, rng=torch.zeros(2, dtype=torch.int64) if arguments.dropout_p else None
    )
    flags, ints, tensors = _stand_in_mask(request.lowered).lower()
    arguments = arguments._replace(mask_flags=flags, mask_ints=ints, mask_tensors=tensors)
    q, k, v = request.tensors("meta")
    with _recording(gpu) as records:
        arguments = arguments._replace(mask_tensors=[x.to("meta") for x in tensors])
        # As where something learns: that is what has a backward.
        stored, is_split = ops.form_to_keep(q.dtype, request.dtype)
        result = ops._forward(q, k, v, arguments, stored, is_split=is_split)
        n_forward = len(records)
        dout, wanted = torch.empty_like(result.out, dtype=request.dtype), [False, False, False]
        kept = (dout, None, result.out, result.remainder, result.lse)
        ops._attention_bwd(*kept, q, k, v, *arguments, wanted)
    launches = [
        Launch(kernel, config, tuple(given), programs, index >= n_forward)
        for index, (kernel, config, given, programs) in enumerate(records)
    ]
    return Plan(choice, launches)


def _stand_in_mask(mask: Mask) -> Mask:
    """The mask, or one of its kind: bits are packed on their device, and here is none."""
    if mask.is_exact:
        return mask
    return from_function(lambda b, h, m, n: (m + n) % 3 > 0).lowered(1, 1, 128, 128)


@contextmanager
def _recording(gpu: Gpu) -> Iterator[list[Any]]:
    """Launches collected as if on that GPU. Not for a process that computes at the same time."""
    from ...dense import hopper_call
    from ...kernels import launch as launching

    records: list[Any] = []

    def record(kernel: Any, grid: tuple[int, ...], config: Any, arguments: Any) -> None:
        programs = 1
        for size in grid:
            programs *= size
        records.append((kernel, config, arguments, programs))

    was = launching._run, launching._gpu_architecture, hopper_call._multiprocessors
    launching._run = record
    launching._gpu_architecture = lambda device: gpu.architecture  # type: ignore[assignment]
    hopper_call._multiprocessors = lambda device: gpu.processors  # type: ignore[assignment]
    try:
        yield records
    finally:
        launching._run, launching._gpu_architecture, hopper_call._multiprocessors = was
