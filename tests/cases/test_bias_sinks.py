"""Cases of bias, ALiBi, sinks and predicates: each has the gradient of the very forward."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import (
    alibi,
    causally,
    check,
    everything,
    formula,
    in_double,
    is_zero,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    visibility,
    windowed,
)
from tests.helpers import UNDER_TEST, runs_kernels
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget


@on_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("left", [None, 6], ids=["causal", "window"])
def test_c160_sink_has_its_gradient(backend: str, left: int | None, dtype: torch.dtype) -> None:
    M, N = 40, 70
    x = qkv(2, M, N, (4, 2), 32, dtype=dtype) | {"sinks": normal(4, seed=4)}
    rule = causally if left is None else windowed(left, 0)
    visible = visibility(rule, M, N)

    def call(**x: Tensor) -> Tensor:
        return tw.attention(**x, mask=tw.window(left, 0), backend=backend)

    check(call, lambda **x: formula(**x, visible=visible), x)
    if runs_kernels():
        return
    # By hand, in fp64: dsink = - sum p_sink (dO . O).
    wide = {name: t.double() for name, t in x.items()}
    out, lse = formula(**wide, visible=visible)
    p_sink = torch.exp(wide["sinks"].view(1, 4, 1) - lse)
    dout = normal(2, M, 4, 32, dtype=torch.float64)
    by_hand = -(p_sink * (dout * out).sum(-1).transpose(1, 2)).sum((0, 2))
    assert_within_budget(run(call, wide).grads["sinks"], by_hand, by_hand.float())


@on_backends
@pytest.mark.parametrize("N", [0, 70])
def test_c161_loss_of_out_and_lse_with_a_sink(backend: str, N: int) -> None:
    x = qkv(2, 9, N, (4, 2), 16) | {"sinks": normal(4, seed=4)}
    got = check(
        lambda **x: tw.attention_partial(**x, mask=tw.causal(), backend=backend),
        lambda **x: formula(**x, visible=visibility(causally, 9, N)),
        x,
    )
    if N == 0:
        dlse = normal(2, 4, 9, seed=9).double().sum((0, 2))
        assert_within_budget(got.grads["sinks"], dlse, normal(2, 4, 9, seed=9).sum((0, 2)))


@on_backends
@pytest.mark.parametrize("dims", [(128, 192), (192, 192), (192, 128), (16, 24)])
def test_c162_sink_gradient_of_ragged_documents(backend: str, dims: tuple[int, int]) -> None:
    cu = [0, 7, 7, 40, 61]
    x = packed_qkv(64, 64, (4, 2), *dims) | {"sinks": normal(4, seed=4)}
    check(
        lambda **x: tw.attention_varlen_partial(
            **x, cu_seqlens_q=torch.tensor(cu), mask=tw.causal(), backend=backend
        ),
        lambda **x: packed_formula(**x, cu_q=cu, cu_k=cu, rule=causally),
        x,
    )


def every_third(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """A predicate that depends on all four indices."""
    return ((m + 2 * n + h + b) % 3 != 0) & (n <= m + 20)


@on_backends
def test_c163_predicate_reaches_the_backward(backend: str) -> None:
    x = qkv(2, 20, 35, (4, 2), 16)
    visible = tw.from_function(every_third).dense(2, 4, 20, 35, device=UNDER_TEST.device)
    by_hand = [
        [[[(m + 2 * n + h + b) % 3 != 0 and n <= m + 20 for n in range(35)] for m in range(20)]
         for h in range(4)] for b in range(2)
    ]  # fmt: skip
    assert torch.equal(visible, torch.tensor(by_hand))
    check(
        lambda **x: tw.attention_partial(
            **x, mask=tw.from_function(every_third), softcap=2.0, backend=backend
        ),
        lambda **x: formula(**x, visible=visible, softcap=2.0),
        x,
    )


@in_double
@on_backends
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_c163_gradient_by_finite_differences(backend: str, packed: bool) -> None:
    mask = tw.from_function(every_third)
    bias = normal(2, 2, 4, 4, dtype=torch.float64, seed=5)
    extra: dict[str, Any] = {"mask": mask, "softcap": 2.0, "backend": backend}
    if packed:
        x = packed_qkv(6, 6, (2, 1), 3, dtype=torch.float64)
        extra["cu_seqlens_q"] = torch.tensor([0, 2, 6])
        op: Any = tw.attention_varlen_partial
    else:
        x = qkv(2, 4, 4, (2, 1), 3, dtype=torch.float64)
        op = tw.attention_partial
    x |= {"bias": bias, "sinks": normal(2, dtype=torch.float64, seed=6)}
    x["alibi_slopes"] = normal(2, dtype=torch.float64, seed=7)
    names = list(x)
    leaves = [t.requires_grad_() for t in x.values()]

    def call(*values: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(op(**dict(zip(names, values, strict=True)), **extra))

    assert torch.autograd.gradcheck(call, leaves)


@on_backends
@pytest.mark.parametrize("per_batch", [False, True], ids=["H", "BH"])
@pytest.mark.parametrize("frozen", [False, True])
def test_c165_slopes_get_their_gradient(backend: str, per_batch: bool, frozen: bool) -> None:
    """With softcap and a window; also where q, k and v want no gradient."""
    M, N = 30, 45
    x = qkv(2, M, N, (4, 2), 16)
    slopes = normal(2, 4, seed=4).abs() if per_batch else normal(4, seed=4).abs()
    p, j = torch.arange(M).view(-1, 1) + N - M, torch.arange(N)
    visible = visibility(windowed(9, 2), M, N)

    def call(alibi_slopes: Tensor, **x: Tensor) -> tw.Partial:
        if frozen:
            x = {name: t.detach() for name, t in x.items()}
        return tw.attention_partial(
            **x, alibi_slopes=alibi_slopes, mask=tw.window(9, 2), softcap=3.0, backend=backend
        )

    def form(alibi_slopes: Tensor, **x: Tensor) -> tuple[Tensor, Tensor]:
        if frozen:
            x = {name: t.detach() for name, t in x.items()}
        return formula(**x, visible=visible, softcap=3.0, bias=alibi(alibi_slopes, p, j))

    got = check(call, form, x | {"alibi_slopes": slopes})
    assert not is_zero(got.grads["alibi_slopes"])


@on_backends
@pytest.mark.parametrize("per_batch", [False, True], ids=["H", "BH"])
def test_c165_slopes_of_packed_documents(backend: str, per_batch: bool) -> None:
    cu_q, cu_k = [0, 9, 9, 20], [0, 0, 13, 40]
    x = packed_qkv(20, 40, (4, 2), 16)
    x["alibi_slopes"] = normal(3, 4, seed=4).abs() if per_batch else normal(4, seed=4).abs()

    def form(alibi_slopes: Tensor, **x: Tensor) -> tuple[Tensor, Tensor]:
        def bias_of(b: int, p: Tensor, j: Tensor) -> Tensor:
            return alibi(alibi_slopes[b] if per_batch else alibi_slopes, p, j)

        return packed_formula(**x, cu_q=cu_q, cu_k=cu_k, rule=causally, bias_of=bias_of)

    got = check(
        lambda **x: tw.attention_varlen_partial(
            **x,
            cu_seqlens_q=torch.tensor(cu_q),
            cu_seqlens_k=torch.tensor(cu_k),
            mask=tw.causal(),
            backend=backend,
        ),
        form,
        x,
    )
    if per_batch:
        # One document has queries and no keys, one keys and no queries.
        assert is_zero(got.grads["alibi_slopes"][:2])


@in_double
@on_backends
def test_c165_slopes_under_dropout(backend: str) -> None:
    """Finite differences with the mask of one seed."""
    x = qkv(1, 4, 5, (2, 1), 3, dtype=torch.float64)
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)

    def call(slopes: Tensor) -> Tensor:
        torch.manual_seed(3)
        return tw.attention(**x, alibi_slopes=slopes, dropout_p=0.4, backend=backend)

    assert torch.autograd.gradcheck(call, (slopes,))


@on_backends
@pytest.mark.parametrize("H", [3, 6])
def test_c166_alibi_in_training_and_in_decode(backend: str, H: int) -> None:
    """Cross attention packed for training; a cache with used lengths for decode."""
    cu_q, cu_k, lengths = [0, 5, 9], [0, 12, 30], [12, 18]
    x, slopes = packed_qkv(9, 30, (H, 3), 16), 2.0 ** -torch.arange(1.0, H + 1)

    def bias_of(b: int, p: Tensor, j: Tensor) -> Tensor:
        return alibi(slopes, p, j)

    def form(**x: Tensor) -> tuple[Tensor, Tensor]:
        return packed_formula(**x, cu_q=cu_q, cu_k=cu_k, rule=everything, bias_of=bias_of)

    bounds = {"cu_seqlens_k": torch.tensor(cu_k), "alibi_slopes": slopes, "backend": backend}
    check(
        lambda **x: tw.attention_varlen_partial(**x, cu_seqlens_q=torch.tensor(cu_q), **bounds),
        form,
        x,
    )
    exact, eager = form(**{name: t.double() for name, t in x.items()}), form(**x)
    step = tw.attention_varlen_partial(
        x["q"][[4, 8]],
        x["k"],
        x["v"],
        cu_seqlens_q=torch.tensor([0, 1, 2]),
        seqused_k=torch.tensor(lengths),
        **bounds,
    )
    assert_within_budget(step.out, exact[0][[4, 8]], eager[0][[4, 8]])
    assert_lse_within_budget(step.lse, exact[1][:, [4, 8]], torch.float32)


@on_backends
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_c167_alibi_distance_is_pinned_by_the_lse(backend: str, dtype: torch.dtype) -> None:
    """q = 0 leaves the bias alone: the last query is at distance 0 of the last key, so that
    lse = log sum exp(-slope d) over d = 0 ... N - 1; one off would shift it by the slope."""
    N, slopes = 9, torch.tensor([0.5, 0.125])
    x = qkv(2, 1, N, (2, 1), 16, dtype=dtype)
    x["q"] = torch.zeros_like(x["q"])
    got = tw.attention_partial(**x, alibi_slopes=slopes, mask=tw.causal(), backend=backend)
    exact = torch.logsumexp(-slopes.double().view(2, 1) * torch.arange(N), dim=-1)
    assert_lse_within_budget(got.lse, exact.view(1, 2, 1).expand(2, 2, 1), dtype)


@on_backends
def test_c168_slopes_belong_to_the_caller(backend: str) -> None:
    """Two halves of the heads with their own slopes are the whole, as in tensor parallelism."""
    x, slopes = qkv(2, 9, 20, (8, 4), 16), 2.0 ** -torch.arange(1.0, 9)
    p, j = torch.arange(9).view(-1, 1) + 11, torch.arange(20)
    whole = tw.attention(**x, alibi_slopes=slopes, backend=backend)
    for rank in range(2):
        heads, groups = slice(4 * rank, 4 * rank + 4), slice(2 * rank, 2 * rank + 2)
        local = {"q": x["q"][:, :, heads], "k": x["k"][:, :, groups], "v": x["v"][:, :, groups]}
        bias = alibi(slopes[heads], p, j)
        got = check(
            lambda heads=heads, **x: tw.attention(**x, alibi_slopes=slopes[heads], backend=backend),
            lambda bias=bias, **x: formula(**x, visible=torch.tensor(True), bias=bias),
            local,
        )
        assert_within_budget(whole[:, :, heads], got.out.double(), got.out)
