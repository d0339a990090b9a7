"""Random calls of attention, each from one number: shapes, masks, terms, layouts, dtypes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.dense.budget import Case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIMS = (8, 16, 32, 40, 64, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 257, 383, 512, 700)
HEADS = ((1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (8, 1))


@dataclass
class Call:
    """A case, and in words what it is made of."""

    case: Case
    words: str


def draw(seed: int, device: torch.device, values: int = 0) -> Call:
    """The call of a seed. values: which of the draws of its tensors.

    Form, dtype and dims are the same for the seeds of one ten, so that not each call compiles
    kernels of its own.
    """
    form = random.Random(seed // 10)
    dtype = form.choice(DTYPES)
    D = form.choice(DIMS)
    E = D if form.random() < 0.7 else form.choice(DIMS)
    is_packed = form.random() < 0.4
    dice = random.Random(1_000_003 + seed)
    H, G = dice.choice(HEADS)
    documents = [(0, 0)]
    if is_packed:
        documents = [(_length(dice), _length(dice)) for _ in range(dice.randint(1, 5))]
    M, N = _length(dice), _length(dice)
    B = len(documents) if is_packed else dice.choice((1, 2, 3))
    if is_packed:
        M, N = (max(side) for side in zip(*documents, strict=True))
    mask, mask_words = _mask(form, dice, B, M, N, device)
    options: dict[str, Any] = {"mask": mask}
    seed_of_values = 8 * seed + values
    tensors = _tensors(
        dice, seed_of_values, (B, M, N, H, G, D, E), dtype, device, documents, is_packed
    )
    layout = dice.choice(tuple(LAYOUTS))
    tensors = {name: LAYOUTS[layout](x) for name, x in tensors.items()}
    tensors |= _terms(form, dice, seed_of_values, (B, M, N, H), device)
    options |= _scalars(form, dice)
    if is_packed:
        options |= _bounds(dice, documents, device)
    op = ("attention_varlen" if is_packed else "attention") + form.choice(("", "_partial"))
    scalars = {name: x for name, x in options.items() if isinstance(x, float)}
    lengths = f"documents {documents}" if is_packed else f"B {B} M {M} N {N}"
    words = (
        f"{op} {dtype} {lengths} H {H} G {G} D {D} E {E} {layout}; {mask_words}; "
        f"{sorted(tensors.keys() - set('qkv'))} {scalars} {sorted(options.keys() - scalars.keys())}"
    )
    return Call(Case(op, f"seed {seed}", tensors, options, seed_of_values), words)


def _length(dice: random.Random) -> int:
    return dice.choice(LENGTHS) if dice.random() < 0.7 else dice.randint(1, 400)


def _ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


# ---------------------------------------------------------------- masks


def _mask(
    form: random.Random, dice: random.Random, B: int, M: int, N: int, device: torch.device
) -> tuple[tw.Mask, str]:
    """An expression of up to three leaves; its shape is the form's, its numbers the call's."""

    def lengths(low: int, high: int) -> list[int]:
        return [dice.randint(low, high) for _ in range(B)]

    leaves: dict[str, Callable[[], tuple[tw.Mask, Any]]] = {
        "causal": lambda: (tw.causal(), ""),
        "window": lambda: _named(tw.window, dice.randint(0, N), dice.choice((0, 3, None))),
        "offset": lambda: _named(lambda x: tw.causal(offset=_ints(x, device)), lengths(-9, N)),
        "padding": lambda: _named(lambda x: tw.key_padding(_ints(x, device)), lengths(0, N)),
        "left": lambda: _named(lambda x: tw.left_padding(_ints(x, device)), lengths(0, N)),
        "prefix": lambda: _named(lambda x: tw.prefix(_ints(x, device)), lengths(0, N)),
        "chunked": lambda: _named(tw.chunked, dice.choice((1, 16, 50, 128))),
        "checkered": lambda: (tw.from_function(_checkered), ""),
        "full": lambda: (tw.full(), ""),
    }
    name = form.choice(list(leaves))
    mask, numbers = leaves[name]()
    words = f"{name}({numbers})"
    for _ in range(form.choice((0, 0, 1, 1, 2))):
        sign, name = form.choice(("&", "&", "|")), form.choice(list(leaves))
        other, numbers = leaves[name]()
        mask = mask & other if sign == "&" else mask | other
        words = f"({words} {sign} {name}({numbers}))"
    if form.random() < 0.1:
        return ~mask, f"~{words}"
    return mask, words


def _named(make: Callable[..., tw.Mask], *numbers: Any) -> tuple[tw.Mask, Any]:
    return make(*numbers), numbers


def _checkered(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    return (m + 2 * n + h + b) % 3 != 0


# ---------------------------------------------------------------- tensors


def _tensors(
    dice: random.Random, seed: int, sizes: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, documents: list[tuple[int, int]], is_packed: bool,
) -> dict[str, Tensor]:  # fmt: skip
    B, M, N, H, G, D, E = sizes
    rows, keys = (B, M), (B, N)
    slack = dice.choice((0, 3, 130))
    if is_packed:
        rows, keys = ((sum(side) + slack,) for side in zip(*documents, strict=True))
    generator = torch.Generator().manual_seed(seed)
    size = dice.choice((1.0, 1.0, 3.0))
    shapes = {"q": (*rows, H, D), "k": (*keys, G, D), "v": (*keys, G, E)}
    tensors = {n: size * torch.randn(*s, generator=generator) for n, s in shapes.items()}
    if is_packed and slack:
        for x in tensors.values():
            x[-slack:] = float("nan")
    return {name: x.to(device, dtype) for name, x in tensors.items()}


def _terms(
    form: random.Random, dice: random.Random, seed: int, sizes: tuple[int, int, int, int],
    device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    B, M, N, H = sizes
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
    return found


def _scalars(form: random.Random, dice: random.Random) -> dict[str, float]:
    found = {}
    if form.random() < 0.2:
        found["softcap"] = dice.choice((1.5, 20.0))
    if form.random() < 0.2:
        found["dropout_p"] = dice.choice((0.1, 0.5))
    if dice.random() < 0.2:
        found["scale"] = dice.choice((0.05, 0.3))
    return found


def _bounds(
    dice: random.Random, documents: list[tuple[int, int]], device: torch.device
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    uses = dice.random() < 0.4
    for side, name in enumerate("qk"):
        sizes = [document[side] for document in documents]
        starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        found[f"cu_seqlens_{name}"] = _ints(starts, device)
        if uses:
            found[f"seqused_{name}"] = _ints([dice.randint(0, n) for n in sizes], device)
        if dice.random() < 0.5:
            found[f"max_seqlen_{name}"] = max(sizes)
    return found


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def _sliced(x: Tensor) -> Tensor:
    """Inside rows that are one feature longer, so that strides are odd and unaligned."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 1), float("nan"))
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
