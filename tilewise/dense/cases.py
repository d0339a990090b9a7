"""The calls that verify dense attention: every mask, term, shape and stride that it promises.

Small enough for the O(M N) oracle, large enough to cross tiles; lengths are not multiples of
anything, H != G, M != N, and what no query may see is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.case import Case
from ..core.mask import Mask
from ..core.mask_bits import blocks, from_function
from ..core.mask_leaves import (
    causal,
    chunked,
    documents,
    full,
    intervals,
    key_padding,
    left_padding,
    prefix,
    window,
)
from ..core.shapes import accumulator_of

Shape = tuple[int, int, int, int, int, int, int]
_SHAPE: Shape = (2, 67, 149, 6, 2, 16, 16)


@dataclass(frozen=True)
class Recipe:
    """One case before its tensors are drawn.

    shape: B, M, N, H, G, D, E; tensors: their shapes. factor: of q and k. mean: of k and v.
    """

    name: str
    shape: Shape = _SHAPE
    mask: Callable[[], Mask] = full
    options: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    layout: str = "contiguous"
    factor: float = 1.0
    mean: float = 0.0


def _random_blocks() -> Mask:
    visible = torch.rand(2, 1, 5, 10, generator=torch.Generator().manual_seed(7)) > 0.5
    return blocks(visible, 16, 16)


def _random_intervals() -> Mask:
    generator = torch.Generator().manual_seed(7)
    starts = torch.randint(0, 149, (67, 2), generator=generator)
    return intervals(starts, starts + torch.randint(0, 40, (67, 2), generator=generator))


def _packed_rows() -> Mask:
    return window(30, 4) & documents(torch.tensor([[0, 90, 120, 149], [0, 7, 101, 140]]))


def _checkered() -> Mask:
    return from_function(lambda b, h, m, n: (m + 2 * n + h + b) % 3 != 0)


_SQUARE: Shape = (2, 149, 149, 6, 2, 16, 16)
_LONG: Shape = (1, 150, 1100, 2, 1, 32, 32)

DENSE = (
    Recipe("full"),
    Recipe("causal", mask=causal),
    Recipe("causal, square, H = G", (2, 149, 149, 4, 4, 16, 16), causal),
    Recipe("causal, M > N (empty rows)", (2, 149, 67, 6, 2, 16, 16), causal),
    Recipe("causal, several tiles", _LONG, causal),
    Recipe("causal(offset=3)", mask=lambda: causal(offset=3)),
    Recipe("window(20, 0)", mask=lambda: window(20, 0)),
    Recipe("window(0, 9)", mask=lambda: window(0, 9)),
    Recipe("window(5, 5), M > N", (2, 149, 67, 6, 2, 16, 16), lambda: window(5, 5)),
    Recipe("outside a window", mask=lambda: ~window(10, 10)),
    Recipe("key_padding, lengths 0 and 80", mask=lambda: key_padding([0, 80])),
    Recipe("causal & left_padding", _SQUARE, lambda: causal() & left_padding([0, 30])),
    Recipe("prefix-LM", _SQUARE, lambda: causal() | prefix([10, 40])),
    Recipe("causal & documents", _SQUARE, lambda: causal() & documents([0, 60, 60, 149])),
    Recipe("documents per row, window, dropout, ALiBi", mask=_packed_rows,
           options={"dropout_p": 0.2}, tensors={"alibi_slopes": (2, 6)}),
    Recipe(
        "sink tokens + window + documents",
        _SQUARE,
        lambda: causal() & documents([0, 60, 60, 149]) & (window(16, 0) | prefix(4)),
    ),
    Recipe("chunked(32) & causal", _SQUARE, lambda: chunked(32) & causal()),
    Recipe("intervals", mask=_random_intervals),
    Recipe("blocks", mask=_random_blocks),
    Recipe("from_function", mask=_checkered),
    Recipe("from_function & causal", _SQUARE, lambda: _checkered() & causal()),
    Recipe("softcap", mask=causal, options={"softcap": 2.0}),
    Recipe("scale 0.5, softcap 30", options={"scale": 0.5, "softcap": 30.0}),
    Recipe("ALiBi [H]", mask=causal, tensors={"alibi_slopes": (6,)}),
    Recipe("ALiBi [B, H], softcap", options={"softcap": 5.0}, tensors={"alibi_slopes": (2, 6)}),
    Recipe("bias [B, H, M, N]", mask=causal, tensors={"bias": (2, 6, 67, 149)}),
    Recipe("bias [1, H, M, N]", tensors={"bias": (1, 6, 67, 149)}),
    Recipe("bias [B, 1, 1, N]", tensors={"bias": (2, 1, 1, 149)}),
    Recipe("bias [M, 1], softcap", options={"softcap": 4.0}, tensors={"bias": (67, 1)}),
    Recipe("sinks", mask=causal, tensors={"sinks": (6,)}),
    Recipe("sinks, empty rows", (2, 149, 67, 6, 2, 16, 16), causal, tensors={"sinks": (6,)}),
    Recipe("dropout 0.2", mask=causal, options={"dropout_p": 0.2}),
    Recipe("dropout 0.5, sinks", options={"dropout_p": 0.5}, tensors={"sinks": (6,)}),
    Recipe("D 59, E 37", (2, 67, 149, 6, 2, 59, 37), causal),
    Recipe("D 256, E 256", (1, 67, 149, 2, 1, 256, 256), causal),
    Recipe("MQA 7:1", (2, 67, 149, 7, 1, 16, 16), causal),
    Recipe("one query", (3, 1, 700, 6, 2, 32, 32), causal),
    Recipe("one key", (2, 67, 1, 6, 2, 16, 16)),
    Recipe("one of each", (1, 1, 1, 1, 1, 1, 1)),
    Recipe("heads first", mask=causal, layout="heads first"),
    Recipe("fused qkv", (2, 67, 67, 6, 6, 16, 16), causal, layout="fused"),
    Recipe("last dim strided", mask=causal, layout="last dim strided"),
    Recipe("k and v of stride 0", mask=causal, layout="stride 0"),
    Recipe("logits of 100", mask=causal, factor=5.0),
    Recipe("everything at once", _SQUARE, lambda: window(40, 3) & key_padding([149, 90]),
           {"softcap": 8.0, "dropout_p": 0.1},
           {"alibi_slopes": (6,), "bias": (1, 1, 149, 149), "sinks": (6,)}),
)  # fmt: skip

# Documents of queries and keys; some empty on one side or both; three rows belong to nobody.
_CU_Q = (0, 5, 5, 40, 41, 41, 97)
_CU_K = (0, 9, 20, 60, 60, 60, 161)
_PACKED: Shape = (6, 100, 164, 6, 2, 16, 16)
_USED = {"seqused_q": (3, 0, 35, 1, 0, 40), "seqused_k": (9, 4, 0, 0, 0, 90)}

PACKED = (
    Recipe("full", _PACKED),
    Recipe("causal", _PACKED, causal),
    Recipe("window(7, 2)", _PACKED, lambda: window(7, 2)),
    Recipe("key_padding per document", _PACKED, lambda: key_padding([9, 2, 0, 1, 1, 77])),
    Recipe("prefix-LM", _PACKED, lambda: causal() | prefix(5)),
    Recipe("from_function", _PACKED, _checkered),
    Recipe("used lengths, causal", _PACKED, causal, dict(_USED)),
    Recipe("softcap, ALiBi [B, H]", _PACKED, causal, {"softcap": 3.0}, {"alibi_slopes": (6, 6)}),
    Recipe("bias [1, H, M, N]", _PACKED, causal, {}, {"bias": (1, 6, 60, 110)}),
    Recipe("bias [B, 1, 1, N]", _PACKED, full, {}, {"bias": (6, 1, 1, 110)}),
    Recipe("sinks", _PACKED, causal, {}, {"sinks": (6,)}),
    Recipe("dropout 0.3", _PACKED, causal, {"dropout_p": 0.3}),
    Recipe("used lengths, sinks, dropout", _PACKED, causal, {**_USED, "dropout_p": 0.1},
           {"sinks": (6,)}),
    Recipe("D 40, E 24, MQA", (6, 100, 164, 5, 1, 40, 24), causal),
    Recipe("heads first", _PACKED, causal, layout="heads first"),
)  # fmt: skip

# Pieces of a longer sequence, where positions count from the starts.
PIECES = (
    Recipe("piece of causal", mask=causal, options={"q_start": 90, "k_start": 40}),
    Recipe("piece of a window", mask=lambda: window(30, 5), options={"q_start": 60, "k_start": 9}),
    Recipe("piece no query sees", mask=causal, options={"k_start": 500}),
    Recipe("piece, dropout", mask=causal, options={"q_start": 90, "dropout_p": 0.2}),
    Recipe("piece, predicate", mask=_checkered, options={"q_start": 90, "k_start": 40}),
    Recipe("fp32 partial", mask=causal, options={"out_dtype": torch.float32}),
)


# Where rounding shows: dS of a row's only key is 0, and the sum of a row's dS too, which matters
# where keys and values have a mean.
ROUNDING = (
    Recipe("window(0, 0)", mask=lambda: window(0, 0)),
    Recipe("k and v of mean 3", _LONG, mean=3.0),
    Recipe("k and v of mean -2, causal, D 64", (1, 300, 300, 2, 1, 64, 64), causal, mean=-2.0),
)
PACKED_ROUNDING = (Recipe("k and v of mean 3", _PACKED, mean=3.0),)


def cases(op: str, dtype: torch.dtype, device: torch.device) -> list[Case]:
    """Every case of a dense op, tensors drawn from a fixed seed."""
    pieces = PIECES if op.endswith("partial") else ()
    recipes = (*DENSE, *pieces, *ROUNDING)
    if "varlen" in op:
        recipes = (*PACKED, *PACKED_ROUNDING)
    return [_draw(op, recipe, dtype, device, seed) for seed, recipe in enumerate(recipes)]


def _draw(op: str, recipe: Recipe, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    wide = accumulator_of(dtype)

    def draw(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    B, M, N, H, G, D, E = recipe.shape
    packed = "varlen" in op
    batch = () if packed else (B,)
    shapes = {"q": (*batch, M, H, D), "k": (*batch, N, G, D), "v": (*batch, N, G, E)}
    tensors = {name: draw(*shape, dtype=dtype) for name, shape in shapes.items()}
    for name in ("q", "k"):
        tensors[name] *= recipe.factor
    for name in ("k", "v"):
        tensors[name] += recipe.mean
    tensors = _LAYOUTS[recipe.layout](tensors)
    for name, shape in recipe.tensors.items():
        tensors[name] = draw(*shape).abs() if name == "alibi_slopes" else draw(*shape)
    options = {"mask": recipe.mask(), **recipe.options}
    for name in ("seqused_q", "seqused_k"):
        if name in options:
            options[name] = torch.tensor(options[name], dtype=torch.int32, device=device)
    if packed:
        options["cu_seqlens_q"] = torch.tensor(_CU_Q, dtype=torch.int32, device=device)
        options["cu_seqlens_k"] = torch.tensor(_CU_K, dtype=torch.int32, device=device)
        for name, end in (("q", _CU_Q[-1]), ("k", _CU_K[-1]), ("v", _CU_K[-1])):
            tensors[name][end:] = float("nan")
    return Case(op, recipe.name, tensors, options, seed)


def _heads_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.transpose(-3, -2).contiguous().transpose(-3, -2) for n, x in tensors.items()}


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip("qkv", torch.stack([tensors[n] for n in "qkv"], dim=2).unbind(2), strict=True))


def _last_dim_strided(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: x.transpose(-1, -2).contiguous().transpose(-1, -2) for n, x in tensors.items()}


def _stride_0(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    wide = {n: tensors[n][:, :, :1].expand_as(tensors[n]) for n in ("k", "v")}
    return {"q": tensors["q"], **wide}


_LAYOUTS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "contiguous": lambda tensors: tensors,
    "heads first": _heads_first,
    "fused": _fused,
    "last dim strided": _last_dim_strided,
    "stride 0": _stride_0,
}
