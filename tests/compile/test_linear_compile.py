"""The stages of linear attention compile for every target, fit there and spill little.

Needs no GPU. `make compile-test` runs this under the oldest and the newest Triton.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.compile.offline import TARGETS, compile_call
from tilewise import linear
from tilewise.linear import choice, triton_call

STAGES = {"states", "states_bwd", "chunk_pairs", "sum_parts"}
# op, D and E, dtype, packed, target: every gate, with and without a delta rule. What takes long to
# compile is compiled once.
VARIANTS = [
    ("gated_delta_rule", 128, torch.bfloat16, False, "sm_90"),
    ("kda", 128, torch.bfloat16, True, "sm_90"),
    ("linear_attention", 64, torch.float16, False, "sm_80"),
    ("linear_attention", 64, torch.float32, True, "sm_120"),
    ("linear_attention", 100, torch.bfloat16, False, "sm_100"),
    ("delta_rule", 256, torch.bfloat16, False, "sm_89"),
    ("gla", 64, torch.bfloat16, False, "gfx942"),
    ("linear_attention", 128, torch.float16, True, "gfx950"),
]
# Bytes a thread on sm_90. Of kda's ladders 48 and 144 in Triton 3.6, 136 and 320 in 3.9; of the
# gated delta rule's pairs 0 and 16.
SPILLS = {
    "chunk_prepare": 140, "chunk_prepare_vector": 120, "chunk_prepare_ladder": 140,
    "chunk_invert": 0, "states": 200, "states_bwd": 200, "chunk_pairs": 16, "chunk_gradients": 60,
    "chunk_middle": 400, "chunk_ladder": 320, "sum_parts": 0, "segments": 0,
}  # fmt: skip


def call(op: str, D: int, dtype: torch.dtype, packed: bool) -> None:
    """Forward and backward of 64 heads of v over 32 of q and k."""
    lead = (130,) if packed else (2, 130)
    x: dict[str, Any] = {"q": (32, D), "k": (32, D), "v": (64, D)}
    x = {name: torch.zeros(*lead, *shape, dtype=dtype) for name, shape in x.items()}
    if op in ("simple_gla", "gated_delta_rule"):
        x["g"] = torch.zeros(*lead, 64)
    if op in ("gla", "kda"):
        x["g"] = torch.zeros(*lead, 64, D)
    if "delta" in op or op == "kda":
        x["beta"] = torch.zeros(*lead, 64, dtype=dtype)
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    q, k, v = (leaves.pop(name) for name in "qkv")
    bounds = {"cu_seqlens": torch.tensor([0, 60, 130])} if packed else {}
    out, state = getattr(linear, op)(q, k, v, **leaves, **bounds, backend="triton")
    (out.sum() + state.sum()).backward()


@pytest.mark.parametrize(("op", "D", "dtype", "packed", "target"), VARIANTS)
def test_stages_compile_and_fit(
    op: str, D: int, dtype: torch.dtype, packed: bool, target: str,
    record_property: Any, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    found = compile_call(lambda: call(op, D, dtype, packed), target)
    name = f"linear {op} {str(dtype).removeprefix('torch.')} D {D}"
    rows = [
        (name, target, x.name, x.registers, x.spills, round(x.shared_bytes / 1024, 1), x.mma)
        for x in found
    ]
    record_property("compiled", rows)
    of_vectors = {"chunk_prepare_vector", "chunk_prepare_ladder", "chunk_middle", "chunk_ladder"}
    others = of_vectors if op in ("gla", "kda") else {"chunk_prepare", "chunk_gradients"}
    others |= {"chunk_invert"} if op == "kda" else set()
    assert {x.name for x in found} == STAGES | others
    for x in found:
        assert x.shared_bytes <= TARGETS[target].shared_kib * 1024, x
        assert x.mma or x.name == "sum_parts", f"{x}: products run on no matrix unit"
        if target == "sm_90":
            assert x.spills <= SPILLS[x.name], x


@pytest.mark.parametrize(
    ("op", "D", "dtype", "packed", "target"),
    [
        ("simple_gla", 128, torch.bfloat16, False, "sm_90"),
        ("gla", 128, torch.bfloat16, True, "sm_90"),
        ("linear_attention", 64, torch.float32, True, "sm_80"),
        ("gla", 256, torch.float16, False, "gfx942"),
    ],
)
def test_passes_over_segments_compile_and_fit(
    op: str, D: int, dtype: torch.dtype, packed: bool, target: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    monkeypatch.setattr(triton_call, "count_segments", lambda *sizes: 3)
    for part, names in (
        ("segments", ["segments"] * 2),
        ("states", ["states", "states", "states_bwd"]),
    ):
        found = compile_call(lambda: call(op, D, dtype, packed), target, part)
        assert [x.name for x in found] == names
        for x in found:
            assert x.shared_bytes <= TARGETS[target].shared_kib * 1024, x
            assert x.mma, f"{x}: products run on no matrix unit"
            if target == "sm_90":
                assert x.spills <= SPILLS[x.name], x
