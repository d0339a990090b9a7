"""`generate()` gives eager's greedy tokens over every kind of cache, left-padded rows too."""

from typing import Any

import pytest
import torch

from tests.integrations.hf_models import tokens
from tests.integrations.zoo import MODELS

# Longer than every window, and more tokens than one holds.
LENGTH, NEW = 9, 12
LEFT = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 8 + [1]])
NAMES = ("Llama", "Qwen3", "Gemma3Text", "GptOss", "DeepseekV3")
# A dynamic and a static cache of a model with windows hold no more than the window there.
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_eagers(name: str, cache: str) -> None:
    trio = MODELS[name].trio()
    inputs = {"input_ids": tokens(*LEFT.shape) * LEFT, "attention_mask": LEFT}
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **CACHES[cache]}
    got, eager = (model.generate(**inputs, **options) for model in trio.all[:2])
    assert got.shape == (3, LENGTH + NEW)
    assert torch.equal(got, eager)
