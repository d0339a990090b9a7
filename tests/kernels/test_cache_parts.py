"""Parts of a unit are merged for all of its rows, however many programs there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.gpu.hopper_caches import PREFILLS, HopperCase, call_of, draw
from tests.helpers import UNDER_TEST
from tilewise.core.backends import is_interpreted
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.decode import triton_call
from tilewise.decode.choice import LEAST_QUERIES
from tilewise.decode.reference import cache_eager, cache_reference

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(
        UNDER_TEST.device != "cpu" or not is_interpreted(),
        reason="sets how many programs there are",
    ),
]
MIXED = [case for case in PREFILLS if "mixed batch" in case.name and not case.options]


@pytest.mark.parametrize("case", MIXED, ids=lambda case: case.name)
def test_short_sequences_beside_prefills(case: HopperCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more queries than tiles are made for, and keys that many programs share."""
    monkeypatch.setattr(triton_call, "_INTERPRETED", 132)
    q, cache, options = draw(case)
    call = call_of(q, cache, options)
    exact, eager = cache_reference(call), cache_eager(call)
    out = torch.full(exact.out.shape, float("nan"), dtype=q.dtype)
    lse = torch.full(exact.lse.shape, float("nan"))
    split = triton_call.SplitCall(call, most=LEAST_QUERIES - 1)
    triton_call.Forward(split, out, lse).run_first()
    counts = torch.tensor([*case.queries, 2])  # type: ignore[misc]
    many = (counts >= LEAST_QUERIES).repeat_interleave(counts)
    assert out[many].isnan().all() and lse[:, many].isnan().all()
    assert_within_budget(out[~many], exact.out[~many], eager.out[~many])
    assert_lse_within_budget(lse[:, ~many], exact.lse[:, ~many], q.dtype)


@pytest.mark.parametrize("max_seqlen_q", [0, 1, 9])
def test_max_seqlen_q_only_helps_the_launch(
    max_seqlen_q: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_call, "_INTERPRETED", 40)
    case = HopperCase("", 4, (5, 1, 9), (300, 90, 120), 16, G=2)
    q, cache, options = draw(case)
    call = call_of(q, cache, options)
    exact, eager = cache_reference(call), cache_eager(call)
    call = replace(call, max_seqlen_q=max_seqlen_q)
    out = torch.full(exact.out.shape, float("nan"), dtype=q.dtype)
    lse = torch.full(exact.lse.shape, float("nan"))
    triton_call.Forward(triton_call.SplitCall(call), out, lse).run_first()
    assert_within_budget(out, exact.out, eager.out)
    assert_lse_within_budget(lse, exact.lse, q.dtype)
