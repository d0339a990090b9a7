"""Cases of what surrounds an op: compile, export, vmap, autocast, devices, dtypes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import tilewise as tw
from tests.cases.common import (
    Form,
    causally,
    check,
    compiles,
    everything,
    formula,
    normal,
    on_backends,
    packed_formula,
    packed_qkv,
    qkv,
    run,
    visibility,
)
from tests.helpers import UNDER_TEST, backends
from tilewise.core.tolerance import assert_within_budget

pytestmark = compiles


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(fn: Any, **options: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="aot_eager", **options)


def causal_form(M: int, N: int, **terms: Any) -> Form:
    return lambda **x: formula(**x, visible=visibility(causally, M, N), **terms)


@pytest.mark.parametrize("op", ["attention", "attention_partial"])
def test_c236_dense_ops_are_opaque_to_compile(op: str) -> None:
    x = qkv(2, 20, 35, (4, 2), 16) | {"bias": normal(1, 4, 20, 35, seed=4)}
    call = compiled(lambda **x: tuple_of(getattr(tw, op)(**x, mask=tw.causal())))
    check(call, causal_form(20, 35), x)


@pytest.mark.parametrize("op", ["attention_varlen", "attention_varlen_partial"])
def test_c236_packed_ops_are_opaque_to_compile(op: str) -> None:
    cu = [0, 5, 5, 20]
    x = packed_qkv(22, 22, (4, 2), 16)
    call = compiled(
        lambda bounds, **x: tuple_of(getattr(tw, op)(**x, cu_seqlens_q=bounds, mask=tw.causal()))
    )
    check(
        lambda **x: call(torch.tensor(cu), **x),
        lambda **x: packed_formula(**x, cu_q=cu, cu_k=cu, rule=causally),
        x,
    )


def test_c236_splits_and_merge_are_one_graph() -> None:
    def split(q: Tensor, k: Tensor, v: Tensor) -> Any:
        parts = [
            tw.attention_partial(q, k[:, n0:n1], v[:, n0:n1], out_dtype=torch.float32)
            for n0, n1 in ((0, 11), (11, 35))
        ]
        return tuple_of(tw.merge(parts))

    x = qkv(2, 20, 35, (4, 2), 16)
    check(compiled(split), lambda **x: formula(**x, visible=torch.tensor(True)), x)


def tuple_of(result: Any) -> Any:
    return result if isinstance(result, Tensor) else tuple(result)


def test_c156_compiled_value_dim_of_its_own() -> None:
    x = qkv(1, 100, 100, (8, 4), 64, 128)
    got = check(compiled(lambda **x: tw.attention(**x, mask=tw.causal())), causal_form(100, 100), x)
    assert got.out.shape == (1, 100, 8, 128)


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(
    ("case", "shared"),
    [("c237", ()), ("c237", ("k", "v")), ("c239", ())],
)
def test_c237_c239_vmap_is_the_loop(case: str, shared: tuple[str, ...], has_mask: bool) -> None:
    """Keys and values of all, or each its own; the mask is the same for all."""
    D = 64 if case == "c239" else 16
    x = {
        name: normal(3, 2, n, h, D, seed=n)
        for name, n, h in (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
    }
    x |= {name: x[name][0] for name in shared}
    mask = tw.causal() if has_mask else tw.full()
    visible = visibility(causally if has_mask else everything, 5, 7)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention_partial(q, k, v, mask=mask)

    def mapped(**x: Tensor) -> tuple[Tensor, Tensor]:
        in_dims = tuple(None if name in shared else 0 for name in x)
        return torch.vmap(attend, in_dims)(*x.values())

    def looped(**x: Tensor) -> tuple[Tensor, Tensor]:
        x = {n: t.expand(3, -1, -1, -1, -1) if n in shared else t for n, t in x.items()}
        ones = [formula(*one, visible) for one in zip(*x.values(), strict=True)]
        return torch.stack([out for out, _ in ones]), torch.stack([lse for _, lse in ones])

    check(mapped, looped, x)


def test_c238_per_sample_gradients() -> None:
    """grad inside vmap, over rows without a batch: the gradients of each row by itself."""
    x = qkv(3, 9, 9, (4, 2), 16)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q[None], k[None], v[None], mask=tw.causal()).square().sum()

    mapped = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*x.values())
    for b in range(3):
        leaves = [t[b].detach().requires_grad_() for t in x.values()]
        alone = torch.autograd.grad(loss(*leaves), leaves)
        for got, want in zip(mapped, alone, strict=True):
            assert_within_budget(got[b], want.double(), want)


class Selected(nn.Module):
    """Attention over the rows that a bool mask keeps: their number is known only at run time."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor, keep: Tensor, extra: Tensor) -> Tensor:
        rows, given = x[keep], extra[keep]
        if self.extra == "bias":
            return tw.attention(rows, rows, rows, bias=given)
        mask = tw.causal() & tw.key_padding(given)
        return tw.attention(rows, rows, rows, mask=mask)


