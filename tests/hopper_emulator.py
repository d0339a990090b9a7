"""Hopper's kernels on the CPU: the Python source of a kernel runs as it is, on torch tensors.

Gluon has no interpreter. Here every function that Triton would compile is run as plain Python, with
stand-ins for what it calls: each warp specialised role is a thread, one of which runs at a time and
gives way to another, drawn at random, wherever it could wait. Copies by TMA and products of warp
groups happen as late as the protocol allows, and what a copy will overwrite holds NaN until then: a
wait that is missing reads NaN, one that has no arrival is a deadlock, and both fail. Where a launch
begins before the end of the one before, what that one wrote is NaN too until it is waited for.

What it knows of memory: a tile lies as panels of 64 columns, each with its rows one after the other
(swizzles apart, which copies, products and `as_atoms` agree on). What it cannot tell is how fast
anything is, and what a compiler makes of it.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from tilewise.kernels import gluon as shim
from tilewise.kernels import launch as launching

_PANEL = 64


class Deadlock(AssertionError):
    """Every role waits."""


# ---------------------------------------------------------------- values


class Value(torch.Tensor):
    """A tensor in registers, or a scalar."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return self.view(dtype) if bitcast else super().to(dtype)


def value(x: Any) -> Any:
    if isinstance(x, Value):
        return x
    if isinstance(x, bool) or not isinstance(x, (int, float, torch.Tensor)):
        return torch.as_tensor(x).as_subclass(Value)
    if isinstance(x, float):
        x = torch.tensor(x, dtype=torch.float32)
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """Elements of a tensor's storage. What is outside of it is never touched."""

    def __init__(self, of: torch.Tensor, offset: Any = 0) -> None:
        self.of, self.offset = of, value(offset)
        self.dtype = SimpleNamespace(element_ty=of.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.of, self.offset + other)

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.of, self.offset - other)

    def __getitem__(self, key: Any) -> Pointer:
        return Pointer(self.of, self.offset[key])

    def _at(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size = self.of.untyped_storage().nbytes() // self.of.element_size()
        flat = self.of.as_strided((size,), (1,), 0)
        at = self.offset + self.of.storage_offset()
        at, mask = torch.broadcast_tensors(at.long(), value(True if mask is None else mask))
        inside = (at >= 0) & (at < size)
        assert bool((inside | ~mask).all()), "a pointer leaves its tensor"
        return flat, torch.where(mask, at, 0), mask

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        flat, at, mask = self._at(mask)
        if not flat.numel():
            return torch.full(at.shape, other, dtype=self.of.dtype).as_subclass(Value)
        found = flat[at.as_subclass(torch.Tensor)]
        other = torch.as_tensor(other, dtype=self.of.dtype)
        return torch.where(mask, found, other).as_subclass(Value)

    def store(self, x: Any, mask: Any = None) -> None:
        flat, at, mask = self._at(mask)
        x = value(x).to(self.of.dtype).expand(at.shape)
        plain = [t.as_subclass(torch.Tensor) for t in (at, mask, x)]
        flat[plain[0][plain[1]]] = plain[2][plain[1]]


# ---------------------------------------------------------------- shared memory


class Shared:
    """Slots of memory, or a tile of one. memory: `[slots, panels, rows, columns of a panel]`, or
    without the slots; numbers and barriers are tiles of their own kind."""

    def __init__(self, memory: torch.Tensor, cuts: tuple[Any, ...] = (), turned: bool = False):
        self.memory, self.cuts, self.turned = memory, cuts, turned

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    @property
    def shape(self) -> list[int]:
        slots, panels, rows, width = self.memory.shape
        return [slots, 1, 1, rows, panels * width]

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.memory.shape[0], "a slot that there is not"
        return Shared(self.memory[int(i)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        assert list(shape) == list(self.tile().shape)
        return self

    def permute(self, order: Sequence[int]) -> Shared:
        assert tuple(order) == (1, 0)
        return Shared(self.memory, self.cuts, not self.turned)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        # Of a turned tile rows are columns.
        dim = 1 - dim if self.turned else dim
        return Shared(self.memory, (*self.cuts, (dim, start, length)), self.turned)

    def tile(self) -> torch.Tensor:
        """As it is now, `[rows, columns]`."""
        x = self.memory.permute(1, 0, 2).flatten(1)
        for cut in self.cuts:
            x = x.narrow(*cut)
        return x.T if self.turned else x

    def load(self, layout: Any = None) -> Any:
        return self.tile().clone().as_subclass(Value)

    def store(self, x: Any) -> None:
        assert not self.turned
        panels, rows, width = self.memory.shape
        whole = self.memory.permute(1, 0, 2).flatten(1).clone()
        part = whole
        for cut in self.cuts:
            part = part.narrow(*cut)
        part.copy_(x.as_subclass(torch.Tensor).to(self.dtype))
        self.memory.copy_(whole.reshape(rows, panels, width).permute(1, 0, 2))


class Numbers:
    """int32 or fp32 by slot: the mail."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, i: Any) -> Numbers:
        return Numbers(self.memory[int(i)])

    def load(self, layout: Any = None) -> Any:
        return self.memory.clone().long().as_subclass(Value)

    def store(self, x: Any) -> None:
        self.memory.copy_(x.as_subclass(torch.Tensor))


class Floats:
    """fp32 by slot, or some of a slot: one after the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory

    def index(self, i: Any) -> Floats:
        assert 0 <= int(i) < self.memory.shape[0], "a slot that there is not"
        return Floats(self.memory[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Floats:
        return Floats(self.memory.narrow(dim, start, length))

    def load(self, layout: Any = None) -> Any:
        return self.memory.clone().as_subclass(Value)

    def store(self, x: Any) -> None:
        self.memory.copy_(x.as_subclass(torch.Tensor))


class Barrier:
    """An mbarrier: phases end when all have arrived and all bytes are there."""

    def __init__(self) -> None:
        self.count, self.pending, self.bytes, self.ended = 0, 0, 0, 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals at a barrier than it waits for"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.ended = self.count, self.ended + 1


class Barriers:
    def __init__(self, n: int) -> None:
        self.all = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.all)
        return self.all[int(i)]


class Descriptor:
    """A TMA descriptor: what is outside of its tensor reads as 0 and is not written."""

    def __init__(self, of: Any) -> None:
        self.of, self.dtype, self.layout = of, of.base.dtype, of.layout
        nbytes = torch.Size(of.block_shape).numel() * of.base.element_size()
        self.block_type = SimpleNamespace(nbytes=nbytes)

    def _cells(self, at: Sequence[Any]) -> torch.Tensor:
        """Of numbers, one or two dims: a block, or as much of it as there is."""
        cells = self.of.base.as_strided(self.of.shape, self.of.strides)
        for i, (start, n) in enumerate(zip(at, self.of.block_shape, strict=True)):
            first = min(int(start), cells.shape[i])
            cells = cells.narrow(i, first, min(n, cells.shape[i] - first))
        return cells

    def _rows(self, at: Sequence[Any]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
        a, b, row, column = (int(x) for x in at)
        A, B, N, D = self.of.shape
        x = self.of.base.as_strided(self.of.shape, self.of.strides)
        rows, columns = self.of.block_shape[2:]
        assert row >= 0 and column >= 0
        here = min(max(N - row, 0), rows), min(max(D - column, 0), columns)
        if not (0 <= a < A and 0 <= b < B):
            here = (0, 0)
            a = b = 0
        return x[a, b, row : row + here[0], column : column + here[1]], list(here), x

    def read(self, at: Sequence[Any]) -> torch.Tensor:
        if len(self.of.block_shape) < 4:
            cells = self._cells(at)
            missing = self.of.block_shape[0] - cells.shape[0]
            return torch.cat([cells, cells.new_zeros(missing, *cells.shape[1:])])
        found, here, _ = self._rows(at)
        tile = found.new_zeros(self.of.block_shape[2:])
        tile[: here[0], : here[1]] = found
        return tile

    def write(self, at: Sequence[Any], tile: torch.Tensor) -> None:
        found, here, _ = self._rows(at)
        found.copy_(tile[: here[0], : here[1]])

    def add(self, at: Sequence[Any], tile: torch.Tensor) -> None:
        cells = self._cells(at)
        assert cells.shape == tile.shape, "sums outside of their tensor"
        cells.add_(tile)


class Product:
    """A product of a warp group that may not have been made yet."""

    def __init__(self, left: Any, right: Shared, acc: Any, adds: bool) -> None:
        self.left, self.right, self.acc, self.adds, self.done = left, right, acc, adds, None
        self.seen = self._tiles() if _now().is_strict else []

    def _tiles(self) -> list[torch.Tensor]:
        """What it reads from shared memory."""
        return [x.tile().clone() for x in (self.left, self.right) if isinstance(x, Shared)]

    def make(self) -> None:
        for was, tile in zip(self.seen, self._tiles(), strict=False):
            same = (was == tile) | (was.isnan() & tile.isnan())
            assert bool(same.all()), "memory changes under a product, or is not there yet"
        left = self.left.tile() if isinstance(self.left, Shared) else self.left
        acc = self.acc.done if isinstance(self.acc, Product) else self.acc
        x = left.as_subclass(torch.Tensor).float() @ self.right.tile().float()
        self.done = (x + acc if self.adds else x).as_subclass(Value)


# ---------------------------------------------------------------- roles


class Role(threading.Thread):
    """One partition: its warps walk in step. is_ready: whether what it waits for is there."""

    def __init__(self, machine: Machine, run: Callable[[], None], warps: int) -> None:
        super().__init__(daemon=True)
        self.machine, self.function, self.warps = machine, run, warps
        self.products: list[Product] = []
        # Those that still read memory, by number, and how many there were.
        self.stores: set[int] = set()
        self.n_stores = 0
        self.flags: dict[str, Any] = {}
        self.is_ready: Callable[[], bool] = _always
        self.turn = threading.Semaphore(0)
        self.pace = 1.0

    @torch.no_grad()
    def run(self) -> None:
        self.turn.acquire()
        try:
            self.machine.check()
            self.function()
            assert not self.products, "a role ends before its products"
            assert not (self.stores and self.machine.is_strict), "a role ends before its stores"
        except BaseException as error:
            self.machine.error = self.machine.error or error
        self.machine.leave(self)


def _always() -> bool:
    return True


class Machine:
    """A program: its roles take turns, drawn at random; copies come about in between.

    is_strict: what a product reads is there from when it is issued until it is waited for, nothing
    is on its way when roles end, and some roles and the copies may be far slower than others.
    """

    def __init__(self, seed: int, is_strict: bool = False) -> None:
        self.random = random.Random(seed)
        self.is_strict = is_strict
        self.copies_by_chance = self.random.choice((0.0, 0.3, 0.9)) if is_strict else 0.3
        self.roles: list[Role] = []
        self.copies: list[Callable[[], None]] = []
        self.named: dict[int, list[int]] = {}
        self.error: BaseException | None = None

    def specialize(self, parts: Sequence[Any], warps: Sequence[int]) -> None:
        self.roles = [
            Role(self, partial(function, *arguments), n)
            for (function, arguments), n in zip(parts, (4, *warps), strict=True)
        ]
        roles = list(self.roles)
        for role in roles:
            role.pace = self.random.choice((1.0, 1.0, 0.001)) if self.is_strict else 1.0
            role.start()
        self._choose().turn.release()
        for role in roles:
            role.join()
        if self.error is not None:
            raise self.error
        assert not (self.copies and self.is_strict), "copies land after a program's end"
        while self.copies:
            self.copies.pop(0)()
        assert not any(arrived for _, arrived in self.named.values()), "arrivals nobody waits for"

    def check(self) -> None:
        """Of a role: end where another has failed."""
        if self.error is not None:
            raise SystemExit

    def leave(self, role: Role) -> None:
        self.roles.remove(role)
        if self.roles:
            try:
                chosen = self._choose()
            except BaseException as error:
                self.error, chosen = error, self.roles[0]
            chosen.turn.release()

    def _choose(self) -> Role:
        """Who is next. Copies come about before, some of them or as many as it takes."""
        if self.error is not None:
            return self.roles[0]
        while self.copies and self.random.random() < self.copies_by_chance:
            self._copy()
        while True:
            ready = [role for role in self.roles if role.is_ready()]
            if ready and self.is_strict:
                return self.random.choices(ready, [role.pace for role in ready])[0]
            if ready:
                return self.random.choice(ready)
            if not self.copies:
                self.error = Deadlock("every role waits")
                return self.roles[0]
            self._copy()

    def _copy(self) -> None:
        self.copies.pop(self.random.randrange(len(self.copies)))()

    def give_way(self, is_ready: Callable[[], bool] = _always) -> None:
        """Let others run; return when what is waited for is there."""
        role = _role()
        if is_ready is _always and self.random.random() < 0.5:
            return
        role.is_ready = is_ready
        chosen = self._choose()
        if chosen is not role:
            chosen.turn.release()
            role.turn.acquire()
        role.is_ready = _always
        self.check()

    # ------------------------------------------------------------ what roles ask for

    def arrive_named(self, barrier: Any, threads: Any, warps: int) -> list[int]:
        """Returns: how often the barrier has been passed, in a list that goes on counting."""
        state = self.named.setdefault(int(barrier), [0, 0])
        assert 0 < int(barrier) < 16
        state[1] += 32 * warps
        assert state[1] <= int(threads), "more threads at a named barrier than it waits for"
        if state[1] == int(threads):
            state[0], state[1] = state[0] + 1, 0
        return state


_machine: Machine | None = None


def _now() -> Machine:
    assert _machine is not None
    return _machine


def _role() -> Role:
    role = threading.current_thread()
    assert isinstance(role, Role)
    return role


def _barrier_arrive(barrier: Any, threads: Any, warps: int) -> None:
    assert warps == _role().warps
    _now().arrive_named(barrier, threads, warps)
    _now().give_way()


def _barrier_sync(barrier: Any, threads: Any, warps: int) -> None:
    assert warps == _role().warps
    before = _now().named.setdefault(int(barrier), [0, 0])[0]
    state = _now().arrive_named(barrier, threads, warps)
    _now().give_way(lambda: state[0] > before)


class _Mbarrier:
    @staticmethod
    def MBarrierLayout() -> str:
        return "barrier"

    @staticmethod
    def init(barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    @staticmethod
    def expect(barrier: Barrier, nbytes: int) -> None:
        barrier.bytes += nbytes
        _Mbarrier.arrive(barrier, 1)

    @staticmethod
    def arrive(barrier: Barrier, count: int = 1) -> None:
        barrier.pending -= count
        barrier.settle()
        _now().give_way()

    @staticmethod
    def wait(barrier: Barrier, phase: Any) -> None:
        _now().give_way(lambda: barrier.ended & 1 != int(phase))


def _tma_load(desc: Descriptor, at: Sequence[Any], barrier: Barrier, tile: Shared) -> None:
    at = [int(x) for x in at]
    tile.memory.fill_(float("nan"))

    def copy() -> None:
        tile.store(desc.read(at).as_subclass(Value))
        barrier.bytes -= desc.block_type.nbytes
        assert barrier.bytes >= 0, "bytes that nobody expects"
        barrier.settle()

    _now().copies.append(copy)
    _now().give_way()


def _tma_store(desc: Descriptor, at: Sequence[Any], tile: Shared) -> None:
    _send(desc.write, at, tile)


def _tma_reduce_add(desc: Descriptor, at: Sequence[Any], tile: Shared) -> None:
    _send(desc.add, at, tile)


def _send(put: Callable[..., None], at: Sequence[Any], tile: Shared) -> None:
    role, at = _role(), [int(x) for x in at]
    number = role.n_stores
    role.n_stores += 1
    role.stores.add(number)

    def copy() -> None:
        put(at, tile.tile())
        role.stores.remove(number)

    _now().copies.append(copy)
    _now().give_way()


def _tma_store_wait(pending: int) -> None:
    role = _role()
    # All but the last ones; which of those are done is not said.
    stop = role.n_stores - pending
    _now().give_way(lambda: all(number >= stop for number in role.stores))


def _warpgroup_mma(left: Any, right: Any, acc: Any, use_acc: bool = True, is_async: bool = False):
    product = Product(left, right, acc, use_acc)
    _role().products.append(product)
    if not is_async:
        return _warpgroup_mma_wait(0, [product])
    _now().give_way()
    return product


def _warpgroup_mma_wait(num_outstanding: int, deps: Sequence[Product]) -> Any:
    products = _role().products
    while len(products) > num_outstanding:
        products.pop(0).make()
    made = [x if getattr(x, "done", None) is None else x.done for x in deps]
    return made[0] if len(made) == 1 else tuple(made)


def _wait_for_last() -> None:
    """What the launch before wrote is there."""
    _show(_PROGRAM.hidden)


def _hide(written: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns: the tensors, which are NaN now (or a number that nothing is), and what they held."""
    hidden = [(x, x.clone()) for x in written]
    for x, _ in hidden:
        x.fill_(float("nan") if x.is_floating_point() else -7)
    return hidden


def _show(hidden: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    while hidden:
        x, content = hidden.pop()
        x.copy_(content)


def _flag_declare(name: str, some_int: Any) -> None:
    assert name not in _role().flags, "a register is declared twice"
    _role().flags[name] = 0


def _flag_vote(name: str, partition: int, x: Any, limit: str) -> None:
    (bound,) = struct.unpack(">f", bytes.fromhex(limit[2:]))
    assert name in _role().flags
    _role().flags[name] = int(bool((x >= bound).any()))


def _lanes_keep(name: str, x: Any) -> None:
    assert name in _role().flags and x.shape == (32,) and _role().warps == 1
    _role().flags[name] = x.clone()


def _lanes_read(name: str, lane: Any) -> Any:
    return _role().flags[name][int(lane)]


def _as_blocks(ring: Shared, n_blocks: int, rows: int, width: int) -> Shared:
    return Shared(ring.memory.view(n_blocks, 1, rows, width))


def _exp2_fast(x: Any) -> Any:
    found = torch.exp2(x)
    return torch.where(found < 2.0**-126, torch.zeros_like(found), found)


# In place of what `kernels/gluon.py` brings or says in PTX.
_STAND_INS: dict[str, Any] = {
    "as_atoms": lambda ring, n, width: _as_blocks(ring, n, 8, width),
    "as_blocks": _as_blocks,
    "barrier_arrive": _barrier_arrive,
    "barrier_sync": _barrier_sync,
    "begin_next": lambda: None,
    "exp2_fast": _exp2_fast,
    "fence_async_shared": lambda: None,
    "flag_declare": _flag_declare,
    "flag_read": lambda name, some_int: _role().flags[name],
    "flag_vote": _flag_vote,
    "fresh": lambda x, build: x,
    "lanes_keep": _lanes_keep,
    "lanes_read": _lanes_read,
    "mbarrier": _Mbarrier,
    "pack_pairs": lambda x, dtype, rows, cols: x.to(dtype),
    "sync_partition": lambda: None,
    "tanh_fast": torch.tanh,
    "tma_load": _tma_load,
    "tma_reduce_add": _tma_reduce_add,
    "tma_store": _tma_store,
    "tma_store_wait": _tma_store_wait,
    "wait_for_last": lambda: _wait_for_last(),
    "unpack_pairs": lambda x, dtype, layout, rows, cols: x,
    "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_init": lambda x: x,
    "warpgroup_mma_wait": _warpgroup_mma_wait,
}


# ---------------------------------------------------------------- the language


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    if layout == "barrier":
        return Barriers(shape[0])
    if len(shape) == 2 and dtype == torch.float32:
        return Floats(torch.full(tuple(shape), float("nan"), dtype=dtype))
    if len(shape) == 2:
        return Numbers(torch.full(tuple(shape), -7, dtype=dtype))
    slots, rows, columns = shape[0], *shape[-2:]
    # What is not a tile of products has no panels.
    width = columns if dtype == torch.float32 else min(columns, _PANEL)
    return Shared(torch.full((slots, columns // width, rows, width), float("nan"), dtype=dtype))


def _both(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: function(*torch.broadcast_tensors(value(a), value(b)))


def _where(condition: Any, a: Any, b: Any) -> Any:
    a, b = value(a), value(b)
    return torch.where(value(condition), a, b)


def _atomic_add(pointer: Pointer, x: Any) -> Any:
    before = pointer.load()
    pointer.store(before + x)
    _now().give_way()
    return before.long()


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
    x = pointer.load(mask, other)
    return x if x.is_floating_point() else x.long()


class _Layout:
    """One that nobody asks anything."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    get_default_for = classmethod(lambda cls, *arguments: cls())


# hidden: what a program has to wait for, see `_hide`.
_PROGRAM = SimpleNamespace(id=0, count=1, hidden=[])
_LANGUAGE: dict[str, Any] = {
    "abs": torch.abs,
    "allocate_shared_memory": _allocate,
    "arange": lambda start, stop, layout=None: value(torch.arange(start, stop)),
    "atomic_add": _atomic_add,
    "cast": lambda x, dtype: value(x).to(dtype),
    "cdiv": lambda a, b: (a + b - 1) // b,
    "constexpr": None,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "cumsum": lambda x, axis: torch.cumsum(x, axis),
    "exp2": torch.exp2,
    "floor": torch.floor,
    "full": lambda shape, x, dtype, layout=None: value(torch.full(tuple(shape), x, dtype=dtype)),
    "load": _load,
    "log2": torch.log2,
    "max": lambda x, axis: x.amax(axis),
    "maximum": _both(torch.maximum),
    "minimum": _both(torch.minimum),
    "permute": lambda x, order: x.permute(order),
    "reshape": lambda x, shape: x.reshape(shape),
    "num_programs": lambda axis: value(_PROGRAM.count),
    "program_id": lambda axis: value(_PROGRAM.id),
    "range": range,
    "static_range": range,
    "store": lambda pointer, x, mask=None: pointer.store(x, mask),
    "sum": lambda x, axis: x.sum(axis),
    "to_tensor": value,
    "warp_specialize": lambda parts, warps, registers: _now().specialize(parts, warps),
    "where": _where,
    "zeros": lambda shape, dtype, layout=None: value(torch.zeros(tuple(shape), dtype=dtype)),
    "zeros_like": torch.zeros_like,
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int32", "int64")},
    **{
        name: lambda *arguments, **options: None
        for name in (
            "BlockedLayout", "DistributedLinearLayout", "DotOperandLayout",
            "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout",
        )
    },
    "NVMMASharedLayout": _Layout,
}  # fmt: skip
_language = SimpleNamespace(**_LANGUAGE)
_translated: dict[int, Any] = {}


def _translate(name: str, x: Any) -> Any:
    """What a kernel's global is here."""
    if name in _STAND_INS:
        return _STAND_INS[name]
    if isinstance(x, ModuleType) and x.__name__ in (
        "triton.language", "triton.experimental.gluon.language"
    ):  # fmt: skip
        return _language
    kind = type(x).__name__
    if kind == "constexpr":
        return x.value
    if kind == "ConstexprFunction":
        return x.fn if x.fn.__name__ not in ("accumulator", "left_operand") else lambda *_: None
    if kind in ("JITFunction", "GluonJITFunction", "InterpretedFunction"):
        return translated(x)
    return x


def translated(function: Any) -> Any:
    """A function that Triton would compile, as plain Python."""
    found = _translated.get(id(function))
    if found is None:
        plain = function.fn
        names = _names_of(plain.__code__)
        known = plain.__globals__
        scope: dict[str, Any] = {"__builtins__": __builtins__}
        found = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
        _translated[id(function)] = found
        scope.update({n: _translate(n, known[n]) for n in names if n in known})
    return found


def _names_of(code: Any) -> set[str]:
    inner = [c for c in code.co_consts if hasattr(c, "co_names")]
    return set(code.co_names).union(*map(_names_of, inner))


def _given(x: Any) -> Any:
    """A kernel's argument."""
    if isinstance(x, shim.TensorDescriptor):
        return Descriptor(x)
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if isinstance(x, tuple):
        found = [_given(item) for item in x]
        return type(x)(*found) if hasattr(x, "_fields") else tuple(found)
    return value(x) if type(x) is int else x


@torch.no_grad()
def emulate(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    seed: int = 0,
    *,
    is_strict: bool = False,
    unfinished: Sequence[torch.Tensor] = (),
) -> None:
    """Run a grid of a kernel's programs, one after the other. is_strict: see `Machine`. unfinished:
    what the launch before writes, which has not ended when a program begins."""
    global _machine
    given = [
        x if p.is_constexpr else _given(x) for p, x in zip(kernel.params, arguments, strict=True)
    ]
    run = translated(kernel)
    for program in range(grid[0]):
        _PROGRAM.id, _PROGRAM.count = program, grid[0]
        _machine = Machine(seed * 1000 + program, is_strict)
        hidden = _PROGRAM.hidden = _hide(unfinished)
        try:
            run(*given)
        finally:
            _machine = None
            _show(hidden)


def _tensors_of(x: Any) -> list[torch.Tensor]:
    """Those that an argument holds."""
    if isinstance(x, shim.TensorDescriptor):
        return [x.base]
    if isinstance(x, tuple):
        return [tensor for item in x for tensor in _tensors_of(item)]
    return [x] if isinstance(x, torch.Tensor) else []


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not bool(((a == b) | (a.isnan() & b.isnan())).all())


@contextmanager
def emulated(
    seed: int = 0, skip: Sequence[str] = (), *, is_strict: bool = False
) -> Iterator[list[str]]:
    """Launches run here. skip: kernels that are not. Yields: the names of all."""
    names: list[str] = []
    written: list[torch.Tensor] = []

    def run(kernel: Any, grid: tuple[int, ...], config: Any, arguments: Sequence[Any]) -> None:
        names.append(kernel.__name__)
        unfinished = list(written) if config.begins_early else []
        written.clear()
        before = [(x, x.clone()) for x in _tensors_of(tuple(arguments))]
        if kernel.__name__ not in skip:
            emulate(
                kernel, grid, arguments, seed, is_strict=is_strict, unfinished=unfinished
            )  # fmt: skip
        written.extend(x for x, content in before if _differ(x, content))

    was = launching._run
    launching._run = run
    try:
        yield names
    finally:
        launching._run = was
