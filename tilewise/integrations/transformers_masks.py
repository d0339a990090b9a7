"""Transformers' mask interface over Tilewise masks.

Transformers describes a mask by a predicate over (batch, head, query, key), composed from a few
factories of `transformers.masking_utils`, and a 2-D padding mask. The factories that intervals can
say become interval masks; any other predicate is evaluated tile by tile.

Dims: B batch, M query length, N key length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from ..core.mask import Mask
from ..core.mask_leaves import Full, full, intervals, window
from .mask_tensor import MaskTensor, Predicate, evaluated_by_tile, over_scalars, visible_keys


class Bounds(NamedTuple):
    """A window around the query: keys up to `left` before it and `right` after; None unbounded."""

    left: int | None
    right: int | None


@dataclass(frozen=True)
class Placement:
    """The call for which a predicate is translated.

    Query m stands at position `m + q_offset` and key n at `n + kv_offset`. An offset may be a
    one-element tensor (static caches), already detached from what the cache will add to it.
    """

    B: int
    M: int
    N: int
    q_offset: int | Tensor
    kv_offset: int | Tensor
    device: torch.device
    use_vmap: bool

    @property
    def offset(self) -> int | Tensor | None:
        """The key index at which query 0 stands; None where that is bottom-right alignment."""
        offset = self.q_offset - self.kv_offset
        if isinstance(offset, Tensor):
            return offset.reshape(1)
        return None if offset == self.N - self.M else offset


def build_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Predicate = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    **hints: Any,
) -> Tensor | Mask:
    """A Tilewise mask for what Transformers asks; the value of `AttentionMaskInterface`.

    Args:
        batch_size, q_length, kv_length: B, M, N.
        q_offset, kv_offset: positions of the first query and the first key.
        mask_function: predicate of (batch, head, query position, key position). As in Transformers
            it is asked for head 0 only.
        attention_mask: `[B, positions]`, nonzero where a key may be seen; keys past its end may
            not.
        hints: `device`, when not given attention_mask's or torch's default; `use_vmap` where the
            predicate takes scalars only; `allow_is_causal_skip`. What else Transformers sends
            (dtype, config, local_size) does not change the mask.
    Returns: a `MaskTensor`; inside torch.compile the `Mask` itself; for one query of a compiled
        decode step, where Transformers builds the mask outside the graph, a bool tensor.
    Raises: ValueError for an attention_mask that is not `[B, positions]`, and for position_ids
        that neither rise by one nor restart as packed documents do.
    """
    device = hints.get("device")
    if device is None and attention_mask is not None:
        device = attention_mask.device
    at = Placement(
        batch_size,
        q_length,
        kv_length,
        _snapshot(q_offset),
        _snapshot(kv_offset),
        torch.get_default_device() if device is None else torch.device(device),
        bool(hints.get("use_vmap", False)),
    )
    parts = conjuncts(mask_function, at)
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, at.B):
            raise ValueError(
                f"Tilewise in Transformers: attention_mask must be [B, positions] with B = {at.B} "
                "(nonzero where a token is real), or a mask of all elements that broadcasts to "
                f"[B, H, M, N], got {list(attention_mask.shape)}."
            )
        parts.append(visible_keys(_padding_window(attention_mask, at), at.M))
    mask = join(parts, at)
    if torch.compiler.is_compiling():
        return mask
    if at.M == 1 and not hints.get("allow_is_causal_skip", True):
        return mask.dense(at.B, 1, at.M, at.N, device=at.device)
    return MaskTensor((at.B, 1, at.M, at.N), at.device, mask)


def _snapshot(offset: int | Tensor) -> int | Tensor:
    """A static cache adds to its length in place before the mask is read."""
    return offset.clone() if isinstance(offset, Tensor) else offset


# ---------------------------------------------------------------- padding


def _padding_window(attention_mask: Tensor, at: Placement) -> Tensor:
    """The `[B, N]` part of a 2-D mask that speaks of the stored keys; past its end is hidden."""
    seen = attention_mask.to(at.device, torch.bool)
    if isinstance(at.kv_offset, Tensor):
        columns = torch.arange(at.N, device=at.device) + at.kv_offset
        inside = columns < seen.shape[1]
        return seen[:, columns.clamp(max=seen.shape[1] - 1)] & inside
    seen = seen[:, at.kv_offset : at.kv_offset + at.N]
    return torch.nn.functional.pad(seen, (0, at.N - seen.shape[1]))


# ---------------------------------------------------------------- predicates


def conjuncts(predicate: Predicate, at: Placement, document_ids: Tensor | None = None) -> list[Any]:
    """Masks and `Bounds` whose conjunction is the predicate.

    Args:
        document_ids: `[B, M]`, in order, of the packing mask with which the result will be joined.
    """
    form, inside = made_by(predicate)
    match form:
        case "causal_mask_function":
            return [Bounds(None, 0)]
        case "bidirectional_mask_function":
            return []
        case "sliding_window_overlay" if inside["sliding_window"] > 0:
            return [Bounds(inside["sliding_window"] - 1, None)]
        case "sliding_window_bidirectional_overlay" if inside["sliding_window"] >= 0:
            return [Bounds(inside["sliding_window"], inside["sliding_window"])]
        case "chunked_overlay":
            return [_chunks(inside["chunk_size"], inside["left_padding"], at)]
        case "packed_sequence_mask_function":
            ids = inside["packed_sequence_mask"]
            if ids is document_ids or _is_in_order(ids, at):
                return [_documents(ids)]
        case "remap_positions_for_packed_sequence" if document_ids is not None:
            _check_restarts(inside["position_ids"], document_ids)
            parts = conjuncts(inside["mask_function"], at)
            is_relative = all(isinstance(part, Bounds) for part in parts)
            if is_relative and _are_steady(inside["position_ids"], document_ids):
                return parts
        case "and_masks":
            terms = [(term, *made_by(term)) for term in inside["mask_functions"]]
            for _, factory, given in terms:
                if factory == "packed_sequence_mask_function":
                    ids = given["packed_sequence_mask"]
                    document_ids = ids if _is_in_order(ids, at) else document_ids
            inner = (conjuncts(term, at, document_ids) for term, *_ in terms)
            return [part for parts in inner for part in parts]
        case "or_masks":
            terms = inside["mask_functions"]
            return [reduce(Mask.__or__, (join(conjuncts(t, at, document_ids), at) for t in terms))]
    return [_evaluated(predicate, at)]


def join(parts: list[Any], at: Placement) -> Mask:
    """The conjunction, with all windows in one."""
    windows = [part for part in parts if isinstance(part, Bounds)]
    masks = [part for part in parts if not isinstance(part, (Bounds, Full))]
    left = _narrowest([w.left for w in windows])
    right = _narrowest([w.right for w in windows])
    if left is not None or right is not None:
        masks.insert(0, window(left, right, offset=at.offset))
    return reduce(Mask.__and__, masks) if masks else full()


def _narrowest(bounds: list[int | None]) -> int | None:
    given = [bound for bound in bounds if bound is not None]
    return min(given) if given else None


def _chunks(size: int, padding: Tensor, at: Placement) -> Mask:
    """Keys of the query's chunk; a batch row counts its chunks from the end of its left padding."""
    position = torch.arange(at.M, device=at.device) + at.q_offset
    origin = padding.to(at.device).reshape(-1, 1)
    chunk = torch.div(position - origin, size, rounding_mode="floor")
    start = (chunk * size + origin - at.kv_offset).unsqueeze(-1)
    return intervals(start, start + size)


