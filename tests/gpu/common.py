"""What the GPU tests share: inputs on the device, a run with its gradients, bitwise comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import tilewise as tw

DEVICE = torch.device("cuda", 0)
BACKEND = "triton"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def qkv(
    B: int, M: int, N: int, heads: tuple[int, int] = (4, 2), D: int = 64, E: int | None = None,
    dtype: torch.dtype = torch.bfloat16, seed: int = 0,
) -> list[Tensor]:  # fmt: skip
    """q `[B, M, H, D]`, k `[B, N, G, D]`, v `[B, N, G, E]`, leaves."""
    H, G = heads
    shapes = ((B, M, H, D), (B, N, G, D), (B, N, G, E or D))
    made = [normal(*shape, dtype=dtype, seed=seed + i) for i, shape in enumerate(shapes)]
    return [x.requires_grad_() for x in made]


def packed_qkv(T: int, S: int, **options: Any) -> list[Tensor]:
    """q `[T, H, D]`, k `[S, G, D]`, v `[S, G, E]`, leaves."""
    return [x.detach()[0].requires_grad_() for x in qkv(1, T, S, **options)]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(DEVICE)


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """On the backend under test, with gradients of a fixed order."""
    return tw.attention(q, k, v, deterministic=True, backend=BACKEND, **options)


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return tw.attention_varlen(q, k, v, deterministic=True, backend=BACKEND, **options)


def run(
    call: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor | None = None
) -> list[Tensor]:
    """Out, and the gradient of every leaf."""
    out = call(*leaves)
    dout = torch.ones_like(out) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, list(leaves), dout)]


def are_equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def synchronize() -> None:
    """Wait, so that a fault of a kernel shows in the test that launched it."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)
