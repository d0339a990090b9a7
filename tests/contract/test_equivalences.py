"""What must be equal: packed and padded, split and whole, alone and in a batch, twice the same."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST, backends, check_call, on_backend, runs_kernels
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense import torch_flash

attention, attention_partial, attention_partial_backward, attention_varlen = map(
    on_backend,
    (tw.attention, tw.attention_partial, tw.attention_partial_backward, tw.attention_varlen),
)
tiled_alone = pytest.mark.skipif(
    UNDER_TEST.backend is not None, reason="what the tiled backend alone has"
)


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v of B, M, N, H, G, D, E."""
    B, M, N, H, G, D, E = shape
    shapes = ((B, M, H, D), (B, N, G, D), (B, N, G, E))
    return [torch.randn(*s, dtype=dtype, requires_grad=True) for s in shapes]


def gradients(out: Tensor, inputs: list[Tensor], dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, inputs, dout))


def assert_same(got: Tensor, other: Tensor, name: str = "result") -> None:
    """Two evaluations of one thing in one dtype: both are within rounding of each other."""
    eps = torch.finfo(other.dtype).eps
    wide = other.detach().double()
    floor = 16 * eps * float(wide.abs().max()) if wide.numel() else 0.0
    assert_within_budget(got.detach(), wide, wide, name=name, floor=floor)


