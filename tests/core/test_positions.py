"""Where stored rows stand: indices, offsets, own keys, for padded, packed and piecewise calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilewise.core.positions import Positions, Rows

from .brute import bounded


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def per_row(value: Any, rows: Rows) -> list[int]:
    """One number a row: `[m]`, from what broadcasts to `[b, h, m, 1]`."""
    return torch.as_tensor(value).expand_as(rows.i).flatten().tolist()


def all_rows(at: Positions) -> Rows:
    return at.rows((0, 1 if at.is_packed else at.B), (0, at.H), (0, at.M))


def test_padded_rows() -> None:
    rows = Positions(B=3, H=4, M=6, N=10).rows((1, 3), (2, 4), (3, 5))
    assert rows.b.tolist() == [[[[1]]], [[[2]]]]
    assert rows.h.tolist() == [[[[2]], [[3]]]]
    assert rows.i.tolist() == [[[[3], [4]]]]
    assert rows.offset == 4
    assert (rows.key_base, rows.first, rows.stop) == (0, 0, 10)
    assert rows.owned is None


def test_used_lengths_move_the_offset_and_disown_rows() -> None:
    at = Positions(B=3, H=1, M=3, N=5, seqused_q=ints([3, 1, 0]), seqused_k=ints([2, 5, 4]))
    rows = all_rows(at)
    assert torch.as_tensor(rows.offset).flatten().tolist() == [-1, 4, 4]
    assert rows.owned is not None
    assert rows.owned[:, 0, :, 0].tolist() == [[True] * 3, [True, False, False], [False] * 3]
    # A row that is not in use owns no key.
    assert torch.as_tensor(rows.stop)[:, 0, :, 0].tolist() == [[2, 2, 2], [5, 0, 0], [0, 0, 0]]


def test_used_keys_alone_disown_no_row() -> None:
    rows = all_rows(Positions(B=2, H=1, M=2, N=5, seqused_k=ints([3, 0])))
    assert rows.owned is None
    assert torch.as_tensor(rows.offset).flatten().tolist() == [1, -2]
    assert torch.as_tensor(rows.stop).flatten().tolist() == [3, 0]


def test_used_lengths_are_cut_to_what_is_stored() -> None:
    at = Positions(B=2, H=1, M=3, N=5, seqused_q=ints([9, -2]), seqused_k=ints([-1, 70]))
    rows = all_rows(at)
    assert torch.as_tensor(rows.offset).flatten().tolist() == [-3, 5]
    assert int(torch.as_tensor(rows.stop).min()) == 0
    assert int(torch.as_tensor(rows.stop).max()) <= 5


def test_packed_rows_find_their_document() -> None:
    """Documents of 2, 0, 3, 0 queries and 1, 4, 2, 0 keys; two rows past the last document."""
    at = Positions(
        B=4,
        H=1,
        M=7,
        N=9,
        cu_seqlens_q=ints([0, 2, 2, 5, 5]),
        cu_seqlens_k=ints([0, 1, 5, 7, 7]),
    )
    rows = all_rows(at)
    assert rows.owned is not None
    assert per_row(rows.owned, rows) == [True] * 5 + [False] * 2
    assert per_row(rows.b, rows)[:5] == [0, 0, 2, 2, 2]
    assert per_row(rows.i, rows)[:5] == [0, 1, 0, 1, 2]
    assert per_row(rows.offset, rows)[:5] == [-1, -1, -1, -1, -1]
    assert per_row(rows.first, rows)[:5] == [0, 0, 5, 5, 5]
    assert per_row(rows.stop, rows)[:5] == [1, 1, 7, 7, 7]
    # Rows without a document own no key.
    assert per_row(rows.first, rows)[5:] == per_row(rows.stop, rows)[5:]
    j = rows.index(4, 7).j
    assert j is not None
    assert j.expand(1, 1, 7, 3)[0, 0, 2].tolist() == [-1, 0, 1]


def test_empty_documents_before_the_first_row() -> None:
    cu_seqlens = ints([0, 0, 0, 3])
    rows = all_rows(Positions(B=3, H=1, M=3, N=3, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens))
    assert per_row(rows.b, rows) == [2, 2, 2]
    assert per_row(rows.i, rows) == [0, 1, 2]


def test_packed_used_lengths() -> None:
    cu_seqlens = ints([0, 3, 5])
    at = Positions(
        B=2,
        H=1,
        M=5,
        N=5,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        seqused_q=ints([1, 2]),
        seqused_k=ints([3, 1]),
    )
    rows = all_rows(at)
    assert rows.owned is not None
    assert per_row(rows.owned, rows) == [True, False, False, True, True]
    assert [per_row(rows.offset, rows)[m] for m in (0, 3, 4)] == [2, -1, -1]
    assert [per_row(rows.stop, rows)[m] for m in (0, 3, 4)] == [3, 4, 4]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("q_start", [7, ints([7, 7])])
def test_a_piece_counts_from_its_starts_at_offset_zero(packed: bool, q_start: int | Tensor) -> None:
    at = Positions(B=2, H=1, M=4, N=6, q_start=q_start, k_start=ints([3, 5]))
    if packed:
        packing = {"cu_seqlens_q": ints([0, 2, 4]), "cu_seqlens_k": ints([0, 3, 6])}
        rows = all_rows(replace(at, **packing))
        assert per_row(rows.i, rows) == [7, 8, 7, 8]
        indices = [[3, 4, 5], [5, 6, 7]]
    else:
        rows = all_rows(at)
        assert rows.i.expand(2, 1, 4, 1)[:, 0, :, 0].tolist() == [[7, 8, 9, 10]] * 2
        indices = [[3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 9, 10]]
    assert rows.offset == 0
    for b, expected in enumerate(indices):
        # Row 3 is of the second document; padded rows of batch b own all keys of b.
        j = rows.index(*((0, 6) if not packed else (3 * b, 3 * b + 3))).j
        assert j is not None
        own = j.expand(1, 1, 4, 3)[0, 0, 3 * b] if packed else j[b, 0, 0]
        assert own.tolist() == expected


def test_one_start_makes_a_piece() -> None:
    at = Positions(B=1, H=1, M=2, N=8)
    assert at.is_plain and not at.is_piece
    for piece in (replace(at, q_start=0), replace(at, k_start=0)):
        assert piece.is_piece and not piece.is_plain
        assert all_rows(piece).offset == 0
    assert all_rows(at).offset == 6


def test_extent_reaches_as_far_as_any_start() -> None:
    at = Positions(B=2, H=1, M=3, N=4)
    assert at.extent == (3, 4)
    assert replace(at, q_start=5).extent == (8, 4)
    assert replace(at, q_start=ints([2, 9]), k_start=1).extent == (12, 5)


def test_extent_without_a_batch_row() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert Positions(B=0, H=1, M=3, N=4, q_start=none, k_start=none).extent == (3, 4)


def test_what_is_not_packed_is_unpacked_already() -> None:
    at = Positions(B=2, H=1, M=3, N=4, seqused_k=ints([1, 2]), q_start=3)
    assert at.unpacked() is at


def test_unpacked_documents_are_batch_rows_as_long_as_the_longest() -> None:
    """Documents of 2, 0, 3 queries and 1, 4, 2 keys, and rows that belong to none."""
    packing = {"cu_seqlens_q": ints([0, 2, 2, 5]), "cu_seqlens_k": ints([0, 1, 5, 7])}
    start = ints([1, 2, 3])
    at = Positions(B=3, H=2, M=8, N=9, **packing, k_start=start)
    local = at.unpacked()
    assert not local.is_packed
    assert (local.B, local.H, local.M, local.N) == (3, 2, 3, 4)
    assert local.seqused_q is not None and local.seqused_q.tolist() == [2, 0, 3]
    assert local.seqused_k is not None and local.seqused_k.tolist() == [1, 4, 2]
    assert (local.q_start, local.k_start) == (None, start)
    used = replace(at, seqused_q=ints([1, 0, 3]), seqused_k=ints([0, 2, 2])).unpacked()
    assert (used.M, used.N) == (3, 4)
    assert used.seqused_q is not None and used.seqused_q.tolist() == [1, 0, 3]
    assert used.seqused_k is not None and used.seqused_k.tolist() == [0, 2, 2]


def test_no_documents_are_no_rows() -> None:
    none = ints([0])
    local = Positions(B=0, H=1, M=3, N=2, cu_seqlens_q=none, cu_seqlens_k=none).unpacked()
    assert (local.B, local.M, local.N) == (0, 0, 0)


def test_lengths_are_every_tensor_that_places_rows() -> None:
    cu_seqlens, used, start = ints([0, 2]), ints([1]), ints([4])
    at = Positions(1, 1, 2, 2, cu_seqlens, cu_seqlens, used, None, 3, start)
    assert [id(x) for x in at.lengths] == [id(x) for x in (cu_seqlens, cu_seqlens, used, start)]
    assert Positions(1, 1, 2, 2).lengths == []
    assert Positions(1, 1, 2, 2).host_device == torch.device("cpu")


def test_key_distance_is_what_alibi_counts() -> None:
    rows = all_rows(Positions(B=1, H=1, M=2, N=4))
    assert rows.key_distance(0, 4).tolist() == [[[[2, 1, 0, 1], [3, 2, 1, 0]]]]
    piece = all_rows(Positions(B=1, H=1, M=1, N=3, q_start=5, k_start=1))
    assert piece.key_distance(1, 3).flatten().tolist() == [3, 2]


def test_rows_live_where_they_are_asked_for() -> None:
    rows = Positions(B=2, H=1, M=2, N=4).rows((0, 2), (0, 1), (0, 2), torch.device("meta"))
    assert {x.device.type for x in (rows.b, rows.h, rows.i)} == {"meta"}
    at = rows.index(1, 3)
    assert at.j is not None and at.j.device.type == "meta"


@bounded(100)
@given(
    cu_q=st.lists(st.integers(-3, 12), min_size=2, max_size=5),
    cu_k=st.lists(st.integers(-3, 12), min_size=5, max_size=5),
    used=st.lists(st.integers(-3, 12), min_size=4, max_size=4),
    M=st.integers(1, 8),
    N=st.integers(1, 8),
)
def test_lengths_that_lie_reach_nothing_outside_storage(
    cu_q: list[int], cu_k: list[int], used: list[int], M: int, N: int
) -> None:
    """Lengths on a device are not checked, so rows must stay inside what is stored."""
    B = len(cu_q) - 1
    at = Positions(
        B,
        1,
        M,
        N,
        ints(cu_q),
        ints(cu_k[: B + 1]),
        seqused_q=ints(used[:B]),
        seqused_k=ints(used[:B]),
    )
    rows = all_rows(at)
    first, stop = (torch.as_tensor(x).expand_as(rows.i) for x in (rows.first, rows.stop))
    assert int(first.min()) >= 0 and int(first.max()) <= N
    assert int(stop.max()) <= N
    assert int(rows.b.min()) >= 0 and int(rows.b.max()) < B
    assert rows.owned is not None
    assert not bool(((stop > first) & ~rows.owned).any())
