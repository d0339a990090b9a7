"""A model of Transformers whose sequence is spread over ranks, against the same model on one."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

import tilewise as tw
from tests.integrations.hf_models import tokens
from tests.parallel import jobs
from tests.parallel.ranks import RANKS, RankError
from tilewise.core.tolerance import assert_within_budget

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
S = 37


def padded_batch() -> dict[str, torch.Tensor]:
    batch = {"input_ids": tokens(2, S), "attention_mask": torch.ones(2, S, dtype=torch.int64)}
    batch["attention_mask"][1, 25:] = 0
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def one_rank(config: Any, batch: dict[str, torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="plain").to(dtype)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("schedule", ("ring", "ulysses"))
@pytest.mark.parametrize("form", ("llama", "mistral"))
def test_a_model_over_ranks(form: str, schedule: str) -> None:
    """Padding, a sliding window, a loss over labels that other ranks hold."""
    config: Any = LlamaConfig(**SIZES)
    if form == "mistral":
        config = MistralConfig(**SIZES, sliding_window=9)
    batch = padded_batch()
    eager, exact = (one_rank(config, batch, dtype) for dtype in (torch.float32, torch.float64))
    way = {"schedule": schedule}
    for loss, gradients in RANKS.run(3, jobs.trained_model, 3, config, batch, None, way):
        for got, want, plain in zip([loss, *gradients], exact, eager, strict=True):
            # Transformers' norms and its loss round to fp32 in every dtype.
            assert_within_budget(got, want, plain, floor=1e-6 * float(want.abs().max()))


def test_documents_over_ranks() -> None:
    """Documents under one mask are documents alone; only they see each other."""
    config = LlamaConfig(**SIZES)
    edges = [0, 11, 30, S]
    ids = tokens(1, S)
    labels = ids.clone()
    labels[0, [e for e in edges if e < S]] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(edges)])
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions.unsqueeze(0)}
    eager, exact = (one_rank(config, batch, dtype) for dtype in (torch.float32, torch.float64))
    mask = tw.documents(edges)
    found = RANKS.run(3, jobs.trained_model, 3, config, batch, mask, {"schedule": "all_gather"})
    for loss, gradients in found:
        for got, want, plain in zip([loss, *gradients], exact, eager, strict=True):
            assert_within_budget(got, want, plain, floor=1e-6 * float(want.abs().max()))


def test_a_batch_without_a_sequence_is_refused() -> None:
    with pytest.raises(RankError, match="must hold input_ids"):
        RANKS.run(2, jobs.trained_model, 2, LlamaConfig(**SIZES), {}, None, {"schedule": "ring"})