def _is_in_order(ids: Tensor, at: Placement) -> bool:
    """Whether document ids `[B, M]` never fall, so that each document is one run of keys."""
    is_square = at.M == at.N == ids.shape[1] and at.offset is None and at.kv_offset == 0
    return bool(is_square) and not bool((ids.diff(dim=-1) < 0).any())


def _are_steady(positions: Tensor, ids: Tensor) -> bool:
    """Whether positions rise by one inside each document, so that windows keep their meaning."""
    return bool(((positions.diff(dim=-1) == 1) | (ids.diff(dim=-1) != 0)).all())


def _check_restarts(positions: Tensor, ids: Tensor) -> None:
    """Transformers takes any step other than one for the start of a packed document.

    Positions that skip ahead, or share a prefix, would lose keys without a word.
    """
    begins = ids.diff(dim=-1) != 0
    is_restart = (positions[:, 1:] == 0) | (positions[:, 1:] == positions[:, :1])
    wrong = (begins & ~is_restart).nonzero().tolist()
    if wrong:
        row, at = wrong[0]
        before, after = positions[row, at : at + 2].tolist()
        raise ValueError(
            "Tilewise in Transformers: position_ids without an attention_mask must rise by one, "
            f"or restart where a packed document starts, got {after} after {before} in row {row}; "
            "with an attention_mask they are positions only."
        )


