"""Head dims in many pieces, as fp32 products are made of on NVIDIA's matrix units."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from tests.helpers import check_call
from tilewise.dense import triton_call

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize(("D", "E"), [(96, 80), (59, 144), (16, 160)])
def test_many_pieces_make_one_head(D: int, E: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_dim = triton_call.cut_dim
    monkeypatch.setattr(triton_call, "cut_dim", lambda dim, widest=256: cut_dim(dim, 32))
    q, k, v = torch.randn(1, 35, 2, D), torch.randn(1, 41, 1, D), torch.randn(1, 41, 1, E)
    check_call("attention", {"q": q, "k": k, "v": v}, backend="triton", mask=tw.causal())
