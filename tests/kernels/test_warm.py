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


# ---------------------------------------------------------------- masks that hold tensors


MASKS: dict[str, tuple[Callable[..., tw.Mask], list[Tensor]]] = {
    "documents": (tw.documents, [bounds(0, 3, 7), bounds(0, 6, 7)]),
    "causal documents": (
        lambda cu: tw.causal() & tw.documents(cu),
        [bounds(0, 3, 7), bounds(0, 0, 5)],
    ),
    "documents a row": (
        lambda cu: tw.documents(cu.view(1, 3)) & tw.window(2, 0),
        [bounds(0, 3, 7), bounds(0, 6, 7)],
    ),
    "padding": (tw.key_padding, [bounds(5), bounds(0)]),
    "left padding": (lambda x: tw.left_padding(x) & tw.causal(), [bounds(2), bounds(6)]),
    "offsets": (lambda x: tw.causal(offset=x), [bounds(2), bounds(-3)]),
    "int64": (tw.key_padding, [bounds(5).long(), bounds(2).long()]),
    "apart": (tw.documents, [bounds(0, 9, 3, 9, 7, 9)[::2], bounds(0, 9, 6, 9, 7, 9)[::2]]),
}


@pytest.mark.parametrize(
    ("make", "contents", "learns"),
    [(*case, learns) for learns in (False, True) for case in list(MASKS.values())[learns::2]],
    ids=[f"{name}{learns}" for learns in (0, 1) for name in list(MASKS)[learns::2]],
)
def test_a_warm_call_reads_what_its_mask_holds(
    make: Callable[..., tw.Mask],
    contents: list[Tensor],
    learns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = [t.to(DEVICE) for t in qkv(M=7)]

    def run(content: Tensor) -> list[Tensor]:
        if not learns:
            return [attend(*x, mask=make(content))]
        return with_gradients(lambda leaves: attend(*leaves, mask=make(content)), x)

    want = []
    for content in contents:
        warm._kept.clear()
        want.append(run(content))
    assert len(warm._kept) == 1

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a warm call was checked again")

    # The first warm call writes its launches down, and others make them again.
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.dense.api.check_call", refuse)
        for turn in (1, 0):
            for got, exact in zip(run(contents[turn]), want[turn], strict=True):
                assert torch.equal(got, exact)
    assert len(warm._kept) == 1


def test_a_mask_changed_before_the_backward_is_refused() -> None:
    cu = bounds(0, 3, 7)
    for _ in range(3):
        leaves = [t.to(DEVICE).requires_grad_() for t in qkv(M=7)]
        out = attend(*leaves, mask=tw.documents(cu))
        cu[1] += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_wrong_documents_are_said_on_a_warm_call_too() -> None:
    x = [t.to(DEVICE) for t in qkv(M=7)]
    for _ in range(3):
        attend(*x, mask=tw.documents(bounds(0, 3, 7)))
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match="documents: cu_seqlens"):
            attend(*x, mask=tw.documents(bounds(0, 9, 7)))


def test_nothing_of_a_mask_is_kept_alive() -> None:
    x, cu = [t.to(DEVICE).requires_grad_() for t in qkv(M=7)], bounds(0, 3, 7)
    for _ in range(3):
        attend(*x, mask=tw.causal() & tw.documents(cu)).sum().backward()
    assert len(warm._kept) == 1
    alive = [weakref.ref(t) for t in (*x, cu)]
    del x, cu
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_a_checkpoint_recomputes_a_call_whose_mask_holds_tensors() -> None:
    x, cu = [t.to(DEVICE).requires_grad_() for t in qkv(M=7)], bounds(0, 3, 7)

    def run(*leaves: Tensor) -> Tensor:
        return attend(*leaves, mask=tw.documents(cu)).float().sin() * 2

    want = torch.autograd.grad(run(*x).sum(), x)
    for is_cold in (True, False):
        if is_cold:
            warm._kept.clear()
        kept = checkpoint(run, *x, use_reentrant=False)
        for one, other in zip(torch.autograd.grad(kept.sum(), x), want, strict=True):
            assert torch.equal(one, other)


# ---------------------------------------------------------------- gradients


def test_the_third_backward_finds_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    x = [t.to(DEVICE) for t in qkv()]
    want = with_gradients(lambda t: attend(*t), x)
    with_gradients(lambda t: attend(*t), x)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a backward was prepared again")

    monkeypatch.setattr("tilewise.dense.warm.gradients_on_gpu", refuse)
    monkeypatch.setattr("tilewise.dense.triton_call.TritonCall.on", refuse)
    for got, exact in zip(with_gradients(lambda t: attend(*t), x), want, strict=True):
        assert torch.equal(got, exact)


def grouped() -> list[Tensor]:
    """Few programs: the heads of a group are taken in shares."""
    return [torch.randn(2, 5, heads, 16, device=DEVICE).half() for heads in (4, 1, 1)]


