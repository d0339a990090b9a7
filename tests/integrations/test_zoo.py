"""The support table: every model of the zoo in every feature that it has."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import FileStore, init_process_group
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import create_chunked_causal_mask

from tests.helpers import UNDER_TEST
from tests.integrations.hf_models import Trio, tokens
from tests.integrations.test_llama import in_steps
from tests.integrations.zoo import MODELS, PAGE, S, render
from tilewise.core.tolerance import assert_within_budget
from tilewise.integrations.transformers import Implementation

# Transformers 5.17 raises for chunks in a static cache, whatever the attention.
CHUNKS_IN_STATIC_CACHES = "block_sequence_ids" in signature(create_chunked_causal_mask).parameters

PADDING = {
    "right": torch.tensor([[1] * S, [1] * 5 + [0] * 4]),
    "left": torch.tensor([[1] * S, [0] * 6 + [1] * 3]),
}


def having(feature: str) -> Any:
    names = [name for name, model in MODELS.items() if feature in model.features.split(", ")]
    return pytest.mark.parametrize("name", names)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the arguments, not None, that the attention function gets."""
    names: set[str] = set()
    read = Implementation._read_options

    def noted(self: Implementation, arguments: dict[str, Any]) -> Any:
        names.update(name for name, value in arguments.items() if value is not None)
        return read(self, arguments)

    monkeypatch.setattr(Implementation, "_read_options", noted)
    return names


@having("logits")
def test_logits(name: str, handed: set[str]) -> None:
    model = MODELS[name]
    model.trio().check(model.reader(), **model.inputs((2, S)))
    assert handed >= model.hands


@having("gradients")
def test_gradients(name: str) -> None:
    model = MODELS[name]
    model.trio().check_gradients(model.loss(), **model.inputs((2, S)))


@having("bf16")
def test_sixteen_bit(name: str) -> None:
    model = MODELS[name]
    trio = Trio.of(model.fresh("eager").bfloat16())
    inputs = model.inputs((2, S))
    trio.check(model.reader(), **inputs)
    trio.check_gradients(model.loss(), **inputs)


@pytest.mark.parametrize("side", PADDING)
@having("left padding")
def test_padding(name: str, side: str) -> None:
    model, mask = MODELS[name], PADDING[side]
    inputs = model.inputs((2, S)) | {"attention_mask": mask}
    model.trio().check(model.reader(mask), **inputs)
    model.trio().check_gradients(model.loss(mask), **inputs)


@having("packed")
def test_packed(name: str) -> None:
    model = MODELS[name]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [*range(8), 0]])
    inputs = {"input_ids": tokens(2, S), "position_ids": positions, "use_cache": False}
    model.trio().check(model.reader(), **inputs)
    model.trio().check_gradients(model.loss(), **inputs)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@having("static cache")
def test_cache(name: str, kind: str) -> None:
    """A prompt, two tokens at once and one at a time: the whole forward's logits."""
    model, mask = MODELS[name], PADDING["left"]
    skip_chunks(name, kind)
    trio, ids = model.trio(), tokens(2, S) * mask
    cache = (
        DynamicCache(config=trio.got.config)
        if kind == "dynamic"
        else StaticCache(config=trio.got.config, max_cache_len=2 * S)
    )
    with torch.no_grad():
        got = in_steps(trio.got, ids, mask, [5, 7, 8], cache)[mask.bool()]
        exact, eager = (
            m(ids, attention_mask=mask).logits[mask.bool()] for m in (trio.exact, trio.eager)
        )
    assert_within_budget(got, exact, eager)


def skip_chunks(name: str, cache: str) -> None:
    if cache == "static" and name == "Llama4Text" and not CHUNKS_IN_STATIC_CACHES:
        pytest.skip("this Transformers has no chunks in a static cache")


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@having("generate")
def test_generate(name: str, kind: str) -> None:
    model, mask = MODELS[name], PADDING["left"]
    skip_chunks(name, kind)
    inputs = {"input_ids": tokens(2, S) * mask, "attention_mask": mask}
    options = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    got, eager = (
        m.generate(**inputs, **options, cache_implementation=kind) for m in model.trio().all[:2]
    )
    assert torch.equal(got, eager)
    assert got.shape[1] in (S + 8, 9)


def gradients(model: Any, loss: Any, inputs: dict[str, Any]) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    loss(model(**inputs)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@having("checkpointing")
def test_checkpointing(name: str) -> None:
    """In training mode, dropout included: bit for bit the gradients without it."""
    entry = MODELS[name]
    model, inputs = entry.fresh().train(), entry.inputs((2, S))
    plain = gradients(model, entry.loss(), inputs)
    # Its name changed in the course of Transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    again = gradients(model, entry.loss(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@having("compile")
def test_compile(name: str) -> None:
    """One graph, and the values and gradients of the model that is not compiled."""
    torch._dynamo.reset()
    entry = MODELS[name]
    model, inputs = entry.fresh(**entry.one_layer).eval(), entry.inputs((2, S))
    if "decoder_input_ids" in inputs:
        # Torch 2.11 cannot trace how their cache is made.
        inputs["use_cache"] = False
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain, other = (
        [entry.read(run(**inputs)), *gradients(run, entry.loss(), inputs)]
        for run in (model, compiled)
    )
    for a, b in zip(plain, other, strict=True):
        # A compiled mask may be of another form, whose tiles add up in another order.
        floor = 16 * float(a.detach().abs().max()) * torch.finfo(a.dtype).eps
        assert_within_budget(b.detach(), a.detach().double(), a.detach(), floor=floor)


# ---------------------------------------------------------------- two processes


def parallel_gradients(rank: int, store: str, results: str, device: str) -> None:
    """What DDP leaves on a rank that sees one row of the batch, for every model."""
    torch.set_num_threads(1)
    torch.set_default_device(device)
    init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    left = {}
    for name, entry in MODELS.items():
        torch.manual_seed(0)
        inputs = entry.on_rank(entry.inputs((2, S)), rank)
        model = DistributedDataParallel(entry.fresh().eval())
        left[name] = gradients(model, entry.loss(), inputs)
    torch.save(left, f"{results}/{rank}.pt")


@pytest.mark.slow
def test_data_parallel(tmp_path: Path) -> None:
    """Both ranks hold the mean of the two rows' gradients; one run for all models."""
    arguments = (f"{tmp_path}/store", f"{tmp_path}", UNDER_TEST.device)
    spawn(parallel_gradients, arguments, nprocs=2)
    of_ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, entry in MODELS.items():
        model = entry.fresh().eval()
        torch.manual_seed(0)
        inputs = entry.inputs((2, S))
        first, second = (
            gradients(model, entry.loss(), entry.on_rank(inputs, rank)) for rank in range(2)
        )
        for a, b, *got in zip(first, second, *(left[name] for left in of_ranks), strict=True):
            assert torch.equal(got[0], got[1])
            assert_within_budget(got[0], (a.double() + b.double()) / 2, (a + b) / 2, name=name)


def test_page_has_the_table() -> None:
    assert render() in PAGE.read_text(encoding="utf-8")
