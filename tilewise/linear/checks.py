"""What can be said of a call's arguments without reading their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.shapes import (
    accumulator_of,
    check_head_dims,
    check_head_ratio,
    check_number,
    check_same_device,
    check_same_dtype,
    check_shapes,
)
from .inputs import Inputs


def check_call(op: str, tensors: dict[str, Any], scale: float | None, vector_gate: bool) -> Inputs:
    """The inputs of a call. tensors: q, k, v and, where the op takes them and they are given, g,
    beta, initial_state and cu_seqlens.

    Raises: ValueError in one sentence.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "g", "beta")):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    lead = "T" if "cu_seqlens" in given else "B M"
    gate = f"{lead} H D" if vector_gate else f"{lead} H"
    dims = check_shapes(
        op, given, q=f"{lead} G D", k=f"{lead} G D", v=f"{lead} H E", g=gate, beta=f"{lead} H",
        cu_seqlens="B+1",
    )  # fmt: skip
    if "B+1" in dims:
        check_bounds(op, given["cu_seqlens"])
        dims["B"] = dims["B+1"] - 1
    check_same_dtype(op, {name: given[name] for name in ("q", "k", "v")})
    check_heads(op, dims)
    for name in ("g", "beta"):
        if name in given and not given[name].is_floating_point():
            raise ValueError(f"{op}: {name} must be floating, got {given[name].dtype}.")
    state = given.get("initial_state")
    if state is not None:
        _check_state(op, state, dims, accumulator_of(given["v"].dtype))
    check_same_device(op, given)
    return Inputs(
        _rows(given["q"]),
        _rows(given["k"]),
        _rows(given["v"]),
        given.get("g"),
        given.get("beta"),
        state,
        given.get("cu_seqlens"),
        check_scale(op, scale, dims["D"]),
    )


def check_scale(op: str, scale: float | None, D: int) -> float:
    if scale is None:
        return float(D**-0.5)
    check_number(op, "scale", scale)
    if not abs(scale) <= 1e38:
        raise ValueError(f"{op}: scale must be finite and at most 1e38 in size, got {scale}.")
    return float(scale)


def check_options(op: str, dims: dict[str, int], A_log: Any, dt_bias: Any, bound: Any) -> None:
    """Of the gate: A_log `[H]`, dt_bias `[H]` or `[H, D]`, as dims says, or flat."""
    sizes = list(dims.values())
    for name, x, shapes in (
        ("A_log", A_log, [sizes[:1]]),
        ("dt_bias", dt_bias, [sizes, [torch.Size(sizes).numel()]]),
    ):
        if x is not None and not isinstance(x, Tensor):
            raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
        if x is not None and list(x.shape) not in shapes:
            raise ValueError(f"{op}: {name} must be {shapes[0]}, got {list(x.shape)}.")
    if bound is not None and not (isinstance(bound, (int, float)) and -1e4 <= bound < 0):
        raise ValueError(f"{op}: lower_bound must be a number in [-1e4, 0), got {bound!r}.")


def _rows(x: Tensor) -> Tensor:
    """A last dim that is not contiguous is copied."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def check_heads(op: str, dims: dict[str, int]) -> None:
    check_head_dims(op, dims)
    check_head_ratio(op, dims["H"], dims["G"], "the heads of v", "the heads of q and k")


def check_bounds(op: str, cu_seqlens: Tensor) -> None:
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{op}: cu_seqlens must be int32 or int64, got {cu_seqlens.dtype}.")
    if cu_seqlens.shape[0] < 1:
        raise ValueError(f"{op}: cu_seqlens must hold at least one entry, got none.")


def _check_state(op: str, state: Tensor, dims: dict[str, int], dtype: torch.dtype) -> None:
    expected = [dims[letter] for letter in "BHDE"]
    if list(state.shape) != expected or state.dtype != dtype:
        raise ValueError(
            f"{op}: initial_state must be {str(dtype).removeprefix('torch.')} [B, H, D, E] = "
            f"{expected}, got {state.dtype} {list(state.shape)}."
        )
