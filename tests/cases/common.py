"""What the case tests share: attention as a formula, poison, and the check of a whole call.

The formula here is written out again in plain torch, with visibility given by the test itself, so
that a fault in Tilewise's own oracle, masks or positions shows too. In fp64 it is the exact result
of the error budget, in the inputs' dtype it is the eager one.

Dims: B batch, M queries, N keys, H query heads, G kv heads, D q/k dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import UNDER_TEST, backends, runs_kernels
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

NAN, INF = float("nan"), float("inf")
on_backends = pytest.mark.parametrize("backend", backends("tiled", "reference"))
in_double = pytest.mark.skipif(runs_kernels(), reason="kernels compute in fp32 at most")
# Multi-head latent attention: one kv head, keys of 576 and values of 512; dense kernels hold 256.
MLA = pytest.param((256, 192) if runs_kernels() else (576, 512), id="mla")
# Dynamo makes an autograd.Function of its own and trips over torch's advice against it, which is
# an error where warnings are (torch 2.13).
compiles = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

# Which keys j a query at key position p sees; both int64, broadcast to [M, N].
Rule = Callable[[Tensor, Tensor], Tensor]
# From the named tensors to (out, lse).
Form = Callable[..., tuple[Tensor, Tensor]]


def everything(p: Tensor, j: Tensor) -> Tensor:
    return (p == p) & (j == j)


def causally(p: Tensor, j: Tensor) -> Tensor:
    return j <= p


def windowed(left: int, right: int) -> Rule:
    return lambda p, j: (j >= p - left) & (j <= p + right)


def visibility(rule: Rule, M: int, N: int, offset: int | None = None) -> Tensor:
    """`[M, N]` bool; query m stands at `m + offset`, bottom-right when None."""
    p = torch.arange(M).unsqueeze(1) + (N - M if offset is None else offset)
    return rule(p, torch.arange(N).unsqueeze(0))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers wherever they are used."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(UNDER_TEST.device, dtype)


def qkv(
    B: int, M: int, N: int, heads: tuple[int, int], D: int, E: int | None = None,
    dtype: torch.dtype = torch.float32, std: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """q `[B, M, H, D]`, k `[B, N, G, D]`, v `[B, N, G, E]`."""
    H, G = heads
    shapes = {"q": (B, M, H, D), "k": (B, N, G, D), "v": (B, N, G, E or D)}
    return {
        name: (normal(*shape, seed=seed) * std).to(dtype)
        for seed, (name, shape) in enumerate(shapes.items(), 1)
    }


def packed_qkv(
    T: int, S: int, heads: tuple[int, int], D: int, E: int | None = None,
    dtype: torch.dtype = torch.float32, std: float = 1.0,
) -> dict[str, Tensor]:  # fmt: skip
    """q `[T, H, D]`, k `[S, G, D]`, v `[S, G, E]`."""
    padded = qkv(1, T, S, heads, D, E, dtype, std)
    return {name: x.squeeze(0) for name, x in padded.items()}


# ---------------------------------------------------------------- the formula


def formula(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, *, scale: float | None = None,
    softcap: float | None = None, bias: Tensor | None = None, sinks: Tensor | None = None,
    keep: Tensor | None = None, dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out `[B, M, H, E]` and lse `[B, H, M]`; products in q's dtype, fp32 (fp64) in between.

    visible, keep: bool, broadcast to `[B, H, M, N]`. bias holds ALiBi where there is any.
    """
    (B, M, H, D), (N, G) = q.shape, k.shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    qh, kh, vh = (x.transpose(1, 2) for x in (q, k, v))
    kh, vh = (x.repeat_interleave(H // G, dim=1) for x in (kh, vh))
    scores = (qh @ kh.transpose(-1, -2)).to(wide) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(wide)
    visible = visible.expand(B, H, M, N) & ~scores.detach().isneginf()
    logits = scores.masked_fill(~visible, -INF)
    if sinks is not None:
        logits = torch.cat([logits, sinks.to(wide).view(1, H, 1, 1).expand(B, H, M, 1)], dim=-1)
    # A column that is always -inf makes the maximum exist where there is no key at all.
    logits = torch.cat([logits, logits.new_full((B, H, M, 1), -INF)], dim=-1)
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top.isneginf(), 0.0)
    total = torch.exp(logits - top).sum(-1, keepdim=True)
    is_empty = total == 0
    lse = torch.where(is_empty, -INF, torch.log(total.masked_fill(is_empty, 1.0)) + top)
    p = torch.exp(scores.masked_fill(~visible, -INF) - top) / total.masked_fill(is_empty, 1.0)
    if keep is not None:
        p = p * keep / (1.0 - dropout_p)
    return (p.to(q.dtype) @ vh).transpose(1, 2), lse.squeeze(-1)


def packed_formula(
    q: Tensor, k: Tensor, v: Tensor, cu_q: list[int], cu_k: list[int], rule: Rule, *,
    used_q: list[int] | None = None, used_k: list[int] | None = None,
    bias_of: Callable[[int, Tensor, Tensor], Tensor] | None = None, **terms: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`formula` for every document by itself; what belongs to no document is (0, -inf).

    bias_of: from (document, query positions `[M, 1]`, keys `[1, N]`) to its `[H, M, N]`.
    """
    H, E = q.shape[1], v.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    for b, ((m0, m1), (n0, n1)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        M = m1 - m0 if used_q is None else used_q[b]
        N = n1 - n0 if used_k is None else used_k[b]
        parts = (q[m0 : m0 + M], k[n0 : n0 + N], v[n0 : n0 + N])
        if bias_of is not None:
            p = torch.arange(M).unsqueeze(1) + N - M
            terms["bias"] = bias_of(b, p, torch.arange(N).unsqueeze(0))
        out, lse = formula(*(x.unsqueeze(0) for x in parts), visibility(rule, M, N), **terms)
        slack = m1 - m0 - M
        outs += [out[0], q.new_zeros(slack, H, E)]
        lses += [lse[0], q.new_full((H, slack), -INF, dtype=wide)]
    tail = q.shape[0] - cu_q[-1]
    outs.append(q.new_zeros(tail, H, E))
    lses.append(q.new_full((H, tail), -INF, dtype=wide))
    return torch.cat(outs), torch.cat(lses, dim=-1)


def alibi(slopes: Tensor, p: Tensor, j: Tensor) -> Tensor:
    """`-slope |p - j|`, `[..., H, M, N]` from slopes `[..., H]`."""
    return -slopes.unsqueeze(-1).unsqueeze(-1) * (p - j).abs()


# ---------------------------------------------------------------- the check


@dataclass
class Outcome:
    """What a call gave: `lse` is None where the op returns out alone."""

    out: Tensor
    lse: Tensor | None
    grads: dict[str, Tensor]


def run(
    call: Callable[..., Any],
    tensors: Mapping[str, Tensor],
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
) -> Outcome:
    """Forward and every gradient. The upstream gradients are fixed noise unless given."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    result = call(**leaves)
    out, lse = (result, None) if isinstance(result, Tensor) else result
    # Contiguous and of one seed: no layout of the output reaches the comparison.
    outputs, upstream = [out], [normal(*out.shape, dtype=out.dtype) if dout is None else dout]
    # With v as the only leaf the oracle's lse has no gradient to pass on.
    if lse is not None and lse.requires_grad:
        outputs.append(lse)
        upstream.append(normal(*lse.shape, dtype=lse.dtype, seed=9) if dlse is None else dlse)
    grads = torch.autograd.grad(outputs, list(leaves.values()), upstream, materialize_grads=True)
    return Outcome(
        out.detach(), None if lse is None else lse.detach(), dict(zip(leaves, grads, strict=True))
    )


def clean(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Without poison, which must not matter, in a dtype."""
    return torch.nan_to_num(x.detach(), nan=0.0, posinf=0.0, neginf=0.0).to(dtype or x.dtype)


def check(
    call: Callable[..., Any],
    form: Form,
    tensors: Mapping[str, Tensor],
    *,
    dout: Tensor | None = None,
    floor: float | None = None,
    eager_dtype: torch.dtype | None = None,
) -> Outcome:
    """Hold out, lse and every gradient of `call` against `form`, and return what `call` gave.

    Args:
        call: from the named tensors to out, or to a `Partial`.
        form: the same in plain torch, `formula` in most cases.
        tensors: every floating argument. NaN and Inf in them are poison: the exact and the eager
            result are computed from 0 in their place.
        dout: the gradient of out; fixed noise when None.
        floor: the fp32 rounding of what cancels in the gradients; `rounding` when None.
        eager_dtype: of the eager products; the inputs' when None. fp32 makes the budget stricter
            where 16-bit products would lose everything.
    """
    got = run(call, tensors, dout)
    dtype = tensors["q"].dtype
    *outer, M, H, _ = got.out.shape
    upstream = normal(*got.out.shape, dtype=got.out.dtype) if dout is None else clean(dout)
    dlse = torch.zeros(*outer, H, M)
    if got.lse is not None:
        dlse = normal(*got.lse.shape, dtype=got.lse.dtype, seed=9)
    exact, eager = (
        run(
            form,
            {name: clean(x, wide) for name, x in tensors.items()},
            upstream.to(wide or dtype),
            dlse.to(torch.promote_types(wide or dtype, torch.float32)),
        )
        for wide in (torch.float64, eager_dtype)
    )
    assert exact.lse is not None
    assert_within_budget(got.out, exact.out, eager.out, name="out")
    if got.lse is not None:
        assert got.lse.dtype == torch.promote_types(dtype, torch.float32)
        assert_lse_within_budget(got.lse, exact.lse, dtype)
    for name, grad in got.grads.items():
        assert grad.dtype == tensors[name].dtype, name
        least = rounding(tensors, upstream, exact.lse, name) if floor is None else floor
        assert_within_budget(
            grad, exact.grads[name], eager.grads[name], name=f"d{name}", floor=least
        )
    return got


def rounding(tensors: Mapping[str, Tensor], dout: Tensor, lse: Tensor, name: str) -> float:
    """The floor of one gradient's budget, from the sizes of what goes into it.

    dS = P (dP - delta) subtracts two numbers of size |dO| |V|, and P carries the rounding of its
    exponent; dQ = scale dS K and dK = scale dS^T Q carry it on, dV = P^T dO does not subtract.
    """
    eps = torch.finfo(torch.promote_types(dout.dtype, torch.float32)).eps
    if dout.numel() == 0 or tensors["v"].numel() == 0:
        return 0.0
    exponent = 1.0 + float(lse.masked_fill(lse.isneginf(), 0).abs().max())
    length = float(
        dout.double().norm(dim=-1).max() * clean(tensors["v"]).double().norm(dim=-1).max()
    )
    if name == "v":
        return eps * exponent * float(dout.abs().max())
    partner = {"q": "k", "k": "q"}.get(name)
    if partner is None:
        # Bias, sinks and slopes take dS itself, slopes times a distance, summed over rows.
        summed = dout.shape[-3] * (tensors["k"].shape[-3] if name == "alibi_slopes" else 1)
        return eps * exponent * length * summed**0.5
    scale = tensors["q"].shape[-1] ** -0.5
    return eps * exponent * length * scale * float(clean(tensors[partner]).abs().max())


def same(one: Outcome, other: Outcome) -> None:
    """Bitwise equal in out, lse and every gradient."""
    assert torch.equal(one.out, other.out)
    assert (one.lse is None) == (other.lse is None)
    if one.lse is not None and other.lse is not None:
        assert torch.equal(one.lse, other.lse)
    for name in one.grads:
        assert torch.equal(one.grads[name], other.grads[name]), name


def is_zero(x: Tensor) -> bool:
    return bool((x == 0).all())


def assert_copied(out: Tensor, v: Tensor) -> None:
    """A row that sees one key is its value, bit for bit; kernels may split fp32 products, and a
    value put together again from its parts is a rounding away."""
    if runs_kernels() and out.dtype == torch.float32:
        assert_within_budget(out, v.double(), v)
    else:
        assert torch.equal(out, v)


def spoiled(x: Tensor, where: Any, value: float = NAN) -> Tensor:
    """A copy with poison at `x[where]`."""
    x = x.clone()
    x[where] = value
    return x


def sparse_storage(folder: Path, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor of so many elements, all 0, that takes memory and disk only where it is touched;
    on a GPU all of its memory."""
    if UNDER_TEST.device != "cpu":
        return torch.zeros(elements, dtype=dtype)
    path = folder / f"storage_{elements}_{dtype}".replace("torch.", "")
    with path.open("wb") as file:
        file.truncate(elements * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=elements, dtype=dtype)
