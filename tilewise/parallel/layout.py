"""How the tokens of a sequence are dealt to ranks.

A layout gives every rank a few runs of consecutive tokens. A rank stores its runs one after the
other in ascending order, so its storage is sorted by position. Lengths may differ from rank to rank
and may be 0.

Dims: S tokens of the whole sequence, R ranks, C chunks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.shapes import is_integer
from .visible import area_of_rows, local_intervals

SKIP, PARTIAL, FULL = "skip", "partial", "full"


class Segment(NamedTuple):
    """Queries `[q0, q1)` against keys `[k0, k1)`, positions in the whole sequence, and how much of
    it is visible: "skip", "partial" or "full"."""

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str


@dataclass(frozen=True, eq=False)
class Layout:
    """Which rank holds which tokens.

    Args:
        name: for messages.
        size: S, the tokens of the whole sequence.
        runs: for each rank an int64 CPU tensor `[n, 2]` of runs `[start, stop)`, ascending,
            disjoint, not empty and not touching.
    """

    name: str
    size: int
    runs: tuple[Tensor, ...]
    _cache: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def ranks(self) -> int:
        return len(self.runs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(int((run[:, 1] - run[:, 0]).sum()) for run in self.runs)

    @property
    def key(self) -> str:
        """What the layout is, to be compared; short for any number of runs."""
        if "key" not in self._cache:
            parts = [run.numpy().tobytes() for run in self.runs]
            digest = sha256(b"".join([*parts, repr([len(part) for part in parts]).encode()]))
            self._cache["key"] = f"{self.name}, {self.size} tokens: {digest.hexdigest()[:16]}"
        return str(self._cache["key"])

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The positions of a rank's tokens in the whole sequence, int64 `[length]`, ascending."""
        key = (rank, str(device))
        if key not in self._cache:
            starts, stops = self.runs[self._checked(rank)].unbind(-1)
            lengths = stops - starts
            first = lengths.cumsum(0) - lengths
            shift = torch.repeat_interleave(starts - first, lengths)
            self._cache[key] = (torch.arange(shift.numel(), device="cpu") + shift).to(device)
        positions: Tensor = self._cache[key]
        return positions

    def order(self, device: torch.device | str = "cpu", *, padded: bool = False) -> Tensor:
        """Where each token of the sequence stands in the ranks' storages laid one after the other.

        int64 `[S]`; `torch.cat(shards, dim).index_select(dim, order)` is the whole sequence.
        padded: each rank's storage takes as much room as the longest.
        """
        key = ("order", str(device), padded)
        if key not in self._cache:
            order = torch.empty(self.size, dtype=torch.int64, device="cpu")
            first, longest = 0, max(self.lengths)
            for rank, length in enumerate(self.lengths):
                at = rank * longest if padded else first
                order[self.positions(rank)] = torch.arange(at, at + length, device="cpu")
                first += length
            self._cache[key] = order.to(device)
        found: Tensor = self._cache[key]
        return found

    def shard(self, x: Tensor, rank: int, *, dim: int = 1) -> Tensor:
        """The part of `x` (tokens along `dim`) that `rank` holds. Differentiable.

        A view where the rank holds one run.
        Raises: ValueError where `x` does not hold S tokens along `dim`, or there is no such rank.
        """
        runs = self.runs[self._checked(rank)]
        check_dim("shard", "x", x, dim)
        if x.shape[dim] != self.size:
            raise ValueError(
                f"shard: expected {self.size} tokens along dim {dim}, got {list(x.shape)}."
            )
        if runs.shape[0] > 64:
            return x.index_select(dim, self.positions(rank, x.device))
        parts = [x.narrow(dim, start, stop - start) for start, stop in runs.tolist()]
        if not parts:
            return x.narrow(dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, shards: Sequence[Tensor], *, dim: int = 1) -> Tensor:
        """The whole sequence from the shards of all ranks, in one process. Differentiable.

        Raises: ValueError for shards that are not of this layout.
        """
        if not isinstance(shards, list | tuple) or len(shards) != self.ranks:
            got = len(shards) if isinstance(shards, list | tuple) else type(shards).__name__
            raise ValueError(f"join: expected {self.ranks} shards in a list, got {got}.")
        for rank, (shard, length) in enumerate(zip(shards, self.lengths, strict=True)):
            check_dim("join", f"shard {rank}", shard, dim)
            if shard.shape[dim] != length:
                raise ValueError(
                    f"join: rank {rank} holds {length} tokens, got {list(shard.shape)}."
                )
        return torch.cat(list(shards), dim).index_select(dim, self.order(shards[0].device))

    def merged(self, inner: int) -> Layout:
        """The layout of groups of `inner` neighbouring ranks: group g holds ranks `[g I, g I + I)`.

        Raises: ValueError where the ranks cannot be grouped so.
        """
        if inner < 1 or self.ranks % inner:
            raise ValueError(f"layout: {self.ranks} ranks do not make groups of {inner}.")
        groups = range(0, self.ranks, inner)
        runs = tuple(_join_runs(torch.cat(self.runs[g : g + inner])) for g in groups)
        return Layout(f"{self.name} in groups of {inner}", self.size, runs)

    def within(self, first: int, count: int) -> Layout:
        """How ranks `[first, first + count)` hold what they hold together, numbered from 0."""
        members = [self.positions(rank) for rank in range(first, first + count)]
        together = torch.cat(members).sort().values
        runs = []
        for positions in members:
            at = torch.searchsorted(together, positions)
            runs.append(_join_runs(torch.stack([at, at + 1], -1)))
        return Layout(f"{self.name}, ranks {first} on", together.numel(), tuple(runs))

    def segments(
        self, mask: Mask, rank: int, source: int, *, batch: int = 1, heads: int = 1
    ) -> list[Segment]:
        """Each run of `rank`'s queries against each run of `source`'s keys, and what is visible.

        Exact for a mask of intervals; a mask with bit tiles is "partial" wherever it may be seen.
        batch, heads: B and H, which count where the mask tells them apart.
        """
        _check_mask("segments", mask)
        found = []
        keys = self.runs[self._checked(source)].tolist()
        for q0, q1 in self.runs[self._checked(rank)].tolist():
            for k0, k1 in keys:
                rows, columns = (torch.arange(*x, device="cpu") for x in ((q0, q1), (k0, k1)))
                lows, highs = local_intervals(mask, rows, columns, batch, heads)
                seen = (highs - lows).sum(-1)
                kind = PARTIAL
                if not bool((seen > 0).any()):
                    kind = SKIP
                elif mask.is_exact and bool((seen == k1 - k0).all()):
                    kind = FULL
                found.append(Segment(q0, q1, k0, k1, kind))
        return found

    def areas(self, mask: Mask, *, batch: int = 1, heads: int = 1) -> list[float]:
        """The visible area of each rank's queries: (query, key) pairs, mean over batch and heads.

        What `rank` computes in all. A layout is balanced where these are alike.
        """
        _check_mask("areas", mask)
        rows = area_of_rows(mask, self.size, batch, heads)
        return [float(rows[self.positions(rank)].sum()) for rank in range(self.ranks)]

    def _checked(self, rank: int) -> int:
        if not is_integer(rank) or not 0 <= rank < self.ranks:
            raise ValueError(f"layout {self.name}: rank must be in [0, {self.ranks}), got {rank}.")
        return rank

    def __repr__(self) -> str:
        return f"Layout({self.name}, {self.size} tokens, {self.ranks} ranks)"


