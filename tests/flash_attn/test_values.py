"""Values and every gradient of the six functions, against the definition in fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.flash_attn.checks import (
    DTYPES,
    FUNCTIONS,
    check,
    make_call,
    run_with_lse,
    with_gradients,
)
from tests.flash_attn.formula import LEARNED, SEED, Call, split

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 2)},
    "window left": {"window_size": (4, -1)},
    "window right": {"window_size": (-1, 0)},
    "causal window": {"causal": True, "window_size": (5, 3)},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": 0.7},
    "dropout": {"dropout_p": 0.3},
}
LEARNED_OPTIONS: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_slopes": "H"},
    "alibi causal": {"alibi_slopes": "B H", "causal": True},
    "sinks": {"sinks": "H", "causal": True},
    "all": {
        "dropout_p": 0.2,
        "softmax_scale": 0.5,
        "causal": True,
        "window_size": (6, -1),
        "softcap": 2.0,
        "alibi_slopes": "B H",
        "deterministic": True,
        "sinks": "H",
    },
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_within_budget(function: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check(make_call(function, options, dtype))


@pytest.mark.parametrize("options", LEARNED_OPTIONS.values(), ids=LEARNED_OPTIONS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_learned_terms_within_budget(function: str, options: dict[str, Any]) -> None:
    check(make_call(function, options, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_all_terms_are_those_of_the_library(function: str, dtype: torch.dtype) -> None:
    """Bitwise, gradients of slopes and sinks included, which have too few entries in 16 bit for
    the budget's statistics.
    """
    call = make_call(function, LEARNED_OPTIONS["all"], dtype)
    got = with_gradients(run_with_lse, call, call.tensors)
    expected = with_gradients(run_library, call, call.tensors)
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


def run_library(call: Call, tensors: dict[str, Tensor]) -> tilewise.Partial:
    q, k, v = split(call, tensors)
    lengths = dict(call.lengths)
    if "cu_seqlens" in lengths:
        lengths = {"cu_seqlens_q": lengths["cu_seqlens"], "max_seqlen_q": lengths["max_seqlen"]}
    function = tilewise.attention_varlen_partial if call.is_varlen else tilewise.attention_partial
    torch.manual_seed(SEED)
    return function(
        q,
        k,
        v,
        mask=tilewise.window(6, 0),
        scale=0.5,
        softcap=2.0,
        dropout_p=0.2,
        deterministic=True,
        **{name: tensors[name] for name in LEARNED},
        **lengths,
    )


@pytest.mark.parametrize("shape", [(1, 1), (1, 19), (17, 5), (64, 65), (65, 63)])
@pytest.mark.parametrize("causal", [False, True])
def test_lengths(shape: tuple[int, int], causal: bool) -> None:
    """More queries than keys leave empty rows; tiles end in the middle."""
    check(make_call("flash_attn_func", {"causal": causal}, torch.bfloat16, shape=shape))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3), (5, 5)])
def test_head_ratios(heads: tuple[int, int]) -> None:
    check(make_call("flash_attn_varlen_func", {"causal": True}, torch.float16, heads=heads))
