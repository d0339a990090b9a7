"""Warm calls: what is kept serves like calls bit for bit, no others, and holds no tensor."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.dense import warm

from .probes import DEVICE

pytestmark = pytest.mark.interpreter


@pytest.fixture(autouse=True)
def cold() -> Iterator[None]:
    warm._kept.clear()
    yield
    warm._kept.clear()


def qkv(dtype: torch.dtype = torch.float16, M: int = 5, D: int = 16) -> list[Tensor]:
    return [torch.randn(1, M, 2, D).to(dtype) for _ in range(3)]


def attend(*x: Tensor, **options: Any) -> Tensor:
    return tw.attention(*x, backend="triton", **options)


def test_the_second_call_is_warm_and_as_the_first_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = qkv(), qkv()
    attend(*first, mask=tw.causal())
    assert len(warm._kept) == 1
    # Where something learns, another forward is kept: of an O that is not rounded.
    attend(*(x.requires_grad_() for x in first), mask=tw.causal())
    assert len(warm._kept) == 2

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a warm call was checked again")

    with monkeypatch.context() as patch:
        patch.setattr("tilewise.dense.api.check_call", refuse)
        leaves = [x.clone().requires_grad_() for x in second]
        got = attend(*leaves, mask=tw.causal())
        assert torch.equal(attend(*second, mask=tw.causal()), got)
        grads = torch.autograd.grad(got.sum(), leaves)
    warm._kept.clear()
    leaves = [x.clone().requires_grad_() for x in second]
    cold_out = attend(*leaves, mask=tw.causal())
    assert torch.equal(got, cold_out)
    for one, other in zip(grads, torch.autograd.grad(cold_out.sum(), leaves), strict=True):
        assert torch.equal(one, other)


def test_nothing_of_a_call_is_kept_alive() -> None:
    x = [t.requires_grad_() for t in qkv()]
    doubled = [t * 2 for t in x]
    attend(*doubled).sum().backward(retain_graph=True)
    attend(*doubled).sum().backward()
    assert len(warm._kept) == 1
    alive = [weakref.ref(t) for t in (*x, *doubled)]
    del x, doubled
    gc.collect()
    assert all(ref() is None for ref in alive)


# ---------------------------------------------------------------- packed


def packed(T: int = 9) -> list[Tensor]:
    return [torch.randn(T, 2, 16).half().to(DEVICE) for _ in range(3)]


def bounds(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def attend_packed(x: list[Tensor], cu: Tensor, **options: Any) -> Tensor:
    return tw.attention_varlen(*x, cu_seqlens_q=cu, mask=tw.causal(), backend="triton", **options)


def with_gradients(run: Callable[[list[Tensor]], Tensor], x: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in x]
    out = run(leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


PACKINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bounds": ({}, {}),
    "used": (
        {"seqused_q": bounds(2, 4), "seqused_k": bounds(3, 5)},
        {"seqused_q": bounds(4, 0), "seqused_k": bounds(1, 2)},
    ),
    "both": ({"cu_seqlens_k": bounds(0, 3, 9)}, {"cu_seqlens_k": bounds(0, 8, 9)}),
}


@pytest.mark.parametrize(("first", "then"), PACKINGS.values(), ids=PACKINGS.keys())
def test_a_warm_packed_call_reads_its_own_bounds(
    first: dict[str, Any], then: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = packed(), packed()

    def run_first(leaves: list[Tensor]) -> Tensor:
        return attend_packed(leaves, bounds(0, 4, 9), **first)

    def run_then(leaves: list[Tensor]) -> Tensor:
        return attend_packed(leaves, bounds(0, 7, 9), **then)

    # One that learns is kept apart from one that does not.
    cold = [with_gradients(run_first, x), run_first(x)]
    assert len(warm._kept) == 2

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a warm call was checked again")

    with monkeypatch.context() as patch:
        patch.setattr("tilewise.dense.api.check_call", refuse)
        got, plain = with_gradients(run_then, y), run_then(y)
        again = [with_gradients(run_first, x), run_first(x)]
    for one, other in zip(cold[0], again[0], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(cold[1], again[1])
    warm._kept.clear()
    for one, other in zip(got, with_gradients(run_then, y), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(plain, run_then(y))


def test_packed_forwards_before_their_backwards_keep_their_bounds() -> None:
    x, ends = packed(), [bounds(0, 4, 9), bounds(0, 8, 9)]
    want = [with_gradients(lambda t, cu=cu: attend_packed(t, cu), x) for cu in ends]
    leaves = [t.detach().clone().requires_grad_() for t in x]
    outs = [attend_packed(leaves, cu) for cu in ends]
    for out, exact in reversed(list(zip(outs, want, strict=True))):
        grads = torch.autograd.grad(out.float().square().sum(), leaves)
        for one, other in zip([out, *grads], exact, strict=True):
            assert torch.equal(one, other)


def test_bounds_changed_before_the_backward_are_refused() -> None:
    cu = bounds(0, 4, 9)
    for _ in range(2):
        leaves = [t.requires_grad_() for t in packed()]
        out = attend_packed(leaves, cu)
        cu[1] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("wrong", [(0, 6, 10), (1, 4, 9), (0, 10, 9)])
def test_wrong_bounds_are_said_on_a_warm_call_too(wrong: tuple[int, ...]) -> None:
    attend_packed(packed(), bounds(0, 4, 9))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        attend_packed(packed(), bounds(*wrong))


def test_how_long_sequences_may_be_tells_no_calls_apart() -> None:
    """It differs from batch to batch."""
    x, cu = packed(), bounds(0, 4, 9)
    want = attend_packed(x, cu, max_seqlen_q=5)
    for longest in ({}, {"max_seqlen_q": 9, "max_seqlen_k": 7}, {"max_seqlen_k": 5}):
        assert torch.equal(attend_packed(x, cu, **longest), want)
    assert len(warm._kept) == 1
    for wrong in (4, -1, True, 5.0):
        with pytest.raises(ValueError, match="max_seqlen_k"):
            attend_packed(x, cu, max_seqlen_k=wrong)


def test_nothing_of_a_packed_call_is_kept_alive() -> None:
    cu, x = bounds(0, 4, 9), [t.requires_grad_() for t in packed()]
    for _ in range(2):
        attend_packed(x, cu).sum().backward()
    assert len(warm._kept) == 1
    alive = [weakref.ref(t) for t in (*x, cu)]
    del x, cu
    gc.collect()
    assert all(ref() is None for ref in alive)


@pytest.mark.parametrize(
    ("cu", "options"),
    [
        (bounds(0, 4, 9, 9), {}),
        (bounds(0, 4, 9).long(), {}),
        (bounds(0, 4, 9), {"seqused_q": bounds(1, 2)}),
        (bounds(0, 0, 4, 4, 9, 9)[::2], {}),
    ],
    ids=["more", "int64", "used", "stride"],
)
def test_an_unlike_packed_call_is_another(cu: Tensor, options: dict[str, Any]) -> None:
    x = packed()
    attend_packed(x, bounds(0, 4, 9))
    got = attend_packed(x, cu, **options)
    assert len(warm._kept) == 2
    warm._kept.clear()
    assert torch.equal(got, attend_packed(x, cu, **options))


def test_pieces_that_start_at_numbers_are_warm_and_apart() -> None:
    x, outs = qkv(), []
    for start in (0, 2, 0, 2):
        outs.append(
            tw.attention_partial(*x, mask=tw.causal(), q_start=start, k_start=0, backend="triton")
        )
    assert len(warm._kept) == 2
    assert torch.equal(outs[0].out, outs[2].out) and torch.equal(outs[1].out, outs[3].out)
    assert not torch.equal(outs[0].out, outs[1].out)


def test_a_warm_call_saves_what_a_cold_one_does() -> None:
    """A checkpoint counts what is saved, and recomputes the first call by one that is warm."""
    x, cu = [t.requires_grad_() for t in packed()], bounds(0, 4, 9)

    def run(*leaves: Tensor) -> Tensor:
        return attend_packed(list(leaves), cu).float().sin() * 2

    kept = checkpoint(run, *x, use_reentrant=False)
    grads = torch.autograd.grad(kept.sum(), x)
    for one, other in zip(grads, torch.autograd.grad(run(*x).sum(), x), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("learns", [False, True])
def test_packed_results_may_be_changed_in_place(dtype: torch.dtype, learns: bool) -> None:
    x, cu = [t.to(dtype).requires_grad_(learns) for t in packed()], bounds(0, 4, 9)
    factor = torch.ones(9, 2, 16, dtype=dtype, device=DEVICE).requires_grad_()
    for _ in range(2):
        out, lse = tw.attention_varlen_partial(*x, cu_seqlens_q=cu, backend="triton")
        (grad,) = torch.autograd.grad(out.clone().mul_(factor).sum(), factor)
        out.mul_(factor)
        lse.add_(1)
        assert torch.equal(torch.autograd.grad(out.sum(), factor)[0], grad)


# ---------------------------------------------------------------- who sees the registered op


def test_a_trace_holds_the_op() -> None:
    x, cu = packed(), bounds(0, 4, 9)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(
                lambda *x: attend_packed(x[:3], x[3]), (*x, cu), check_trace=False
            )
        assert "tilewise::attention_fwd" in str(traced.graph)
        # Traced sizes serve no other call.
        assert not warm._kept
    assert torch.equal(traced(*x, cu), attend_packed(x, cu))


# torch's own, while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("is_packed", [False, True])
def test_compiled_autograd_takes_the_op(is_packed: bool) -> None:
    x, cu = [t.requires_grad_() for t in packed()], bounds(0, 4, 9)
    results = []
    for is_compiled in (False, True):
        out = attend_packed(x, cu) if is_packed else attend(*(t[None] for t in x))
        loss = out.float().square().sum()
        compiler = torch.compile(backend="eager")
        with compiled_autograd._enable(compiler) if is_compiled else nullcontext():
            loss.backward()
        results.append([t.grad for t in x])
        for t in x:
            t.grad = None
    assert len(warm._kept) == 1
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


# ---------------------------------------------------------------- what is told apart


def other_layout(x: list[Tensor]) -> list[Tensor]:
    return [t.transpose(1, 2).contiguous().transpose(1, 2) for t in x]


def unaligned(x: list[Tensor]) -> list[Tensor]:
    q = torch.empty(x[0].numel() + 1, dtype=x[0].dtype)[1:].view_as(x[0])
    return [q.copy_(x[0]), *x[1:]]


UNLIKE: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], dict[str, Any]]] = {
    "dtype": (lambda x: [t.float() for t in x], {}),
    "layout": (other_layout, {}),
    "alignment": (unaligned, {}),
    "length": (lambda x: [t[:, :4] for t in x], {}),
    "mask": (lambda x: x, {"mask": tw.window(2, 0)}),
    "scale": (lambda x: x, {"scale": 0.5}),
    "softcap": (lambda x: x, {"softcap": 20.0}),
}


@pytest.mark.parametrize(("change", "options"), UNLIKE.values(), ids=UNLIKE.keys())
def test_an_unlike_call_is_another(
    change: Callable[[list[Tensor]], list[Tensor]], options: dict[str, Any]
) -> None:
    x = qkv()
    attend(*x)
    got = attend(*change(x), **options)
    assert len(warm._kept) == 2
    warm._kept.clear()
    assert torch.equal(got, attend(*change(x), **options))


def test_autocast_is_asked_every_time() -> None:
    x = qkv(torch.float32)
    device = DEVICE.type
    with torch.autocast(device, torch.bfloat16):
        inside = attend(*x)
        assert attend(*x).dtype == inside.dtype == torch.bfloat16
    assert attend(*x).dtype == torch.float32
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(attend(*x), inside)
    assert len(warm._kept) == 2
    leaves = [t.requires_grad_() for t in x]
    gradients = []
    for _ in range(2):
        with torch.autocast(device, torch.bfloat16):
            out = attend(*leaves)
        gradients.append(torch.autograd.grad(out.float().sum(), leaves))
    assert len(warm._kept) == 3
    for one, other in zip(*gradients, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other)


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"mask": tw.key_padding([3])}])
def test_calls_with_tensors_or_chance_are_never_kept(options: dict[str, Any]) -> None:
    attend(*qkv(), **options)
    assert not warm._kept


@pytest.mark.parametrize("options", [{"scale": [1.0]}, {"softcap": "30"}, {"dropout_p": None}])
def test_what_is_no_number_gets_a_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be a number"):
        attend(*qkv(), **options)


def test_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_MOST_KEPT", 2)
    calls = [qkv(M=m) for m in (2, 3, 4)]
    keys = []
    for x in calls:
        attend(*x)
        keys.append(list(warm._kept)[-1])
    assert list(warm._kept) == keys[1:]


def test_a_call_that_failed_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("tilewise.dense.triton_forward.Forward.run", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            attend(*qkv())
    assert not warm._kept


def test_meta_tensors_have_shapes_and_no_kernel() -> None:
    x = [t.to("meta") for t in qkv()]
    for _ in range(2):
        out = attend(*x)
        assert out.device.type == "meta" and out.shape == x[0].shape
    assert UNDER_TEST.backend == "triton" and not warm._kept
