"""Every case runs with poisoned buffers: what a backend allocates and forgets to write is NaN."""

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic

from tests.helpers import UNDER_TEST


@pytest.fixture(autouse=True)
def poisoned_buffers() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, so that an output or gradient left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    # A GPU has no fixed order for some ops of the formulas, and those may run all the same.
    torch.use_deterministic_algorithms(True, warn_only=UNDER_TEST.device != "cpu")
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert bool(torch.empty(1).isnan())
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill
