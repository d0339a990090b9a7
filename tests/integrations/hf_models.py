"""Small models in three forms: Tilewise and eager in fp32, and an exact one in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    masking_utils,
)

from tilewise.core.tolerance import assert_within_budget
from tilewise.integrations.transformers import register


def plain_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The formula in the inputs' dtype, with Transformers' own bool masks; empty rows give 0."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = (
        query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    sinks = scores.new_full((1,), -torch.inf) if s_aux is None else s_aux.to(scores.dtype)
    sinks = sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    top = torch.cat([scores, sinks], dim=-1).amax(-1, keepdim=True).clamp(min=-1e30).detach()
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    out = (weights / torch.where(total == 0, 1, total)) @ value
    return out.transpose(1, 2), None


def plain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(*args, **kwargs)


register()
AttentionInterface.register("plain", plain_attention)
AttentionMaskInterface.register("plain", plain_mask)


def llama_config(**changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(sizes | changes))


def tokens(*shape: int) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, 97, shape)


def _norm(module: Any, x: Tensor) -> Tensor:
    return (
        module.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon)
    )


def _switch(model: PreTrainedModel, name: str) -> None:
    """Transformers 5.17 does not reach the configurations of T5's two stacks by itself."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(name)


@dataclass(frozen=True)
class Trio:
    """One model three times, with the same weights."""

    got: PreTrainedModel
    eager: PreTrainedModel
    exact: PreTrainedModel

    @classmethod
    def of(cls, eager: PreTrainedModel) -> Trio:
        eager = eager.eval()
        got, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
        _switch(got, "tilewise")
        # Eager's softmax and Llama's norm round to fp32 whatever the model's dtype.
        _switch(exact, "plain")
        if hasattr(exact, "set_experts_implementation"):
            # The grouped product knows no fp64.
            exact.set_experts_implementation("eager")
        for module in exact.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = partial(_norm, module)
        names = [model.config._attn_implementation for model in (got, eager, exact)]
        assert names == ["tilewise", "eager", "plain"]
        return cls(got, eager, exact)

    @classmethod
    def random(cls, config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Trio:
        torch.manual_seed(0)
        return cls.of(auto.from_config(config, attn_implementation="eager"))

    @property
    def all(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
        return self.got, self.eager, self.exact

    def check(self, read: Callable[[Any], Tensor], /, **inputs: Any) -> Tensor:
        """Hold `read(model(**inputs))` of `got` against the budget, and return it."""
        with torch.no_grad():
            got, eager, exact = (read(model(**inputs)) for model in self.all)
        assert_within_budget(got, exact, eager)
        return got

    def check_gradients(self, loss: Callable[[Any], Tensor], /, **inputs: Any) -> None:
        """Hold the gradients of `loss(model(**inputs))` for every parameter against the budget."""
        for model in self.all:
            model.zero_grad()
            loss(model(**inputs)).backward()
        got, eager, exact = (dict(model.named_parameters()) for model in self.all)
        for name in got:
            gradients = [parameters[name].grad for parameters in (got, exact, eager)]
            assert all(gradient is not None for gradient in gradients), name
            if name.endswith(("key.bias", "k_proj.bias")):
                # Softmax feels no constant over the keys: the gradient is 0, and what is computed
                # is the rounding of a sum that cancels. The weight beside it is compared.
                size = exact[name.replace("bias", "weight")].grad.abs().max()
                if float(gradients[1].abs().max()) < 1e-9 * float(size):
                    continue
            assert_within_budget(*gradients, name=name)
