"""torch.func's transforms around dense attention: each is what a loop of plain calls gives."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.helpers import on_backend
from tilewise.core.tolerance import assert_within_budget
from tilewise.dense import mapped

attention = on_backend(tw.attention)

V, B, M, N, H, G, D = 3, 2, 5, 7, 4, 2, 16
# What depends on the mapped axis, by name, and what is the same for all.
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "lengths of all": ({}, {"lengths": torch.tensor([7, 3])}),
    "lengths of each": ({"lengths": torch.tensor([[7, 3], [1, 5], [0, 7]])}, {}),
    "bias of all": ({}, {"bias": torch.randn(1, H, M, N)}),
    "bias by row": ({}, {"bias": torch.randn(B, 1, M, N)}),
    "bias of each": ({"bias": torch.randn(V, 1, H, M, N)}, {}),
    "sinks and slopes of each": (
        {"sinks": torch.randn(V, H), "alibi_slopes": torch.rand(V, B, H)}, {}
    ),
    "slopes of all": ({}, {"alibi_slopes": torch.rand(H), "sinks": torch.randn(H)}),
}  # fmt: skip


def loss(given: dict[str, Tensor]) -> Tensor:
    terms = dict(given)
    mask = tw.causal()
    if "lengths" in terms:
        mask = mask & tw.key_padding(terms.pop("lengths"))
    return attention(terms.pop("q"), terms.pop("k"), terms.pop("v"), mask=mask, **terms)


def tensors() -> dict[str, Tensor]:
    sizes = {"q": (M, H), "k": (N, G), "v": (N, G)}
    return {name: torch.randn(V, B, *size, D) for name, size in sizes.items()}


@pytest.mark.parametrize("name", CALLS)
def test_vmap_of_outputs_and_gradients(name: str) -> None:
    """The mapped gradient of a bias or sink shared by all is one for each, too."""
    each, shared = ({n: x.to(torch.get_default_device()) for n, x in part.items()}
                    for part in CALLS[name])  # fmt: skip
    each = tensors() | each
    learned = [n for n in (*each, *shared) if n != "lengths"]

    def both(given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        rest = {n: x for n, x in given.items() if n not in learned}

        def scalar(leaves: dict[str, Tensor]) -> Tensor:
            return loss(leaves | rest).square().sum()

        return loss(given), torch.func.grad(scalar)({n: given[n] for n in learned})

    in_dims = ({**dict.fromkeys(each, 0), **dict.fromkeys(shared, None)},)
    out, gradients = torch.vmap(both, in_dims)(each | shared)
    for i in range(V):
        one = {n: x[i] for n, x in each.items()} | shared
        leaves = {n: x.detach().requires_grad_(n in learned) for n, x in one.items()}
        alone = loss(leaves)
        wanted = torch.autograd.grad(alone.square().sum(), [leaves[n] for n in learned])
        assert_within_budget(out[i], alone.detach().double(), alone.detach(), name="out")
        for n, want in zip(learned, wanted, strict=True):
            # Rows that are folded into one call meet other tiles, which add up in another order.
            floor = 16 * float(want.abs().max()) * torch.finfo(want.dtype).eps
            assert_within_budget(gradients[n][i], want.double(), want, name=n, floor=floor)


def test_a_plain_axis_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a loop, which would be right and slow."""
    monkeypatch.delattr(mapped, "_one_by_one")
    each = tensors()
    wanted = torch.stack([loss({n: x[i] for n, x in each.items()}) for i in range(V)])
    out = torch.vmap(loss)(each)
    assert_within_budget(out, wanted.double(), wanted)


def test_other_axes_and_nested_maps() -> None:
    each = tensors()
    out = torch.vmap(loss)(each)
    last = {n: x.movedim(0, -1) for n, x in each.items()}
    assert torch.equal(torch.vmap(loss, in_dims=-1, out_dims=1)(last), out.movedim(0, 1))

    def row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q[None], k[None], v[None], mask=tw.causal())[0]

    twice = torch.vmap(torch.vmap(row))(*each.values())
    assert_within_budget(twice, out.double(), out)


def test_packed_calls_and_partials() -> None:
    cu = torch.tensor([0, 2, 5])

    def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention_varlen_partial(q, k, v, cu_seqlens_q=cu, mask=tw.causal())

    qkv = [torch.randn(V, 5, heads, D) for heads in (H, G, G)]
    out, lse = torch.vmap(packed)(*qkv)
    for i in range(V):
        alone = packed(*(x[i] for x in qkv))
        assert torch.equal(out[i], alone[0]) and torch.equal(lse[i], alone[1])


