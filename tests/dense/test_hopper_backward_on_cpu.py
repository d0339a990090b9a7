"""The hopper backward's kernels, their own source run on the CPU: gradients, and the protocol.

Roles take turns in any order and at any pace, see `tests/hopper_emulator.py`. Up to head dim 64 a
third warp group adds up dQ; up to 128 consumers take turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.helpers import check_call
from tilewise.core.mask import Mask
from tilewise.core.tolerance import assert_within_budget
from tilewise.dense import choice, warm
from tilewise.dense.api import attention_partial_backward

pytest.importorskip("triton")

from tests.hopper_emulator import emulated as _emulated

pytestmark = pytest.mark.slow

emulated = partial(_emulated, is_strict=True)
FULL = tw.full()
BF16, FP16 = torch.bfloat16, torch.float16
KEYS, QUERIES, FINISH = (
    f"_attention_bwd_hopper_{name}kernel" for name in ("", "query_", "finish_")
)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a Hopper GPU with three processors."""
    from tilewise.dense import hopper_call
    from tilewise.kernels import launch

    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    monkeypatch.setattr(choice, "hopper_problem", lambda device: "")
    monkeypatch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
    monkeypatch.setattr(hopper_call, "_multiprocessors", lambda device: 3)
    warm._kept.clear()
    yield
    warm._kept.clear()


