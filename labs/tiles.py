"""What labs 2 and 3 share: tiles, the causal mask, partial results."""

from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


def spans(length: int, block: int) -> list[tuple[int, int]]:
    """Start and stop of the tiles that cover a length; the last may be shorter."""
    return [(start, min(start + block, length)) for start in range(0, length, block)]


class Partial(NamedTuple):
    """Attention over some of the keys: out `[..., M, E]`, lse `[..., M]`."""

    out: Tensor
    lse: Tensor


def finite_or_zero(reference: Tensor) -> Tensor:
    """What to subtract from scores: a maximum or LSE, or 0 where there is no visible key.

    Subtracting `-inf` itself would give NaN, since the scores of such a row are `-inf` too.
    """
    return reference.masked_fill(reference == NEG_INF, 0.0)


class Mask(NamedTuple):
    """Causal: query m sees key n where n <= m + offset. Otherwise every query sees every key."""

    causal: bool = False
    offset: int = 0

    def sees_any(self, m_stop: int, n_start: int) -> bool:
        """Whether the last query of a tile sees the first key of a tile."""
        return not self.causal or n_start <= m_stop - 1 + self.offset

    def sees_all(self, m_start: int, n_stop: int) -> bool:
        """Whether the first query of a tile sees the last key of a tile."""
        return not self.causal or n_stop - 1 <= m_start + self.offset

    def apply(self, s: Tensor, m_start: int = 0, n_start: int = 0) -> Tensor:
        """Set the scores of hidden keys to -inf."""
        if not self.causal:
            return s
        offs_m = m_start + torch.arange(s.shape[-2]).unsqueeze(-1)
        offs_n = n_start + torch.arange(s.shape[-1])
        return s.masked_fill(offs_n > offs_m + self.offset, NEG_INF)


FULL = Mask()


def bottom_right(q: Tensor, k: Tensor, causal: bool = True) -> Mask:
    """The mask under which the last query sees the last key."""
    return Mask(causal, k.shape[-2] - q.shape[-2])
