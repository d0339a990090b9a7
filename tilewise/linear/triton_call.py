"""One call as the stages' kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from ..kernels.launch import Config, architecture_of
from ..kernels.structs import Operand, absent, code
from .chunks import chunk_table
from .config import Key, count_segments, power_of_two, stage_config
from .forms import form_of
from .inputs import Inputs
from .plan import Plan, Slot
from .stages.segments import _segments_kernel
from .stages.structs import Build, Call, Pairs, Place, Prepared, Segments

# Between tokens: a tile's offsets have 32 bits.
_WIDEST_STRIDE = 2**31 // 64 - 1024


class LinearCall:
    """Arguments, buffers and launches that forward and backward share, on a plan of their own.

    Everything here is a function of the inputs' forms. Buffers of chunks are by slot and head,
    contiguous: `[slots, H, ...]`.
    """

    def __init__(self, inputs: Inputs) -> None:
        q, v = inputs.q, inputs.v
        self.plan = Plan(q.device)
        self.dtype = q.dtype
        self.B, self.H, self.D, self.E = self.state_shape = inputs.state_shape
        self.group = self.H // q.shape[-2]
        self.tokens = q.shape[-3]
        self.rows_shape = v.shape[:-1]
        self.gate = 0 if inputs.g is None else 2 if inputs.has_vector_gate else 1
        self.has_delta = inputs.beta is not None
        self.scale = inputs.scale
        self.architecture = architecture_of(q.device)
        self.config = stage_config(_key_of(inputs, self.architecture))
        self.chunk = self.config.chunk
        self.build = Build(
            self.chunk, self.D, self.E, self.config.block_d, self.config.block_e, self.gate,
            self.has_delta, self._precision(),
        )  # fmt: skip
        given = self.plan.given
        self.q, self.k, self.v, self.g, self.beta, self.initial = map(given, inputs.tensors)
        self.n_chunks = -(-self.tokens // self.chunk)
        self.is_packed = inputs.cu_seqlens is not None
        table = _table_of(inputs)
        self.table = tuple(map(given, table))
        self.slots = (1 if self.is_packed else q.shape[0]) * self.n_chunks
        if table[0] is not None:
            self.slots = table[0].shape[0]

    def _precision(self) -> str:
        if self.architecture == "interpreter":
            return "interpreted"
        return "split" if self.dtype == torch.float32 else "plain"

    @cached_property
    def call(self) -> Call:
        sizes = (self.n_chunks, self.tokens, self.H, self.group)
        place = Place(*self.table, *map(code, sizes))
        return Call(
            place, self.operand(self.q), self.operand(self.k), self.operand(self.v),
            self.operand(self.g) if self.gate == 2 else self.numbers(self.g),
            self.numbers(self.beta), self.scale,
        )  # fmt: skip

    @staticmethod
    def operand(x: Slot | None) -> Operand:
        """Rows `[B, M, heads, dim]` or packed; see `fit_rows`."""
        if x is None:
            return absent(Operand)
        return Operand(x, x.stride(0) if x.dim() == 4 else 0, x.stride(-3), x.stride(-2))

    @staticmethod
    def numbers(x: Slot | None) -> Operand:
        """Numbers `[B, M, heads]` or packed; strides are coded."""
        if x is None:
            return absent(Operand)
        strides = (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.stride(-1))
        return Operand(x, *map(code, strides))

    def new_state(self) -> Slot:
        return self.plan.made(self.state_shape, torch.float32)

    @property
    def n_slices(self) -> int:
        """Programs that share a head's state."""
        return -(-self.E // self.config.slice_e)

    @cached_property
    def n_segments(self) -> int:
        """Into which each sequence is cut. What one does to a state is a matrix under a delta rule,
        which costs more to make than it saves but for very few heads: those are whole."""
        if self.has_delta:
            return 1
        n_chunks = self.slots // max(1, self.B)
        # The interpreter runs a program at a time.
        device, is_alone = self.plan.device, architecture_of(self.plan.device) == "interpreter"
        processors = 1 if is_alone else _multiprocessors(device)
        return count_segments(self.B * self.H * self.n_slices, n_chunks, processors)

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Slot:
        return self.plan.buffer((self.slots, self.H, *shape), dtype or self.dtype)

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype, *, is_part: bool = False) -> Slot:
        """For results by token, or parts of them. Those of tokens of no sequence are 0, which
        nothing writes."""
        # No row of one number: see `fit_rows`.
        return self._new((*shape[:-1], max(2, shape[-1])), dtype, is_part)

    def new_numbers(self, heads: int, dtype: torch.dtype, *, is_part: bool = False) -> Slot:
        """The same for one number a token and head."""
        return self._new((*self.rows_shape[:-1], heads), dtype, is_part)

    def _new(self, shape: Sequence[int], dtype: torch.dtype, is_part: bool) -> Slot:
        if is_part and not self.is_packed:
            return self.plan.buffer(shape, dtype)
        return self.plan.made(shape, dtype, is_zero=self.is_packed)

    def prepared(self) -> Prepared:
        delta, scalar, vector = self.has_delta, self.gate == 1, self.gate == 2
        wide = torch.float32
        C, D = self.chunk, self.D
        return Prepared(
            scores=self.buffer(C, C),
            inverse=self._inverse() if delta else None,
            reached=self.buffer(C, dtype=wide) if scalar else None,
            left=self.buffer(C, dtype=wide) if scalar else None,
            entry=self.buffer(D if vector else 1, dtype=wide) if scalar or vector else None,
            total=self.buffer(D if vector else 1, dtype=wide) if scalar or vector else None,
            q=self.buffer(C, D) if vector else None,
            seen=self.buffer(C, D) if vector and delta else None,
            k=self.buffer(C, D) if vector else None,
            lower=self.buffer(C, C, dtype=wide) if vector and delta else None,
        )

    @property
    def has_low(self) -> bool:
        """Whether a gate's gradient needs pairs with more digits than the inputs'."""
        return self.gate == 2 and self.dtype != torch.float32

    def _inverse(self) -> Slot:
        if self.dtype == torch.float32:
            return self.buffer(self.chunk, self.chunk)
        return self.buffer(2, self.chunk, self.chunk, dtype=torch.bfloat16)

    def pairs(self) -> Pairs:
        C, wide = self.chunk, torch.float32
        return Pairs(
            dqk=self.buffer(C, C),
            dqk_low=self.buffer(C, C) if self.has_low else None,
            da=self.buffer(C, C) if self.has_delta else None,
            dbeta=self.buffer(C, dtype=wide) if self.has_delta else None,
            dg=self.buffer(C, dtype=wide) if self.gate == 1 else None,
        )

    @property
    def n_blocks(self) -> int:
        """Of D, which programs of the gradients share."""
        return -(-self.D // self.config.gradients_d)

    def add_chunks(self, kernel: Any, config: Config, *arguments: Any) -> None:
        """To be run: a program for each slot and head."""
        self.plan.add(kernel, self.slots * self.H, config, (*arguments, self.build))

    def add_pairs(self, kernel: Any, *arguments: Any) -> None:
        """The same for `pairs`, which has a width of its own."""
        build = self.build._replace(block_e=self.config.pairs_e)
        self.plan.add(kernel, self.slots * self.H, self.config.pairs, (*arguments, build))

    def add_segments(
        self, prepared: Prepared, rows: Operand, decays: Slot | None = None, *,
        is_reversed: bool = False,
    ) -> Segments:  # fmt: skip
        """To be run: what segments make of a state, or, reversed and with the decays known, of its
        gradient. Nothing where sequences are whole."""
        if self.n_segments == 1:
            return absent(Segments)
        parts = self.B, self.n_segments, self.H
        states = self.plan.buffer((*parts, self.D, self.E), torch.float32)
        if self.gate and not is_reversed:
            width = self.D if self.gate == 2 else 1
            decays = self.plan.buffer((*parts, width), torch.float32)
        segments = Segments(code(self.n_segments), states, decays)
        self.add_states(_segments_kernel, self.call, prepared, rows, segments, is_reversed)
        return segments

    def add_states(self, kernel: Any, *arguments: Any) -> None:
        """To be run: a program for each sequence, segment of it, head and slice of E."""
        tiles = power_of_two(self.D), self.config.slice_e, self.build
        programs = self.B * self.n_segments * self.H * self.n_slices
        self.plan.add(kernel, programs, self.config.states, (*arguments, *tiles))

    def add_gradients(self, kernel: Any, *arguments: Any) -> None:
        """To be run: a program for each slot, head and block of D."""
        build = self.build._replace(block_d=self.config.gradients_d)
        programs = self.slots * self.H * self.n_blocks
        self.plan.add(kernel, programs, self.config.gradients, (*arguments, build))


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _key_of(inputs: Inputs, architecture: str) -> Key:
    gate = 0 if inputs.g is None else 2 if inputs.has_vector_gate else 1
    D, E = inputs.q.shape[-1], inputs.v.shape[-1]
    return Key(inputs.q.dtype, D, E, gate, inputs.beta is not None, architecture)


_NO_TABLE = (None,) * 4


def _table_of(inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Where packed sequences stand in chunks; see `structs.Place`."""
    if inputs.cu_seqlens is None:
        return _NO_TABLE
    chunk = stage_config(_key_of(inputs, architecture_of(inputs.q.device))).chunk
    table = chunk_table(inputs.cu_seqlens, inputs.q.shape[0], chunk)
    return table.start, table.length, table.first_slot, table.chunks


def fit_inputs(inputs: Inputs) -> Inputs:
    """With rows as kernels take them, and a contiguous state."""
    g, state = inputs.g, inputs.initial_state
    if g is not None and inputs.has_vector_gate:
        g = fit_rows(g)
    if state is not None:
        state = state.contiguous()
    q, k, v = (fit_rows(x) for x in inputs[:3])
    return Inputs(q, k, v, g, inputs.beta, state, inputs.cu_seqlens, inputs.scale)


def fit_rows(x: Tensor) -> Tensor:
    """Rows `[B, M, heads, dim]` or packed themselves, or a copy where kernels cannot take them."""
    strides = x.stride()
    if (strides[-1] != 1 and x.shape[-1] > 1) or strides[-3] > _WIDEST_STRIDE:
        x = x.contiguous()
        strides = x.stride()
    if 1 in strides[:-1]:
        # Triton makes a constant of an int that is 1, and loses it in a tuple inside a loop.
        x = torch.nn.functional.pad(x, (0, 1))[..., : x.shape[-1]]
    return x


def forms_of(inputs: Inputs) -> tuple[Any, ...]:
    """What a plan hangs on."""
    return (*map(form_of, inputs[:7]), inputs.scale)


def given_by(inputs: Inputs) -> list[Tensor | None]:
    """What a call's plan is given, in its order."""
    return [*inputs.tensors, *_table_of(inputs)]
