"""A small random Llama: causal, grouped heads, every way in which rows are padded or packed."""

from collections.abc import Iterator
from inspect import signature
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaModel, StaticCache, masking_utils

from tests.integrations.hf_models import Trio, llama_config, tokens
from tilewise import attention
from tilewise.core.tolerance import assert_within_budget

S = 13
PADDING = {
    "none": [[1] * S, [1] * S, [1] * S],
    "right": [[1] * S, [1] * 8 + [0] * 5, [1] * 3 + [0] * 10],
    "left": [[1] * S, [0] * 5 + [1] * 8, [0] * 12 + [1]],
    "mixed": [[0, 0] + [1] * 10 + [0], [0] * 5 + [1] * 5 + [0] * 3, [1] * 8 + [0] * 5],
    "holes": [[1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1], [1] * S, [0, 1, 0, 1] + [1] * 9],
    "one row, left": [[0] * 4 + [1] * 9],
    "one row, right": [[1] * 9 + [0] * 4],
}


@pytest.fixture(scope="module")
def trio() -> Trio:
    return Trio.random(llama_config())


def logits(out: Any) -> Tensor:
    return out.logits


def real_logits(mask: Tensor) -> Any:
    return lambda out: out.logits[mask.bool()]


def real_loss(mask: Tensor) -> Any:
    """Something of every real token that no gradient cancels in."""
    return lambda out: out.logits[mask.bool()].square().sum()


@pytest.mark.parametrize("padding", PADDING)
def test_logits_and_gradients(trio: Trio, padding: str) -> None:
    mask = torch.tensor(PADDING[padding])
    inputs = {"input_ids": tokens(*mask.shape), "attention_mask": mask}
    trio.check(real_logits(mask), **inputs)
    trio.check_gradients(real_loss(mask), **inputs)


@pytest.mark.parametrize("padding", ["right", "left", "mixed", "one row, left"])
def test_each_row_is_its_unpadded_run(trio: Trio, padding: str) -> None:
    mask = torch.tensor(PADDING[padding])
    ids = tokens(*mask.shape)
    with torch.no_grad():
        got, eager = (model(ids, attention_mask=mask).logits for model in trio.all[:2])
        for row, seen in enumerate(mask.bool()):
            exact = trio.exact(ids[row : row + 1, seen]).logits[0]
            assert_within_budget(got[row, seen], exact, eager[row, seen])


def test_no_mask_at_all(trio: Trio) -> None:
    inputs = {"input_ids": tokens(2, S)}
    trio.check(logits, **inputs)
    trio.check_gradients(lambda out: out.logits.square().sum(), **inputs)


def test_gradient_through_the_models_own_loss(trio: Trio) -> None:
    ids = tokens(3, S)
    mask = torch.tensor(PADDING["right"])
    labels = torch.where(mask.bool(), ids, -100)
    trio.check_gradients(lambda out: out.loss, input_ids=ids, attention_mask=mask, labels=labels)


# ---------------------------------------------------------------- packed rows

POSITIONS = torch.tensor([[*range(5), *range(6), 0, 0], [*range(9), *range(4)]])


def test_packed_rows_by_position_ids(trio: Trio) -> None:
    inputs = {"input_ids": tokens(2, S), "position_ids": POSITIONS, "use_cache": False}
    trio.check(logits, **inputs)
    trio.check_gradients(lambda out: out.logits.square().sum(), **inputs)


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ([*range(5), *range(50, 58)], "50 after 4"),
        ([*range(5), *range(3, 11)], "3 after 4"),
        ([*range(5), 7, *range(6), 0], "7 after 4"),
    ],
    ids=["a skip ahead", "a shared prefix", "one in between"],
)
def test_positions_that_are_no_packing_raise(trio: Trio, row: list[int], got: str) -> None:
    """Transformers would start a document there, and hide what is before it."""
    if not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this Transformers does not hand its positions on")
    positions = torch.tensor([list(range(S)), row])
    ids = tokens(2, S)
    with pytest.raises(ValueError, match=f"position_ids.*got {got} in row 1"):
        trio.got(ids, position_ids=positions, use_cache=False)
    everything = {"attention_mask": torch.ones(2, S).long()}
    trio.check(logits, input_ids=ids, position_ids=positions, use_cache=False, **everything)


def test_a_row_that_starts_inside_a_document(trio: Trio) -> None:
    positions = torch.tensor([[*range(7, 12), *range(8)], [*range(3, 8), *range(3, 11)]])
    trio.check(logits, input_ids=tokens(2, S), position_ids=positions, use_cache=False)


def test_each_packed_document_is_its_own_run(trio: Trio) -> None:
    ids = tokens(2, S)
    inputs = {"position_ids": POSITIONS, "use_cache": False}
    with torch.no_grad():
        got, eager = (model(ids, **inputs).logits for model in trio.all[:2])
        for row in range(2):
            edges = [*(POSITIONS[row] == 0).nonzero().flatten().tolist(), S]
            for start, stop in pairwise(edges):
                span = slice(start, stop)
                exact = trio.exact(ids[row : row + 1, span]).logits[0]
                assert_within_budget(got[row, span], exact, eager[row, span])


