"""What each backend of dense attention takes, feature by feature, from the catalog's own cases.

A feature stands for a case that `tilewise verify` runs; a cell is what the choice of a backend says
of it, with the backend's GPU given. So the table in the docs, the choice and the tests are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ..catalog import OPS
from ..core.case import Case
from ..dense.checks import PLACEMENT, check_call
from ..dense.choice import problems_elsewhere
from ..dense.piece import Piece
from .tables import Table

BACKENDS = ("hopper", "triton", "tiled", "reference")
_TERMS = ("scale", "softcap", "alibi_slopes", "bias", "sinks", "dropout_p")


@dataclass(frozen=True)
class Feature:
    """A line of the table: a case of the catalog, in one dtype."""

    title: str
    case: str
    op: str = "attention"
    dtype: torch.dtype = torch.bfloat16

    def load(self) -> Case:
        return next(case for case in _cases(self.op, self.dtype) if case.name == self.case)


@lru_cache(maxsize=8)
def _cases(name: str, dtype: torch.dtype) -> list[Case]:
    op = next(op for op in OPS if op.name == name)
    found: list[Case] = op.load("cases")(name, dtype, torch.device("cpu"))
    return found


FEATURES = (
    Feature("bf16", "causal"),
    Feature("fp16", "causal", dtype=torch.float16),
    Feature("fp32, to fp32 accuracy", "causal", dtype=torch.float32),
    Feature("fp64", "causal", dtype=torch.float64),
    Feature("causal, M != N", "causal"),
    Feature("sliding window", "window(20, 0)"),
    Feature("right padding", "key_padding, lengths 0 and 80"),
    Feature("left padding", "causal & left_padding"),
    Feature("documents in a row", "causal & documents"),
    Feature("documents of each row, ALiBi, dropout", "documents per row, window, dropout, ALiBi"),
    Feature("prefix-LM", "prefix-LM"),
    Feature("chunks", "chunked(32) & causal"),
    Feature("intervals", "intervals"),
    Feature("blocks", "blocks"),
    Feature("any predicate", "from_function"),
    Feature("a negated mask", "outside a window"),
    Feature("softcap", "softcap"),
    Feature("ALiBi, learned", "ALiBi [H]"),
    Feature("additive bias, learned", "bias [1, H, M, N]"),
    Feature("sinks, learned", "sinks"),
    Feature("dropout", "dropout 0.2"),
    Feature("grouped heads (GQA, MQA)", "MQA 7:1"),
    Feature("D != E, any D", "D 59, E 37"),
    Feature("D and E of 256", "D 256, E 256"),
    Feature("rows that see nothing", "causal, M > N (empty rows)"),
    Feature("one query", "one query"),
    Feature("packed sequences", "causal", "attention_varlen"),
    Feature("packed, used lengths", "used lengths, causal", "attention_varlen"),
    Feature("a piece, with its LSE", "piece of causal", "attention_partial"),
    Feature("fp32 partial", "fp32 partial", "attention_partial"),
)


def why_not(feature: Feature, backend: str) -> str:
    """Why a backend does not take a feature, on a GPU of its kind; empty where it does."""
    if backend in ("tiled", "reference"):
        return ""
    not_triton, not_hopper = problems_elsewhere(_piece(feature.load()), "sm_90")
    return not_hopper if backend == "hopper" else not_triton


def _piece(case: Case) -> Piece:
    options = dict(case.options)
    placement = {name: options.pop(name) for name in PLACEMENT if name in options}
    terms = dict.fromkeys(_TERMS)
    terms |= {"dropout_p": 0.0}
    terms |= {name: x for name, x in case.tensors.items() if name not in "qkv"}
    terms |= {name: options[name] for name in _TERMS if name in options}
    q, k, v = (case.tensors[name] for name in "qkv")
    arguments = check_call(case.op, q, k, v, options["mask"], terms, placement)
    return Piece(q, k, v, options["mask"], arguments.positions(q, k), arguments.terms)


def tabulate() -> Table:
    """One line a feature; in a cell "yes", or why not."""
    rows = [
        [feature.title, *(why_not(feature, backend) or "yes" for backend in BACKENDS)]
        for feature in FEATURES
    ]
    return Table("What each backend takes", ["feature", *BACKENDS], rows, texts=5)
