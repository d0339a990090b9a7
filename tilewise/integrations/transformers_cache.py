"""Transformers' cache interface over `tilewise.KVCache`: `generate()` with a paged cache.

    cache = PagedCache(page_size=16, max_length=2048)
    model.generate(**inputs, cache=cache)  # past_key_values= before Transformers 5.24

A layer hands the new keys and values on as they are, with the cache beside them; the attention
function of `register()` reads it there. Of other attention functions it is refused at the second
step, since only then does it show.

Dims: B batch, G kv heads, M new tokens, D and E head dims. Transformers hands `[B, G, M, D]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        "tilewise.integrations.transformers_cache needs Transformers 5.4 or later: "
        "pip install 'transformers>=5.4'."
    ) from error

from ..decode.cache import KVCache

# Where a tensor of new keys carries the cache that they have gone into.
_NAME = "_tilewise_cache"


def cache_of(key: Tensor) -> KVCache | None:
    """The cache behind keys that `PagedCache` handed on."""
    layer: PagedLayer | None = getattr(key, _NAME, None)
    if layer is None:
        return None
    layer.is_read = True
    return layer.cache


class PagedLayer(CacheLayerMixin):
    """One layer's `KVCache`, made at its first tokens."""

    is_sliding = False
    is_croppable = True

    def __init__(self, page_size: int | None, max_length: int) -> None:
        super().__init__()
        self.page_size, self.max_length = page_size, max_length
        self.cache: KVCache | None = None
        self.is_read = True
        self._length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        B, G, _, D = key_states.shape
        self.cache = KVCache.allocate(
            B, self.max_length, G, D, value_states.shape[3], page_size=self.page_size,
            dtype=key_states.dtype, device=key_states.device,
        )  # fmt: skip
        self.keys, self.values = self.cache.k, self.cache.v
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append, and hand the new tokens on with the cache beside them."""
        if self.cache is None:
            self.lazy_initialization(key_states, value_states)
        assert self.cache is not None
        if not self.is_read:
            raise ValueError(
                "PagedCache: attention did not read the cache, got a model without "
                'attn_implementation="tilewise", or one that expands what a cache returns '
                "(DeepSeek); leave past_key_values out there."
            )
        self.is_read = False
        self.cache.append(key_states.transpose(1, 2), value_states.transpose(1, 2))
        self._length += key_states.shape[2]
        # A view of its own: the mark must not stay on the model's tensor.
        keys = key_states.view_as(key_states)
        setattr(keys, _NAME, self)
        return keys, value_states

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self.max_length

    # Its name before Transformers 5.20.
    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + int(query_length), 0

    def crop(self, max_length: int) -> None:
        """Give up tokens behind `max_length`; of one below 1, so many from the end."""
        if max_length <= 0:
            max_length = self._length + max_length
        if self.cache is not None and max_length < self._length:
            self.cache.rewind(self._length - max_length)
            self._length = max_length

    def reset(self) -> None:
        if self.cache is not None:
            self.cache.lengths.zero_()
        self._length = 0

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows in another order. Pages are copied, since two beams write into them."""
        if self.cache is None:
            return
        for x in (self.cache.k, self.cache.v):
            rows = x.unflatten(0, (self.cache.B, -1))
            rows.copy_(rows.index_select(0, beam_idx.to(x.device)))


class PagedCache(Cache):
    """A `past_key_values` whose layers are `KVCache`s; layers appear as the model asks for them.

    Args:
        page_size: slots of a page; contiguous when None.
        max_length: the most tokens of a sequence, prompt included.
    """

    def __init__(self, page_size: int | None = 16, max_length: int = 4096) -> None:
        super().__init__(layers=[])
        self._sizes = (page_size, max_length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(PagedLayer(*self._sizes))
        found: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all layers."""
        return sum(layer.cache.nbytes for layer in self.layers if layer.cache is not None)
