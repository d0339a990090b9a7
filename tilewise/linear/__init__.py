"""Linear attention: a state that is decayed, corrected and read, in time linear in length."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import delta_rule as delta_rule
    from .api import explain_backend as explain_backend
    from .api import gated_delta_rule as gated_delta_rule
    from .api import gla as gla
    from .api import kda as kda
    from .api import linear_attention as linear_attention
    from .api import retention as retention
    from .api import simple_gla as simple_gla
    from .convolution import short_convolution as short_convolution
    from .pool import decode as decode

_OPS = "delta_rule gated_delta_rule gla kda linear_attention retention simple_gla"
_HOME = {
    "decode": "pool",
    "short_convolution": "convolution",
    **dict.fromkeys(("explain_backend", *_OPS.split()), "api"),
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'tilewise.linear' has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
