"""`import flash_attn` answered by Tilewise, in this process and on request only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_OURS = __name__.rpartition(".")[0]
# flash-attn's names of modules, and where they are here.
_MODULES = {
    "flash_attn": _OURS,
    "flash_attn.bert_padding": f"{_OURS}.bert_padding",
    "flash_attn.flash_attn_interface": f"{_OURS}.flash_attn_interface",
    "flash_attn.layers": f"{_OURS}.layers",
    "flash_attn.layers.rotary": f"{_OURS}.layers.rotary",
}
_FLASH_ATTN_3 = {"flash_attn_interface": f"{_OURS}.flash_attn_3"}


class _Refusal(MetaPathFinder):
    """Says what is not there, where Python would load a second copy of a file or of flash-attn."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith("flash_attn."):
            raise ModuleNotFoundError(
                f"No module named {name!r}: tilewise.flash_attn stands in for flash_attn in this "
                f"process and has only {', '.join(_MODULES)}.",
                name=name,
            )
        return None


_REFUSAL = _Refusal()


def install(*, flash_attn_3: bool = False) -> None:
    """Answer `import flash_attn` with `tilewise.flash_attn` from here on, and say so on stderr.

    For code that cannot be changed. Nothing on disk changes, and what asks for an installed
    distribution of that name, as Transformers does, does not find one. Again is harmless.

    Args:
        flash_attn_3: answer `import flash_attn_interface`, FlashAttention-3's name, too.
    Raises: RuntimeError where another flash_attn was imported before.
    """
    wanted = _MODULES | (_FLASH_ATTN_3 if flash_attn_3 else {})
    for name, ours in wanted.items():
        there = sys.modules.get(name)
        if there is not None and there is not sys.modules.get(ours):
            raise RuntimeError(
                f"install: {name} was imported from {getattr(there, '__file__', 'elsewhere')} "
                "before; call tilewise.flash_attn.install() before anything imports it."
            )
    new = [name for name in wanted if name not in sys.modules]
    for name, ours in wanted.items():
        sys.modules[name] = importlib.import_module(ours)
    if _REFUSAL not in sys.meta_path:
        sys.meta_path.insert(0, _REFUSAL)
    roots = [name for name in new if "." not in name]
    if roots:
        answered = " and ".join(f"`import {name}`" for name in roots)
        print(f"tilewise: {answered} now gives Tilewise, in this process.", file=sys.stderr)


def uninstall() -> None:
    """Undo `install()`: the next `import flash_attn` finds what is installed, or nothing."""
    for name, ours in (_MODULES | _FLASH_ATTN_3).items():
        if name in sys.modules and sys.modules[name] is sys.modules.get(ours):
            del sys.modules[name]
    if _REFUSAL in sys.meta_path:
        sys.meta_path.remove(_REFUSAL)