def normal(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw(
    B: int, M: int, N: int, heads: tuple[int, int], D: int, E: int = 0, dtype: torch.dtype = BF16
) -> dict[str, Tensor]:
    H, G = heads
    shapes = {"q": (B, M, H, D), "k": (B, N, G, D), "v": (B, N, G, E or D)}
    return {name: normal(*shapes[name], dtype=dtype, seed=i) for i, name in enumerate(shapes)}


def packed(heads: tuple[int, int], D: int, rows: int, keys: int) -> dict[str, Tensor]:
    drawn = draw(1, rows, keys, heads, D)
    return {name: x[0] for name, x in drawn.items()}


def gradients(tensors: dict[str, Tensor], dout: Tensor, seed: int, **options: Any) -> list[Tensor]:
    """Of attention, or of packed attention."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
    op = tw.attention if leaves[0].dim() == 4 else tw.attention_varlen
    with emulated(seed) as names:
        out = op(*leaves, backend="hopper", **options)
        found = torch.autograd.grad(out, leaves, dout)
    assert KEYS in names
    return list(found)


# ---------------------------------------------------------------- shapes and masks


@dataclass(frozen=True)
class Call:
    M: int
    N: int
    heads: tuple[int, int] = (1, 1)
    mask: Mask = FULL
    dtype: torch.dtype = BF16

    def __str__(self) -> str:
        return f"M {self.M}, N {self.N}, heads {self.heads}"


# Blocks of rows that a tile visits: 0, 1, 2, ..., of one head and of several.
CALLS = (
    Call(1, 129, (3, 1), tw.causal()),
    Call(63, 200, dtype=FP16),
    Call(64, 300, (2, 1), tw.window(70, 0)),
    Call(65, 129, (3, 1)),
    Call(129, 200, (2, 2), tw.window(40, 3), FP16),
    Call(200, 300, mask=tw.causal()),
    Call(300, 200, mask=tw.causal()),
    Call(300, 300, (3, 1), tw.causal()),
    Call(200, 300, mask=tw.causal(offset=-400)),
    Call(300, 130),
)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_gradients(call: Call, D: int) -> None:
    tensors = draw(1, call.M, call.N, call.heads, D, dtype=call.dtype)
    with emulated(call.M + D) as names:
        check_call("attention", tensors, backend="hopper", mask=call.mask)
    assert KEYS in names and FINISH in names


@pytest.mark.parametrize(("D", "E"), [(40, 64), (64, 128), (128, 48), (96, 80)])
def test_other_head_dims(D: int, E: int) -> None:
    with emulated(D) as names:
        check_call("attention", draw(2, 70, 200, (2, 1), D, E), backend="hopper", mask=tw.causal())
    assert KEYS in names


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0, "alibi_slopes": torch.tensor([0.1, 0.3])},
        {"mask": tw.causal() & tw.key_padding(torch.tensor([0, 130]))},
        {"mask": tw.causal() & tw.documents(torch.tensor([0, 3, 150, 200]))},
    ],
    ids=["softcap and slopes", "padding", "documents"],
)
def test_terms_and_masks_of_lengths(options: dict[str, Any], D: int) -> None:
    with emulated(D) as names:
        check_call("attention", draw(2, 70, 200, (2, 1), D), backend="hopper", **options)
    assert KEYS in names


@pytest.mark.parametrize("D", [64, 128])
def test_without_dq(D: int) -> None:
    """dQ by programs that own its rows."""
    tensors = draw(1, 130, 200, (2, 1), D)
    with emulated(D) as names:
        check_call(
            "attention", tensors, backend="hopper", mask=tw.window(90, 0), deterministic=True
        )
    assert KEYS in names and QUERIES in names and FINISH not in names


# ---------------------------------------------------------------- placements


CU_Q, CU_K = (0, 1, 1, 64, 129, 200), (0, 7, 70, 134, 134, 300)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("mask", [tw.causal(), tw.window(40, 3)], ids=["causal", "window"])
def test_packed_documents(mask: Mask, D: int) -> None:
    cu = {"cu_seqlens_q": torch.tensor(CU_Q), "cu_seqlens_k": torch.tensor(CU_K)}
    lengths = {name: x.to(torch.int32) for name, x in cu.items()}
    with emulated(D) as names:
        check_call(
            "attention_varlen_partial", packed((2, 1), D, 200, 300), backend="hopper", mask=mask,
            **lengths,
        )  # fmt: skip
    assert KEYS in names


@pytest.mark.parametrize("D", [64, 128])
def test_what_is_not_in_use_does_not_exist(D: int) -> None:
    """NaN beyond used lengths changes nothing, and gets no gradient."""
    tensors, dout = packed((2, 1), D, 205, 310), normal(205, 2, D, seed=9)
    used_q, used_k = (1, 0, 60, 0, 70), (7, 5, 63, 0, 140)
    options = {
        "cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "seqused_q": used_q, "seqused_k": used_k,
    }  # fmt: skip
    lengths = {name: torch.tensor(x, dtype=torch.int32) for name, x in options.items()}
    rows, keys = torch.ones(205, dtype=torch.bool), torch.ones(310, dtype=torch.bool)
    for free, cu, used in ((rows, CU_Q, used_q), (keys, CU_K, used_k)):
        for first, n in zip(cu[:-1], used, strict=True):
            free[first : first + n] = False
    expected = gradients(tensors, dout, 5, mask=tw.causal(), **lengths)
    for x, free in ((tensors["q"], rows), (tensors["k"], keys), (tensors["v"], keys), (dout, rows)):
        x[free] = float("nan")
    found = gradients(tensors, dout, 6, mask=tw.causal(), **lengths)
    for got, wanted, free in zip(found, expected, (rows, keys, keys), strict=True):
        assert torch.equal(got, wanted) and not got[free].any()
    whole = {name: x.nan_to_num(0.0) for name, x in tensors.items()}
    with emulated(7):
        check_call("attention_varlen", whole, backend="hopper", mask=tw.causal(), **lengths)


@pytest.mark.parametrize("D", [64, 80, 128])
def test_pieces_add_into_buffers(D: int) -> None:
    q, k, v = x = list(draw(1, 130, 330, (2, 1), D).values())
    dout = normal(*q.shape, seed=9)

    def differentiate(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in x]
        out = tw.attention(*leaves, mask=tw.causal(), backend="reference")
        return torch.autograd.grad(out, leaves, dout.to(dtype))

    out, lse = tw.attention_partial(*(t.float() for t in x), mask=tw.causal(), backend="tiled")
    delta = (dout.float() * out).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.ones(t.transpose(1, 2).shape).transpose(1, 2) for t in x)
    with emulated(D) as names:
        for some in (slice(0, 150), slice(150, 330)):
            attention_partial_backward(
                dout, q, k[:, some], v[:, some], lse, delta,
                dq=dq, dk=dk[:, some], dv=dv[:, some], mask=tw.causal(), q_start=200,
                k_start=some.start, backend="hopper",
            )  # fmt: skip
    assert names.count(KEYS) == 2
    for got, exact in zip((dq, dk, dv), differentiate(torch.float64), strict=True):
        # As far off as a sum of products of bf16 may be.
        assert_within_budget((got - 1).to(BF16), exact, exact.to(BF16))


# ---------------------------------------------------------------- the order of things


@pytest.mark.parametrize("heads", [(1, 1), (3, 1)])
@pytest.mark.parametrize("D", [64, 128])
def test_any_order_of_roles_and_copies_gives_the_same_bits(D: int, heads: tuple[int, int]) -> None:
    tensors = draw(1, 200, 129, heads, D)
    dout = normal(1, 200, heads[0], D, seed=9)
    options = {"mask": tw.window(100, 0)}
    expected = gradients(tensors, dout, 100, **options)
    for seed in range(4):
        found = gradients(tensors, dout, seed, **options)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("kernel", [KEYS, FINISH])
def test_a_launch_that_begins_early_has_to_wait(
    kernel: str, D: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the launch before writes is NaN until then, and so is what would come of it."""
    from tests import hopper_emulator

    x, dout = draw(1, 70, 200, (1, 1), D), normal(1, 70, 1, D, seed=9)
    assert all(grad.isfinite().all() for grad in gradients(x, dout, D))
    wait, emulate = hopper_emulator._wait_for_last, hopper_emulator.emulate

    def emulate_hasty(launched: Any, *arguments: Any, **options: Any) -> None:
        is_hasty = launched.__name__ == kernel
        monkeypatch.setattr(
            hopper_emulator, "_wait_for_last", (lambda: None) if is_hasty else wait
        )  # fmt: skip
        emulate(launched, *arguments, **options)

    monkeypatch.setattr(hopper_emulator, "emulate", emulate_hasty)
    assert any(grad.isnan().any() for grad in gradients(x, dout, D))


@pytest.mark.parametrize("n_keys", [300, 1000])
def test_a_counter_is_left_as_it_was(n_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of one stream share it. Of 300 keys each tile has its program."""
    from tilewise.dense import hopper_call

    counter = torch.zeros(4, dtype=torch.int32)
    monkeypatch.setattr(hopper_call, "_counter", lambda device: counter)
    x, dout = draw(1, 70, n_keys, (1, 1), 64), normal(1, 70, 1, 64, seed=9)
    expected = gradients(x, dout, 1)
    assert not counter.any()
    assert all(map(torch.equal, gradients(x, dout, 1), expected)) and not counter.any()
