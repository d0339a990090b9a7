"""CUDA graphs: captured once, replayed with other contents, lengths included."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu import common
from tests.gpu.calls import CALLS
from tests.gpu.common import are_equal, attention, normal, qkv, run
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu


def captured(call: Callable[[], list[Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The graph, and the tensors that each replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@pytest.mark.parametrize("name", CALLS)
def test_replay_reads_the_tensors_of_the_moment(name: str) -> None:
    """What comes of a call that is not captured, with other lengths, other values, and both."""
    call = CALLS[name]()
    dout = torch.ones_like(call.attend(*call.leaves, call.lengths))
    graph, results = captured(
        lambda: run(lambda *x: call.attend(*x, call.lengths), call.leaves, dout)
    )
    first = call.lengths.clone()
    outs = []
    for seed, lengths in ((1, first), *((1, other) for other in call.others), (2, first)):
        with torch.no_grad():
            for i, x in enumerate((*call.leaves, dout)):
                x.copy_(normal(*x.shape, seed=10 * seed + i))
            call.lengths.copy_(lengths)
        graph.replay()
        expected = run(lambda *x: call.attend(*x, call.lengths), call.leaves, dout)
        assert are_equal(results, expected)
        outs.append(results[0].clone())
    # Also of the same q, k and v.
    assert not any(torch.equal(x, y) for i, x in enumerate(outs) for y in outs[:i])


def test_all_calls_with_lengths_are_replayed_with_others() -> None:
    assert [name for name, make in CALLS.items() if not make().others] == ["plain", "causal"]


def test_each_replay_drops_others_and_its_backward_the_same() -> None:
    """v is the unit matrix, so that out holds P after dropout, and dv its sums over queries."""
    N = 64
    q, k, _ = (x.detach() for x in qkv(2, 32, N, dtype=torch.float32))
    v = torch.eye(N, device=common.DEVICE).reshape(1, N, 1, N).expand(2, N, 2, N).contiguous()
    v.requires_grad_()
    graph, (out, dv) = captured(lambda: run(lambda v: attention(q, k, v, dropout_p=0.5), [v]))
    outs = []
    for _ in range(3):
        graph.replay()
        outs.append(out.clone())
        # dO is 1 everywhere: dv[n, e] is the sum of column n over the queries and heads of a group.
        exact = out.double().unflatten(2, (2, 2)).sum((1, 3)).transpose(1, 2)
        column = dv[..., 0]
        assert_within_budget(column, exact, exact.float(), floor=1e-5)
    assert not torch.equal(outs[0] == 0, outs[1] == 0)
    assert not torch.equal(outs[1] == 0, outs[2] == 0)
