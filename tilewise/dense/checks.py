"""What can be said of a call's arguments without reading tensors, and the ops' argument list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.shapes import (
    COMPUTE_DTYPES,
    check_broadcastable,
    check_head_dims,
    check_head_ratio,
    check_is_dense,
    check_number,
    check_same_device,
    check_same_dtype,
    check_shapes,
    is_integer,
)
from .choice import torch_wants_determinism
from .ops import Arguments
from .piece import LENGTHS

# Arguments that say where queries and keys are stored and stand.
PLACEMENT = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "q_start",
    "k_start",
)


def check_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    terms: dict[str, Any],
    placement: dict[str, Any],
) -> Arguments:
    """Everything that can be said without reading tensors; the ops' arguments."""
    dims = _check_tensors(op, q, k, v, terms, placement)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"{op}: mask must be a tilewise Mask such as causal() or from_function(fn), "
            f"got {type(mask).__name__}; numbers to add to the scores go to bias=."
        )
    scale = dims["D"] ** -0.5 if terms["scale"] is None else terms["scale"]
    check_numbers(op, scale, terms["softcap"], terms["dropout_p"])
    bias = terms["bias"]
    if bias is not None:
        bias = _check_bias(op, bias, dims, placement)
    start_ints, start_tensors = _check_starts(op, placement, dims["B"], q.device)
    arguments = Arguments(
        bias=bias,
        alibi_slopes=terms["alibi_slopes"],
        sinks=terms["sinks"],
        rng=None,
        cu_seqlens_q=placement.get("cu_seqlens_q"),
        cu_seqlens_k=placement.get("cu_seqlens_k"),
        seqused_q=placement.get("seqused_q"),
        seqused_k=placement.get("seqused_k"),
        max_seqlens=_check_max_seqlens(op, placement),
        starts=start_ints,
        start_tensors=start_tensors,
        mask_flags=[],
        mask_ints=[],
        mask_tensors=[],
        scale=float(scale),
        softcap=terms["softcap"],
        dropout_p=float(terms["dropout_p"]),
        is_deterministic=terms.get("is_deterministic", False) or torch_wants_determinism(),
        backend="",
    )
    if mask.has_predicate:
        extent = arguments.positions(q, k).extent
        mask = mask.lowered(dims["B"], dims["H"], *extent, q.device)
    flags, ints, tensors = mask.lower()
    # A mask built from a list lives on the CPU. It is read before its few lengths follow q to
    # another device; on the CPU the op reads it, compiled or not.
    moves = q.device.type != "cpu" and not torch.compiler.is_compiling()
    reads = moves and all(t.device.type == "cpu" for t in tensors)
    mask.check_contents(dims["B"], dims["H"], reads=reads)
    tensors = [t.to(q.device, non_blocking=True) if t.device.type == "cpu" else t for t in tensors]
    check_same_device(op, {"q": q, **{f"mask tensor {i}": t for i, t in enumerate(tensors)}})
    return arguments._replace(mask_flags=flags, mask_ints=ints, mask_tensors=tensors)


