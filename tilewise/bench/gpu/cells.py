"""What a run finds: entries of contestants, gathered in cells, one cell a case."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..cases import Case
from ..harness import NOT_RUN, REFUSED, Timing

# What a cell's times are of.
STREAM, GRAPH, HOST_CLOCK = "stream", "CUDA graph", "host clock"


@dataclass
class Entry:
    """One contestant in a cell. `backend` says what ran; `note` why there are no figures."""

    name: str
    version: str
    is_ours: bool
    status: str = NOT_RUN
    backend: str = ""
    note: str = ""
    timing: Timing | None = None
    tflops: float | None = None
    percent_of_ceiling: float | None = None
    first_call_s: float | None = None
    extra_peak_bytes: int | None = None

    def as_json(self) -> dict[str, Any]:
        timing = self.timing and {
            name.replace("_s", ""): seconds * 1e3 for name, seconds in asdict(self.timing).items()
        }
        fields = {**vars(self), "time_ms": timing}
        del fields["is_ours"], fields["timing"]
        return fields


@dataclass
class Cell:
    """A case and who ran it.

    sets: how many sets of tensors took turns. plain: ours on the case's plain form, in the same
    rounds. note: why nothing was timed.
    """

    grid: str
    case: Case
    way: str
    sets: int = 1
    ours: list[Entry] = field(default_factory=list)
    peers: list[Entry] = field(default_factory=list)
    plain: Entry | None = None
    note: str = ""

    @property
    def entries(self) -> list[Entry]:
        return [*self.ours, *([self.plain] if self.plain else []), *self.peers]

    @property
    def refused(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.status == REFUSED]

    @property
    def has_failed(self) -> bool:
        """Whether something of ours was wrong or raised."""
        return bool(self.note) or any(entry.is_ours for entry in self.refused)
