"""Launches that were made once, made again for other tensors of the same layout.

Which kernels a call launches, on which grids and with which numbers, follows from its layout. A
call writes that down on a `Tape` while it runs, and the `Replay` of it has nothing left to find:
it takes memory for what is written, puts addresses in their places, and launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .launch import Config, launch, relaunch

# What is the same in every call of one layout.
_CONSTANTS = (int, float, str, type(None), torch.dtype)


class _Operand(NamedTuple):
    """A tuple that begins with a tensor: which one, and the numbers after it."""

    kind: Any
    slot: int
    rest: tuple[Any, ...]


class _Pointer(NamedTuple):
    slot: int


class _Group(NamedTuple):
    """A tuple of such things."""

    kind: Any
    parts: tuple[Any, ...]


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, int, int]
    config: Config
    compiled: Any
    arguments: Any


class _Memory(NamedTuple):
    """What is taken anew; with its strides, since torch has nothing to compute then."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class _UnknownError(Exception):
    """A tensor, or a thing that may hold one, of which the tape knows nothing."""


def distinct(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The same tensors, each an object of its own: the next call may bring two where this one
    brought one twice."""
    seen: set[int] = set()
    found: list[Tensor | None] = []
    for x in tensors:
        if x is not None and id(x) in seen:
            x = x.detach()
        seen.add(id(x))
        found.append(x)
    return found


class Tape:
    """What a call launches, written down while it runs.

    given: tensors of which the next call brings its own, each an object of its own; None for those
    that calls of this layout lack. Other tensors that kernels are given must come from `new`.
    """

    def __init__(self, given: Sequence[Tensor | None], device: torch.device) -> None:
        self._given, self._device = list(given), device
        self._made: list[Tensor] = []
        self._launches: list[_Launch] = []
        self._sums: list[tuple[Tensor, Tensor]] = []

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that kernels write, and every call takes anew."""
        made = torch.empty(shape, dtype=dtype, device=self._device)
        self._made.append(made)
        return made

    def add(
        self, kernel: Any, grid: tuple[int, ...], config: Config, arguments: Any, compiled: Any
    ) -> None:
        """A launch; compiled: None where the interpreter ran it."""
        if 0 not in grid:
            x, y, z = (*grid, 1, 1)[:3]
            self._launches.append(_Launch(kernel, (x, y, z), config, compiled, tuple(arguments)))

    def add_sum(self, target: Tensor, shares: Tensor) -> None:
        """After all launches: target is the sum of the shares."""
        self._sums.append((target, shares))

    def finish(self, results: Sequence[Tensor | None], *, has_batch: bool) -> Replay | None:
        """All of it for other tensors; None where it hangs on a tensor that is not theirs.

        results: what a call returns. has_batch: else without their one batch row.
        """
        tensors = [*self._given, *self._made]
        slots = {id(x): i for i, x in enumerate(tensors) if x is not None}
        first = len(self._given)
        wanted = [None if x is None else slots.get(id(x), -1) for x in results]
        if any(slot is not None and slot < first for slot in wanted):
            return None
        try:
            launches = [
                x._replace(arguments=tuple(_node(argument, slots) for argument in x.arguments))
                for x in self._launches
            ]
            sums = [(_slot(target, slots), _slot(shares, slots)) for target, shares in self._sums]
        except _UnknownError:
            return None
        cut = set() if has_batch else set(wanted)
        made = [_memory_like(x[0] if first + i in cut else x) for i, x in enumerate(self._made)]
        found = [None if slot is None else slot - first for slot in wanted]
        return Replay(
            self._device, launches, made, found, [(a - first, b - first) for a, b in sums], first
        )


def _memory_like(x: Tensor) -> _Memory:
    # Plain tuples: torch reads its own sizes more slowly.
    return _Memory(tuple(x.shape), x.stride(), x.dtype)


def _slot(x: Tensor, slots: dict[int, int]) -> int:
    found = slots.get(id(x))
    if found is None:
        raise _UnknownError
    return found


def _node(x: Any, slots: dict[int, int]) -> Any:
    """An argument with slots for tensors; as it is where it has none."""
    if isinstance(x, Tensor):
        return _Pointer(_slot(x, slots))
    if isinstance(x, _CONSTANTS):
        return x
    if not isinstance(x, tuple):
        raise _UnknownError
    parts = tuple(_node(part, slots) for part in x)
    is_varied = [isinstance(part, (_Pointer, _Operand, _Group)) for part in parts]
    if not any(is_varied):
        return x
    if isinstance(parts[0], _Pointer) and not any(is_varied[1:]):
        return _Operand(type(x), parts[0].slot, parts[1:])
    return _Group(type(x), parts)


class Replay:
    """See `Tape.finish`. Holds no tensor."""

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[_Launch],
        made: list[_Memory],
        results: list[int | None],
        sums: list[tuple[int, int]],
        n_given: int,
    ) -> None:
        self._device, self._made, self._results, self._sums = device, made, results, sums
        self._is_compiled = all(x.compiled is not None for x in launches)
        pool = _Pool(n_given + len(made))
        arguments = [[pool.add(node) for node in x.arguments] for x in launches]
        self._constants, self._operands = pool.constants, pool.operands
        # Places are known when all constants and operands are.
        self._groups = [(kind, itemgetter(*map(pool.place, parts))) for kind, parts in pool.groups]
        self._launches = [
            (x, itemgetter(*map(pool.place, found)))
            for x, found in zip(launches, arguments, strict=True)
        ]

    def run(self, given: Sequence[Tensor | None]) -> list[Any]:
        """given: as the tape's, laid out and aligned as they were. Returns: the results."""
        device = self._device
        made = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self._made
        ]
        if self._is_compiled:
            # Written out, and with addresses for tensors: this is the way of every warm call.
            at: list[Any] = [None if x is None else x.data_ptr() for x in given]
            at += [x.data_ptr() for x in made]
            pool = [*self._constants, *at]
            pool += [(at[slot], *rest) for _, slot, rest in self._operands]
            for _, parts in self._groups:
                pool.append(parts(pool))
            for x, arguments in self._launches:
                relaunch(x.compiled, x.grid, arguments(pool), device)
        else:
            self._interpret([*given, *made])
        for target, shares in self._sums:
            sum_shares(made[target], made[shares])
        return [None if slot is None else made[slot] for slot in self._results]

    def _interpret(self, tensors: list[Any]) -> None:
        """The same by Triton's interpreter, which takes tensors and names of fields."""
        pool = [*self._constants, *tensors]
        pool += [kind(tensors[slot], *rest) for kind, slot, rest in self._operands]
        for kind, parts in self._groups:
            pool.append(kind(*parts(pool)))
        for x, arguments in self._launches:
            launch(x.kernel, x.grid, x.config, arguments(pool), self._device)


