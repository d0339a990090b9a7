"""A chain of launches, made ready once for tensors of one form and run again on others of it.

What a launch is made of hangs on shapes, strides, dtypes and alignment alone, and takes longer to
find out than a short call's kernels run. So arguments are written down with a slot in the place of
each tensor, the kernels are looked up once, and a run fills in addresses. A plan holds no tensor.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..kernels.launch import (
    Config,
    Launch,
    architecture_of,
    compile_together,
    compiler_options,
    launch,
    relaunch,
)
from .config import FEW_WARPS
from .machine_code import loses_an_operand

# Buffers begin as torch's own tensors would, and so the same binaries serve them.
_ALIGNMENT = 256
# Of more forms than these the oldest is forgotten. Each holds a few kilobytes, and no tensor.
_MOST_KEPT = 1024
_plans: dict[Any, Plan] = {}
_keeping = threading.Lock()
# What kernels run with, where their code has been looked at.
_looked_at: dict[Any, Config] = {}


class Slot:
    """The form of a tensor, where the tensor itself will stand. index: among those of its kind."""

    def __init__(
        self, kind: str, index: int, shape: Sequence[int], strides: Sequence[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.kind, self.index, self.dtype = kind, index, dtype
        self.shape, self._strides = tuple(shape), tuple(strides)

    def dim(self) -> int:
        return len(self.shape)

    def stride(self, dim: int) -> int:
        return self._strides[dim]


class Plan:
    """Launches in their order, on what is given, what is made for the caller, and buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._launches: list[Launch] = []
        self._made: list[tuple[tuple[int, ...], torch.dtype, Any]] = []
        self._buffers: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._n_given = 0
        self._results: tuple[Slot | None, ...] = ()
        self._ready: _Ready | None = None

    # ------------------------------------------------------------ what a plan is made of

    def given(self, x: Tensor | None) -> Slot | None:
        """The next tensor that a run is given; None where there is none."""
        self._n_given += 1
        if x is None:
            return None
        return Slot("given", self._n_given - 1, x.shape, x.stride(), x.dtype)

    def made(self, shape: Sequence[int], dtype: torch.dtype, *, is_zero: bool = False) -> Slot:
        """A new tensor of its own, contiguous."""
        self._made.append((tuple(shape), dtype, torch.zeros if is_zero else torch.empty))
        return Slot("made", len(self._made) - 1, shape, _contiguous(shape), dtype)

    def buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Slot:
        """Memory of a run, contiguous."""
        self._buffers.append((tuple(shape), dtype))
        return Slot("buffer", len(self._buffers) - 1, shape, _contiguous(shape), dtype)

    def add(self, kernel: Any, programs: int, config: Config, arguments: tuple[Any, ...]) -> None:
        self._launches.append(Launch(kernel, (programs, 1, 1), config, arguments))

    def finish(self, *results: Slot | None) -> Plan:
        """results: of what is made, what a run returns."""
        self._results = results
        return self

    # ------------------------------------------------------------ a run

    def run(self, given: Sequence[Tensor | None]) -> list[Any]:
        """The results. given: as the plan's own, of the same forms."""
        device = self.device
        made = [make(shape, dtype=dtype, device=device) for shape, dtype, make in self._made]
        space = torch.empty(self._places[-1], dtype=torch.uint8, device=device)
        if self._ready is None:
            self._run_first(given, made, space)
        else:
            self._ready.run(given, made, space, device)
        return [None if x is None else made[x.index] for x in self._results]

    @cached_property
    def _places(self) -> list[int]:
        """Where buffers begin, and where the last one ends."""
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self._buffers)
        return [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]

    def _run_first(
        self, given: Sequence[Tensor | None], made: Sequence[Tensor], space: Tensor
    ) -> None:
        buffers = [
            space[place : place + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for place, (shape, dtype) in zip(self._places, self._buffers, strict=False)
        ]
        tensors = {"given": given, "made": made, "buffer": buffers}
        launches = [x._replace(arguments=_fill(x.arguments, tensors)) for x in self._launches]
        if self.device.type == "cuda":
            launches = [x._replace(tag=_specialization(x.kernel, x.arguments)) for x in launches]
        compile_together(launches, self.device)
        compiled = [
            launch(x.kernel, x.grid, self._trusted(x), x.arguments, self.device) for x in launches
        ]
        is_whole = all(
            x is not None or 0 in y.grid for x, y in zip(compiled, launches, strict=True)
        )
        if is_whole:
            self._ready = _Ready(self._launches, compiled, self._n_given, len(made), self._places)

    def _trusted(self, x: Launch) -> Config:
        """Its configuration, or one of few warps where the code for it cannot be trusted."""
        if self.device.type != "cuda" or architecture_of(self.device) != "sm_90" or 0 in x.grid:
            return x.config
        key = (x.kernel, x.config, x.tag)
        if key not in _looked_at:
            with torch.cuda.device(self.device):
                found = x.kernel.warmup(*x.arguments, grid=x.grid, **compiler_options(x.config))
            compiled = found.result() if hasattr(found, "result") else found
            is_wrong = loses_an_operand(compiled.asm["cubin"])
            _looked_at[key] = x.config._replace(num_warps=FEW_WARPS) if is_wrong else x.config
        return _looked_at[key]


class _Ready:
    """How a plan's arguments are put together from addresses, and the kernels that get them.

    Values stand in one list: addresses of what is given, made and of buffers, constants, and then
    each tuple that arguments are made of, put together of those before it. One that several kernels
    get is made once.
    """

    def __init__(
        self, launches: Sequence[Launch], compiled: Sequence[Any], n_given: int, n_made: int,
        places: Sequence[int],
    ) -> None:  # fmt: skip
        self._places = places[:-1]
        self._starts = {"given": 0, "made": n_given, "buffer": n_given + n_made}
        self._first_constant = n_given + n_made + len(self._places)
        self._constants: list[Any] = []
        self._at: dict[int, int] = {}
        for x in launches:
            for node in x.arguments:
                self._collect_constants(node)
        self._makers: list[Callable[[Any], Any]] = []
        self._next = self._first_constant + len(self._constants)
        self._launches: list[tuple[Any, Any, Callable[[Any], Any]]] = [
            (kernel, x.grid, _getter([self._place(node) for node in x.arguments]))
            for kernel, x in zip(compiled, launches, strict=True)
            if kernel is not None
        ]

    def run(
        self, given: Sequence[Tensor | None], made: Sequence[Tensor], space: Tensor,
        device: torch.device,
    ) -> None:  # fmt: skip
        base = space.data_ptr()
        values: list[Any] = [None if x is None else x.data_ptr() for x in given]
        values += [x.data_ptr() for x in made]
        values += [base + place for place in self._places]
        values += self._constants
        for make in self._makers:
            values.append(make(values))
        for kernel, grid, get in self._launches:
            relaunch(kernel, grid, get(values), device)

    def _collect_constants(self, node: Any) -> None:
        if isinstance(node, tuple) and _has_slot(node):
            for x in node:
                self._collect_constants(x)
        elif not isinstance(node, Slot) and id(node) not in self._at:
            self._at[id(node)] = self._first_constant + len(self._constants)
            self._constants.append(node)

    def _place(self, node: Any) -> int:
        """Where a node's value stands."""
        if isinstance(node, Slot):
            return self._starts[node.kind] + node.index
        if id(node) not in self._at:
            self._makers.append(_getter([self._place(x) for x in node]))
            self._at[id(node)] = self._next
            self._next += 1
        return self._at[id(node)]


def _getter(places: list[int]) -> Callable[[Any], Any]:
    """What makes a tuple of the values at some places."""
    if len(places) == 1:
        (place,) = places
        return lambda values: (values[place],)
    return itemgetter(*places)


def _has_slot(node: Any) -> bool:
    if isinstance(node, tuple):
        return any(_has_slot(x) for x in node)
    return isinstance(node, Slot)


def _fill(node: Any, tensors: dict[str, Sequence[Any]]) -> Any:
    """The same arguments with tensors where slots are."""
    if isinstance(node, Slot):
        return tensors[node.kind][node.index]
    if not isinstance(node, tuple) or not _has_slot(node):
        return node
    filled = [_fill(x, tensors) for x in node]
    make: Any = getattr(type(node), "_make", tuple)
    return make(filled)


def _specialization(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton makes a binary for."""

    def kind(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.dtype, x.data_ptr() % 16 == 0
        if isinstance(x, tuple):
            return tuple(map(kind, x))
        if type(x) is int:
            return x == 1, x % 16 == 0, x.bit_length() > 31
        return float if type(x) is float else x

    return tuple(
        x if parameter.is_constexpr else kind(x)
        for x, parameter in zip(arguments, kernel.params, strict=True)
    )


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = accumulate(
        (max(size, 1) for size in reversed(shape[1:])), initial=1, func=int.__mul__
    )
    return tuple(strides)[::-1] if shape else ()


# ---------------------------------------------------------------- plans that are kept


def keep_plan(key: Any, make: Callable[[], Plan]) -> Plan:
    """The plan that is known by a key, made where there is none."""
    found = _plans.get(key)
    if found is None:
        found = make()
        with _keeping:
            while len(_plans) >= _MOST_KEPT:
                _plans.pop(next(iter(_plans)))
            _plans[key] = found
    return found
