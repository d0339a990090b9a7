"""The core primitive: attention of a range of queries over a range of keys under a mask.

Dense, packed, ring, split and cached attention are all made of pieces and merges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core.band import Band
from ..core.mask import Mask
from ..core.positions import Positions
from ..core.shapes import accumulator_of

# What says where sequences begin and end, of an op's arguments and of `Positions`.
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


@dataclass(frozen=True)
class Terms:
    """What a score is made of besides q . k, and the softmax's extras, after checking.

    scale: multiplies q . k. softcap: c in `c * tanh(s / c)`, None for none.
    alibi_slopes: `[H]` or `[B, H]`, adds `-slope * |m + offset - n|`.
    bias: `[B or 1, H or 1, M or 1, N or 1]`, added after softcap and before the mask.
    sinks: `[H]`, one extra logit per head in the denominator.
    dropout_p, rng: the probability of dropping, and int64 `[2]` seed and offset.
    is_deterministic: gradients have to be the same bit for bit in every run.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    rng: Tensor | None = None
    is_deterministic: bool = False

    @property
    def is_plain(self) -> bool:
        """Nothing but the scale."""
        extras = (self.softcap, self.alibi_slopes, self.bias, self.sinks)
        return all(x is None for x in extras) and self.dropout_p == 0.0


@dataclass(frozen=True)
class Piece:
    """One call's inputs: q `[B, M, H, D]`, k `[B, N, G, D]`, v `[B, N, G, E]` and what they mean.

    Any strides. Packed tensors are `[T, H, D]`; `as_batch` makes one batch row of them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    positions: Positions
    terms: Terms

    @property
    def group(self) -> int:
        """Query heads on one kv head."""
        return self.q.shape[-2] // self.k.shape[-2]

    @property
    def accumulator(self) -> torch.dtype:
        """The dtype of sums and statistics: fp32, or fp64 for fp64 inputs."""
        return accumulator_of(self.q.dtype)

    @property
    def index_device(self) -> torch.device:
        """Where tiles are planned: the CPU, unless lengths or masks live on a device, whose
        contents are then never read on the host."""
        tensors = [*self.positions.lengths, *self.mask.tensors()]
        return tensors[0].device if tensors else torch.device("cpu")

    @property
    def op_offset(self) -> int | None:
        """Where query 0 stands, as the op places it; None where device tensors say so."""
        positions = self.positions
        if positions.lengths:
            return None
        return 0 if positions.is_piece else self.k.shape[-3] - self.q.shape[-3]

    @cached_property
    def band(self) -> Band | None:
        """The mask as a band that kernels take, or None."""
        band = Band.of(self.mask, self.op_offset)
        if band is None or band.documents is None:
            return band
        # Documents are places of their own where everything else is plain ints.
        is_plain = self.op_offset is not None and self.terms.bias is None and band.lows is None
        return band if is_plain and not isinstance(band.offset, Tensor) else None

    def as_batch(self) -> Piece:
        if self.q.dim() == 4:
            return self
        q, k, v = (x.unsqueeze(0) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)
