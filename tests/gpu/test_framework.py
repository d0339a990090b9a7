"""torch.compile, autocast, checkpointing and export around the kernels."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import tilewise as tw
from tests.gpu.binaries import count_binaries
from tests.gpu.common import (
    DEVICE,
    are_equal,
    attention,
    attention_varlen,
    ints,
    normal,
    packed_qkv,
    qkv,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    # Said by Inductor of its own products, and by Dynamo of a function that it makes (torch 2.11).
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_auto_takes_the_kernels_and_double_the_tiles() -> None:
    q, k, v = qkv(1, 20, 300)
    major, minor = torch.cuda.get_device_capability(DEVICE)
    name = tw.explain_backend(q, k, v).name
    assert name == ("hopper" if (major, minor) == (9, 0) else "triton")
    assert torch.equal(tw.attention(q, k, v), tw.attention(q, k, v, backend=name))
    assert tw.explain_backend(q.double(), k.double(), v.double()).name == "tiled"


def padded(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """With something before and after, for Inductor to fuse."""
    q = q * 1.0
    return attention(q, k, v, mask=tw.causal() & tw.key_padding(lengths), softcap=5.0) * 1.0


def packed(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    return attention_varlen(q * 1.0, k, v, cu_seqlens_q=lengths, mask=tw.window(90, 0)) * 1.0


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
def test_compiled_once_for_all_lengths(is_packed: bool) -> None:
    counter = CompileCounterWithBackend("inductor")
    form = packed if is_packed else padded
    call = torch.compile(form, fullgraph=True, dynamic=True, backend=counter)
    counts, frames = [], []
    for N in (160, 320, 480, 1600, 33, 257, 1001):
        leaves = packed_qkv(N, N) if is_packed else qkv(2, N, N)
        lengths = ints(0, N // 3, N) if is_packed else ints(N, N // 3)
        dout = normal(*leaves[0].shape, seed=5)
        got = run(lambda *x, lengths=lengths: call(*x, lengths), leaves, dout)
        expected = run(lambda *x, lengths=lengths: form(*x, lengths), leaves, dout)
        assert are_equal(got, expected)
        counts.append(count_binaries())
        frames.append(counter.frame_count)
    assert set(frames) == {frames[0]} and frames[0] > 0
    # The first length is aligned, 33 is not; after both every kernel is there.
    assert counts[3] == counts[0]
    assert counts[-1] == counts[4]


def test_compiled_dropout_is_dropped_alike_in_the_backward() -> None:
    """v is the unit matrix, so that the kept entries of P are those of out, and of dv."""
    N = 64
    q, k, _ = (x.detach() for x in qkv(1, 1, N, heads=(1, 1), dtype=torch.float32))
    v = torch.eye(N, device=DEVICE).reshape(1, N, 1, N).contiguous().requires_grad_()
    call = torch.compile(lambda v: attention(q, k, v, dropout_p=0.5), fullgraph=True)
    out, dv = run(call, [v])
    kept = out[0, 0, 0] != 0
    assert 0 < int(kept.sum()) < N
    assert torch.equal(dv[0, :, 0, 0] != 0, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_all_three_alike(dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 100, 130, dtype=torch.float32)
    mixed = [q, k, v.detach().to(dtype).requires_grad_()]

    def call(*x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=dtype):
            return attention(*x, mask=tw.causal())

    got = run(call, mixed, normal(2, 100, 4, 64, dtype=dtype))
    assert got[0].dtype == dtype
    assert torch.equal(got[0], attention(*(x.to(dtype) for x in mixed), mask=tw.causal()))
    assert [x.dtype for x in got[1:]] == [x.dtype for x in mixed]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_the_same_dropout(use_reentrant: bool) -> None:
    leaves = qkv(2, 100, 130)

    def block(*x: Tensor) -> Tensor:
        return attention(*x, mask=tw.causal(), dropout_p=0.4)

    def gradients(call: object) -> list[Tensor]:
        copies = [x.detach().clone().requires_grad_() for x in leaves]
        torch.manual_seed(1)
        call(*copies).square().sum().backward()
        return [x.grad for x in copies]

    plain = gradients(block)
    again = gradients(lambda *x: checkpoint(block, *x, use_reentrant=use_reentrant))
    assert are_equal(plain, again)


class Model(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        mask = tw.causal() & tw.key_padding(lengths)
        return tw.attention(q, k, v, mask=mask)


def test_export_runs_the_kernels() -> None:
    inputs = (*(x.detach() for x in qkv(2, 100, 100)), ints(100, 30))
    exported = torch.export.export(Model(), inputs)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert any("tilewise.attention_fwd" in target for target in targets)
    shorter = (*inputs[:3], ints(7, 99))
    for given in (inputs, shorter):
        assert torch.equal(exported.module()(*given), Model()(*given))


def test_compiled_into_graphs_of_torchs_own() -> None:
    """Two layers in "reduce-overhead", trained: warmed up, recorded, and replayed on new values."""
    q, k, v = qkv(1, 256, 256)

    def two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # On the fastest backend: of it the graphs know nothing but q, k, v and out.
        first = tw.attention(q * 1.0, k, v, mask=tw.causal())
        return tw.attention(first, k, v) * 1.0

    compiled = torch.compile(two, mode="reduce-overhead", fullgraph=True)
    for step in range(6):
        with torch.no_grad():
            for i, x in enumerate((q, k, v)):
                x.copy_(normal(*x.shape, seed=10 * step + i))
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(q, k, v), two(q, k, v))
        torch.compiler.cudagraph_mark_step_begin()
        out = compiled(q, k, v)
        assert torch.equal(out, two(q, k, v))
        gradients = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert all(bool(x.isfinite().all()) for x in gradients)
