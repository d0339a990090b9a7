"""Warm calls: what is kept serves like calls bit for bit, no others, and holds no tensor."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

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