def _documents(ids: Tensor) -> Mask:
    ids = ids.contiguous()
    starts = torch.searchsorted(ids, ids, right=False)
    stops = torch.searchsorted(ids, ids, right=True)
    return intervals(starts.unsqueeze(-1), stops.unsqueeze(-1))


def _evaluated(predicate: Predicate, at: Placement) -> Mask:
    """The predicate itself, at shifted positions, for head 0."""

    asked = over_scalars(predicate) if at.use_vmap else predicate

    def ask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return asked(b, torch.zeros_like(h[:, :1]), m + at.q_offset, n + at.kv_offset)

    return evaluated_by_tile(ask, (at.B, 1, at.M, at.N), at.device)


# ---------------------------------------------------------------- which factory made a predicate

# The code of every predicate that `conjuncts` can translate, and the name of its factory.
_FORMS: dict[CodeType, str] = {}


def made_by(predicate: Predicate) -> tuple[str, dict[str, Any]]:
    """The factory of `masking_utils` that made the predicate, and what it was given.

    ("", {}) where it was none of them. Compiled code cannot look into a function, so there only
    predicates that need no factory are known.
    """
    if torch.compiler.is_compiling():
        for name in ("causal_mask_function", "bidirectional_mask_function"):
            if predicate is getattr(masking_utils, name):
                return name, {}
        return "", {}
    code = getattr(predicate, "__code__", None)
    if code not in _FORMS:
        return "", {}
    cells = predicate.__closure__ or ()
    inside = (cell.cell_contents for cell in cells)
    return _FORMS[code], dict(zip(code.co_freevars, inside, strict=True))


def learn_forms() -> None:
    """Find the factories of the installed Transformers and try them on small masks.

    Where one means something else than `conjuncts` takes it for, none is used: every predicate is
    then evaluated, which is slower and right.
    """
    _FORMS.clear()
    try:
        # Whatever device the user has made torch's default.
        with torch.device("cpu"):
            made = _samples()
            _FORMS.update({predicate.__code__: name for name, predicate in made.items()})
            both = [masking_utils.and_masks(*made.values()), masking_utils.or_masks(*made.values())]
            if all(_is_understood(predicate) for predicate in [*made.values(), *both]):
                return
    except (AttributeError, KeyError, TypeError):
        # A factory that takes or keeps other arguments.
        pass
    _FORMS.clear()


def _samples() -> dict[str, Any]:
    """One predicate of each factory that this version has."""
    causal = masking_utils.causal_mask_function
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 2, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [0, 0, 1, 2, 3, 0, 1, 2]])
    arguments: dict[str, tuple[Any, ...]] = {
        "sliding_window_overlay": (2,),
        "sliding_window_bidirectional_overlay": (2,),
        "chunked_overlay": (3, torch.tensor([0, 2])),
        "packed_sequence_mask_function": (ids,),
        "remap_positions_for_packed_sequence": (causal, positions),
        "and_masks": (causal,),
        "or_masks": (causal,),
    }
    made = {
        name: getattr(masking_utils, name)(*given)
        for name, given in arguments.items()
        if hasattr(masking_utils, name)
    }
    for name in ("causal_mask_function", "bidirectional_mask_function"):
        made[name] = getattr(masking_utils, name)
    return made


def _is_understood(predicate: Predicate) -> bool:
    at = Placement(2, 8, 8, 0, 0, torch.device("cpu"), False)
    b, h, m, n = torch.meshgrid(*(torch.arange(x) for x in (2, 1, 8, 8)), indexing="ij")
    return torch.equal(join(conjuncts(predicate, at), at).dense(2, 1, 8, 8), predicate(b, h, m, n))


learn_forms()
