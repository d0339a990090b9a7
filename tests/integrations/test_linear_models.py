"""Transformers' models with linear attention, on our ops and on their own torch paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewise import linear
from tilewise.core.tolerance import assert_within_budget
from tilewise.integrations.transformers_linear import _OURS, use_linear_attention

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256,
}  # fmt: skip


def qwen3_next() -> Any:
    config = transformers.Qwen3NextConfig(
        **SMALL, num_hidden_layers=4, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=16, decoder_sparse_step=1,
        attn_implementation="eager",
    )  # fmt: skip
    # The others know no fp64.
    config._experts_implementation = "eager"
    return transformers.Qwen3NextForCausalLM(config)


@contextmanager
def in_fp64() -> Iterator[None]:
    """What a model takes to fp32 it takes to fp64 here: its own code becomes its own oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Ours in fp32 by the error budget: exact is their own code in fp64, eager the same in fp32."""
    assert set(ours) == set(theirs) == set(exact)
    for name, x in exact.items():
        assert x.dtype == torch.float64
        assert_within_budget(ours[name], x, theirs[name], name=name)


@pytest.fixture(autouse=True)
def own_functions() -> Iterator[None]:
    """What is put into Transformers' modules does not stay there."""
    before = {
        (name, key): getattr(module, key)
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.")
        for key in _OURS
        if key in vars(module)
    }
    yield
    for name, module in list(sys.modules.items()):
        for key, value in (
            list(vars(module).items()) if name.startswith("transformers.models.") else []
        ):
            if key in _OURS and (name, key) in before and value is not before[name, key]:
                setattr(module, key, before[name, key])


def outputs_and_gradients(model: nn.Module, ids: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits
    kept = logits if mask is None else logits * mask.unsqueeze(-1)
    kept.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": kept.detach(), **grads}


@pytest.mark.parametrize("padded", [False, True])
def test_qwen3_next_on_our_ops_is_the_model(padded: bool) -> None:
    torch.manual_seed(0)
    model = qwen3_next().eval()
    ids = torch.randint(0, 61, (2, 75))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = 0
    mask_given = mask if padded else None
    theirs = outputs_and_gradients(model, ids, mask_given)
    with in_fp64():
        exact = outputs_and_gradients(deepcopy(model).double(), ids, mask_given)
    calls = count_calls()
    assert len(use_linear_attention(model)) == 4
    ours = outputs_and_gradients(model, ids, mask_given)
    # Three of four layers.
    assert calls() == 3
    check(ours, theirs, exact)


def count_calls() -> Any:
    """How often the rule has run since."""
    seen = [0]
    real = _OURS["torch_chunk_gated_delta_rule"]

    def counted(*arguments: Any, **options: Any) -> Any:
        seen[0] += 1
        return real(*arguments, **options)

    _OURS["torch_chunk_gated_delta_rule"] = counted

    def stop() -> int:
        _OURS["torch_chunk_gated_delta_rule"] = real
        return seen[0]

    return stop


def test_qwen3_next_prefill_then_decode_equals_full() -> None:
    torch.manual_seed(0)
    model = qwen3_next().eval()
    ids = torch.randint(0, 61, (2, 70))
    with torch.no_grad():
        theirs = model(ids).logits
        with in_fp64():
            exact = deepcopy(model).double()(ids).logits
        use_linear_attention(model)
        cached = model(ids[:, :66], use_cache=True)
        parts, cache = [cached.logits], cached[1]
        # Older Transformers call it so.
        named = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        for t in range(66, 70):
            step = model(ids[:, t : t + 1], use_cache=True, **{named: cache})
            parts.append(step.logits)
            cache = step[1]
    check({"logits": torch.cat(parts, 1)}, {"logits": theirs}, {"logits": exact})


def test_kimi_delta_attention_is_kda() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    tensors = {name: torch.randn(2, 70, 4, 16) for name in "qkv"}
    tensors |= {"g": -torch.rand(2, 70, 4, 16), "beta": torch.rand(2, 70, 4)}
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def results(call: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        x = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
        out, state = call(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"], **options)
        grads = torch.autograd.grad(out.square().sum() + state.square().sum(), list(x.values()))
        return {"out": out, "state": state, **dict(zip(x, grads, strict=True))}

    fp32 = torch.float32
    theirs = results(kimi.chunk_kimi_delta_attention, fp32)
    with in_fp64():
        exact = results(kimi.chunk_kimi_delta_attention, torch.float64)
    check(results(_OURS["chunk_kimi_delta_attention"], fp32), theirs, exact)


def test_minimax_lightning_attention_is_retention() -> None:
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        **SMALL, num_hidden_layers=2, head_dim=8, block_size=32,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, 0)
    x = torch.randn(2, 75, 32)

    def by_retention(layer: Any, x: Tensor) -> Tensor:
        qkv = layer.act_fn(layer.qkv_proj(x)).unflatten(-1, (4, 24))
        q, k, v = qkv.split(8, dim=-1)
        out, _ = linear.retention(q, k, v, log_decay=-layer.slope_rate.flatten(), scale=1.0)
        gate = torch.sigmoid(layer.output_gate(x))
        mixed: Tensor = layer.out_proj(gate * layer.norm(out.flatten(-2)))
        return mixed

    def results(call: Any, layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
        leaves = {"x": x.clone().requires_grad_(), **dict(layer.named_parameters())}
        out = call(layer, leaves["x"])
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        return {"out": out, **dict(zip(leaves, grads, strict=True))}

    def own(layer: Any, x: Tensor) -> Tensor:
        mixed: Tensor = layer(x, None, None)[0]
        return mixed

    theirs = results(own, layer, x)
    with in_fp64():
        exact = results(own, deepcopy(layer).double(), x.double())
    check(results(by_retention, layer, x), theirs, exact)


def test_a_model_without_linear_layers_is_told() -> None:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=1)
    with pytest.raises(ValueError, match="LlamaForCausalLM calls none of torch_chunk"):
        use_linear_attention(transformers.LlamaForCausalLM(config))
