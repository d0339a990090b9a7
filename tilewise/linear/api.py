"""Public functions of linear attention: check, choose a backend, run.

One recurrence serves all, with a state S `[D, E]` per sequence and value head:
`S = e^g S`, then `S += k (x) v`, or the delta rule `S += k (x) beta (v - k^T S)`; then
`out = scale q^T S`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.autocast import under_autocast
from ..core.backends import BackendChoice
from ..core.first_derivative import refuse_tangents
from . import warm
from .checks import check_call, check_options
from .choice import choose
from .choice import explain as explain_choice
from .inputs import Inputs
from .ops import Linear, check_contents
from .reference import linear_eager, linear_reference
from .transforms import l2_norm, log_gate, step_size


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal linear attention without decay: `S += k (x) v`, `out = scale q^T S`.

    Args:
        q, k: `[B, M, G, D]`, fp16, bf16, fp32 or fp64; packed `[T, G, D]`.
        v: `[B, M, H, E]`, packed `[T, H, E]`; H % G == 0, and value head h reads the q and k of
            head `h // (H // G)`.
        scale: multiplies out; `D ** -0.5` when None.
        initial_state: `[B, H, D, E]`, fp32 (fp64 for fp64 inputs); zeros when None.
        cu_seqlens: `[B + 1]` int32 or int64, where packed sequences begin and end. Each has a state
            of its own; an empty one keeps its initial state. Tokens past the last give 0.
        backend: "auto", "triton", "tiled" (chunks in plain torch), "recurrent" (step by step),
            "reference" (fp64), "eager"; a named one never falls back.
    Returns: `(out, final_state)`: out as v, final_state as initial_state, both differentiable.
    Raises: ValueError for arguments that do not fit. What gates hold is not checked: those
        above 0 let the state grow, within a chunk by e^80 at most, where exact is out of range.
    Cost: about `2 B M H (2 D E + C (D + E))` flops with chunks of C = 64, and the same again for
        the delta rule; linear in M. Backward, three times that. Saved for it: the inputs alone.
    Deterministic: forward and backward, always.
    Source: arXiv 2006.16236 without its normaliser, in the chunk form of arXiv 2312.06635; the
        oracle is `tilewise.linear.reference.linear_reference`.
    """
    tensors = {"q": q, "k": k, "v": v, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run("linear_attention", tensors, scale, backend)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Linear attention with one fixed decay per head: `S = e^{log_decay} S + k (x) v`.

    As `linear_attention`, and:

    Args:
        log_decay: `[H]`, floating, natural log, at most 0. `log(1 - 2^(-5 - h))` when None.
            Lightning attention (MiniMax) is this op with its own decays. Has a gradient.
    Returns, Raises, Cost, Deterministic: as `linear_attention`.
    Source: Retentive Network, arXiv 2307.08621.
    """
    tensors = {"q": q, "k": k, "v": v, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    if isinstance(v, Tensor) and v.dim() >= 2:
        if log_decay is None:
            heads = torch.arange(v.shape[-2], device=v.device)
            log_decay = torch.log1p(-torch.exp2(-5.0 - heads))
        H = v.shape[-2]
        is_tensor = isinstance(log_decay, Tensor)
        if not is_tensor or list(log_decay.shape) != [H] or not log_decay.is_floating_point():
            got = f"{log_decay.dtype} {list(log_decay.shape)}" if is_tensor else repr(log_decay)
            raise ValueError(f"retention: log_decay must be floating [H] = [{H}], got {got}.")
        tensors["g"] = log_decay.expand(v.shape[:-1])
    return _run("retention", tensors, scale, backend)


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Linear attention with a decay per token and head: `S = e^g S + k (x) v`.

    Mamba 2's state space duality is this op with q = C, k = B, v = dt x, g = dt A and scale 1.
    As `linear_attention`, and:

    Args:
        g: `[B, M, H]` (packed `[T, H]`), log decay, any floating dtype; fp32 is best.
    Returns, Raises, Cost, Deterministic: as `linear_attention`.
    Source: Mamba 2, arXiv 2405.21060.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g}
    state = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run("simple_gla", tensors | state, scale, backend)


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gated linear attention, a decay per key dim: `S = diag(e^g) S + k (x) v`.

    As `linear_attention`, and:

    Args:
        g: `[B, M, H, D]` (packed `[T, H, D]`), log decay, any floating dtype; fp32 is best.
    Returns, Raises, Cost, Deterministic: as `linear_attention`.
    Source: arXiv 2312.06635.
    """
    tensors = {"q": q, "k": k, "v": v, "g": g}
    state = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run("gla", tensors | state, scale, backend, has_vector_gate=True)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    negative_eigenvalues: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """DeltaNet: what a key holds is replaced, `S += k (x) beta (v - k^T S)`.

    As `linear_attention`, and:

    Args:
        beta: `[B, M, H]` (packed `[T, H]`), how much of it is replaced; any floating dtype.
        qk_l2norm: q and k are normalised first, `x / sqrt(sum x^2 + 1e-6)`. Where they are not and
            `beta |k|^2` exceeds 2 the state grows from step to step, and so do rounding errors.
        beta_sigmoid: beta is a logit.
        negative_eigenvalues: beta is doubled, so that it reaches 2.
    Returns, Raises, Cost, Deterministic: as `linear_attention`; about twice its flops.
    Source: arXiv 2406.06484.
    """
    q, k, beta = _delta_options("delta_rule", q, k, beta, qk_l2norm, beta_sigmoid,
                                negative_eigenvalues)  # fmt: skip
    tensors = {"q": q, "k": k, "v": v, "beta": beta}
    state = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run("delta_rule", tensors | state, scale, backend)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    negative_eigenvalues: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet: a decay per token and head, then the delta rule.

    `S = e^g S`, `S += k (x) beta (v - k^T S)`. As `delta_rule`, and:

    Args:
        g: `[B, M, H]` (packed `[T, H]`), log decay; with A_log or dt_bias what a projection gives,
            of which the log decay is made: `-exp(A_log) softplus(g + dt_bias)`.
        A_log, dt_bias: `[H]`, floating; have gradients.
    Returns, Raises, Cost, Deterministic: as `delta_rule`.
    Source: arXiv 2412.06464.
    """
    op = "gated_delta_rule"
    q, k, beta = _delta_options(op, q, k, beta, qk_l2norm, beta_sigmoid, negative_eigenvalues)
    if A_log is not None or dt_bias is not None:
        _check_gate(op, g, v, 1)
        check_options(op, {"H": v.shape[-2]}, A_log, dt_bias, None)
        g = log_gate(g, A_log, dt_bias, None)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    state = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run(op, tensors | state, scale, backend)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    qk_l2norm: bool = False,
    beta_sigmoid: bool = False,
    negative_eigenvalues: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention: a decay per key dim, then the delta rule.

    `S = diag(e^g) S`, `S += k (x) beta (v - k^T S)`. As `gated_delta_rule`, and:

    Args:
        g: `[B, M, H, D]` (packed `[T, H, D]`).
        dt_bias: `[H, D]`, or flat.
        lower_bound: below 0; the log decay is `lower_bound sigmoid(exp(A_log) (g + dt_bias))`
            instead, and so never below the bound.
    Returns, Raises, Cost, Deterministic: as `delta_rule`.
    Source: arXiv 2510.26692.
    """
    op = "kda"
    q, k, beta = _delta_options(op, q, k, beta, qk_l2norm, beta_sigmoid, negative_eigenvalues)
    if A_log is not None or dt_bias is not None or lower_bound is not None:
        _check_gate(op, g, v, 2)
        H, D = g.shape[-2:]
        check_options(op, {"H": H, "D": D}, A_log, dt_bias, lower_bound)
        rate = None if A_log is None else A_log.unsqueeze(-1)
        bias = None if dt_bias is None else dt_bias.reshape(H, D)
        g = log_gate(g, rate, bias, lower_bound)
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    state = {"initial_state": initial_state, "cu_seqlens": cu_seqlens}
    return _run(op, tensors | state, scale, backend, has_vector_gate=True)


def explain_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """Which backend a call with these tensors runs on, and why.

    Args:
        q, k, v, g, beta, initial_state, cu_seqlens, backend: as any op of the family gets them.
    Returns: a `BackendChoice`: the name, the reason, and why the others were not taken.
    Raises: ValueError for arguments that do not fit.
    """
    optional = {name: x for name, x in (("g", g), ("beta", beta)) if x is not None}
    tensors = {"q": q, "k": k, "v": v, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    # One number a head has a dim less than q.
    is_vector = isinstance(g, Tensor) and isinstance(q, Tensor) and g.dim() == q.dim()
    inputs = check_call("explain_backend", tensors | optional, None, is_vector)
    return explain_choice("explain_backend", backend, inputs)


# ---------------------------------------------------------------- what they share


def _run(
    op: str,
    tensors: dict[str, Any],
    scale: float | None,
    backend: str,
    *,
    has_vector_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v = under_autocast(tensors["q"], tensors["k"], tensors["v"])
    tensors = {**tensors, "q": q, "k": k, "v": v}
    found = warm.find(tensors, scale, backend, has_vector_gate)
    if found.known is not None:
        return _run_known(found.known, found.tensors)
    inputs = check_call(op, tensors, scale, has_vector_gate)
    name = choose(op, backend, inputs)
    if name == "reference":
        check_contents(inputs)
        return linear_reference(inputs)
    if name == "eager":
        check_contents(inputs)
        return linear_eager(inputs)
    refuse_tangents(op)
    results = run_op(inputs, name)
    if name == "triton":
        # Only what has run serves calls after it.
        warm.keep(found.key, inputs)
    return results


def _run_known(known: warm.Known, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    inputs = Inputs._make((*tensors, known.scale))
    check_contents(inputs)
    if _learns(inputs):
        apply: Any = Linear.apply
        out, state = apply(known, "triton", known.scale, *tensors)
        return out, state
    return known.run(inputs)


def run_op(inputs: Inputs, backend: str) -> tuple[Tensor, Tensor]:
    """The registered op, with gradients where something learns."""
    if _learns(inputs):
        apply: Any = Linear.apply
        out, state = apply(None, backend, inputs.scale, *inputs[:7])
    else:
        out, state = torch.ops.tilewise.linear_fwd(*inputs, backend)
    return out, state


def _learns(inputs: Inputs) -> bool:
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in inputs.tensors
    )


def _delta_options(
    op: str, q: Tensor, k: Tensor, beta: Tensor, norm: bool, is_logit: bool, reaches_two: bool
) -> tuple[Tensor, Tensor, Tensor]:
    for name, x in (("q", q), ("k", k), ("beta", beta)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{op}: {name} must be a floating tensor, got {got}.")
    if norm:
        q, k = l2_norm(q), l2_norm(k)
    if is_logit or reaches_two:
        beta = step_size(beta, is_logit, reaches_two)
    return q, k, beta


def _check_gate(op: str, g: Tensor, v: Tensor, n_last: int) -> None:
    """g and v are near enough to what they must be to make a gate of one."""
    for name, x in (("g", g), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() < 2:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{op}: {name} must be a tensor of 2 dimensions at least, got {got}.")
    if g.shape[-n_last] != v.shape[-2] or not g.is_floating_point():
        raise ValueError(
            f"{op}: g must be floating with H = {v.shape[-2]} heads, got {g.dtype} {list(g.shape)}."
        )