def contiguous(size: int, ranks: int) -> Layout:
    """Rank r holds the r-th of R equal parts. Balanced for full attention and windows."""
    _check(size, ranks)
    return _from_chunks("contiguous", size, _cut(0, size, ranks), list(range(ranks)), ranks)


def zigzag(size: int, ranks: int) -> Layout:
    """2 R chunks, of which rank r holds the r-th from the front and the r-th from the back.

    Balanced for causal attention: the front chunk sees little, the back chunk much.
    """
    _check(size, ranks)
    chunks = _cut(0, size, 2 * ranks)
    return _from_chunks("zigzag", size, chunks, _fold(2 * ranks), ranks)


def striped(size: int, ranks: int, *, block: int = 1) -> Layout:
    """Blocks of `block` tokens are dealt out in turn. Balanced for causal attention too.

    Positions next to each other are on different ranks, so ALiBi, bias and dropout, which count by
    position, are refused where there are many blocks.
    """
    _check(size, ranks)
    if not is_integer(block) or block < 1:
        raise ValueError(f"striped: block must be an integer of at least 1, got {block!r}.")
    starts = torch.arange(0, size, block, device="cpu")
    chunks = torch.stack([starts, (starts + block).clamp(max=size)], -1)
    owners = torch.arange(starts.numel(), device="cpu") % ranks
    name = "striped" if block == 1 else f"striped by {block}"
    runs = tuple(_join_runs(chunks[owners == rank]) for rank in range(ranks))
    return Layout(name, size, runs)


def document_zigzag(cu_seqlens: Tensor | Sequence[int], ranks: int, size: int = 0) -> Layout:
    """Zigzag inside every document. Balanced for long documents under a causal mask.

    Args:
        cu_seqlens: cumulative lengths from 0, on the host.
        ranks: how many the sequence is dealt to.
        size: S where tokens follow the last document; they are dealt contiguously.
    Which rank takes a document's first pair of chunks moves on from document to document, so
    that the remainders of short documents do not all fall to the same rank.
    Raises: ValueError for cumulative lengths that do not start at 0, fall, or go past size.
    """
    if not isinstance(cu_seqlens, Tensor | Sequence):
        got = type(cu_seqlens).__name__
        raise ValueError(f"document_zigzag: cu_seqlens must be a tensor or a list, got {got}.")
    listed = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not isinstance(listed, list) or not all(is_integer(edge) for edge in listed):
        raise ValueError(
            f"document_zigzag: cu_seqlens must hold integers [docs + 1], got {listed}."
        )
    edges = [int(edge) for edge in listed]
    if not edges or edges[0] != 0 or edges != sorted(edges):
        raise ValueError(
            f"document_zigzag: cu_seqlens must start at 0 and never fall, got {edges}."
        )
    _check(size, ranks)
    if size and size < edges[-1]:
        raise ValueError(f"document_zigzag: size {size} is less than cu_seqlens[-1] {edges[-1]}.")
    size = size or edges[-1]
    chunks: list[tuple[int, int]] = []
    owners: list[int] = []
    for document, (start, stop) in enumerate(pairwise(edges)):
        chunks += _cut(start, stop, 2 * ranks)
        owners += [(rank + document) % ranks for rank in _fold(2 * ranks)]
    chunks += _cut(edges[-1], size, ranks)
    owners += list(range(ranks))
    return _from_chunks("document zigzag", size, chunks, owners, ranks)


