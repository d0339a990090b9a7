"""The drop-in under torch.compile: one graph, the same numbers, any lengths."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise.flash_attn as flash_attn
from tests.flash_attn.checks import check, make_call
from tests.flash_attn.formula import SEED, Call

# Dynamo makes an autograd.Function of its own and records the warning that it should not; where
# warnings are errors the record comes too late (torch 2.13).
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

OPTIONS = {"causal": True, "window_size": (5, -1), "softcap": 3.0}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_one_graph_with_gradients_and_other_lengths(name: str) -> None:
    compiled = torch.compile(
        getattr(flash_attn, name), fullgraph=True, backend="aot_eager", dynamic=True
    )

    def run_compiled(call: Call, tensors: dict[str, Tensor]) -> Any:
        torch.manual_seed(SEED)
        return compiled(**tensors, **call.lengths, **call.options, return_lse=True)

    options = {**OPTIONS, "sinks": "H", "alibi_slopes": "H"}
    first, second = ((5, 0, 7), (7, 3, 2)), ((6, 2, 9), (4, 4, 13))
    for shape, lengths in (((13, 17), first), ((19, 23), second)):
        call = make_call(name, options, torch.float32, shape=shape, lengths=lengths)
        check(call, run_compiled)


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_varlen_kvpacked_func"])
def test_packed_forms_compile_too(name: str) -> None:
    function = getattr(flash_attn, name)
    call = make_call(name, OPTIONS, torch.bfloat16)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    got = compiled(**call.tensors, **call.lengths, **call.options)
    assert torch.equal(got, function(**call.tensors, **call.lengths, **call.options))
