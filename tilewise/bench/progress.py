"""How long work says where it is, to whoever watches."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Stages one after the other, each of a known number of steps."""

    def stage(self, title: str, steps: int) -> None:
        """A stage begins; the one before is done."""

    def step(self, what: str) -> None:
        """One step of the stage is done; `what` is the next one, or what was found."""


class Silent:
    """Watches nothing."""

    def stage(self, title: str, steps: int) -> None:
        pass

    def step(self, what: str) -> None:
        pass
