"""Calls whose lengths and masks live on the device, by name, for graphs and for synchronisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tests.gpu import common
from tests.gpu.common import attention, attention_varlen, ints, normal, packed_qkv, qkv


@dataclass
class Call:
    """attend(q, k, v, lengths) -> out. `others`: what lengths may hold instead, of one shape; each
    gives another out. None where the call reads no lengths."""

    attend: Callable[..., Tensor]
    leaves: list[Tensor]
    lengths: Tensor
    others: list[Tensor]


def padded(mask_of: Callable[[Tensor], tw.Mask], *lengths: Tensor, **options: Any) -> Call:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask_of(lengths), **options)

    return Call(attend, qkv(2, 150, 200), lengths[0].clone(), list(lengths[1:]))


def packed(name: str, *lengths: Tensor, **options: Any) -> Call:
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return attention_varlen(q, k, v, mask=tw.causal(), **{name: lengths}, **options)

    return Call(attend, packed_qkv(200, 200), lengths[0].clone(), list(lengths[1:]))


def terms() -> dict[str, Tensor]:
    return {
        "bias": normal(1, 4, 150, 200, dtype=torch.float32, seed=7),
        "alibi_slopes": normal(4, dtype=torch.float32, seed=8).abs(),
        "sinks": normal(4, dtype=torch.float32, seed=9),
    }


def random_intervals(seed: int) -> Tensor:
    """Starts and stops `[2, 150, 2]`, each of two intervals a query."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 200, (150, 2), generator=generator, dtype=torch.int32)
    sizes = torch.randint(0, 50, (150, 2), generator=generator, dtype=torch.int32)
    return torch.stack([starts, starts + sizes]).to(common.DEVICE)


# Each is made when its test runs, on the device.
CALLS: dict[str, Callable[[], Call]] = {
    "plain": lambda: padded(lambda _: tw.full(), ints(0)),
    "causal": lambda: padded(lambda _: tw.causal(), ints(0)),
    "padding": lambda: padded(
        lambda n: tw.causal() & tw.key_padding(n), ints(200, 3), ints(0, 77), ints(150, 200)
    ),
    "left padding": lambda: padded(
        lambda n: tw.causal() & tw.left_padding(n), ints(0, 190), ints(51, 52)
    ),
    "offsets": lambda: padded(lambda n: tw.causal(offset=n), ints(50, 3), ints(-20, 100)),
    "prefix-LM": lambda: padded(lambda n: tw.causal() | tw.prefix(n), ints(70, 3), ints(0, 200)),
    "documents": lambda: padded(
        lambda n: tw.window(30, 0) & tw.documents(n), ints(0, 64, 65, 200), ints(0, 1, 100, 200)
    ),
    "intervals": lambda: padded(
        lambda n: tw.intervals(n[0], n[1]),
        random_intervals(1),
        random_intervals(2),
    ),
    "outside": lambda: padded(lambda n: ~tw.key_padding(n), ints(10, 3), ints(199, 0)),
    "terms": lambda: padded(lambda n: tw.key_padding(n), ints(200, 3), ints(9, 9), **terms()),
    "softcap": lambda: padded(lambda n: tw.key_padding(n), ints(9, 8), ints(1, 2), softcap=5.0),
    "packed": lambda: packed("cu_seqlens_q", ints(0, 64, 64, 200), ints(0, 1, 150, 190)),
    "packed, bounded": lambda: packed(
        "cu_seqlens_q", ints(0, 64, 64, 200), ints(0, 1, 150, 190), max_seqlen_q=200
    ),
    "used": lambda: packed(
        "seqused_k", ints(10, 100), ints(60, 0), cu_seqlens_q=ints(0, 70, 200)
    ),
    "used on both sides": lambda: packed(
        "seqused_q", ints(10, 100), ints(60, 0), cu_seqlens_q=ints(0, 70, 200),
        seqused_k=ints(70, 5),
    ),
}  # fmt: skip
