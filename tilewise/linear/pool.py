"""Decoding: a few new steps per sequence on states that stay in a pool.

The recurrence step by step, in place, for one token or a few (speculative decoding). On a GPU
nothing is read on the host, so a call can stand in a CUDA graph whose slots change between replays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.backends import check_backend_name, triton_problem
from ..core.shapes import (
    accumulator_of,
    check_same_device,
    check_same_dtype,
    check_shapes,
    is_read,
)
from . import choice
from .checks import check_heads, check_scale
from .inputs import Inputs
from .ops import library
from .reference import recurrence

BACKENDS = ("tiled", "triton")


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    *,
    slots: Tensor,
    write_slots: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """New steps of any op of the family, on states in a pool that is updated in place.

    Args:
        q, k: `[B, M, G, D]`; v: `[B, M, H, E]`, as the ops take them, M new steps a sequence.
        pool: `[P, H, D, E]`, fp32, bf16 or fp16, contiguous; the steps are computed in fp32 (of
            fp64 inputs in fp64, and the pool may be fp64).
        slots: `[B]` int32 or int64, the slot that each sequence's state is read from. A negative
            one is no sequence: its out is 0 and it writes nothing.
        write_slots: where states go: `[B]`, that after the last step, or `[B, M]`, that after
            every step, of which the next call reads the one that was accepted (speculative
            decoding: nothing has to be taken back). `slots` when None. Negative: nowhere. No slot
            may be written twice, and none that another sequence reads; checked on the CPU,
            elsewhere with TILEWISE_CHECK=1.
        g: log decay, `[B, M, H]` or `[B, M, H, D]`; beta: `[B, M, H]`. None for an op without.
        scale: multiplies out; `D ** -0.5` when None.
        backend: "auto", "triton", "tiled" (plain torch, which reads the slots on the host).
    Returns: `[B, M, H, E]` in v's dtype. No gradients: train with the ops.
    Raises: ValueError for arguments that do not fit. On a GPU slots are not read on the host
        unless TILEWISE_CHECK=1, and one past the pool's end counts as negative.
    Cost: the state is read once and written once a call, `2 B H D E` numbers.
    Deterministic: always. A sequence's result does not depend on which others are in the batch.
    Source: the recurrence of the ops; the oracle is `tilewise.linear.reference.recurrence`.
    """
    _check(q, k, v, pool, slots, write_slots, g, beta)
    scale = check_scale("decode", scale, q.shape[-1])
    check_backend_name("decode", backend, BACKENDS)
    problem = triton_problem(q.device)
    if backend == "triton" and problem:
        raise NotImplementedError(f"decode: backend 'triton' {problem}; use backend='tiled'.")
    name = backend
    if backend == "auto":
        is_left = problem or not choice.AUTO_TAKES_TRITON or q.device.type == "cpu"
        name = "tiled" if is_left else "triton"
    with torch.no_grad():
        out: Tensor = torch.ops.tilewise.linear_decode(
            pool, q, k, v, g, beta, slots, slots if write_slots is None else write_slots, scale,
            name,
        )  # fmt: skip
    return out


library.define(
    "linear_decode(Tensor(a!) pool, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    "Tensor slots, Tensor write_slots, float scale, str backend) -> Tensor"
)


def _linear_decode(pool: Tensor, *arguments: Any) -> Tensor:
    q, k, v, g, beta, slots, write_slots, scale, backend = arguments
    inputs = Inputs(q, k, v, g, beta, None, None, scale)
    if backend == "triton":
        from .triton_decode import linear_decode

        return linear_decode(pool, inputs, slots, write_slots)
    return _decode_tiled(pool, inputs, slots.long(), write_slots.long())


def _decode_tiled(pool: Tensor, inputs: Inputs, slots: Tensor, write_slots: Tensor) -> Tensor:
    P = pool.shape[0]
    used = ((slots >= 0) & (slots < P)).nonzero().flatten()
    out = torch.zeros_like(inputs.v, memory_format=torch.contiguous_format)
    wide = accumulator_of(inputs.v.dtype)
    rows = inputs.map(lambda x: x[used].to(wide))
    state = pool[slots[used]].to(wide)
    each = write_slots if write_slots.dim() == 2 else write_slots.unsqueeze(1)
    # All steps before a state is kept, or one by one.
    width = 1 if write_slots.dim() == 2 else inputs.v.shape[1]
    for i in range(each.shape[1]):
        now = rows.with_tensors(
            [x if x is None else x[:, i * width : (i + 1) * width] for x in rows.tensors]
        )
        found, state = recurrence(now, state, lambda x: x)
        out[used, i * width : (i + 1) * width] = found.to(out.dtype)
        to = each[used, i]
        kept = ((to >= 0) & (to < P)).nonzero().flatten()
        pool[to[kept]] = state[kept].to(pool.dtype)
    return out


def _linear_decode_fake(pool: Tensor, *arguments: Any) -> Tensor:
    return arguments[2].new_empty(arguments[2].shape)


library.impl("linear_decode", torch.no_grad()(_linear_decode), "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::linear_decode", _linear_decode_fake, lib=library)


def _check(
    q: Any, k: Any, v: Any, pool: Any, slots: Any, write_slots: Any, g: Any, beta: Any
) -> None:
    op = "decode"
    tensors = {"q": q, "k": k, "v": v, "pool": pool, "slots": slots}
    tensors |= {"write_slots": write_slots, "g": g, "beta": beta}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and (
            x is not None or name in ("q", "k", "v", "pool", "slots")
        ):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    given = {name: x for name, x in tensors.items() if x is not None}
    gate = "B M H D" if g is not None and g.dim() == 4 else "B M H"
    every = "B M" if write_slots is not None and write_slots.dim() == 2 else "B"
    dims = check_shapes(
        op, given, q="B M G D", k="B M G D", v="B M H E", pool="P H D E", slots="B",
        write_slots=every, g=gate, beta="B M H",
    )  # fmt: skip
    check_same_dtype(op, {"q": q, "k": k, "v": v})
    check_heads(op, dims)
    if not pool.is_floating_point() or not pool.is_contiguous():
        raise ValueError(
            f"{op}: pool must be floating and contiguous, got {pool.dtype} with strides "
            f"{list(pool.stride())}."
        )
    if pool.dtype == torch.float64 and v.dtype != torch.float64:
        raise ValueError(f"{op}: pool must be fp32 or of 16 bits beside {v.dtype}, got fp64.")
    for name in ("slots", "write_slots"):
        if name not in given:
            continue
        x = given[name]
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be int32 or int64, got {x.dtype}.")
        if is_read(x) and x.numel() and int(x.max()) >= dims["P"]:
            raise ValueError(
                f"{op}: {name} must lie below the pool's {dims['P']} slots, got {int(x.max())}."
            )
    for name in ("g", "beta"):
        if name in given and not given[name].is_floating_point():
            raise ValueError(f"{op}: {name} must be floating, got {given[name].dtype}.")
    check_same_device(op, given)
    if is_read(slots):
        _check_apart(op, slots, slots if write_slots is None else write_slots)


def _check_apart(op: str, slots: Tensor, write_slots: Tensor) -> None:
    """Raise where the result would depend on who comes first."""
    each = write_slots.reshape(slots.shape[0], -1)
    written, times = each[each >= 0].unique(return_counts=True)
    if bool((times > 1).any()):
        raise ValueError(
            f"{op}: write_slots must name a slot once, got {int(written[times > 1][0])} twice."
        )
    # [writer, reader]
    meets = ((each.unsqueeze(-1) == slots) & (slots >= 0)).any(1)
    meets.fill_diagonal_(False)
    if bool(meets.any()):
        slot = int(slots[meets.any(0)][0])
        raise ValueError(
            f"{op}: write_slots must not name a slot that another sequence reads, got {slot}."
        )