def check_are_tensors(op: str, tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise NotImplementedError(
                f"{op}: {name} must be a plain tensor, got a nested one; attention_varlen takes "
                "its values() as packed tokens and its offsets() as cu_seqlens."
            )
        check_is_dense(op, name, tensor)


def check_out_dtype(op: str, out_dtype: torch.dtype) -> None:
    if out_dtype not in COMPUTE_DTYPES:
        names = ", ".join(str(x).removeprefix("torch.") for x in COMPUTE_DTYPES)
        raise ValueError(f"{op}: out_dtype must be one of {names}, got {out_dtype!r}.")


def check_buffers(op: str, buffers: dict[str, Any], inputs: dict[str, Tensor]) -> None:
    """What is added to must have a place of its own for each element."""
    check_are_tensors(op, buffers)
    for name, x in buffers.items():
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ValueError(f"{op}: {name} must not be expanded, got strides {list(x.stride())}.")
        for other, y in (inputs | buffers).items():
            if other != name and _start_alike(x, y):
                raise ValueError(
                    f"{op}: {name} must have memory of its own, got that of {other} too."
                )


def _start_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have their first element in common."""
    if 0 in (x.numel(), y.numel()) or torch.compiler.is_compiling():
        return False
    is_one = x.untyped_storage()._cdata == y.untyped_storage()._cdata
    return is_one and x.storage_offset() == y.storage_offset()


def _check_tensors(
    op: str, q: Tensor, k: Tensor, v: Tensor, terms: dict[str, Any], placement: dict[str, Any]
) -> dict[str, int]:
    tensors = {"q": q, "k": k, "v": v}
    tensors |= {name: placement[name] for name in LENGTHS if placement.get(name) is not None}
    if placement.get("cu_seqlens_k") is not None and "cu_seqlens_q" not in tensors:
        raise ValueError(f"{op}: cu_seqlens_k needs cu_seqlens_q, got None.")
    named = {name: terms[name] for name in ("alibi_slopes", "bias", "sinks")}
    check_are_tensors(op, tensors | {n: x for n, x in named.items() if x is not None})
    if "cu_seqlens_q" in tensors:
        dims = check_shapes(op, tensors, q="T H D", k="S G D", v="S G E", cu_seqlens_q="B+1")
        dims["B"] = dims["B+1"] - 1
        if dims["B"] < 0:
            raise ValueError(f"{op}: cu_seqlens_q must hold at least one entry, got none.")
        check_shapes(op, tensors, cu_seqlens_q="B+1", cu_seqlens_k="B+1")
    else:
        dims = check_shapes(op, tensors, q="B M H D", k="B N G D", v="B N G E")
    for name in LENGTHS:
        if name in tensors and tensors[name].dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be int32 or int64, got {tensors[name].dtype}.")
        if name in tensors and name.startswith("seqused"):
            _check_per_batch(op, name, tensors[name], dims["B"])
    check_same_dtype(op, {"q": q, "k": k, "v": v})
    check_head_dims(op, dims)
    more, fewer = "the query heads of q", "the kv heads of k"
    check_head_ratio(op, dims["H"], dims["G"], more, fewer)
    for name, spec in (("alibi_slopes", "B H"), ("sinks", "H")):
        tensor = terms[name]
        if tensor is not None:
            _check_heads(op, name, tensor, "H" if tensor.dim() == 1 else spec, dims)
        tensors[name] = tensor
    tensors["bias"] = terms["bias"]
    check_same_device(op, tensors)
    return dims


def _check_heads(op: str, name: str, tensor: Tensor, spec: str, dims: dict[str, int]) -> None:
    expected = [dims[letter] for letter in spec.split()]
    if list(tensor.shape) != expected or not tensor.is_floating_point():
        raise ValueError(
            f"{op}: {name} must be floating [{', '.join(spec.split())}] = {expected}, "
            f"got {tensor.dtype} {list(tensor.shape)}."
        )


def _check_per_batch(op: str, name: str, tensor: Tensor, B: int) -> None:
    if tensor.dim() != 1 or tensor.shape[0] != B:
        raise ValueError(f"{op}: {name} must be [B] = [{B}], got {list(tensor.shape)}.")


def check_numbers(op: str, scale: float, softcap: float | None, dropout_p: float = 0.0) -> None:
    """Of scores and dropout, as kernels can hold them."""
    numbers = {
        "scale": scale,
        "softcap": 1.0 if softcap is None else softcap,
        "dropout_p": dropout_p,
    }
    for name, x in numbers.items():
        check_number(op, name, x)
    # Comparisons, not math.isfinite: torch.compile may hold these as symbols.
    # Both are fp32 numbers in the kernels: what fp32 cannot hold is refused, not rounded to inf.
    largest, smallest = 1e38, 1e-37
    if not abs(scale) <= largest:
        raise ValueError(f"{op}: scale must be finite and at most 1e38 in size, got {scale}.")
    if softcap is not None and not smallest <= softcap <= largest:
        raise ValueError(
            f"{op}: softcap must be None or lie between 1e-37 and 1e38, got {softcap}."
        )
    if softcap is not None and not abs(scale) / softcap <= largest:
        raise ValueError(
            f"{op}: scale / softcap must be at most 1e38 in size, got {scale} / {softcap}."
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{op}: dropout_p must lie in [0, 1), got {dropout_p}.")


def _check_bias(op: str, bias: Tensor, dims: dict[str, int], placement: dict[str, Any]) -> Tensor:
    if not bias.is_floating_point():
        raise ValueError(
            f"{op}: bias must be floating, got {bias.dtype}; a bool mask goes to mask=, "
            "for instance from_function(lambda b, h, m, n: keep[b, h, m, n])."
        )
    if "M" in dims:
        sizes = {letter: dims[letter] for letter in "BHMN"}
        return check_broadcastable(op, "bias", bias, sizes)
    # Documents differ in length, so only batch and head are known here; a row or column count
    # of 1 is broadcast, any other is read from its first entry on.
    rows = bias.shape[-2] if bias.dim() >= 2 else 1
    columns = bias.shape[-1] if bias.dim() >= 1 else 1
    sizes = {"B": dims["B"], "H": dims["H"], "max_seqlen_q": rows, "max_seqlen_k": columns}
    return check_broadcastable(op, "bias", bias, sizes)


def _check_max_seqlens(op: str, placement: dict[str, Any]) -> list[int]:
    given = [placement.get("max_seqlen_q"), placement.get("max_seqlen_k")]
    if all(value is None for value in given):
        return []
    for name, value in zip(("max_seqlen_q", "max_seqlen_k"), given, strict=True):
        if value is not None and (not is_integer(value) or value < 0):
            raise ValueError(f"{op}: {name} must be an int >= 0, got {value!r}.")
    return [-1 if value is None else int(value) for value in given]


def _check_starts(
    op: str, placement: dict[str, Any], B: int, device: torch.device
) -> tuple[list[int], list[Tensor]]:
    starts: Sequence[int | Tensor | None] = (placement.get("q_start"), placement.get("k_start"))
    if starts[0] is None and starts[1] is None:
        return [], []
    given: list[int | Tensor] = [0 if start is None else start for start in starts]
    if not any(isinstance(start, Tensor) for start in given):
        if any(not is_integer(start) or not 0 <= start < 1 << 31 for start in given):
            raise ValueError(f"{op}: q_start and k_start must be ints in [0, 2^31), got {given}.")
        return [start for start in given if not isinstance(start, Tensor)], []
    tensors = []
    for name, start in zip(("q_start", "k_start"), given, strict=True):
        if not isinstance(start, Tensor):
            start = torch.full((B,), start, dtype=torch.int64, device=device)
        if start.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{op}: {name} must be an int or integer [B], got {start.dtype}.")
        _check_per_batch(op, name, start, B)
        tensors.append(start)
    return [], tensors
