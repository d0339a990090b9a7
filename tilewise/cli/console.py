"""What the commands show: tables and JSON on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from ..bench.progress import Progress

# Where nobody watches, a line at each stage and then one at most this often.
_QUIET_S = 10.0


def print_json(document: Any) -> None:
    """One strict JSON document; what JSON has no number for becomes null."""
    print(json.dumps(_finite(document), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1
) -> None:
    """The first `texts` columns are words, set left; the others figures, set right."""
    # As Text, since rich would read brackets in a title as markup.
    table = Table(title=Text(title, "bold"), title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        justify = "left" if index < texts else "right"
        # Where a terminal is narrow a word goes on in the next line, and none loses its end.
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    _out().print(table, markup=False)


def print_line(text: str) -> None:
    _out().print(text, markup=False, soft_wrap=True)


def _out() -> Console:
    # Not on a terminal, such as in a log, a table is as wide as it is.
    width = None if sys.stdout.isatty() else 200
    return Console(file=sys.stdout, width=width, highlight=False)


@contextmanager
def open_progress() -> Iterator[Progress]:
    """A bar with elapsed time on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    bars = Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}"),
        console=console,
    )
    with bars:
        yield Bar(bars)


class Bar:
    """Progress as bars, one a stage."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._task: Any = None

    def stage(self, title: str, steps: int) -> None:
        if self._task is not None:
            self._bars.update(self._task, what="")
            self._bars.stop_task(self._task)
        self._task = self._bars.add_task(title, total=steps, what="")

    def step(self, what: str) -> None:
        self._bars.update(self._task, advance=1, what=what)


class Lines:
    """Progress as lines, with the seconds since it began."""

    def __init__(self) -> None:
        self._start = self._said = time.monotonic()
        self._title, self._steps, self._done = "", 0, 0

    def stage(self, title: str, steps: int) -> None:
        self._title, self._steps, self._done = title, steps, 0
        self._say(f"{title} ({steps} steps)")

    def step(self, what: str) -> None:
        self._done += 1
        if time.monotonic() - self._said >= _QUIET_S:
            self._say(f"{self._title}: {self._done} of {self._steps}, {what}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"[{self._said - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)
