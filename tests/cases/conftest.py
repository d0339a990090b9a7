"""Every case runs with poisoned buffers: what a backend allocates and forgets to write is NaN."""

from collections.abc import Iterator

import pytest
import torch
import torch.utils.deterministic


@pytest.fixture(autouse=True)
def poisoned_buffers() -> Iterator[None]:
    """`torch.empty` and its kin give NaN, so that an output or gradient left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert bool(torch.empty(1).isnan())
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fill
