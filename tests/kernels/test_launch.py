"""What goes into a launch: head dims in pieces, aligned rows; and launches of nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import UNDER_TEST
from tilewise.core.positions import Positions
from tilewise.dense.triton_call import align_rows, cut_dim, cut_rows
from tilewise.kernels.launch import Config, launch

from .probes import make_call

pytestmark = pytest.mark.interpreter


# 144 = 128 + 16 would be one more; no model has it.
WIDTHS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)


def test_a_head_dim_is_one_or_two_powers_of_two() -> None:
    for dim in range(1, 257):
        found, *pieces = cut_dim(dim)
        assert found == dim
        assert set(pieces) <= {16, 32, 64, 128, 256} and len(set(pieces)) == len(pieces) <= 2
        assert sum(pieces) == min(width for width in WIDTHS if width >= dim)
        assert pieces == sorted(pieces, reverse=True)


def test_shorter_pieces_cover_the_same_width() -> None:
    for dim in range(1, 257):
        found, *pieces = cut_dim(dim, 32)
        assert found == dim and set(pieces) <= {16, 32}
        assert sum(pieces) == sum(cut_dim(dim)[1:])


def test_the_head_dims_of_models() -> None:
    pieces = {80: (64, 16), 96: (64, 32), 112: (128,), 160: (128, 32), 192: (128, 64)}
    for dim, expected in pieces.items():
        assert cut_dim(dim)[1:] == expected


def test_a_head_dim_beyond_the_largest_piece_is_refused() -> None:
    with pytest.raises(ValueError):
        cut_dim(257)


def storage(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


ALIGNED: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda d: storage(2, 5, 3, 32, dtype=d),
    "heads before rows": lambda d: storage(2, 3, 5, 32, dtype=d).transpose(1, 2),
    "fused": lambda d: storage(2, 5, 3, 96, dtype=d)[..., 32:64],
    "broadcast": lambda d: storage(1, 5, 1, 32, dtype=d).expand(2, 5, 3, 32),
    "one row, a stride that is never taken": lambda d: storage(40, dtype=d)[:32].as_strided(
        (1, 1, 1, 32), (7, 5, 3, 1)
    ),
    "nothing": lambda d: storage(0, 5, 3, 16, dtype=d),
}
UNALIGNED: dict[str, Callable[[torch.dtype], Tensor]] = {
    "a dim of 8": lambda d: storage(2, 5, 3, 8, dtype=d),
    "a dim of 80 plus 1": lambda d: storage(2, 5, 3, 81, dtype=d),
    "from an odd element": lambda d: storage(2, 5, 3, 48, dtype=d)[..., 1:33],
    "odd strides": lambda d: storage(2, 5, 3, 33, dtype=d)[..., :32],
    "odd row strides": lambda d: storage(2 * 5 * 100, dtype=d).as_strided(
        (2, 5, 3, 32), (500, 100, 32, 1)
    ),
    "dims apart": lambda d: storage(2, 5, 3, 64, dtype=d)[..., ::2],
}


@pytest.mark.parametrize("make", ALIGNED.values(), ids=ALIGNED.keys())
def test_aligned_rows_are_taken_as_they_are(make: Callable[[torch.dtype], Tensor]) -> None:
    x = make(torch.bfloat16)
    assert align_rows(x) is x


@pytest.mark.parametrize("make", UNALIGNED.values(), ids=UNALIGNED.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_rows_are_copied_and_filled_up(
    make: Callable[[torch.dtype], Tensor], dtype: torch.dtype
) -> None:
    x = make(dtype)
    aligned = align_rows(x)
    assert aligned.shape[:-1] == x.shape[:-1] and aligned.dtype == x.dtype
    assert aligned.shape[-1] % 16 == 0 and aligned.shape[-1] < x.shape[-1] + 16
    assert aligned.data_ptr() % 16 == 0
    assert aligned.stride(-1) == 1 and all(stride % 16 == 0 for stride in aligned.stride()[:-1])
    assert torch.equal(aligned[..., : x.shape[-1]], x)
    assert not bool(aligned[..., x.shape[-1] :].any())
    assert align_rows(aligned) is aligned


def test_results_have_aligned_rows_and_are_cut() -> None:
    for dim, padded in ((16, 16), (17, 32), (80, 80), (81, 96)):
        call = make_call(tw.full(), Positions(2, 3, 5, 5))
        rows = call.new_rows((2, 5, 3, dim), torch.float16)
        assert rows.shape == (2, 5, 3, padded)
        assert align_rows(rows) is rows
        cut = cut_rows(rows, dim)
        assert cut.shape == (2, 5, 3, dim) and cut.is_contiguous()
        assert (cut is rows) == (dim == padded)


# ---------------------------------------------------------------- nothing to run


class NeverRun:
    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError(f"launched with {grid}")


@pytest.mark.parametrize("grid", [(0,), (0, 3), (3, 0)])
def test_a_grid_of_nothing_is_not_launched(grid: tuple[int, ...]) -> None:
    launch(NeverRun(), grid, Config(16, 16, 4, 1), (), torch.empty(0).device)
    with pytest.raises(AssertionError, match="launched"):
        launch(NeverRun(), (1,), Config(16, 16, 4, 1), (), torch.empty(0).device)


MASKS = {
    "band": lambda: tw.causal(),
    "padded": lambda: tw.key_padding(3),
    "intervals": lambda: tw.chunked(3),
    "bits": lambda: tw.from_function(lambda b, h, m, n: n <= m),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize(("B", "M", "N"), [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)])
def test_calls_of_nothing(mask: Callable[[], tw.Mask], B: int, M: int, N: int) -> None:
    q = torch.randn(B, M, 2, 16, requires_grad=True)
    k, v = (torch.randn(B, N, 1, 16, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"bias": torch.zeros(1, 2, M, N, requires_grad=True)}
    out, lse = tw.attention_partial(q, k, v, mask=mask(), **options, backend=UNDER_TEST.backend)
    assert torch.equal(out, torch.zeros(B, M, 2, 16))
    assert torch.equal(lse, torch.full((B, 2, M), -torch.inf))
    leaves = [q, k, v, options["bias"]]
    gradients = torch.autograd.grad([out, lse], leaves, [torch.ones_like(x) for x in (out, lse)])
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert torch.equal(gradient, torch.zeros_like(leaf))


@pytest.mark.parametrize(("T", "S"), [(0, 0), (0, 6), (5, 0), (5, 6)])
def test_packed_calls_of_no_documents(T: int, S: int) -> None:
    q = torch.randn(T, 2, 16, requires_grad=True)
    k, v = (torch.randn(S, 1, 16, requires_grad=True) for _ in range(2))
    none = torch.zeros(1, dtype=torch.int32)
    out = tw.attention_varlen(
        q, k, v, cu_seqlens_q=none, cu_seqlens_k=none, backend=UNDER_TEST.backend or "auto"
    )
    assert torch.equal(out, torch.zeros(T, 2, 16))
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert not bool(gradient.any())
