"""Masks of PyTorch's FlexAttention as Tilewise masks.

A `mask_mod(b, h, q_idx, kv_idx)` is what `tilewise.from_function` takes: both count queries and
keys from 0. It is asked with index tensors that broadcast, so tables take all indices at once,
`table[b, q_idx]`. A `BlockMask` comes through `from_block_mask`, in whatever way it indexes.

Dims: B batch, H query heads, M query length, N key length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.mask_bits import from_function
from .mask_tensor import Predicate, over_scalars

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_HIDDEN, _PARTIAL, _FULL = 0, 1, 2


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of a FlexAttention `BlockMask`: its full blocks, its mask_mod in the partial ones.

    What the block lists leave out is hidden, even where mask_mod would show it. It is evaluated
    once for each shape, device and Mask, as `from_function`; block sizes need not match any tile.

    Args:
        block_mask: from `create_block_mask` or `BlockMask.from_kv_blocks`, on any device; axes of
            size 1 (B or H of None) serve all batch rows or heads.
    Returns: a mask for at most the M queries, N keys, batch rows and heads that the BlockMask was
        made for.
    Raises: ValueError for what is not a BlockMask; when it is used, for more than these.
    """
    needed = ("kv_num_blocks", "kv_indices", "mask_mod", "seq_lengths", "BLOCK_SIZE")
    if not all(hasattr(block_mask, name) for name in needed):
        raise ValueError(
            "from_block_mask: block_mask must be a BlockMask of torch.nn.attention.flex_attention, "
            f"got {type(block_mask).__name__}; a mask_mod goes to from_function."
        )
    M, N = block_mask.seq_lengths
    block_m, block_n = block_mask.BLOCK_SIZE
    kinds = _kinds(block_mask, -(-N // block_n))
    mask_mod = _of_index_tensors(block_mask.mask_mod)

    def is_visible(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        # Indices come in order, so the last one is the largest.
        last = (int(m.flatten()[-1]), int(n.flatten()[-1]))
        if last[0] >= M or last[1] >= N:
            raise ValueError(
                f"from_block_mask: the BlockMask was made for {M} queries and {N} keys, "
                f"got at least {last[0] + 1} and {last[1] + 1}."
            )
        table = kinds.to(m.device)
        B, H = table.shape[:2]
        rows, heads = b.numel(), h.numel()
        if rows > B > 1 or heads > H > 1:
            raise ValueError(
                f"from_block_mask: the BlockMask was made for {B} batch rows and {H} heads "
                f"(1 serves all), got {rows} and {heads}."
            )
        kind = table[
            b if B > 1 else b.new_zeros((1,) * 4),
            h if H > 1 else h.new_zeros((1,) * 4),
            m // block_m,
            n // block_n,
        ]
        return (kind == _FULL) | ((kind == _PARTIAL) & mask_mod(b, h, m, n))

    return from_function(is_visible)


def _of_index_tensors(mask_mod: Predicate) -> Predicate:
    """FlexAttention asks with scalars, so that `table[b][q_idx]` is right there and not here."""
    mapped = over_scalars(mask_mod)

    def ask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        takes_tensors = _takes_index_tensors(mask_mod, b)
        return mask_mod(b, h, m, n) if takes_tensors else mapped(b, h, m, n)

    return ask


def _takes_index_tensors(mask_mod: Predicate, like: Tensor) -> bool:
    """Indexing one index after the other adds axes, which then fit nothing."""
    # Zeros lie within any table: a wrong index would end a CUDA process.
    shapes = ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2))
    try:
        return mask_mod(*(like.new_zeros(shape) for shape in shapes)).dim() <= 4
    except RuntimeError:
        return False


def _kinds(block_mask: BlockMask, columns: int) -> Tensor:
    """`[B or 1, H or 1, block rows, columns]`: hidden, partial or full."""
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    kinds = torch.where(partial, _PARTIAL, _HIDDEN)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, columns)
        kinds = torch.where(full, _FULL, kinds)
    # Block lists may come without the batch and the head axis.
    return kinds.reshape((1,) * (4 - kinds.dim()) + tuple(kinds.shape))


def _listed(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """Which blocks stand among the first `counts` entries of their row's list."""
    place = torch.arange(indices.shape[-1], device=indices.device)
    is_used = place < counts.unsqueeze(-1)
    # What stands past the count goes to a column of its own.
    target = torch.where(is_used, indices, columns).to(torch.int64)
    found = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    return found.scatter(-1, target, is_used)[..., :columns]
