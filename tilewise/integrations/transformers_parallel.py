"""Transformers' models over a sequence that is dealt to ranks.

    from tilewise.integrations.transformers import ContextParallel, register

    ranks = ContextParallel(mesh)
    register(context_parallel=ranks)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tilewise")
    loss = model(**ranks.shard(batch)).loss   # this rank's share; the sum over ranks is the loss

The model runs on this rank's tokens alone; only attention meets the other ranks'.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..parallel.api import context_parallel_attention
from ..parallel.layout import Layout, zigzag
from ..parallel.prepare import links_of
from .mask_tensor import MaskTensor, visible_keys
from .transformers_masks import build_mask

_IGNORED = -100


class ContextParallel:
    """Where the ranks are, and how the batch that is under way is dealt to them.

    Args:
        mesh, group, schedule: as for `tilewise.context_parallel_attention`.
    """

    def __init__(self, mesh: Any = None, *, group: Any = None, schedule: str = "auto") -> None:
        self._where = {"mesh": mesh, "group": group, "schedule": schedule}
        links = links_of(mesh, group)
        self.ranks, self.rank = 1, 0
        for link in links:
            self.ranks, self.rank = self.ranks * link.ranks, self.rank * link.ranks + link.rank
        self._layout: Layout | None = None
        self._mask: Mask | None = None
        self._visible: Tensor | None = None

    def shard(
        self, batch: dict[str, Any], *, layout: Layout | None = None, mask: Mask | None = None
    ) -> dict[str, Any]:
        """This rank's part of a batch, for the model's next call, forward and backward.

        Args:
            batch: `input_ids` or `inputs_embeds` of whole sequences, alike on every rank; with
                `labels`, the loss is this rank's share of the mean over all of them. A 2-D
                `attention_mask` hides keys; `position_ids` are 0, 1, ... when not given. What else
                is in it is handed on as it is.
            layout: zigzag when None. mask: joined with what the model itself asks for, such as
                `documents(cu_seqlens)`; kept on the host it costs no waiting.
        Returns: the arguments of the model's call.
        Raises: ValueError where there is no sequence in the batch.
        """
        found = dict(batch)
        name = next((n for n in ("input_ids", "inputs_embeds") if found.get(n) is not None), None)
        if name is None:
            raise ValueError("shard: batch must hold input_ids or inputs_embeds, got neither.")
        whole: Tensor = found[name]
        B, S, device = whole.shape[0], whole.shape[1], whole.device
        layout = zigzag(S, self.ranks) if layout is None else layout
        padding = found.pop("attention_mask", None)
        if padding is not None:
            by_key = visible_keys(padding.to(torch.bool), S)
            mask = by_key if mask is None else mask & by_key
        self._layout, self._mask = layout, mask
        positions = found.get("position_ids")
        if positions is None:
            positions = torch.arange(S, device=device).unsqueeze(0)
        found["position_ids"] = layout.shard(positions, self.rank)
        found[name] = layout.shard(whole, self.rank)
        labels = found.pop("labels", None)
        if labels is not None:
            # Each token's label is the next token, which another rank may hold.
            shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
            found["num_items_in_batch"] = (shifted != _IGNORED).sum()
            found["labels"] = found["shift_labels"] = layout.shard(shifted, self.rank).contiguous()
        # With a mask of its own, Transformers does not take positions that jump for packing.
        length = layout.lengths[self.rank]
        self._visible = torch.ones(B, length, dtype=torch.bool, device=device)
        found["attention_mask"] = self._visible
        found["use_cache"] = False
        return found

    def build_mask(
        self, batch_size: int, q_length: int, kv_length: int, *args: Any, **arguments: Any
    ) -> Tensor | Mask:
        """The mask of the whole sequence, for a model that sees its own tokens only."""
        if self._layout is None or arguments.get("attention_mask") is not self._visible:
            raise ValueError(
                "context_parallel: the model's arguments must come from ContextParallel.shard."
            )
        size = self._layout.size
        arguments |= {"attention_mask": None, "q_offset": 0, "kv_offset": 0}
        found = build_mask(batch_size, size, size, **arguments)
        own = found.mask if isinstance(found, MaskTensor) else found
        if not isinstance(own, Mask):
            raise NotImplementedError("context_parallel: compiled decoding has no ranks to go to.")
        joined = own if self._mask is None else own & self._mask
        return MaskTensor((batch_size, 1, q_length, kv_length), found_device(found), joined)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: object, terms: dict[str, Any]
    ) -> Tensor:
        """Attention of one layer; q, k and v are `[B, own tokens, heads, D]`."""
        if not isinstance(mask, MaskTensor) or self._layout is None or mask.mask is None:
            raise NotImplementedError(
                "context_parallel: a layer whose mask Transformers did not make (cross-attention, "
                "a tensor of the user's) cannot be spread over ranks."
            )
        terms = {name: value for name, value in terms.items() if name != "bias"}
        return context_parallel_attention(
            q, k, v, layout=self._layout, mask=mask.mask, **self._where, **terms
        )


def found_device(mask: Tensor | Mask) -> torch.device:
    return mask.device if isinstance(mask, Tensor) else torch.device("cpu")
