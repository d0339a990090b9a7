"""Calls that mean the same give the same; bitwise where the same code computes them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise.flash_attn as flash_attn
from tests.flash_attn.checks import FUNCTIONS, check, make_call, pack, run_with_lse, with_gradients
from tests.flash_attn.formula import Call, formula, split
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

VARLEN = [name for name in FUNCTIONS if "varlen" in name]
OPTIONS: dict[str, Any] = {"causal": True, "window_size": (5, -1), "softcap": 3.0}


def with_separate_tensors(call: Call) -> Call:
    """The same call of the function that takes q, k and v each by itself."""
    name = "flash_attn_varlen_func" if call.is_varlen else "flash_attn_func"
    q, k, v = split(call, call.tensors)
    lengths = call.lengths
    if "cu_seqlens" in lengths:
        starts, longest = lengths["cu_seqlens"], lengths["max_seqlen"]
        lengths = {f"cu_seqlens_{side}": starts for side in "qk"}
        lengths |= {f"max_seqlen_{side}": longest for side in "qk"}
    return Call(name, {"q": q, "k": k, "v": v}, lengths, call.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [name for name in FUNCTIONS if "packed" in name])
def test_packed_tensors_equal_separate_ones(function: str, dtype: torch.dtype) -> None:
    call = make_call(function, {**OPTIONS, "dropout_p": 0.3}, dtype)
    got = with_gradients(run_with_lse, call, call.tensors)
    apart = with_separate_tensors(call)
    expected = with_gradients(run_with_lse, apart, apart.tensors)
    dim = 1 if call.is_varlen else 2
    if "qkv" in call.tensors:
        expected["dqkv"] = torch.stack([expected.pop(f"d{name}") for name in "qkv"], dim)
    else:
        expected["dkv"] = torch.stack([expected.pop(f"d{name}") for name in "kv"], dim)
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("function", FUNCTIONS)
def test_deterministic_runs_are_bitwise_equal(function: str) -> None:
    options = {**OPTIONS, "deterministic": True, "alibi_slopes": "B H", "sinks": "H"}
    call = make_call(function, options, torch.bfloat16)
    first = with_gradients(run_with_lse, call, call.tensors)
    for _ in range(3):
        again = with_gradients(run_with_lse, call, call.tensors)
        assert all(torch.equal(again[name], first[name]) for name in first)


def transposed(x: Tensor) -> Tensor:
    """The last dim is not contiguous."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def sliced(x: Tensor) -> Tensor:
    """Every second row and element of a larger tensor, whose other entries are NaN."""
    wide = torch.full((*x.shape[:-3], 2 * x.shape[-3], x.shape[-2], 2 * x.shape[-1]), torch.nan)
    view = wide.to(x.dtype)[..., ::2, :, ::2]
    return view.copy_(x)


def heads_first(x: Tensor) -> Tensor:
    """As a model has them that computes [B, H, M, D]."""
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


@pytest.mark.parametrize("layout", [transposed, sliced, heads_first])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_strides_do_not_matter(function: str, layout: Callable[[Tensor], Tensor]) -> None:
    call = make_call(function, OPTIONS, torch.bfloat16)
    call.tensors = {name: layout(x) for name, x in call.tensors.items()}
    assert not any(x.is_contiguous() for x in call.tensors.values())
    check(call)


def test_stride_zero_and_one_tensor_for_two() -> None:
    """One key/value head and one batch row, expanded; v is k."""
    call = make_call("flash_attn_func", OPTIONS, torch.float32, heads=(4, 4))
    k = call.tensors["k"][:1, :, :1].expand(2, -1, 4, -1)
    q = call.tensors["q"]
    copied = k.contiguous()
    assert torch.equal(
        flash_attn.flash_attn_func(q, k, k, **OPTIONS),
        flash_attn.flash_attn_func(q, copied, copied.clone(), **OPTIONS),
    )


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_varlen_of_equal_lengths_is_the_padded_batch(dropout_p: float) -> None:
    options = {**OPTIONS, "dropout_p": dropout_p}
    padded = make_call("flash_attn_func", options, torch.float32, shape=(7, 11))
    packed = Call(
        "flash_attn_varlen_func",
        {name: x.flatten(0, 1) for name, x in padded.tensors.items()},
        pack("flash_attn_varlen_func", ((7, 7), (11, 11))),
        options,
    )
    out, _ = run_with_lse(packed, packed.tensors)
    wide = {name: x.double() for name, x in padded.tensors.items()}
    exact, eager = (formula(padded, x)[0].flatten(0, 1) for x in (wide, padded.tensors))
    assert_within_budget(out, exact, eager)


