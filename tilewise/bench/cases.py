"""What is measured: one `Case` per row, gathered in grids.

Dims: B batch, H heads, D head dim; the length is M = N, query heads = kv heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_leaves import causal, full, window

FORWARD = "forward"
BOTH = "forward+backward"
GRIDS = ("dense", "window", "memory")

# Where a contestant is verified: not a multiple of any tile, and short enough for the oracle.
_VERIFIED_LENGTH = 331


@dataclass(frozen=True)
class Case:
    """Self-attention of one shape under one mask, in one dtype and direction.

    mask: "full", "causal", or "window": the last `window` keys and the query's own.
    """

    mask: str
    length: int
    dtype: torch.dtype = torch.float32
    direction: str = FORWARD
    B: int = 1
    H: int = 8
    D: int = 64
    window: int = 512

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def mask_name(self) -> str:
        return f"causal window {self.window}" if self.mask == "window" else self.mask

    @property
    def shape(self) -> str:
        return f"B {self.B} H {self.H} D {self.D} M=N {self.length}"

    @property
    def scores_bytes(self) -> int:
        """One matrix of scores, `[B, H, M, N]`."""
        return self.B * self.H * self.length**2 * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.mask_name} {self.length} {self.dtype_name} {self.direction}"

    def build_mask(self) -> Mask:
        match self.mask:
            case "full":
                return full()
            case "causal":
                return causal()
            case "window":
                return window(self.window, 0)
        raise ValueError(f"Case: mask must be full, causal or window, got {self.mask!r}.")

    def flops(self) -> float:
        """4 B H D for each visible pair; half of all pairs if causal; backward is 2.5 times that.

        Every contestant is charged for what is visible, whether or not it skips the rest.
        """
        pairs = float(self.length) ** 2
        if self.mask == "causal":
            pairs /= 2
        elif self.mask == "window":
            width = min(self.window + 1, self.length)
            pairs = width * self.length - width * (width - 1) / 2
        return 4.0 * self.B * self.H * self.D * pairs * (3.5 if self.direction == BOTH else 1.0)

    def verified_form(self) -> Case:
        """The same kind of call at a length that the oracle can afford, gradients included."""
        length = min(self.length, _VERIFIED_LENGTH)
        return replace(self, length=length, window=min(self.window, length // 4))

    def draw(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of out, each `[B, M, H, D]`, from a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.B, self.length, self.H, self.D)
        q, k, v, dout = (
            torch.randn(shape, generator=generator).to(device, self.dtype) for _ in range(4)
        )
        return q, k, v, dout


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
