"""Tilewise masks against the dense ones that Transformers makes for its SDPA path."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as hf

from tilewise.core.mask_leaves import Full, Window
from tilewise.integrations import transformers_masks
from tilewise.integrations.mask_tensor import MaskTensor
from tilewise.integrations.transformers_masks import build_mask

Predicate = Callable[..., Tensor]

# [B, 12] padding masks by name; B = 2.
PADDING: dict[str, list[list[int]] | None] = {
    "none": None,
    "all seen": [[1] * 12, [1] * 12],
    "right": [[1] * 12, [1] * 7 + [0] * 5],
    "left": [[0] * 4 + [1] * 8, [1] * 12],
    "both": [[0] * 2 + [1] * 9 + [0], [0] * 5 + [1] * 7],
    "holes": [[1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1], [1] * 12],
    "an empty row": [[0] * 12, [0] * 3 + [1] * 9],
    "short": [[1] * 6, [0] * 2 + [1] * 4],
}
# q_length, kv_length, q_offset, kv_offset: whole, continued, static, sliding cache, decode.
PLACES = [(12, 12, 0, 0), (4, 12, 8, 0), (5, 12, 3, 0), (3, 9, 9, 3), (1, 12, 11, 0), (1, 12, 6, 0)]

IDS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 12])
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2], list(range(12))])


def parity(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + k) % 3 != 0


def first_tokens(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 2 + b


FORMS: dict[str, Predicate] = {
    "causal": hf.causal_mask_function,
    "bidirectional": hf.bidirectional_mask_function,
    "window": hf.sliding_window_causal_mask_function(3),
    "window of 1": hf.sliding_window_causal_mask_function(1),
    "window both ways": hf.sliding_window_bidirectional_mask_function(2),
    "chunks": hf.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "two masks or one": hf.or_masks(
        hf.sliding_window_causal_mask_function(2), hf.causal_mask_function
    ),
}
PREDICATES: dict[str, Predicate] = {
    "function": parity,
    "causal or function": hf.or_masks(hf.causal_mask_function, first_tokens),
    "causal and function": hf.and_masks(hf.causal_mask_function, parity),
    "blocks seen whole": hf.or_masks(
        hf.causal_mask_function,
        hf.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 1, -1, 2, 2, -1], [0] * 12])),
    ),
    "window of 0": hf.sliding_window_causal_mask_function(0),
}


def pack(inner: Predicate, positions: Tensor = POSITIONS, ids: Tensor = IDS) -> Predicate:
    """A packing mask as Transformers composes it since 5.18."""
    if not hasattr(hf, "remap_positions_for_packed_sequence"):
        pytest.skip("this Transformers does not remap positions")
    remapped = hf.remap_positions_for_packed_sequence(inner, positions)
    return hf.and_masks(remapped, hf.packed_sequence_mask_function(ids))


def arguments(
    place: tuple[int, int, int, int], padding: str, predicate: Predicate
) -> dict[str, Any]:
    rows = PADDING[padding]
    names = ("q_length", "kv_length", "q_offset", "kv_offset")
    return {
        "batch_size": 2,
        **dict(zip(names, place, strict=True)),
        "mask_function": predicate,
        "device": torch.get_default_device(),
        "attention_mask": None if rows is None else torch.tensor(rows).bool(),
    }


def check(**given: Any) -> MaskTensor:
    mask = build_mask(**given)
    assert isinstance(mask, MaskTensor)
    expected = hf.sdpa_mask(**given, allow_is_causal_skip=False)
    assert mask.shape == (2, 1, given["q_length"], given["kv_length"])
    assert torch.equal(mask.dense(), expected.expand(mask.shape))
    return mask


def is_exact(mask: MaskTensor) -> bool:
    assert mask.mask is not None
    return mask.mask.is_exact


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("form", FORMS)
def test_known_form_is_an_interval_mask(form: str, padding: str) -> None:
    for place in PLACES:
        mask = check(**arguments(place, padding, FORMS[form]))
        assert is_exact(mask) == (padding != "holes")


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", PREDICATES)
def test_other_predicate_is_evaluated(name: str, padding: str) -> None:
    for place in PLACES:
        check(**arguments(place, padding, PREDICATES[name]))


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        (hf.causal_mask_function, True),
        (hf.sliding_window_causal_mask_function(2), True),
        # Chunks are counted from the start of each document: positions matter.
        (hf.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64)), False),
    ],
)
def test_packed_documents(inner: Predicate, expected: bool) -> None:
    place = (12, 12, 0, 0)
    plain = hf.and_masks(inner, hf.packed_sequence_mask_function(IDS))
    assert is_exact(check(**arguments(place, "none", plain)))
    assert is_exact(check(**arguments(place, "none", pack(inner)))) == expected


@pytest.mark.parametrize(
    ("positions", "ids"),
    [
        # A position that jumps inside a document, and a document in two parts.
        (POSITIONS + (torch.arange(12) == 11).long(), IDS),
        (POSITIONS, torch.tensor([[0] * 5 + [1] * 4 + [0] * 3, [0] * 12])),
    ],
)
def test_packing_that_is_not_in_runs_is_evaluated(positions: Tensor, ids: Tensor) -> None:
    inner = hf.sliding_window_causal_mask_function(3)
    mask = check(**arguments((12, 12, 0, 0), "none", pack(inner, positions, ids)))
    assert not is_exact(mask)


def test_documents_with_blocks_seen_whole() -> None:
    overlay = hf.blockwise_overlay(torch.tensor([[-1, 0, 0, 0, 0, 0, 0, -1, -1, 2, 2, -1]] * 2))
    both = hf.or_masks(hf.causal_mask_function, overlay)
    check(
        **arguments(
            (12, 12, 0, 0), "none", hf.and_masks(both, hf.packed_sequence_mask_function(IDS))
        )
    )


def test_predicate_of_scalars() -> None:
    """`use_vmap` says that the predicate may not be broadcast."""
    table = torch.rand(2, 12) > 0.5

    def scalars_only(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert b.dim() == h.dim() == q.dim() == k.dim() == 0
        return table[b, k] | (k == q)

    for predicate in (
        scalars_only,
        hf.or_masks(hf.causal_mask_function, scalars_only),
        hf.and_masks(hf.causal_mask_function, scalars_only),
    ):
        check(**arguments((12, 12, 0, 0), "right", predicate), use_vmap=True)
        check(**arguments((4, 12, 8, 0), "left", predicate), use_vmap=True)


def test_padding_that_hides_nothing_leaves_the_plain_mask() -> None:
    """So that the fastest schedule of plain causal or full attention stays open."""
    seen = torch.ones(2, 12)
    causal = build_mask(2, 12, 12, attention_mask=seen)
    both = build_mask(2, 12, 12, attention_mask=seen, mask_function=hf.bidirectional_mask_function)
    assert isinstance(causal, MaskTensor) and type(causal.mask) is Window
    assert isinstance(both, MaskTensor) and type(both.mask) is Full


@pytest.mark.parametrize("predicate", [hf.causal_mask_function, parity])
def test_length_of_a_static_cache_may_grow_afterwards(predicate: Predicate) -> None:
    length = torch.tensor(6)
    given = arguments((3, 12, 6, 0), "left", predicate)
    mask = build_mask(**(given | {"q_offset": length}))
    expected = hf.sdpa_mask(**given, allow_is_causal_skip=False)
    length.add_(2)
    assert isinstance(mask, MaskTensor)
    assert torch.equal(mask.dense(), expected)


def test_one_query_of_a_compiled_step_gets_a_bool_tensor() -> None:
    given = arguments((1, 12, 6, 0), "left", hf.causal_mask_function)
    mask = build_mask(**given, allow_is_causal_skip=False)
    assert type(mask) is Tensor
    assert torch.equal(mask, hf.sdpa_mask(**given, allow_is_causal_skip=False))


def test_form_that_changed_its_meaning_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later Transformers may keep a name and change what it says."""

    def one_more(sliding_window: int) -> Predicate:
        return lambda b, h, q, k: k >= q - sliding_window

    monkeypatch.setattr(hf, "sliding_window_overlay", one_more)
    try:
        transformers_masks.learn_forms()
        given = arguments((12, 12, 0, 0), "right", hf.sliding_window_causal_mask_function(3))
        assert not is_exact(check(**given))
    finally:
        monkeypatch.undo()
        transformers_masks.learn_forms()
    assert is_exact(check(**arguments((12, 12, 0, 0), "right", FORMS["window"])))


