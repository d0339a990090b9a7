"""Which backend runs a call of dense attention, and why not another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..core.backends import (
    BackendChoice,
    check_backend_name,
    describe_device,
    hopper_problem,
    triton_problem,
)
from ..core.mask_leaves import full
from ..core.positions import Positions
from .piece import Piece, Terms

BACKENDS = ("reference", "tiled", "triton", "hopper")
# What an int32 index inside the kernels can hold, with room for the sums of a few.
_MOST_ROWS = 1 << 28
_LARGEST_DIM = 256
_TRITON_DTYPES = ("float16", "bfloat16", "float32")
_HOPPER_DTYPES = ("float16", "bfloat16")


def choose(op: str, backend: str, piece: Piece) -> str:
    """The name of the backend that runs a call.

    Raises: ValueError for a name that there is not, NotImplementedError where the named one cannot.
    """
    check_backend_name(op, backend, BACKENDS)
    if backend == "auto":
        if piece.q.device.type in ("cpu", "meta"):
            return "tiled"
        if not (why_not_hopper(piece) or why_hopper_is_slower(piece)):
            return "hopper"
        return "tiled" if why_not_triton(piece) else "triton"
    problem, other = "", "triton"
    if backend == "hopper":
        problem = why_not_hopper(piece)
    if problem or backend == "triton":
        why_not = why_not_triton(piece)
        other = "tiled" if why_not else "triton"
        problem = problem or why_not
    if problem:
        raise NotImplementedError(f"{op}: backend '{backend}' {problem}; use backend='{other}'.")
    return backend


def choose_for_pieces(op: str, backend: str, q: Tensor, k: Tensor, v: Tensor) -> str:
    """The same for pieces of these tensors under masks and with terms yet to come: no backend that
    may refuse one of them."""
    if backend == "hopper":
        raise NotImplementedError(
            f"{op}: backend 'hopper' may not take every piece; use backend='triton'."
        )
    positions = Positions(B=q.shape[0], H=q.shape[-2], M=q.shape[-3], N=k.shape[-3])
    name = choose(op, backend, Piece(q, k, v, full(), positions, Terms(1.0)))
    return "triton" if name == "hopper" else name


def why_not_triton(piece: Piece) -> str:
    """Why the triton backend cannot run a call, as a verb phrase; empty where it can."""
    if piece.q.device.type == "meta":
        return ""
    return _call_problem(piece) or triton_problem(piece.q.device)


def _call_problem(piece: Piece) -> str:
    """What of a call the triton kernels do not do, on any GPU."""
    q, k, v = piece.q, piece.k, piece.v
    problem = _dtype_problem(piece, _TRITON_DTYPES)
    if problem:
        return problem
    if max(q.shape[-1], v.shape[-1]) > _LARGEST_DIM:
        return f"takes head dims up to {_LARGEST_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    if max(q.shape[-3], k.shape[-3]) >= _MOST_ROWS:
        return f"counts rows up to {_MOST_ROWS}, got {q.shape[-3]} and {k.shape[-3]}"
    return ""


def why_not_hopper(piece: Piece) -> str:
    """The same for the hopper backend."""
    if piece.q.device.type == "meta":
        return ""
    # The device first: elsewhere nothing else needs to be looked at.
    return (
        hopper_problem(piece.q.device)
        or why_not_triton(piece)
        or _dtype_problem(piece, _HOPPER_DTYPES)
        or _feature_problem(piece)
    )


# A call up to this head dim, with no more keys, and at most one tile of 128 rows for each of a
# GPU's processors: it is over before Hopper's kernels have set up their roles. The forward of 64
# heads took 5.2 us against 7.8 at 128 tokens and 7.5 against 11.0 at 256 (H200, Triton 3.6,
# 2026-11-30).
SHORT_DIM, SHORT_KEYS, _SHORT_TILES, _ROWS_OF_TILE = 64, 256, 132, 128


def why_hopper_is_slower(piece: Piece) -> str:
    """Why the hopper backend would take longer than triton for a call; empty where it would not."""
    q, k, v = piece.q, piece.k, piece.v
    if max(q.shape[-1], v.shape[-1]) > SHORT_DIM or k.shape[-3] > SHORT_KEYS:
        return ""
    n_heads = q.shape[-2] * (q.shape[0] if len(q.shape) == 4 else 1)
    n_tiles = n_heads * -(-q.shape[-3] // _ROWS_OF_TILE)
    return f"is slower for few tiles of up to {SHORT_KEYS} keys" if n_tiles <= _SHORT_TILES else ""


# Where a sum has no more keys than these, the rounding of O and P does not average out.
FEW_KEYS = 128
# Scales that fp32 does not round to 0, and that do not turn the scores around.
LEAST_SCALE = 1e-37


def why_not_hopper_backward(piece: Piece, learned: Sequence[bool]) -> str:
    """Why the backward of a call on the hopper backend is Triton's; empty where it is Hopper's own.

    learned: whether bias, slopes and sinks want a gradient.
    """
    if any(learned[:2]):
        return "takes no slopes that learn"
    if piece.k.shape[-3] <= FEW_KEYS or 0 in piece.q.shape:
        return f"needs more than {FEW_KEYS} keys"
    return ""


def torch_wants_determinism() -> bool:
    """What `torch.use_deterministic_algorithms` asks of every op."""
    return _heeds_torch and torch.are_deterministic_algorithms_enabled()


_heeds_torch = True


@contextmanager
def torch_mode_unheeded() -> Iterator[None]:
    """For those who switch torch's mode on to have new memory filled, not to get other kernels."""
    global _heeds_torch
    was, _heeds_torch = _heeds_torch, False
    try:
        yield
    finally:
        _heeds_torch = was


