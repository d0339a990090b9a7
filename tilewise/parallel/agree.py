"""Ranks that do not agree on a call are told so, on every rank, before anything is sent.

One exchange of a few strings at the first use of a call; later calls like it skip it, unless
TILEWISE_CHECK=1. A rank that then goes its own way meets the process group's time-out or abort.
"""

from __future__ import annotations

import atexit
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..core.mask import Mask
from .comm import Link

T = TypeVar("T")
Signature = dict[str, str]


def is_forced() -> bool:
    return os.environ.get("TILEWISE_CHECK") == "1"


@contextmanager
def _before_messages(error: Exception | None) -> Iterator[None]:
    """Where messages fail, a rank that has an error of its own is told that, and both."""
    try:
        yield
    except RuntimeError as failure:
        if error is not None:
            raise error from failure
        raise


def agree(
    op: str, links: Sequence[Link], signature: Signature, error: Exception | None = None
) -> None:
    """Compare the ranks' signatures, all of them over one or two groups that make a mesh.

    Raises: `error` where this rank has one, whether or not the others answer; RuntimeError where
        another has; ValueError where what the ranks call differs.
    """
    mine: tuple[str, Signature] = (_in_words(error), signature)
    found: list[tuple[str, Signature]] = [mine]
    with _before_messages(error):
        for link in links:
            found = [item for part in link.gather_objects(found) for item in part]
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(found):
        if message:
            raise RuntimeError(f"{op}: rank {rank} of this call failed: {message}")
    first = found[0][1]
    for rank, (_, other) in enumerate(found):
        for name in first:
            if first[name] != other[name]:
                raise ValueError(
                    f"{op}: ranks disagree on {name}: rank 0 has {first[name]}, rank {rank} has "
                    f"{other[name]}."
                )


def _in_words(error: Exception | None) -> str:
    """Empty for none. What is not the library's own has its name: its words alone may be none."""
    if error is None:
        return ""
    is_ours = isinstance(error, ValueError | NotImplementedError)
    return str(error) if is_ours and str(error) else f"{type(error).__name__}: {error}"


def agree_by_digest(
    op: str, link: Link, signature: Signature, error: Exception | None = None
) -> None:
    """As `agree`, for every call: 32 bytes say that all is alike, or strings follow."""
    mine = sha256(repr((_in_words(error), sorted(signature.items()))).encode()).digest()
    with _before_messages(error):
        digests = link.gather_digests(mine)
    # All see the same digests, so all go on alike.
    if len(set(digests)) > 1:
        agree(op, (link,), signature, error)
    if error is not None:
        raise error


def describe_mask(mask: Mask) -> str:
    """A mask in a word, with a digest of its tensors; its predicates evaluated."""
    flags, ints, tensors = mask.lower()
    digest = sha256(repr((flags, ints)).encode())
    for tensor in tensors:
        digest.update(repr((tensor.shape, tensor.dtype)).encode())
        digest.update(_bytes_of(tensor))
    return f"flags {flags}, ints {ints}, {len(tensors)} tensors, digest {digest.hexdigest()[:12]}"


def digest_of(tensor: Tensor) -> str:
    """Of the numbers in a tensor, whatever its dtype. Waits for a GPU."""
    return sha256(_bytes_of(tensor.detach().cpu().contiguous().view(torch.uint8))).hexdigest()[:12]


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().numpy().tobytes()


class Memo(Generic[T]):
    """What first uses found, by the groups that made them.

    The members of a group make the same calls, and so remember and forget the same ones. What one
    rank remembered and another did not would let them part at the next agreement.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        # By identity, since a group that is made anew may take an old name. Held, so that no other
        # object takes the identity.
        self._known: dict[tuple[int, ...], tuple[Any, OrderedDict[Any, T]]] = {}
        # A group that is still held while the interpreter ends has threads that may abort it.
        atexit.register(self._known.clear)

    def recall(self, links: Sequence[Link], key: object, find: Callable[[], T]) -> T:
        """What `find` returned at the first use of `key`, or returns."""
        groups = [link.group for link in links]
        which = tuple(map(id, groups))
        _, known = self._known.setdefault(which, (groups, OrderedDict()))
        found = known.get(key)
        if found is None or is_forced():
            found = known[key] = find()
            while len(known) > self._most:
                known.popitem(last=False)
        known.move_to_end(key)
        return found
