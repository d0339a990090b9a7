"""Kernels run one by one: in Triton's interpreter, or on the GPU that `--device cuda` names.

Triton settles whether it interprets when kernels are imported, so elsewhere these files are not
even read; `test_interpreted.py` then runs them in processes of their own.
"""

from pathlib import Path

import pytest

from tests.helpers import UNDER_TEST


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_runner = collection_path.name == "test_interpreted.py"
    is_here = collection_path.parent == Path(__file__).parent
    return True if is_here and UNDER_TEST.backend != "triton" and not is_runner else None