def balanced(
    mask: Mask, size: int, ranks: int, *, chunk: int = 0, batch: int = 1, heads: int = 1
) -> Layout:
    """Chunks dealt so that every rank sees as much area and holds as many chunks as the others.

    Any mask. The chunk of the largest area goes first, each to the rank with the least area that
    may still take one (Graham's longest-processing-time rule, within a count).

    Args:
        chunk: tokens of a chunk; a sixteenth of a rank's share when 0.
        batch, heads: B and H, which count where the mask tells them apart.
    """
    _check_mask("balanced", mask)
    _check(size, ranks)
    if not is_integer(chunk) or chunk < 0:
        raise ValueError(
            "balanced: chunk must be an integer of at least 1, or 0 for the default, "
            f"got {chunk!r}."
        )
    for what, value in (("batch", batch), ("heads", heads)):
        if not is_integer(value) or value < 0:
            raise ValueError(f"balanced: {what} must be an integer >= 0, got {value!r}.")
    chunk = chunk or max(1, size // (16 * ranks))
    edges = [(start, min(size, start + chunk)) for start in range(0, size, chunk)]
    rows = area_of_rows(mask, size, batch, heads).tolist()
    areas = [sum(rows[start:stop]) for start, stop in edges]
    owners = [0] * len(edges)
    room = [len(edges) // ranks + (rank < len(edges) % ranks) for rank in range(ranks)]
    queue = [(0.0, rank) for rank in range(ranks) if room[rank]]
    for at in sorted(range(len(edges)), key=lambda i: (-areas[i], i)):
        area, rank = heapq.heappop(queue)
        owners[at] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(queue, (area + areas[at], rank))
    return _from_chunks("balanced", size, edges, owners, ranks)


# ---------------------------------------------------------------- helpers


def _check_mask(op: str, mask: object) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(f"{op}: mask must be a tilewise Mask, got {type(mask).__name__}.")


def check_layout(op: str, layout: object, ranks: int) -> None:
    """layout is one for so many ranks."""
    if not isinstance(layout, Layout):
        raise ValueError(f"{op}: layout must be a Layout, got {type(layout).__name__}.")
    if layout.ranks != ranks:
        raise ValueError(
            f"{op}: the layout is for {layout.ranks} ranks, the mesh or group has {ranks}."
        )


def check_dim(op: str, name: str, x: object, dim: int) -> None:
    """x is a tensor that has such a dim."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{op}: {name} must be a tensor, got {type(x).__name__}.")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim must be one of {name}'s {x.dim()}, got {dim!r}.")


def _check(size: int, ranks: int) -> None:
    for name, value in (("size", size), ("ranks", ranks)):
        if not is_integer(value):
            raise ValueError(f"layout: {name} must be an integer, got {value!r}.")
    if size < 0 or ranks < 1:
        raise ValueError(f"layout: expected size >= 0 and ranks >= 1, got {size} and {ranks}.")


def _cut(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """`parts` chunks of `[start, stop)` whose lengths differ by at most one."""
    edges = [start + (stop - start) * part // parts for part in range(parts + 1)]
    return list(pairwise(edges))


def _fold(chunks: int) -> list[int]:
    """0, 1, ..., R - 1, R - 1, ..., 1, 0."""
    return [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)]


def _from_chunks(
    name: str, size: int, chunks: Sequence[tuple[int, int]], owners: list[int], ranks: int
) -> Layout:
    edges = torch.tensor(chunks, dtype=torch.int64, device="cpu").reshape(-1, 2)
    owner = torch.tensor(owners, dtype=torch.int64, device="cpu")
    runs = tuple(_join_runs(edges[owner == rank]) for rank in range(ranks))
    return Layout(name, size, runs)


def _join_runs(runs: Tensor) -> Tensor:
    """Sorted, without empty ones, touching ones joined."""
    runs = runs[runs[:, 1] > runs[:, 0]]
    runs = runs[runs[:, 0].argsort()]
    if runs.shape[0] < 2:
        return runs
    apart = runs[1:, 0] != runs[:-1, 1]
    yes = torch.ones(1, dtype=torch.bool, device="cpu")
    return torch.stack([runs[torch.cat([yes, apart]), 0], runs[torch.cat([apart, yes]), 1]], -1)