def sum_shares(target: Tensor, shares: Tensor) -> None:
    """target = the sum of shares that lie one after the other, in their order."""
    n_batches = target.shape[0] if target.dim() == shares.dim() else 1
    target.copy_(shares.view(shares.shape[0] // n_batches, *target.shape).sum(0))


class _Pool:
    """All things that arguments are made of, each once: constants, addresses, operands, groups."""

    def __init__(self, n_tensors: int) -> None:
        self._n_tensors = n_tensors
        self.constants: list[Any] = []
        self.operands: list[_Operand] = []
        self.groups: list[tuple[Any, tuple[Any, ...]]] = []
        self._found: dict[Any, tuple[int, int]] = {}

    def add(self, node: Any) -> tuple[int, int]:
        """Of which sort a thing is, and its number in it."""
        if isinstance(node, _Pointer):
            return 1, node.slot
        if isinstance(node, _Operand):
            return self._once(node, 2, self.operands, node)
        if isinstance(node, _Group):
            parts = tuple(self.add(part) for part in node.parts)
            return self._once((node.kind, parts), 3, self.groups, (node.kind, parts))
        self.constants.append(node)
        return 0, len(self.constants) - 1

    def _once(self, key: Any, sort: int, things: list[Any], thing: Any) -> tuple[int, int]:
        if key not in self._found:
            things.append(thing)
            self._found[key] = sort, len(things) - 1
        return self._found[key]

    def place(self, found: tuple[int, int]) -> int:
        sort, number = found
        before = (0, len(self.constants), self._n_tensors, len(self.operands))
        return sum(before[: sort + 1]) + number
