"""Cases of dropout, recomputation and repetition."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.cases.common import (
    Outcome,
    causally,
    check,
    formula,
    in_double,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    same,
    visibility,
)

SEED = 11


def seeded(call: Any) -> Any:
    def run_seeded(**x: Tensor) -> Any:
        torch.manual_seed(SEED)
        return call(**x)

    return run_seeded


def kept(dropout_p: float, H: int, M: int, N: int, B: int) -> Tensor:
    """The mask that the seed draws, read off the forward itself: with q = 0 every probability is
    1 / N, and v = one-hot rows show which of them survive."""
    v = torch.eye(N).view(1, N, 1, N).expand(B, N, 1, N).contiguous()
    q, k = torch.zeros(B, M, H, N), torch.zeros(B, N, 1, N)
    torch.manual_seed(SEED)
    out = tw.attention(q, k, v, dropout_p=dropout_p)
    return (out > 0).transpose(1, 2)


@on_backends
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_c172_gradient_uses_the_mask_of_the_forward(backend: str, heads: tuple[int, int]) -> None:
    B, M, N, p = 2, 70, 130, 0.3
    x = qkv(B, M, N, heads, 16) | {"bias": normal(1, heads[0], M, N, seed=4)}
    keep = kept(p, heads[0], M, N, B)
    share = float(keep.double().mean())
    assert abs(share - (1 - p)) < 0.02
    check(
        seeded(
            lambda **x: tw.attention_partial(**x, mask=tw.causal(), dropout_p=p, backend=backend)
        ),
        lambda **x: formula(**x, visible=visibility(causally, M, N), keep=keep, dropout_p=p),
        x,
    )


@in_double
@on_backends
def test_c172_finite_differences_under_one_seed(backend: str) -> None:
    x = qkv(2, 4, 6, (2, 1), 3, dtype=torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(SEED)
        return tw.attention(q, k, v, mask=tw.causal(), dropout_p=0.4, backend=backend)

    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in x.values()])


@on_backends
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_c173_checkpointing_is_neutral(backend: str, use_reentrant: bool) -> None:
    """Bits are drawn once a call from torch's generator, whose state the recomputation restores."""
    x = qkv(2, 33, 70, (4, 2), 16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(
            q, k, v, mask=tw.causal(), dropout_p=0.1, deterministic=True, backend=backend
        )

    def gradients(call: Any) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in x.values()]
        torch.manual_seed(SEED)
        out = call(*leaves)
        out.backward(normal(*out.shape))
        assert all(leaf.grad is not None for leaf in leaves)
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    plain = gradients(attend)
    again = gradients(lambda *qkv: checkpoint(attend, *qkv, use_reentrant=use_reentrant))
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)
    torch.manual_seed(SEED + 1)
    assert not torch.equal(attend(**x), plain[0])


REPEATS = 30


def repeated(call: Any, x: dict[str, Tensor]) -> Outcome:
    """Without torch's own deterministic mode, so that it is our order that is tested."""
    torch.use_deterministic_algorithms(False)
    first = run(call, x)
    for _ in range(REPEATS - 1):
        same(run(call, x), first)
    return first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_c177_thirty_backwards_are_bitwise_equal(
    dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    x = qkv(2, 150, 150, heads, 32, dtype=dtype)
    repeated(lambda **x: tw.attention(**x, mask=tw.causal(), deterministic=True), x)


def test_c178_deterministic_reaches_what_is_added_up() -> None:
    """The flag on packed documents that share one bias and slopes: many rows add to one place."""
    cu = torch.tensor([0, 40, 41, 41, 150])
    x = packed_qkv(150, 150, (4, 2), 16) | {"bias": normal(1, 1, 1, 109, seed=4)}
    x |= {"alibi_slopes": normal(4, seed=5).abs(), "sinks": normal(4, seed=6)}
    repeated(
        lambda **x: tw.attention_varlen_partial(
            **x, cu_seqlens_q=cu, mask=tw.causal(), deterministic=True
        ),
        x,
    )


@on_backends
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_c182_packed_bounds_survive_checkpointing(backend: str, dropout_p: float) -> None:
    cu = torch.tensor([0, 20, 20, 45, 60])
    x = packed_qkv(63, 63, (4, 2), 16)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"dropout_p": dropout_p, "deterministic": True, "backend": backend}
        return tw.attention_varlen(q, k, v, cu_seqlens_q=cu, mask=tw.causal(), **options)

    plain = run(seeded(attend), x)
    same(run(seeded(lambda **x: checkpoint(attend, *x.values(), use_reentrant=False)), x), plain)
    if dropout_p == 0.0:
        check(
            attend,
            lambda **x: packed_formula(**x, cu_q=cu.tolist(), cu_k=cu.tolist(), rule=causally),
            x,
        )
