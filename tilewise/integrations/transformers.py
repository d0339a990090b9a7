"""Tilewise as an attention implementation of Hugging Face Transformers.

    from tilewise.integrations.transformers import register

    register()
    model = AutoModel.from_pretrained(path, attn_implementation="tilewise")

Two functions are registered: one computes attention, the other builds its masks. Both are needed:
for a key without a mask function Transformers drops padding, windows and packing silently.

Dims: B batch, M query length, N key length, H query heads, G kv heads, D qk dim, E value dim.
    Transformers hands `[B, H, M, D]`; Tilewise takes `[B, M, H, D]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        __version__,
        masking_utils,
    )
except ImportError as error:
    raise ImportError(
        "tilewise.integrations.transformers needs Transformers 5.4 or later: "
        "pip install 'transformers>=5.4'."
    ) from error

from ..core.mask import Mask
from ..core.mask_leaves import full, intervals, window
from ..core.shapes import check_cu_seqlens, is_read
from ..decode.api import attention_with_cache
from ..decode.cache import KVCache
from ..dense.api import attention, attention_varlen
from .mask_tensor import MaskTensor, visible_elements, visible_keys
from .transformers_cache import cache_of
from .transformers_masks import build_mask
from .transformers_parallel import ContextParallel as ContextParallel

# What models hand to every attention function and what cannot change its result.
HARMLESS = frozenset(
    {
        "cache_position",
        "encoder_hidden_states",
        "kernel_options",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
    }
)

# Arguments that ask for what is not done here, and what to do instead.
_PAGED = "keys are not read from a paged cache; generate() with a dynamic or a static cache works"
_REFUSED = {
    "output_attentions": "the attention probabilities are never stored; to look at them, load the "
    'model with attn_implementation="eager"',
    "block_table": _PAGED,
    "cache": _PAGED,
    "indices": "the keys chosen for each query are expected in the mask; load the model with "
    'attn_implementation="sdpa"',
}

# Transformers reads a meaning of its own into names with these words.
_RESERVED = ("eager", "flash", "flex", "paged", "sdpa")


def register(
    name: str = "tilewise",
    *,
    backend: str = "auto",
    ignore: Iterable[str] = (),
    context_parallel: ContextParallel | None = None,
) -> None:
    """Make `attn_implementation=name` known to Transformers. Calling it again is harmless.

    Args:
        name: the key, an identifier without eager, flash, flex, paged or sdpa in it.
        backend: as in `tilewise.attention`.
        ignore: further arguments of a model's attention call that cannot change its result. One
            that is neither understood, nor in `HARMLESS`, nor here, raises.
        context_parallel: spreads sequences over ranks; batches come from its `shard`.
    Raises: ValueError for a name that Transformers would take for something else; ImportError
        where Transformers is older than 5.4, whose mask interface is another.
    """
    if "q_offset" not in signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"register: Transformers must be 5.4 or later, got {__version__}.")
    is_name = isinstance(name, str) and re.fullmatch(r"[A-Za-z_]\w*", name)
    if not is_name or any(word in name for word in _RESERVED):
        raise ValueError(
            f"register: name must be an identifier without any of {', '.join(_RESERVED)} in it, "
            f"got {name!r}."
        )
    if isinstance(ignore, str) or not isinstance(ignore, Iterable):
        raise ValueError(f"register: ignore must be a list of argument names, got {ignore!r}.")
    if not isinstance(context_parallel, ContextParallel | None):
        got = type(context_parallel).__name__
        raise ValueError(f"register: context_parallel must be a ContextParallel, got {got}.")
    harmless = HARMLESS | {*ignore}
    masks: Any = build_mask
    if context_parallel is not None:
        # The loss's own; every layer gets it too.
        harmless |= {"shift_labels"}
        masks = context_parallel.build_mask
    implementation = Implementation(name, backend, harmless, context_parallel)
    AttentionInterface.register(name, implementation)
    AttentionMaskInterface.register(name, masks)


@dataclass(frozen=True)
class Options:
    """The arguments of an attention call that mean something, by Transformers' names."""

    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    position_bias: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    deterministic: bool | None = None


_OPTIONS = frozenset(option.name for option in fields(Options))


