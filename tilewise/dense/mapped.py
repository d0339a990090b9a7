"""The dense ops under torch.func's transforms: vmap, grad, vjp, and those in one another.

A mapped axis folds into the batch where nothing but q, k and v depends on it or on the batch;
anything else (lengths or a bias per row, dropout, packed calls) runs one by one and is stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .ops import Arguments, forward_to_keep, library
from .piece import Result


class MappedAttention(torch.autograd.Function):
    """As `ops.Attention`, as transforms need it: out, lse, and what is kept beside them for the
    backward, if anything. out is as it is kept.

    What is saved is what `Attention` saves, in its order: a checkpoint may recompute one by the
    other.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, rest: tuple[Any, ...], out_dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        result = forward_to_keep(q, k, v, Arguments(bias, slopes, sinks, *rest), out_dtype)
        return tuple(x for x in result if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, bias, slopes, sinks, rest, _ = inputs
        out, lse, remainder = Result(*output)
        if remainder is not None:
            ctx.mark_non_differentiable(remainder)
        flat, ctx.structure = tree_flatten(rest)
        ctx.places = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        ctx.plain = [None if isinstance(x, Tensor) else x for x in flat]
        ctx.save_for_backward(
            q, k, v, out, remainder, lse, bias, slopes, sinks, *(flat[i] for i in ctx.places)
        )

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor, *_: Any) -> tuple[Any, ...]:
        q, k, v, out, remainder, lse, bias, slopes, sinks, *others = ctx.saved_tensors
        flat = list(ctx.plain)
        for place, x in zip(ctx.places, others, strict=True):
            flat[place] = x
        rest = tree_unflatten(flat, ctx.structure)
        extras = (bias, slopes, sinks)
        wanted = [
            x is not None and need
            for x, need in zip(extras, ctx.needs_input_grad[3:6], strict=True)
        ]
        gradients = torch.ops.tilewise.attention_bwd(
            dout, dlse, out, remainder, lse, q, k, v, *extras, *rest, wanted
        )
        gradients = _Once.apply(len(gradients), *gradients, dout, dlse, q, k, v, *extras)
        kept = zip(gradients[3:], wanted, strict=True)
        return (*gradients[:3], *(g if want else None for g, want in kept), None, None)


class _Once(torch.autograd.Function):
    """Gradients whose own derivative is refused, not 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n: int, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x.clone() for x in tensors[:n] if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        raise NotImplementedError(
            "attention: second derivatives are not implemented on this backend; "
            "backend='reference' has them."
        )


# ---------------------------------------------------------------- the rules of vmap


_N_ARGUMENTS = len(Arguments._fields)


def _map_forward(
    op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> Any:
    end = 3 + _N_ARGUMENTS
    if not _folds(Arguments(*arguments[3:end]), in_dims[3:end]):
        return _one_by_one(op, info, in_dims, arguments)
    size = info.batch_size
    qkv = [_fold(x, dim, size) for x, dim in zip(arguments[:3], in_dims[:3], strict=True)]
    results = op(*qkv, *arguments[3:])
    return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)


def _map_backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    rest, wanted = Arguments(*arguments[8:-1]), arguments[-1]
    if any(wanted) or not _folds(rest, in_dims[8:-1]):
        return _one_by_one(torch.ops.tilewise.attention_bwd, info, in_dims, arguments)
    size = info.batch_size
    folded = [_fold(x, dim, size) for x, dim in zip(arguments[:8], in_dims[:8], strict=True)]
    gradients = torch.ops.tilewise.attention_bwd(*folded, *arguments[8:])
    mapped = [x.unflatten(0, (size, -1)) for x in gradients[:3]]
    # Of what was not asked for come empty tensors.
    return (*mapped, *gradients[3:]), (0, 0, 0, None, None, None)


def _folds(rest: Arguments, in_dims: tuple[Any, ...]) -> bool:
    """Whether the call is the same for every batch row and every index of the mapped axis."""
    if any(dim is not None for dim in tree_flatten(in_dims)[0]):
        return False
    if rest.rng is not None or rest.cu_seqlens_q is not None:
        return False
    of_rows = (rest.seqused_q, rest.seqused_k, *rest.start_tensors, *rest.mask_tensors)
    if any(x is not None for x in of_rows):
        return False
    is_same = rest.bias is None or rest.bias.shape[0] == 1
    return is_same and (rest.alibi_slopes is None or rest.alibi_slopes.dim() == 1)


def _fold(x: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """`[size B, ...]`."""
    if x is None:
        return None
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


def _one_by_one(
    op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]
) -> Any:
    flat, structure = tree_flatten(arguments)
    dims = tree_flatten(in_dims)[0]
    results = []
    for i in range(info.batch_size):
        chosen = [x if d is None else x.select(d, i) for x, d in zip(flat, dims, strict=True)]
        results.append(op(*tree_unflatten(chosen, structure)))
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


for _name, _rule in (
    ("attention_fwd", partial(_map_forward, torch.ops.tilewise.attention_fwd)),
    ("attention_fwd_split", partial(_map_forward, torch.ops.tilewise.attention_fwd_split)),
    ("attention_bwd", _map_backward),
):
    torch.library.register_vmap(f"tilewise::{_name}", _rule, lib=library)
