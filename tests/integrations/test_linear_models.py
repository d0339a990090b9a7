"""Transformers' models with linear attention, on our ops and on their own torch paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    return transformers.Qwen3NextForCausalLM(config)


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
    calls = count_calls()
    assert len(use_linear_attention(model)) == 4
    ours = outputs_and_gradients(model, ids, mask_given)
    # Three of four layers.
    assert calls() == 3
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        # Both in fp32 through four layers, whose expert products know no fp64; sums that cancel.
        wide = theirs[name].double()
        floor = 5e-4 * float(wide.abs().max())
        assert_within_budget(value, wide, wide, name=name, floor=floor)


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
    use_linear_attention(model)
    with torch.no_grad():
        full = model(ids).logits
        cached = model(ids[:, :66], use_cache=True)
        parts, cache = [cached.logits], cached[1]
        for t in range(66, 70):
            step = model(ids[:, t : t + 1], cache=cache, use_cache=True)
            parts.append(step.logits)
            cache = step[1]
    got = torch.cat(parts, 1)
    wide = full.double()
    assert_within_budget(got, wide, wide, floor=1e-4 * float(wide.abs().max()))


def test_kimi_delta_attention_is_kda() -> None:
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi

    shapes = [(2, 70, 4, 16)] * 3
    q, k, v = (torch.randn(*s, requires_grad=True) for s in shapes)
    g = (-torch.rand(2, 70, 4, 16)).requires_grad_()
    beta = torch.rand(2, 70, 4).requires_grad_()
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    leaves = [q, k, v, g, beta]
    results = []
    for call in (kimi.chunk_kimi_delta_attention, _OURS["chunk_kimi_delta_attention"]):
        out, state = call(q, k, v, g=g, beta=beta, **options)
        grads = torch.autograd.grad(out.square().sum() + state.square().sum(), leaves)
        results.append([out, state, *grads])
    for theirs, ours in zip(*results, strict=True):
        wide = theirs.detach().double()
        assert_within_budget(ours, wide, wide, floor=1e-4 * float(wide.abs().max()))


def test_minimax_lightning_attention_is_retention() -> None:
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    torch.manual_seed(0)
    config = transformers.MiniMaxConfig(
        **SMALL, num_hidden_layers=2, head_dim=8, block_size=32,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    layer = MiniMaxLightningAttention(config, 0)
    x = torch.randn(2, 75, 32, requires_grad=True)
    theirs = layer(x, None, None)[0]
    qkv = layer.act_fn(layer.qkv_proj(x)).unflatten(-1, (4, 24))
    q, k, v = qkv.split(8, dim=-1)
    out, _ = linear.retention(q, k, v, log_decay=-layer.slope_rate.flatten(), scale=1.0)
    gate = torch.sigmoid(layer.output_gate(x))
    ours = layer.out_proj(gate * layer.norm(out.flatten(-2)))
    leaves = [x, *layer.parameters()]
    pairs = [(ours, theirs)]
    pairs += zip(
        *(torch.autograd.grad(y.square().sum(), leaves) for y in (ours, theirs)), strict=True
    )
    for got, expected in pairs:
        wide = expected.detach().double()
        assert_within_budget(got, wide, wide, floor=1e-4 * float(wide.abs().max()))


def test_a_model_without_linear_layers_is_told() -> None:
    config = transformers.LlamaConfig(**SMALL, num_hidden_layers=1)
    with pytest.raises(ValueError, match="LlamaForCausalLM calls none of torch_chunk"):
        use_linear_attention(transformers.LlamaForCausalLM(config))
