"""Bad input gets one sentence that names the op, the argument, what came and what was expected."""

from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core import backends
from tilewise.core.tolerance import assert_within_budget


def call(**changes: Any) -> torch.Tensor:
    """A right call with some arguments changed."""
    arguments: dict[str, Any] = {
        "q": torch.randn(2, 5, 4, 8),
        "k": torch.randn(2, 7, 2, 8),
        "v": torch.randn(2, 7, 2, 6),
        **changes,
    }
    q, k, v = (arguments.pop(name) for name in "qkv")
    return tw.attention(q, k, v, **arguments)


def test_nested_tensors_are_sent_to_packed_ones() -> None:
    rows = [torch.randn(3, 4, 8), torch.randn(5, 4, 8)]
    q = torch.nested.nested_tensor(rows, layout=torch.jagged)
    with pytest.raises(NotImplementedError, match=r"q must be a plain tensor.* attention_varlen"):
        tw.attention(q, q, q)
    values, cu = q.values(), q.offsets()
    out = tw.attention_varlen(values, values, values, cu_seqlens_q=cu, cu_seqlens_k=cu)
    row = rows[1][None]
    exact = tw.attention(*(row.double() for _ in "qkv"))
    assert_within_budget(out[3:], exact[0], tw.attention(row, row, row)[0])


def varlen(**changes: Any) -> torch.Tensor:
    arguments: dict[str, Any] = {
        "q": torch.randn(12, 4, 8),
        "k": torch.randn(15, 2, 8),
        "v": torch.randn(15, 2, 8),
        "cu_seqlens_q": torch.tensor([0, 5, 12]),
        "cu_seqlens_k": torch.tensor([0, 9, 15]),
        **changes,
    }
    q, k, v = (arguments.pop(name) for name in "qkv")
    return tw.attention_varlen(q, k, v, **arguments)


