"""What is measured: grids of cells, one op and shape each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

# The other ops are simple_gla with a fixed decay or none.
OPS = ("simple_gla", "gla", "delta_rule", "gated_delta_rule", "kda")
_GATED = ("simple_gla", "gla", "gated_delta_rule", "kda")
_DELTA = ("delta_rule", "gated_delta_rule", "kda")
FORWARD, BOTH, STEP = "forward", "forward and backward", "decode step"
GRIDS = ("ops", "models", "length", "crossover", "decode")
VERIFIED_LENGTH = 150
# Forward and backward have so many products for one of the forward, which is made again.
_BOTH_FLOPS = 3.5


@dataclass(frozen=True)
class Cell:
    """One op on one shape. G heads of q and k, H of v; D of all."""

    grid: str
    op: str
    B: int
    M: int
    G: int
    H: int
    D: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.op} B {self.B} M {self.M} G {self.G} H {self.H} D {self.D}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> Cell:
        """Of `as_json`, among other things."""
        named = {x.name: found[x.name] for x in fields(cls)}
        return cls(**{**named, "dtype": getattr(torch, named["dtype"])})

    @property
    def directions(self) -> tuple[str, ...]:
        if self.grid == "decode":
            return (STEP,)
        return (FORWARD,) if self.grid in ("length", "crossover") else (FORWARD, BOTH)

    @property
    def state_bytes(self) -> int:
        return 4 * self.B * self.H * self.D * self.D

    def flops(self, direction: str) -> float:
        """Of a forward in chunks of 64: within them and through the state."""
        per_step = 2.0 * (2 * self.D * self.D + 64 * 2 * self.D)
        if self.op in _DELTA:
            per_step += 2.0 * (self.D * self.D + 64 * 2 * self.D)
        factor = _BOTH_FLOPS if direction == BOTH else 1.0
        return factor * self.B * self.M * self.H * per_step

    def short(self) -> Cell:
        """The call of the same kind that a contestant is held to the error budget on."""
        return replace(self, grid="", B=min(self.B, 2), M=min(self.M, VERIFIED_LENGTH))

    def draw(self, device: torch.device) -> dict[str, Tensor]:
        """q, k (normalised), v, and what else the op takes, as models have them."""
        generator = torch.Generator().manual_seed(0)
        # On a GPU a long call's numbers are drawn there.
        is_long = device.type == "cuda" and self.M > VERIFIED_LENGTH

        def normal(*shape: int) -> Tensor:
            if is_long:
                return torch.randn(self.B, self.M, *shape, device=device)
            drawn = torch.randn(self.B, self.M, *shape, generator=generator, device="cpu")
            return drawn.to(device)

        k = normal(self.G, self.D)
        x = {
            "q": normal(self.G, self.D).to(self.dtype),
            "k": (k / k.norm(dim=-1, keepdim=True)).to(self.dtype),
            "v": normal(self.H, self.D).to(self.dtype),
        }
        if self.op in _GATED:
            dims = (self.H, self.D) if self.op in ("gla", "kda") else (self.H,)
            x["g"] = torch.nn.functional.logsigmoid(normal(*dims)) / 8
        if self.op in _DELTA:
            x["beta"] = normal(self.H).sigmoid().to(self.dtype)
        return x


def cells(
    device: torch.device,
    grids: Sequence[str] = GRIDS,
    lengths: Sequence[int] = (),
    dtype: torch.dtype = torch.bfloat16,
    is_quick: bool = False,
) -> list[Cell]:
    """The cells of some grids. On a GPU the shapes that others publish, on a CPU small ones.

    lengths: those of the grid "ops" instead of its own; the other grids then have no cells.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        usual = (256,) if is_quick else (512, 1024)
        found = [Cell("ops", op, 1, m, 2, 4, 64) for op in OPS for m in (lengths or usual)]
    elif lengths:
        found = [Cell("ops", op, 1, m, 16, 32, 128) for op in OPS for m in lengths]
    else:
        found = _quick_cells() if is_quick else _usual_cells()
    return [replace(cell, dtype=dtype) for cell in found if cell.grid in grids]


def _quick_cells() -> list[Cell]:
    return [Cell("ops", op, 2, 2048, 16, 16, 128) for op in OPS]


def _usual_cells() -> list[Cell]:
    gdn = "gated_delta_rule"
    return [
        *(Cell("ops", op, 2, 8192, 16, 16, 128) for op in OPS),
        # Qwen3-Next's heads, and Kimi Linear's twice.
        Cell("models", gdn, 1, 8192, 16, 32, 128),
        Cell("models", gdn, 1, 32768, 16, 32, 128),
        Cell("models", "kda", 1, 8192, 64, 64, 128),
        Cell("decode", gdn, 64, 1, 16, 32, 128),
        Cell("decode", "kda", 64, 1, 32, 32, 128),
        *(Cell("length", gdn, 1, 1024 * n, 16, 32, 128) for n in (16, 32, 64, 128)),
        # So few heads that sequences are cut into segments.
        *(Cell("length", op, 1, 1024 * n, 8, 8, 128) for op in _FEW_HEADS for n in (32, 128)),
        *(Cell("crossover", gdn, 32768 // m, m, 16, 16, 128) for m in _CROSSOVER),
    ]


_FEW_HEADS = ("simple_gla", "gla")
# The same tokens in all, from where dense attention is sure to be faster on.
_CROSSOVER = (512, 1024, 2048, 4096, 8192, 16384, 32768)
