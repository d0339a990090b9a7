"""One call's inputs in one object, as every form takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..core.shapes import accumulator_of


class Inputs(NamedTuple):
    """q, k `[B, M, G, D]`, v `[B, M, H, E]`, g `[B, M, H]`, `[B, M, H, D]` or None for no decay,
    beta `[B, M, H]` or None for no delta rule, initial_state `[B, H, D, E]` or None for zeros;
    packed `[T, ...]` with `cu_seqlens`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    scale: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Those that have gradients."""
        return self[:6]

    @property
    def has_vector_gate(self) -> bool:
        return self.g is not None and self.g.dim() == self.q.dim()

    @property
    def n_sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return self.n_sequences, self.v.shape[-2], self.q.shape[-1], self.v.shape[-1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        return self.with_tensors([None if x is None else change(x) for x in self.tensors])

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Inputs:
        changed: dict[str, Any] = dict(zip(self._fields[:6], tensors, strict=True))
        return self._replace(**changed)

    def cut(self, start: int, stop: int) -> Inputs:
        """Packed tokens from start to stop as one dense row, without a state."""
        cut = [None if x is None else x[start:stop].unsqueeze(0) for x in self.tensors[:5]]
        return self.with_tensors([*cut, None])._replace(cu_seqlens=None)

    def state_or_zeros(self) -> Tensor:
        """The initial state, fp32 or fp64."""
        if self.initial_state is not None:
            return self.initial_state
        return self.v.new_zeros(self.state_shape, dtype=accumulator_of(self.v.dtype))

    def by_value_head(self, x: Tensor) -> Tensor:
        """q or k with a head for each of v's: head h reads head `h // (H // G)`."""
        group = self.v.shape[-2] // x.shape[-2]
        return x if group == 1 else x.repeat_interleave(group, dim=-2)
