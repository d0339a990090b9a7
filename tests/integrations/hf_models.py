"""Small models in three forms: Tilewise and eager in fp32, and an exact one in fp64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
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


class _InDouble(TorchFunctionMode):
    """What a module does in fp32 whatever the model's dtype, in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = tree_map(
            lambda x: torch.float64 if x is torch.float32 else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _in_double(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _InDouble():
            return forward(*args, **kwargs)

    return run


@contextmanager
def _rounding(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Each innermost layer's result, and its gradient, is off by up to a rounding, at random."""
    unit = torch.finfo(dtype).eps / 2

    def off(module: nn.Module, inputs: Any, out: Any) -> Any:
        is_real = isinstance(out, Tensor) and out.is_floating_point()
        return out * (1 + unit * (2 * torch.rand_like(out) - 1)) if is_real else out

    layers = [layer for layer in model.modules() if not [*layer.children()]]
    hooks = [layer.register_forward_hook(off) for layer in layers]
    yield
    for hook in hooks:
        hook.remove()


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Floating inputs, such as pixels, in the dtype of a model."""
    return {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def _switch(model: PreTrainedModel, name: str) -> None:
    """Transformers 5.17 does not reach the configurations of T5's two stacks by itself."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation(name)


Loss = Callable[[Any], Tensor]


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
        # Eager's softmax, norms and routers round to fp32 whatever the model's dtype.
        _switch(exact, "plain")
        if hasattr(exact, "set_experts_implementation"):
            # The grouped product knows no fp64.
            exact.set_experts_implementation("eager")
        for module in exact.modules():
            if type(module).__name__.endswith(("RMSNorm", "LayerNorm", "Router", "Gate")):
                module.forward = _in_double(module.forward)
        names = [model.config._attn_implementation for model in (got, eager, exact)]
        assert names == ["tilewise", "eager", "plain"]
        return cls(got, eager, exact)

    @classmethod
    def random(cls, config: PreTrainedConfig, auto: Any = AutoModelForCausalLM) -> Trio:
        torch.manual_seed(0)
        # Models without an auto class have the same under a private name.
        build = getattr(auto, "from_config", None) or auto._from_config
        return cls.of(build(config, attn_implementation="eager"))

    @property
    def all(self) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel]:
        return self.got, self.eager, self.exact

    def check(self, read: Callable[[Any], Tensor], /, **inputs: Any) -> Tensor:
        """Hold `read(model(**inputs))` of `got` against the budget, and return it."""
        with torch.no_grad():
            got, eager, exact = (read(model(**_cast(inputs, model.dtype))) for model in self.all)
        assert_within_budget(got, exact, eager)
        return got

    def check_gradients(
        self, loss: Loss, /, *others: tuple[Loss, dict[str, Any]], **inputs: Any
    ) -> None:
        """Hold the gradients of `loss(model(**inputs))` for every parameter against the budget.

        others: losses of inputs that are the same in another order. How far eager is off is chance
        too, and of all of them the worst counts: 2.1e-6 to 3.5e-6 over orders of the sentences of
        `test_minilm`.

        Sums over tokens, heads and experts cancel, and a gradient may have four entries, so its
        floor is the most that is lost in three runs of the exact model in which the result of each
        layer is off by a rounding of the tested dtype.
        """
        got, exact = (_gradients(model, loss, inputs) for model in (self.got, self.exact))
        eagers = [_gradients(self.eager, *given) for given in ((loss, inputs), *others)]
        with _rounding(self.exact, self.got.dtype):
            rounded = [_gradients(self.exact, loss, inputs) for _ in range(3)]
        for name in got:
            if name.endswith(("key.bias", "k_lin.bias", "k_proj.bias")):
                # Softmax feels no constant over the keys: the gradient is 0, and what is computed
                # is the rounding of a sum that cancels. The weight beside it is compared.
                size = exact[name.replace("bias", "weight")].abs().max()
                if float(exact[name].abs().max()) < 1e-9 * float(size):
                    continue
            floor = max(float((other[name] - exact[name]).abs().max()) for other in rounded)
            of = exact[name]
            eager = max((x[name] for x in eagers), key=lambda x, of=of: float((x - of).abs().max()))
            assert_within_budget(got[name], of, eager, name=name, floor=floor)


def _gradients(model: Any, loss: Loss, inputs: dict[str, Any]) -> Any:
    model.zero_grad()
    loss(model(**_cast(inputs, model.dtype))).backward()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in parameters.items() if p.grad is None]
    assert not missing, missing
    return {name: p.grad.clone() for name, p in parameters.items()}
