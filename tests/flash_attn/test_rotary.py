"""Rotary embeddings against the rotation written out in complex numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise.core.tolerance import assert_within_budget
from tilewise.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
    apply_rotary_emb_torch,
)

S, D, R = 11, 16, 12


def tables(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.rand(32, R // 2, dtype=torch.float64) * 6
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """In x's dtype: pairs as complex numbers times those of their position."""
    turn = (torch.complex(cos.double(), sin.double())[positions]).unsqueeze(-2)
    head = x[..., :R].double()
    pair = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    result = torch.complex(*pair) * turn
    parts = (result.real, result.imag)
    whole = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([whole, x[..., R:].double()], -1)


def eagerly(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor) -> Tensor:
    """The formula with products in x's dtype."""
    c, s = (t[positions].unsqueeze(-2) for t in (cos, sin))
    head = x[..., :R]
    x1, x2 = (head[..., 0::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    parts = (x1 * c - x2 * s, x1 * s + x2 * c)
    whole = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([whole, x[..., R:]], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, "tensor", "packed", "packed, tensor"])
def test_values_and_gradient(dtype: torch.dtype, interleaved: bool, offsets: Any) -> None:
    cos, sin = tables(dtype)
    shape = (S, 3, D) if "packed" in str(offsets) else (2, S, 3, D)
    x = torch.randn(shape).to(dtype).requires_grad_()
    shift = torch.tensor([4, 1])
    given: dict[str, Any] = {}
    if shape == (S, 3, D):
        given["cu_seqlens"] = torch.tensor([0, 4, S], dtype=torch.int32)
        positions = torch.cat([torch.arange(4), torch.arange(S - 4)])
        if "tensor" in offsets:
            given["seqlen_offsets"] = shift
            positions = positions + shift.repeat_interleave(torch.tensor([4, S - 4]))
    else:
        given["seqlen_offsets"] = shift if offsets == "tensor" else offsets
        positions = torch.arange(S) + (shift[:, None] if offsets == "tensor" else offsets)
    results = []
    for form in (
        lambda x: apply_rotary_emb(x, cos, sin, interleaved, **given),
        lambda x: rotated(x, cos, sin, interleaved, positions),
        lambda x: eagerly(x, cos, sin, interleaved, positions),
    ):
        out = form(x)
        upstream = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
        results.append((out, *torch.autograd.grad(out, x, upstream)))
    for got, exact, eager in zip(*results, strict=True):
        assert got.dtype == dtype
        assert_within_budget(got.detach(), exact.detach(), eager.detach())


def test_in_place_and_packed_projections() -> None:
    cos, sin = tables(torch.float32)
    qkv, kv = torch.randn(2, S, 3, 4, D), torch.randn(2, S, 2, 4, D)
    q, k, v = (x.clone() for x in qkv.unbind(2))
    turned = [apply_rotary_emb(x, cos, sin) for x in (q, k)]
    assert torch.equal(apply_rotary_emb_torch(q, cos[:S], sin[:S]), turned[0])
    x = q.clone()
    assert apply_rotary_emb(x, cos, sin, inplace=True) is x and torch.equal(x, turned[0])
    assert apply_rotary_emb_qkv_(qkv, cos, sin) is qkv
    assert torch.equal(qkv, torch.stack([*turned, v], 2))
    grouped = torch.cat([q, k[:, :, :2], v[:, :, :2]], 2)
    apply_rotary_emb_qkv_(grouped, cos, sin, num_heads_q=4)
    assert torch.equal(grouped, torch.cat([turned[0], turned[1][:, :, :2], v[:, :, :2]], 2))
    expected = torch.stack([apply_rotary_emb(kv[:, :, 0], cos, sin), kv[:, :, 1]], 2)
    assert torch.equal(apply_rotary_emb_kv_(kv, cos, sin), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_module(interleaved: bool) -> None:
    """Queries and keys turn by their position: their products depend on the distance only."""
    module = RotaryEmbedding(R, base=100.0, interleaved=interleaved)
    qkv = torch.randn(1, 1, 3, 2, D).expand(1, S, 3, 2, D).clone()
    out = module(qkv.clone(), seqlen_offset=5)
    cos, sin = module.tables(S + 5, qkv)
    assert torch.equal(
        out, apply_rotary_emb_qkv_(qkv.clone(), cos, sin, None, None, interleaved, 5)
    )
    angles = torch.arange(S + 5)[:, None] * 100.0 ** (-torch.arange(0, R, 2) / R)
    assert_within_budget(cos, angles.double().cos(), angles.cos())
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=5)
    assert torch.equal(torch.cat([q.unsqueeze(2), kv], 2), out)
    by_row = module(qkv.clone(), seqlen_offset=torch.tensor([5]), max_seqlen=S + 5)
    assert torch.equal(by_row, out)


def test_angles_of_a_module_in_sixteen_bits_stay_exact() -> None:
    narrow = RotaryEmbedding(R).bfloat16()
    x = torch.zeros(1, 1, 3, 1, R, dtype=torch.bfloat16)
    assert torch.equal(narrow.tables(5000, x)[0], RotaryEmbedding(R).tables(5000, x)[0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, s: apply_rotary_emb(torch.zeros(1, 4, 2, 8), c, s), ValueError, "D >= 12"),
        (lambda c, s: apply_rotary_emb(torch.zeros(4, 2, 16), c, s), ValueError, "x must be"),
        (lambda c, s: apply_rotary_emb(torch.zeros(1, 40, 2, 16), c, s), ValueError,
         "cos holds 32 positions, got 40 tokens from 0 on"),
        (lambda c, s: apply_rotary_emb(torch.zeros(1, 4, 2, 16), c, s[:3]), ValueError,
         "cos and sin must be"),
        (lambda c, s: apply_rotary_emb_qkv_(torch.zeros(1, 4, 9, 16), c, s), ValueError,
         "num_heads_q None"),
        (lambda c, s: RotaryEmbedding(8, scale_base=512.0), NotImplementedError, "XPos"),
        (lambda c, s: RotaryEmbedding(8)(torch.zeros(1, 2, 3, 1, 8), None, torch.tensor([1])),
         ValueError, "max_seqlen must be given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_raises(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call(*tables(torch.float32))
