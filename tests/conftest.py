"""What every test stands on: sane threads, a fixed seed, no network, GPU tests only on a GPU."""

import os
import random

import hypothesis
import pytest
import torch

# Models come with packages; a test that reaches for a hub fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline: a loaded machine is not a fault. In CI the same examples every time.
hypothesis.settings.register_profile("tilewise", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tilewise")


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the shapes are small, and threads that wait for a busy core cost seconds."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same seed, alone or in any order."""
    random.seed(0)
    torch.manual_seed(0)
    return 0
