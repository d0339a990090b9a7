"""Makes calls of the drop-in and holds them against the formula."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tilewise.flash_attn as flash_attn
from tests.flash_attn.formula import LEARNED, SEED, Call, Sequence, formula, sequences
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

B, M, N, H, G, D = 2, 13, 17, 6, 2, 8
LENGTHS_Q = (5, 0, 7, 2)
LENGTHS_K = (7, 3, 0, 5)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)


def make_call(
    function: str,
    options: dict[str, Any],
    dtype: torch.dtype,
    *,
    shape: tuple[int, int] = (M, N),
    lengths: tuple[tuple[int, ...], tuple[int, ...]] = (LENGTHS_Q, LENGTHS_K),
    heads: tuple[int, int] = (H, G),
    d: int = D,
) -> Call:
    """Random tensors for a function. For alibi_slopes and sinks options say the shape alone, "H"
    or "B H". Where queries and keys come in one tensor, the keys are as the queries.
    """
    is_varlen = "varlen" in function
    if "_qkvpacked" in function:
        shape, lengths, heads = (shape[0],) * 2, (lengths[0],) * 2, (heads[0],) * 2
    batch = len(lengths[0]) if is_varlen else B
    rows_q, rows_k = (
        (sum(side),) if is_varlen else (B, size)
        for side, size in zip(lengths, shape, strict=True)
    )  # fmt: skip
    q = torch.randn(*rows_q, heads[0], d).to(dtype)
    k, v = torch.randn(2, *rows_k, heads[1], d).to(dtype)
    if "_qkvpacked" in function:
        tensors = {"qkv": torch.stack([q, k, v], -3)}
    elif "_kvpacked" in function:
        tensors = {"q": q, "kv": torch.stack([k, v], -3)}
    else:
        tensors = {"q": q, "k": k, "v": v}
    sizes = {"B": batch, "H": heads[0]}
    for name in LEARNED:
        if name in options:
            tensors[name] = torch.rand([sizes[letter] for letter in options[name].split()])
    plain = {name: value for name, value in options.items() if name not in LEARNED}
    return Call(function, tensors, pack(function, lengths) if is_varlen else {}, plain)


def pack(function: str, lengths: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    """The arguments that say where packed sequences are."""
    starts = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in lengths]
    longest = [max(side) for side in lengths]
    if "_qkvpacked" in function:
        return {"cu_seqlens": starts[0], "max_seqlen": longest[0]}
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, starts + longest, strict=True))


def run(call: Call, tensors: dict[str, Tensor], **more: Any) -> Any:
    """What the drop-in returns."""
    torch.manual_seed(SEED)
    function = getattr(flash_attn, call.function)
    return function(**tensors, **call.lengths, **call.options, **more)


def run_with_lse(call: Call, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = run(call, tensors, return_lse=True)
    return out, lse


def with_gradients(form: Any, call: Call, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """out, lse and, as "dq" and so on, the gradients of a loss that depends on both."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    out, lse = form(call, leaves)
    dout, dlse = upstream(call, out, lse)
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), [dout, dlse])
    named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def upstream(call: Call, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The same numbers in every dtype, those of the call's own; dout is not contiguous."""
    generator = torch.Generator().manual_seed(SEED)
    # Drawn on the CPU, whose generator it is.
    dout = torch.randn(out.mT.shape, generator=generator, device="cpu").mT.to(call.dtype)
    dlse = torch.randn(lse.shape, generator=generator, device="cpu")
    return dout.to(out.device, out.dtype), dlse.to(lse.device, lse.dtype)


def check(call: Call, form: Any = run_with_lse) -> None:
    """out, lse and every gradient, through out and lse both, within the error budget."""
    got = with_gradients(form, call, call.tensors)
    wide = {name: x.double() for name, x in call.tensors.items()}
    exact = with_gradients(formula, call, wide)
    eager = with_gradients(formula, call, call.tensors)
    assert_lse_within_budget(got.pop("lse"), exact.pop("lse"), call.dtype)
    floor = floors(call, wide, exact["out"])
    for name, value in got.items():
        assert value.dtype == eager[name].dtype, name
        assert_within_budget(value, exact[name], eager[name], name=name, floor=floor[name])


def floors(call: Call, tensors: dict[str, Tensor], out: Tensor) -> Counter[str]:
    """The fp32 rounding of what cancels, by gradient; from fp64 tensors.

    P = exp(S - lse) carries the rounding of its exponent, and dS = P (dP - delta) that of what it
    subtracts, of the size of dP, delta and dLSE: eps times these, through the products that follow.
    """
    top: Counter[str] = Counter()
    for s, dout, dlse in _with_upstream(call, tensors, out):
        p, lse = s.softmax()
        p = p / (1.0 - s.dropout_p)
        exponent = lse.abs().nan_to_num(posinf=0.0).unsqueeze(-1)
        k, v = (x.abs() for x in s.repeated())
        lost = (dout * (p @ v)).sum(-1, keepdim=True) + dlse.unsqueeze(-1)
        ds = p * (dout @ v.mT + lost) * (1.0 + exponent)
        sizes = {
            "dq": s.scale * ds @ k,
            "dk": s.scale * (ds.mT @ s.q.abs()).unflatten(0, (-1, s.group)).sum(1),
            "dv": ((p * exponent).mT @ dout).unflatten(0, (-1, s.group)).sum(1),
            "dalibi_slopes": (ds * s.distance.abs()).sum((-1, -2)),
            "dsinks": lost.sum((-1, -2)),
        }
        for name, size in sizes.items():
            largest = float(size.max()) if size.numel() else 0.0
            # What sums over sequences adds up; the others are tensors of their own.
            top[name] = top[name] + largest if name[1:] in LEARNED else max(top[name], largest)
    top["dkv"] = max(top["dk"], top["dv"])
    top["dqkv"] = max(top["dq"], top["dkv"])
    eps = torch.finfo(torch.float32).eps
    return Counter({name: eps * size for name, size in top.items()})


def _with_upstream(
    call: Call, tensors: dict[str, Tensor], out: Tensor
) -> Iterator[tuple[Sequence, Tensor, Tensor]]:
    """Each sequence with its |dout| `[H, M, E]` and |dlse| `[H, M]`."""
    lse = out.new_zeros(*out.shape[:-3], out.shape[-2], out.shape[-3])
    dout, dlse = (x.abs() for x in upstream(call, out, lse))
    edges = call.edges("q") if call.is_varlen else []
    for s in sequences(call, tensors):
        if call.is_varlen:
            rows = slice(edges[s.b], edges[s.b + 1])
            yield s, dout[rows].transpose(0, 1), dlse[:, rows]
        else:
            yield s, dout[s.b].transpose(0, 1), dlse[s.b]
