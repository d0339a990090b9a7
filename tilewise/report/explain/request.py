"""What is asked about: one call of attention, as shapes and options, without its memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.positions import Positions
from ...dense.checks import check_call
from ...dense.ops import Arguments
from ...dense.piece import Piece

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}
# What may be added to a score, or taken from a probability.
TERMS = ("softcap", "alibi", "bias", "sinks", "dropout")
# Of one sequence; a grid of tiles is counted exactly.
MOST_TOKENS = 1 << 20


@dataclass(frozen=True)
class Request:
    """B batch rows, M queries, N keys, H query heads on G kv heads, head dims D and E."""

    B: int
    M: int
    N: int
    H: int
    G: int
    D: int
    E: int
    dtype: torch.dtype
    mask: Mask
    mask_text: str
    terms: tuple[str, ...] = field(default=())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def positions(self) -> Positions:
        return Positions(B=self.B, H=self.H, M=self.M, N=self.N)

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of these shapes: one row of memory each on the CPU, none on "meta"."""
        shapes = ((self.M, self.H, self.D), (self.N, self.G, self.D), (self.N, self.G, self.E))
        if device == "meta":
            return tuple(  # type: ignore[return-value]
                torch.empty(self.B, *shape, dtype=self.dtype, device=device) for shape in shapes
            )
        return tuple(  # type: ignore[return-value]
            torch.zeros(shape[-1], dtype=self.dtype, device=device).expand(self.B, *shape)
            for shape in shapes
        )

    def score_terms(self, device: str) -> dict[str, Any]:
        """The terms as arguments of attention; of a bias one row of memory."""
        options: dict[str, Any] = dict.fromkeys(
            ("scale", "softcap", "alibi_slopes", "bias", "sinks"), None
        )
        options["dropout_p"] = 0.1 if "dropout" in self.terms else 0.0
        if "softcap" in self.terms:
            options["softcap"] = 30.0
        for term, name in (("alibi", "alibi_slopes"), ("sinks", "sinks")):
            if term in self.terms:
                options[name] = torch.zeros(self.H, device=device)
        if "bias" in self.terms:
            row = torch.zeros(self.N, dtype=self.dtype, device=device)
            options["bias"] = row.expand(1, 1, self.M, self.N)
        return options

    @cached_property
    def lowered(self) -> Mask:
        """The mask with its predicates evaluated, as the call would have it."""
        if not self.mask.has_predicate:
            return self.mask
        return self.mask.lowered(self.B, self.H, self.M, self.N)

    @cached_property
    def arguments(self) -> Arguments:
        """Checked as the call checks them.

        Raises: ValueError for what does not fit, with the call's own sentence.
        """
        q, k, v = self.tensors("cpu")
        terms = self.score_terms("cpu")
        arguments = check_call("attention", q, k, v, self.lowered, terms, {})
        self.lowered.check_contents(self.B, self.H)
        return arguments

    @cached_property
    def piece(self) -> Piece:
        q, k, v = self.tensors("cpu")
        return Piece(q, k, v, self.lowered, self.positions, self.arguments.terms)

    def as_json(self) -> dict[str, Any]:
        sizes = {letter: getattr(self, letter) for letter in "BMNHGDE"}
        return {
            **sizes,
            "dtype": self.dtype_name,
            "mask": self.mask_text,
            "terms": list(self.terms),
        }
