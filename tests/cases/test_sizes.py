"""Cases of sizes: offsets past 2^31 elements, more than 65,535 sequences or batch times heads.

Offsets are real where a view of sparse storage can have them: the element that a 32-bit offset
would miss is read, and nothing between is touched. Batches are real, heads and dims small.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.cases.common import (
    Outcome,
    causally,
    check,
    everything,
    formula,
    is_zero,
    normal,
    packed_qkv,
    qkv,
    rounding,
    run,
    same,
    sparse_storage,
    visibility,
    windowed,
)
from tests.helpers import backends
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.slow

LIMIT = 2**31
(BACKEND,) = backends("tiled")


def check_dense(x: dict[str, Tensor], mask: tw.Mask, visible: Tensor) -> Outcome:
    return check(
        lambda **x: tw.attention_partial(**x, mask=mask, backend=BACKEND),
        lambda **x: formula(**x, visible=visible),
        x,
    )


@pytest.mark.parametrize("B", [10_000, 15_000])
def test_c083_large_batch_backward(B: int) -> None:
    check_dense(qkv(B, 3, 5, (2, 1), 8), tw.causal(), visibility(causally, 3, 5))


def test_c084_large_batch_of_one_token() -> None:
    """B x 128 x 16 x 128 is past 2^31. One key per row, so out is V."""
    B = 8300
    x = qkv(B, 1, 1, (16, 16), 128, dtype=torch.bfloat16)
    dout = normal(B, 1, 16, 128, dtype=torch.bfloat16)
    got = run(lambda **x: tw.attention(**x, mask=tw.causal()), x, dout)
    assert torch.equal(got.out, x["v"]) and torch.equal(got.grads["v"], dout)
    # dP - delta is the rounding of two sums of the same 128 products.
    lse = (x["q"].double() * x["k"].double()).sum(-1) * 128**-0.5
    for name in "qk":
        exact = torch.zeros_like(x[name], dtype=torch.float64)
        least = rounding(x, dout, lse, name)
        assert_within_budget(got.grads[name], exact, x[name] * 0, name=name, floor=least)


def test_c087_batch_of_768_inference() -> None:
    """The batch as reported, 32 of its 2048 tokens, expanded from one row."""
    x = {n: t.expand(768, 32, -1, -1) for n, t in qkv(1, 32, 32, (4, 2), 16).items()}
    one = {name: t[:1] for name, t in x.items()}
    with torch.no_grad():
        out = tw.attention(**x, mask=tw.causal())
        alone = tw.attention(**one, mask=tw.causal())
    check_dense(one, tw.causal(), visibility(causally, 32, 32))
    assert out.shape == (768, 32, 4, 16)
    assert torch.equal(out, out[:1].expand_as(out))
    assert torch.equal(out[-1:], alone)


@pytest.mark.parametrize(("count", "length"), [(65_535, 1), (65_536, 2), (80_000, 1)])
def test_c088_so_many_sequences_packed(count: int, length: int) -> None:
    """Shorter than the reported 16 tokens, so that the run is short too."""
    x = packed_qkv(length * count, length * count, (1, 1), 8)
    cu = torch.arange(count + 1, dtype=torch.int32) * length
    check(
        lambda **x: tw.attention_varlen_partial(**x, cu_seqlens_q=cu, mask=tw.causal()),
        as_batch(count, visibility(causally, length, length)),
        x,
    )


def as_batch(count: int, visible: Tensor) -> Any:
    """The formula for `count` documents of one length, all at once."""

    def form(**x: Tensor) -> tuple[Tensor, Tensor]:
        rows = {name: t.unflatten(0, (count, -1)) for name, t in x.items()}
        out, lse = formula(**rows, visible=visible)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    return form


def test_c088_so_many_sequences_of_16_with_splits() -> None:
    """80,000 sequences as a batch; the keys in two splits, merged."""
    x = qkv(80_000, 1, 16, (1, 1), 8)

    def split(q: Tensor, k: Tensor, v: Tensor) -> tw.Partial:
        pieces = [
            tw.attention_partial(q, k[:, n0:n1], v[:, n0:n1], q_start=15, k_start=n0)
            for n0, n1 in ((0, 9), (9, 16))
        ]
        return tw.merge(pieces)

    check(split, lambda **x: formula(**x, visible=torch.tensor(True)), x)


def test_c090_batch_times_heads_past_65535() -> None:
    x = qkv(10_923, 4, 4, (6, 3), 8)
    whole = check_dense(x, tw.causal(), visibility(causally, 4, 4))
    for rows in (slice(0, 10_000), slice(10_000, None)):
        half = {name: t[rows] for name, t in x.items()}
        part = check_dense(half, tw.causal(), visibility(causally, 4, 4))
        assert part.out.shape == whole.out[rows].shape


def test_c091_packed_decode_with_sequences_times_heads_past_65535() -> None:
    count = 9000
    x = packed_qkv(count, 3 * count, (8, 2), 8)
    bounds = {"cu_seqlens_q": torch.arange(count + 1), "cu_seqlens_k": torch.arange(count + 1) * 3}

    def form(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys = (t.unflatten(0, (count, 3)) for t in (k, v))
        out, lse = formula(q.unsqueeze(1), *keys, visible=torch.tensor(True))
        return out.squeeze(1), lse.squeeze(-1).T

    check(lambda **x: tw.attention_varlen_partial(**x, **bounds, mask=tw.causal()), form, x)


def test_c070_tokens_past_65536() -> None:
    """T 65,537: the last token is computed by the same formula as the one before it."""
    T, tail = 65_537, 70
    x = qkv(1, T, T, (2, 1), 8)
    dout = normal(1, T, 2, 8)
    mask = tw.window(5, 0)
    got = run(lambda **x: tw.attention(**x, mask=mask), x, dout)
    shorter = run(
        lambda **x: tw.attention(**x, mask=mask), {n: t[:, :-1] for n, t in x.items()}, dout[:, :-1]
    )
    assert torch.equal(shorter.out, got.out[:, :-1])

    # The last 64 rows and keys depend on the tail alone.
    end = {name: t[:, -tail:] for name, t in x.items()}
    visible = visibility(windowed(5, 0), tail, tail)
    exact, eager = (
        run(
            lambda **x: formula(**x, visible=visible)[0],
            {name: t.to(dtype) for name, t in end.items()},
            dout[:, -tail:].to(dtype),
        )
        for dtype in (torch.float64, torch.float32)
    )
    last = slice(-64, None)
    assert_within_budget(got.out[:, last], exact.out[:, last], eager.out[:, last])
    for name in "qkv":
        three = (o.grads[name][:, last] for o in (got, exact, eager))
        assert_within_budget(*three, name=f"d{name}")


def test_c093_checkpointing_past_128k_tokens() -> None:
    x = qkv(1, 131_073, 131_073, (1, 1), 8)

    def attend(**x: Tensor) -> Tensor:
        return tw.attention(**x, mask=tw.window(3, 0), deterministic=True)

    again = run(lambda **x: checkpoint(attend, **x, use_reentrant=False), x)
    same(again, run(attend, x))


@pytest.mark.parametrize("B", [65_535, 65_536])
def test_c095_backward_runs_for_every_batch_row(B: int) -> None:
    check_dense(qkv(B, 2, 3, (2, 1), 8), tw.full(), visibility(everything, 2, 3))


def test_c098_blocks_around_the_32_bit_limit(tmp_path: Path) -> None:
    """Blocks 65,535 and 65,536 of an interleaved cache: K then V, 16 tokens, 8 heads, D 128."""
    block = (2, 16, 8, 128)
    cache = sparse_storage(tmp_path, 65_537 * 2 * 16 * 8 * 128, torch.float16)
    cache = cache.view(65_537, *block)
    content = normal(*block, dtype=torch.float16)
    cache[65_535] = cache[65_536] = content
    assert cache[65_536].storage_offset() == LIMIT
    q = normal(1, 3, 16, 128, dtype=torch.float16)
    outcomes = []
    for page in (65_535, 65_536):
        k, v = cache[page : page + 1].unbind(1)
        outcomes.append(check_dense({"q": q, "k": k, "v": v}, tw.full(), torch.tensor(True)))
    assert torch.equal(outcomes[0].out, outcomes[1].out)
    assert torch.equal(outcomes[0].grads["k"], outcomes[1].grads["k"])


def test_c100_views_into_fused_qkv_past_the_limit(tmp_path: Path) -> None:
    """56 heads of 128, S 99,866: the token stride of 21,504 puts the last rows past 2^31."""
    S, H, D = 99_866, 56, 128
    fused = sparse_storage(tmp_path, S * 3 * H * D, torch.float16).view(1, S, 3, H, D)
    # Tokens 1, 49,933 and 99,865, the last one.
    view = fused[:, 1 :: S // 2 - 1]
    view.copy_(normal(*view.shape, dtype=torch.float16))
    x = dict(zip("qkv", view.unbind(2), strict=True))
    assert x["q"].shape[1] == 3 and 2 * x["q"].stride(1) + x["q"].storage_offset() > LIMIT
    mask, visible = tw.causal(), visibility(causally, 3, 3)
    strided = check_dense(x, mask, visible)
    plain = check_dense({name: t.contiguous() for name, t in x.items()}, mask, visible)
    assert torch.equal(strided.out, plain.out)


@pytest.mark.parametrize("way", ["bias", "alibi"])
def test_c101_many_documents_with_positional_bias(way: str) -> None:
    """A tenth of the 190,485 tokens, in documents of 15, each with its own table of positions."""
    count = 1269
    x = packed_qkv(15 * count, 15 * count, (2, 1), 8)
    cu = torch.arange(count + 1) * 15
    distance = (torch.arange(15).view(-1, 1) - torch.arange(15)).abs()
    if way == "bias":
        x["bias"] = normal(count, 2, 15, 15)
    else:
        x["alibi_slopes"] = normal(count, 2).abs()

    def form(**x: Tensor) -> tuple[Tensor, Tensor]:
        bias = x.pop("bias") if way == "bias" else None
        if bias is None:
            bias = -x.pop("alibi_slopes").view(count, 2, 1, 1) * distance
        rows = {name: t.unflatten(0, (count, 15)) for name, t in x.items()}
        out, lse = formula(**rows, visible=visibility(causally, 15, 15), bias=bias)
        return out.flatten(0, 1), lse.transpose(0, 1).flatten(1)

    check(lambda **x: tw.attention_varlen_partial(**x, cu_seqlens_q=cu, mask=tw.causal()), form, x)


def test_c102_dense_bias_past_the_limit(tmp_path: Path) -> None:
    """B H S S is 2^31 + 97,316: only the last rows of each sequence see their last keys, so that
    the far end of the bias is read and little else."""
    (B, H, S), seen = (2, 2, 23_171), 40
    bias = sparse_storage(tmp_path, B * H * S * S, torch.float16).view(B, H, S, S)
    corner = bias[..., -seen:, -seen:]
    corner.copy_(normal(B, H, seen, seen))
    assert bias.numel() > LIMIT
    x = qkv(B, S, S, (H, 1), 4)
    rows = torch.arange(S)
    starts = torch.where(rows >= S - seen, S - seen, 0).view(-1, 1)
    stops = torch.where(rows >= S - seen, S, 0).view(-1, 1)
    mask = tw.intervals(starts, stops)
    got = run(lambda **x: tw.attention(**x, mask=mask, bias=bias), x)
    assert is_zero(got.out[:, :-seen])
    assert all(is_zero(grad[:, :-seen]) for grad in got.grads.values())

    def ends(**x: Tensor) -> Tensor:
        """The same call, of which only the rows that see something are kept."""
        padded = {
            name: torch.cat([t.new_zeros(B, S - seen, *t.shape[2:]), t], dim=1)
            for name, t in x.items()
        }
        return tw.attention(**padded, mask=mask, bias=bias)[:, -seen:]

    check(
        ends,
        lambda **x: formula(**x, visible=torch.tensor(True), bias=corner),
        {name: t[:, -seen:] for name, t in x.items()},
    )


def test_c102_broadcast_bias_of_the_same_size() -> None:
    """Stride 0 over batch, heads and rows: the full size is only in the shape."""
    B, H, M, N = 64, 16, 3, 2048
    row = normal(1, 1, 1, N)
    x = qkv(B, M, N, (H, 4), 4)
    bias = row.expand(B, H, M, N)
    got = tw.attention(**x, bias=bias)
    assert torch.equal(got, tw.attention(**x, bias=row))
