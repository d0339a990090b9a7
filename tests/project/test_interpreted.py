"""Kernels are run on the CPU too: `make interpreter-test` collects all that is marked for it."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_every_file_of_kernels_has_tests_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (folders,) = re.findall(r"^INTERPRETED := (.+)$", makefile, re.MULTILINE)
    options = ("--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--backend", "triton", "tests"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = Counter(re.findall(r"^(tests/\S+?\.py)::", done.stdout, re.MULTILINE))
    kernels = {x.relative_to(ROOT).as_posix() for x in (ROOT / "tests/kernels").glob("test_*.py")}
    assert kernels and kernels <= found.keys()
    # Whatever is marked for it is where it is looked for.
    assert {str(Path(name).parents[-3]) for name in found} == set(folders.split())
    assert sum(n for name, n in found.items() if name.startswith("tests/linear/")) >= 62
    assert any(name.startswith("tests/contract/") for name in found)
