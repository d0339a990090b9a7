"""What is measured over ranks: one `Cell` per mask, length and direction, and the rows it gives.

Dims: S tokens of all ranks together, R ranks, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from ...core.mask import Mask
from ...core.mask_leaves import causal, documents, full
from ...parallel.layout import Layout, contiguous, document_zigzag, zigzag
from ..cases import BOTH, FORWARD
from .pieces import BACKWARD_FLOPS

# Longer sequences take seconds: fewer contestants, fewer rounds.
LONG = 1 << 17
MASKS = ("causal", "documents", "full")
DIRECTIONS = (FORWARD, BOTH)
# Eight documents, as shares of the sequence; no edge falls on a tile's or a rank's.
_SHARES = (4000, 3200, 2500, 2100, 1700, 1300, 900, 684)


@dataclass(frozen=True)
class Cell:
    """Self-attention of `tokens` tokens dealt to ranks, in the layout that balances its mask."""

    mask: str
    tokens: int
    direction: str

    @property
    def edges(self) -> list[int]:
        """Where documents start, and the end."""
        if self.mask != "documents":
            return [0, self.tokens]
        ends = accumulate(share * self.tokens // sum(_SHARES) for share in _SHARES)
        return [0, *list(ends)[:-1], self.tokens]

    @property
    def pairs(self) -> float:
        """Visible pairs of query and key; half of all pairs where causal."""
        if self.mask == "full":
            return float(self.tokens) ** 2
        return sum((stop - start) ** 2 / 2 for start, stop in pairwise(self.edges))

    @property
    def has_gradients(self) -> bool:
        return self.direction == BOTH

    def layout(self, ranks: int) -> Layout:
        if self.mask == "documents":
            return document_zigzag(self.edges, ranks)
        return (contiguous if self.mask == "full" else zigzag)(self.tokens, ranks)

    def build_mask(self, device: torch.device | str = "cpu") -> Mask:
        """device: of the documents' edges."""
        if self.mask == "full":
            return full()
        if self.mask == "causal":
            return causal()
        edges = torch.tensor(self.edges, dtype=torch.int32, device=device)
        return causal() & documents(edges)

    def flops(self, H: int, D: int) -> float:
        """4 H D a pair forward, 2.5 times that backward."""
        return 4.0 * H * D * self.pairs * (1 + BACKWARD_FLOPS * self.has_gradients)

    def __str__(self) -> str:
        return f"{self.mask} {self.tokens} {self.direction}"


def cells_of(lengths: Sequence[int]) -> tuple[Cell, ...]:
    """Every mask at every length, what says most first, forward before both."""
    short = sorted((n for n in lengths if n <= LONG), reverse=True)
    long = sorted(n for n in lengths if n > LONG)
    found = [(mask, n) for mask in ("causal", "documents") for n in short]
    found += [("causal", n) for n in long] + [("full", n) for n in short]
    found += [(mask, n) for mask in ("documents", "full") for n in long]
    return tuple(Cell(mask, n, direction) for mask, n in found for direction in DIRECTIONS)


@dataclass(frozen=True)
class Request:
    """What is measured over the ranks of one process group.

    rounds: at most. sample_s: the least time of a sample. seconds: after so many no new cell
    begins. output: a file whose "ranks" are kept up to date. has_peers: PyTorch's own too.
    backend: of ours, on one GPU too.
    """

    cells: tuple[Cell, ...]
    H: int
    G: int
    D: int
    dtype: str
    device: str
    rounds: int = 5
    sample_s: float = 0.0
    seconds: float | None = None
    output: str = ""
    trace: str = ""
    verified_length: int = 192
    has_peers: bool = False
    has_variants: bool = False
    backend: str = "auto"

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class RankRow:
    """One contestant in one cell. Times are of the slowest rank, medians over the rounds.

    single_ms: the whole call on one GPU, in the same rounds; the mean of the ranks' GPUs.
    local_ms: the same work where nothing is sent. messages_ms: the messages alone. received: bytes
    of one rank. predicted_ms: by the model with the machine's stored rates, fitted_ms with those
    that this run measured. None where there is none.
    """

    contestant: str
    ranks: int
    mask: str
    tokens: int
    direction: str
    tflops: float = 0.0
    ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0
    rounds: int = 0
    single_ms: float | None = None
    local_ms: float | None = None
    messages_ms: float | None = None
    received: int | None = None
    predicted_ms: float | None = None
    fitted_ms: float | None = None
    budget_used: float | None = None
    note: str = ""
    is_ours: bool = True

    @property
    def exposed_ms(self) -> float | None:
        """What messages add to the time."""
        return None if self.local_ms is None else max(0.0, self.ms - self.local_ms)

    @property
    def exposed_share(self) -> float | None:
        """Of the messages' own time."""
        exposed, whole = self.exposed_ms, self.messages_ms
        return exposed / whole if exposed is not None and whole else None

    @property
    def efficiency(self) -> float | None:
        """Of R times one GPU's rate."""
        return self.single_ms / self.ranks / self.ms if self.single_ms and self.ms else None

    def as_json(self) -> dict[str, Any]:
        derived = ("exposed_ms", "exposed_share", "efficiency")
        values = {**asdict(self), **{name: getattr(self, name) for name in derived}}
        # JSON has no infinity.
        return {n: None if x == float("inf") else x for n, x in values.items()}
