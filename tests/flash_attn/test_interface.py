"""Names, signatures, what the flags return, and what wrong arguments say."""

import inspect
from typing import Any

import pytest
import torch

import tilewise.flash_attn as flash_attn
import tilewise.flash_attn.call as call_of_attention
import tilewise.flash_attn.flash_attn_interface as interface
from tests.flash_attn.checks import FUNCTIONS, make_call, run

# Of flash-attn 2.8.3: required arguments, and the others with their defaults, in order.
SHARED = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "flash_attn_func": (["q", "k", "v"], SHARED),
    "flash_attn_kvpacked_func": (["q", "kv"], SHARED),
    "flash_attn_qkvpacked_func": (["qkv"], SHARED),
    "flash_attn_varlen_func": (["q", "k", "v", *LENGTHS], {**SHARED, "block_table": None}),
    "flash_attn_varlen_kvpacked_func": (["q", "kv", *LENGTHS], SHARED),
    "flash_attn_varlen_qkvpacked_func": (["qkv", "cu_seqlens", "max_seqlen"], SHARED),
    "flash_attn_with_kvcache": (
        ["q", "k_cache", "v_cache"],
        {
            "k": None,
            "v": None,
            "rotary_cos": None,
            "rotary_sin": None,
            "cache_seqlens": None,
            "cache_batch_idx": None,
            "cache_leftpad": None,
            "block_table": None,
            "softmax_scale": None,
            "causal": False,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "rotary_interleaved": True,
            "alibi_slopes": None,
            "num_splits": 0,
            "return_softmax_lse": False,
        },
    ),
}
ADDED = {"sinks": None, "return_lse": False}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature_is_the_documented_one(name: str) -> None:
    parameters = inspect.signature(getattr(flash_attn, name)).parameters.values()
    required, defaults = SIGNATURES[name]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [*required, *defaults]
    assert [p.default for p in positional[: len(required)]] == [inspect.Parameter.empty] * len(
        required
    )
    assert [p.default for p in positional[len(required) :]] == list(defaults.values())
    rest = {p.name: p.default for p in parameters if p not in positional}
    assert rest == (ADDED if name in FUNCTIONS else {})
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p not in positional)


def test_package_and_module_offer_the_same() -> None:
    assert sorted(flash_attn.__all__) == sorted([*SIGNATURES, "install", "uninstall"])
    for name in SIGNATURES:
        assert getattr(interface, name) is getattr(flash_attn, name)
    assert flash_attn.__version__ == "2.8.3"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_flags_choose_what_is_returned(function: str) -> None:
    call = make_call(function, {"causal": True}, torch.bfloat16)
    out = run(call, call.tensors)
    with_lse = run(call, call.tensors, return_lse=True)
    with_probs = run(call, call.tensors, return_attn_probs=True)
    assert [len(with_lse), len(with_probs)] == [2, 3]
    lse = with_lse[1]
    assert lse.dtype == torch.float32
    assert lse.shape == (*out.shape[:-3], out.shape[-2], out.shape[-3])
    assert torch.equal(with_probs[1], lse)
    assert with_probs[2] is None
    assert torch.equal(with_lse[0], out)
    assert torch.equal(with_probs[0], out)


