"""FlashAttention is absent in these tests, whatever the machine has, unless one brings it."""

import sys

import pytest


@pytest.fixture(autouse=True)
def without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fa3_fwd_interface", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, None)