def test_packed_row_by_document_ends(trio: Trio) -> None:
    """cu_seq_lens without position ids that restart: eager does not know them."""
    ids, cu = tokens(1, S), torch.tensor([0, 5, 6, S], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    positions = torch.tensor([[*range(5), 0, *range(7)]])
    with torch.no_grad():
        expected = trio.got(ids, position_ids=positions, use_cache=False).logits
        both = trio.got(ids, position_ids=positions, use_cache=False, **given).logits
        exact, eager = (
            model(ids, position_ids=positions, use_cache=False).logits
            for model in (trio.exact, trio.eager)
        )
        # Rotary positions are relative, so running on over the edges changes nothing else.
        alone = trio.got(ids, use_cache=False, **given).logits
    assert torch.equal(both, expected)
    assert_within_budget(alone, exact, eager)


# ---------------------------------------------------------------- caches


# The argument's name: it changed in the course of Transformers 5.
CACHE = "cache" if "cache" in signature(LlamaModel.forward).parameters else "past_key_values"


@pytest.fixture(params=["dynamic", "static", "static, longer"])
def new_cache(request: pytest.FixtureRequest) -> Any:
    def make(config: Any) -> Any:
        if request.param == "dynamic":
            return DynamicCache(config=config)
        return StaticCache(config=config, max_cache_len=S if request.param == "static" else 3 * S)

    return make


def in_steps(model: Any, ids: Tensor, mask: Tensor | None, steps: list[int], cache: Any) -> Tensor:
    """Logits of all tokens, `steps` at a time with a cache."""
    parts = []
    for start, stop in zip([0, *steps], [*steps, ids.shape[1]], strict=True):
        seen = None if mask is None else mask[:, :stop]
        inputs = {"attention_mask": seen, CACHE: cache, "use_cache": True}
        out = model(ids[:, start:stop], **inputs)
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("padding", [None, "left", "mixed", "one row, left"])
@pytest.mark.parametrize(
    "steps", [[6, 7, 8, 9, 10, 11, 12], [6, 10], [1, 2, 3, 9]], ids=["tokens", "parts", "both"]
)
def test_steps_with_a_cache_are_the_whole_forward(
    trio: Trio, steps: list[int], padding: str | None, new_cache: Any
) -> None:
    mask = torch.ones(2, S).long() if padding is None else torch.tensor(PADDING[padding])
    ids = tokens(*mask.shape)
    given = None if padding is None else mask
    with torch.no_grad():
        exact = trio.exact(ids, attention_mask=given).logits
        eager = trio.eager(ids, attention_mask=given).logits
        got = in_steps(trio.got, ids, given, steps, new_cache(trio.got.config))
    real = mask.bool()
    assert_within_budget(got[real], exact[real], eager[real])


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 3}])
def test_generated_tokens_are_eagers(trio: Trio, options: dict[str, Any]) -> None:
    mask = torch.tensor(PADDING["left"])
    inputs = {"input_ids": tokens(*mask.shape) * mask, "attention_mask": mask}
    got, eager = (
        model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None, **options)
        for model in trio.all[:2]
    )
    assert got.shape == (3, S + 12)
    assert torch.equal(got, eager)


# ---------------------------------------------------------------- masks of the user's own


def test_four_dimensional_masks(trio: Trio) -> None:
    ids = tokens(2, S)
    seen = torch.rand(2, 1, S, S) > 0.4
    seen[..., torch.arange(S), torch.arange(S)] = True

    def added(dtype: torch.dtype) -> Tensor:
        return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)

    with torch.no_grad():
        exact = trio.exact(ids, attention_mask=seen).logits
        eager = trio.eager(ids, attention_mask=added(torch.float32)).logits
        for mask in (seen, added(torch.float32)):
            assert_within_budget(trio.got(ids, attention_mask=mask).logits, exact, eager)


def test_bidirectional_by_configuration() -> None:
    trio = Trio.random(llama_config(is_causal=False))
    mask = torch.tensor(PADDING["left"])
    ids = tokens(3, S)
    got = trio.check(real_logits(mask), input_ids=ids, attention_mask=mask)
    causal = Trio.random(llama_config()).got(ids, attention_mask=mask).logits[mask.bool()]
    assert not torch.equal(got, causal)


# ---------------------------------------------------------------- training


@pytest.fixture
def trained(trio: Trio) -> Iterator[Any]:
    model = Trio.random(llama_config(attention_dropout=0.3)).got
    model.train()
    yield model


def gradients(model: Any, **inputs: Any) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    model(**inputs).loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gradients_are_the_same(
    trained: Any, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = tokens(3, S), torch.tensor(PADDING["mixed"])
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids, "use_cache": False}
    plain = gradients(trained, **inputs)
    # Its name changed in the course of Transformers 5.
    enable = getattr(trained, "activation_checkpointing_enable", None)
    (enable or trained.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return attention(*args, **kwargs)

    monkeypatch.setattr("tilewise.integrations.transformers.attention", counted)
    checkpointed = gradients(trained, **inputs)
    assert len(calls) == 2 * trained.config.num_hidden_layers
    assert all(torch.equal(a, b) for a, b in zip(plain, checkpointed, strict=True))


def test_dropout_acts_in_training_only(trained: Any) -> None:
    ids = tokens(2, S)
    with torch.no_grad():
        first, second = trained(ids).logits, trained(ids).logits
        trained.eval()
        third, fourth = trained(ids).logits, trained(ids).logits
    assert not torch.equal(first, second)
    assert torch.equal(third, fourth)
