"""A mask from what a user types: the library's own constructors joined by `&`, `|` and `~`.

`causal() & window(1024, 0)`, `documents([0, 3000, 8192])`, `causal() | prefix(256)`; a name without
parentheses is called without arguments. Any other mask, a predicate among them, comes from a file:
`my_masks.py:name`, where the name is a mask or a function of (b, h, m, n).
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...core import mask_bits, mask_leaves
from ...core.mask import Mask

_MAKERS: dict[str, Callable[..., Mask]] = {
    name: getattr(mask_leaves, name)
    for name in (
        "full", "causal", "window", "documents", "key_padding", "left_padding", "prefix", "chunked",
    )
}  # fmt: skip
_MAKERS["intervals"] = lambda starts, stops: mask_leaves.intervals(
    torch.tensor(starts), torch.tensor(stops)
)
_MAKERS["blocks"] = lambda visible, block_m, block_n: mask_bits.blocks(
    torch.tensor(visible, dtype=torch.bool), block_m, block_n
)
KNOWN = ", ".join(sorted(_MAKERS))


def read(text: str) -> Mask:
    """The mask that a text means.

    Raises: ValueError with half a sentence that says what is wrong.
    """
    path, colon, name = text.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_file(Path(path), name)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        raise ValueError(f"mask {text!r} is no expression such as causal() & window(512, 0)") from (
            None
        )
    try:
        mask = _build(tree.body)
    except (TypeError, RuntimeError, IndexError) as error:
        raise ValueError(f"mask {text!r}: {str(error).rstrip('.')}") from None
    if not isinstance(mask, Mask):
        raise ValueError(f"mask {text!r} is no mask; it may use {KNOWN}, &, | and ~")
    return mask


def _build(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _build(node.left), _build(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_build(node.operand)
    if isinstance(node, ast.Name):
        return _maker(node)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        options = {
            keyword.arg: _literal(keyword.value)
            for keyword in node.keywords
            if keyword.arg is not None
        }
        return _maker(node.func)(*(_literal(x) for x in node.args), **options)
    raise ValueError(f"mask may use {KNOWN}, &, | and ~, not {ast.unparse(node)!r}")


def _maker(name: ast.Name) -> Callable[..., Mask]:
    if name.id not in _MAKERS:
        raise ValueError(f"mask may use {KNOWN}, &, | and ~, not {name.id!r}")
    return _MAKERS[name.id]


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(
            f"mask takes numbers, lists and None as arguments, not {ast.unparse(node)!r}"
        ) from None


def _from_file(path: Path, name: str) -> Mask:
    try:
        found = runpy.run_path(str(path)).get(name)
    except Exception as error:
        # Whatever the user's file raises is what is wrong with it.
        raise ValueError(f"mask file {str(path)!r}: {type(error).__name__}: {error}") from None
    if isinstance(found, Mask):
        return found
    if callable(found):
        return mask_bits.from_function(found)
    raise ValueError(f"mask file {str(path)!r} has no mask and no function {name!r}")
