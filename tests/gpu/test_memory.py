"""Memory grows with the length and not with its square, but for lists of tiles, which are small."""

import gc

import pytest
import torch

import tilewise as tw
from tests.gpu.common import BACKEND, DEVICE, ints, packed_qkv, qkv

pytestmark = pytest.mark.gpu
H, D = 8, 64


def peak_bytes(N: int, form: str, *, is_backward: bool, H: int = H, D: int = D) -> int:
    """The most memory beyond what was there before the call, or before its backward."""
    if form == "packed":
        leaves = packed_qkv(N, N, heads=(H, H), D=D)
        options = {"cu_seqlens_q": ints(0, N // 3, N)}
    else:
        leaves, options = qkv(1, N, N, heads=(H, H), D=D), {}
    op = tw.attention_varlen if form == "packed" else tw.attention
    mask = tw.causal() | tw.prefix(ints(64)) if form == "intervals" else tw.causal()

    def forward() -> torch.Tensor:
        return op(*leaves, mask=mask, backend=BACKEND, **options)

    # Compiling and tables of the first call are not what is measured.
    torch.autograd.grad(forward().sum(), leaves)
    out = forward() if is_backward else None
    torch.cuda.synchronize()
    # What other tests left behind must not be freed meanwhile.
    gc.collect()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    if out is None:
        forward()
    else:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize("form", ["causal", "intervals", "packed"])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_memory_is_linear(form: str, is_backward: bool) -> None:
    N = 16384
    half, whole = (peak_bytes(n, form, is_backward=is_backward) for n in (N // 2, N))
    output_bytes = N * H * D * 2
    # Forward: out, as much again for the backward, and lse; backward: dout, three gradients and
    # fp32 sums of them.
    assert output_bytes <= whole <= (12 if is_backward else 3) * output_bytes
    assert whole <= 2.1 * half


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_lists_of_tiles_show_and_are_small(is_backward: bool) -> None:
    """Four bytes for a pair of tiles, in a list for each kind of program; the small head dim keeps
    results out of the way. tests/compile counts the entries."""
    N = 1 << 17
    extra = peak_bytes(N, "intervals", is_backward=is_backward, H=1, D=16)
    extra -= peak_bytes(N, "causal", is_backward=is_backward, H=1, D=16)
    largest, smallest = (4 * N * N // (block * 64) for block in (32, 128))
    lists = 2 if is_backward else 1
    # The intervals themselves, and what they are sorted in.
    linear = 400 * N
    assert smallest <= extra <= lists * largest + linear < N * N // 8
