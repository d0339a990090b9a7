"""The numbers of rows that a backward starts from: delta and the LSE."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw

from .probes import DEVICE

pytestmark = pytest.mark.interpreter


# NumPy's, which Triton's interpreter computes with.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("keys", [40, 129])
def test_an_output_that_overflows_adds_nothing_where_dout_is_0(keys: int) -> None:
    """inf and what rounding took off it, -inf, meet a dO of 0: by the sum over keys, and from O."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, keys, 1, 16, device=DEVICE).half().requires_grad_() for _ in "qk")
    v = torch.full((1, keys, 1, 16), 60000.0, device=DEVICE).half().requires_grad_()
    out = tw.attention(q, k, v, dropout_p=0.5, backend="triton")
    assert bool(out.isinf().any()) and bool(out.isfinite().any())
    dout = torch.where(out.isinf(), 0.0, torch.full_like(out, 1e-3))
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("keys", [9, 129])
def test_an_lse_of_any_layout_is_read_where_it_stands(keys: int) -> None:
    """Whoever compiles a call may lay out what is kept for the backward anew."""
    q, k, v = (torch.randn(1, keys, 2, 16, device=DEVICE).half() for _ in "qkv")
    rest = ([None] * 8, [[]] * 3, [1], [], [], 0.25, None, 0.0, False, "triton")
    flat = [*rest[0], *rest[1], *rest[2:]]
    out, lse, remainder = torch.ops.tilewise.attention_fwd_split(q, k, v, *flat)
    spread = torch.full((*lse.shape, 3), torch.nan, device=DEVICE)[..., 1].copy_(lse)
    by_rows = lse.transpose(1, 2).contiguous().transpose(1, 2)
    dout = torch.randn_like(out)
    wanted = [False] * 3
    found = [
        torch.ops.tilewise.attention_bwd(dout, lse, out, remainder, x, q, k, v, *flat, wanted)[:3]
        for x in (lse, spread, by_rows)
    ]
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            assert torch.equal(got, want)
