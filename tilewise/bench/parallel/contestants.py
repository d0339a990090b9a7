"""Who is timed over ranks: our schedules, with and without messages and work, and PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...core.mask import Mask
from ...dense.api import attention
from ...parallel.api import Run
from ...parallel.comm import Link, Pending
from ...parallel.layout import Layout
from ...parallel.loopback import plain_terms
from ...parallel.prepare import Given, Prepared, Where, links_of, prepare, scalars_of

SCHEDULES = ("ring", "all_gather", "ulysses")
PEERS = {"PyTorch flash": "FLASH_ATTENTION", "PyTorch cuDNN": "CUDNN_ATTENTION"}
BEST_PEER = "PyTorch cuDNN"
# Of a peer's name: every query head gets a kv head of its own.
REPEATED = ", kv heads repeated"

Call = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Muted(Link):
    """A link over which nothing is sent: what should have arrived is what `kept` has of its size.

    Numbers of the same spread, and no copy: zeros would be computed faster, and a copy is work.
    """

    kept: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @classmethod
    def of_link(cls, link: Link) -> Muted:
        return cls(link.group, link.rank, link.ranks)

    def give_way(self, x: Tensor) -> None:
        pass

    def exchange(
        self, kind: str, sent: tuple[Tensor, int], received: tuple[Tensor, int]
    ) -> Pending:
        x: Any = received[0]
        x.set_(self._like(x.numel(), x))
        return Pending([], [])

    def all_gather(self, kind: str, x: Tensor) -> tuple[Tensor, Pending]:
        return self._like(self.ranks * x.numel(), x).view(self.ranks, *x.shape), Pending([], [])

    def all_to_all(
        self, kind: str, x: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Pending]:
        return self._like(sum(received), x), Pending([], [])

    def _like(self, size: int, x: Tensor) -> Tensor:
        key = (size, x.dtype)
        if key not in self.kept:
            self.kept[key] = torch.randn(size, dtype=x.dtype, device=x.device)
        return self.kept[key]


@dataclass(frozen=True)
class Greedy(Link):
    """A link whose messages get no start before the computing."""

    def give_way(self, x: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Work:
    """One rank's tensors of a call: q, k, v of its tokens, and dout where gradients are wanted.

    backend: that ours run on.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    mask: Mask
    backend: str = "auto"

    def run(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Sequence[Tensor]:
        """out, and the gradients of q, k and v where they are wanted."""
        leaves = (self.q, self.k, self.v)
        if self.dout is None:
            with torch.no_grad():
                return (attend(*leaves),)
        out = attend(*leaves)
        return (out, *torch.autograd.grad(out, leaves, self.dout))


@dataclass(frozen=True)
class Contestant:
    """What is timed. active: a context around its calls that is not timed.

    parts: for ours the same without messages, without work, and without either.
    """

    name: str
    call: Call
    active: Callable[[], Any] = nullcontext
    parts: dict[str, Call] = field(default_factory=dict)
    is_ours: bool = True
    note: str = ""


def work_of(
    tensors: Sequence[Tensor], mask: Mask, *, has_gradients: bool, backend: str = "auto"
) -> Work:
    """tensors: q, k, v and dout."""
    q, k, v = (x.detach().requires_grad_(has_gradients) for x in tensors[:3])
    return Work(q, k, v, tensors[3] if has_gradients else None, mask, backend)


def build_single(work: Work) -> Call:
    options: dict[str, Any] = {"mask": work.mask, "backend": work.backend}
    return lambda: work.run(lambda q, k, v: attention(q, k, v, **options))


# ---------------------------------------------------------------- ours


def build_ours(work: Work, layout: Layout, schedule: str, group: Any = None) -> Contestant:
    with torch.set_grad_enabled(work.dout is not None):
        ready = _prepare(work, layout, schedule, group)
    silent, idle = _muted(ready), _idle(ready)
    parts = {
        "local": _call(work, silent),
        "messages": _call(work, idle),
        "neither": _call(work, _muted(idle)),
    }
    return Contestant(schedule, _call(work, ready), parts=parts)


def build_variants(work: Work, layout: Layout, urgent: Any) -> list[Contestant]:
    """The ring on a group whose stream has high priority, and without a head start for messages.

    urgent: that group, or None.
    """
    found = []
    for name, group in (("", None), (", high priority", urgent)):
        if name and group is None:
            continue
        with torch.set_grad_enabled(work.dout is not None):
            ready = _prepare(work, layout, "ring", group)
        if name:
            found.append(Contestant("ring" + name, _call(work, ready)))
        link = ready.ring_link
        greedy = replace(ready, ring_link=Greedy(link.group, link.rank, link.ranks))
        found.append(Contestant(f"ring{name}, no head start", _call(work, greedy)))
    return found


_NO_TENSORS: dict[str, Any] = dict.fromkeys(("alibi_slopes", "bias", "sinks"))


def _prepare(work: Work, layout: Layout, schedule: str, group: Any) -> Prepared:
    where = Where(None, group, layout, schedule, work.mask, work.backend)
    scalars = scalars_of(None, None, 0.0, False)
    links = links_of(None, group)
    return prepare(Given(work.q, work.k, work.v, where, links, scalars, _NO_TENSORS))


def _muted(ready: Prepared) -> Prepared:
    swap = ready.swap
    if swap is not None:
        swap = replace(swap, link=Muted.of_link(swap.link))
    return replace(ready, ring_link=Muted.of_link(ready.ring_link), swap=swap)


def _idle(ready: Prepared) -> Prepared:
    """The same messages, and nothing to compute."""
    plan = ready.plan
    calls = tuple(() for _ in plan.calls)
    return replace(ready, plan=replace(plan, calls=calls, halves=((), ()), whole=()))


def _call(work: Work, ready: Prepared) -> Call:
    terms = plain_terms(work.q, work.k, work.v, work.backend)
    run = Run(ready, terms, work.q.dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if ready.swap is None:
            return run.local(q, k, v, _NO_TENSORS).out
        return run.swapped(q, k, v, _NO_TENSORS, is_partial=False).out

    return lambda: work.run(attend)


# ---------------------------------------------------------------- PyTorch's


def build_peer(work: Work, tokens: int, name: str, *, is_causal: bool) -> Contestant:
    """`torch.distributed.tensor.experimental.context_parallel`, held to one kernel of SDPA.

    It deals causal sequences head and tail as `zigzag` does, so it gets the same tensors,
    transposed as projections give them.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernel = getattr(SDPBackend, PEERS[name.removesuffix(REPEATED)])
    group = work.q.shape[2] // work.k.shape[2] if name.endswith(REPEATED) else 1
    world: Any = dist.group.WORLD
    mesh = DeviceMesh.from_group(world, work.q.device.type)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if group > 1:
            k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    @contextmanager
    def active() -> Iterator[None]:
        with _spread(mesh, tokens, work.q.device, is_causal), sdpa_kernel(kernel):
            yield

    version = f"torch {torch.__version__}"
    return Contestant(name, lambda: work.run(attend), active, is_ours=False, note=version)


@contextmanager
def _spread(mesh: Any, tokens: int, device: torch.device, is_causal: bool) -> Iterator[None]:
    """The context in which SDPA is context parallel; it shards what it is given, here nothing
    that matters."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    options: Any = _attention._cp_options
    was_balanced = options.enable_load_balance
    # Without a causal mask there is nothing to balance, and it refuses to.
    options.enable_load_balance = is_causal
    anchor = torch.zeros(tokens, device=device)
    given: dict[str, Any] = {"buffers": [anchor], "buffer_seq_dims": [0]}
    try:
        with context_parallel(mesh, **given, no_restore_buffers={anchor}):
            yield
    finally:
        options.enable_load_balance = was_balanced
