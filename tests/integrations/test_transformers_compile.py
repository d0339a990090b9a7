"""torch.compile around a model: whole, layer by layer, and the decode step of generate()."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, MistralConfig

from tests.integrations.hf_models import llama_config, tokens
from tilewise.core.tolerance import assert_within_budget

# torch 2.11 warns of autograd functions in the code that torch.compile traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

PADDED = torch.tensor([[1] * 9, [0] * 3 + [1] * 6])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="tilewise").eval()


def check_same(compiled: Tensor, plain: Tensor) -> None:
    """The same arithmetic: whatever eps leaves."""
    assert_within_budget(compiled, plain.double(), plain)


WINDOWED = MistralConfig(**llama_config(num_hidden_layers=1, sliding_window=4).to_diff_dict())


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (llama_config(num_hidden_layers=1), {"attention_mask": PADDED}),
        (WINDOWED, {"position_ids": POSITIONS}),
    ],
    ids=["padded", "window, packed"],
)
def test_whole_model_in_one_graph(config: Any, inputs: dict[str, Tensor]) -> None:
    model = model_of(config)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids = tokens(2, 9)
    seen = inputs.get("attention_mask", torch.ones(2, 9)).bool()
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(input_ids=ids, labels=ids, use_cache=False, **inputs)
        out.loss.backward()
        results.append([out.logits.detach()[seen], *(p.grad for p in model.parameters())])
    for plain, other in zip(*results, strict=True):
        check_same(other, plain)


def test_new_lengths_do_not_compile_again_and_again() -> None:
    model = model_of(llama_config(num_hidden_layers=1))
    counted = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counted)
    with torch.no_grad():
        for length in (9, 12, 21, 33):
            ids, mask = tokens(2, length), torch.ones(2, length).long()
            mask[1, : length // 2] = 0
            inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
            check_same(compiled(**inputs).logits, model(**inputs).logits)
    assert counted.frame_count <= 2


def test_layers_compiled_one_by_one() -> None:
    """The mask is made outside of the graphs and comes in as an argument."""
    model = model_of(llama_config())
    inputs = {"input_ids": tokens(2, 9), "attention_mask": PADDED, "use_cache": False}
    with torch.no_grad():
        plain = model(**inputs).logits
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        check_same(model(**inputs).logits, plain)


def test_generate_with_a_compiled_step() -> None:
    model = model_of(llama_config(num_hidden_layers=1))
    inputs = {"input_ids": tokens(2, 9) * PADDED, "attention_mask": PADDED}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    config = CompileConfig(backend="eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    got = model.generate(**inputs, **options, cache_implementation="static", compile_config=config)
    assert torch.equal(got, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
