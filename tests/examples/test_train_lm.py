"""The training example: its packing, its two curves, and the memory that only one form fits in."""

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.slow


def load() -> Any:
    path = Path(__file__).parents[2] / "examples" / "train_lm.py"
    spec = importlib.util.spec_from_file_location("train_lm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["train_lm"] = module
    spec.loader.exec_module(module)
    return module


example = load()


def test_rows_are_whole_and_documents_start_where_they_say() -> None:
    documents = [torch.full((n,), n) for n in (5, 3, 9)]
    rows = example.pack(documents, 8)
    for expected in ([5] * 5 + [3] * 3, [9] * 8, [5] * 5 + [3] * 3):
        text, cu_seqlens = next(rows)
        assert text.tolist() == expected
        edges = [i for i, (a, b) in enumerate(pairwise(expected), 1) if a != b]
        assert cu_seqlens.tolist() == [0, *edges, 8]


def test_no_byte_is_guessed_across_documents() -> None:
    text, cu_seqlens = torch.tensor([7, 8, 9, 1]), torch.tensor([0, 2, 4])
    logits = torch.zeros(4, 256)
    logits[0, 8] = logits[2, 1] = 100.0
    assert float(example.next_byte_loss(logits, text, cu_seqlens)) == 0.0


def test_the_two_curves_agree() -> None:
    """Exact is the same training in fp64; rounding grows from step to step in both forms."""
    curves = {}
    for attention, dtype in (("tilewise", "float32"), ("plain", "float32"), ("plain", "float64")):
        run = example.Run(attention, 200, 14, UNDER_TEST.device, dtype, 2, 2, 16)
        curves[attention, dtype] = example.train(run)["losses"]
    got, eager, exact = (torch.tensor(x, dtype=torch.float64) for x in curves.values())
    assert_within_budget(got.float(), exact, eager.float())
    assert exact[-1] < exact[0] - 0.2


@pytest.mark.skipif(UNDER_TEST.device == "cuda", reason="the limit of a process is the CPU's")
@pytest.mark.skipif(sys.platform != "linux", reason="figures of a process are Linux's")
def test_only_tilewise_fits_in_the_memory_given() -> None:
    plan = {"context": 2048, "steps": 2, "layers": 1, "heads": 8, "head_dim": 8}
    results = {
        attention: example.train_apart(example.Run(attention, memory_gib=0.12, **plan))
        for attention in example.ATTENTIONS
    }
    assert results["plain"]["losses"] == [] and "memory" in results["plain"]["stopped"]
    assert len(results["tilewise"]["losses"]) == 2
    assert 0 < results["tilewise"]["peak_bytes"] < 0.12 * example.GIB
