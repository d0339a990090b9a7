"""How many binaries Triton has compiled of each kernel of ours in this process."""

from __future__ import annotations

import pkgutil
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import tilewise


def count_binaries() -> Counter[str]:
    """By kernel, over all devices; what was never launched is not in it."""
    counts: Counter[str] = Counter()
    for name, kernel in kernels():
        # The first entry of a device's caches maps a specialization to its binary (Triton 3.6).
        counts[name] += sum(len(caches[0]) for caches in kernel.device_caches.values())
    return +counts


def kernels() -> Iterator[tuple[str, Any]]:
    """Every function of ours that Triton compiles, with its dotted name."""
    from triton.runtime.jit import JITFunction

    for module in kernel_modules():
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
                yield f"{module.__name__}.{name}", value


def kernel_modules() -> list[ModuleType]:
    names = [
        name
        for _, name, _ in pkgutil.walk_packages(tilewise.__path__, "tilewise.")
        if name.startswith("tilewise.kernels.")
        or name.rpartition(".")[2].startswith(("triton_", "hopper_"))
    ]
    return [import_module(name) for name in names]
