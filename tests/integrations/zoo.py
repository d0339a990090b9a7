"""The models of the support table: small, random, one for each way of calling attention.

`python -m tests.integrations.zoo` renders the table of docs/transformers.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.integrations.hf_models import Trio, tokens

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
S = 9
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
# Every second layer has the window.
ALTERNATING = GROUPED | {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
MLA = SIZES | {
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
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    # Rounding moves values over the kink of the default, relu.
    "feed_forward_proj": "gated-gelu",
}
# Head dim 9.
VIT: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 7,
}
WHISPER = ENCODER_DECODER | {
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
}
# Packed images: one layer attends within windows, the other within each image.
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "window_size": 16,
    "out_hidden_size": 32,
    "fullatt_block_indexes": [1],
}

# Older Transformers do not offer it at the top.
QWEN_TOWER = ".models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel"


def _text(shape: tuple[int, int]) -> dict[str, Any]:
    return {"input_ids": tokens(*shape)}


def _translation(shape: tuple[int, int]) -> dict[str, Any]:
    return _text(shape) | {"decoder_input_ids": tokens(shape[0], 4)}


def _speech(shape: tuple[int, int]) -> dict[str, Any]:
    return {"input_features": torch.randn(shape[0], 8, 20), "decoder_input_ids": tokens(*shape)}


def _pictures(shape: tuple[int, int]) -> dict[str, Any]:
    return {"pixel_values": torch.randn(shape[0], 3, 16, 16)}


def _patches(shape: tuple[int, int]) -> dict[str, Any]:
    """Three images of different sizes, all their patches in one row."""
    grid = torch.tensor([[1, 4, 8], [1, 6, 4], [2, 4, 4]])
    patches = int(grid.prod(-1).sum())
    return {"hidden_states": torch.randn(patches, 3 * 2 * 4 * 4), "grid_thw": grid}


@dataclass(frozen=True)
class Model:
    """How to make a model, call it, and read what it computes.

    features: the columns of the table in which it has a test; what is not there has no meaning
        for it (a vision model has no padding).
    hands: arguments, beyond what every model hands over, that its attention must receive.
    """

    name: str
    arguments: dict[str, Any]
    auto: str
    features: str
    hands: frozenset[str] = frozenset()
    inputs: Callable[[tuple[int, int]], dict[str, Any]] = _text
    says: str = ""

    @property
    def made_by(self) -> Any:
        module, _, name = self.auto.rpartition(".")
        return getattr(import_module(f"transformers{module}"), name)

    @property
    def config(self) -> Any:
        # A copy: some configurations keep and change the lists they are given.
        given = {k: list(v) if isinstance(v, list) else v for k, v in self.arguments.items()}
        return getattr(transformers, f"{self.name}Config")(**given)

    def trio(self) -> Trio:
        return _trio(self.name)

    def fresh(self, implementation: str = "tilewise", **changes: Any) -> Any:
        """A model of its own, in training mode, with the same weights as the trio's."""
        torch.manual_seed(0)
        config = self.config
        for name, value in changes.items():
            setattr(config, name, value)
        build = getattr(self.made_by, "from_config", None) or self.made_by._from_config
        return build(config, attn_implementation=implementation)

    @property
    def one_layer(self) -> dict[str, int]:
        """Changes that leave one layer, where all are of one kind: enough to compile."""
        if "layer_types" in self.arguments or "local_attention" in self.arguments:
            return {}
        names = ("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers", "num_layers",
                 "num_decoder_layers")  # fmt: skip
        return {name: 1 for name in names if hasattr(self.config, name)}

    def read(self, out: Any, mask: Tensor | None = None) -> Tensor:
        """What the model computes, at real tokens only."""
        result = out.logits if hasattr(out, "logits") else out.pooler_output
        # Of an encoder and decoder, the mask speaks of the encoder.
        is_masked = mask is not None and result.shape[:2] == mask.shape
        return result[mask.bool()] if is_masked else result

    def reader(self, mask: Tensor | None = None) -> Callable[[Any], Tensor]:
        return lambda out: self.read(out, mask)

    def on_rank(self, inputs: dict[str, Any], rank: int) -> dict[str, Any]:
        """One row of a batch of 2; all of what is packed."""
        if any(len(x) != 2 for x in inputs.values()):
            return inputs
        return {name: x[rank : rank + 1] for name, x in inputs.items()}

    def loss(self, mask: Tensor | None = None) -> Callable[[Any], Tensor]:
        return lambda out: self.read(out, mask).square().sum()


