"""flash-attn's rotary embeddings, in plain PyTorch.

Dims: B batch, S length, T packed tokens, H heads, D head dim, R <= D rotated dims (even).
Math: with the pair (x1, x2) of a head and the angle of its position,
    (x1 cos - x2 sin, x1 sin + x2 cos), in fp32 (fp64 for fp64), rounded once.
    Pairs are (j, j + R/2), or (2j, 2j + 1) where `interleaved`. Dims past R stay as they are.
Source: RoFormer (arXiv 2104.09864), equation 34.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...decode.rotary import Rotary, rotate


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first R dims of every head by the angle of its position.

    Args:
        x: `[B, S, H, D]`, or `[T, H, D]` with cu_seqlens.
        cos, sin: `[positions, R / 2]`.
        interleaved: which dims are a pair, see the module.
        inplace: write the result into x, and return x.
        seqlen_offsets: position of each row's first token, an int or `[B]` integers.
        cu_seqlens: `[B + 1]`, where the packed sequences start; positions count inside them.
        max_seqlen: not needed here.
    Returns: as x.
    Raises: ValueError for shapes that do not fit.
    """
    op = "apply_rotary_emb"
    half = cos.shape[-1]
    if cos.shape != sin.shape or cos.dim() != 2:
        raise ValueError(
            f"{op}: cos and sin must be [positions, R / 2] both, got {list(cos.shape)} and "
            f"{list(sin.shape)}."
        )
    if x.dim() != (4 if cu_seqlens is None else 3) or 2 * half > x.shape[-1]:
        form = "[B, S, H, D]" if cu_seqlens is None else "[T, H, D]"
        raise ValueError(f"{op}: x must be {form} with D >= {2 * half}, got {list(x.shape)}.")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if isinstance(seqlen_offsets, int) and cu_seqlens is None:
        length = x.shape[1] + seqlen_offsets
        if length > cos.shape[0] or seqlen_offsets < 0:
            raise ValueError(
                f"{op}: cos holds {cos.shape[0]} positions, got {x.shape[1]} tokens from "
                f"{seqlen_offsets} on."
            )
    out = rotate(x, positions, Rotary(cos, sin, interleaved))
    return x.copy_(out) if inplace else out


def _positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """`[S]`, `[B, S]` or `[T]`."""
    if cu_seqlens is None:
        inside = torch.arange(x.shape[1], device=x.device)
        return inside + (offsets.unsqueeze(-1) if isinstance(offsets, Tensor) else offsets)
    token = torch.arange(x.shape[0], device=x.device)
    # Tokens past the last sequence have no position; they turn as if they went on.
    row = (torch.searchsorted(cu_seqlens, token, right=True) - 1).clamp(max=cu_seqlens.numel() - 2)
    return token - cu_seqlens[row] + (offsets[row] if isinstance(offsets, Tensor) else offsets)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """`apply_rotary_emb` where cos and sin hold one row for each token, `[S, R / 2]`."""
    return apply_rotary_emb(x, cos, sin, interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys in place.

    Args:
        qkv: `[B, S, 3, H, D]`, or `[B, S, H + 2 G, D]` with num_heads_q = H.
        cos_k, sin_k: of the keys, where they differ.
        The others: see `apply_rotary_emb`.
    """
    if qkv.dim() == 5:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        G = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + G]
    else:
        raise ValueError(
            "apply_rotary_emb_qkv_: qkv must be [B, S, 3, H, D], or [B, S, H + 2 G, D] with "
            f"num_heads_q = H, got {list(qkv.shape)} with num_heads_q {num_heads_q}."
        )
    cos_k, sin_k = (cos if cos_k is None else cos_k), (sin if sin_k is None else sin_k)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos_k, sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate the keys of kv `[B, S, 2, G, D]` in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


class RotaryEmbedding(nn.Module):
    """Rotary embeddings of `dim` dims of each head, for packed projections.

    Args:
        dim: R.
        base: angles are `position * base ** (-2 j / dim)`.
        interleaved: see the module.
        scale_base: XPos is not there; must be None.
        pos_idx_in_fp32: angles in fp32, whatever the dtype; else in that of the module.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if scale_base is not None:
            raise NotImplementedError(
                "RotaryEmbedding: scale_base (XPos) is not there; leave it out for plain rotary."
            )
        self.dim, self.base, self.interleaved = dim, float(base), interleaved
        self.pos_idx_in_fp32, self.scale = pos_idx_in_fp32, None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        j = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return self.base ** (-j / self.dim)

    def tables(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions below `length`, in x's dtype."""
        # A model in 16 bits has rounded its buffer: angles of far positions need fp32.
        in_fp32 = self.pos_idx_in_fp32 and self.inv_freq.dtype != torch.float32
        inv_freq = self._frequencies(x.device) if in_fp32 else self.inv_freq.to(x.device)
        position = torch.arange(length, device=x.device, dtype=inv_freq.dtype)
        angles = torch.outer(position, inv_freq)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate in place.

        Args:
            qkv: `[B, S, 3, H, D]`, `[B, S, H + 2 G, D]` with num_heads_q, or q `[B, S, H, D]`
                beside kv `[B, S, 2, G, D]`.
            seqlen_offset: position of the first token, an int or `[B]` integers; with a tensor,
                max_seqlen says how many positions there are.
        Returns: qkv, or q and kv.
        """
        if isinstance(seqlen_offset, Tensor) and max_seqlen is None:
            raise ValueError(
                "RotaryEmbedding: max_seqlen must be given where seqlen_offset is a tensor, "
                "got None."
            )
        length = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
        assert isinstance(length, int)
        cos, sin = self.tables(length, qkv)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, interleaved=self.interleaved, seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )  # fmt: skip
        apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return qkv, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
