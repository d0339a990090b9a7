"""The pieces of a ring on one device, where there is nobody to send to: also on a GPU, and in
Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST, backends, runs_kernels
from tilewise.core.case import Case
from tilewise.core.partials import Partial, merge, merge_into
from tilewise.core.philox import draw_rng
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense import budget
from tilewise.parallel import Layout, balanced, document_zigzag, striped, zigzag
from tilewise.parallel.loopback import loopback
from tilewise.parallel.numbered import Numbering
from tilewise.parallel.pieces import Extras

(BACKEND,) = backends("tiled")
S, EDGES = 197, [0, 70, 71, 140, 181]
MASKS = {
    "causal": tw.causal,
    "window": lambda: tw.window(50, 3),
    "documents": lambda: tw.documents(EDGES) & tw.causal(),
}
LAYOUTS = {
    "zigzag": zigzag,
    "striped": striped,
    "balanced": lambda size, ranks: balanced(tw.causal(), size, ranks, chunk=30),
    "documents": lambda size, ranks: document_zigzag(EDGES, ranks, size),
}


def tensors_of(size: int, dtype: torch.dtype, dim: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(size)
    shapes = {"q": (1, size, 4, dim), "k": (1, size, 2, dim), "v": (1, size, 2, dim)}
    drawn = {n: torch.randn(s, generator=generator, device="cpu") for n, s in shapes.items()}
    return {name: x.to(UNDER_TEST.device, dtype) for name, x in drawn.items()}


def check(x: dict[str, Tensor], layout: Layout, mask: tw.Mask, **options: Any) -> None:
    """out, lse and all gradients of whole rings against one call of the core's oracle."""
    dout = torch.randn_like(x["q"])
    dtype = dout.dtype
    extra = {name: x[name] for name in ("bias", "alibi_slopes") if name in x}
    case = Case("attention_partial", "test", x, {"mask": mask, **options}, seed=3)
    terms = dict(options)
    if "dropout_p" in options:
        torch.manual_seed(case.seed)
        terms["rng"] = draw_rng(dout.device)
    extras = Extras(extra.get("bias"), extra.get("alibi_slopes"))
    got = loopback(
        *(x[n] for n in "qkv"), dout, layout=layout, mask=mask, extras=extras, backend=BACKEND,
        **terms,
    )  # fmt: skip
    results = []
    for form, wide in ((budget.exact, torch.float64), (budget.eager, dtype)):
        leaves = {
            name: t.detach()
            .to(wide if name in "qkv" or wide == torch.float64 else t.dtype, copy=True)
            .requires_grad_()
            for name, t in x.items()
        }
        found = form(case, leaves)
        grads = torch.autograd.grad(found["out"], list(leaves.values()), dout.to(wide))
        results.append(
            {"out": found["out"], "lse": found["lse"], **dict(zip(x, grads, strict=True))}
        )
    exact, eager = results
    assert_lse_within_budget(got.lse, exact["lse"], dtype)
    wide_x = {name: t.double() for name, t in x.items()}
    eps = torch.finfo(torch.float32).eps
    floors = budget.floors(case, wide_x, {"out": dout.double()}, eps) | {"out": 0.0}
    names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "alibi_slopes": "dslopes"}
    for name in ("out", *x):
        # Sums stay in fp32; the budget is that of the inputs' dtype.
        value = getattr(got, names.get(name, name)).to(x[name].dtype if name in x else dtype)
        assert_within_budget(value, exact[name], eager[name], name=name, floor=floors[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_c219_c224_the_pieces_of_a_ring(layout: str, mask: str, dtype: torch.dtype) -> None:
    check(tensors_of(S, dtype), LAYOUTS[layout](S, 8), MASKS[mask]())


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("term", ["none", "softcap", "alibi_slopes", "bias", "dropout_p"])
def test_pieces_with_terms(term: str, dtype: torch.dtype) -> None:
    """The backward of a piece under every term, which only pieces of a ring ask for."""
    size = 52
    x, options = tensors_of(size, dtype, 32), {}
    if term == "softcap":
        options = {"softcap": 4.0}
    if term == "dropout_p":
        options = {"dropout_p": 0.25}
    if term == "alibi_slopes":
        x[term] = torch.rand(4) * 0.2
    if term == "bias":
        x[term] = torch.randn(1, 4, size, size)
    check(x, zigzag(size, 3), tw.causal(), **options)


@pytest.mark.interpreter
def test_a_share_of_the_heads_keeps_its_bits() -> None:
    """Heads 2 and 3 alone, dropped as they are among four."""
    size = 36
    x = tensors_of(size, torch.float32, 32)
    x = {
        name: t.repeat(2, 1, 1, 1) * torch.tensor([1.0, 0.5]).reshape(2, 1, 1, 1)
        for name, t in x.items()
    }
    torch.manual_seed(3)
    rng = draw_rng(x["q"].device)
    where: dict[str, Any] = {"layout": zigzag(size, 2), "mask": tw.causal(), "backend": BACKEND}
    where |= {"dropout_p": 0.3, "rng": rng}
    dout = torch.randn_like(x["q"])
    whole = loopback(*x.values(), dout, **where)
    half = {"q": x["q"][:, :, 2:], "k": x["k"][:, :, 1:], "v": x["v"][:, :, 1:]}
    part = loopback(*half.values(), dout[:, :, 2:], numbering=Numbering(2, 1, 2), **where)
    for got, want in (
        (part.out, whole.out[:, :, 2:]),
        (part.dq, whole.dq[:, :, 2:]),
        (part.dk, whole.dk[:, :, 1:]),
        (part.dv, whole.dv[:, :, 1:]),
    ):
        floor = 16 * torch.finfo(torch.float32).eps * float(want.abs().max())
        assert_within_budget(got, want.double(), want, floor=floor)


@pytest.mark.interpreter
@pytest.mark.skipif(not runs_kernels(), reason="what these kernels do is plain torch elsewhere")
@pytest.mark.parametrize(("M", "E"), [(7, 8), (65, 48), (40, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_merged_as_partials_are(M: int, E: int, dtype: torch.dtype) -> None:
    """Empty rows on either side and on both; into slices of what is larger; rounded at once."""
    from tilewise.parallel.triton_rows import merge_rows, row_deltas

    outs = [torch.randn(2, M + 3, 3, E) for _ in range(2)]
    lses = [5 * torch.randn(2, 3, M) for _ in range(2)]
    lses[0][..., ::3] = float("-inf")
    lses[1][..., ::2] = float("-inf")
    parts = []
    for out, lse in zip(outs, lses, strict=True):
        out[:, 1 : M + 1][lse.isneginf().transpose(1, 2)] = 0.0
        parts.append(Partial(out[:, 1 : M + 1], lse))
    exact = merge([Partial(x.out.double(), x.lse.double()) for x in parts])
    plain = Partial(*(x.clone() for x in parts[0]))
    merge_into(plain, parts[1])
    final = torch.full((2, M, 3, E), float("nan"), dtype=dtype)
    unkept = Partial(*(x.clone() for x in parts[0]))
    merge_rows(unkept, parts[1], rounded := torch.empty_like(final), keeps=False)
    assert torch.equal(unkept.out, parts[0].out)
    merge_rows(*parts, final)
    assert torch.equal(rounded, final)
    total = parts[0]
    floor = 16 * torch.finfo(torch.float32).eps
    assert_lse_within_budget(total.lse, exact.lse, torch.float32)
    assert_within_budget(total.out, exact.out, plain.out, floor=floor)
    assert_within_budget(final, exact.out, total.out.to(dtype), floor=floor)
    # An empty row's dO may be anything.
    dout, dlse = torch.randn(2, M, 3, E).to(dtype), torch.randn(2, 3, M)
    dout[exact.lse.isneginf().transpose(1, 2)] = float("nan")
    safe = dout.nan_to_num()
    deltas = [(x * safe.to(x.dtype)).sum(-1).transpose(1, 2) - dlse for x in (exact.out, total.out)]
    got = row_deltas(total.out, dout, dlse)
    assert_within_budget(got, deltas[0], deltas[1], floor=floor * E)
