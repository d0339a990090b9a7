"""Random calls of attention, each from one number: shapes, masks, terms, layouts, dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.gpu.fuzz_masks import Span, draw_mask, ints
from tilewise.core.case import Case
from tilewise.dense.budget import _piece
from tilewise.dense.reference import sequences

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 257, 383, 512, 700)
MOST = 400
HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (8, 1))
NAN = float("nan")


@dataclass
class Call:
    """A case, in words what it is made of, and whether its gradients come through lse alone."""

    case: Case
    words: str
    is_through_lse: bool = False


@dataclass(frozen=True)
class Sizes:
    """documents: of a packed call, queries and keys of each; M and N are then the longest."""

    B: int
    M: int
    N: int
    H: int
    G: int
    D: int
    E: int
    documents: tuple[tuple[int, int], ...]

    @property
    def lengths(self) -> str:
        return (
            f"documents {self.documents}" if self.documents else f"B {self.B} M {self.M} N {self.N}"
        )


def draw(seed: int, device: torch.device, values: int = 0) -> Call:
    """The call of a seed. values: which of the draws of its tensors.

    Form, dtype and dims are the same for the seeds of one ten, so that not each call compiles
    kernels of its own.
    """
    form, dice = random.Random(seed // 10), random.Random(1_000_003 + seed)
    dtype, is_packed = form.choice(DTYPES), form.random() < 0.4
    sizes = _sizes(form, dice, is_packed)
    mask, mask_words = draw_mask(form, dice, Span(sizes.B, sizes.M, sizes.N, device))
    options: dict[str, Any] = {"mask": mask}
    seed_of_values = 8 * seed + values
    layout = dice.choice(tuple(LAYOUTS))
    tensors = _tensors(dice, seed_of_values, sizes, dtype, device)
    tensors = {name: LAYOUTS[layout](x) for name, x in tensors.items()}
    tensors |= _terms(form, dice, seed_of_values, sizes, device)
    options |= _scalars(form, dice)
    if is_packed:
        options |= _bounds(dice, sizes, device)
    op = "attention_varlen" if is_packed else "attention"
    is_partial = form.random() < 0.5
    if is_partial:
        op += "_partial"
        options |= _starts(form, dice, sizes, device)
    is_through_lse = is_partial and form.random() < 0.25
    case = Case(op, f"seed {seed}", tensors, options, seed_of_values)
    is_spoiled = dice.random() < 0.4
    if is_spoiled:
        _spoil(case)
    marks = ["NaN where nobody sees"] * is_spoiled + ["gradients of lse alone"] * is_through_lse
    words = (
        f"{op} {dtype} {sizes.lengths} H {sizes.H} G {sizes.G} D {sizes.D} E {sizes.E} {layout}; "
        f"{mask_words}; {_describe(tensors, options)}; {', '.join(marks)}"
    )
    return Call(case, words, is_through_lse)


def _describe(tensors: dict[str, Tensor], options: dict[str, Any]) -> str:
    terms = {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} by {list(x.stride())}"
        for name, x in tensors.items()
        if name not in ("q", "k", "v")
    }
    plain = {name: x for name, x in options.items() if isinstance(x, (int, float))}
    return f"{terms} {plain} {sorted(options.keys() - plain.keys())}"


def _length(dice: random.Random) -> int:
    return dice.choice(LENGTHS) if dice.random() < 0.7 else dice.randint(1, MOST)


def _sizes(form: random.Random, dice: random.Random, is_packed: bool) -> Sizes:
    D = form.choice(DIMS)
    E = D if form.random() < 0.7 else form.choice(DIMS)
    heads = dice.choice(HEADS)
    if not is_packed:
        return Sizes(dice.choice((1, 2, 3)), _length(dice), _length(dice), *heads, D, E, ())
    documents = tuple((_length(dice), _length(dice)) for _ in range(dice.randint(1, 5)))
    longest = (max(side) for side in zip(*documents, strict=True))
    return Sizes(len(documents), *longest, *heads, D, E, documents)


def _tensors(
    dice: random.Random, seed: int, sizes: Sizes, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    rows: tuple[int, ...] = (sizes.B, sizes.M)
    keys: tuple[int, ...] = (sizes.B, sizes.N)
    slack = dice.choice((0, 3, 130))
    if sizes.documents:
        rows, keys = ((sum(side) + slack,) for side in zip(*sizes.documents, strict=True))
    generator = torch.Generator().manual_seed(seed)
    size = dice.choice((1.0, 1.0, 3.0))
    H, G = sizes.H, sizes.G
    shapes = {"q": (*rows, H, sizes.D), "k": (*keys, G, sizes.D), "v": (*keys, G, sizes.E)}
    tensors = {n: size * torch.randn(*s, generator=generator) for n, s in shapes.items()}
    # Keys and values with a mean show whether the dS of a row add up to 0.
    if seed % 10 < 3:
        for name in ("k", "v"):
            tensors[name] += 2.0
    if sizes.documents and slack:
        for x in tensors.values():
            x[-slack:] = NAN
    return {name: x.to(device, dtype) for name, x in tensors.items()}


def _terms(
    form: random.Random, dice: random.Random, seed: int, sizes: Sizes, device: torch.device
) -> dict[str, Tensor]:
    B, M, N, H = sizes.B, sizes.M, sizes.N, sizes.H
    generator = torch.Generator().manual_seed(seed + 1)
    shapes: dict[str, tuple[int, ...]] = {}
    if form.random() < 0.25:
        shapes["alibi_slopes"] = (B, H) if form.random() < 0.5 else (H,)
    if form.random() < 0.25:
        shapes["bias"] = tuple(n if dice.random() < 0.7 else 1 for n in (B, H, M, N))
    if form.random() < 0.25:
        shapes["sinks"] = (H,)
    found = {n: torch.randn(*s, generator=generator).to(device) for n, s in shapes.items()}
    if "alibi_slopes" in found:
        # Steeper ones make logits of hundreds, whose fp32 rounding is past the bound of an lse.
        found["alibi_slopes"] = found["alibi_slopes"].abs() / 50
    if "bias" in found:
        bias = found["bias"].to(form.choice((torch.float32, *DTYPES)))
        found["bias"] = LAYOUTS[dice.choice(("contiguous", *LAYOUTS))](bias)
    return found


def _scalars(form: random.Random, dice: random.Random) -> dict[str, float]:
    found = {}
    if form.random() < 0.2:
        found["softcap"] = dice.choice((1.5, 20.0))
    if form.random() < 0.2:
        found["dropout_p"] = dice.choice((0.1, 0.5))
    # Kernels are compiled for scales above 0, and for others.
    sign = form.choice((1, 1, 1, 1, 1, 1, -1, 0))
    if sign <= 0 or dice.random() < 0.2:
        found["scale"] = sign * dice.choice((0.05, 0.3))
    return found


def _bounds(dice: random.Random, sizes: Sizes, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    uses = dice.random() < 0.4
    for side, name in enumerate("qk"):
        stored = [document[side] for document in sizes.documents]
        starts = [sum(stored[:i]) for i in range(len(stored) + 1)]
        found[f"cu_seqlens_{name}"] = ints(starts, device)
        if uses:
            found[f"seqused_{name}"] = ints([dice.randint(0, n) for n in stored], device)
        if dice.random() < 0.5:
            found[f"max_seqlen_{name}"] = max(stored)
    return found


def _starts(
    form: random.Random, dice: random.Random, sizes: Sizes, device: torch.device
) -> dict[str, Any]:
    """Where a piece stands, as numbers or as tensors; None for most."""
    kind = form.choice(("", "", "ints", "tensors"))
    names = [name for name in ("q_start", "k_start") if dice.random() < 0.8]
    if kind == "ints":
        return {name: dice.randint(0, 200) for name in names}
    if kind == "tensors":
        return {n: ints([dice.randint(0, 200) for _ in range(sizes.B)], device) for n in names}
    return {}


def _spoil(case: Case) -> None:
    """NaN in every query that sees no key, in every key and value that no query sees, and past
    what is used: none of it exists."""
    tensors = {name: case.tensors[name] for name in "qkv"}
    values = {name: x.clone() for name, x in tensors.items()}
    for x in tensors.values():
        x.fill_(NAN)
    pieces = (_piece(case, {**case.tensors, **x}) for x in (tensors, values))
    for into, source in zip(*map(sequences, pieces), strict=True):
        visible = into.visible()
        rows, keys = visible.any(-1).any(0), visible.any(-2).any(0)
        into.q[rows], into.k[keys], into.v[keys] = source.q[rows], source.k[keys], source.v[keys]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _sliced(x: Tensor) -> Tensor:
    """Inside rows that are one feature longer, so that strides are odd and unaligned."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), NAN)
    wide[..., 1:] = x
    return wide[..., 1:]


def _last_dim_strided(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads first": _heads_first,
    "sliced": _sliced,
    "last dim strided": _last_dim_strided,
}