DENSE: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.randn(5, 4, 8)}, r"attention: q must be \[B, M, H, D\], got 3 dimensions"),
    ({"k": torch.randn(2, 7, 2, 9)}, r"attention: k must be \[B, N, G, D\] with D = 8"),
    ({"v": torch.randn(2, 6, 2, 8)}, r"attention: v must be \[B, N, G, E\] with N = 7"),
    ({"v": torch.randn(2, 7, 1, 8)}, r"attention: v must be .* with G = 2"),
    ({"k": torch.randn(3, 7, 2, 8)}, r"attention: k must be .* with B = 2"),
    ({"q": torch.randn(2, 5, 3, 8)}, r"query heads of q must be a multiple .* H = 3 and G = 2"),
    ({"q": torch.randn(2, 5, 4, 8).double()}, r"must share one dtype.*autocast"),
    ({"q": [1.0]}, r"attention: q must be a tensor, got list"),
    ({name: torch.ones(2, 5, 4, 8, dtype=torch.int32) for name in "qkv"}, r"floating tensor"),
    ({"k": torch.randn(2, 7, 2, 8, device="meta")}, r"on one device, got q on cpu and k on meta"),
    ({"mask": torch.ones(5, 7).bool()}, r"mask must be a tilewise Mask .* got Tensor"),
    ({"mask": "causal"}, r"mask must be a tilewise Mask .* got str"),
    ({"scale": float("nan")}, r"scale must be finite and at most 1e38 in size, got nan"),
    ({"scale": float("inf")}, r"scale must be finite and at most 1e38"),
    ({"scale": -1e300}, r"scale must be finite and at most 1e38"),
    ({"softcap": 1e39}, r"softcap must be None or lie between"),
    ({"scale": 1e20, "softcap": 1e-20}, r"scale / softcap must be at most 1e38 in size"),
    ({"scale": [1.0]}, r"scale must be a number, got \[1.0\]"),
    ({"scale": torch.ones(2)}, r"scale must be a number, got \[2\]"),
    ({"q": torch.randn(2, 5, 0, 8)}, r"a multiple of the kv heads of k and not 0, got H = 0"),
    ({"scale": torch.ones((), requires_grad=True)}, r"requires a gradient.* multiply q by it"),
    ({"softcap": torch.ones(1, requires_grad=True)}, r"softcap must .* requires a gradient"),
    ({"softcap": torch.ones(3)}, r"softcap must be a number, got \[3\]"),
    ({"softcap": 0.0}, r"softcap must be None or lie between 1e-37 and 1e38, got 0.0"),
    ({"softcap": float("nan")}, r"softcap must be None or lie between"),
    ({"dropout_p": 1.0}, r"dropout_p must lie in \[0, 1\), got 1.0"),
    ({"dropout_p": -0.1}, r"dropout_p must lie in \[0, 1\)"),
    ({"dropout_p": float("nan")}, r"dropout_p must lie in \[0, 1\)"),
    ({"bias": torch.randn(5, 8)}, r"bias must broadcast to \[B, H, M, N\] = \[2, 4, 5, 7\]"),
    ({"bias": torch.randn(1, 1, 1, 5, 7)}, r"bias must broadcast to"),
    ({"bias": torch.ones(5, 7).bool()}, r"bias must be floating, got torch.bool"),
    ({"alibi_slopes": torch.randn(3)}, r"alibi_slopes must be floating \[H\] = \[4\]"),
    ({"alibi_slopes": torch.randn(4, 2)}, r"alibi_slopes must be floating \[B, H\] = \[2, 4\]"),
    ({"sinks": torch.randn(2)}, r"sinks must be floating \[H\] = \[4\]"),
    ({"sinks": torch.ones(4, dtype=torch.int64)}, r"sinks must be floating"),
    ({"sinks": [0.0] * 4}, r"attention: sinks must be a tensor, got list"),
    ({"bias": [[0.0]]}, r"attention: bias must be a tensor, got list"),
    (
        {"backend": "cuda"},
        r"backend must be one of auto, reference, tiled, triton, hopper, got 'cuda'",
    ),
    ({name: torch.randn(2, 5, 2, 0) for name in "qkv"}, r"head dimensions must be at least 1"),
    ({"mask": tw.key_padding([1, 2, 3])}, r"expected 2 entries, one a batch row, got 3"),
    ({"mask": tw.key_padding([-1, 2])}, r"lengths must not be negative, got -1"),
    ({"mask": tw.causal(offset=torch.tensor([1, 2, 3]))}, r"expected 2 entries"),
    (
        {"mask": tw.documents([1, 4, 7])},
        r"cu_seqlens must start at 0 and never fall, got \[1, 4, 7\]",
    ),
    ({"mask": tw.documents([0, 4, 3])}, r"must start at 0 and never fall, got \[0, 4, 3\]"),
    ({"mask": tw.blocks(torch.ones(3, 1, 1, 1).bool())}, r"blocks: expected \[2 or 1, 4 or 1"),
    ({"mask": tw.from_function(lambda b, h, m, n: m - n)}, r"must return a bool tensor"),
]

