"""Tilewise: attention for PyTorch, computed tile by tile."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import linear as linear
    from .core.backends import BackendChoice as BackendChoice
    from .core.mask import Mask as Mask
    from .core.mask_bits import blocks as blocks
    from .core.mask_bits import from_function as from_function
    from .core.mask_leaves import causal as causal
    from .core.mask_leaves import chunked as chunked
    from .core.mask_leaves import documents as documents
    from .core.mask_leaves import full as full
    from .core.mask_leaves import intervals as intervals
    from .core.mask_leaves import key_padding as key_padding
    from .core.mask_leaves import left_padding as left_padding
    from .core.mask_leaves import prefix as prefix
    from .core.mask_leaves import tree as tree
    from .core.mask_leaves import window as window
    from .core.partials import Partial as Partial
    from .core.partials import merge as merge
    from .decode.api import KVCache as KVCache
    from .decode.api import Rotary as Rotary
    from .decode.api import attention_with_cache as attention_with_cache
    from .decode.api import attention_with_cache_partial as attention_with_cache_partial
    from .decode.api import explain_cache_backend as explain_cache_backend
    from .decode.cascade import cascade_attention as cascade_attention
    from .decode.mla import mla_with_cache as mla_with_cache
    from .dense.api import attention as attention
    from .dense.api import attention_partial as attention_partial
    from .dense.api import attention_partial_backward as attention_partial_backward
    from .dense.api import attention_varlen as attention_varlen
    from .dense.api import attention_varlen_partial as attention_varlen_partial
    from .dense.api import explain_backend as explain_backend
    from .integrations.flex_attention import from_block_mask as from_block_mask
    from .parallel.api import context_parallel_attention as context_parallel_attention
    from .parallel.api import (
        context_parallel_attention_partial as context_parallel_attention_partial,
    )
    from .parallel.api import explain_schedule as explain_schedule
    from .parallel.decode import context_parallel_decode as context_parallel_decode

__version__ = "0.1.0"

_LEAVES = "causal chunked documents full intervals key_padding left_padding prefix tree window"
_DENSE = (
    "attention attention_partial attention_partial_backward attention_varlen "
    "attention_varlen_partial explain_backend"
)
_DECODE = "KVCache Rotary attention_with_cache attention_with_cache_partial explain_cache_backend"
_PARALLEL = "context_parallel_attention context_parallel_attention_partial explain_schedule"
_HOME = {
    "BackendChoice": "core.backends",
    "Mask": "core.mask",
    "context_parallel_decode": "parallel.decode",
    "Partial": "core.partials",
    "blocks": "core.mask_bits",
    "cascade_attention": "decode.cascade",
    "from_block_mask": "integrations.flex_attention",
    "from_function": "core.mask_bits",
    "merge": "core.partials",
    "mla_with_cache": "decode.mla",
    **dict.fromkeys(_LEAVES.split(), "core.mask_leaves"),
    **dict.fromkeys(_DECODE.split(), "decode.api"),
    **dict.fromkeys(_DENSE.split(), "dense.api"),
    **dict.fromkeys(_PARALLEL.split(), "parallel.api"),
}
_MODULES = ("linear",)
__all__ = ["__version__", *_MODULES, *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    """Public names are imported at first use, so that `import tilewise` costs nothing."""
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