@dataclass(frozen=True)
class Implementation:
    """The attention function that models call; the value of `AttentionInterface`."""

    name: str
    backend: str
    harmless: frozenset[str]
    context_parallel: ContextParallel | None = None

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | Mask | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """Attention of `query` `[B, H, M, D]` over `key`, `value` `[B, G, N, D or E]`.

        Args:
            module: the layer; its `is_causal` counts where no argument of that name comes.
            attention_mask: what `build_mask` made; or bool `[B or 1, H or 1, M or 1, N]`, True
                where a key is seen; or floating of such a shape, added to the scores. Each says
                all of what is seen, causality and window included. None leaves that to
                `is_causal` and `sliding_window`.
            arguments: `Options`, what is harmless, and anything else that is None or False.
        Returns: `[B, M, H, E]`, and None for the probabilities. A query that sees no key gives 0.
        Raises: NotImplementedError for an argument that cannot be honoured, ValueError for one
            that does not fit.
        """
        options = self._read_options(arguments)
        if options.is_causal is None:
            options = replace(options, is_causal=bool(getattr(module, "is_causal", True)))
        if query.shape[0] == 1 < key.shape[0]:
            # Learned queries without a batch, as SDPA broadcasts them.
            query = query.expand(key.shape[0], -1, -1, -1)
        self._check_dtypes(query, key, value)
        cache = cache_of(key)
        if cache is not None:
            return self._attend_cached(query, cache, attention_mask, options), None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        mask: Mask | None
        bias: Tensor | None
        if self.context_parallel is not None:
            mask, bias = None, None
        else:
            mask, bias = self._read_mask(attention_mask, q, k)
        if options.position_bias is not None:
            bias = options.position_bias if bias is None else bias + options.position_bias
        terms: dict[str, Any] = {
            "scale": options.scaling,
            "softcap": options.softcap,
            "bias": bias,
            "sinks": self._read_sinks(options.s_aux, q.shape[2]),
            "dropout_p": options.dropout,
            "deterministic": bool(options.deterministic),
            "backend": self.backend,
        }
        if self.context_parallel is not None:
            if bias is not None or options.cu_seq_lens_q is not None:
                raise NotImplementedError(
                    f"{self}: position_bias and cu_seq_lens_q cannot be honoured over ranks; "
                    "documents go to ContextParallel.shard(mask=documents(cu_seqlens))."
                )
            return self.context_parallel.attend(q, k, v, attention_mask, terms), None
        packing = self._read_packing(options, bias)
        if packing is not None and mask is None:
            out = attention_varlen(
                *(x.flatten(0, 1) for x in (q, k, v)),
                cu_seqlens_q=packing[0],
                cu_seqlens_k=packing[1],
                mask=self._unstated_mask(options),
                **terms,
            )
            return out.unflatten(0, q.shape[:2]), None
        if mask is None:
            mask = self._unstated_mask(options, q.shape[1], k.shape[1])
        if packing is not None:
            if q.shape[0] != 1:
                raise ValueError(
                    f"{self}: cu_seq_lens_q beside an attention_mask needs a batch of 1, "
                    f"got {q.shape[0]}."
                )
            mask = mask & self._documents(packing, q.shape[1], k.shape[1])
        return attention(q, k, v, mask=mask, **terms), None

    def _attend_cached(
        self, query: Tensor, cache: KVCache, attention_mask: Tensor | Mask | None, options: Options
    ) -> Tensor:
        """Over a `PagedCache`, whose rows are all as long."""
        q = query.transpose(1, 2)
        refused = (options.position_bias, options.cu_seq_lens_q)
        if self.context_parallel is not None or any(x is not None for x in refused):
            raise NotImplementedError(
                f"{self}: context parallelism, position_bias and cu_seq_lens_q cannot be honoured "
                "over a PagedCache; leave past_key_values to generate()."
            )
        if options.dropout > 0.0:
            raise NotImplementedError(f"{self}: dropout cannot be honoured over a PagedCache.")
        mask = attention_mask if isinstance(attention_mask, Mask) else None
        if isinstance(attention_mask, MaskTensor):
            mask = attention_mask.mask
        elif isinstance(attention_mask, Tensor):
            if attention_mask.dtype != torch.bool or attention_mask.shape[1] != 1:
                raise NotImplementedError(
                    f"{self}: over a PagedCache attention_mask must be bool [B, 1, M, N], got "
                    f"{attention_mask.dtype} {list(attention_mask.shape)}."
                )
            # Slots behind its last key are free.
            seen = torch.nn.functional.pad(
                attention_mask, (0, cache.capacity - attention_mask.shape[3])
            )
            mask = visible_elements(seen, *seen.shape[2:])
        if mask is None:
            mask = self._unstated_mask(options)
        return attention_with_cache(
            q,
            cache,
            mask=mask,
            scale=options.scaling,
            softcap=options.softcap,
            sinks=self._read_sinks(options.s_aux, q.shape[2]),
            backend=self.backend if self.backend in ("auto", "reference", "tiled") else "auto",
        )

    def _check_dtypes(self, *tensors: Tensor) -> None:
        dtypes = [x.dtype for x in tensors]
        if dtypes[0] == dtypes[1] == dtypes[2]:
            return
        if torch.float64 in dtypes or not torch.is_autocast_enabled(tensors[0].device.type):
            raise ValueError(
                f"{self}: query, key and value must share one dtype outside torch.autocast (which "
                f"casts all but float64), got {', '.join(map(str, dtypes))}; load the model with "
                "one dtype, or run it under autocast."
            )

    def _read_options(self, arguments: dict[str, Any]) -> Options:
        known = {name: value for name, value in arguments.items() if name in _OPTIONS}
        for name, value in arguments.items():
            if name in known or name in self.harmless or value is None or value is False:
                continue
            reason = _REFUSED.get(name)
            if reason is None:
                reason = (
                    "it is not known whether it changes the result; if it does not, allow it by "
                    f"register({self.name!r}, ignore=[{name!r}])"
                )
            raise NotImplementedError(f"{self}: {name} cannot be honoured: {reason}.")
        return Options(**known)

    def _read_mask(
        self, given: Tensor | Mask | None, q: Tensor, k: Tensor
    ) -> tuple[Mask | None, Tensor | None]:
        """`attention_mask` as a mask, and as a bias where it is one."""
        if given is None or isinstance(given, Mask):
            return given, None
        sizes = _sizes(given)
        expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if isinstance(given, MaskTensor) and sizes[2:] != expected[2:]:
            raise ValueError(
                f"{self}: attention_mask was made for {sizes[2]} queries and {sizes[3]} keys, "
                f"got {expected[2]} and {expected[3]}; a 2-D attention_mask has an entry for each "
                "token."
            )
        if len(sizes) != 4 or any(a not in (1, b) for a, b in zip(sizes, expected, strict=True)):
            raise ValueError(
                f"{self}: attention_mask must be a tensor that broadcasts to [B, H, M, N] = "
                f"{list(expected)} here, got {list(sizes) or type(given).__name__}; a 2-D padding "
                "mask goes to the model, which makes the mask of it."
            )
        if isinstance(given, MaskTensor):
            return given.mask, None
        if given.is_floating_point():
            return full(), given
        if given.dtype != torch.bool:
            raise ValueError(
                f"{self}: attention_mask must be bool (True where a key is seen) or floating "
                f"(added to the scores), got {given.dtype}."
            )
        if sizes[1] == sizes[2] == 1:
            return visible_keys(given[:, 0, 0].expand(-1, expected[3]), expected[2]), None
        return visible_elements(given, *expected[2:]), None

    def _read_sinks(self, s_aux: Tensor | None, H: int) -> Tensor | None:
        self._check_is_tensor("s_aux", s_aux)
        if s_aux is not None and s_aux.numel() != H:
            raise ValueError(
                f"{self}: s_aux must hold one logit for each of the {H} query heads, "
                f"got {list(s_aux.shape)}."
            )
        return None if s_aux is None else s_aux.reshape(H)

    def _check_is_tensor(self, name: str, x: Tensor | None) -> None:
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{self}: {name} must be a tensor, got {type(x).__name__}.")

    def _read_packing(self, options: Options, bias: Tensor | None) -> tuple[Tensor, Tensor] | None:
        cu_q, cu_k = options.cu_seq_lens_q, options.cu_seq_lens_k
        if cu_q is None and cu_k is None:
            return None
        if cu_q is None or cu_k is None:
            raise ValueError(f"{self}: cu_seq_lens_q and cu_seq_lens_k must come together.")
        self._check_is_tensor("cu_seq_lens_q", cu_q)
        self._check_is_tensor("cu_seq_lens_k", cu_k)
        if bias is not None:
            raise NotImplementedError(
                f"{self}: position_bias or a floating attention_mask cannot be honoured beside "
                "cu_seq_lens_q: they do not say which document they speak of."
            )
        return cu_q, cu_k

    def _documents(self, packing: tuple[Tensor, Tensor], M: int, N: int) -> Mask:
        """Packed documents as a mask, to join with one that the model brought for the same row."""
        for name, cu, stored in zip("qk", packing, (M, N), strict=True):
            if is_read(cu):
                check_cu_seqlens(str(self), f"cu_seq_lens_{name}", cu, stored)
        cu_q, cu_k = packing
        m = torch.arange(M, device=cu_q.device)
        document = torch.searchsorted(cu_q, m, right=True) - 1
        # Past the last document both are its end, so that a query there sees nothing.
        starts, stops = (cu_k[(document + i).clamp(0, cu_k.numel() - 1)] for i in (0, 1))
        return intervals(starts[:, None], stops[:, None])

    def _unstated_mask(self, options: Options, M: int = 1, N: int = 1) -> Mask:
        """What is seen where no mask says it, as Transformers' SDPA path takes it.

        Several queries stand at the first keys, a single one at the last key (a decode step), and
        queries of packed documents at the last keys of their document.
        """
        left = options.sliding_window
        if left is not None:
            if left < 1:
                raise ValueError(f"{self}: sliding_window must be positive or None, got {left}.")
            # Transformers counts the query's own position.
            left -= 1
        if options.is_causal:
            return window(left, 0, offset=None if M in (1, N) else 0)
        return full() if left is None else window(left, left)

    def __str__(self) -> str:
        return f'attn_implementation="{self.name}"'


def _sizes(mask: object) -> tuple[int, ...]:
    # Compiled code reads a plain attribute of a MaskTensor, but may not call its methods.
    if isinstance(mask, MaskTensor):
        return mask.sizes
    return tuple(mask.shape) if isinstance(mask, Tensor) else ()
