"""What the triton backend's forward and backward share: one call, as its kernels take it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..core.mask import raise_mask
from ..core.mask_bits import BIT_TILE, Bits, materialise
from ..core.philox import drop_threshold
from ..core.tiles import row_intervals
from ..kernels import lists, masks
from ..kernels.launch import (
    UNTILED,
    Config,
    Launch,
    architecture_of,
    compile_together,
    launch,
    relaunch,
)
from ..kernels.replay import Tape, sum_shares
from ..kernels.structs import (
    Bias,
    Build,
    Call,
    MaskData,
    Operand,
    Placement,
    ScoreTerms,
    Slopes,
    Statistics,
    absent,
    code,
)
from .choice import FEW_KEYS, LEAST_SCALE
from .config import Key, few_tiles
from .piece import LENGTHS, Piece, Terms
from .triton_placement import (
    DOCUMENTS,
    FAR,
    PACKED,
    PADDED,
    UNIFORM,
    uniform_fields,
    write_table,
)

_BAND, _INTERVALS, _BITS = (x.value for x in (masks.BAND, masks.INTERVALS, masks.BITS))
_NO_MASK = absent(MaskData)
# Masks of few intervals a row test them one after the other; others loop.
_FEW_INTERVALS = 4
# Two programs for each of a large GPU's processors.
ENOUGH_PROGRAMS = 264
# What heads that run together may have of a large GPU's L2 cache for what their programs read.
L2_BYTES = 32 << 20
_PIECES = (16, 32, 64, 128, 256)
# Tensor cores cut off what does not fit while they add up. Of three tf32 products the mean error of
# S on an H200 was 2.7 eps of its mean at D 128 and 5.1 at D 256 in one piece, 1.0 and 1.3 in pieces
# of 32, which are added in fp32 (cuBLAS in fp32: 0.6 to 1.0).
_WIDEST_OF_TF32 = 32


def cut_dim(dim: int, widest: int = max(_PIECES)) -> tuple[int, ...]:
    """A head dim and the widths of its pieces: powers of two from 16 to `widest`."""
    sums = [(a,) for a in _PIECES] + [(32, 16), (64, 16), (64, 32), (128, 32), (128, 64)]
    left = min((pieces for pieces in sums if sum(pieces) >= dim), key=sum)
    return dim, *(min(x, widest) for x in left for _ in range(0, x, widest))


@dataclass(frozen=True)
class Plan:
    """One kernel's programs: how many, where their sequences stand, and what tiles they visit."""

    n_programs: int
    call: Call


