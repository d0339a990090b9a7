"""Masks that intervals cannot say: tiles hidden, visible, or mixed (one bit an element)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .mask import UNBOUNDED, Index, Leaf, Lowered, Mask, Pair, outside_inference_mode, register_leaf
from .mask_leaves import broadcast_index, check_table
from .positions import Positions
from .shapes import is_integer

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

BIT_TILE = 128
_WORD = 32


@register_leaf
@dataclass(frozen=True, eq=False)
class Bits(Leaf):
    """A list of tiles: `kinds` `[B or 1, H or 1, nM, nN]` is 0 (hidden), 1 (visible) or 2 + t.

    Tile t is `words[t]`, `[block_m, block_n / 32]` int32: bit `j % 32` of word `j // 32` of row i.
    """

    block_m: int
    block_n: int
    kinds: Tensor
    words: Tensor
    CODE: ClassVar[int] = 7
    INTS: ClassVar[int] = 2
    TENSORS: ClassVar[int] = 2

    @property
    def is_exact(self) -> bool:
        return False

    def parts(self) -> tuple[list[int], list[Tensor]]:
        return [self.block_m, self.block_n], [self.kinds, self.words]

    def intervals(self, at: Index) -> list[Pair]:
        return [(0, self.kinds.shape[-1] * self.block_n)]

    def hidden_intervals(self, at: Index) -> list[Pair]:
        return [(-UNBOUNDED, UNBOUNDED)]

    def visible(self, at: Index) -> Tensor:
        kinds = self.kinds.to(at.i.device)
        if kinds.numel() == 0 or at.j.numel() == 0:
            return torch.zeros_like(at.i + at.j, dtype=torch.bool)
        on_host = at.j.device.type == self.kinds.device.type == "cpu"
        if on_host and self.block_n % _WORD == 0 and _is_run(at.j):
            return self._visible_by_words(at)
        b, h = broadcast_index(kinds, at)
        rows, cols = kinds.shape[2] * self.block_m, kinds.shape[3] * self.block_n
        inside = (at.i < rows) & (at.j >= 0) & (at.j < cols)
        i, j = at.i.clamp(0, rows - 1), at.j.clamp(0, cols - 1)
        kind = kinds[b, h, i // self.block_m, j // self.block_n]
        seen = kind == 1
        if self.words.shape[0] > 0:
            tile = (kind - 2).clamp(min=0)
            column = j % self.block_n
            words = self.words.to(i.device)[tile, i % self.block_m, column // _WORD]
            seen = seen | ((kind > 1) & (((words >> (column % _WORD)) & 1) == 1))
        return seen & inside

    def _visible_by_words(self, at: Index) -> Tensor:
        """The same for consecutive keys, reading each word once instead of once a bit."""
        first, count = int(at.j.flatten()[0]), at.j.numel()
        start = first // _WORD * _WORD
        column = torch.arange(start, first + count, _WORD).reshape(1, 1, 1, -1)
        b, h = broadcast_index(self.kinds, at)
        rows, cols = self.kinds.shape[2] * self.block_m, self.kinds.shape[3] * self.block_n
        inside = (at.i < rows) & (column >= 0) & (column < cols)
        i, j = at.i.clamp(0, rows - 1), column.clamp(0, cols - 1)
        kind = self.kinds[b, h, i // self.block_m, j // self.block_n]
        words = torch.where((kind == 1) & inside, -1, 0).to(torch.int32)
        if self.words.shape[0] > 0:
            tile = (kind - 2).clamp(min=0)
            mixed = self.words[tile, i % self.block_m, (j % self.block_n) // _WORD]
            words = torch.where((kind > 1) & inside, mixed, words)
        lanes = torch.arange(_WORD, dtype=torch.int32)
        seen = ((words.unsqueeze(-1) >> lanes) & 1).to(torch.bool).flatten(-2)
        return seen[..., first - start : first - start + count]

    def check_contents(self, B: int, H: int, *, reads: bool = True) -> None:
        check_table("blocks", self.kinds, B, H)


@dataclass(frozen=True, eq=False)
class Function(Leaf):
    """A predicate that has not been evaluated; `lowered` makes `Bits` of it, tile by tile."""

    fn: Predicate

    @property
    def is_exact(self) -> bool:
        return False

    @property
    def has_predicate(self) -> bool:
        return True

    @property
    def form(self) -> tuple[tuple[Any, ...], tuple[Tensor, ...]] | None:
        return None

    def visible(self, at: Index) -> Tensor:
        return _call_predicate(self.fn, at.b, at.h, at.i, at.j)

    def lowered(self, B: int, H: int, M: int, N: int, device: torch.device | str = "cpu") -> Mask:
        key = (B, H, M, N, str(device))
        cache = self.__dict__.get("_cache")
        if cache is None or cache[0] != key:
            cache = (key, _evaluate(self.fn, B, H, M, N, device))
            object.__setattr__(self, "_cache", cache)
        result: Bits = cache[1]
        return result

    def lower(self) -> Lowered:
        raise RuntimeError("from_function: a predicate has to be evaluated (lowered) first.")


def _call_predicate(fn: Predicate, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    seen = fn(b, h, i, j)
    if not isinstance(seen, Tensor):
        seen = torch.tensor(bool(seen), device=j.device)
    if seen.dtype != torch.bool:
        raise ValueError(
            "from_function: the predicate must return a bool tensor that broadcasts over "
            f"(b, h, m, n), got {seen.dtype}."
        )
    if seen.dim() > 4:
        raise ValueError(
            "from_function: the predicate must return a tensor that broadcasts over (b, h, m, n), "
            f"got {list(seen.shape)}; index a table with all its indices at once, as table[b, m]."
        )
    return seen.reshape((1,) * (4 - seen.dim()) + tuple(seen.shape)) if seen.dim() < 4 else seen


def _check_seen(seen: Tensor, sizes: tuple[int, ...]) -> None:
    if any(have not in (1, want) for have, want in zip(seen.shape, sizes, strict=True)):
        raise ValueError(
            "from_function: the predicate must return a tensor that broadcasts over (b, h, m, n), "
            f"{list(sizes)} here, got {list(seen.shape)}."
        )


# A predicate is evaluated on strips of BIT_TILE queries, at most this many elements at once.
_STRIP_ELEMENTS = 1 << 24


@outside_inference_mode
def _evaluate(fn: Predicate, B: int, H: int, M: int, N: int, device: torch.device | str) -> Bits:
    """Evaluate a predicate once per tile; batch and head axes stay 1 where it ignores them."""
    b = torch.arange(B, device=device).reshape(-1, 1, 1, 1)
    h = torch.arange(H, device=device).reshape(1, -1, 1, 1)
    n_rows, n_cols = -(-M // BIT_TILE), -(-N // BIT_TILE)
    width = max(1, _STRIP_ELEMENTS // max(1, B * H * BIT_TILE * BIT_TILE)) * BIT_TILE
    kinds: list[Tensor] = []
    words: list[Tensor] = []
    for row in range(n_rows):
        i = torch.arange(row * BIT_TILE, min(M, (row + 1) * BIT_TILE), device=device)
        for col in range(0, N, width):
            j = torch.arange(col, min(N, col + width), device=device)
            seen = _call_predicate(fn, b, h, i.reshape(1, 1, -1, 1), j.reshape(1, 1, 1, -1))
            _check_seen(seen, (B, H, i.numel(), j.numel()))
            seen = seen.expand(seen.shape[0], seen.shape[1], i.numel(), j.numel())
            kind, bits = _pack_strip(seen, sum(w.shape[0] for w in words))
            kinds.append(kind)
            words.append(bits)
    return _join_strips(kinds, words, (n_rows, n_cols), device)


def _join_strips(
    kinds: list[Tensor],
    words: list[Tensor],
    grid: tuple[int, int],
    device: torch.device | str,
) -> Bits:
    """Bit tiles from strips in row order; `grid` is how many tiles there are."""
    if not kinds:
        return Bits(
            BIT_TILE,
            BIT_TILE,
            torch.zeros(1, 1, *grid, dtype=torch.int32, device=device),
            torch.zeros(0, BIT_TILE, BIT_TILE // _WORD, dtype=torch.int32, device=device),
        )
    # A predicate may ignore the batch or the head in some strips only.
    Bm, Hm = (max(k.shape[d] for k in kinds) for d in (0, 1))
    joined = torch.cat([k.expand(Bm, Hm, -1) for k in kinds], dim=-1)
    return Bits(BIT_TILE, BIT_TILE, joined.reshape(Bm, Hm, *grid), torch.cat(words))


def _pack_strip(seen: Tensor, first: int, *, is_compact: bool = True) -> tuple[Tensor, Tensor]:
    """bool `[b, h, <= BIT_TILE, n]` -> kinds `[b, h, tiles]` and the words of the mixed tiles.

    first: how many words' tiles came before. is_compact: counts them, which waits for a GPU;
    otherwise every tile has its words.
    """
    Bm, Hm, m, n = seen.shape
    n_tiles = -(-n // BIT_TILE)
    padded = seen.new_zeros(Bm, Hm, BIT_TILE, n_tiles * BIT_TILE)
    padded[:, :, :m, :n] = seen
    tiles = padded.reshape(Bm, Hm, BIT_TILE, n_tiles, BIT_TILE).transpose(2, 3)
    count = tiles.flatten(3).sum(-1)
    columns = torch.arange(n_tiles, device=seen.device) * BIT_TILE
    size = m * (n - columns).clamp(max=BIT_TILE)
    mixed = (count > 0) & (count < size)
    if is_compact:
        slots = mixed.flatten().cumsum(0).reshape(mixed.shape) + (1 + first)
        kept = tiles[mixed]
    else:
        slots = torch.arange(mixed.numel(), device=seen.device).reshape(mixed.shape) + (2 + first)
        kept = tiles.flatten(0, 2)
    kinds = torch.where(mixed, slots, (count == size).to(torch.int64)).to(torch.int32)
    return kinds, _pack_bits(kept)


def _pack_bits(tiles: Tensor) -> Tensor:
    """bool `[P, BIT_TILE, BIT_TILE]` -> int32 words `[P, BIT_TILE, BIT_TILE / 32]`."""
    lanes = tiles.reshape(-1, BIT_TILE, BIT_TILE // _WORD, _WORD).to(torch.int64)
    words = (lanes << torch.arange(_WORD, device=tiles.device)).sum(-1)
    # Two's complement: bit 31 is the sign of the int32 word.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def materialise(mask: Mask, positions: Positions, device: torch.device) -> Bits:
    """Any mask as bit tiles over local queries and keys: row m and key n of each sequence.

    Without synchronisation, except that packed calls read their longest document's length.
    Cost: one bit an element, of every sequence and head that the mask tells apart.
    """
    place = positions.unpacked()
    kinds: list[Tensor] = []
    words: list[Tensor] = []
    per_tile = place.B * place.H * BIT_TILE * BIT_TILE
    width = max(1, _STRIP_ELEMENTS // max(1, per_tile)) * BIT_TILE
    n_rows, n_cols = -(-place.M // BIT_TILE), -(-place.N // BIT_TILE)
    for row in range(n_rows):
        m = (row * BIT_TILE, min(place.M, (row + 1) * BIT_TILE))
        rows = place.rows((0, place.B), (0, place.H), m, device)
        for col in range(0, place.N, width):
            stop = min(place.N, col + width)
            seen = mask.visible(rows.index(col, stop))
            seen = seen.expand(seen.shape[0], seen.shape[1], m[1] - m[0], stop - col)
            kind, bits = _pack_strip(seen, sum(w.shape[0] for w in words), is_compact=False)
            kinds.append(kind)
            words.append(bits)
    return _join_strips(kinds, words, (n_rows, n_cols), device)


def _is_run(j: Tensor) -> bool:
    """Whether the same keys are asked of for all, one after the other."""
    flat = j.flatten()
    return flat.numel() == j.shape[-1] and bool((flat.diff() == 1).all())


def blocks(visible: Tensor, block_m: int = BIT_TILE, block_n: int = BIT_TILE) -> Mask:
    """A block mask: tile (x, y) of `block_m` queries and `block_n` keys is visible or not.

    Args:
        visible: bool `[nM, nN]`, `[B or 1, nM, nN]` or `[B or 1, H or 1, nM, nN]`. What lies
            beyond its last tile is hidden.
        block_m, block_n: sizes of a tile, above 0; 128 x 128 is taken by kernels as it is.
    Raises: ValueError for other dtypes, shapes and sizes.
    """
    if not isinstance(visible, Tensor):
        raise ValueError(f"blocks: expected a bool tensor, got {type(visible).__name__}.")
    if visible.dtype != torch.bool or not 2 <= visible.dim() <= 4:
        raise ValueError(
            "blocks: expected a bool tensor [nM, nN], [B, nM, nN] or [B, H, nM, nN], "
            f"got {visible.dtype} {list(visible.shape)}."
        )
    if not all(is_integer(size) and size > 0 for size in (block_m, block_n)):
        raise ValueError(f"blocks: tile sizes must be positive ints, got {block_m} x {block_n}.")
    heads = {2: (1, 1), 3: (visible.shape[0], 1), 4: tuple(visible.shape[:2])}[visible.dim()]
    kinds = visible.reshape(*heads, *visible.shape[-2:]).to(torch.int32)
    return Bits(block_m, block_n, kinds, kinds.new_zeros(0, BIT_TILE, BIT_TILE // _WORD))


def from_function(fn: Predicate) -> Mask:
    """Any predicate over (b, h, m, n), evaluated tile by tile, once for given sizes.

    Args:
        fn: takes four int64 tensors that broadcast to `[B, H, m, n]` (indices of batch or
            document, query head, query and key; a piece's `q_start` and `k_start` are added) and
            returns a bool tensor that broadcasts to the same. Write it with tensor operations
            (`&`, `|`, `~`, indexing), not with `if`.
    Cost: one evaluation of every tile, one bit per element of the tiles that are neither hidden
        nor visible as a whole; kept on the mask, so reuse the object.
    """
    if not callable(fn):
        raise ValueError(f"from_function: expected a function of (b, h, m, n), got {fn!r}.")
    return Function(fn)
