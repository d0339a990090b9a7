"""Philox4x32-10, the counter-based generator behind dropout (Salmon et al., SC 2011).

Dropout's bits are a function of what they belong to and of nothing else:
key = the 64-bit seed, counter = (offset, b * H + h, m, n // 4), lane n % 4. So every backend, tile
size, direction and rank draws the same mask.

Torch has no unsigned 32-bit product; the words are held in int64 and masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
ROUNDS = 10


def draw_rng(device: torch.device) -> Tensor:
    """Seed and offset for one call, int64 `[2]`, from torch's own generator; no synchronisation."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (2,), dtype=torch.int64, device=device)


def drop_threshold(dropout_p: float) -> int:
    """A word below it is dropped: round(p * 2^32)."""
    return round(dropout_p * (1 << 32))


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """Four random 32-bit words (in int64) per counter; all arguments hold 32-bit words in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The int64 product wraps, but its bits are those of the unsigned 64-bit one.
        product0, product1 = c0 * _M0, c2 * _M1
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return [c0, c1, c2, c3]


def keep_mask(rng: Tensor, dropout_p: float, row: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Which probabilities dropout keeps, a bool tensor of the broadcast shape of row, m and n.

    Args:
        rng: int64 `[2]`, seed and offset, on the tensors' device.
        dropout_p: the probability of dropping.
        row, m, n: int64 indices that broadcast: `b * H + h`, the query and the key.
    """
    words = torch.stack(_words(rng, row, m, n // 4), dim=-1)
    lane = (n % 4).expand(words.shape[:-1]).unsqueeze(-1)
    return words.gather(-1, lane).squeeze(-1) >= drop_threshold(dropout_p)


def keep_tile(
    rng: Tensor, dropout_p: float, row: Tensor, m: Tensor, keys: tuple[int, int]
) -> Tensor:
    """`keep_mask` for consecutive keys `[n0, n1)` along the last dim, at a quarter of the cost."""
    n0, n1 = keys
    group = torch.arange(n0 // 4, (n1 - 1) // 4 + 1, device=m.device)
    words = torch.stack(_words(rng, row, m, group), dim=-1).flatten(-2)
    first = n0 - n0 // 4 * 4
    return words[..., first : first + n1 - n0] >= drop_threshold(dropout_p)


def _words(rng: Tensor, row: Tensor, m: Tensor, group: Tensor) -> list[Tensor]:
    seed, offset = rng[0], rng[1]
    counter = (offset & _MASK, row & _MASK, m & _MASK, group & _MASK)
    return philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK))
