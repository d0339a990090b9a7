"""What is measured: one `Case` per row, gathered in grids; the GPU's grids are in `gpu/grids.py`.

Dims: B batch, H query heads, G kv heads, D head dim; the length is M = N.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_bits import from_function
from ..core.mask_leaves import causal, documents, full, window

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
# The host's time to hand over a forward call, without and with a graph for its gradients.
HOST, HOST_GRAD = "host", "host with grad"
GRIDS = ("dense", "window", "memory")
FEATURES = ("softcap", "alibi", "bias", "learned bias", "dropout", "sinks")

# Where a contestant is verified: not a multiple of any tile, and short enough for the oracle.
_VERIFIED_LENGTH = 331
_CPU = torch.device("cpu")

# Of the mask "bits": one key in this many is hidden, which leaves no tile below the diagonal whole.
_BITS_PERIOD = 8


@dataclass(frozen=True)
class Case:
    """Self-attention of one shape under one mask, in one dtype and direction.

    mask: "full", "causal", "window" (the last `window` keys and the query's own), "documents"
    (causal inside each; `documents` are their lengths, `length` in all) or "bits" (causal without
    a part of the keys, by a predicate, so that every tile needs its bits). G: kv heads, 0 for H.
    feature: what the call adds to the scores, one of `FEATURES`, or nothing.
    """

    mask: str
    length: int
    dtype: torch.dtype = torch.float32
    direction: str = FORWARD
    B: int = 1
    H: int = 8
    D: int = 64
    window: int = 512
    G: int = 0
    documents: tuple[int, ...] = ()
    feature: str = ""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_heads(self) -> int:
        return self.G or self.H

    @property
    def has_gradients(self) -> bool:
        return self.direction in (BACKWARD, BOTH)

    @property
    def mask_name(self) -> str:
        match self.mask:
            case "window":
                return f"causal window {self.window}"
            case "documents":
                return f"{len(self.documents)} causal documents"
        return self.mask

    @property
    def shape(self) -> str:
        heads = f"H {self.H} G {self.G}" if self.G else f"H {self.H}"
        return f"B {self.B} {heads} D {self.D} M=N {self.length}"

    @property
    def scores_bytes(self) -> int:
        """One matrix of scores, `[B, H, M, N]`."""
        return self.B * self.H * self.length**2 * self.dtype.itemsize

    @property
    def learned(self) -> tuple[str, ...]:
        """Terms that get a gradient beside q, k and v."""
        return {"learned bias": ("bias",), "sinks": ("sinks",)}.get(self.feature, ())

    def __str__(self) -> str:
        feature = f"{self.feature} " if self.feature else ""
        return f"{feature}{self.mask_name} {self.length} {self.dtype_name} {self.direction}"

    def build_mask(self, device: torch.device = _CPU) -> Mask:
        match self.mask:
            case "full":
                return full()
            case "causal":
                return causal()
            case "window":
                return window(self.window, 0)
            case "documents":
                return causal() & documents(self.cu_seqlens(device))
            case "bits":
                return from_function(
                    lambda b, h, m, n: (n <= m) & ((m - n) % _BITS_PERIOD != _BITS_PERIOD - 1)
                )
        raise ValueError(
            f"Case: mask must be full, causal, window, documents or bits, got {self.mask!r}."
        )

    def cu_seqlens(self, device: torch.device) -> Tensor:
        """Where each document starts, and the end, int32; batch rows stand one after another."""
        edges = [0, *accumulate(self.documents * self.B)]
        return torch.tensor(edges, dtype=torch.int32, device=device)

    def terms(self, device: torch.device) -> dict[str, Any]:
        """The arguments of `attention` that make the feature, tensors from a fixed seed."""
        generator = torch.Generator(device).manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        match self.feature:
            case "softcap":
                return {"softcap": 30.0}
            case "alibi":
                heads = torch.arange(1, self.H + 1, device=device)
                return {"alibi_slopes": torch.exp2(-8.0 * heads / self.H)}
            case "bias" | "learned bias":
                return {"bias": draw(1, self.H, self.length, self.length).to(self.dtype)}
            case "dropout":
                return {"dropout_p": 0.1}
            case "sinks":
                return {"sinks": draw(self.H)}
        return {}

    def flops(self) -> float:
        """4 B H D for each visible pair; half of all pairs if causal; backward is 2.5 times that.

        Every contestant is charged for what is visible, whether or not it skips the rest.
        """
        times = {BACKWARD: 2.5, BOTH: 3.5}.get(self.direction, 1.0)
        return 4.0 * self.B * self.H * self.D * self._visible_pairs() * times

    def _visible_pairs(self) -> float:
        pairs = float(self.length) ** 2
        match self.mask:
            case "causal":
                return pairs / 2
            case "window":
                width = min(self.window + 1, self.length)
                return width * self.length - width * (width - 1) / 2
            case "documents":
                return sum(float(n) ** 2 for n in self.documents) / 2
            case "bits":
                return pairs / 2 * (1 - 1 / _BITS_PERIOD)
        return pairs

    def plain(self) -> Case | None:
        """The causal call without what is special about this one; None where nothing is."""
        if self.mask in ("full", "causal") and not self.feature:
            return None
        return replace(self, mask="causal", documents=(), feature="")

    def verified_form(self) -> Case:
        """The same kind of call at a size that the oracle can afford, gradients included."""
        length = min(self.length, _VERIFIED_LENGTH)
        # Every document keeps a share; what rounding takes goes to the first.
        lengths = [max(1, n * length // self.length) for n in self.documents]
        if lengths:
            lengths[0] += length - sum(lengths)
        direction = {BACKWARD: BOTH, HOST: FORWARD, HOST_GRAD: BOTH}.get(
            self.direction, self.direction
        )
        return replace(
            self,
            B=min(self.B, 2),
            length=length,
            window=min(self.window, length // 4),
            documents=tuple(lengths),
            direction=direction,
        )

    def draw(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of out, `[B, M, H or G, D]`, drawn on the device itself."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int) -> Tensor:
            shape = (self.B, self.length, heads, self.D)
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        return draw(self.H), draw(self.kv_heads), draw(self.kv_heads), draw(self.H)


def grid(
    name: str,
    *,
    lengths: Sequence[int] = (),
    dtypes: Sequence[torch.dtype] = (),
    is_quick: bool = False,
) -> list[Case]:
    """The cases of a grid; lengths and dtypes replace the grid's own where they are given."""
    usual_length, quick_length = {
        "dense": (4096, 512),
        "window": (8192, 2048),
        "memory": (16384, 2048),
    }[name]
    chosen = tuple(lengths) or (quick_length if is_quick else usual_length,)
    both_dtypes = tuple(dtypes) or (torch.float32, torch.bfloat16)
    if name == "dense":
        return [
            Case(mask, length, dtype, direction)
            for length in chosen
            for dtype in both_dtypes
            for mask in ("full", "causal")
            for direction in (FORWARD, BOTH)
        ]
    if name == "window":
        return [Case("window", length, dtype) for length in chosen for dtype in both_dtypes]
    return [
        Case(mask, length, dtype)
        for length in chosen
        for dtype in tuple(dtypes) or (torch.float32,)
        for mask in ("full", "causal")
    ]
