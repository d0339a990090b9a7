"""Inputs of unusual form, size or place: what must be right all the same."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import check_call, on_backend

pytestmark = pytest.mark.interpreter

attention, attention_partial, attention_varlen = map(
    on_backend, (tw.attention, tw.attention_partial, tw.attention_varlen)
)


def qkv(B: int, M: int, N: int, H: int = 2, G: int = 1, D: int = 16) -> dict[str, Tensor]:
    shapes = {"q": (B, M, H, D), "k": (B, N, G, D), "v": (B, N, G, D)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()}


def strided(x: Tensor) -> Tensor:
    """The same numbers, every third element of storage full of others."""
    wide = torch.full((x.numel(), 3), 99, dtype=x.dtype)
    wide[:, 1] = x
    return wide[:, 1]


SAME = {"strided": strided, "expanded": lambda x: x[:1].expand(len(x))}


@pytest.mark.parametrize("form", SAME)
@pytest.mark.parametrize("name", ["key_padding", "left_padding", "offset", "q_start", "k_start"])
def test_lengths_of_any_layout(name: str, form: str) -> None:
    lengths = SAME[form](torch.tensor([7, 3, 5]))
    masks = {
        "key_padding": lambda x: {"mask": tw.key_padding(x)},
        "left_padding": lambda x: {"mask": tw.left_padding(x)},
        "offset": lambda x: {"mask": tw.causal(offset=x)},
        "q_start": lambda x: {"mask": tw.causal(), "q_start": x, "k_start": x.contiguous() // 2},
        "k_start": lambda x: {"mask": tw.causal(), "q_start": x.contiguous() + 1, "k_start": x},
    }
    x = qkv(3, 9, 9)
    run: Any = attention_partial if name.endswith("start") else attention
    results = [run(**x, **masks[name](t)) for t in (lengths, lengths.contiguous())]
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seqused_q", "seqused_k"])
def test_packed_lengths_of_any_layout(name: str) -> None:
    given = {"cu_seqlens_q": torch.tensor([0, 5, 9, 12]), "seqused_q": torch.tensor([4, 1, 3])}
    given["seqused_k"] = torch.tensor([3, 4, 1])
    q, k, v = (x[0] for x in qkv(1, 12, 12).values())
    got = attention_varlen(q, k, v, **{**given, name: strided(given[name])})
    assert torch.equal(got, attention_varlen(q, k, v, **given))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_an_out_that_is_narrower_than_q_costs_no_gradient(
    out_dtype: torch.dtype, sinks: bool
) -> None:
    """As if out were stored in q's dtype and converted afterwards, to the bit."""
    x = qkv(1, 35, 37) | ({"sinks": torch.randn(2)} if sinks else {})
    grads = []
    for dtype in (out_dtype, torch.float32):
        for _ in range(2):
            leaves = {name: t.clone().requires_grad_() for name, t in x.items()}
            out = attention_partial(**leaves, mask=tw.causal(), out_dtype=dtype).out
            assert out.dtype == dtype
            grads.append(torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out)))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@pytest.mark.parametrize("scale", [1e-46, 1e-300, 7e-46, 1e-38, 0.0])
def test_scales_next_to_nothing(scale: float) -> None:
    check_call("attention_partial", qkv(1, 5, 9), mask=tw.causal(), scale=scale)


@pytest.mark.parametrize("base", [1 << 29, (1 << 31) - 9])
def test_pieces_that_begin_far_out(base: int) -> None:
    x = qkv(2, 9, 9)
    near, far = (
        attention_partial(
            **x,
            mask=tw.causal() & tw.key_padding(torch.tensor([b + 7, b + 5])),
            q_start=torch.tensor([b + 4, b + 2]),
            k_start=torch.tensor([b, b + 1]),
        )
        for b in (0, base)
    )
    assert torch.equal(near.out, far.out) and torch.equal(near.lse, far.lse)


def test_a_far_piece_of_plain_ints_with_padding() -> None:
    x, base = qkv(2, 9, 9), 1 << 30
    near, far = (
        attention_partial(
            **x, mask=tw.key_padding(torch.tensor([b + 5, b + 3])), q_start=b, k_start=b
        )
        for b in (0, base)
    )
    assert torch.equal(near.out, far.out) and torch.equal(near.lse, far.lse)


EXTRAS = {
    "bias of rows": {"bias": (1, 4, 3, 1)},
    "bias of all": {"bias": (1, 1, 1, 1)},
    "bias of keys": {"bias": (1, 4, 1, 5)},
    "bias of no document": {"bias": (0, 4, 3, 1)},
    "slopes of no document": {"alibi_slopes": (0, 4)},
    "sinks": {"sinks": (4,)},
}


@pytest.mark.parametrize("shapes", EXTRAS.values(), ids=EXTRAS.keys())
def test_rows_that_no_document_owns_teach_nothing(shapes: dict[str, tuple[int, ...]]) -> None:
    q, k, v = (torch.randn(n, h, 16, requires_grad=True) for n, h in ((7, 4), (5, 2), (5, 2)))
    extras = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    out = attention_varlen(q, k, v, cu_seqlens_q=torch.tensor([0]), **extras)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), [q, k, v, *extras.values()]):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_a_bias_that_reaches_no_row() -> None:
    q, k = torch.randn(7, 4, 16, requires_grad=True), torch.randn(5, 2, 16)
    bias = torch.randn(1, 1, 0, 1, requires_grad=True)
    out = attention_varlen(q, k, k, cu_seqlens_q=torch.tensor([0, 0, 0]), bias=bias)
    assert torch.autograd.grad(out.sum(), bias)[0].shape == bias.shape
