"""What a first call compiles, and when: a backward's kernels beside the forward's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import tilewise as tw
from tests.compile import offline
from tilewise.dense import ahead
from tilewise.kernels import launch
from tilewise.kernels.launch import Launch


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    found: list[Launch] = []
    monkeypatch.setattr(ahead, "compile_ahead", lambda launches, _: found.extend(launches))
    ahead._begun.clear()
    yield found
    ahead._begun.clear()


def specialized(launch: Any) -> str:
    """Which binary a launch takes."""
    made = offline.Launch(launch.kernel, launch.config, tuple(launch.arguments))
    return offline._specialize(made, "sm_90")[0]


CU = torch.tensor([0, 100, 256], dtype=torch.int32)
CALLS: dict[str, tuple[dict[str, Any], int, int]] = {
    "full": ({}, 256, 128),
    "causal": ({"mask": tw.causal()}, 256, 128),
    "few keys": ({"mask": tw.causal()}, 64, 64),
    "softcap": ({"softcap": 30.0, "mask": tw.window(64, 0)}, 256, 80),
    "documents": ({"mask": tw.documents(CU) & tw.causal()}, 256, 128),
    "wide": ({}, 256, 256),
    "unaligned": ({}, 256, 100),
    "deterministic": ({"deterministic": True}, 256, 64),
    "sequences of a length": ({"mask": tw.key_padding(torch.tensor([200]))}, 256, 64),
}


@pytest.mark.parametrize(("options", "N", "D"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_forward_that_learns_begins_with_all_of_its_backward(
    options: dict[str, Any], N: int, D: int, backend: str, groups: int, begun: list[Launch]
) -> None:
    q, k, v = (torch.zeros(1, N, H, D, dtype=torch.bfloat16) for H in (2, 2 // groups, 2 // groups))
    with offline.recorded("sm_90") as records:
        tw.attention(q, k, v, backend=backend, **options)
        assert not begun
        out = tw.attention(q.requires_grad_(), k, v, backend=backend, **options)
        expected = {specialized(x) for x in begun}
        records.clear()
        out.backward(torch.zeros_like(out))
        needed = {specialized(x) for x in records if not x.name.startswith("place_")}
        assert needed and needed <= expected
        # Each kind of call once.
        begun.clear()
        tw.attention(q, k, v, backend=backend, **options)
        assert not begun


def test_a_backward_waits_for_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own, and what fails there is the launch's to say."""
    threads, go = [], threading.Event()

    def compile_slowly(launches: Any, device: Any, *, loads: bool) -> None:
        go.wait(10)
        threads.append((threading.current_thread(), loads))
        raise RuntimeError("no compiler")

    monkeypatch.setattr(launch, "compile_together", compile_slowly)
    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    launch.compile_ahead([], torch.device("cuda", 0))
    assert not threads
    go.set()
    launch.finish_ahead()
    ((thread, loads),) = threads
    assert thread is not threading.current_thread() and not loads
    assert not launch._ahead


def test_what_is_compiled_together_is_all_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stands in series: not what makes delta either."""
    together: list[list[str]] = []

    def record(launches: Any, device: Any) -> None:
        together.append([x.kernel.__name__ for x in launches])

    monkeypatch.setattr("tilewise.dense.triton_call.compile_together", record)
    q, k, v = (torch.zeros(1, 256, 2, 128, dtype=torch.bfloat16).requires_grad_() for _ in "qkv")
    with offline.recorded("sm_90") as records:
        out = tw.attention(q, k, v, backend="triton")
        records.clear()
        out.backward(torch.zeros_like(out))
        assert together == [[x.kernel.__name__ for x in records]]
        assert len(records) == 3