MASKS = {
    "full": tw.full(),
    "causal": tw.causal(),
    "window": tw.window(9, 4),
    "prefix": tw.causal() | tw.prefix(7),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_packed_equals_each_document_alone(mask: tw.Mask) -> None:
    lengths_q, lengths_k = (5, 0, 64, 1, 130), (9, 3, 64, 0, 77)
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0) for x in (lengths_q, lengths_k))
    q, k, v = (x[0].detach() for x in qkv(1, sum(lengths_q), sum(lengths_k), 4, 2, 16, 8))
    packed = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention_varlen(*packed, mask=mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    dout = torch.randn_like(out)
    got = gradients(out, packed, dout)
    spans = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    for (m0, m1), (n0, n1) in spans:
        alone = [
            x.clone().requires_grad_() for x in (q[None, m0:m1], k[None, n0:n1], v[None, n0:n1])
        ]
        single = attention(*alone, mask=mask)
        assert_same(out[m0:m1], single[0])
        expected = gradients(single, alone, dout[None, m0:m1])
        for x, y, (a, b) in zip(got, expected, ((m0, m1), (n0, n1), (n0, n1)), strict=True):
            assert_same(x[a:b], y[0])


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_any_split_of_keys_merges_to_one_pass(mask: tw.Mask, splits: int) -> None:
    # Kernels round P to 16 bits, relative to a maximum that each split has of its own.
    dtype = torch.float32 if runs_kernels() else torch.bfloat16
    q, k, v = qkv(2, 67, 149, 4, 2, 16, 8, dtype=dtype)
    whole = attention_partial(q, k, v, mask=mask, q_start=80, k_start=0, out_dtype=torch.float32)
    # Uneven, with an empty piece at the end.
    edges = [0, *torch.randint(0, 150, (splits - 1,)).sort().values.tolist(), 149, 149]
    parts = [
        attention_partial(
            q, k[:, a:b], v[:, a:b], mask=mask, q_start=80, k_start=a, out_dtype=torch.float32
        )
        for a, b in pairwise(edges)
    ]
    merged = tw.merge(parts)
    assert_same(merged.out, whole.out)
    assert_lse_within_budget(merged.lse.detach(), whole.lse.detach().double(), torch.float32)
    dout = torch.randn_like(whole.out)
    expected = gradients(whole.out, [q, k, v], dout)
    for got, exact in zip(gradients(merged.out, [q, k, v], dout), expected, strict=True):
        assert_same(got, exact)


def test_a_piece_adds_its_gradients_into_the_callers_buffers() -> None:
    q, k, v = qkv(2, 67, 149, 4, 2, 16, 8)
    mask = tw.causal() & tw.window(60, 0)
    whole = attention_partial(q, k, v, mask=mask, q_start=82, k_start=0)
    dout, dlse = torch.randn_like(whole.out), torch.randn_like(whole.lse)
    expected = torch.autograd.grad(list(whole), [q, k, v], [dout, dlse])
    q, k, v = (x.detach() for x in (q, k, v))
    delta = (dout * whole.out.detach()).sum(-1).transpose(1, 2) - dlse
    buffers = [torch.full_like(x, 3.0) for x in (q, k, v)]
    for a, b in ((0, 50), (50, 149)):
        attention_partial_backward(
            dout, q, k[:, a:b], v[:, a:b], whole.lse.detach(), delta.detach(), mask=mask,
            dq=buffers[0], dk=buffers[1][:, a:b], dv=buffers[2][:, a:b], q_start=82, k_start=a,
        )  # fmt: skip
    for got, exact in zip(buffers, expected, strict=True):
        assert_same(got - 3.0, exact)


def test_used_lengths_equal_cut_tensors() -> None:
    q, k, v = (x[0].detach() for x in qkv(1, 60, 80, 4, 2, 16, 16))
    cu_q, cu_k = torch.tensor([0, 20, 60]), torch.tensor([0, 30, 80])
    out = attention_varlen(
        q, k, v, mask=tw.causal(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        seqused_q=torch.tensor([13, 40]), seqused_k=torch.tensor([25, 9]),
    )  # fmt: skip
    first = attention(q[None, :13], k[None, :25], v[None, :25], mask=tw.causal())
    second = attention(q[None, 20:], k[None, 30:39], v[None, 30:39], mask=tw.causal())
    assert_same(out[:13], first[0])
    assert_same(out[20:], second[0])
    assert torch.equal(out[13:20], torch.zeros_like(out[13:20]))


EQUAL_MASKS = {
    "causal & wide window": (tw.causal(), tw.causal() & tw.window(149, 149)),
    "causal = window(None, 0)": (tw.causal(), tw.window(None, 0)),
    "causal = offset N - M": (tw.causal(), tw.causal(offset=82)),
    "offset per batch row": (tw.causal(offset=3), tw.causal(offset=torch.tensor([3, 3]))),
    "full = window(None, None)": (tw.full(), tw.window(None, None)),
    "De Morgan": (~(tw.causal() & tw.prefix(30)), ~tw.causal() | ~tw.prefix(30)),
    "double negation": (tw.window(9, 4), ~~tw.window(9, 4)),
    "predicate": (tw.causal(), tw.from_function(lambda b, h, m, n: n <= m + 82)),
    "intervals": (
        tw.window(9, 4),
        tw.intervals((torch.arange(67)[:, None] + 73).clamp(min=0), torch.arange(67)[:, None] + 87),
    ),
    "blocks": (
        tw.key_padding(64),
        tw.blocks(torch.arange(10).lt(4).expand(5, 10), 16, 16),
    ),
}


@pytest.mark.parametrize(("one", "other"), EQUAL_MASKS.values(), ids=EQUAL_MASKS.keys())
def test_expressions_of_one_mask(one: tw.Mask, other: tw.Mask) -> None:
    inputs = qkv(2, 67, 149, 4, 2, 16, 8)
    a, b = (attention_partial(*inputs, mask=mask) for mask in (one, other))
    assert_same(b.out, a.out)
    assert_lse_within_budget(b.lse.detach(), a.lse.detach().double(), torch.float32)
    dout = torch.randn_like(a.out)
    for x, y in zip(gradients(b.out, inputs, dout), gradients(a.out, inputs, dout), strict=True):
        assert_same(x, y)


def test_a_batch_element_alone_equals_itself_in_the_batch() -> None:
    q, k, v = qkv(3, 67, 149, 4, 2, 16, 8)
    lengths = torch.tensor([149, 0, 31])
    whole = attention(q, k, v, mask=tw.causal() & tw.key_padding(lengths))
    for b in range(3):
        row = slice(b, b + 1)
        alone = attention(q[row], k[row], v[row], mask=tw.causal() & tw.key_padding(lengths[row]))
        assert_same(whole[row], alone)


def test_padded_keys_equal_cut_keys_bit_for_bit_even_where_they_are_nan() -> None:
    q, k, v = (x.detach() for x in qkv(2, 67, 149, 4, 2, 16, 8))
    clean = attention(q, k, v, mask=tw.key_padding([31, 90]))
    for poison in (float("nan"), float("inf"), 1e30):
        k2, v2 = k.clone(), v.clone()
        for b, length in enumerate((31, 90)):
            k2[b, length:] = v2[b, length:] = poison
        dirty = [x.requires_grad_() for x in (q.clone(), k2, v2)]
        out = attention(*dirty, mask=tw.key_padding([31, 90]))
        assert torch.equal(out, clean)
        for gradient in gradients(out, dirty, torch.ones_like(out)):
            assert bool(torch.isfinite(gradient).all())
        assert bool(dirty[1].grad is None) and bool((out == clean).all())


@pytest.mark.interpreter
@pytest.mark.parametrize("mask", [tw.causal(offset=0), tw.causal(offset=0) | tw.prefix(3)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_no_query_sees_reaches_no_gradient(mask: tw.Mask, softcap: float | None) -> None:
    """NaN in keys beyond the last query, which share a tile with keys that are seen."""
    q, k, v = (x.detach() for x in qkv(1, 37, 53, 2, 1, 16, 8))
    mask = mask & ~tw.window(0, 0, offset=0) & ~tw.prefix(1)
    poisoned = [x.clone() for x in (q, k, v)]
    # No query sees the keys from 37 on, nor query 0 any at all.
    poisoned[1][:, 37:] = poisoned[2][:, 37:] = torch.nan
    clean = [poisoned[0].clone(), *(x.nan_to_num(0.0) for x in poisoned[1:])]
    results = []
    for x in (poisoned, clean):
        leaves = [t.clone().requires_grad_() for t in x]
        out = attention(*leaves, mask=mask, softcap=softcap)
        results.append([out.detach(), *gradients(out, leaves, torch.ones_like(out))])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shift", [1.0, 100.0, 1e4, 1e5])
def test_adding_a_constant_to_all_logits_moves_only_the_lse(shift: float) -> None:
    q, k, v = (x.detach() for x in qkv(2, 37, 53, 4, 2, 16, 8))
    for sign in (1, -1):
        check_call(
            "attention_partial", {"q": q, "k": k, "v": v, "bias": torch.full((1,), sign * shift)}
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": tw.causal()},
    "softcap": {"softcap": 3.0},
    "dropout": {"dropout_p": 0.3},
    "predicate": {"mask": tw.from_function(lambda b, h, m, n: (m * n) % 3 != 0)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thirty_runs_are_bitwise_equal(options: dict[str, Any], dtype: torch.dtype) -> None:
    inputs = qkv(2, 130, 530, 4, 2, 16, 16, dtype=dtype)
    bias = torch.randn(1, 1, 130, 530, requires_grad=True)
    slopes = torch.rand(4, requires_grad=True)
    leaves = [*inputs, bias, slopes]

    def run() -> list[Tensor]:
        torch.manual_seed(5)
        out = attention(*inputs, bias=bias, alibi_slopes=slopes, deterministic=True, **options)
        return [out.detach(), *gradients(out, leaves, torch.ones_like(out))]

    first = run()
    for _ in range(30):
        assert all(torch.equal(x, y) for x, y in zip(first, run(), strict=True))


@tiled_alone
def test_the_hand_off_equals_the_tiles() -> None:
    inputs = qkv(2, 149, 149, 4, 4, 16, 16)
    for mask in (tw.full(), tw.causal()):
        fused = attention_partial(*inputs, mask=mask)
        with torch_flash.disabled():
            tiled = attention_partial(*inputs, mask=mask)
        assert_same(fused.out, tiled.out)
        assert_lse_within_budget(fused.lse.detach(), tiled.lse.detach().double(), torch.float32)


@tiled_alone
def test_tile_sizes_do_not_change_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = qkv(2, 67, 149, 4, 2, 16, 8)
    outs = []
    for m, n in ((128, 512), (16, 32), (7, 50)):
        monkeypatch.setattr("tilewise.dense.tiled.BLOCK_M", m)
        monkeypatch.setattr("tilewise.dense.tiled.BLOCK_N", n)
        torch.manual_seed(3)
        out = attention(*inputs, dropout_p=0.4)
        outs.append([out, *gradients(out, inputs, torch.ones_like(out))])
    for other in outs[1:]:
        for x, y in zip(other, outs[0], strict=True):
            assert_same(x, y)


LARGEST = torch.iinfo(torch.int64).max
WIDE_MASKS = {
    "key_padding": tw.key_padding(LARGEST),
    "prefix": tw.prefix(LARGEST),
    "intervals": tw.intervals(torch.zeros(67, 1).long(), torch.full((67, 1), LARGEST)),
    "chunked": tw.chunked(LARGEST),
    "causal(offset)": tw.causal(offset=LARGEST),
    "causal(offset tensor)": tw.causal(offset=torch.tensor(LARGEST)),
    "window": tw.window(LARGEST, LARGEST),
}


@pytest.mark.parametrize("backend", backends("tiled", "reference"))
@pytest.mark.parametrize("mask", WIDE_MASKS.values(), ids=WIDE_MASKS.keys())
def test_the_widest_masks_are_full_padded_and_packed(mask: tw.Mask, backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(1, 67, 67, 4, 2, 16, 8))
    assert_same(attention(q, k, v, mask=mask, backend=backend), attention(q, k, v, softcap=None))
    packed = {"cu_seqlens_q": torch.tensor([0, 20, 67])}
    got = attention_varlen(q[0], k[0], v[0], mask=mask, backend=backend, **packed)
    assert_same(got, attention_varlen(q[0], k[0], v[0], **packed))


def test_no_document_and_no_length() -> None:
    p = torch.randn(5, 2, 4)
    nothing = torch.zeros(0, dtype=torch.int64)
    out = attention_varlen(p, p, p, cu_seqlens_q=torch.tensor([0]), mask=tw.key_padding(nothing))
    assert torch.equal(out, torch.zeros_like(p))


def test_an_empty_row_gives_the_sink_dlse_alone() -> None:
    q = torch.randn(1, 8, 2, 4)
    sinks = torch.randn(2, requires_grad=True)
    out, lse = attention_partial(q, q, q, mask=tw.key_padding(0), sinks=sinks)
    torch.autograd.backward([out, lse], [torch.full_like(out, torch.nan), torch.ones_like(lse)])
    assert torch.equal(sinks.grad, torch.full((2,), 8.0))


def test_a_mask_has_no_truth_value() -> None:
    with pytest.raises(TypeError, match="no truth value"):
        bool(tw.causal())
