"""Compile what the hopper tests need, several at once: `python -m tests.gpu.hopper_variants NAMES`.

A process compiles one kernel after the other, seconds each; Triton's cache on disk serves the rest.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import tilewise as tw
from tilewise.dense.api import attention_partial_backward

_BF16, _FP16 = torch.bfloat16, torch.float16
_DIMS = (64, 128, 256)


def _call(
    D: int, dtype: torch.dtype = _BF16, *, E: int | None = None, with_mask: Any = None,
    terms: tuple[str, ...] = (), **options: Any,
) -> Callable[[], Any]:  # fmt: skip
    """with_mask: makes one on the GPU. terms: names of those that are tensors of heads."""

    def call() -> Any:
        shapes = ((1, 65, 2, D), (1, 65, 2, D), (1, 65, 2, E or D))
        q, k, v = (torch.zeros(shape, dtype=dtype, device="cuda") for shape in shapes)
        made: dict[str, Any] = {name: torch.zeros(2, device="cuda") for name in terms}
        if with_mask is not None:
            made["mask"] = with_mask()
        return tw.attention_partial(q, k, v, backend="hopper", **made, **options)

    return call


def _padding() -> tw.Mask:
    return tw.causal() & tw.key_padding(torch.tensor([3], device="cuda"))


def _packed(D: int, mask: tw.Mask, **options: Any) -> Callable[[], Any]:
    def call() -> Any:
        q, k, v = (torch.zeros(70, 2, D, dtype=_BF16, device="cuda") for _ in "qkv")
        cu_seqlens = torch.tensor([0, 3, 70], dtype=torch.int32, device="cuda")
        return tw.attention_varlen_partial(
            q, k, v, cu_seqlens_q=cu_seqlens, mask=mask, backend="hopper", **options
        )

    return call


def _window() -> tw.Mask:
    return tw.window(70, 3)


def _documents() -> tw.Mask:
    return tw.causal() & tw.documents(torch.tensor([0, 3, 65], device="cuda", dtype=torch.int32))


def _backward(
    D: int, dtype: torch.dtype = _BF16, *, E: int | None = None, with_mask: Any = tw.causal,
    terms: tuple[str, ...] = (), **options: Any,
) -> Any:  # fmt: skip
    """terms: names of those that are tensors of heads; of these sinks learn."""

    def call() -> None:
        is_packed = "cu_seqlens_q" in options
        T, batch = 300, () if is_packed else (1,)
        made = (torch.zeros(*batch, T, 2, n, dtype=dtype, device="cuda") for n in (D, D, E or D))
        q, k, v = (x.requires_grad_() for x in made)
        extras = {name: torch.zeros(2, device="cuda") for name in terms}
        if "sinks" in extras:
            extras["sinks"].requires_grad_()
        op = tw.attention_varlen if is_packed else tw.attention
        out = op(q, k, v, mask=with_mask(), backend="hopper", **options, **extras)
        out.sum().backward()

    return call


def _packed_backward(D: int) -> Callable[[], Any]:
    def call() -> Any:
        cu_seqlens = torch.tensor([0, 3, 300], dtype=torch.int32, device="cuda")
        return _backward(D, cu_seqlens_q=cu_seqlens)()

    return call


def _into_buffers(D: int) -> Callable[[], Any]:
    def call() -> None:
        q, k = (torch.zeros(1, n, 2, D, dtype=_BF16, device="cuda") for n in (100, 330))
        statistics = (torch.zeros(1, 2, 100, device="cuda") for _ in range(2))
        buffers = {
            f"d{name}": torch.zeros(x.shape, device="cuda")
            for name, x in zip("qkv", (q, k, k), strict=True)
        }
        attention_partial_backward(
            q, q, k, k, *statistics, **buffers, mask=tw.causal(), q_start=400, k_start=0,
            backend="hopper",
        )  # fmt: skip

    return call


VARIANTS: dict[str, Callable[[], Any]] = {
    **{f"bf16 {D}": _call(D) for D in (64, 128, 256)},
    **{f"fp16 {D}": _call(D, _FP16) for D in (64, 128)},
    **{f"window {D}": _call(D, mask=tw.window(9, 0)) for D in (64, 128, 256)},
    **{f"E {E}": _call(D, E=E) for D, E in ((64, 128), (192, 128), (96, 256))},
    **{f"padding {D}": _call(D, with_mask=_padding) for D in (64, 128)},
    **{f"packed {D}": _packed(D, tw.causal()) for D in (64, 128, 256)},
    **{f"packed window {D}": _packed(D, tw.window(9, 3)) for D in (64, 128, 256)},
    "packed fp32": _packed(128, tw.full(), out_dtype=torch.float32),
    "documents": _call(64, with_mask=_documents),
    "sinks 64": _call(64, terms=("sinks",)),
    "sinks": _call(128, terms=("sinks",)),
    "softcap": _call(128, softcap=5.0),
    "ALiBi": _call(128, terms=("alibi_slopes",)),
    "scale below 0": _call(128, scale=-0.2),
    **{
        f"terms {D} {dtype}": _call(D, dtype, terms=("alibi_slopes", "sinks"), softcap=5.0)
        for D, dtype in ((64, _BF16), (128, _BF16), (256, _BF16), (128, _FP16))
    },
    "fp32 out": _call(128, out_dtype=torch.float32),
    **{f"backward {D}": _backward(D) for D in _DIMS},
    **{f"backward fp16 {D}": _backward(D, _FP16) for D in _DIMS},
    **{f"backward packed {D}": _packed_backward(D) for D in _DIMS},
    **{f"backward padded {D}": _backward(D, with_mask=_padding) for D in _DIMS},
    **{f"into buffers {D}": _into_buffers(D) for D in _DIMS},
    **{f"backward documents {D}": _backward(D, with_mask=_documents) for D in _DIMS},
    **{f"backward window {D}": _backward(D, with_mask=_window) for D in (256,)},
    **{f"backward {D} {E}": _backward(D, E=E) for D, E in ((192, 128), (96, 256), (256, 64))},
    **{f"backward softcap {D}": _backward(D, softcap=5.0) for D in _DIMS},
    **{f"backward ALiBi {D}": _backward(D, terms=("alibi_slopes",)) for D in _DIMS},
    **{f"backward scale {D}": _backward(D, scale=-0.1) for D in _DIMS},
    **{f"backward sinks {D}": _backward(D, terms=("sinks",)) for D in _DIMS},
    **{f"backward repeats {D}": _backward(D, deterministic=True) for D in (64, 128)},
}


def compile_all() -> None:
    """Everything, in processes of their own; once, however many workers of pytest ask for it."""
    run_id = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    done = Path(tempfile.gettempdir()) / f"tilewise-hopper-{run_id}"
    with open(f"{done}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            _compile_now()
            done.touch()


def _compile_now() -> None:
    names, cores = list(VARIANTS), os.cpu_count() or 1

    def run(some: list[str]) -> str:
        command = [sys.executable, "-m", "tests.gpu.hopper_variants", *some]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        return f"{some}: {done.stderr[-2000:]}" if done.returncode else ""

    # A process for each core: what they import takes as long as a kernel.
    with ThreadPoolExecutor(cores) as pool:
        failed = [x for x in pool.map(run, (names[i::cores] for i in range(cores))) if x]
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        VARIANTS[name]()
    torch.cuda.synchronize()