def test_positional_arguments_are_read_in_flash_attns_order() -> None:
    call = make_call("flash_attn_func", {}, torch.float32)
    q, k, v = call.tensors.values()
    slopes = torch.rand(q.shape[2])
    by_name = flash_attn.flash_attn_func(
        q, k, v, softmax_scale=0.3, causal=True, window_size=(4, 0), softcap=2.0,
        alibi_slopes=slopes, deterministic=True,
    )  # fmt: skip
    by_place = flash_attn.flash_attn_func(q, k, v, 0.0, 0.3, True, (4, 0), 2.0, slopes, True)
    assert torch.equal(by_place, by_name)
    assert not torch.equal(by_place, flash_attn.flash_attn_func(q, k, v))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_reaches_the_library(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No CPU backend computes otherwise without it, so only the call can show it."""
    asked = []
    monkeypatch.setattr(call_of_attention, "attention", lambda *_, **options: asked.append(options))
    call = make_call("flash_attn_func", {}, torch.float32)
    run(call, call.tensors, deterministic=deterministic)
    assert [options["deterministic"] for options in asked] == [deterministic]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_size": 3}, "window_size must be .left, right., got 3"),
        ({"window_size": (1, 2, 3)}, "window_size must be .left, right."),
        ({"window_size": (-2, 0)}, "window_size must hold ints >= 0, or -1"),
        ({"window_size": (0, 1.5)}, "window_size must hold ints >= 0, or -1"),
        ({"softmax_scale": float("nan")}, "softmax_scale must be finite, got nan"),
        ({"softmax_scale": "0.1"}, "softmax_scale must be a number or None, got '0.1'"),
        ({"softmax_scale": torch.ones(2)}, "softmax_scale must be .* got a tensor .2."),
        ({"softcap": [3.0]}, "softcap must be a number or None, got .3.0."),
        ({"softcap": float("nan")}, "softcap must be None or lie"),
        ({"dropout_p": 1.0}, "dropout_p must lie in"),
        ({"dropout_p": -0.1}, "dropout_p must lie in"),
        ({"alibi_slopes": torch.ones(5)}, "alibi_slopes must be floating .H. = .6., got"),
        ({"sinks": torch.ones(5)}, "sinks must be floating .H. = .6., got"),
        ({"return_attn_probs": True, "return_lse": True}, "choose one"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_option_raises_a_sentence(
    function: str, options: dict[str, Any], message: str
) -> None:
    call = make_call(function, {}, torch.float32)
    with pytest.raises(ValueError, match=message) as raised:
        run(call, call.tensors, **options)
    assert str(raised.value).endswith(".")


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("flash_attn_func", {"k": None}, "flash_attn_func: k must be a tensor, got NoneType"),
        ("flash_attn_func", {"v": (2, 17, 2)}, r"v must be \[B, N, G, E\], got 3 dimensions"),
        ("flash_attn_func", {"k": (2, 16, 2, 8)}, "v must be .* with N = 16"),
        ("flash_attn_func", {"k": (2, 17, 4, 8), "v": (2, 17, 4, 8)}, "H = 6 and G = 4"),
        ("flash_attn_qkvpacked_func", {"qkv": (2, 13, 2, 6, 8)}, r"qkv must be \[B, M, 3, H, D\]"),
        ("flash_attn_kvpacked_func", {"kv": (3, 17, 2, 2, 8)}, "kv must be .* with B = 2"),
        ("flash_attn_kvpacked_func", {"kv": (2, 17, 2, 2, 7)}, "kv must be .* with D = 8"),
        ("flash_attn_varlen_func", {"cu_seqlens_k": None}, "cu_seqlens_k must be a tensor, got N"),
        ("flash_attn_varlen_func", {"cu_seqlens_k": [0, 1]}, "cu_seqlens_k must be a tensor, got"),
        ("flash_attn_varlen_func", {"cu_seqlens_q": (3,)}, "cu_seqlens_k must be .* = 3"),
        ("flash_attn_varlen_kvpacked_func", {"kv": (15, 3, 2, 8)}, r"kv must be \[S, 2, G, D\]"),
        ("flash_attn_varlen_qkvpacked_func", {"cu_seqlens": None}, "cu_seqlens must be a tensor"),
        ("flash_attn_varlen_qkvpacked_func", {"qkv": (14, 3, 6, 8, 1)}, "qkv must be"),
    ],
)
def test_wrong_tensor_is_named_as_flash_attn_names_it(
    function: str, change: dict[str, Any], message: str
) -> None:
    call = make_call(function, {}, torch.float32)
    changed = {
        name: torch.zeros(value) if isinstance(value, tuple) else value
        for name, value in change.items()
    }
    arguments = {**call.tensors, **call.lengths, **changed}
    with pytest.raises(ValueError, match=message) as raised:
        getattr(flash_attn, function)(**arguments)
    assert str(raised.value).endswith(".")


def test_mixed_dtypes_are_refused() -> None:
    call = make_call("flash_attn_func", {}, torch.float32)
    tensors = {**call.tensors, "k": call.tensors["k"].half()}
    with pytest.raises(ValueError, match="must share one dtype"):
        run(call, tensors)
