"""One table-driven check for every shape message of the library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def accumulator_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_integer(x: object) -> bool:
    """Whether x is a whole number: an int, a compiled call's symbol, or another library's."""
    if isinstance(x, (int, torch.SymInt)):
        return True
    if isinstance(x, Tensor):
        return x.numel() == 1 and not (x.is_floating_point() or x.is_complex())
    # An array of another library has an __index__ too, which raises where it holds several.
    return hasattr(x, "__index__") and getattr(x, "size", 1) == 1


def check_number(op: str, name: str, x: Any) -> None:
    """Of an argument that kernels take as a plain number.

    Raises: ValueError for what is no number, and for one that wants a gradient, which it would
        silently not get.
    """
    if not torch.compiler.is_compiling() and not hasattr(x, "__float__"):
        raise ValueError(f"{op}: {name} must be a number, got {x!r}.")
    if not isinstance(x, Tensor):
        return
    if x.numel() != 1:
        raise ValueError(f"{op}: {name} must be a number, got {list(x.shape)}.")
    if x.dtype == torch.bool:
        raise ValueError(f"{op}: {name} must be a number, got a bool tensor.")
    if x.requires_grad and torch.is_grad_enabled():
        advice = "; to learn it, multiply q by it" if name == "scale" else ""
        raise ValueError(
            f"{op}: {name} must be a number, got a tensor that requires a gradient, "
            f"of which there is none{advice}."
        )


def check_is_dense(op: str, name: str, x: Any) -> None:
    """Raises: ValueError for what is no tensor, and for a sparse one."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    if x.layout != torch.strided:
        raise ValueError(f"{op}: {name} must be a strided tensor, got {x.layout}.")


def check_shapes(op: str, tensors: Mapping[str, Tensor | None], **specs: str) -> dict[str, int]:
    """Bind dimension letters to sizes and raise one sentence when a tensor does not fit.

    Args:
        op: the op's public name, for the message.
        tensors: the arguments by name; None and names without a spec are passed over.
        specs: for each name, its letters: `q="B M H D"`. A letter that has been bound must
            recur with the same size; `B|1` also takes 1; a literal number takes just that.
    Returns: the sizes by letter.
    Raises: ValueError that names the op, the argument, what came and what was expected; also for
        what is no tensor, and for a sparse one.

    >>> q, k = torch.empty(2, 5, 4, 8), torch.empty(2, 7, 2, 8)
    >>> check_shapes("attention", {"q": q, "k": k}, q="B M H D", k="B N G D")
    {'B': 2, 'M': 5, 'H': 4, 'D': 8, 'N': 7, 'G': 2}
    """
    dims: dict[str, int] = {}
    for name, spec in specs.items():
        tensor = tensors.get(name)
        if tensor is None:
            continue
        letters = spec.split()
        check_is_dense(op, name, tensor)
        if tensor.dim() != len(letters):
            raise ValueError(
                f"{op}: {name} must be [{', '.join(letters)}], "
                f"got {tensor.dim()} dimensions {list(tensor.shape)}."
            )
        for position, letter in enumerate(letters):
            _bind(op, name, letters, tensor, position, letter, dims)
    return dims


def _bind(
    op: str,
    name: str,
    letters: list[str],
    tensor: Tensor,
    position: int,
    letter: str,
    dims: dict[str, int],
) -> None:
    size = tensor.shape[position]
    key, _, alternative = letter.partition("|")
    if alternative and size == int(alternative):
        return
    expected = int(key) if key.isdigit() else dims.get(key)
    if expected is None:
        dims[key] = size
    elif size != expected:
        # A literal number says itself what was expected.
        bound = "" if key.isdigit() else f" with {key} = {expected}"
        raise ValueError(
            f"{op}: {name} must be [{', '.join(letters)}]{bound}, got {list(tensor.shape)}."
        )


def check_same_device(op: str, tensors: Mapping[str, Tensor | None]) -> torch.device:
    """The one device of all tensors; ValueError if there are several."""
    found = {name: t.device for name, t in tensors.items() if t is not None}
    first, device = next(iter(found.items()))
    for name, other in found.items():
        if other != device:
            raise ValueError(
                f"{op}: all tensors must be on one device, got {first} on {device} "
                f"and {name} on {other}."
            )
    return device


def check_same_dtype(op: str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The one floating dtype of all tensors; ValueError if mixed, NotImplementedError if odd."""
    first, dtype = next((name, t.dtype) for name, t in tensors.items())
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(
                f"{op}: q, k and v must share one dtype, got {first} {dtype} and "
                f"{name} {tensor.dtype}; cast them, or run under torch.autocast."
            )
    if dtype not in COMPUTE_DTYPES:
        if dtype.is_floating_point:
            raise NotImplementedError(
                f"{op}: {dtype} is not supported by any backend yet; use float16, bfloat16, "
                "float32 or float64."
            )
        raise ValueError(f"{op}: {first} must be a floating tensor, got {dtype}.")
    return dtype


def check_head_dims(op: str, dims: Mapping[str, int]) -> None:
    """Raise unless D and E are at least 1."""
    if dims["D"] == 0 or dims["E"] == 0:
        raise ValueError(
            f"{op}: head dimensions must be at least 1, got D = {dims['D']} and E = {dims['E']}."
        )


def check_head_ratio(op: str, H: int, G: int, more: str, fewer: str) -> None:
    """Raise unless H heads are whole groups of G. more, fewer: whose they are, in words."""
    if G == 0 or H == 0 or H % G != 0:
        raise ValueError(
            f"{op}: {more} must be a multiple of {fewer} and not 0, got H = {H} and G = {G}."
        )


def is_read(index: Tensor) -> bool:
    """Whether what an index tensor holds is checked: on the CPU, elsewhere if TILEWISE_CHECK=1,
    which waits for the GPU."""
    if torch.compiler.is_compiling():
        return False
    return index.device.type == "cpu" or os.environ.get("TILEWISE_CHECK") == "1"


def check_cu_seqlens(op: str, name: str, cu_seqlens: Tensor, stored: int) -> None:
    """Raise ValueError unless bounds start at 0, never fall and end within what is stored.

    Reads them. cu_seqlens: integers `[B + 1]`, at least one. stored: tokens.
    """
    values = cu_seqlens.to(torch.int64)
    if int(values[0]) != 0:
        raise ValueError(f"{op}: {name} must start at 0, got {int(values[0])}.")
    if bool((values.diff() < 0).any()):
        at = int((values.diff() < 0).to(torch.int8).argmax())
        raise ValueError(
            f"{op}: {name} must never fall, got {int(values[at])} then {int(values[at + 1])}."
        )
    if int(values[-1]) > stored:
        raise ValueError(
            f"{op}: {name} ends at {int(values[-1])}, but only {stored} tokens are stored."
        )


def check_broadcastable(op: str, name: str, tensor: Tensor, shape: dict[str, int]) -> Tensor:
    """`tensor` seen with `len(shape)` dims that are each 1 or the named size."""
    letters, sizes = list(shape), list(shape.values())
    if tensor.dim() <= len(sizes):
        seen = tensor.reshape((1,) * (len(sizes) - tensor.dim()) + tuple(tensor.shape))
        # Equality first: a size that comes from data is known to equal itself, but not to be 1.
        if all(have == want or have == 1 for have, want in zip(seen.shape, sizes, strict=True)):
            return seen
    raise ValueError(
        f"{op}: {name} must broadcast to [{', '.join(letters)}] = {sizes}, "
        f"got {list(tensor.shape)}."
    )