@pytest.mark.parametrize(
    "lengths", [((0, 0), (0, 0)), ((0, 4), (3, 0)), ((1,), (1,)), ((3, 0, 0, 2), (0, 0, 5, 2))]
)
@pytest.mark.parametrize("function", VARLEN)
def test_empty_sequences(function: str, lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(make_call(function, {"causal": True}, torch.bfloat16, lengths=lengths))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty_padded_batches(shape: tuple[int, int]) -> None:
    check(make_call("flash_attn_func", {}, torch.float32, shape=shape))


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("window_size", [(-1, 0), [-1, 0], (None, 0)], ids=str)
def test_unbounded_to_the_left_is_causal(window_size: Any) -> None:
    call = make_call("flash_attn_qkvpacked_func", {}, torch.bfloat16)
    causal = flash_attn.flash_attn_qkvpacked_func(**call.tensors, causal=True)
    got = flash_attn.flash_attn_qkvpacked_func(**call.tensors, window_size=window_size)
    assert torch.equal(got, causal)


@pytest.mark.parametrize("left", [12, 13, 10**6])
def test_window_over_all_keys_is_causal(left: int) -> None:
    """Within the budget alone: on the CPU a causal call may go to torch's own kernel."""
    call = make_call("flash_attn_qkvpacked_func", {"window_size": (left, 0)}, torch.bfloat16)
    out, lse = run_with_lse(call, call.tensors)
    call.options = {"causal": True}
    wide = {name: x.double() for name, x in call.tensors.items()}
    (exact, exact_lse), (eager, _) = (formula(call, x) for x in (wide, call.tensors))
    assert_within_budget(out, exact, eager)
    assert_lse_within_budget(lse, exact_lse, torch.bfloat16)


@pytest.mark.parametrize("window_size", [(3, 0), (3, 2), (3, -1), (3, None)], ids=str)
def test_causal_sets_the_right_bound_to_zero(window_size: Any) -> None:
    call = make_call("flash_attn_func", {}, torch.bfloat16)
    both = flash_attn.flash_attn_func(**call.tensors, causal=True, window_size=window_size)
    assert torch.equal(both, flash_attn.flash_attn_func(**call.tensors, window_size=(3, 0)))
    assert not torch.equal(both, flash_attn.flash_attn_func(**call.tensors, causal=True))


def test_window_of_one_key_returns_its_value() -> None:
    call = make_call("flash_attn_func", {}, torch.bfloat16, shape=(9, 9), heads=(3, 3))
    got = flash_attn.flash_attn_func(**call.tensors, window_size=(0, 0))
    assert torch.equal(got, call.tensors["v"])


@pytest.mark.parametrize("window_size", [(-1, -1), (None, None), None, (-1, None)], ids=str)
def test_no_window(window_size: Any) -> None:
    call = make_call("flash_attn_func", {}, torch.bfloat16)
    got = flash_attn.flash_attn_func(**call.tensors, window_size=window_size)
    assert torch.equal(got, flash_attn.flash_attn_func(**call.tensors))


@pytest.mark.parametrize("softcap", [0.0, 0, None, -1.0])
def test_no_softcap(softcap: Any) -> None:
    call = make_call("flash_attn_func", {}, torch.bfloat16)
    got = flash_attn.flash_attn_func(**call.tensors, softcap=softcap)
    assert torch.equal(got, flash_attn.flash_attn_func(**call.tensors))
