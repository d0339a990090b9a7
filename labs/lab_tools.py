"""What the labs share: a meter for bytes, a text table, and the marking of exercises.

`ByteMeter` watches every operation that PyTorch runs, on any device, and keeps two accounts:
traffic: bytes that an operation must read and write, each operand once (a perfect cache);
memory: bytes of the tensors that are alive, and the most that were alive at one time.
Both count whole tensors at the boundary of an operation. What a kernel re-reads or allocates
inside itself is not seen, so the traffic of a fused kernel is a lower bound.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These overwrite their first argument without looking at it.
_WRITE_ONLY = {"copy_", "fill_", "zero_"}


@dataclass(frozen=True)
class Traffic:
    """Bytes that one operation read and wrote."""

    op: str
    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def touched_bytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: a dimension expanded with stride 0 is in memory once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride != 0 else min(size, 1)
    return count * tensor.element_size()


class ByteMeter(TorchDispatchMode):
    """A context that counts the traffic and the live memory of the operations run inside it.

    Only tensors made inside the context count as memory: what existed before is the caller's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Traffic] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()

    @property
    def traffic_bytes(self) -> int:
        return sum(entry.total for entry in self.log)

    def restart_peak(self) -> None:
        """Forget the highest mark so far, to measure the peak of a second phase on its own."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        input_storages = {x.untyped_storage().data_ptr() for x in inputs}
        # An output that shares memory with an input is a view, or the input itself.
        fresh = [x for x in outputs if x.untyped_storage().data_ptr() not in input_storages]
        for tensor in fresh:
            self._watch(tensor.untyped_storage())
        if "empty" not in name:
            self._count(name, inputs, fresh, mutates=func._schema.is_mutable)
        return result

    def _count(
        self,
        name: str,
        inputs: list[Tensor],
        fresh: list[Tensor],
        *,
        mutates: bool,
    ) -> None:
        # A mutating operation writes its first argument.
        written = fresh + inputs[:1] if mutates else fresh
        if not written:
            return
        if name.endswith("_like") or name.startswith("new_"):
            # Only the shape of the argument is looked at.
            read = []
        else:
            read = inputs[1:] if name in _WRITE_ONLY else inputs
        # One tensor given twice, as in x * x, is read once.
        distinct = {id(x): x for x in read}.values()
        self.log.append(
            Traffic(name, sum(map(touched_bytes, distinct)), sum(map(touched_bytes, written)))
        )

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The most bytes alive at one time while `function(*args)` runs, its result included."""
    with ByteMeter() as meter:
        function(*args)
    return meter.peak_bytes


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a header: the first column to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, row in enumerate(cells):
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join([first, *others]).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))


def mark(name: str, attempt: Callable[..., Any], check: Callable[..., None]) -> None:
    """Run an exercise's check on the reader's attempt and say how it went."""
    try:
        check(attempt)
    except NotImplementedError:
        print(f"Exercise {name}: not attempted yet.")
    else:
        print(f"Exercise {name}: right.")


def prove(check: Callable[..., None], solution: Callable[..., Any]) -> None:
    """Assert that a check accepts the solution, and refuses one that answers 0 to everything."""
    check(solution)
    try:
        check(lambda *args, **kwargs: torch.zeros(()))
    except (AssertionError, TypeError):
        return
    raise AssertionError(f"{check.__name__} accepts an answer that is always 0.")
