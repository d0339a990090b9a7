"""Which backend runs, and the reasons that are given for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core.backends import BackendChoice, check_backend_name, describe_device

from .brute import assert_one_sentence

QKV = (torch.zeros(1, 3, 2, 4), torch.zeros(1, 5, 1, 4), torch.zeros(1, 5, 1, 4))


def test_choice_prints_every_reason() -> None:
    choice = BackendChoice("tiled", "it is here", {"fast": "no GPU", "exact": "too slow"})
    assert str(choice).splitlines() == [
        "tiled: it is here",
        "not fast: no GPU",
        "not exact: too slow",
    ]
    assert str(BackendChoice("tiled", "it is here")) == "tiled: it is here"


def test_backend_names() -> None:
    check_backend_name("op", "auto", ("one",))
    check_backend_name("op", "two", ("one", "two"))
    for name in ("three", "", "Auto"):
        with pytest.raises(ValueError) as caught:
            check_backend_name("op", name, ("one", "two"))
        assert_one_sentence(caught, "op: backend must be one of auto, one, two")
        assert repr(name) in str(caught.value)


def test_device_in_words() -> None:
    assert describe_device(torch.device("cpu")) == "cpu"
    assert describe_device(torch.device("meta")) == "meta"


@pytest.mark.gpu
def test_gpu_in_words() -> None:
    assert torch.cuda.get_device_name(0) in describe_device(torch.device("cuda", 0))


def test_auto_says_what_and_why_and_why_not() -> None:
    choice = tw.explain_backend(*QKV)
    assert isinstance(choice, BackendChoice)
    assert choice.name == "tiled"
    assert "cpu" in choice.reason
    assert "oracle" in choice.rejected["reference"]
    assert choice.name not in choice.rejected


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_named_backend_is_the_callers(backend: str) -> None:
    choice = tw.explain_backend(*QKV, backend=backend)
    assert choice.name == backend
    assert "named by the caller" in choice.reason


@pytest.mark.parametrize("call", [tw.attention, tw.attention_partial, tw.explain_backend])
def test_unknown_backend(call: Any) -> None:
    with pytest.raises(ValueError) as caught:
        call(*QKV, backend="fast")
    assert_one_sentence(caught, "attention")
    for known in ("auto", "tiled", "reference", "'fast'"):
        assert known in str(caught.value)


def test_explained_options_are_those_of_a_call() -> None:
    options = {
        "mask": tw.causal(),
        "scale": 0.5,
        "softcap": 3.0,
        "alibi_slopes": torch.ones(2),
        "bias": torch.zeros(3, 5),
        "sinks": torch.zeros(2),
        "dropout_p": 0.1,
        "deterministic": True,
    }
    tw.attention(*QKV, **options)
    assert tw.explain_backend(*QKV, **options).name == "tiled"


@pytest.mark.parametrize(
    "options",
    [
        {"scale": float("nan")},
        {"softcap": -1.0},
        {"dropout_p": 1.0},
        {"sinks": torch.zeros(3)},
        {"bias": torch.zeros(4, 4)},
        {"mask": "causal"},
    ],
)
def test_what_a_call_refuses_is_refused_when_explained(options: dict[str, Any]) -> None:
    raised = []
    for call in (tw.attention, tw.explain_backend):
        with pytest.raises(ValueError) as caught:
            call(*QKV, **options)
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("options", [{"scael": 0.5}, {"causal": True}])
def test_an_option_that_no_call_knows(options: dict[str, Any]) -> None:
    for call in (tw.attention, tw.explain_backend):
        with pytest.raises(TypeError):
            call(*QKV, **options)


def test_packed_calls_are_explained() -> None:
    q, k, v = (x[0] for x in QKV)
    lengths: dict[str, Tensor] = {
        "cu_seqlens_q": torch.tensor([0, 1, 3]),
        "cu_seqlens_k": torch.tensor([0, 5, 5]),
    }
    assert tw.explain_backend(q, k, v, **lengths).name == "tiled"
    with pytest.raises(ValueError):
        tw.explain_backend(q, k, v, **{**lengths, "cu_seqlens_k": torch.tensor([0, 5])})