def columns(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


UPSTREAM: dict[str, Callable[[Tensor], Tensor]] = {
    "as out": lambda out: torch.ones_like(out).cumsum(1),
    "expanded": lambda out: torch.ones((), device=DEVICE).to(out.dtype).expand(out.shape),
    "heads before rows": lambda out: columns(torch.ones_like(out).cumsum(2)),
    "unaligned": lambda out: (
        torch.ones(out.numel() + 1, device=DEVICE).to(out.dtype).cumsum(0)[1:].view_as(out)
    ),
}


@pytest.mark.parametrize("make", [qkv, grouped])
def test_a_backward_takes_any_upstream(make: Callable[[], list[Tensor]]) -> None:
    x = [t.to(DEVICE).requires_grad_() for t in make()]
    want: dict[str, Any] = {}
    for is_cold in (True, False):
        for name, upstream in UPSTREAM.items():
            for with_lse in (False, True):
                if is_cold:
                    warm._kept.clear()
                out, lse = tw.attention_partial(*x, mask=tw.causal(), backend="triton")
                outputs, above = [out], [upstream(out)]
                if with_lse:
                    outputs.append(lse)
                    above.append(columns(lse[..., None])[..., 0] + 1)
                grads = torch.autograd.grad(outputs, x, above)
                exact = want.setdefault((name, with_lse), grads)
                for one, other in zip(grads, exact, strict=True):
                    assert torch.equal(one, other)
    # Of the lse alone.
    alone = []
    for is_cold in (True, False, False):
        if is_cold:
            warm._kept.clear()
        lse = tw.attention_partial(*x, mask=tw.causal(), backend="triton").lse
        alone.append(torch.autograd.grad(lse.sum(), x[:2]))
    for grads in alone[1:]:
        assert torch.equal(grads[0], alone[0][0]) and torch.equal(grads[1], alone[0][1])


@pytest.mark.parametrize("D", [20, 48])
def test_rows_that_have_to_be_copied_are_copied_by_every_call(D: int) -> None:
    x, y = qkv(D=D), [t.transpose(1, 2) for t in qkv(M=2, D=D)]
    for tensors in (x, y):
        leaves = [t.to(DEVICE) for t in tensors]
        runs = [with_gradients(lambda t: attend(*t), leaves) for _ in range(4)]
        outs = [attend(*leaves) for _ in range(4)]
        for other in runs[1:]:
            for one, exact in zip(other, runs[0], strict=True):
                assert torch.equal(one, exact)
        assert all(torch.equal(out, runs[0][0]) for out in outs)


def test_a_graph_that_is_retained_serves_twice() -> None:
    x = [t.to(DEVICE).requires_grad_() for t in qkv()]
    for _ in range(3):
        out = attend(*x)
        first = torch.autograd.grad(out.sum(), x, retain_graph=True)
        again = torch.autograd.grad(out.sum(), x)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2)])
def test_some_inputs_learn(which: tuple[int, ...]) -> None:
    x = [t.to(DEVICE).requires_grad_() for t in qkv()]
    want = torch.autograd.grad(attend(*x).sum(), x)
    for _ in range(3):
        some = [t if i in which else t.detach() for i, t in enumerate(x)]
        grads = torch.autograd.grad(attend(*some).sum(), [x[i] for i in which])
        for i, grad in zip(which, grads, strict=True):
            assert torch.equal(grad, want[i])


def test_tensors_that_are_one_need_not_be_one_next_time() -> None:
    x, y, z = (t.to(DEVICE).requires_grad_() for t in qkv())
    cu, other = bounds(0, 2, 5), bounds(0, 4, 5)
    calls = [
        lambda q, k, v: attend(q, k, v),
        lambda q, k, v: tw.attention_varlen(
            q[0],
            k[0],
            v[0],
            cu_seqlens_q=cu,
            cu_seqlens_k=cu if q is k else other,
            backend="triton",
        ),
    ]
    for call in calls:
        want = [call(x, y, z), *torch.autograd.grad(call(x, y, z).float().sum(), (x, y, z))]
        warm._kept.clear()
        for _ in range(3):
            torch.autograd.grad(call(x, x, x).sum(), x)
        for _ in range(2):
            got = [call(x, y, z), *torch.autograd.grad(call(x, y, z).float().sum(), (x, y, z))]
            for one, exact in zip(got, want, strict=True):
                assert torch.equal(one, exact)


def test_second_derivatives_are_refused() -> None:
    x = [t.to(DEVICE).requires_grad_() for t in qkv()]
    for _ in range(3):
        (grad,) = torch.autograd.grad(attend(*x).sum(), x[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivatives"):
            grad.sum().backward()


def test_saved_tensors_may_come_back_laid_out_anew() -> None:
    x = [t.to(DEVICE).requires_grad_() for t in qkv()]
    want = torch.autograd.grad(attend(*x).sum(), x)

    def unpack(t: Tensor) -> Tensor:
        return columns(t) if t.dim() == 4 else t.clone()

    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = attend(*x)
        for one, other in zip(torch.autograd.grad(out.sum(), x), want, strict=True):
            assert torch.equal(one, other)


def test_inputs_changed_before_the_backward_are_refused() -> None:
    for _ in range(3):
        x = [t.to(DEVICE).requires_grad_() for t in qkv()]
        out = attend(*x)
        with torch.no_grad():
            x[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    out = attend(*x)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_transforms_find_the_op_where_calls_are_warm() -> None:
    x = [t.to(DEVICE) for t in qkv(torch.float32)]

    def loss(q: Tensor) -> Tensor:
        return attend(q, *x[1:]).square().sum()

    leaf = x[0].clone().requires_grad_()
    for _ in range(3):
        (want,) = torch.autograd.grad(loss(leaf), leaf)
        assert torch.equal(torch.func.grad(loss)(x[0]), want)


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


OFFSETS = bounds(1)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.5},
        {"sinks": torch.zeros(2, device=DEVICE)},
        {"alibi_slopes": torch.zeros(2, device=DEVICE)},
        # What two of a mask's tensors have in common is found in each call.
        {"mask": tw.key_padding(bounds(3)) & tw.left_padding(bounds(1))},
        {"mask": tw.causal(offset=OFFSETS) & tw.window(2, None, offset=OFFSETS)},
        {"mask": tw.from_function(lambda b, h, m, n: n <= m)},
        {"mask": tw.chunked(3)},
    ],
)
def test_calls_with_chance_and_more_tensors_are_never_kept(options: dict[str, Any]) -> None:
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
