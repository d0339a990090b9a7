"""Bool tensors as Tilewise masks, and a Tilewise mask as a bool tensor.

Dims: B batch, H query heads, M query length, N key length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._pytree import tree_leaves, tree_map_only

from ..core.mask import Mask
from ..core.mask_bits import blocks, from_function
from ..core.mask_leaves import full, key_padding, left_padding

Predicate = Callable[..., Tensor]


class MaskTensor(Tensor):
    """A Tilewise mask in the form that modeling code expects: a bool tensor `[B, 1, M, N]`.

    The attention function reads `mask` and no storage stands behind it. A model that slices its
    mask or joins it with others gets a `MaskTensor` of the dense result. A model that uses it as
    numbers expects eager's additive mask and would go on with ones and zeros: that raises.
    """

    mask: Mask | None
    sizes: tuple[int, ...]
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls,
        sizes: tuple[int, ...],
        device: torch.device,
        mask: Mask | None = None,
        dense: Tensor | None = None,
    ) -> MaskTensor:
        """Of `mask`, or of `dense`, which need not be 4-D (then `mask` is None)."""
        self: MaskTensor = Tensor._make_wrapper_subclass(
            cls, sizes, dtype=torch.bool, device=device
        )
        if dense is not None and dense.dim() == 4:
            mask = visible_elements(dense, *sizes[2:])
        self.mask, self.sizes, self._dense = mask, sizes, dense
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = (args, kwargs or {})
        is_refused = func._schema.is_mutable or _has_floats(inputs)
        if not is_refused:
            args, kwargs = tree_map_only(cls, cls.dense, inputs)
            result = func(*args, **kwargs)
            is_refused = _has_floats(result)
        if is_refused:
            raise NotImplementedError(
                f"{func} was called on a mask that Tilewise made: this model computes with its "
                "attention mask itself, or does not take its attention from Transformers' "
                'AttentionInterface. Load it with attn_implementation="eager" or "sdpa".'
            )
        return tree_map_only(Tensor, _keep, result)

    def dense(self) -> Tensor:
        if self._dense is None:
            assert self.mask is not None
            self._dense = self.mask.dense(*self.sizes, device=self.device)
        return self._dense

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask!r}, sizes={self.sizes})"


def _has_floats(values: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in tree_leaves(values))


def _keep(x: Tensor) -> Tensor:
    return MaskTensor(tuple(x.shape), x.device, dense=x) if x.dtype == torch.bool else x


def visible_keys(seen: Tensor, M: int) -> Mask:
    """The mask that shows every query the keys of bool `[B, N]`."""
    by_key = blocks(seen[:, None], block_m=max(1, M), block_n=1)
    if torch.compiler.is_compiling() or seen.numel() == 0:
        return by_key
    N = seen.shape[1]
    # The form of the padding decides, so the host has to know it: one read for all of it.
    order = torch.arange(N, device=seen.device)
    stops = torch.where(seen, order + 1, 0).amax(-1)
    starts = torch.where(seen, order, stops[:, None]).amin(-1)
    is_run = (stops - starts == seen.sum(-1)).all()
    first, last, whole = torch.stack([starts.max(), stops.min(), is_run.long()]).tolist()
    if not whole:
        return by_key
    if first == 0:
        return full() if last == N else key_padding(stops)
    # An empty row has no start either: its stop, 0, hides everything.
    return left_padding(starts) if last == N else left_padding(starts) & key_padding(stops)


def visible_elements(seen: Tensor, M: int, N: int) -> Mask:
    """The mask of a bool tensor `[B or 1, H or 1, M or 1, N or 1]`."""

    def look_up(*index: Tensor) -> Tensor:
        # An axis of size 1 stays one: what is the same for all heads is kept once.
        axes = zip(index, seen.shape, strict=True)
        return seen[tuple(i if size > 1 else i.new_zeros((1,) * 4) for i, size in axes)]

    return evaluated_by_tile(look_up, (*seen.shape[:2], M, N), seen.device)


def over_scalars(predicate: Predicate) -> Predicate:
    """A predicate of four scalars as one of index tensors that broadcast to four axes."""
    over = predicate
    for axis in (3, 2, 1, 0):
        over = torch.vmap(over, in_dims=tuple(0 if i == axis else None for i in range(4)))

    def ask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        # Under vmap a tensor cannot be indexed by a scalar tensor without this.
        with TransformGetItemToIndex():
            return over(b.reshape(-1), h.reshape(-1), m.reshape(-1), n.reshape(-1))

    return ask


def evaluated_by_tile(
    predicate: Predicate, sizes: tuple[int, int, int, int], device: torch.device
) -> Mask:
    """`from_function`; element by element where packing bits would cost a read on the host."""
    M, N = sizes[2:]
    if not torch.compiler.is_compiling() and (M > 1 or device.type == "cpu"):
        return from_function(predicate)
    index = []
    for axis, size in enumerate(sizes):
        shape = [-1 if axis == other else 1 for other in range(4)]
        index.append(torch.arange(size, device=device).reshape(shape))
    seen = predicate(*index)
    shape = torch.broadcast_shapes(seen.shape, (1, 1, M, N))
    return blocks(seen.expand(shape), block_m=1, block_n=1)
