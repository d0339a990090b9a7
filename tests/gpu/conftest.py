"""The GPU as a user meets it: no default device, and lengths that nobody reads on the host."""

from collections.abc import Iterator

import pytest
import torch

from tests.helpers import UNDER_TEST


@pytest.fixture(autouse=True)
def as_users_do(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`--device cuda` makes it torch's default, which would hide a tensor made on the CPU."""
    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    torch.set_default_device(None)
    yield
    torch.set_default_device(None if UNDER_TEST.device == "cpu" else UNDER_TEST.device)
