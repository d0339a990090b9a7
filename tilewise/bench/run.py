"""One run of the bench: grids measured in one process, with a header that says where and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import environment
from .cases import GRIDS, grid
from .harness import NOT_RUN, REFUSED, Plan, Row, measure_all, measure_ceiling
from .peers import MISSING, PEERS
from .progress import Progress


@dataclass(frozen=True)
class Request:
    """What to measure; no lengths or dtypes: the grids' own."""

    device: torch.device
    grids: Sequence[str] = GRIDS
    lengths: Sequence[int] = ()
    dtypes: Sequence[torch.dtype] = ()
    is_quick: bool = False


@dataclass(frozen=True)
class Result:
    header: dict[str, Any]
    rows: dict[str, list[Row]]

    @property
    def refused(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows if row.status == REFUSED]

    def as_json(self) -> dict[str, Any]:
        rows = [{"grid": name, **row.as_json()} for name, rows in self.rows.items() for row in rows]
        return {"header": self.header, "missing_peers": MISSING, "rows": rows}


def run(request: Request, progress: Progress) -> Result:
    """Measure; torch's threads stay as the caller set them, and the header records them."""
    rounds = 3 if request.is_quick else 5
    dtypes = tuple(request.dtypes) or (torch.float32, torch.bfloat16)
    ceilings = {
        str(dtype).removeprefix("torch."): measure_ceiling(dtype, request.device)
        for dtype in dtypes
    }
    header = {
        **environment.describe(request.device),
        "rounds": rounds,
        "flops": "4 B H D per visible pair, half of all pairs if causal, backward 2.5 times that",
        "matrix_product_tflops": ceilings,
    }
    rows = {}
    for name in request.grids:
        cases = grid(
            name, lengths=request.lengths, dtypes=request.dtypes, is_quick=request.is_quick
        )
        is_memory = name == "memory"
        plan = Plan(rounds, not is_memory, has_resident=is_memory, ceilings_tflops=ceilings)
        progress.stage(f"bench {name}", len(cases))
        rows[name] = measure_all(cases, PEERS, request.device, plan, progress)
    return Result(header, rows)


def describe_row(row: Row) -> tuple[str, ...]:
    """A row of the table: see `COLUMNS`."""
    asked = (row.case.mask_name, str(row.case.length), row.case.dtype_name, row.case.direction)
    named = (*asked, describe_contestant(row))
    if row.status in (REFUSED, NOT_RUN):
        return (*named, f"{row.status}: {row.note}", *[""] * 6)
    times = tflops = share = ratio = spread = ""
    if row.timing is not None:
        times = f"{row.timing.median_s * 1e3:.2f}"
        spread = f"{row.timing.min_s * 1e3:.2f}..{row.timing.max_s * 1e3:.2f}"
        tflops = f"{row.tflops:.4f}"
    if row.percent_of_ceiling is not None:
        share = f"{row.percent_of_ceiling:.0f} %"
    if row.ratio_to_sdpa is not None:
        ratio = f"{row.ratio_to_sdpa:.2f}x"
    weights = (_megabytes(row.extra_peak_bytes), _megabytes(row.extra_resident_bytes))
    return (*named, times, spread, tflops, share, ratio, *weights)


COLUMNS = (
    "mask",
    "length",
    "dtype",
    "direction",
    "contestant",
    "median ms",
    "min..max",
    "TFLOP/s",
    "of matmul",
    "x SDPA",
    "extra MB",
    "resident MB",
)


def describe_contestant(row: Row) -> str:
    return f"{row.contestant}: {row.backend}" if row.backend else row.contestant


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.1f}"
