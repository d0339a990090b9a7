"""Bytes that a rank receives under each schedule, as formulas.

Dims: S tokens, R ranks (U of them in Ulysses groups), H query heads, G kv heads, D and E dims, e
bytes an element. Even shards of even heads. Gradients of K and V travel in fp32.
Source: the schedules' own papers; tests hold the formulas against what was counted.
"""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """The whole call, with the bytes of an element."""

    B: int
    S: int
    H: int
    G: int
    D: int
    E: int
    element_bytes: int = 2


class Volume(NamedTuple):
    """Bytes received per rank, forward and backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def ring(shape: Shape, ranks: int) -> Volume:
    """K and V hop R - 1 times; their fp32 gradients as often, a rank's own staying at home."""
    B, S, _, G, D, E, e = shape
    others = (ranks - 1) / ranks * B * S * G * (D + E)
    return Volume(others * e, others * e + others * 4)


def all_gather(shape: Shape, ranks: int) -> Volume:
    """The same bytes as a ring: K and V from everyone, fp32 gradients for the rank's own keys."""
    return ring(shape, ranks)


def ulysses(shape: Shape, ranks: int) -> Volume:
    """q, k and v to tokens and out to heads; each gradient the way back."""
    B, S, H, G, D, E, e = shape
    held = max(G, ranks)
    tokens = (ranks - 1) / ranks * B * S / ranks
    swapped = tokens * (H * (D + E) + held * (D + E)) * e
    return Volume(swapped, swapped)


def usp(shape: Shape, ring_ranks: int, ulysses_ranks: int) -> Volume:
    """Ulysses among U ranks over their S / R tokens, then a ring over the rest with G / U heads."""
    part = shape._replace(S=shape.S // ring_ranks)
    inner = ulysses(part, ulysses_ranks)
    heads = max(shape.G, ulysses_ranks) // ulysses_ranks
    outer = ring(shape._replace(G=heads), ring_ranks)
    return Volume(inner.forward + outer.forward, inner.backward + outer.backward)
