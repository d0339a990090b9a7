"""Nothing in a forward or backward waits for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu.calls import CALLS
from tests.gpu.common import BACKEND, attention, ints, qkv, run

pytestmark = [
    pytest.mark.gpu,
    # torch's own, at the first switch.
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_itself_notices() -> None:
    x = torch.zeros(1, device="cuda")
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.item()


@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward_do_not_wait(name: str) -> None:
    call = CALLS[name]()
    # Compiling and loading a kernel may wait.
    run(lambda *x: call.attend(*x, call.lengths), call.leaves)
    dout = torch.ones_like(call.leaves[0])
    with waiting_is_an_error():
        run(lambda *x: call.attend(*x, call.lengths), call.leaves, dout)


@pytest.mark.parametrize("what", ["dropout", "piece"])
def test_other_forms_do_not_wait(what: str) -> None:
    leaves = qkv(2, 150, 200)
    starts = ints(3, 40)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if what == "dropout":
            return attention(q, k, v, mask=tw.causal(), dropout_p=0.2)
        at = {"q_start": starts, "k_start": starts}
        return tw.attention_partial(q, k, v, mask=tw.causal(), **at, backend=BACKEND).out

    run(call, leaves)
    with waiting_is_an_error():
        run(call, leaves)
