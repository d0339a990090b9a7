"""A first call compiles the kernels of a backward side by side."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

import tilewise as tw
from tests.gpu.common import are_equal, attention, qkv, run
from tests.gpu.hopper import NEEDS_HOPPER
from tilewise.kernels.launch import finish_ahead

pytestmark = pytest.mark.gpu


def test_kernels_of_a_backward_compile_side_by_side(tmp_path: Path) -> None:
    compiled: dict[str, list[threading.Thread]] = {}

    def listen(src: Any, **_: Any) -> None:
        compiled.setdefault(src.fn.__name__, []).append(threading.current_thread())

    # Head dims that no other test has, so that nothing is compiled yet.
    leaves = qkv(1, 200, 200, D=104, E=40, dtype=torch.float16)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = listen
        first = run(lambda q, k, v: attention(q, k, v, mask=tw.causal()), leaves)
        names = [name for name in compiled if "bwd_keys" in name or "bwd_rows" in name]
        assert len(names) == 2
        threads = [thread for name in names for thread in compiled[name]]
        assert len(set(threads)) == len(threads)
        assert threading.main_thread() not in threads
        compiled.clear()
        again = run(lambda q, k, v: attention(q, k, v, mask=tw.causal()), leaves)
    assert not compiled
    assert are_equal(first, again)


@pytest.mark.parametrize(
    ("backend", "kernels"),
    [
        ("triton", {"delta", "keys", "rows"}),
        pytest.param("hopper", {"hopper_prepare", "hopper", "hopper_finish"}, marks=NEEDS_HOPPER),
    ],
)
def test_a_backward_is_compiled_while_the_forward_is(
    backend: str, kernels: set[str], tmp_path: Path
) -> None:
    compiled: dict[str, threading.Thread] = {}

    def listen(src: Any, **_: Any) -> None:
        compiled[src.fn.__name__] = threading.current_thread()

    q, k, v = qkv(1, 200, 200, D=88, E=24, dtype=torch.float16)
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = listen
        out = tw.attention(q, k, v, mask=tw.causal(), backend=backend)
        finish_ahead()
        backward = {name for name in compiled if "_bwd_" in name}
        found = {name.split("_bwd_")[1].removesuffix("_kernel") for name in backward}
        assert found == kernels
        assert all(compiled[name] is not threading.main_thread() for name in backward)
        compiled.clear()
        out.float().square().sum().backward()
    assert not compiled
