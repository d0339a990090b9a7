"""Lengths never compile anything: what exists per configuration is counted."""

import pytest

import tilewise as tw
from tests.gpu.binaries import count_binaries, kernels
from tests.gpu.common import attention, attention_varlen, ints, packed_qkv, qkv, run

pytestmark = pytest.mark.gpu

# Aligned, odd, 1, around tiles, in no order.
LENGTHS = (
    16, 1, 64, 63, 65, 128, 17, 2, 1000, 1024, 31, 256, 257, 100, 3,
    48, 500, 129, 640, 7, 96, 777, 2048, 512, 33, 1500, 5, 320, 191, 61,
)  # fmt: skip


def test_the_kernels_are_found() -> None:
    names = [name.rpartition(".")[2] for name, _ in kernels()]
    assert any("fwd" in name for name in names)
    assert any("bwd" in name for name in names)


@pytest.mark.parametrize("form", ["causal", "intervals", "packed"])
def test_thirty_lengths_compile_each_kernel_at_most_twice(form: str) -> None:
    """Aligned and unaligned; offsets of 64 bits do not occur at these sizes."""
    assert len(set(LENGTHS)) == 30
    before = count_binaries()
    # A head dim that no other test uses, so that everything is compiled here.
    D = {"causal": 24, "intervals": 72, "packed": 56}[form]
    for N in LENGTHS:
        M = max(1, N - 3)
        if form == "packed":
            lengths = ints(0, N // 2, N)
            run(
                lambda *x, lengths=lengths: attention_varlen(
                    *x, cu_seqlens_q=lengths, mask=tw.causal()
                ),
                packed_qkv(N, N, D=D),
            )
        elif form == "causal":
            run(lambda *x: attention(*x, mask=tw.causal()), qkv(2, M, N, D=D))
        else:
            mask = tw.causal() | tw.prefix(ints(N // 2, 1))
            run(lambda *x, mask=mask: attention(*x, mask=mask), qkv(2, M, N, D=D))
    grown = count_binaries() - before
    assert grown
    assert max(grown.values()) <= 2, grown
