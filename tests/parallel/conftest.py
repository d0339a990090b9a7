"""Which tests of this folder run where: those over ranks of CPUs not under `--device cuda`."""

from __future__ import annotations

import pytest

from tests.helpers import UNDER_TEST
from tests.parallel.ranks import count_gpu_ranks

# On one GPU, or on many.
_ON_GPUS = ("test_loopback.py", "test_nccl.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpus = UNDER_TEST.device == "cuda"
    here = [item for item in items if item.path.parent.name == "parallel"]
    for item in here:
        name = item.path.name
        if on_gpus and name not in _ON_GPUS and item.path.parent.parent.name == "tests":
            item.add_marker(pytest.mark.skip(reason="its ranks are CPUs'; test_nccl.py has GPUs'"))
        if name == "test_nccl.py" and not count_gpu_ranks():
            item.add_marker(pytest.mark.skip(reason="needs two GPUs and --device cuda"))
