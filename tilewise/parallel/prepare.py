"""What a call of context parallelism does at its first use: check, choose, agree, plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.mask import Leaf, Mask
from ..core.mask_leaves import full
from ..core.shapes import check_broadcastable
from ..dense.checks import check_are_tensors, check_call, check_out_dtype
from ..dense.choice import choose_for_pieces
from .agree import Memo, Signature, agree, describe_mask
from .choice import ScheduleChoice
from .choice import choose as choose_schedule
from .comm import Link
from .layout import Layout, check_layout
from .masks import leaves, of_heads, tells_heads_apart
from .numbered import Numbering
from .pieces import OP, backend_of_pieces
from .plan import Plan, Request, make_plan
from .ulysses import HeadSwap, share_of
from .visible import on_device
from .volumes import Shape


class Where(NamedTuple):
    """The arguments that say where and how, not what."""

    mesh: Any
    group: Any
    layout: Layout
    schedule: str
    mask: Mask
    backend: str


@dataclass(frozen=True)
class Given:
    """The arguments of one call on one rank. links: of its mesh or group, outer first.

    scalars: scale, softcap, dropout_p, is_deterministic. tensors: alibi_slopes, bias, sinks.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    where: Where
    links: tuple[Link, ...]
    scalars: dict[str, Any]
    tensors: dict[str, Tensor | None]
    out_dtype: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        found = 1
        for link in self.links:
            found *= link.ranks
        return found

    @property
    def rank(self) -> int:
        found = 0
        for link in self.links:
            found = found * link.ranks + link.rank
        return found

    @property
    def floating(self) -> dict[str, Tensor | None]:
        return {"q": self.q, "k": self.k, "v": self.v, **self.tensors}


@dataclass(frozen=True)
class Prepared:
    """What the first call of its kind found, kept for those like it.

    swap: the ranks that trade heads, or None.
    kept: what must live as long as this, since its identity is part of the key.
    """

    schedule: str
    plan: Plan
    ring_link: Link
    ring_layout: Layout
    swap: HeadSwap | None
    is_split: bool
    backend: str
    numbering: Numbering | None
    kept: tuple[Any, ...]


_prepared: Memo[Prepared] = Memo()


def scalars_of(
    scale: float | None, softcap: float | None, dropout_p: float, deterministic: bool
) -> dict[str, Any]:
    """`Given.scalars` from a call's arguments."""
    named = {"scale": scale, "softcap": softcap, "dropout_p": dropout_p}
    return {**named, "is_deterministic": deterministic}