def _dtype_problem(piece: Piece, known: tuple[str, ...]) -> str:
    dtype = str(piece.q.dtype).removeprefix("torch.")
    return "" if dtype in known else f"computes {', '.join(known)}, not {dtype}"


def _feature_problem(piece: Piece) -> str:
    """What of a call the hopper kernels do not do."""
    terms = piece.terms
    if terms.bias is not None:
        return "adds no bias"
    if terms.dropout_p > 0.0:
        return "drops nothing, and dropout_p is not 0"
    if piece.band is None:
        return "takes a window, a range of keys, documents and what they have in common as a mask"
    return ""


def explain(op: str, backend: str, piece: Piece) -> BackendChoice:
    """The choice with its reasons."""
    name, where = choose(op, backend, piece), describe_device(piece.q.device)
    if backend != "auto":
        return BackendChoice(name, f"named by the caller, on {where}")
    not_hopper = why_not_hopper(piece) or why_hopper_is_slower(piece)
    return _explain_auto(piece, name, (why_not_triton(piece), not_hopper), where)


def problems_elsewhere(piece: Piece, architecture: str) -> tuple[str, str]:
    """Why triton and hopper cannot run a call on a GPU that need not be here; piece: on any device.

    architecture: `sm_90`, `gfx942`, ..., one that Triton compiles for.
    """
    not_triton = _call_problem(piece)
    not_hopper = "" if architecture == "sm_90" else f"needs sm_90, and this GPU is {architecture}"
    not_hopper = (
        not_hopper or not_triton or _dtype_problem(piece, _HOPPER_DTYPES) or _feature_problem(piece)
    )
    return not_triton, not_hopper


def explain_elsewhere(piece: Piece, architecture: str, gpu: str) -> BackendChoice:
    """What backend="auto" takes there."""
    not_triton, not_hopper = problems_elsewhere(piece, architecture)
    not_hopper = not_hopper or why_hopper_is_slower(piece)
    name = "tiled" if not_triton else "triton" if not_hopper else "hopper"
    return _explain_auto(piece, name, (not_triton, not_hopper), gpu)


def _explain_auto(piece: Piece, name: str, problems: tuple[str, str], where: str) -> BackendChoice:
    """problems: why not triton, and why not hopper."""
    not_triton, not_hopper = problems
    rejected = {"reference": "the O(M N) oracle runs only when it is named"}
    if name in ("triton", "hopper"):
        rejected["tiled"] = "plain torch tiles are slower on a GPU"
    if name == "hopper":
        rejected["triton"] = "its kernels are slower on this GPU"
        extras = (piece.terms.bias, piece.terms.alibi_slopes, piece.terms.sinks)
        learned = [x is not None and x.requires_grad for x in extras]
        why_not = why_not_hopper_backward(piece, learned)
        whose = f"Triton's the backward, since Hopper's {why_not}," if why_not else "the backward,"
        reason = f"Hopper's own kernels run the forward here, and {whose} on {where}"
        return BackendChoice(name, reason, rejected)
    rejected["hopper"] = not_hopper
    if name == "triton":
        return BackendChoice(name, f"Triton's kernels run here, on {where}", rejected)
    rejected["triton"] = not_triton or "on the CPU it only interprets, which is slow"
    return BackendChoice(name, f"plain torch tiles run on any device, here {where}", rejected)
