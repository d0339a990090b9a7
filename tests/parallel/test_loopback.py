"""The pieces of a ring on one device, where there is nobody to send to: also on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST, backends
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense import budget
from tilewise.dense.budget import Case
from tilewise.parallel import balanced, striped, zigzag
from tilewise.parallel.loopback import loopback

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
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", (8,))
def test_c219_c224_the_pieces_of_a_ring(
    ranks: int, layout: str, mask: str, dtype: torch.dtype
) -> None:
    def tensor(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(len(shape) + sum(shape))
        drawn = torch.randn(*shape, generator=generator, device="cpu")
        return drawn.to(UNDER_TEST.device, dtype)

    x = {"q": tensor(1, S, 4, 64), "k": tensor(1, S, 2, 64), "v": tensor(1, S, 2, 64)}
    dout = tensor(1, S, 4, 64)
    got = loopback(
        *x.values(), dout, layout=LAYOUTS[layout](S, ranks), mask=MASKS[mask](), backend=BACKEND
    )
    case = Case("attention_partial", "test", x, {"mask": MASKS[mask]()})
    results = []
    for form, wide in ((budget.exact, torch.float64), (budget.eager, dtype)):
        leaves = {name: t.detach().to(wide, copy=True).requires_grad_() for name, t in x.items()}
        found = form(case, leaves)
        grads = torch.autograd.grad(found["out"], list(leaves.values()), dout.to(wide))
        results.append((found["out"], found["lse"], *grads))
    exact, eager = results
    assert_lse_within_budget(got.lse, exact[1], dtype)
    wide_x = {name: t.double() for name, t in x.items()}
    upstream = {"out": dout.double()}
    floors = budget.floors(case, wide_x, upstream, torch.finfo(torch.float32).eps)
    floors["out"] = 0.0
    for at, name in ((0, "out"), (2, "q"), (3, "k"), (4, "v")):
        # Sums stay in fp32; the budget is that of the inputs' dtype.
        rounded = got[at].to(dtype)
        assert_within_budget(rounded, exact[at], eager[at], name=name, floor=floors[name])
