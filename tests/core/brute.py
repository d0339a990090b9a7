"""Masks a second time, in plain Python, one query and one key at a time.

A `Case` pairs a mask with a predicate that says the same and shares no code with it. The
strategies draw cases, and expressions over them, for given sizes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tilewise.core.mask import Index, Mask
from tilewise.core.positions import Positions


class At(NamedTuple):
    """One query (b, h, i), one key j; `p` is where the query stands by the op's own offset."""

    b: int
    h: int
    i: int
    j: int
    p: int


class Case(NamedTuple):
    mask: Mask
    sees: Callable[[At], bool]


class Sizes(NamedTuple):
    """How many batch indices, heads, query indices and key indices a mask is asked about."""

    B: int
    H: int
    M: int
    N: int


def bounded(max_examples: int) -> settings:
    """The same examples every time, so many and no more."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(max_examples=max_examples, derandomize=True, deadline=None, phases=phases)


def brute_dense(
    sees: Callable[[At], bool],
    sizes: Sizes,
    offsets: Sequence[int] | None = None,
    q_start: int = 0,
    k_start: int = 0,
) -> Tensor:
    """What `Mask.dense` must return; offsets holds one offset per batch index."""
    B, H, M, N = sizes
    offsets = [N - M] * B if offsets is None else offsets
    seen = [
        sees(At(b, h, i, j, i + offsets[b]))
        for b in range(B)
        for h in range(H)
        for i in range(q_start, q_start + M)
        for j in range(k_start, k_start + N)
    ]
    return torch.tensor(seen, dtype=torch.bool).reshape(B, H, M, N)


def index_of(sizes: Sizes) -> Index:
    """All queries against all keys, aligned bottom-right."""
    axes = (torch.arange(size) for size in sizes)
    shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
    b, h, i, j = (axis.reshape(shape) for axis, shape in zip(axes, shapes, strict=True))
    return Index(b, h, i, j, sizes.N - sizes.M)


def brute_storage(sees: Callable[[At], bool], at: Positions) -> Tensor:
    """bool `[rows, H, M, N]` over storage: which stored key each stored query sees.

    rows is B, or 1 when packed. Walks the documents one by one.
    """
    rows = 1 if at.is_packed else at.B
    visible = torch.zeros(rows, at.H, at.M, at.N, dtype=torch.bool)
    for b in range(at.B):
        m0, m1 = _span(at.cu_seqlens_q, b, at.M)
        n0, n1 = _span(at.cu_seqlens_k, b, at.N)
        used_q, used_k = _entry(at.seqused_q, b, m1 - m0), _entry(at.seqused_k, b, n1 - n0)
        is_piece = at.q_start is not None or at.k_start is not None
        document = brute_dense(
            lambda at, b=b: sees(at._replace(b=b)),
            Sizes(1, at.H, used_q, used_k),
            [0 if is_piece else used_k - used_q],
            _entry(at.q_start, b, 0),
            _entry(at.k_start, b, 0),
        )
        visible[0 if at.is_packed else b, :, m0 : m0 + used_q, n0 : n0 + used_k] = document[0]
    return visible


def _span(cu_seqlens: Tensor | None, b: int, stored: int) -> tuple[int, int]:
    return (0, stored) if cu_seqlens is None else (int(cu_seqlens[b]), int(cu_seqlens[b + 1]))


def _entry(values: int | Tensor | None, b: int, default: int) -> int:
    if values is None:
        return default
    return int(values[b]) if isinstance(values, Tensor) else values


def assert_one_sentence(caught: pytest.ExceptionInfo[Exception], start: str) -> None:
    """The message names the op or argument first and is one line that ends as a sentence."""
    message = str(caught.value)
    assert message.startswith(start)
    assert message.endswith(".")
    assert "\n" not in message


# ---------------------------------------------------------------- strategies


def integers_of(values: Any) -> st.SearchStrategy[Any]:
    """The same lengths as an int32 tensor or an int64 one."""
    return st.sampled_from([torch.int32, torch.int64]).map(lambda t: torch.tensor(values, dtype=t))


@st.composite
def windows(draw: st.DrawFn, sizes: Sizes) -> Case:
    bounds = st.none() | st.integers(0, max(sizes.M, sizes.N))
    left, right = draw(bounds), draw(bounds)
    kind = draw(st.sampled_from(["op", "int", "per batch"]))
    offsets = [draw(st.integers(-sizes.M, sizes.N)) for _ in range(sizes.B)]
    offset: Any = {"op": None, "int": offsets[0]}.get(kind)
    if kind == "per batch":
        offset = draw(integers_of(offsets))

    def sees(at: At) -> bool:
        p = {"op": at.p, "int": at.i + offsets[0], "per batch": at.i + offsets[at.b]}[kind]
        return (left is None or p - left <= at.j) and (right is None or at.j <= p + right)

    if (left, right) == (None, 0):
        return Case(tw.causal(offset), sees)
    return Case(tw.window(left, right, offset=offset), sees)


@st.composite
def document_masks(draw: st.DrawFn, sizes: Sizes) -> Case:
    per_row = draw(st.booleans())
    count = draw(st.integers(1, 4))
    length = st.integers(0, max(1, sizes.N // 2))
    packings = []
    for _ in range(sizes.B if per_row else 1):
        edges = [0]
        for _ in range(count):
            edges.append(edges[-1] + draw(length))
        packings.append(edges)

    def sees(at: At) -> bool:
        edges = packings[at.b if per_row else 0]
        spans = itertools.pairwise(edges)
        return any(low <= at.p < high and low <= at.j < high for low, high in spans)

    return Case(tw.documents(draw(integers_of(packings if per_row else packings[0]))), sees)


@st.composite
def paddings(draw: st.DrawFn, sizes: Sizes) -> Case:
    lengths = [draw(st.integers(0, sizes.N + 1)) for _ in range(sizes.B)]
    if draw(st.booleans()):
        lengths = [lengths[0]] * sizes.B
        given: Any = lengths[0]
    else:
        given = draw(integers_of(lengths) | st.just(lengths))
    constructor = draw(st.sampled_from([tw.key_padding, tw.left_padding, tw.prefix]))
    if constructor is tw.left_padding:
        return Case(constructor(given), lambda at: at.j >= lengths[at.b])
    return Case(constructor(given), lambda at: at.j < lengths[at.b])


def chunks(sizes: Sizes) -> st.SearchStrategy[Case]:
    def case(size: int) -> Case:
        return Case(tw.chunked(size), lambda at: at.p // size == at.j // size)

    return st.integers(1, sizes.N + 1).map(case)


@st.composite
def trees(draw: st.DrawFn, sizes: Sizes) -> Case:
    """Any bits, not trees alone; fewer rows than queries, and more."""
    rows = draw(st.integers(0, min(sizes.M + 1, 20)))
    per_row = draw(st.booleans())
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    table = [[rng.getrandbits(min(rows, 31)) for _ in range(rows)] for _ in range(sizes.B)]
    given = table if per_row else table[0]

    def sees(at: At) -> bool:
        own = at.j - (at.p - at.i)
        if at.i >= rows:
            return False
        bits = table[at.b if per_row else 0][at.i]
        return own < 0 or (own < rows and bool(bits >> own & 1))

    return Case(tw.tree(draw(integers_of(given))), sees)


@st.composite
def interval_masks(draw: st.DrawFn, sizes: Sizes) -> Case:
    """Up to three intervals a query, in any order: some overlap, touch, are empty or reversed."""
    B, H, dims = _table_heads(draw, sizes)
    rows, count = draw(st.integers(1, sizes.M + 1)), draw(st.integers(1, 3))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    table = [
        [
            [
                [(rng.randint(-2, sizes.N), rng.randint(-2, sizes.N + 2)) for _ in range(count)]
                for _ in range(rows)
            ]
            for _ in range(H)
        ]
        for _ in range(B)
    ]

    def sees(at: At) -> bool:
        if at.i >= rows:
            return False
        pairs = table[at.b if B > 1 else 0][at.h if H > 1 else 0][at.i]
        return any(start <= at.j < stop for start, stop in pairs)

    bounds = _leading(draw(integers_of(table)), dims)
    return Case(tw.intervals(bounds[..., 0], bounds[..., 1]), sees)


@st.composite
def block_masks(draw: st.DrawFn, sizes: Sizes) -> Case:
    B, H, dims = _table_heads(draw, sizes)
    block_m, block_n = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    rows = draw(st.integers(1, sizes.M // block_m + 1))
    columns = draw(st.integers(1, sizes.N // block_n + 1))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    density = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    table = [
        [[[rng.random() < density for _ in range(columns)] for _ in range(rows)] for _ in range(H)]
        for _ in range(B)
    ]

    def sees(at: At) -> bool:
        x, y = at.i // block_m, at.j // block_n
        return x < rows and y < columns and table[at.b if B > 1 else 0][at.h if H > 1 else 0][x][y]

    return Case(tw.blocks(_leading(torch.tensor(table), dims), block_m, block_n), sees)


def _table_heads(draw: st.DrawFn, sizes: Sizes) -> tuple[int, int, int]:
    """Leading sizes of a table and how many dims it is given with."""
    dims = draw(st.integers(2, 4))
    B = draw(st.sampled_from([1, sizes.B])) if dims > 2 else 1
    H = draw(st.sampled_from([1, sizes.H])) if dims > 3 else 1
    return B, H, dims


def _leading(table: Tensor, dims: int) -> Tensor:
    """A `[B, H, ...]` table in the form `[...]`, `[B, ...]` or `[B, H, ...]`."""
    return {2: table[0, 0], 3: table[:, 0], 4: table}[dims]


def functions(sizes: Sizes) -> st.SearchStrategy[Case]:
    """Predicates over every kind of subset of (b, h, m, n); the last one indexes a tensor."""
    rng = random.Random(sizes.M * 1000 + sizes.N)
    table = [[rng.random() < 0.5 for _ in range(sizes.N)] for _ in range(sizes.M)]
    lookup = torch.tensor(table, dtype=torch.bool).reshape(sizes.M, sizes.N)
    cases = [
        Case(tw.from_function(lambda b, h, m, n: True), lambda at: True),
        Case(tw.from_function(lambda b, h, m, n: torch.tensor(False)), lambda at: False),
        Case(tw.from_function(lambda b, h, m, n: b == 0), lambda at: at.b == 0),
        Case(tw.from_function(lambda b, h, m, n: h % 2 == 1), lambda at: at.h % 2 == 1),
        Case(tw.from_function(lambda b, h, m, n: m % 3 > 0), lambda at: at.i % 3 > 0),
        Case(tw.from_function(lambda b, h, m, n: n % 5 < 3), lambda at: at.j % 5 < 3),
        Case(
            tw.from_function(lambda b, h, m, n: (b + h + m * n) % 3 == 0),
            lambda at: (at.b + at.h + at.i * at.j) % 3 == 0,
        ),
        Case(tw.from_function(lambda b, h, m, n: lookup[m, n]), lambda at: table[at.i][at.j]),
    ]
    return st.sampled_from(cases)


def exact_leaves(sizes: Sizes) -> st.SearchStrategy[Case]:
    return st.one_of(
        windows(sizes),
        document_masks(sizes),
        paddings(sizes),
        chunks(sizes),
        interval_masks(sizes),
        trees(sizes),
        st.just(Case(tw.full(), lambda at: True)),
    )


def expressions(
    sizes: Sizes, leaves: st.SearchStrategy[Case] | None = None, max_leaves: int = 4
) -> st.SearchStrategy[Case]:
    """Cases joined by `&`, `|` and `~`."""
    if leaves is None:
        leaves = exact_leaves(sizes) | block_masks(sizes) | functions(sizes)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: both(*pair)),
            st.tuples(inner, inner).map(lambda pair: either(*pair)),
            inner.map(negated),
        ),
        max_leaves=max_leaves,
    )


def both(a: Case, b: Case) -> Case:
    return Case(a.mask & b.mask, lambda at: a.sees(at) and b.sees(at))


def either(a: Case, b: Case) -> Case:
    return Case(a.mask | b.mask, lambda at: a.sees(at) or b.sees(at))


def negated(a: Case) -> Case:
    return Case(~a.mask, lambda at: not a.sees(at))
