"""One quick report in a process of its own, as a user runs it, shared by the tests here."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class QuickRun:
    """How `tilewise report --quick --json` ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str
    page: str
    seconds: float

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.stdout)
        return found


@pytest.fixture(scope="session")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> QuickRun:
    file = tmp_path_factory.mktemp("report") / "report.html"
    command = [sys.executable, "-W", "error", "-m", "tilewise.cli", "report"]
    start = time.monotonic()
    done = subprocess.run(
        [*command, "--quick", "--json", "--output", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - start
    page = file.read_text(encoding="utf-8") if file.exists() else ""
    return QuickRun(done.returncode, done.stdout, done.stderr, page, seconds)
