"""Large sizes: more than 2^31 elements, more than 65,535 batch rows times heads, long fp32 rows."""

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import formula
from tests.gpu.common import BACKEND, DEVICE, normal
from tests.helpers import check_call
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

pytestmark = pytest.mark.gpu
LIMIT = 2**31


def check(B: int, M: int, N: int, heads: tuple[int, int], D: int, dtype: torch.dtype, **options):
    H, G = heads
    shapes = {"q": (B, M, H, D), "k": (B, N, G, D), "v": (B, N, G, D)}
    tensors = {n: normal(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    check_call("attention_partial", tensors, backend=BACKEND, **options)


@pytest.mark.parametrize(("B", "heads"), [(70, (1000, 100)), (35, (2000, 2000))])
def test_batch_times_heads_of_70000(B: int, heads: tuple[int, int]) -> None:
    check(B, 5, 7, heads, 16, torch.bfloat16, mask=tw.causal())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "mask", [tw.full(), tw.causal(), tw.window(1700, 0)], ids=["full", "causal", "window"]
)
def test_budget_holds_at_larger_sizes(mask: tw.Mask, D: int, dtype: torch.dtype) -> None:
    check(1, 2000, 3001, (4, 2), D, dtype, mask=mask)


@pytest.mark.parametrize("D", [80, 192, 256])
def test_single_precision_holds_at_other_head_dims(D: int) -> None:
    check(1, 1000, 1500, (2, 1), D, torch.float32, mask=tw.causal())


def window_form(q: Tensor, k: Tensor, v: Tensor, left: int) -> tuple[Tensor, Tensor]:
    M, N = q.shape[1], k.shape[1]
    distance = torch.arange(N, device=DEVICE) - torch.arange(M, device=DEVICE).unsqueeze(1)
    visible = (distance <= N - M) & (distance >= N - M - left)
    return formula(q, k, v, visible)


def test_tensors_past_the_limit_of_32_bits() -> None:
    """q, k and v of one batch row with more than 2^31 elements each: the rows past the limit, and
    those around the middle, are what they are in a short call of their own."""
    left, H, D = 64, 2, 256
    S = LIMIT // (H * D) + 1000
    made = torch.Generator(device=DEVICE).manual_seed(0)
    draws = {"generator": made, "device": DEVICE, "dtype": torch.bfloat16}
    leaves = [torch.randn(1, S, H, D, **draws).requires_grad_() for _ in range(3)]
    assert all(x.numel() > LIMIT for x in leaves)
    out, lse = tw.attention_partial(*leaves, mask=tw.window(left, 0), backend=BACKEND)
    dout = torch.randn(1, S, H, D, **draws)
    gradients = torch.autograd.grad(out, leaves, dout)
    for stop in (S, S - 900, S // 2):
        # Rows that see all their keys in the slice, and keys that are seen by its rows alone.
        keys, rows = slice(stop - 300, stop), slice(stop - 200, stop)
        inner = slice(stop - 200, stop - left if stop < S else stop)
        parts = [x.detach()[:, span] for x, span in zip(leaves, (rows, keys, keys), strict=True)]
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            q, k, v = (x.to(dtype).requires_grad_() for x in parts)
            one, one_lse = window_form(q, k, v, left)
            found = torch.autograd.grad(one, (q, k, v), dout[:, rows].to(dtype))
            results.append((one.detach(), one_lse.detach(), *found))
        exact, eager = results
        assert_within_budget(out[:, rows], exact[0], eager[0], name="out")
        assert_lse_within_budget(lse[..., rows], exact[1], torch.bfloat16)
        assert_within_budget(gradients[0][:, rows], exact[2], eager[2], name="dq")
        local = slice(100, 100 + inner.stop - inner.start)
        for name, i in (("dk", 1), ("dv", 2)):
            three = (gradients[i][:, inner], exact[2 + i][:, local], eager[2 + i][:, local])
            assert_within_budget(*three, name=name)
