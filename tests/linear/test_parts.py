"""fp32 numbers as sums of numbers in bf16, by their bits."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import UNDER_TEST
from tilewise.core.backends import is_interpreted

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from tilewise.kernels.launch import UNTILED, launch  # noqa: E402
from tilewise.linear.stages.tiles import _split_in_three, split  # noqa: E402

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        not (is_interpreted() or UNDER_TEST.device == "cuda"), reason="of a kernel, not run here"
    ),
]


@triton.jit
def _parts_kernel(x, two, three, N: tl.constexpr):
    offs = tl.arange(0, N)
    number = tl.load(x + offs)
    high, low = split(number)
    tl.store(two + offs, high)
    tl.store(two + N + offs, low)
    first, second, third = _split_in_three(number)
    tl.store(three + offs, first)
    tl.store(three + N + offs, second)
    tl.store(three + 2 * N + offs, third)


def test_parts_add_up_to_the_number() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(254, generator=generator, device="cpu") * 1e3
    # Ties, and what is nothing.
    x = torch.cat([drawn, torch.tensor([0.0, 1.00390625], device="cpu")]).to(UNDER_TEST.device)
    two, three = (
        torch.empty(n, 256, dtype=torch.bfloat16, device=UNDER_TEST.device) for n in (2, 3)
    )
    launch(_parts_kernel, (1,), UNTILED, (x, two, three, 256), x.device)
    # The interpreter cuts a conversion's low bits off instead of rounding them.
    slack = 2.0 if is_interpreted() else 1.0
    for parts, digits in ((two, 17), (three, 25)):
        error = (parts.double().sum(0) - x.double()).abs()
        assert bool((error <= slack * 2.0**-digits * x.double().abs()).all())
        # Each part is rounded to the nearest, so that what is left has either sign.
        assert bool((parts[0].double() - x.double()).abs().le(2.0**-8 * x.double().abs()).all())
        assert int((parts[1] > 0).sum()) > 64 < int((parts[1] < 0).sum())
