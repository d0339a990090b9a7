"""A call over a cache as the split-KV kernels take it: operands, places, builds, and the launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.band import Band
from ..core.mask import UNBOUNDED, And, Mask
from ..core.mask_leaves import Tree
from ..dense.choice import LEAST_SCALE
from ..dense.triton_call import TritonCall, cut_dim, score_terms
from ..kernels.launch import Config, architecture_of, launch, relaunch
from ..kernels.placement import FAR as _FAR
from ..kernels.structs import ScoreTerms, Statistics, absent, code
from .cache import FLOAT8, KVCache
from .call import CacheCall
from .config import FIXED_PART, Key, SplitConfig, block_rows, split_config
from .triton_combine import TEAMS, _cache_combine_kernel
from .triton_plan import CacheBuild, CachePlace
from .triton_split_kv import (
    E4M3,
    E5M2,
    HEAD,
    NONE,
    TOKEN,
    Parts,
    Scales,
    _cache_attention_fwd_kernel,
)

FAR = _FAR.value
# Queries of a sequence that a tile is made for, where longer ones are another kernel's.
_DRAFTS = 4
# Programs of the interpreter.
_INTERPRETED = 3
_COMBINE = Config(0, 0, 4, 1)


@dataclass(frozen=True)
class SplitMask:
    """A mask as the kernel takes it: a band, and a tree beside it."""

    band: Band
    tree: Tree | None

    @classmethod
    def of(cls, mask: Mask) -> SplitMask | None:
        """None where it is something else."""
        rest, trees = _without_trees(mask)
        band = Band() if rest is None else Band.of(rest)
        if band is None or band.documents is not None or len(trees) > 1:
            return None
        return cls(band, trees[0] if trees else None)


def _without_trees(mask: Mask) -> tuple[Mask | None, list[Tree]]:
    if isinstance(mask, Tree):
        return None, [mask]
    if isinstance(mask, And):
        left, left_trees = _without_trees(mask.left)
        right, right_trees = _without_trees(mask.right)
        rest = left if right is None else right if left is None else And(left, right)
        return rest, left_trees + right_trees
    return mask, []


def cut(dim: int, widest: int = 512, narrowest: int = 16) -> tuple[int, ...]:
    """A head dim and the widths of its pieces: powers of two; 576 is 512 and 64."""
    if dim <= 256 and narrowest == 16:
        return cut_dim(dim, min(widest, 256))
    pieces, left = [], -(-dim // narrowest) * narrowest
    while left:
        piece = min(widest, 1 << (left.bit_length() - 1))
        pieces.append(piece)
        left -= piece
    return dim, *pieces


def shares_storage(call: CacheCall, widest: int) -> bool:
    """Whether the tiles of a latent cache's values are tiles of its keys."""
    cache = call.cache
    dims, value_dims = cut(cache.k.shape[3], widest), cut(cache.v.shape[3], widest)
    is_prefix = value_dims[1:] == dims[1 : len(value_dims)]
    return cache.is_latent and is_prefix and sum(value_dims[1:]) == cache.v.shape[3]


