"""Other architectures, small and random: each brings an argument or a mask that Llama has not."""

from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.masking_utils import create_chunked_causal_mask

from tests.integrations.hf_models import Trio, tokens
from tilewise.core.tolerance import assert_within_budget
from tilewise.integrations.transformers import Implementation

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
ENCODER_DECODER = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

# The configuration, its arguments, and what the model hands to the attention function.
DECODERS = {
    "Mistral": (GROUPED | {"sliding_window": 4}, {"sliding_window"}),
    "Gemma2": (GROUPED | {"sliding_window": 4}, {"sliding_window", "softcap"}),
    "GptOss": (
        GROUPED | {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1},
        {"sliding_window", "s_aux"},
    ),
    "Llama4Text": (
        GROUPED | {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48},
        set(),
    ),
    "DeepseekV3": (SIZES | MLA, set()),
    "GPTNeoX": (SIZES, set()),
}
ENCODERS = {
    "Bert": (SIZES, set()),
    "ModernBert": (SIZES | {"local_attention": 6}, {"sliding_window", "deterministic"}),
    "DistilBert": ({"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4}, set()),
}
TRANSLATORS = {
    "Bart": (ENCODER_DECODER, set()),
    "T5": (T5 | {"decoder_start_token_id": 0}, {"position_bias"}),
}
# Transformers 5.17 raises for chunks in a static cache, whatever the attention.
CHUNKS_IN_STATIC_CACHES = "block_sequence_ids" in signature(create_chunked_causal_mask).parameters

MASKS = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [1] * 6 + [0] * 3])


def build(name: str, arguments: dict[str, Any], auto: Any) -> Trio:
    return Trio.random(getattr(transformers, f"{name}Config")(**arguments), auto)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the arguments, not None, that the attention function gets."""
    names: set[str] = set()
    read = Implementation._read_options

    def noted(self: Implementation, arguments: dict[str, Any]) -> Any:
        names.update(name for name, value in arguments.items() if value is not None)
        return read(self, arguments)

    monkeypatch.setattr(Implementation, "_read_options", noted)
    return names


@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name: str, handed: set[str]) -> None:
    arguments, expected = DECODERS[name]
    trio = build(name, arguments, AutoModelForCausalLM)
    inputs = {"input_ids": tokens(*MASKS.shape), "attention_mask": MASKS}
    trio.check(lambda out: out.logits[MASKS.bool()], **inputs)
    assert expected <= handed
    trio.check_gradients(lambda out: out.logits[MASKS.bool()].square().sum(), **inputs)
    left = {name: x[:2] for name, x in inputs.items()}
    for cache in ("dynamic", "static"):
        if cache == "static" and name == "Llama4Text" and not CHUNKS_IN_STATIC_CACHES:
            continue
        options = {"cache_implementation": cache, "max_new_tokens": 8, "eos_token_id": None}
        got, eager = (model.generate(**left, **options, do_sample=False) for model in trio.all[:2])
        assert torch.equal(got, eager) and got.shape == (2, 17)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name: str, handed: set[str]) -> None:
    arguments, expected = ENCODERS[name]
    trio = build(name, arguments, AutoModel)
    inputs = {"input_ids": tokens(*MASKS.shape), "attention_mask": MASKS}
    trio.check(lambda out: out.last_hidden_state[MASKS.bool()], **inputs)
    assert expected <= handed


@pytest.mark.parametrize("name", TRANSLATORS)
def test_encoder_and_decoder(name: str, handed: set[str]) -> None:
    arguments, expected = TRANSLATORS[name]
    trio = build(name, arguments, AutoModelForSeq2SeqLM)
    inputs = {"input_ids": tokens(*MASKS.shape), "attention_mask": MASKS}
    trio.check(lambda out: out.logits, decoder_input_ids=tokens(3, 4), **inputs)
    trio.check_gradients(
        lambda out: out.logits.square().sum(), decoder_input_ids=tokens(3, 4), **inputs
    )
    assert expected <= handed
    got, eager = (
        model.generate(**inputs, max_new_tokens=6, do_sample=False) for model in trio.all[:2]
    )
    assert torch.equal(got, eager)


@pytest.mark.parametrize("seen", [MASKS, None], ids=["padded", "whole"])
def test_cross_attention_of_a_bert_decoder(seen: Tensor | None) -> None:
    """Without padding it has no mask, and its layer says is_causal."""
    arguments = SIZES | {"is_decoder": True, "add_cross_attention": True}
    trio = build("Bert", arguments, AutoModel)
    inputs = {"input_ids": tokens(3, 5), "encoder_attention_mask": seen}
    hidden = torch.randn(3, 9, 32)
    with torch.no_grad():
        got, eager, exact = (
            model(**inputs, encoder_hidden_states=hidden.to(model.dtype)).last_hidden_state
            for model in trio.all
        )
    assert_within_budget(got, exact, eager)


def test_vision_model_without_masks() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    arguments = sizes | {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    trio = build("ViT", arguments, AutoModel)
    pixels = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        got, eager, exact = (
            model(pixel_values=pixels.to(model.dtype)).last_hidden_state for model in trio.all
        )
    assert_within_budget(got, exact, eager)


@pytest.mark.parametrize("name", ["MPNet", "Bloom"])
def test_model_that_adds_its_mask_itself_raises(name: str) -> None:
    """It never calls the attention function, and a bool mask would be added as ones and zeros."""
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = AutoModel.from_config(config, attn_implementation="tilewise")
    with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
        model(input_ids=tokens(*MASKS.shape), attention_mask=MASKS)


def test_head_mask_of_a_model_is_not_dropped() -> None:
    trio = build("Bert", SIZES, AutoModel)
    with pytest.raises(NotImplementedError, match="head_mask cannot be honoured"):
        trio.got(input_ids=tokens(2, 5), head_mask=torch.ones(2, 4))