VARLEN: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": torch.tensor([1, 5, 12])}, r"cu_seqlens_q must start at 0, got 1"),
    ({"cu_seqlens_q": torch.tensor([0, 7, 5])}, r"cu_seqlens_q must never fall, got 7 then 5"),
    ({"cu_seqlens_k": torch.tensor([0, 9, 16])}, r"cu_seqlens_k ends at 16, but only 15 tokens"),
    ({"cu_seqlens_q": torch.tensor([0.0, 5, 12])}, r"cu_seqlens_q must be int32 or int64"),
    ({"cu_seqlens_q": torch.tensor([[0, 5, 12]])}, r"cu_seqlens_q must be \[B\+1\]"),
    ({"cu_seqlens_q": torch.tensor([], dtype=torch.int32)}, r"at least one entry"),
    ({"cu_seqlens_k": torch.tensor([0, 15])}, r"cu_seqlens_k must be \[B\+1\] with B\+1 = 3"),
    ({"seqused_k": torch.tensor([10, 1])}, r"seqused_k must lie between 0 and what each"),
    ({"seqused_q": torch.tensor([-1, 1])}, r"seqused_q must lie between 0 and"),
    ({"seqused_q": torch.tensor([1])}, r"seqused_q must be \[B\] = \[2\]"),
    ({"seqused_q": torch.tensor([1.0, 2.0])}, r"seqused_q must be int32 or int64"),
    ({"bias": torch.randn(6, 9)}, r"bias must reach the longest document, 7 entries in dim"),
    ({"max_seqlen_q": 6}, r"max_seqlen_q is 6, but a sequence has 7 tokens"),
    ({"max_seqlen_k": 9.5}, r"max_seqlen_k must be an int >= 0, got 9.5"),
    ({"max_seqlen_k": [9]}, r"max_seqlen_k must be an int >= 0, got \[9\]"),
    ({"max_seqlen_k": -2}, r"max_seqlen_k must be an int >= 0, got -2"),
    ({"q": torch.randn(1, 12, 4, 8)}, r"q must be \[T, H, D\], got 4 dimensions"),
]


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(("changes", "message"), DENSE, ids=[m[:40] for _, m in DENSE])
def test_dense(changes: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call(**{"backend": backend, **changes})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(("changes", "message"), VARLEN, ids=[m[:40] for _, m in VARLEN])
def test_varlen(changes: dict[str, Any], message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        varlen(**{"backend": backend, **changes})
    assert "\n" not in str(raised.value)


def test_fp8_names_what_can_be_used() -> None:
    x = torch.randn(2, 5, 4, 8).to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"float8_e4m3fn is not supported.*float16"):
        tw.attention(x, x, x)


def refuse_triton(message: str, dtype: torch.dtype = torch.float32, D: int = 8) -> None:
    """Named, triton runs or refuses; every public form says so in one sentence."""
    q, k, v = (torch.randn(2, 5, 2, D, dtype=dtype) for _ in "qkv")
    lse = torch.zeros(2, 2, 5, dtype=dtype)
    buffers = {"dq": q.clone(), "dk": k.clone(), "dv": v.clone()}
    cu = {"cu_seqlens_q": torch.tensor([0, 2, 5])}
    calls = {
        "attention": lambda: tw.attention(q, k, v, backend="triton"),
        "attention_partial": lambda: tw.attention_partial(q, k, v, backend="triton"),
        "attention_varlen": lambda: tw.attention_varlen(q[0], k[0], v[0], **cu, backend="triton"),
        "attention_varlen_partial": lambda: tw.attention_varlen_partial(
            q[0], k[0], v[0], **cu, backend="triton"
        ),
        "attention_partial_backward": lambda: tw.attention_partial_backward(
            q, q, k, v, lse, lse, **buffers, backend="triton"
        ),
    }
    for op, run in calls.items():
        with pytest.raises(NotImplementedError) as caught:
            run()
        text = str(caught.value)
        assert text.startswith(f"{op}: backend 'triton' ") and message in text
        assert text.endswith("use backend='tiled'.") and "\n" not in text
    with pytest.raises(NotImplementedError, match="backend='tiled'"):
        tw.explain_backend(q, k, v, backend="triton")
    assert tw.explain_backend(q, k, v).name == "tiled"


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    with torch.device("cpu"):
        refuse_triton("needs a GPU, or TRITON_INTERPRET=1")


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("message", "options"),
    [("not float64", {"dtype": torch.float64}), ("up to 256, got 257", {"D": 257})],
)
def test_triton_refuses_what_its_kernels_cannot(message: str, options: dict[str, Any]) -> None:
    """Before it asks whether kernels run here: with a GPU the answer is the same."""
    refuse_triton(message, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dk": torch.zeros(2, 7, 2, 9)}, r"dk must be \[B, N, G, D\]"),
        ({"dq": torch.zeros(2, 5, 4, 8).bfloat16()}, r"dq must be torch.float32"),
        ({"lse": torch.zeros(2, 4, 6)}, r"lse must be \[B, H, M\]"),
        ({"delta": torch.zeros(2, 4, 5).double()}, r"delta must be torch.float32"),
        ({"backend": "reference"}, r"use backend='tiled'"),
    ],
)
def test_partial_backward(changes: dict[str, Any], message: str) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 6)
    arguments = {
        "lse": torch.zeros(2, 4, 5),
        "delta": torch.zeros(2, 4, 5),
        "dq": torch.zeros_like(q),
        "dk": torch.zeros_like(k),
        "dv": torch.zeros_like(v),
        **changes,
    }
    lse, delta = arguments.pop("lse"), arguments.pop("delta")
    with pytest.raises((ValueError, NotImplementedError), match=message):
        tw.attention_partial_backward(torch.zeros(2, 5, 4, 6), q, k, v, lse, delta, **arguments)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_partial_backward_adds_into_elements_that_are_apart(name: str) -> None:
    x = torch.randn(2, 5, 4, 8)
    buffers = {n: torch.zeros_like(x) for n in ("dq", "dk", "dv")}
    buffers[name] = torch.zeros(1, 1, 4, 8).expand(2, 5, 4, 8)
    numbers = torch.zeros(2, 4, 5)
    with pytest.raises(ValueError, match=f"{name} must not be expanded"):
        tw.attention_partial_backward(x, x, x, x, numbers, numbers, **buffers)
    buffers[name] = None
    with pytest.raises(ValueError, match=f"{name} must be a tensor, got NoneType"):
        tw.attention_partial_backward(x, x, x, x, numbers, numbers, **buffers)


