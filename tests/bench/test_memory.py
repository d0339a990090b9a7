"""The memory meter against allocations whose size is known."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.bench import memory
from tilewise.bench.cases import Case
from tilewise.bench.memory import observe
from tilewise.bench.peers import EAGER, SDPA, TILEWISE, bind

CPU = torch.device("cpu")
MB = 1_000_000


def test_result_counts_and_what_was_released_before_does_not() -> None:
    def call() -> Tensor:
        first = torch.empty(3 * MB, dtype=torch.uint8)
        del first
        second = torch.empty(2 * MB, dtype=torch.uint8)
        return second

    assert observe(call, CPU).peak_bytes == 3 * MB


def test_what_is_alive_at_one_time_adds_up() -> None:
    def call() -> Tensor:
        first = torch.empty(3 * MB, dtype=torch.uint8)
        second = torch.empty(2 * MB, dtype=torch.uint8)
        return first[:1] + second[:1]

    assert 5 * MB <= observe(call, CPU).peak_bytes < 5 * MB + 1000


def test_inputs_do_not_count() -> None:
    x = torch.zeros(MB)
    assert observe(lambda: x.add_(1), CPU).peak_bytes < 1000


def test_nothing_allocated() -> None:
    assert observe(lambda: None, CPU).peak_bytes == 0


def test_what_an_op_makes_and_nobody_keeps_is_seen() -> None:
    x = torch.randn(MB)
    # Values of 4 bytes, and indices of 8 that are dropped.
    assert observe(lambda: x.sort().values, CPU).peak_bytes >= 12 * MB


def test_allocations_inside_the_registered_op_are_seen() -> None:
    q = torch.randn(1, 300, 2, 16)
    seen = observe(lambda: tilewise.attention(q, q, q, mask=tilewise.window(40, 0)), CPU)
    assert seen.ops["tilewise::attention_fwd"] == 1
    # The result, the statistics, and tiles besides.
    assert seen.peak_bytes > q.nbytes + 2 * 300 * 4


def test_backward_is_seen() -> None:
    x = torch.randn(MB, requires_grad=True)

    def call() -> Tensor:
        return torch.autograd.grad((x * 2).sum(), x)[0]

    # The product is gone when its gradient is made; sum keeps nothing but a scalar.
    assert 4 * MB <= observe(call, CPU).peak_bytes < 13 * MB


def test_scores_are_there_in_eager_and_not_in_tilewise() -> None:
    case = Case("full", 512, H=2, D=16)
    eager = observe(bind(EAGER, case, CPU), CPU).peak_bytes
    ours = observe(bind(TILEWISE, case, CPU), CPU).peak_bytes
    assert 2 * case.scores_bytes <= eager < 4 * case.scores_bytes
    assert ours < case.scores_bytes / 4


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a process reset its mark")
def test_resident_set_of_a_fresh_process_agrees() -> None:
    case = Case("full", 1024, H=4, D=16)
    seen = observe(bind(EAGER, case, CPU), CPU).peak_bytes
    resident = memory.resident_extra_bytes(EAGER.name, case, threads=1)
    # Coarse: pages that the warm-up left behind are used again.
    assert resident is not None
    assert 0.8 * seen < resident < 1.3 * seen


def test_failure_of_the_fresh_process_is_told() -> None:
    with pytest.raises(RuntimeError, match="process that measures memory failed"):
        memory.resident_extra_bytes("nobody", Case("full", 8), threads=1)


def test_available_bytes_is_below_what_the_machine_has() -> None:
    assert MB < memory.available_bytes(CPU) < 2**50


def test_available_bytes_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert memory.available_bytes(CPU) > MB


def test_sdpa_and_tilewise_handed_on_take_the_same() -> None:
    case = Case("causal", 256, H=2, D=16)
    ours, theirs = (observe(bind(p, case, CPU), CPU).peak_bytes for p in (TILEWISE, SDPA))
    assert ours <= 1.1 * theirs
