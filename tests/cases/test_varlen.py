"""Cases on packed documents and empty inputs. Poison stands in every row that no document owns."""

from itertools import pairwise
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.cases.common import (
    INF,
    NAN,
    causally,
    check,
    everything,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    same,
    spoiled,
)


def packed(cu_q: list[int], cu_k: list[int], **options: Any) -> Any:
    """The call on documents with these bounds."""
    cu = {"cu_seqlens_q": torch.tensor(cu_q), "cu_seqlens_k": torch.tensor(cu_k)}
    return lambda **x: tw.attention_varlen_partial(**x, **cu, **options)


def packed_form(cu_q: list[int], cu_k: list[int], rule: Any = everything, **terms: Any) -> Any:
    return lambda **x: packed_formula(**x, cu_q=cu_q, cu_k=cu_k, rule=rule, **terms)


@on_backends
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_c001_varlen_causal_backward_few_keys(backend: str, heads: tuple[int, int]) -> None:
    cu_q, cu_k = [0, 76, 110, 256], [0, 1, 2, 3]
    x = packed_qkv(256, 3, heads, 32, dtype=torch.float16, std=3.0)
    call = packed(cu_q, cu_k, mask=tw.causal(), max_seqlen_q=256, max_seqlen_k=3, backend=backend)
    dout = torch.ones(256, heads[0], 32, dtype=torch.float16)
    got = check(call, packed_form(cu_q, cu_k, causally), x, dout=dout)

    sees = torch.zeros(256, dtype=torch.bool)
    sees[[75, 109, 255]] = True
    assert got.lse is not None
    assert is_zero(got.out[~sees]) and is_zero(got.grads["q"][~sees])
    assert torch.equal(got.lse.isneginf(), (~sees).expand_as(got.lse))
    group = heads[0] // heads[1]
    assert torch.equal(got.out[sees], x["v"].repeat_interleave(group, dim=1))

    # Without dLSE, softmax over one key is constant: the exact dQ and dK are 0.
    alone = check(lambda **x: call(**x).out, packed_form(cu_q, cu_k, causally), x, dout=dout)
    assert torch.equal(alone.grads["v"], torch.full_like(x["v"], float(group)))


@on_backends
@pytest.mark.parametrize("max_seqlen_q", [1, 2, None])
def test_c002_one_query_documents_and_an_empty_one(backend: str, max_seqlen_q: int | None) -> None:
    cu_q, cu_k = [0, 1, 1, 2], [0, 3, 3, 8]
    x = packed_qkv(2, 8, (9, 3), 64, dtype=torch.bfloat16)
    options = {"mask": tw.causal(), "scale": 1.0, "backend": backend}
    got = check(
        packed(cu_q, cu_k, max_seqlen_q=max_seqlen_q, **options),
        packed_form(cu_q, cu_k, causally, scale=1.0),
        x,
    )
    assert got.out.shape == (2, 9, 64)
    for m, (n0, n1) in ((0, (0, 3)), (1, (3, 8))):
        alone = tw.attention(
            x["q"][None, m : m + 1], x["k"][None, n0:n1], x["v"][None, n0:n1], **options
        )
        assert torch.equal(got.out[m], alone[0, 0])


@on_backends
def test_c004_wide_heads_with_empty_query_segments(backend: str) -> None:
    # An eighth of the reported lengths, one query segment empty at the start, one at the end.
    cu_q, cu_k = [0, 0, 151, 256, 256], [0, 317, 535, 640, 1024]
    x = packed_qkv(256, 1024, (4, 1), 256, dtype=torch.bfloat16)
    unseen = torch.zeros(1024, dtype=torch.bool)
    unseen[:317] = unseen[640:] = True
    x |= {name: spoiled(x[name], unseen) for name in ("k", "v")}
    got = check(packed(cu_q, cu_k, backend=backend), packed_form(cu_q, cu_k), x)
    assert is_zero(got.grads["k"][unseen]) and is_zero(got.grads["v"][unseen])


@on_backends
def test_c006_leading_empty_query_documents(backend: str) -> None:
    cu_q, cu_k = [0, 0, 0, 127], [0, 0, 1, 255]
    x = packed_qkv(127, 255, (2, 1), 128, dtype=torch.bfloat16)
    x |= {name: spoiled(x[name], 0) for name in ("k", "v")}
    got = check(packed(cu_q, cu_k, backend=backend), packed_form(cu_q, cu_k), x)
    assert is_zero(got.grads["k"][0]) and is_zero(got.grads["v"][0])

    # As it was reported, the key bounds end one row past what is stored.
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 256, but only 255 tokens"):
        packed(cu_q, [0, 0, 1, 256], backend=backend)(**x)