class SplitCall:
    """One call: everything but its results.

    most: sequences of more queries are left to another kernel, None where there is none.
    """

    def __init__(self, call: CacheCall, most: int | None = None) -> None:
        self.call, self.device, self.most = call, call.q.device, most
        cache = call.cache
        self.G, self.D = cache.k.shape[2:4]
        self.E, self.H, self.group = cache.v.shape[3], call.q.shape[-2], call.group
        self.q = call.q if call.q.dim() == 4 else call.q.unsqueeze(0)
        if self.q.stride(-1) != 1:
            self.q = self.q.contiguous()
        # Sums of fp32 are short, see `triton_split_kv._added`.
        self.widest = 16 if call.q.dtype == torch.float32 and not self._is_interpreted else 512
        self.is_shared = shares_storage(call, self.widest)
        self.key = Key(
            call.q.dtype,
            cache.k.dtype,
            self.D,
            0 if self.is_shared else self.E,
            architecture_of(self.device),
            all(_is_aligned(x) for x in (self.q, cache.k, cache.v)),
            self._is_heavy,
            cache.is_paged and cache.k.shape[1] % 128 != 0,
        )
        is_fixed = call.splits.is_fixed or call.splits.count is not None
        rows = call.most_queries * call.group
        if most is not None:
            # Beside prefills a sequence mostly has one query, or a few drafts.
            rows = min(rows, _DRAFTS * call.group)
        self.block_m = block_rows(rows, call.group, call.splits.is_fixed, self.key)
        self.config: SplitConfig = split_config(self.key, self.block_m)
        # The cache as kernels see it.
        self.is_paired = self._reads_pairs()
        self.k, self.v = (x.view(torch.int16) if self.is_paired else x for x in (cache.k, cache.v))
        self.is_fixed = is_fixed
        # Of most units: how many programs merge their parts.
        self.rows_per_unit = max(1, min(self.block_m, rows))

    def _reads_pairs(self) -> bool:
        """Whether columns of float8 are read two by two, see `triton_split_kv._unpacked`: not where
        warp groups multiply, whose operands go through shared memory in fp16 anyway."""
        cache = self.call.cache
        if cache.k.dtype not in FLOAT8 or self.block_m >= 64 or self.call.q.dtype == torch.float32:
            return False
        # No product is of fewer than 16 columns.
        if self.is_shared and min(cut(self.D, self.widest)[1:]) < 32:
            return False
        return all(_holds_pairs(x) for x in (cache.k, cache.v))

    @property
    def _is_heavy(self) -> bool:
        """Whether a program holds more than products: terms of scores or the bits of a tree."""
        mask = SplitMask.of(self.call.mask)
        return not self._is_folded or (mask is not None and mask.tree is not None)

    @property
    def precision(self) -> str:
        """Of fp32 products: exact ones. Matrix units cut sums off at every step, which three tf32
        products for one do not undo, and a query or a few have little to multiply."""
        return "interpreted" if self._is_interpreted else "ieee"

    @property
    def _is_interpreted(self) -> bool:
        return architecture_of(self.device) == "interpreter"

    @property
    def n_units(self) -> int:
        """The most there may be, of one kv head."""
        call, group = self.call, self.group
        if not call.is_packed:
            return call.cache.B * -(-call.q.shape[1] * group // self.block_m)
        return call.q.shape[0] * group // self.block_m + call.cache.B + 1

    @property
    def quantum(self) -> int:
        """In key tiles."""
        block_n, count = self.config.launch.block_n, self.call.splits.count
        if count is not None:
            return max(1, -(-self.call.cache.capacity // (count * block_n)))
        return FIXED_PART // block_n if self.is_fixed else 1

    @property
    def n_teams(self) -> int:
        processors = _INTERPRETED
        if self.device.type == "cuda":
            processors = _multiprocessors(self.device)
        return max(1, processors * self.config.programs // self.G)

    @property
    def parts_per_unit(self) -> int:
        """The most where they are fixed."""
        keys = self.quantum * self.config.launch.block_n
        # A window may begin inside a tile.
        return -(-self.call.cache.capacity // keys) + 1

    @property
    def n_slots(self) -> int:
        return self.n_units * self.parts_per_unit if self.is_fixed else 2 * self.n_teams

    # ------------------------------------------------------------ what kernels are given

    def place(self) -> CachePlace:
        call, cache = self.call, self.call.cache
        mask = SplitMask.of(call.mask)
        assert mask is not None
        band, tree = mask.band, mask.tree
        offset = band.offset
        bits = None if tree is None else tree.bits.contiguous()
        rows = call.q.shape[0] if call.is_packed else call.q.shape[1]
        table = cache.block_table
        if table is not None and table.stride(-1) != 1:
            table = table.contiguous()
        own = offset if isinstance(offset, int) else 0
        return CachePlace(
            cache.lengths.contiguous(),
            None if call.cu_seqlens_q is None else call.cu_seqlens_q.contiguous(),
            table,
            None if cache.batch_index is None else cache.batch_index.contiguous(),
            offset.contiguous() if isinstance(offset, Tensor) else None,
            None if band.lows is None else band.lows.contiguous(),
            None if band.highs is None else band.highs.contiguous(),
            None if cache.starts is None else cache.starts.contiguous(),
            bits,
            code(cache.B),
            code(self.G),
            code(rows),
            # Without storage no table leads anywhere.
            code(cache.capacity if cache.k.shape[0] else 0),
            code(cache.k.shape[0]),
            code(0 if table is None else table.stride(0)),
            code(0 if table is None else table.shape[1]),
            code(FAR if band.left == UNBOUNDED else min(band.left, FAR)),
            code(FAR if band.right == UNBOUNDED else min(band.right, FAR)),
            code(max(-FAR, min(FAR, own))),
            code(self.quantum),
            code(0 if bits is None or bits.shape[0] == 1 else bits.shape[1]),
            code(0 if bits is None else bits.shape[1]),
            None if self.most is None else code(self.most),
        )

    def terms(self) -> ScoreTerms:
        return score_terms(self.call.terms, self._is_folded)

    @property
    def _is_folded(self) -> bool:
        terms = self.call.terms
        is_plain = terms.softcap is None and terms.bias is None and terms.alibi_slopes is None
        return is_plain and terms.scale > LEAST_SCALE

    def scales(self) -> tuple[int, Scales]:
        cache = self.call.cache
        k, v = cache.k_scale, cache.v_scale
        if cache.k.dtype not in FLOAT8 or k is None or v is None:
            return NONE.value, Scales(None, None, code(0), code(0), code(0))
        k, v = k.contiguous(), v.contiguous()
        if k.dim() == 3:
            strides = code(k.stride(0)), code(k.stride(1)), code(1)
            return TOKEN.value, Scales(k, v, *strides)
        return HEAD.value, Scales(k, v, code(self.G if k.dim() == 2 else 0), code(0), code(1))

    @property
    def _is_flat(self) -> bool:
        cache, block_n = self.call.cache, self.config.launch.block_n
        R, P = cache.k.shape[:2]
        # The stride of one slot alone says nothing.
        if not cache.is_paged or P == 1 or P % block_n == 0 or R * P >= 1 << 31:
            return False
        # Triton 3.6 takes `P page + slot` for a multiple of P, and so what it is multiplied by has
        # to be one of 16 itself.
        return all(
            x.stride(0) == P * x.stride(1) and x.stride(1) % 16 == 0 for x in (self.k, self.v)
        )

    @property
    def _pairs(self) -> Any:
        if not self.is_paired:
            return NONE
        return E5M2 if self.call.cache.k.dtype == torch.float8_e5m2 else E4M3

    def build(self, scales: int) -> CacheBuild:
        call, launch_config = self.call, self.config.launch
        mask = SplitMask.of(call.mask)
        assert mask is not None
        band = mask.band
        tensors = (band.offset, band.lows, band.highs)
        singles = sum(
            1 << i for i, x in enumerate(tensors) if isinstance(x, Tensor) and x.numel() == 1
        )
        k_scale = call.cache.k_scale
        block_b = 32 if call.cache.B < 32 else 1024
        # Half of a piece is what is multiplied, and of fewer than 32 columns every warp would
        # multiply all. What values share with keys they have to be cut like.
        narrowest = 64 if self.is_paired and not self.is_shared else 16
        return CacheBuild(
            cut(self.D, self.widest, narrowest),
            cut(self.E, self.widest, narrowest),
            self.is_shared,
            self.group,
            call.cache.k.shape[1] if call.cache.is_paged else 0,
            self._is_flat,
            isinstance(band.offset, int),
            singles,
            self._is_folded,
            call.terms.softcap is not None,
            0,
            self.precision,
            scales,
            k_scale is not None and k_scale.dim() == 2,
            self._pairs.value,
            self.is_fixed,
            launch_config.block_m,
            launch_config.block_n,
            block_b,
            block_b > call.cache.B,
        )


class PartSizes(NamedTuple):
    """Elements of 4 bytes that parts take, one thing behind the other in one buffer."""

    out: int
    state: int
    notes: int
    n_units: int
    per_unit: int

    @classmethod
    def of(cls, split: SplitCall) -> PartSizes:
        rows = split.n_slots * split.G * split.block_m
        # Whatever begins behind another stays aligned to 16 bytes.
        return cls(
            -(-rows * split.E // 4) * 4, 2 * rows, 0 if split.is_fixed else 16 * split.n_teams,
            code(split.n_units), code(split.parts_per_unit),
        )  # fmt: skip

    def buffer(self, device: torch.device) -> Tensor:
        size = self.out + self.state + self.notes
        return torch.empty(size, dtype=torch.float32, device=device)

    def views(self, buffer: Tensor) -> Parts:
        out, state, notes = buffer.split([self.out, self.state, self.notes])
        return Parts(
            out, state, notes.view(torch.int64) if self.notes else None, self.n_units,
            self.per_unit,
        )  # fmt: skip

    def addresses(self, start: int) -> tuple[int, int, int | None, int, int]:
        state = start + 4 * self.out
        notes = state + 4 * self.state if self.notes else None
        return start, state, notes, self.n_units, self.per_unit


class Forward:
    """A forward made ready: it runs again on other tensors of the same layout and alignment."""

    _kernel: Any = _cache_attention_fwd_kernel

    def __init__(self, split: SplitCall, out: Tensor, lse: Tensor) -> None:
        self._split, call = split, split.call
        self.device = split.device
        n_programs = split.n_teams * split.G
        self._grid = (n_programs, 1, 1)
        rows, parts, width = combine_tile(split.rows_per_unit, split.E)
        # Of so many teams about one began a unit that others finished.
        teams = max(1, min(TEAMS.value, split.n_teams // split.n_units))
        groups = split.n_units if split.is_fixed else -(-split.n_teams // teams)
        tiles = -(-split.rows_per_unit // rows) * -(-split.E // width)
        self._combine_grid = (groups * split.G * tiles, 1, 1)
        self._combines = call.splits.count != 1
        self._slots = PartSizes.of(split)
        kind, scales = split.scales()
        self._build = split.build(kind)
        self._tail = (
            code(split.rows_per_unit), code(n_programs), code(teams), rows, parts, width,
            self._build,
        )  # fmt: skip
        results = out if out.dim() == 4 else out.unsqueeze(0)
        statistics = absent(Statistics)
        if lse.numel():
            # Packed rows are those of one batch, whatever sequence they belong to.
            of_batch = 0 if call.is_packed else lse.stride(0)
            statistics = Statistics(lse, code(of_batch), code(lse.stride(-2)))
        operands = [TritonCall.operand(x) for x in (split.q, split.k, split.v, results)]
        self._strides = [operand[1:] for operand in (*operands, statistics)]
        self._given = (*operands, statistics, split.place(), split.terms(), scales)
        # Of the first run, which others need not go through.
        self._compiled: tuple[Any, Any] | None = None

    def run_first(self) -> bool:
        """Run on the tensors of the call. Returns whether `run` may follow."""
        q, k, v, out, lse, place, terms, scales = self._given
        parts = self._slots.views(self._slots.buffer(self.device))
        config = self._split.config.launch
        cache = self._split.call.cache
        arguments = self._arguments(cache, q, k, v, out, lse, parts, place, terms, scales)
        main = launch(self._kernel, self._grid, config, arguments, self.device)
        combine = None
        if self._combines:
            rest = (out, lse, parts, place, terms.sinks, *self._tail)
            combine = launch(_cache_combine_kernel, self._combine_grid, _COMBINE, rest, self.device)
        if main is not None and (combine is not None or not self._combines):
            self._compiled = (main, combine)
        # The tensors belong to the caller; their addresses come anew with each call.
        self._place, self._terms, self._scales = tuple(place)[9:], tuple(terms), scales[2:]
        del self._given, self._split
        return self._compiled is not None

    def _arguments(
        self, cache: KVCache, q: Any, k: Any, v: Any, out: Any, lse: Any, parts: Any, place: Any,
        terms: Any, scales: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Of the kernel."""
        return q, k, v, out, lse, parts, place, terms, scales, self._build

    def run(
        self, q: Tensor, cache: KVCache, cu: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, out: Tensor, lse: Tensor | None,
    ) -> None:  # fmt: skip
        """The same on other tensors: addresses in place of tensors, and no look-up."""
        assert self._compiled is not None
        sq, sk, sv, so, sl = self._strides
        buffer = self._slots.buffer(self.device)
        partials = self._slots.addresses(buffer.data_ptr())
        place = addresses_of(cache, cu, self._place)
        sinks_at = _address(sinks)
        terms = terms_at(self._terms, slopes, sinks)
        scales = (_address(cache.k_scale), _address(cache.v_scale), *self._scales)
        to = (out.data_ptr(), *so)
        statistics = (_address(lse), *sl)
        main, combine = self._compiled
        arguments = self._arguments(
            cache, (q.data_ptr(), *sq), (cache.k.data_ptr(), *sk), (cache.v.data_ptr(), *sv), to,
            statistics, partials, place, terms, scales,
        )  # fmt: skip
        relaunch(main, self._grid, arguments, self.device)
        if self._combines:
            relaunch(
                combine, self._combine_grid,
                (to, statistics, partials, place, sinks_at, *self._tail), self.device,
            )  # fmt: skip


def cache_attention_fwd(
    call: CacheCall, out: Tensor, lse: Tensor, make: Callable[..., Any] | None = None
) -> Any:
    """Write out and, where it has room, lse. Nothing is checked here.

    make: what makes the forward ready, where it is not Triton's.
    Returns: what runs calls like this one again; None where nothing does.
    """
    if call.q.numel() == 0:
        return None
    target = out if out.stride(-1) == 1 else out.new_empty(out.shape)
    forward = make(call, target, lse) if make else Forward(SplitCall(call), target, lse)
    is_reusable = forward.run_first()
    if target is not out:
        out.copy_(target)
        return None
    return forward if is_reusable else None


def combine_tile(rows_per_unit: int, E: int) -> tuple[int, int, int]:
    """Rows and parts that a program of the merge has at a time, and its columns."""
    width = min(128, 1 << (E - 1).bit_length())
    rows = 4 if rows_per_unit >= 16 else 1
    return rows, max(2, min(16, 8192 // (rows * width))), width


def addresses_of(cache: KVCache, cu: Tensor | None, numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """The `CachePlace` of a call whose mask has no tensors, addresses in place of tensors."""
    return (
        cache.lengths.data_ptr(), _address(cu), _address(cache.block_table),
        _address(cache.batch_index), None, None, None, _address(cache.starts), None, *numbers,
    )  # fmt: skip


def terms_at(terms: tuple[Any, ...], slopes: Tensor | None, sinks: Tensor | None) -> Any:
    """`ScoreTerms` of other slopes and sinks, by their addresses."""
    return (*terms[:4], (_address(slopes), terms[4][1]), _address(sinks), *terms[6:])


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _is_aligned(x: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 elements and 16 bytes."""
    strides = [s for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    is_whole = x.shape[-1] % 16 == 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return is_whole and all(stride % 16 == 0 for stride in strides)


def _holds_pairs(x: Tensor) -> bool:
    """Whether every row is one of whole numbers of 16 bits."""
    is_even = x.shape[-1] % 2 == 0 and x.stride(-1) == 1 and x.data_ptr() % 2 == 0
    return is_even and all(stride % 2 == 0 for stride in x.stride()[:-1])


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