def links_of(mesh: Any, group: Any, op: str = OP) -> tuple[Link, ...]:
    """The mesh's groups, outer first."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"{op}: needs torch.distributed's process group; call init_process_group first."
        )
    if mesh is None:
        group = dist.group.WORLD if group is None else group
        # Where this rank is no member, new_group gave it a number.
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError(
                f"{op}: group must be a process group that this rank is in, got {group!r}."
            )
        return (Link.of(group),)
    if group is not None:
        raise ValueError(f"{op}: takes a mesh or a group, got both.")
    if not hasattr(mesh, "get_group"):
        raise ValueError(f"{op}: mesh must be a DeviceMesh, got {type(mesh).__name__}.")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"{op}: mesh must have one or two dims, got {mesh.ndim}.")
    return tuple(Link.of(mesh.get_group(dim)) for dim in range(mesh.ndim))


def link_of(op: str, mesh: Any, group: Any) -> Link:
    """The one group of an op that knows no other."""
    links = links_of(mesh, group, op)
    if len(links) != 1:
        raise ValueError(f"{op}: mesh must have one dim, got {len(links)}.")
    return links[0]


def prepare(given: Given) -> Prepared:
    """What a call like this one found at its first use, or find it."""
    return _prepared.recall(given.links, _key(given), lambda: _prepare(given))


def _key(given: Given) -> tuple[Any, ...]:
    where = given.where
    mask = where.mask
    what = mask.key if isinstance(mask, Mask) and mask.key is not None else _identity(mask)
    layout = where.layout.key if isinstance(where.layout, Layout) else id(where.layout)
    named = (*given.floating.values(), *given.scalars.values(), where.schedule, where.backend)
    forms = tuple(_form_of(x) for x in (*named, given.out_dtype))
    return what, layout, forms, torch.is_grad_enabled()


def _form_of(x: Any) -> Any:
    """What a key holds of an argument, be it right or wrong: a rank whose call cannot be looked up
    would raise before the others hear of it."""
    if isinstance(x, Tensor):
        return tuple(x.shape), x.dtype, x.requires_grad, x.device
    is_plain = x is None or isinstance(x, str | int | float | torch.dtype)
    return x if is_plain else (type(x), repr(x))


def _identity(mask: Any) -> tuple[int, ...]:
    """Of a mask with tensors: which it is, and how often they were written to in place."""
    if not isinstance(mask, Mask):
        return (id(mask),)
    tensors = [x for leaf in leaves(mask) if isinstance(leaf, Leaf) for x in leaf.parts()[1]]
    return id(mask), *(0 if x.is_inference() else x._version for x in tensors)


def _prepare(given: Given) -> Prepared:
    error: Exception | None = None
    prepared: Prepared | None = None
    signature: Signature = {}
    try:
        check(given)
        schedule = choose(given).name
        q, where = given.q, given.where
        sizes = (q.shape[0], q.shape[2], where.layout.size)
        # A predicate is evaluated where its tensors are; everything else is read on the host.
        mask = where.mask
        if mask.has_predicate:
            mask = mask.lowered(*sizes, sizes[2], q.device)
        mask = on_device(mask, *sizes, "cpu")
        mask.check_contents(*sizes[:2])
        prepared = _plan(given, schedule, mask)
        signature = _sign(given, schedule, mask)
    # Any: a predicate may raise what it likes, and the other ranks wait for this one's word.
    except Exception as found:
        error = found
    agree(OP, given.links, signature, error)
    assert prepared is not None
    return prepared


def check(given: Given) -> None:
    """What one rank can say of its own arguments."""
    q, where, layout = given.q, given.where, given.where.layout
    named = given.floating.items()
    check_are_tensors(
        OP, {name: x for name, x in named if x is not None or name in ("q", "k", "v")}
    )
    if given.out_dtype is not None:
        check_out_dtype(OP, given.out_dtype)
    check_layout(OP, layout, given.ranks)
    if q.dim() != 4:
        raise ValueError(
            f"{OP}: q must be [B, own tokens, H, D], got {list(q.shape)}; packed documents are one "
            "batch row under mask=documents(cu_seqlens)."
        )
    own = layout.lengths[given.rank]
    for name, x in (("q", q), ("k", given.k), ("v", given.v)):
        if x.dim() == 4 and x.shape[1] != own:
            raise ValueError(
                f"{OP}: rank {given.rank} of layout {layout.name} holds {own} tokens, got "
                f"{x.shape[1]} in {name}."
            )
    terms = {**given.scalars, **given.tensors, "bias": None}
    # The mask is of the whole sequence; what is no mask is refused here.
    mask = full() if isinstance(where.mask, Mask) else where.mask
    check_call(OP, q, given.k, given.v, mask, terms, {})
    bias = given.tensors["bias"]
    if bias is not None:
        if not bias.is_floating_point():
            raise ValueError(f"{OP}: bias must be floating, got {bias.dtype}.")
        sizes = {"B": q.shape[0], "H": q.shape[2], "own tokens": own, "S": layout.size}
        check_broadcastable(OP, "bias", bias, sizes)
    if choose_for_pieces(OP, where.backend, q, given.k, given.v) == "reference":
        raise NotImplementedError(
            f"{OP}: the reference backend keeps all scores and owns no buffers; use "
            "backend='tiled'."
        )


def choose(given: Given) -> ScheduleChoice:
    """The schedule of a call, and why."""
    q, k, v, bias = given.q, given.k, given.v, given.tensors["bias"]
    (B, _, H, D), G, E = q.shape, k.shape[2], v.shape[3]
    shape = Shape(B, given.where.layout.size, H, G, D, E, q.element_size())
    why_not = ""
    # Where a rank holds one token, one row may be that token's or all tokens': it cannot tell, and
    # all have to choose alike.
    is_for_all = 1 not in given.where.layout.lengths
    if bias is not None and bias.dim() > 1 and not (bias.shape[-2] == 1 and is_for_all):
        why_not = "a bias with rows of its own for each query does not travel with the heads"
    inner = given.links[-1].ranks
    if given.scalars["dropout_p"] > 0.0 and H % inner:
        why_not = f"dropout counts heads, so {inner} ranks that trade them must divide H = {H}"
    has_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    sizes = tuple(link.ranks for link in given.links)
    return choose_schedule(
        given.where.schedule, shape, sizes, has_grad=has_grad, why_not_ulysses=why_not
    )


def _plan(given: Given, schedule: str, mask: Mask) -> Prepared:
    """This rank's plan. mask: of the whole call, on the host."""
    q, layout, links = given.q, given.where.layout, given.links
    B, _, H = q.shape[:3]
    has_dropout = given.scalars["dropout_p"] > 0.0
    positioned = any(given.tensors[name] is not None for name in ("alibi_slopes", "bias"))
    trades = schedule in ("ulysses", "usp")
    inner = links[-1] if trades else Link.alone()
    outer = Link.alone() if schedule == "ulysses" else links[0]
    heads, swap, numbering = range(H), None, None
    if trades:
        heads = share_of(H, inner.rank, inner.ranks)
        mask = of_heads(mask, heads.start, heads.stop)
        swap = HeadSwap(inner, layout.within(outer.rank * inner.ranks, inner.ranks))
        layout = layout.merged(inner.ranks)
        if has_dropout and inner.ranks > 1:
            numbering = Numbering(B, inner.rank, inner.ranks)
    request = Request(B, max(1, len(heads)), has_dropout or positioned, q.device)
    plan = make_plan(mask, layout, outer.rank, request, gathers=schedule == "all_gather")
    return Prepared(
        schedule=schedule,
        plan=plan,
        ring_link=outer,
        ring_layout=layout,
        swap=swap,
        is_split=not (has_dropout or tells_heads_apart(mask)),
        backend=backend_of_pieces(OP, given.where.backend, q, given.k, given.v),
        numbering=numbering,
        kept=(given.where.mask, given.where.layout),
    )


def _sign(given: Given, schedule: str, mask: Mask) -> Signature:
    """What must be alike on every rank, in words."""
    layout = given.where.layout.key
    signature = {"schedule": schedule, "layout": layout, "mask": describe_mask(mask)}
    # A rank under no_grad sends nothing backward, where the others would wait for it.
    signature["grad mode"] = str(torch.is_grad_enabled())
    for name, x in given.floating.items():
        if x is None:
            signature[name] = "None"
            continue
        shape: list[int | str] = list(x.shape)
        if name in "qkv":
            # Lengths follow from the layout.
            shape[1] = "own"
        elif name == "bias" and len(shape) > 1:
            shape[-2] = "rows"
        signature[name] = f"{x.dtype} {shape}, requires_grad {x.requires_grad}"
    return signature | {name: str(value) for name, value in given.scalars.items()}
