"""`generate()` gives eager's greedy tokens over every kind of cache, left-padded rows too."""

from typing import Any

import pytest
import torch

from tests.integrations.hf_models import tokens
from tests.integrations.zoo import MODELS
from tilewise.integrations.transformers_cache import PagedCache

# Transformers 5.24 calls it `cache`; older ones know no other name.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
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


@pytest.mark.parametrize("page", [None, 1, 16])
@pytest.mark.parametrize("name", NAMES[:4])
def test_greedy_tokens_over_a_paged_cache_are_eagers(name: str, page: int | None) -> None:
    trio = MODELS[name].trio()
    inputs = {"input_ids": tokens(*LEFT.shape) * LEFT, "attention_mask": LEFT}
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    cache = PagedCache(page_size=page, max_length=LENGTH + NEW)
    got = trio.got.generate(**inputs, **options, past_key_values=cache)
    assert torch.equal(got, trio.eager.generate(**inputs, **options))
    assert cache.get_seq_length() == LENGTH + NEW - 1
    held = [layer.cache for layer in cache.layers]
    assert len(held) == 2 and all(
        x is not None and x.is_paged == (page is not None) and x.lengths.tolist() == [20] * 3
        for x in held
    )


def test_beams_and_drafts_over_a_paged_cache() -> None:
    trio = MODELS["Llama"].trio()
    prompt = tokens(1, 6).repeat(1, 2)
    for options in ({"num_beams": 3}, {"prompt_lookup_num_tokens": 3}):
        given = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, **options}
        ids = prompt.expand(2, -1) if "num_beams" in options else prompt
        got = trio.got.generate(ids, **given, past_key_values=PagedCache(4, 40))
        assert torch.equal(got, trio.eager.generate(ids, **given))


def test_a_paged_cache_wants_tilewise_and_room() -> None:
    trio = MODELS["Llama"].trio()
    ids = tokens(1, 6)
    for model in (trio.eager, MODELS["DeepseekV3"].trio().got):
        with pytest.raises(ValueError, match="attention did not read the cache"):
            model.generate(ids, max_new_tokens=4, past_key_values=PagedCache(4, 40))
    options = {"max_new_tokens": 6, "eos_token_id": None, "past_key_values": PagedCache(4, 8)}
    with pytest.raises(ValueError, match="would grow to 9 tokens, but the cache holds 8"):
        trio.got.generate(ids, **options)
