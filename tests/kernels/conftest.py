"""Kernels run one by one: in Triton's interpreter, or on the GPU that `--device cuda` names.

Triton settles whether it interprets when kernels are imported, so elsewhere these files are not
even read: `make interpreter-test` runs them.
"""

from pathlib import Path

import pytest

from tests.helpers import UNDER_TEST


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_here = collection_path.parent == Path(__file__).parent
    return True if is_here and UNDER_TEST.backend != "triton" else None
