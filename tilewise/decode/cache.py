"""The KV cache: where keys and values of sequences lie, how many are in use, how new ones come in.

Dims: B sequences, R rows of a contiguous cache, N slots of a row, P slots of a page, G kv heads,
    D key dim, E value dim, L new tokens of a sequence, T packed new tokens.

Slot n of sequence b lies at `[row, n]` of a contiguous cache, `row = batch_index[b]` or b, and at
`[block_table[b, n // P], n % P]` of a paged one. Slots past `lengths[b]` are free: they may hold
anything, NaN too, and nothing reads them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.shapes import COMPUTE_DTYPES, check_same_device, check_shapes, is_integer
from .rotary import Rotary, rotate

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_INDEX = (torch.int32, torch.int64)


@dataclass(eq=False)
class KVCache:
    """Keys and values of B sequences, contiguous or paged.

    Args:
        k: `[R, N, G, D]`, or paged `[pages, P, G, D]` with any P >= 1. fp16, bf16, fp32, fp64, or
            float8_e4m3fn and float8_e5m2 with scales. Any strides with contiguous head dims; k and
            v may be interleaved views of one buffer.
        v: the same with E in place of D.
        lengths: int32 or int64 `[B]`, slots in use; `append` moves them in place. Left padding
            counts: they are where the next token goes.
        block_table: int32 or int64 `[B, W]`: the page of slots `[w P, (w + 1) P)`. Entries beyond
            what is in use may hold anything.
        batch_index: int32 or int64 `[B]`, the row of each sequence in a contiguous cache; row b
            when None.
        starts: int32 or int64 `[B]`, slots before them are left padding and hidden; 0 when None.
        k_scale, v_scale: of a float8 cache; what is stored times its scale is the key or value.
            fp32 `[G]` or `[B, G]` (fixed), or `[R, N, G]` / `[pages, P, G]` (one for each token
            and head, chosen by `append`).
    Raises: ValueError for what does not fit.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    block_table: Tensor | None = None
    batch_index: Tensor | None = None
    starts: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def __post_init__(self) -> None:
        op = "KVCache"
        tensors = self.tensors()
        for name, x in {"k": self.k, "v": self.v, "lengths": self.lengths, **tensors}.items():
            if not isinstance(x, Tensor):
                raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
        dims = check_shapes(
            op, tensors, k="R N G D", v="R N G E", lengths="B", block_table="B W", batch_index="B",
            starts="B",
        )  # fmt: skip
        check_same_device(op, tensors)
        for name in ("lengths", "block_table", "batch_index", "starts"):
            if name in tensors and tensors[name].dtype not in _INDEX:
                raise ValueError(f"{op}: {name} must be int32 or int64, got {tensors[name].dtype}.")
        if self.k.dtype != self.v.dtype or self.k.dtype not in (*COMPUTE_DTYPES, *FLOAT8):
            raise ValueError(
                f"{op}: k and v must share one floating dtype, got {self.k.dtype} and "
                f"{self.v.dtype}."
            )
        if min(dims["G"], dims["D"], dims["E"]) == 0:
            raise ValueError(f"{op}: k and v must have heads and dims, got {list(self.k.shape)}.")
        if self.is_paged and self.batch_index is not None:
            raise ValueError(f"{op}: batch_index must be None beside block_table, got both.")
        if self.is_paged and dims["N"] == 0:
            raise ValueError(f"{op}: pages must have at least one slot, got {list(self.k.shape)}.")
        if not self.is_paged and self.batch_index is None and dims["B"] != dims["R"]:
            raise ValueError(
                f"{op}: k must have a row for each of the {dims['B']} lengths (or a batch_index), "
                f"got {dims['R']}."
            )
        self._check_scales(op, tensors)

    def _check_scales(self, op: str, tensors: dict[str, Tensor]) -> None:
        if self.k.dtype not in FLOAT8:
            if self.k_scale is not None or self.v_scale is not None:
                raise ValueError(
                    f"{op}: k_scale and v_scale must be None unless the cache is float8, "
                    f"got a cache in {self.k.dtype}."
                )
            return
        if self.k_scale is None or self.v_scale is None:
            raise ValueError(
                f"{op}: a cache in {self.k.dtype} needs k_scale and v_scale, got None."
            )
        (R, N, G), B = self.k.shape[:3], self.lengths.shape[0]
        forms = ((G,), (B, G), (R, N, G))
        for name in ("k_scale", "v_scale"):
            scale = tensors[name]
            if tuple(scale.shape) not in forms or scale.dtype != torch.float32:
                raise ValueError(
                    f"{op}: {name} must be float32 [G], [B, G] or one for each slot, "
                    f"{' or '.join(str(list(x)) for x in forms)}, got {scale.dtype} "
                    f"{list(scale.shape)}."
                )
        if self.k_scale.dim() != self.v_scale.dim():
            raise ValueError(
                f"{op}: k_scale and v_scale must have one form, got {list(self.k_scale.shape)} "
                f"and {list(self.v_scale.shape)}."
            )

    @classmethod
    def allocate(
        cls,
        B: int,
        capacity: int,
        G: int,
        D: int,
        E: int | None = None,
        *,
        page_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty cache for B sequences of up to `capacity` tokens.

        Args:
            G, D, E: kv heads, key and value dim; E is D when None.
            page_size: pages of so many slots, dealt to the sequences in order; contiguous when
                None.
            dtype: of keys and values. A float8 cache gets a scale for each token and head.
            device: torch's default one when None.
        Raises: ValueError for sizes and dtypes that no cache has.
        """
        E = D if E is None else E
        for name, size in (("B", B), ("capacity", capacity), ("G", G), ("D", D), ("E", E)):
            if not is_integer(size) or size < 0:
                raise ValueError(f"KVCache: {name} must be an int >= 0, got {size!r}.")
        if dtype not in (*COMPUTE_DTYPES, *FLOAT8):
            raise ValueError(
                f"KVCache: dtype must be a floating dtype that ops compute, or float8, got {dtype}."
            )
        rows, slots, table = B, capacity, None
        if page_size is not None:
            if not is_integer(page_size) or page_size < 1:
                raise ValueError(f"KVCache: page_size must be at least 1, got {page_size}.")
            width = -(-capacity // page_size)
            rows, slots = B * width, page_size
            table = torch.arange(rows, dtype=torch.int32, device=device).reshape(B, width)
        k = torch.empty(rows, slots, G, D, dtype=dtype, device=device)
        v = torch.empty(rows, slots, G, E, dtype=dtype, device=device)
        scales = [
            torch.ones(rows, slots, G, device=device) if dtype in FLOAT8 else None for _ in "kv"
        ]
        lengths = torch.zeros(B, dtype=torch.int32, device=device)
        return cls(k, v, lengths, table, None, None, *scales)

    @classmethod
    def latent(
        cls,
        B: int,
        capacity: int,
        *,
        rank: int = 512,
        rope_dim: int = 64,
        page_size: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """An empty latent cache (MLA): keys `[latent, rotated]` of one head, values their latent.

        Values are a view of the keys, so that a token takes `rank + rope_dim` elements in all.
        """
        keys = cls.allocate(
            B, capacity, 1, rank + rope_dim, 1, page_size=page_size, dtype=dtype, device=device
        )
        return cls(
            keys.k, keys.k[..., :rank], keys.lengths, keys.block_table, None, None, keys.k_scale,
            keys.k_scale,
        )  # fmt: skip

    # ------------------------------------------------------------ what it is

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is there, by name."""
        # Written out: torch 2.11 does not trace vars().
        named = {
            "k": self.k, "v": self.v, "lengths": self.lengths, "block_table": self.block_table,
            "batch_index": self.batch_index, "starts": self.starts, "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }  # fmt: skip
        return {name: x for name, x in named.items() if x is not None}

    @property
    def is_paged(self) -> bool:
        return self.block_table is not None

    @property
    def B(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Slots of a sequence."""
        slots = self.k.shape[1]
        return slots if self.block_table is None else slots * self.block_table.shape[1]

    @property
    def has_token_scales(self) -> bool:
        return self.k_scale is not None and self.k_scale.dim() == 3

    @property
    def is_latent(self) -> bool:
        """Whether values are the first columns of the keys, in the same memory."""
        k, v = self.k, self.v
        is_same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
        return is_same and v.shape[3] <= k.shape[3] and k.numel() > 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, used or not."""
        return self.k.nbytes + (0 if self.is_latent else self.v.nbytes)

    def rewind(self, tokens: int | Tensor) -> None:
        """Give up the last tokens of every sequence (drafts that were not accepted).

        tokens: an int >= 0, or integers `[B]`, none of them negative; lengths do not fall below 0.
        Raises: ValueError for what is neither, and for negative ones: what lies behind the lengths
            was never written. A GPU's integers are cut to 0.
        """
        if isinstance(tokens, Tensor):
            is_right = tokens.dtype in _INDEX and tokens.shape in ((), self.lengths.shape)
            is_read = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
            if is_right and is_read:
                is_right = bool((tokens >= 0).all())
        else:
            is_right = is_integer(tokens) and not isinstance(tokens, bool) and tokens >= 0
        if not is_right:
            raise ValueError(
                f"KVCache.rewind: tokens must be an int >= 0 or integers >= 0 [{self.B}], "
                f"got {tokens!r}."
            )
        if isinstance(tokens, Tensor):
            tokens = tokens.clamp(min=0)
        self.lengths.sub_(tokens).clamp_(min=0)

    # ------------------------------------------------------------ contents

    def check_contents(self, op: str, new: int | Tensor = 0) -> None:
        """Raise ValueError for a length or an index that leaves the cache. Reads device tensors.

        new: tokens that will be appended, an int or `[B]`.
        """
        lengths, capacity = self.lengths, self.capacity
        least, most = map(int, lengths.aminmax()) if lengths.numel() else (0, 0)
        if least < 0 or most > capacity:
            raise ValueError(
                f"{op}: lengths must lie between 0 and the capacity of {capacity}, "
                f"got {_some(lengths)}."
            )
        total = lengths + new
        if bool((total > capacity).any()):
            at = int((total > capacity).to(torch.int8).argmax())
            raise ValueError(
                f"{op}: sequence {at} would grow to {int(total[at])} tokens, but the cache holds "
                f"{capacity}; free some, or widen the cache"
                f"{' and its block_table' if self.is_paged else ''}."
            )
        if self.starts is not None and bool((self.starts < 0).any()):
            raise ValueError(f"{op}: starts must not be negative, got {_some(self.starts)}.")
        if self.batch_index is not None:
            _check_range(op, "batch_index", self.batch_index, self.k.shape[0])
        if self.block_table is not None:
            pages = -(-total // self.k.shape[1])
            column = torch.arange(self.block_table.shape[1], device=lengths.device)
            in_use = self.block_table[column < pages.unsqueeze(-1)]
            _check_range(op, "block_table", in_use, self.k.shape[0])

    def is_checked(self, check: bool | None) -> bool:
        """Whether contents are read: always on the CPU, elsewhere on request."""
        if self.lengths.device.type == "cpu":
            return True
        return os.environ.get("TILEWISE_CHECK") == "1" if check is None else check

    def slots(self, b: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Where slots n of sequences b lie: the first two indices of k and v, clamped to them."""
        b, n = b.to(torch.int64), n.to(torch.int64)
        b, n = torch.broadcast_tensors(b, n)
        if self.block_table is not None:
            P = self.k.shape[1]
            column = (n // P).clamp(0, max(0, self.block_table.shape[1] - 1))
            page = self.block_table[b, column] if self.block_table.shape[1] else b
            return page.to(torch.int64).clamp(0, max(0, self.k.shape[0] - 1)), n % P
        row = b if self.batch_index is None else self.batch_index[b].to(torch.int64)
        last = (self.k.shape[0] - 1, self.k.shape[1] - 1)
        return row.clamp(0, max(0, last[0])), n.clamp(0, max(0, last[1]))

    def scales_at(self, name: str, b: Tensor, at: tuple[Tensor, Tensor]) -> Tensor | None:
        """The scales `[..., G, 1]` of slots `at` of sequences b; None where there are none."""
        scale: Tensor | None = getattr(self, f"{name}_scale")
        if scale is None:
            return None
        if scale.dim() == 3:
            return scale[at].unsqueeze(-1)
        return (scale[b.to(torch.int64)] if scale.dim() == 2 else scale).unsqueeze(-1)

    def append(
        self,
        k: Tensor,
        v: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        rotary: Rotary | None = None,
        check: bool | None = None,
    ) -> None:
        """Write new keys and values behind what is in use, and move `lengths`.

        Args:
            k: `[B, L, G, D]`, or packed `[T, G, D]` with cu_seqlens; of the cache's dtype, or of
                any floating dtype for a float8 cache.
            v: the same with E; None for a latent cache, and only there.
            cu_seqlens: int32 or int64 `[B + 1]`, where each sequence's new tokens start, from 0;
                tokens past its end are not written.
            rotary: turns the keys on their way.
            check: read what index tensors hold, which waits for a GPU; always done on the CPU, and
                where TILEWISE_CHECK=1 is set. Without it the caller answers for them: a token that
                has no slot is dropped.
        Raises: ValueError for what does not fit, before anything is written.
        """
        from .append import append

        append(self, k, v, cu_seqlens, rotary, check)


def quantise(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """x `[..., G, D]` in float8 and the scales `[..., G, 1]` that it was divided by.

    scale: fixed scales; None chooses one for each token and head. What is too large saturates.
    """
    top = torch.finfo(dtype).max
    wide = x.to(torch.float32)
    if scale is None:
        scale = wide.abs().amax(-1, keepdim=True) / top
        scale = torch.where(scale > 0, scale, 1.0)
    return (wide / scale).clamp(-top, top).to(dtype), scale


def place_new(cache: KVCache, shape: torch.Size, cu_seqlens: Tensor | None) -> Mapping[str, Tensor]:
    """Of each new token its sequence b, its index i there, whether it `exists`; `count` `[B]`."""
    device = cache.lengths.device
    if cu_seqlens is None:
        B, L = shape[:2]
        b = torch.arange(B, device=device).unsqueeze(-1).expand(B, L)
        i = torch.arange(L, device=device).expand(B, L)
        count = torch.full_like(cache.lengths, L)
        return {"b": b, "i": i, "exists": torch.ones_like(b, dtype=torch.bool), "count": count}
    token = torch.arange(shape[0], device=device)
    cu = cu_seqlens.to(torch.int64)
    b = torch.searchsorted(cu, token, right=True) - 1
    exists = (b >= 0) & (b < cache.B)
    b = b.clamp(0, max(0, cache.B - 1))
    i = token - cu[b] if cache.B else token
    return {"b": b, "i": i, "exists": exists, "count": cu.diff().to(cache.lengths.dtype)}


def turned_keys(cache: KVCache, k: Tensor, new: Mapping[str, Tensor], rotary: Rotary) -> Tensor:
    first = cache.lengths if rotary.first is None else rotary.first
    return rotate(k, first.to(torch.int64)[new["b"]] + new["i"], rotary)


def check_writable(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError for an expanded tensor, in which several elements are one."""
    if any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(
            f"{op}: {name} must have memory for each of its elements, got {list(x.shape)} with "
            f"strides {list(x.stride())}; clone() it first."
        )


def check_starts(op: str, name: str, cu_seqlens: Tensor | None, B: int) -> None:
    """Raise ValueError for what cannot say where B sequences of packed tokens start. Reads nothing,
    and makes no number of B, so that compiled calls take any batch."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(cu_seqlens).__name__}.")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] != B + 1:
        raise ValueError(f"{op}: {name} must be [{B + 1}], got {list(cu_seqlens.shape)}.")
    if cu_seqlens.dtype not in _INDEX:
        raise ValueError(f"{op}: {name} must be int32 or int64, got {cu_seqlens.dtype}.")


def _check_range(op: str, name: str, index: Tensor, stop: int) -> None:
    if index.numel() and (bool((index < 0).any()) or bool((index >= stop).any())):
        odd = index[(index < 0) | (index >= stop)]
        raise ValueError(f"{op}: {name} must hold indices in [0, {stop}), got {_some(odd)}.")


def _some(x: Tensor) -> str:
    values = x.flatten()[:8].tolist()
    return f"{values}{'...' if x.numel() > 8 else ''}"
