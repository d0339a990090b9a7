"""The table of what was compiled: printed at the end, and stored where an option says so."""

from __future__ import annotations

import gc
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Triton is made for Linux alone.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
COLUMNS = ("variant", "target", "kernel", "registers", "spills", "shared_kib", "instruction")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilewise")
    group.addoption("--all-targets", action="store_true", help="compile every variant for each")
    group.addoption("--table", help="a JSON file that this Triton's rows are stored in")
    group.addoption("--triton", metavar="VERSION", help="the one that must be under test")


def pytest_configure(config: pytest.Config) -> None:
    wanted = config.getoption("--triton", default=None)
    if wanted and wanted != _version():
        raise pytest.UsageError(f"Triton {wanted} is to be tested, {_version()} is here.")


def pytest_collection_finish() -> None:
    """What torch and Triton are made of stays: the collector need not look at it again, which in
    Triton's front end took a fifth of the time."""
    gc.collect()
    gc.freeze()


def _version() -> str:
    import triton

    return str(triton.__version__)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Rows come with the reports of tests, so that those of other processes are here too."""
    reports = [r for found in terminalreporter.stats.values() for r in found]
    rows = [
        row
        for report in reports
        for name, value in getattr(report, "user_properties", [])
        if name == "compiled" and report.when == "call"
        for row in value
    ]
    if not rows:
        return
    terminalreporter.section(f"compiled with Triton {_version()}")
    texts = [[str(value) for value in row] for row in [list(COLUMNS), *sorted(rows)]]
    widths = [max(len(text[i]) for text in texts) for i in range(len(COLUMNS))]
    for text in texts:
        line = "  ".join(value.ljust(width) for value, width in zip(text, widths, strict=True))
        terminalreporter.write_line(line.rstrip())
    path = config.getoption("--table", default=None)
    if path:
        _store(Path(path), _version(), sorted(rows))


def _store(path: Path, version: str, rows: list[list[Any]]) -> None:
    """Put this Triton's rows beside those of others; a row a line, to be read and compared."""
    stored = json.loads(path.read_text(encoding="utf-8"))["triton"] if path.exists() else {}
    stored[version] = rows
    parts = []
    for name in sorted(stored):
        lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in stored[name])
        parts.append(f' "{name}": [\n  {lines}\n ]')
    text = "{\n" + f'"columns": {json.dumps(COLUMNS)},\n"triton": {{\n' + ",\n".join(parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n}\n}\n", encoding="utf-8")
