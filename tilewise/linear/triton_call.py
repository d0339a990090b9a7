"""One call as the stages' kernels take it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..kernels.launch import (
    Config,
    Launch,
    architecture_of,
    compile_together,
    compiler_options,
    launch,
)
from ..kernels.structs import Operand, absent, code
from .chunks import Table, chunk_table
from .config import FEW_WARPS, Key, power_of_two, stage_config
from .inputs import Inputs
from .machine_code import loses_an_operand
from .stages.structs import Build, Call, Pairs, Place, Prepared

_NONE = (None,) * 4
# Between tokens: a tile's offsets have 32 bits.
_WIDEST_STRIDE = 2**31 // 64 - 1024
# What kernels run with, where their code has been looked at.
_looked_at: dict[Any, Config] = {}


class LinearCall:
    """Arguments, buffers and launches that forward and backward share.

    Buffers of chunks are by slot and head, contiguous: `[slots, H, ...]`.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self._launches: list[Launch] = []
        self.device = inputs.q.device
        self.dtype = inputs.q.dtype
        self.B, self.H, self.D, self.E = inputs.state_shape
        self.group = self.H // inputs.q.shape[-2]
        self.tokens = inputs.q.shape[-3]
        self.rows = inputs.q.shape[0] if inputs.cu_seqlens is None else 1
        self.gate = 0 if inputs.g is None else 2 if inputs.has_vector_gate else 1
        self.has_delta = inputs.beta is not None
        self.architecture = architecture_of(self.device)
        self.config = stage_config(
            Key(self.dtype, self.D, self.E, self.gate, self.has_delta, self.architecture)
        )
        self.chunk = self.config.chunk
        self.table: Table | None = None
        self.n_chunks = -(-self.tokens // self.chunk)
        if inputs.cu_seqlens is not None:
            self.table = chunk_table(inputs.cu_seqlens, self.tokens, self.chunk)
            self.slots = int(self.table.start.shape[0])
        else:
            self.slots = self.rows * self.n_chunks
        self.build = Build(
            self.chunk, self.D, self.E, self.config.block_d, self.config.block_e, self.gate,
            self.has_delta, self._precision(),
        )  # fmt: skip

    def _precision(self) -> str:
        if self.architecture == "interpreter":
            return "interpreted"
        return "split" if self.dtype == torch.float32 else "plain"

    @cached_property
    def call(self) -> Call:
        table = self.table
        tensors = (table.start, table.length, table.first_slot, table.chunks) if table else _NONE
        sizes = (self.n_chunks, self.tokens, self.H, self.group)
        place = Place(*tensors, *map(code, sizes))
        x = self.inputs
        return Call(
            place, self.operand(x.q), self.operand(x.k), self.operand(x.v),
            self.operand(x.g) if self.gate == 2 else self.numbers(x.g), self.numbers(x.beta),
            x.scale,
        )  # fmt: skip

    def operand(self, x: Tensor | None) -> Operand:
        """Rows `[B, M, heads, dim]` or packed, last dim contiguous."""
        if x is None:
            return absent(Operand)
        if (x.stride(-1) != 1 and x.shape[-1] > 1) or x.stride(-3) > _WIDEST_STRIDE:
            x = x.contiguous()
        if 1 in x.stride()[:-1]:
            # Triton makes a constant of an int that is 1, and loses it in a tuple inside a loop.
            x = torch.nn.functional.pad(x, (0, 1))[..., :1]
        batch = x.stride(0) if x.dim() == 4 else 0
        return Operand(x, batch, x.stride(-3), x.stride(-2))

    def numbers(self, x: Tensor | None) -> Operand:
        """Numbers `[B, M, heads]` or packed; strides are coded."""
        if x is None:
            return absent(Operand)
        batch = x.stride(0) if x.dim() == 3 else 0
        return Operand(x, code(batch), code(x.stride(-2)), code(x.stride(-1)))

    @property
    def initial(self) -> Tensor:
        """Zeros where none is given: one binary serves both."""
        return self.inputs.state_or_zeros().contiguous()

    def new_state(self) -> Tensor:
        return torch.empty(self.inputs.state_shape, dtype=torch.float32, device=self.device)

    @property
    def n_slices(self) -> int:
        """Programs that share a head's state."""
        return -(-self.E // self.config.slice_e)

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(
            self.slots, self.H, *shape, dtype=dtype or self.dtype, device=self.device
        )

    def rows_like(self, x: Tensor) -> Tensor:
        return self.new_rows(x.shape, x.dtype)

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """For results by token. Those of tokens of no sequence are 0, which nothing writes."""
        make = torch.empty if self.table is None else torch.zeros
        # No row of one number: see `operand`.
        rows = make((*shape[:-1], max(2, shape[-1])), dtype=dtype, device=self.device)
        return rows[..., : shape[-1]]

    def prepared(self) -> Prepared:
        delta, scalar, vector = self.has_delta, self.gate == 1, self.gate == 2
        wide = torch.float32
        C, D = self.chunk, self.D
        return Prepared(
            scores=self.buffer(C, C),
            inverse=self._inverse() if delta else None,
            reached=self.buffer(C, dtype=wide) if scalar else None,
            left=self.buffer(C, dtype=wide) if scalar else None,
            total=self.buffer(D if vector else 1, dtype=wide) if scalar or vector else None,
            q=self.buffer(C, D) if vector else None,
            seen=self.buffer(C, D) if vector and delta else None,
            k=self.buffer(C, D) if vector else None,
            lower=self.buffer(C, C, dtype=wide) if vector and delta else None,
        )

    def _inverse(self) -> Tensor:
        if self.dtype == torch.float32:
            return self.buffer(self.chunk, self.chunk)
        return self.buffer(2, self.chunk, self.chunk, dtype=torch.bfloat16)

    def pairs(self) -> Pairs:
        C, wide = self.chunk, torch.float32
        return Pairs(
            dqk=self.buffer(C, C),
            da=self.buffer(C, C) if self.has_delta else None,
            dbeta=self.buffer(C, dtype=wide) if self.has_delta else None,
            dg=self.buffer(C, dtype=wide) if self.gate == 1 else None,
        )

    @property
    def n_blocks(self) -> int:
        """Of D, which programs of the gradients share."""
        return -(-self.D // self.config.gradients_d)

    def sum_blocks(self, parts: Tensor | None, like: Tensor | None) -> Tensor | None:
        """What programs found of one number a head."""
        if parts is None or like is None:
            return None
        return parts.unflatten(-1, (self.H, self.n_blocks)).sum(-1).to(like.dtype)

    def add_chunks(self, kernel: Any, config: Config, *arguments: Any) -> None:
        """To be run: a program for each slot and head."""
        self._add(kernel, self.slots * self.H, config, (*arguments, self.build))

    def add_states(self, kernel: Any, *arguments: Any) -> None:
        """To be run: a program for each sequence, head and slice of E."""
        tiles = power_of_two(self.D), self.config.slice_e, self.build
        programs = self.B * self.H * self.n_slices
        self._add(kernel, programs, self.config.states, (*arguments, *tiles))

    def add_gradients(self, kernel: Any, *arguments: Any) -> None:
        """To be run: a program for each slot, head and block of D."""
        build = self.build._replace(block_d=self.config.gradients_d)
        programs = self.slots * self.H * self.n_blocks
        self._add(kernel, programs, self.config.gradients, (*arguments, build))

    def _add(self, kernel: Any, programs: int, config: Config, arguments: tuple[Any, ...]) -> None:
        # What is absent, and constants: the rest of what makes a binary is of the call.
        absent_ones = tuple(getattr(x, "ptr", x) is None for x in arguments)
        tag = (absent_ones, arguments[-1], *self._kinds)
        self._launches.append(Launch(kernel, (programs, 1, 1), config, arguments, tag))

    def run(self) -> None:
        """Run what was added, in that order; compiled side by side where it is not compiled yet."""
        compile_together(self._launches, self.device)
        for x in self._launches:
            launch(x.kernel, x.grid, self._trusted(x), x.arguments, self.device)
        self._launches.clear()

    def _trusted(self, x: Launch) -> Config:
        """Its configuration, or one of few warps where the code for it cannot be trusted."""
        if 0 in x.grid or self.architecture != "sm_90" or self.device.type != "cuda":
            return x.config
        key = (x.kernel, x.config, *x.tag)
        if key not in _looked_at:
            with torch.cuda.device(self.device):
                compiled = x.kernel.warmup(*x.arguments, grid=x.grid, **compiler_options(x.config))
            is_wrong = loses_an_operand(compiled.asm["cubin"])
            _looked_at[key] = x.config._replace(num_warps=FEW_WARPS) if is_wrong else x.config
        return _looked_at[key]

    @cached_property
    def _kinds(self) -> tuple[Any, ...]:
        """What else than its constants a binary depends on: types, strides and alignment."""
        x = self.inputs
        given = (x.q, x.k, x.v, x.g, x.beta)
        kinds = ((t.dtype, t.stride(), t.data_ptr() % 16) for t in given if t is not None)
        return (self.device, self.table is None, *kinds)
