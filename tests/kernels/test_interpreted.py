"""The rest of this folder, in Triton's interpreter, one process a file."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import UNDER_TEST

HERE = Path(__file__).resolve().parent
FILES = sorted(path.name for path in HERE.glob("test_*.py") if path != Path(__file__).resolve())
TIMEOUT_S = 600


@pytest.mark.skipif(UNDER_TEST.backend is not None, reason="the files themselves are collected")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_in_the_interpreter(file: str) -> None:
    options = ("--backend", "triton", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(HERE / file)],
        cwd=HERE.parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A file whose tests are all left out would pass too.
    assert re.search(r"\b[1-9]\d* passed\b", done.stdout), done.stdout