@on_backends
def test_c007_keys_without_queries(backend: str) -> None:
    cu_q, cu_k = [0, 150, 150, 300], [0, 100, 200, 300]
    x = packed_qkv(300, 300, (2, 1), 16)
    got = check(packed(cu_q, cu_k, backend=backend), packed_form(cu_q, cu_k), x)
    assert is_zero(got.grads["k"][100:200]) and is_zero(got.grads["v"][100:200])
    for (m0, m1), (n0, n1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        alone = {"q": x["q"][m0:m1], "k": x["k"][n0:n1], "v": x["v"][n0:n1]}
        check(
            lambda **x: tw.attention(**{n: t[None] for n, t in x.items()}, backend=backend)[0],
            packed_form([0, m1 - m0], [0, n1 - n0]),
            alone,
        )


@on_backends
@pytest.mark.parametrize("mask", [tw.full(), tw.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("has_sink", [False, True], ids=["plain", "sink"])
def test_c008_no_keys_at_all(backend: str, mask: tw.Mask, has_sink: bool) -> None:
    x = qkv(2, 5, 0, (4, 2), 16, 8)
    if has_sink:
        x["sinks"] = normal(4)
    got = run(lambda **x: tw.attention_partial(**x, mask=mask, backend=backend), x)
    assert got.lse is not None and got.out.shape == (2, 5, 4, 8)
    assert is_zero(got.out) and is_zero(got.grads["q"])
    assert got.grads["k"].shape == (2, 0, 2, 16) and got.grads["v"].shape == (2, 0, 2, 8)
    sink = x["sinks"].view(1, 4, 1) if has_sink else torch.tensor(-INF)
    assert torch.equal(got.lse, sink.expand_as(got.lse))


@on_backends
def test_c008_packed_without_keys(backend: str) -> None:
    x = packed_qkv(7, 0, (4, 2), 16)
    got = run(packed([0, 3, 7], [0, 0, 0], backend=backend), x)
    assert got.lse is not None
    assert is_zero(got.out) and is_zero(got.grads["q"]) and bool(got.lse.isneginf().all())


@on_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_c011_batch_of_zero(backend: str, dtype: torch.dtype) -> None:
    x = qkv(0, 3952, 16, (10, 10), 64, dtype=dtype)
    got = run(lambda **x: tw.attention_partial(**x, backend=backend), x)
    assert got.out.shape == (0, 3952, 10, 64) and got.out.dtype == dtype
    assert got.lse is not None and got.lse.shape == (0, 10, 3952)
    assert [got.grads[name].shape for name in "qkv"] == [x[name].shape for name in "qkv"]


@on_backends
def test_c011_no_documents(backend: str) -> None:
    x = packed_qkv(3, 3, (2, 1), 8)
    got = run(packed([0], [0], backend=backend), {n: spoiled(t, ...) for n, t in x.items()})
    assert is_zero(got.out) and all(is_zero(grad) for grad in got.grads.values())


@on_backends
@pytest.mark.parametrize("poison", [NAN, INF])
def test_c013_rows_past_the_last_document(backend: str, poison: float) -> None:
    cu = [0, 44, 132, 244]
    x = packed_qkv(246, 246, (4, 2), 16)
    x = {name: spoiled(t, slice(244, None), poison) for name, t in x.items()}
    dout = spoiled(normal(246, 4, 16), slice(244, None), poison)
    got = check(
        packed(cu, cu, mask=tw.causal(), backend=backend),
        packed_form(cu, cu, causally),
        x,
        dout=dout,
    )
    assert got.lse is not None
    assert is_zero(got.out[244:]) and bool(got.lse[:, 244:].isneginf().all())
    assert all(is_zero(grad[244:]) for grad in got.grads.values())


@on_backends
def test_c014_gradient_of_slack_is_written(backend: str) -> None:
    """Half of the storage is slack: whole query tiles belong to nobody, yet must be written."""
    cu = [0, 100, 101, 300]
    x = {n: spoiled(t, slice(300, None)) for n, t in packed_qkv(600, 600, (2, 1), 8).items()}
    got = check(packed(cu, cu, backend=backend), packed_form(cu, cu), x)
    assert all(is_zero(grad[300:]) for grad in got.grads.values())


@on_backends
def test_c015_uncovered_rows_of_a_shared_buffer(backend: str) -> None:
    """k and v are halves of one buffer; what the uncovered rows hold changes nothing."""
    cu_q, cu_k = [0, 9, 20], [0, 30, 37]
    q, kv = normal(25, 4, 16), normal(40, 2, 2, 16, seed=1)
    first = None
    for tail in (0.0, 1e30, NAN):
        x = {"q": spoiled(q, slice(20, None), tail)}
        buffer = spoiled(kv, slice(37, None), tail)
        x |= {"k": buffer[:, 0], "v": buffer[:, 1]}
        got = run(packed(cu_q, cu_k, mask=tw.causal(), deterministic=True, backend=backend), x)
        assert is_zero(got.out[20:]) and is_zero(got.grads["k"][37:])
        first = first or got
        same(got, first)


@on_backends
def test_c016_max_seqlen_too_small_equal_and_large(backend: str) -> None:
    cu_q, cu_k = [0, 5, 5, 12], [0, 9, 11, 22]
    x = packed_qkv(12, 22, (4, 2), 8)
    options = {"mask": tw.causal(), "deterministic": True, "backend": backend}
    plain = run(packed(cu_q, cu_k, **options), x)
    for longest in ((7, 11), (8, 12), (4096, 1 << 40)):
        bounds = {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
        got = run(packed(cu_q, cu_k, **options, **bounds), x)
        same(got, plain)
    for bounds, message in (
        ({"max_seqlen_q": 6}, "max_seqlen_q is 6, but a sequence has 7"),
        ({"max_seqlen_k": 10}, "max_seqlen_k is 10, but a sequence has 11"),
    ):
        with pytest.raises(ValueError, match=message):
            packed(cu_q, cu_k, backend=backend, **bounds)(**x)


@on_backends
def test_c016_bound_of_keys_that_share_the_packing_of_queries(backend: str) -> None:
    x = packed_qkv(12, 12, (4, 2), 8)
    with pytest.raises(ValueError, match="max_seqlen_k is 6, but a sequence has 7"):
        tw.attention_varlen(
            **x, cu_seqlens_q=torch.tensor([0, 5, 12]), max_seqlen_k=6, backend=backend
        )
