"""What single architectures do that the support table (test_zoo.py) has no column for."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel

from tests.integrations.hf_models import Trio, tokens
from tests.integrations.zoo import SIZES
from tilewise.core.tolerance import assert_within_budget

MASKS = torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [1] * 6 + [0] * 3])


def build(name: str, arguments: dict[str, Any], auto: Any) -> Trio:
    return Trio.random(getattr(transformers, f"{name}Config")(**arguments), auto)


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
