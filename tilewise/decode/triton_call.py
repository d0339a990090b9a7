"""A call over a cache as the split-KV kernels take it: operands, places, builds, and the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.band import Band
from ..core.mask import UNBOUNDED, And, Mask
from ..core.mask_leaves import Tree
from ..dense.triton_call import TritonCall, cut_dim
from ..kernels.launch import Config, architecture_of, launch
from ..kernels.placement import FAR as _FAR
from ..kernels.structs import Bias, ScoreTerms, Slopes, Statistics, absent, code
from .cache import FLOAT8
from .call import CacheCall
from .config import FIXED_PART, Key, SplitConfig, block_rows, split_config
from .triton_combine import _cache_combine_kernel
from .triton_plan import CacheBuild, CachePlace
from .triton_split_kv import HEAD, NONE, TOKEN, Parts, Scales, _cache_attention_fwd_kernel

FAR = _FAR.value
_LEAST_SCALE = 1e-37
# Programs of the interpreter.
_INTERPRETED = 3


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


def cut(dim: int) -> tuple[int, ...]:
    """A head dim and the widths of its pieces: powers of two; 576 is 512 and 64."""
    if dim <= 256:
        return cut_dim(dim)
    pieces, left = [], -(-dim // 16) * 16
    while left:
        piece = min(512, 1 << (left.bit_length() - 1))
        pieces.append(piece)
        left -= piece
    return dim, *pieces


def shares_storage(call: CacheCall) -> bool:
    """Whether the tiles of a latent cache's values are tiles of its keys."""
    cache = call.cache
    dims, value_dims = cut(cache.k.shape[3]), cut(cache.v.shape[3])
    is_prefix = value_dims[1:] == dims[1 : len(value_dims)]
    return cache.is_latent and is_prefix and sum(value_dims[1:]) == cache.v.shape[3]


class SplitCall:
    """One call: everything but its results."""

    def __init__(self, call: CacheCall) -> None:
        self.call, self.device = call, call.q.device
        cache = call.cache
        self.G, self.D = cache.k.shape[2:4]
        self.E, self.H = cache.v.shape[3], call.q.shape[-2]
        self.q = call.q if call.q.dim() == 4 else call.q.unsqueeze(0)
        if self.q.stride(-1) != 1:
            self.q = self.q.contiguous()
        self.is_shared = shares_storage(call)
        self.key = Key(
            call.q.dtype,
            cache.k.dtype,
            self.D,
            0 if self.is_shared else self.E,
            architecture_of(self.device),
            all(_is_aligned(x) for x in (self.q, cache.k, cache.v)),
        )
        is_fixed = call.splits.is_fixed or call.splits.count is not None
        rows = call.most_queries * call.group
        self.block_m = block_rows(rows, call.group, call.splits.is_fixed, self.key)
        self.config: SplitConfig = split_config(self.key, self.block_m)
        self.is_fixed = is_fixed
        self.rows_per_unit = max(1, min(self.block_m, rows))

    @property
    def n_units(self) -> int:
        """The most there may be, of one kv head."""
        call, group = self.call, self.call.group
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
    def n_slots(self) -> int:
        if not self.is_fixed:
            return 2 * self.n_teams
        keys = self.quantum * self.config.launch.block_n
        # A window may begin inside a tile.
        return self.n_units * (-(-self.call.cache.capacity // keys) + 1)

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
            bits,
            code(cache.B),
            code(self.G),
            code(rows),
            code(cache.capacity),
            code(cache.k.shape[0]),
            code(0 if table is None else table.stride(0)),
            code(FAR if band.left == UNBOUNDED else min(band.left, FAR)),
            code(FAR if band.right == UNBOUNDED else min(band.right, FAR)),
            code(max(-FAR, min(FAR, own))),
            code(self.quantum),
            code(0 if bits is None or bits.shape[0] == 1 else bits.shape[1]),
            code(0 if bits is None else bits.shape[1]),
        )

    def terms(self) -> ScoreTerms:
        terms = self.call.terms
        scale = terms.scale / (terms.softcap or 1.0)
        if self._is_folded:
            scale *= math.log2(math.e)
        slopes = absent(Slopes)
        if terms.alibi_slopes is not None:
            rows = terms.alibi_slopes.contiguous()
            slopes = Slopes(rows, code(rows.shape[-1] if rows.dim() == 2 else 0))
        bias = absent(Bias) if terms.bias is None else TritonCall.bias_operand(terms.bias)
        sinks = None if terms.sinks is None else terms.sinks.contiguous()
        return ScoreTerms(
            scale, terms.scale, terms.softcap or 1.0, bias, slopes, sinks, None, 1.0, code(0),
            code(0),
        )  # fmt: skip

    @property
    def _is_folded(self) -> bool:
        terms = self.call.terms
        is_plain = terms.softcap is None and terms.bias is None and terms.alibi_slopes is None
        return is_plain and terms.scale > _LEAST_SCALE

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
        architecture = self.key.architecture
        precision = "ieee"
        if architecture == "interpreter":
            precision = "interpreted"
        elif call.q.dtype == torch.float32 and architecture.startswith("sm_"):
            precision = "tf32x3"
        return CacheBuild(
            cut(self.D),
            cut(self.E),
            self.is_shared,
            call.group,
            call.cache.k.shape[1] if call.cache.is_paged else 0,
            isinstance(band.offset, int),
            singles,
            self._is_folded,
            call.terms.softcap is not None,
            0,
            precision,
            scales,
            k_scale is not None and k_scale.dim() == 2,
            self.is_fixed,
            launch_config.block_m,
            launch_config.block_n,
            32 if call.cache.B < 32 else 1024,
        )


def cache_attention_fwd(call: CacheCall, out: Tensor, lse: Tensor) -> None:
    """Write out and, where it has room, lse. Nothing is checked here."""
    ready = SplitCall(call)
    cache, q = call.cache, ready.q
    if q.numel() == 0:
        return
    target = out if out.stride(-1) == 1 else out.new_empty(out.shape)
    rows = target if target.dim() == 4 else target.unsqueeze(0)
    statistics = absent(Statistics)
    if lse.numel():
        wide = lse if lse.dim() == 3 else lse.unsqueeze(0)
        statistics = TritonCall.statistics(wide)
    kind, scales = ready.scales()
    build, place, terms = ready.build(kind), ready.place(), ready.terms()
    shape = (ready.n_slots, ready.G, ready.block_m)
    parts = Parts(
        torch.empty(*shape, ready.E, dtype=torch.float32, device=ready.device),
        torch.empty(shape, dtype=torch.float32, device=ready.device),
    )
    n_programs = ready.n_teams * ready.G
    operands = [TritonCall.operand(x) for x in (q, cache.k, cache.v, rows)]
    launch(
        _cache_attention_fwd_kernel,
        (n_programs,),
        ready.config.launch,
        (*operands, statistics, parts, place, terms, scales, build),
        ready.device,
    )
    if call.splits.count != 1:
        launch(
            _cache_combine_kernel,
            (ready.n_units * ready.G * ready.rows_per_unit,),
            Config(0, 0, 4, 1),
            (
                operands[3], statistics, parts, place, terms.sinks, code(ready.rows_per_unit),
                code(n_programs), 1 << (ready.E - 1).bit_length(), build,
            ),
            ready.device,
        )  # fmt: skip
    if target is not out:
        out.copy_(target)


def _is_aligned(x: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 elements and 16 bytes."""
    strides = [s for s, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    is_whole = x.shape[-1] % 16 == 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    return is_whole and all(stride % 16 == 0 for stride in strides)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