@pytest.mark.parametrize(("name", "other"), [("dv", "dk"), ("dq", "q"), ("dk", "dout")])
def test_partial_backward_adds_into_memory_of_its_own(name: str, other: str) -> None:
    x = {n: torch.randn(2, 5, 4, 8) for n in ("dout", "q", "k", "v", "dq", "dk", "dv")}
    x[name] = x[other].view_as(x[other])
    numbers = torch.zeros(2, 4, 5)
    dout, q, k, v = (x.pop(n) for n in ("dout", "q", "k", "v"))
    with pytest.raises(ValueError, match="must have memory of its own, got that of"):
        tw.attention_partial_backward(dout, q, k, v, numbers, numbers, **x)


def test_partial_backward_adds_into_the_parts_of_one_tensor() -> None:
    x, numbers, sums = torch.randn(2, 5, 4, 8), torch.zeros(2, 4, 5), torch.zeros(2, 5, 3, 4, 8)
    dq, dk, dv = sums.unbind(2)
    tw.attention_partial_backward(x, x, x, x, numbers, numbers, dq=dq, dk=dk, dv=dv)
    apart = {name: torch.zeros_like(x) for name in ("dq", "dk", "dv")}
    tw.attention_partial_backward(x, x, x, x, numbers, numbers, **apart)
    assert all(torch.equal(a, b) for a, b in zip((dq, dk, dv), apart.values(), strict=True))


@pytest.mark.parametrize("out_dtype", [torch.float8_e4m3fn, torch.int32, "fp32"])
def test_out_dtype_is_one_that_kernels_write(out_dtype: Any) -> None:
    x = torch.randn(2, 5, 4, 8)
    with pytest.raises(ValueError, match="out_dtype must be one of float16, bfloat16"):
        tw.attention_partial(x, x, x, out_dtype=out_dtype)


def test_a_start_must_not_be_negative() -> None:
    x = torch.randn(2, 5, 4, 8)
    for start in (-1, 2.5, "1", [1], 1 << 62):
        with pytest.raises(ValueError, match=r"q_start and k_start must be ints in \[0, 2\^31\)"):
            tw.attention_partial(x, x, x, q_start=start)
    with pytest.raises(ValueError, match="q_start must not be negative"):
        tw.attention_partial(x, x, x, q_start=torch.tensor([-1, 0]))