@pytest.mark.parametrize("extra", ["bias", "lengths"])
def test_c240_export_with_a_batch_from_the_data(extra: str) -> None:
    module, x = Selected(extra), normal(4, 8, 2, 8)
    keep = torch.tensor([True, False, True, True])
    given = normal(4, 1, 8, 8) if extra == "bias" else torch.tensor([8, 3, 5, 1])
    exported = torch.export.export(module, (x, keep, given)).module()
    for kept in ([0, 2, 3], [1], [0, 1, 2, 3]):
        keep = torch.zeros(4, dtype=torch.bool)
        keep[kept] = True
        assert torch.equal(exported(x, keep, given), module(x, keep, given))


@pytest.mark.parametrize("dynamic", [None, True])
def test_c242_few_compilations_for_any_lengths(dynamic: bool | None) -> None:
    """Batch, length and a mask that depends on the batch row change at every step."""
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=tw.causal() & tw.key_padding(lengths))

    call = torch.compile(attend, fullgraph=True, backend=counter, dynamic=dynamic)
    for B, N in ((2, 16), (3, 20), (8, 33), (5, 7), (2, 128), (4, 300)):
        lengths = torch.arange(B) * N // B
        visible = visibility(causally, N, N) & (torch.arange(N) < lengths.view(B, 1, 1, 1))
        check(
            lambda lengths=lengths, **x: call(**x, lengths=lengths),
            lambda visible=visible, **x: formula(**x, visible=visible),
            qkv(B, N, N, (4, 2), 8),
        )
    assert counter.frame_count <= 3


class Packed(nn.Module):
    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return tw.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds + 0,
            mask=tw.causal(),
            max_seqlen_k=self.longest,
        )


def test_c243_a_graph_replayed_with_longer_sequences() -> None:
    """Exported with sequences of at most 4 tokens, run with one of 11, all in one storage. A
    stated bound belongs to the graph, and its breach is an error, never a shorter sequence."""
    x = packed_qkv(12, 12, (4, 2), 8)
    short, long = torch.tensor([0, 4, 8, 12]), torch.tensor([0, 11, 11, 12])
    inputs = (*x.values(), short)
    replay = torch.export.export(Packed(None), inputs).module()
    exact, _ = packed_formula(
        **{n: t.double() for n, t in x.items()},
        cu_q=long.tolist(),
        cu_k=long.tolist(),
        rule=causally,
    )
    eager, _ = packed_formula(**x, cu_q=long.tolist(), cu_k=long.tolist(), rule=causally)
    assert_within_budget(replay(*x.values(), long), exact, eager)

    bounded = torch.export.export(Packed(4), inputs).module()
    assert torch.equal(bounded(*inputs), replay(*inputs))
    with pytest.raises(ValueError, match="max_seqlen_k is 4, but a sequence has 11"):
        bounded(*x.values(), long)


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        (backend, way)
        for backend in backends("tiled", "reference")
        for way in ("eager", "compiled")
        if (backend, way) != ("reference", "compiled")
    ],
)
def test_c246_mixed_dtypes_under_autocast(backend: str, way: str) -> None:
    x = qkv(2, 20, 35, (4, 2), 16)
    x["v"] = x["v"].to(torch.bfloat16)

    def attend(**x: Tensor) -> Tensor:
        with torch.autocast(UNDER_TEST.device, torch.bfloat16):
            return tw.attention(**x, mask=tw.causal(), backend=backend)

    got = run(
        compiled(attend) if way == "compiled" else attend,
        x,
        normal(2, 20, 4, 16, dtype=torch.bfloat16),
    )
    assert got.out.dtype == torch.bfloat16
    assert [got.grads[name].dtype for name in "qkv"] == [x[name].dtype for name in "qkv"]
    rounded = {name: t.to(torch.bfloat16) for name, t in x.items()}
    exact, eager = (
        run(
            lambda **x: causal_form(20, 35)(**x)[0],
            {name: t.to(dtype) for name, t in rounded.items()},
            normal(2, 20, 4, 16, dtype=torch.bfloat16).to(dtype),
        )
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert_within_budget(got.out, exact.out, eager.out)
    for name in "qkv":
        # The cast back to fp32 is exact: the error is that of bf16.
        grad = got.grads[name].to(torch.bfloat16)
        assert_within_budget(grad, exact.grads[name], eager.grads[name], name=name)

    with pytest.raises(ValueError, match="q, k and v must share one dtype"):
        tw.attention(**x, backend=backend)


@on_backends
def test_c248_tensors_on_two_devices(backend: str) -> None:
    x = qkv(2, 5, 7, (4, 2), 8)
    for name in ("k", "v"):
        mixed = x | {name: x[name].to("meta")}
        devices = f"q on {x['q'].device} and {name} on meta"
        with pytest.raises(ValueError, match=f"one device, got {devices}"):
            tw.attention(**mixed, backend=backend)
    with pytest.raises(ValueError, match="one device"):
        tw.attention(**x, sinks=torch.empty(4, device="meta"), backend=backend)


@on_backends
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_c232_fp8_is_refused_before_anything_runs(backend: str, dtype: torch.dtype) -> None:
    x = {name: (t * 1e-3).to(dtype) for name, t in qkv(2, 5, 7, (4, 2), 8).items()}
    with pytest.raises(
        NotImplementedError, match="is not supported by any backend yet; use float16"
    ):
        tw.attention(**x, backend=backend)