@pytest.mark.parametrize("change", [lambda: None, lambda window, more: None])
def test_form_that_takes_other_arguments_is_evaluated(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "sliding_window_overlay", change)
    try:
        transformers_masks.learn_forms()
        assert not is_exact(check(**arguments((12, 12, 0, 0), "right", FORMS["chunks"])))
    finally:
        monkeypatch.undo()
        transformers_masks.learn_forms()


# ---------------------------------------------------------------- the mask as a tensor


@pytest.fixture
def mask() -> MaskTensor:
    return check(**arguments((12, 12, 0, 0), "left", hf.causal_mask_function))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:, :, :, :7],
        lambda x: x[:, :, 3:5],
        lambda x: x & ~torch.eye(12, dtype=torch.bool),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: x.expand(-1, 3, -1, -1).contiguous(),
    ],
)
def test_slices_and_joins_are_masks_again(mask: MaskTensor, change: Any) -> None:
    result = change(mask)
    assert isinstance(result, MaskTensor) and result.mask is not None
    assert torch.equal(result.dense(), change(mask.dense()))
    B, H, M, N = result.shape
    assert torch.equal(result.mask.dense(B, H, M, N), result.dense())


def test_questions_are_answered(mask: MaskTensor) -> None:
    assert not mask.all() and mask.any()
    assert int(mask.sum()) == int(mask.dense().sum())
    assert mask.dtype == torch.bool and mask.dim() == 4 and mask.is_contiguous()
    assert "Window" in repr(mask)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.zeros(2, 1, 12, 12) + x,
        lambda x: x[:, :, :, :7] * -1e9,
        lambda x: x.float(),
        lambda x: torch.zeros(2, 1, 12, 12).masked_fill(~x, -1.0),
        lambda x: x.fill_(True),
        lambda x: x[:, :, 0].logical_not_(),
    ],
)
def test_mask_used_as_numbers_raises(mask: MaskTensor, change: Any) -> None:
    """A model that adds its mask to the scores would add ones and zeros."""
    with pytest.raises(NotImplementedError, match="computes with its attention mask itself"):
        change(mask)
