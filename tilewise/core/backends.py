"""Backend names, the devices that are here, and reasons in words.

Each op's `api.py` owns its table of backends; this module only knows what a choice looks like.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class BackendChoice:
    """Which backend runs a call, why, and why the others do not."""

    name: str
    reason: str
    rejected: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.reason}"]
        lines += [f"not {name}: {why}" for name, why in self.rejected.items()]
        return "\n".join(lines)


def check_backend_name(op: str, name: str, known: tuple[str, ...]) -> None:
    if name != "auto" and name not in known:
        raise ValueError(
            f"{op}: backend must be one of {', '.join(('auto', *known))}, got {name!r}."
        )


def describe_device(device: torch.device) -> str:
    """A device in words, with the GPU's name where there is one."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)
