"""The fences themselves, on the device under test."""

import pytest
import torch

from tests.gpu.fences import fences, nan_in_new_buffers
from tests.helpers import UNDER_TEST


def test_fences_notice_a_write_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    with fences(monkeypatch) as made:
        x = torch.empty(5, 3, dtype=torch.bfloat16, device=UNDER_TEST.device)
        assert made.broken() == []
        x.as_strided((1,), (1,), x.storage_offset() + 15).zero_()
        assert made.broken() == ["after a buffer of 30 bytes, at byte 0"]


def test_new_buffers_are_nan_inside_fences_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = UNDER_TEST.device
    with nan_in_new_buffers(monkeypatch), fences(monkeypatch) as made:
        like = torch.zeros(4, 3, device=device)
        for x in (
            torch.empty(4, 3, dtype=torch.float16, device=device),
            torch.empty_like(like),
            torch.empty_strided((4, 3), (1, 4), device=device),
            like.new_empty(4, 3),
            like.new_empty_strided((4, 3), (3, 1)),
        ):
            assert x.shape == (4, 3) and bool(x.isnan().all())
        assert torch.empty(3, dtype=torch.int32, device=device).tolist() == [2**31 - 1] * 3
        assert not like.any() and bool((like.new_full((2,), 7.0) == 7).all())
        assert torch.ones_like(like).sum() == 12
        assert len(made) == 9 and made.broken() == []
    assert torch.empty.__name__ == "empty"