class TritonCall:
    """A piece with its tensors as operands, its terms as scalars and pointers, its mask as a band,
    intervals or bits. Batched or packed (`Piece.as_batch`)."""

    def __init__(self, piece: Piece) -> None:
        self.piece, self.device = piece, piece.q.device
        self.B, self.M, self.H, _ = piece.q.shape
        self.N, self.G = piece.k.shape[1:3]
        self.tensors = tuple(align_rows(x) for x in (piece.q, piece.k, piece.v))
        widest = _WIDEST_OF_TF32 if self.precision == "tf32x3" else max(_PIECES)
        D, E = self.tensors[0].shape[-1], self.tensors[2].shape[-1]
        self.dims = cut_dim(D, widest), cut_dim(E, widest)
        terms = piece.terms
        is_plain = terms.softcap is None and terms.bias is None and terms.alibi_slopes is None
        # Where fp32 would make it 0, a hidden score of -inf must not meet it.
        self.is_folded = is_plain and terms.scale > LEAST_SCALE
        positions = piece.positions
        self.band = piece.band
        if positions.is_packed:
            self.place_kind = PACKED
        elif self.band is not None and self.band.documents is not None:
            self.place_kind = DOCUMENTS
        elif positions.lengths or (self.band is not None and self.band.has_tensors):
            self.place_kind = PADDED
        else:
            self.place_kind = UNIFORM
        if self.band is not None:
            self.mask_kind = _BAND
        else:
            self.mask_kind = _INTERVALS if piece.mask.is_exact else _BITS

        # Nothing that is found for this call hangs on a tensor's contents or place, but for the
        # tables of where sequences stand, which `on` makes anew.
        self.is_reusable = self._is_placed_by_tensors_alone
        extras = (terms.bias, terms.alibi_slopes, terms.sinks, terms.rng)
        self.is_reusable = self.is_reusable and all(x is None for x in extras)
        self._plans: dict[Any, Plan] = {}
        self._tables: dict[tuple[int, int], Tensor | None] = {}
        self._builds: dict[Any, Build] = {}
        self._compiled: dict[Any, Any] = {}
        self._together: set[Any] = set()
        self._tape: Tape | None = None
        # See `is_rehearsal`.
        self._rehearsed: list[Launch] | None = None

    @property
    def _is_placed_by_tensors_alone(self) -> bool:
        """Whether sequences and a band follow from ints, lengths, and the mask's tensors one by
        one: what two of them have in common would have to be found in each call."""
        starts = self.piece.positions.q_start, self.piece.positions.k_start
        if self.band is None or any(isinstance(x, Tensor) for x in starts):
            return False
        given = [id(x) for x in self.piece.mask.tensors()]
        return len(set(given)) == len(given) and all(id(x) in given for x in self.band.tensors)

    def _shadows(self) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """What `on` takes, of tensors without memory."""
        piece = self.piece
        q, k, v = (x.detach().to("meta") for x in (piece.q, piece.k, piece.v))
        lengths = [getattr(piece.positions, name) for name in LENGTHS]
        index = (*lengths, *piece.mask.tensors())
        return q, k, v, [None if x is None else x.detach().to("meta") for x in index]

    @property
    def is_rehearsal(self) -> bool:
        """Whether its launches are written down and not made."""
        return self._rehearsed is not None

    def rehearse(self, run: Callable[[TritonCall], Any]) -> list[Launch]:
        """What `run` launches, with nothing launched; of a call that is reusable."""
        other = self.on(*self._shadows())
        other._rehearsed = []
        run(other)
        return other._rehearsed

    def release(self) -> None:
        """Let go of all tensors, which `on` puts in their place again."""
        self.piece = _piece_on(self.piece, *self._shadows())
        self.band = self.piece.band
        self.tensors = ()
        self.__dict__.pop("qkv", None)
        if self.place_kind != UNIFORM:
            self._plans, self._tables = {}, {}

    def on(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Sequence[Tensor | None] = (),
        tape: Tape | None = None,
    ) -> TritonCall:
        """This call, which must be reusable, on other tensors of the same layout.

        index: the lengths, as `LENGTHS` names them, and the mask's tensors, in the order of
            `Mask.lower`; nothing where a call has none of them. tape: takes down what is launched.
        """
        other = copy(self)
        other.piece = _piece_on(self.piece, q, k, v, index)
        if index:
            other.band = other.piece.band
            other._plans, other._tables = {}, {}
        other.tensors = tuple(align_rows(x) for x in (q, k, v))
        other.__dict__.pop("qkv", None)
        other._tape = tape
        return other

    def new(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that kernels of this call write."""
        if self._tape is not None:
            return self._tape.new(shape, dtype)
        if self._rehearsed is not None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty(shape, dtype=dtype, device=self.device)

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same for `[B, M, H, D]` results, with aligned rows; the last columns may be
        padding."""
        return self.new((*shape[:-1], padded_dim(shape[-1])), dtype)

    def sum_shares(self, target: Tensor, shares: Tensor) -> None:
        """target = the sum of `[shares * B, ...]`, after all launches."""
        if self._tape is not None:
            self._tape.add_sum(target, shares)
        sum_shares(target, shares)

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        config: Config,
        arguments: Sequence[Any],
        *tag: Any,
    ) -> Any:
        """Launch a kernel; a reusable call looks it up once.

        tag: what else its binary is made for, beside what the call itself settles: the dtypes and
        layouts of tensors that are not the call's own, and constants. What has coded strides and is
        not read by rows needs none.
        Returns: of a reusable call the compiled kernel, where there is one.
        """
        if self._rehearsed is not None:
            self._rehearsed.append(Launch(kernel, grid, config, tuple(arguments), tag))
            return None
        if not self.is_reusable:
            launch(kernel, grid, config, arguments, self.device)
            return None
        x, y, z = (*grid, 1, 1)[:3]
        key = (id(kernel), grid, config, tag)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = launch(kernel, grid, config, arguments, self.device)
        else:
            relaunch(compiled, (x, y, z), arguments, self.device)
        if self._tape is not None:
            self._tape.add(kernel, grid, config, arguments, compiled)
        return compiled

    def launch_together(self, launches: list[Launch]) -> None:
        """Launch kernels that belong together; what is new of them is compiled side by side."""
        tags = tuple(x.tag for x in launches)
        if self._rehearsed is None and tags not in self._together:
            compile_together(launches, self.device)
            self._together.add(tags)
        for x in launches:
            self.launch(x.kernel, x.grid, x.config, x.arguments, *x.tag)

    @cached_property
    def key(self) -> Key:
        terms = self.piece.terms
        return Key(
            self.piece.q.dtype,
            max(sum(dims[1:]) for dims in self.dims),
            architecture_of(self.device),
            terms.bias is not None or terms.dropout_p > 0.0 or self.mask_kind != _BAND,
        )

    @property
    def has_few_keys(self) -> bool:
        """See `triton_row_sums.py`."""
        return self.N <= FEW_KEYS

    @property
    def precision(self) -> str:
        """Of fp32 products: three tf32 products are as good as one in fp32, and faster."""
        architecture = architecture_of(self.device)
        if architecture == "interpreter":
            return "interpreted"
        is_nvidia = architecture.startswith("sm_")
        return "tf32x3" if self.piece.q.dtype == torch.float32 and is_nvidia else "ieee"

    @staticmethod
    def operand(x: Tensor) -> Operand:
        stride_b, stride_m, stride_h = _strides(x)
        return Operand(x, stride_b, stride_m, stride_h)

    @staticmethod
    def statistics(x: Tensor | None) -> Statistics:
        """`[B, H, M]`."""
        if x is None:
            return absent(Statistics)
        return Statistics(x, code(x.stride(0)), code(x.stride(1)))

    @staticmethod
    def row_numbers(x: Tensor) -> Statistics:
        """`[B, H, M, 4]`, contiguous; strides in rows."""
        return Statistics(x, code(x.shape[1] * x.shape[2]), code(x.shape[2]))

    @cached_property
    def qkv(self) -> tuple[Operand, ...]:
        return tuple(self.operand(x) for x in self.tensors)

    def is_wide(self, *others: Tensor) -> bool:
        """Whether an offset inside a tile may pass 2^31."""
        return any(256 * x.stride(1) >= 1 << 31 for x in (*self.tensors, *others))

    def layout_tag(self, *others: Tensor) -> tuple[bool, bool]:
        """What a kernel's binary knows of the layout of tensors that are not the call's own."""
        is_long = any(stride >= 1 << 31 for x in others for stride in x.stride())
        return self.is_wide(*others), is_long

    # ------------------------------------------------------------ terms

    @cached_property
    def terms(self) -> ScoreTerms:
        return score_terms(self.piece.terms, self.is_folded)

    @staticmethod
    def bias_operand(bias: Tensor) -> Bias:
        stride_b, stride_h, stride_m, stride_n = (
            0 if size == 1 else stride
            for size, stride in zip(bias.shape, bias.stride(), strict=True)
        )
        rows, cols = [code(FAR if size == 1 else size) for size in bias.shape[2:]]
        strides = code(stride_b), code(stride_h), code(stride_m), code(stride_n)
        return Bias(bias, *strides, rows, cols)

    def build(self, config: Config, *others: Tensor, is_forward: bool = False) -> Build:
        """What a kernel of this call is compiled for.

        others: what else it reads or writes by rows.
        """
        key = (config, self.is_wide(*others), is_forward)
        found = self._builds.get(key)
        if found is None:
            found = self._builds[key] = self._build(*key)
        return found

    def _build(self, config: Config, is_wide: bool, is_forward: bool) -> Build:
        terms, k_start, bias_rows = self.piece.terms, self.piece.positions.k_start, 0
        is_grouped = k_start is None or (isinstance(k_start, int) and k_start % 4 == 0)
        # Elsewhere a tile starts where a sequence does, at key 0 of it.
        is_grouped = is_grouped and self.place_kind != DOCUMENTS
        bias = terms.bias
        if bias is not None and bias.shape[3] > 1 and bias.stride(3) == 1:
            strides = [
                s for s, size in zip(bias.stride(), bias.shape[:3], strict=False) if size > 1
            ]
            bias_rows = 8 if all(stride % 8 == 0 for stride in strides) else 1
        return Build(
            *self.dims,
            self.place_kind,
            self.mask_kind,
            self._n_intervals,
            self.is_folded,
            terms.softcap is not None,
            is_grouped,
            bias_rows,
            self.precision,
            is_wide,
            False,
            config.block_m,
            config.block_n,
            few_tiles(self.key, config) if is_forward else 0,
        )

    # ------------------------------------------------------------ placement

    @property
    def n_sequences(self) -> int:
        """Documents and what none of them owns, or batch rows."""
        positions = self.piece.positions
        if self.place_kind == DOCUMENTS:
            return self.B * (self.n_documents + 2)
        return positions.B + 1 if positions.is_packed else self.B

    @property
    def n_documents(self) -> int:
        """Of a batch row."""
        assert self.band is not None and self.band.documents is not None
        return self.band.documents.shape[-1] - 1

    def _place(
        self, table: Tensor | None, H: int, group: int, n_tiles: int, together: int = 1
    ) -> Placement:
        fields = uniform_fields(self) if table is None else None
        sizes = (n_tiles, self.n_sequences, self.n_batches, H, group, together)
        return Placement(table, fields, *(code(x) for x in sizes))

    @property
    def n_batches(self) -> int:
        """Rows of storage: a packed call has one."""
        return 1 if self.place_kind == PACKED else self.B

    @cached_property
    def document_rows(self) -> tuple[Tensor, Tensor]:
        """Of each packed row its document and its local index, int64 `[T]`.

        Rows of no document count to any; nothing of theirs is other than 0.
        """
        rows = self.piece.positions.rows((0, 1), (0, 1), (0, self.M), self.device)
        local = rows.i - rows.q_start
        return rows.b.expand_as(local).flatten(), local.flatten()

    def count_tiles(self, rows: int, block: int) -> int:
        """Tiles of a batch row, or as many as all documents together may have."""
        if self.place_kind in (PACKED, DOCUMENTS):
            return self.n_batches * (rows // block) + self.n_sequences
        return -(-rows // block)

    def count_together(self, *, by_rows: bool) -> int:
        """How many heads take turns, tile by tile, of programs that own rows or keys.

        Documents, of which nobody here knows the lengths: all, since of each head those that run
        together read little more than one document. Else as many as have what they read in the L2
        cache; one where all tiles are alike.
        """
        heads, rows = (self.H, self.N * self.G) if by_rows else (self.G, self.M * self.H)
        if self.place_kind in (PACKED, DOCUMENTS):
            return max(1, heads)
        if self.place_kind == UNIFORM and self.band is not None and not self.band.is_bounded:
            return 1
        width = sum(sum(dims[1:]) for dims in self.dims) * self.piece.q.element_size()
        head_bytes = max(1, rows * width // max(1, heads))
        return max(1, min(self.B * heads, L2_BYTES // head_bytes))

    def count_shares(self, n_programs: int) -> int:
        """In how many shares a group's query heads are taken, so that enough programs run.

        A function of the call alone, so that the sums' order is the same in every run.
        """
        group = self.H // self.G
        shares = 1
        while shares < group and n_programs * shares < ENOUGH_PROGRAMS:
            shares *= 2
        return min(shares, group)

    def plan_rows(self, config: Config) -> Plan:
        """Programs that own query tiles."""
        return self._plan(config, lists.list_key_tiles, self.M, config.block_m, self.H)

    def plan_keys(self, config: Config) -> Plan:
        """Programs that own key tiles."""
        return self._plan(config, lists.list_query_tiles, self.N, config.block_n, self.G)

    def write_table(self, block_m: int, block_n: int) -> None:
        """Place sequences for query tiles of `block_m` rows and key tiles of `block_n`, at once."""
        if (block_m, block_n) not in self._tables:
            self._tables[block_m, block_n] = write_table(self, block_m, block_n)

    def _plan(self, config: Config, kernel: Any, rows: int, block: int, heads: int) -> Plan:
        key = config.block_m, config.block_n, id(kernel)
        found = self._plans.get(key)
        if found is not None:
            return found
        table = self._table(config, 0 if kernel is lists.list_key_tiles else 1)
        n_tiles = self.count_tiles(rows, block)
        mask = self._list(table, kernel, n_tiles, config)
        together = self.count_together(by_rows=kernel is lists.list_key_tiles)
        place = self._place(table, self.H, self.H // self.G, n_tiles, together)
        rows_of_tiles = 1 if self.place_kind == DOCUMENTS else self.n_batches
        plan = Plan(n_tiles * heads * rows_of_tiles, Call(place, mask, self.terms))
        self._plans[key] = plan
        return plan

    def _table(self, config: Config, axis: int) -> Tensor | None:
        """Where sequences stand, once for all kernels whose own tiles (queries 0, keys 1) are of
        these sizes: of the others a table says nothing but who comes first."""
        for blocks, table in self._tables.items():
            if blocks[axis] == config[axis]:
                return table
        self.write_table(config.block_m, config.block_n)
        return self._tables[config.block_m, config.block_n]

    # ------------------------------------------------------------ masks

    @property
    def _n_intervals(self) -> int:
        """How many tests of intervals a kernel is compiled with; 0 for a loop over many."""
        if self.mask_kind != _INTERVALS:
            return 0
        n_intervals: int = self._test[4]
        return n_intervals if n_intervals <= _FEW_INTERVALS else 0

    @cached_property
    def _test(self) -> tuple[Any, ...]:
        """What a partial tile is tested by, its strides, its extent and its rows."""
        if self.mask_kind == _INTERVALS:
            piece = self.piece
            rows = piece.positions.rows((0, self.B), (0, self.H), (0, self.M), self.device)
            starts, stops = (
                x.to(torch.int32).contiguous() for x in row_intervals(piece.mask, rows)
            )
            extent = starts.shape[-1]
            sizes, rows_of = starts.shape[:2], starts.shape[2]
            strides = [0 if size == 1 else starts.stride(d) for d, size in enumerate(sizes)]
            return starts, stops, *strides, extent, rows_of
        bits = self.piece.mask
        is_ready = isinstance(bits, Bits) and bits.block_m == bits.block_n == BIT_TILE
        if not is_ready or self.piece.positions.is_piece:
            bits = materialise(bits, self.piece.positions, self.device)
        assert isinstance(bits, Bits)
        kinds = bits.kinds.contiguous()
        strides = [0 if size == 1 else kinds.stride(d) for d, size in enumerate(kinds.shape[:2])]
        return kinds, bits.words.contiguous(), *strides, kinds.shape[3], kinds.shape[2]

    def _list(self, table: Tensor | None, kernel: Any, n_tiles: int, config: Config) -> MaskData:
        """The mask's test, and the lists of tiles that `kernel` makes of it."""
        if self.mask_kind == _BAND:
            return _NO_MASK
        first, second, stride_b, stride_h, extent, rows = self._test
        heads = 1 if stride_h == 0 else self.H
        by_rows = kernel is lists.list_key_tiles
        other, block = (self.N, config.block_n) if by_rows else (self.M, config.block_m)
        width = -(-other // block) + 1
        total = n_tiles * self.n_batches
        entries = torch.empty(heads, total, width, dtype=torch.int32, device=self.device)
        counts = torch.empty(heads, total, 2, dtype=torch.int32, device=self.device)
        mask = MaskData(
            entries, counts, code(width), code(total if heads > 1 else 0), first, second,
            code(stride_b), code(stride_h), code(extent), code(rows),
        )  # fmt: skip
        place = self._place(table, heads, 1, n_tiles)
        strip = 16 if by_rows else 8
        launch(
            kernel,
            (total * heads,),
            UNTILED,
            (place, mask, self.place_kind, self.mask_kind, config.block_m, config.block_n, strip),
            self.device,
        )
        return mask


def _piece_on(
    piece: Piece, q: Tensor, k: Tensor, v: Tensor, index: Sequence[Tensor | None]
) -> Piece:
    """A piece on other tensors. index: see `TritonCall.on`."""
    if not index:
        return replace(piece, q=q, k=k, v=v)
    lengths: dict[str, Any] = dict(zip(LENGTHS, index, strict=False))
    flags, ints, _ = piece.mask.lower()
    tensors = [x for x in index[len(LENGTHS) :] if x is not None]
    mask = raise_mask(flags, ints, tensors)
    positions = replace(piece.positions, **lengths)
    return replace(piece, q=q, k=k, v=v, mask=mask, positions=positions)


def score_terms(terms: Terms, is_folded: bool) -> ScoreTerms:
    """A call's terms as kernels take them. is_folded: see `Build`."""
    scale = terms.scale / (terms.softcap or 1.0)
    if is_folded:
        scale *= math.log2(math.e)
    slopes = absent(Slopes)
    if terms.alibi_slopes is not None:
        rows = terms.alibi_slopes.contiguous()
        slopes = Slopes(rows, code(rows.shape[-1] if rows.dim() == 2 else 0))
    sinks = terms.sinks
    return ScoreTerms(
        scale,
        terms.scale,
        terms.softcap or 1.0,
        absent(Bias) if terms.bias is None else TritonCall.bias_operand(terms.bias),
        slopes,
        None if sinks is None else sinks.contiguous(),
        terms.rng if terms.dropout_p > 0.0 else None,
        1.0 / (1.0 - terms.dropout_p),
        *(code(half) for half in divmod(drop_threshold(terms.dropout_p), 1 << 16)),
    )


def contiguous_statistics(x: Tensor) -> Tensor:
    """`[B, H, M]` with its rows one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def padded_dim(dim: int) -> int:
    """The columns of aligned rows: 16 elements are what Triton sees as aligned in any dtype."""
    return -(-dim // 16) * 16


def align_rows(x: Tensor) -> Tensor:
    """`[B, M, H, D]` itself, or a copy with D filled up with zeros where its rows are not aligned.

    Rows that start anywhere would be read element by element. On Hopper the code that does so is
    also long enough for ptxas to lose a product's descriptor: D 59, E 37 read past shared memory
    (H200, Triton 3.6, 2026-11-29).
    """
    is_aligned = x.shape[-1] % 16 == 0 and x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    if is_aligned and all(stride % 16 == 0 for stride in _strides(x)):
        return x
    copy = x.new_zeros(*x.shape[:-1], padded_dim(x.shape[-1]))
    copy[..., : x.shape[-1]] = x
    return copy


def cut_rows(x: Tensor, dim: int) -> Tensor:
    """The first `dim` columns, contiguous."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()


def _strides(x: Tensor) -> list[int]:
    """Of batch, row and head; a stride that is never taken may be anything, so it is 0."""
    pairs = zip(x.shape[:-1], x.stride(), strict=False)
    return [stride if size > 1 else 0 for size, stride in pairs]