ANY = "logits, gradients, bf16, checkpointing, compile, DDP"
PADDED = f"{ANY}, right padding, left padding"
GENERATES = f"{PADDED}, generate"
CACHED = f"{GENERATES}, packed, dynamic cache, static cache"
DECODER = "AutoModelForCausalLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"

_MODELS = (
    Model("Llama", GROUPED, DECODER, CACHED, says="causal, grouped heads"),
    Model("Qwen3", GROUPED, DECODER, CACHED, says="norms on q and k"),
    Model("Phi3", GROUPED | {"sliding_window": 4}, DECODER, CACHED,
          frozenset({"sliding_window"}), says="fused QKV, window"),
    Model("Mistral", GROUPED | {"sliding_window": 4}, DECODER, CACHED,
          frozenset({"sliding_window"}), says="window"),
    Model("Gemma2", ALTERNATING | {"attn_logit_softcapping": 2.0}, DECODER, CACHED,
          frozenset({"sliding_window", "softcap"}), says="softcap, alternating windows"),
    Model("Gemma3Text", ALTERNATING, DECODER, CACHED,
          frozenset({"sliding_window"}), says="alternating windows, two rotary bases"),
    Model("GptOss", ALTERNATING | {"num_local_experts": 8, "num_experts_per_tok": 8}, DECODER,
          CACHED, frozenset({"sliding_window", "s_aux"}), says="sinks, alternating windows"),
    Model("Llama4Text", GROUPED | {"attention_chunk_size": 4, "num_local_experts": 2,
          "intermediate_size_mlp": 48}, DECODER, CACHED, says="chunks"),
    Model("DeepseekV3", MLA, DECODER, CACHED, says="latent attention: D 16, E 12"),
    Model("GPTNeoX", SIZES, DECODER, CACHED, says="partial rotary"),
    Model("Bert", SIZES, "AutoModelForMaskedLM", PADDED, says="bidirectional"),
    Model("Roberta", SIZES, "AutoModelForMaskedLM", PADDED, says="bidirectional"),
    Model("ModernBert", SIZES | {"local_attention": 6}, "AutoModelForMaskedLM", PADDED,
          frozenset({"sliding_window", "deterministic"}), says="local and global layers"),
    Model("DistilBert", {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4},
          "AutoModelForMaskedLM", PADDED, says="bidirectional"),
    Model("Bart", ENCODER_DECODER | {"max_position_embeddings": 64}, SEQ2SEQ, GENERATES,
          inputs=_translation, says="cross attention"),
    Model("T5", T5, SEQ2SEQ, GENERATES, frozenset({"position_bias"}), _translation,
          "relative bias that learns"),
    Model("Whisper", WHISPER, "AutoModelForSpeechSeq2Seq", ANY, inputs=_speech,
          says="speech, cross attention"),
    Model("ViT", VIT, "AutoModelForImageClassification", ANY, inputs=_pictures,
          says="no mask, head dim 9"),
    # No compile: Transformers asks for the sizes of the windows on the host.
    Model("Qwen2_5_VLVision", QWEN_VISION, QWEN_TOWER,
          ANY.replace(", compile", ""), inputs=_patches, says="packed images and windows"),
)  # fmt: skip
MODELS = {model.name: model for model in _MODELS}


@cache
def _trio(name: str) -> Trio:
    model = MODELS[name]
    return Trio.random(model.config, model.made_by)


def render() -> str:
    """The table: a cross where a test holds the cell, nothing where it has no meaning."""
    columns = f"{CACHED}".split(", ")
    lines = ["| model | what it brings | " + " | ".join(columns) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for model in MODELS.values():
        marks = ["x" if column in model.features.split(", ") else "" for column in columns]
        lines.append(f"| {model.name} | {model.says} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
