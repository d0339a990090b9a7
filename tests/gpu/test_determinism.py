"""A thousand runs are bitwise equal, forward and backward, asked for or not."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.common import BACKEND, are_equal, ints, normal, packed_qkv, qkv

pytestmark = pytest.mark.gpu
REPEATS = 1000


def terms() -> dict[str, Tensor]:
    made = {
        "bias": normal(1, 1, 300, 520, dtype=torch.float32, seed=4),
        "alibi_slopes": normal(4, dtype=torch.float32, seed=5).abs(),
        "sinks": normal(4, dtype=torch.float32, seed=6),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


FORMS: dict[str, dict[str, Any]] = {
    "causal": {"mask": tw.causal()},
    "prefix-LM": {"mask": tw.causal() | tw.prefix(100)},
    "dropout": {"mask": tw.causal(), "dropout_p": 0.2},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", [*FORMS, "terms", "packed"])
def test_a_thousand_runs(form: str, dtype: torch.dtype) -> None:
    """Without torch's own deterministic mode, and without `deterministic=True`."""
    assert not torch.are_deterministic_algorithms_enabled()
    options = dict(FORMS.get(form, {}))
    learned = terms() if form == "terms" else {}
    leaves = (
        packed_qkv(520, 520, dtype=dtype) if form == "packed" else qkv(2, 300, 520, dtype=dtype)
    )
    if form == "packed":
        options |= {"cu_seqlens_q": ints(0, 1, 130, 500), "mask": tw.causal()}
    op = tw.attention_varlen if form == "packed" else tw.attention
    everything = [*leaves, *learned.values()]

    def once() -> list[Tensor]:
        torch.manual_seed(5)
        out = op(*leaves, **learned, **options, backend=BACKEND)
        return [out.detach(), *torch.autograd.grad(out, everything, torch.ones_like(out))]

    first = once()
    assert all(bool(x.isfinite().all()) for x in first)
    for _ in range(REPEATS - 1):
        assert are_equal(once(), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forwards_without_gradients(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in qkv(2, 300, 520, dtype=dtype))
    first = tw.attention_partial(q, k, v, mask=tw.causal(), backend=BACKEND)
    for _ in range(REPEATS - 1):
        again = tw.attention_partial(q, k, v, mask=tw.causal(), backend=BACKEND)
        assert are_equal(again, first)