def test_vjp_and_functional_call_over_stacked_parameters() -> None:
    """An ensemble: the parameters are mapped, the inputs are not."""
    layer = torch.nn.Linear(D, 3 * D)
    x = torch.randn(B, M, D)

    def model(parameters: dict[str, Tensor]) -> Tensor:
        qkv = torch.func.functional_call(layer, parameters, (x,)).unflatten(-1, (3, H, D // H))
        return attention(*qkv.unbind(2), mask=tw.causal()).square().sum()

    stacked = {n: torch.stack([p.detach() * f for f in (1.0, 0.5, -2.0)])
               for n, p in layer.named_parameters()}  # fmt: skip
    values, gradients = torch.vmap(torch.func.grad_and_value(model))(stacked)[::-1]
    for i in range(V):
        leaves = {n: p[i].clone().requires_grad_() for n, p in stacked.items()}
        value = model(leaves)
        floor = 16 * float(value.detach().abs()) * torch.finfo(value.dtype).eps
        assert_within_budget(values[i], value.detach().double(), value.detach(), floor=floor)
        wanted = torch.autograd.grad(value, list(leaves.values()))
        for n, want in zip(leaves, wanted, strict=True):
            floor = 16 * float(want.abs().max()) * torch.finfo(want.dtype).eps
            assert_within_budget(gradients[n][i], want.double(), want, name=n, floor=floor)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_follows_the_randomness_asked_for(randomness: str) -> None:
    q, k, v = (x[0].expand(V, -1, -1, -1, -1) for x in tensors().values())
    out = torch.vmap(lambda *x: attention(*x, dropout_p=0.5), randomness=randomness)(q, k, v)
    assert torch.equal(out[0], out[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda *x: attention(*x, dropout_p=0.5))(q, k, v)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_transform_never_loses_the_gradient(fullgraph: bool) -> None:
    """Dynamo cannot trace it and says so, in other words from release to release."""

    def per_sample(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grad = torch.func.grad(lambda q, k, v: attention(q, k, v).square().sum())
        return torch.vmap(grad)(q, k, v)

    x = tuple(tensors().values())
    torch._dynamo.reset()
    try:
        got = torch.compile(per_sample, backend="eager", fullgraph=fullgraph)(*x)
    except Exception as error:
        is_dynamos = type(error).__module__.startswith("torch._dynamo")
        assert is_dynamos or isinstance(error, AssertionError)
        return
    assert torch.equal(got, per_sample(*x))


def test_second_derivatives_raise() -> None:
    q, k, v = (x[0] for x in tensors().values())

    def norm(q: Tensor) -> Tensor:
        slope = torch.func.grad(lambda q: attention(q, k, v).square().sum())
        return slope(q).square().sum()

    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.func.grad(norm)(q)


def check_alike(found: Sequence[Tensor], alone: Sequence[Tensor]) -> None:
    """Up to the order of sums, which a batch may change."""
    for got, want in zip(found, alone, strict=True):
        floor = 16 * float(want.abs().max()) * torch.finfo(want.dtype).eps
        assert_within_budget(got, want.double(), want, floor=floor)


def leaves(dtype: torch.dtype) -> list[Tensor]:
    return [x[0].to(dtype).requires_grad_() for x in tensors().values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mapped_backward_recomputes_a_checkpoint(dtype: torch.dtype) -> None:
    """The forward saved as a plain call does; under vmap it is run again as a mapped one."""
    qkv = leaves(dtype)
    upstream = torch.randn(V, B, M, H, D).to(dtype)
    out = checkpoint(attention, *qkv, use_reentrant=False)
    found = torch.vmap(lambda w: torch.autograd.grad(out, qkv, w, retain_graph=True))(upstream)
    for i in range(V):
        alone = torch.autograd.grad(attention(*qkv), qkv, upstream[i])
        check_alike([x[i] for x in found], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_traced_gradient_is_mapped(dtype: torch.dtype) -> None:
    """What was traced holds the ops themselves, of 16 bits the one that keeps O in two parts."""
    traced = make_fx(lambda *x: torch.autograd.grad(attention(*x).sum(), x))(*leaves(dtype))
    given = [x.to(dtype) for x in tensors().values()]
    found = torch.vmap(traced)(*given)
    for i in range(V):
        check_alike([x[i] for x in found], traced(*(x[i] for x in given)))


def test_the_rules_are_there_before_the_first_transform() -> None:
    program = """
import torch, tilewise as tw
x = [torch.randn(1, 4, 1, 8).requires_grad_() for _ in range(3)]
out = tw.attention(*x)
torch.vmap(lambda w: torch.autograd.grad(out, x, w, retain_graph=True))(torch.randn(2, 1, 4, 1, 8))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
