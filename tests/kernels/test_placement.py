"""Where sequences stand: the table against plain Python, and every row owned by one program."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from tests.core.brute import bounded
from tilewise.core.band import Band
from tilewise.core.mask import UNBOUNDED, Mask
from tilewise.core.positions import Positions
from tilewise.dense.triton_call import TritonCall
from tilewise.kernels import placement
from tilewise.kernels.launch import Config

from .probes import FIELDS, find_places, make_call

pytestmark = pytest.mark.interpreter

FAR = placement.FAR.value
BEYOND = 1 << 60
UNIFORM, PADDED, PACKED, DOCUMENTS = (
    x.value for x in (placement.UNIFORM, placement.PADDED, placement.PACKED, placement.DOCUMENTS)
)
# The table has no columns for index and batch.
STORED_FIELDS = FIELDS[2:]


def clamp(x: int, low: int, high: int) -> int:
    return min(max(x, low), high)


def wrap(x: int) -> int:
    """As int32."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)


def entry(values: int | Tensor | None, b: int, default: int = 0) -> int:
    """Of a `[B]` tensor or of one entry for all."""
    if values is None:
        return default
    if isinstance(values, int):
        return values
    return int(values.reshape(-1)[b if values.numel() > 1 else 0])


@dataclass(frozen=True)
class Twin:
    """`place_sequences`, one sequence at a time."""

    mask: Mask
    at: Positions

    def stored(self, cu_seqlens: Tensor | None, b: int, total: int) -> tuple[int, int]:
        """First row and how many, of what is stored."""
        if cu_seqlens is None:
            return 0, total
        # Each row has an owner, wherever lengths begin.
        first = clamp(int(cu_seqlens[b]), 0, total) if b else 0
        end = total if b == self.at.B else clamp(int(cu_seqlens[b + 1]), first, total)
        return first, end - first

    def fields(self, b: int) -> dict[str, int]:
        at, band = self.at, Band.of(self.mask)
        assert band is not None
        # What no document owns: it stands there, and nothing of it is in use.
        is_nobody = at.is_packed and b == at.B
        q_first, q_stored = self.stored(at.cu_seqlens_q, b, at.M)
        k_first, k_stored = self.stored(at.cu_seqlens_k, b, at.N)
        found = {"q_first": q_first, "q_stored": q_stored, "k_first": k_first, "k_stored": k_stored}
        if is_nobody:
            return {**found, "q_used": 0, "k_used": 0}
        q_used = clamp(entry(at.seqused_q, b, q_stored), 0, q_stored)
        k_used = clamp(entry(at.seqused_k, b, k_stored), 0, k_stored)
        i_base, j_base = (clamp(entry(x, b), -BEYOND, BEYOND) for x in (at.q_start, at.k_start))
        shift = clamp(i_base - j_base, -FAR, FAR) if at.is_piece else k_used - q_used
        position = shift
        if band.offset is not None:
            position = i_base - j_base + clamp(entry(band.offset, b), -BEYOND, BEYOND)
        low = clamp(clamp(entry(band.lows, b, 0), -BEYOND, BEYOND) - j_base, 0, k_stored)
        high = clamp(entry(band.highs, b, UNBOUNDED), -BEYOND, BEYOND) - j_base
        high = min(k_used, clamp(high, 0, FAR))
        # Bases count on in 32 bits.
        i_base, j_base = (wrap(x) for x in (i_base, j_base))
        left = -FAR if band.left == UNBOUNDED else clamp(position - band.left, -FAR, FAR)
        right = FAR if band.right == UNBOUNDED else clamp(position + band.right, -FAR, FAR)
        return {
            **found, "q_used": q_used, "k_used": k_used, "low": low, "high": max(high, low),
            "left": left, "right": right, "shift": shift, "i_base": i_base, "j_base": j_base,
        }  # fmt: skip


def assert_table(mask: Mask, at: Positions) -> None:
    call, twin = make_call(mask, at), Twin(mask, at)
    assert call.place_kind in (PADDED, PACKED)
    table = call.plan_rows(Config(8, 4, 4, 1)).call.place.table
    n_sequences = at.B + 1 if at.is_packed else at.B
    assert table.shape == (n_sequences, placement.FIELDS.value)
    q_tiles = k_tiles = 0
    for b in range(n_sequences):
        row = table[b].tolist()
        got = dict(zip(STORED_FIELDS, row, strict=False))
        expected = twin.fields(b)
        assert {name: got[name] for name in expected} == expected
        # Nothing is read or written outside of storage, whatever the lengths claim.
        assert 0 <= got["low"] <= got["high"] <= got["k_stored"] or expected["k_used"] == 0
        assert got["high"] == got["low"] or got["k_used"] > 0
        assert row[placement.FIRST_Q_TILE.value] == q_tiles
        assert row[placement.FIRST_K_TILE.value] == k_tiles
        q_tiles += -(-got["q_stored"] // 8)
        k_tiles += -(-got["k_stored"] // 4)


def integers(values: list[int], data: st.DataObject) -> Tensor:
    """int64, or int32 where they fit."""
    fits = all(-(1 << 31) <= x < 1 << 31 for x in values)
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32])) if fits else torch.int64
    return torch.tensor(values, dtype=dtype)


def draw_band(data: st.DataObject, B: int, any_int: st.SearchStrategy[int]) -> Mask:
    """A window, of any offset, in bounds or not; it always has a tensor."""
    bound = st.none() | st.integers(0, 9)
    left, right = data.draw(bound), data.draw(bound)
    kind = data.draw(st.sampled_from(["op", "int", "one entry", "per batch"]))
    size = 1 if kind == "one entry" else B
    offset: Any = {"op": None, "int": data.draw(any_int)}.get(kind, "tensor")
    if offset == "tensor":
        offset = integers([data.draw(any_int) for _ in range(size)], data)
    mask = tw.window(left, right, offset=offset)
    for bounds in (tw.left_padding, tw.key_padding):
        # Whatever the window is, the call has to have a table.
        if bounds is tw.key_padding or data.draw(st.booleans()):
            size = data.draw(st.sampled_from([1, B]))
            mask = mask & bounds(integers([data.draw(any_int) for _ in range(size)], data))
    return mask


SMALL = st.integers(-3, 12)
ANY = st.one_of(SMALL, st.sampled_from([1 << 30, -(1 << 31), 1 << 40, -(1 << 45), (1 << 63) - 1]))


@bounded(60)
@given(data=st.data(), lies=st.booleans())
def test_the_table_is_what_lengths_say_cut_to_what_is_stored(
    data: st.DataObject, lies: bool
) -> None:
    """lies: lengths, starts and bounds may be anything, as on a GPU, where nobody reads them."""
    B = data.draw(st.sampled_from([2, 1, 3]))
    M, N = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    number = ANY if lies else SMALL
    at = Positions(B, 1, M, N)
    if data.draw(st.booleans()):
        edges = [
            [data.draw(number) for _ in range(B + 1)]
            if lies
            else [0, *sorted(data.draw(st.integers(0, size)) for _ in range(B))]
            for size in (M, N)
        ]
        q, k = (integers(x, data) for x in edges)
        at = replace(at, cu_seqlens_q=q, cu_seqlens_k=k)
    names = [name for name in ("seqused_q", "seqused_k") if data.draw(st.booleans())]
    at = replace(at, **{n: integers([data.draw(number) for _ in range(B)], data) for n in names})
    if data.draw(st.booleans()):
        starts = integers([data.draw(number) for _ in range(B)], data)
        at = replace(at, q_start=data.draw(st.integers(0, 9)), k_start=starts)
    assert_table(draw_band(data, B, number), at)


@pytest.mark.parametrize(
    "mask",
    [
        tw.causal(offset=torch.tensor([1 << 50, -(1 << 50)])),
        tw.window(3, None, offset=torch.tensor([1 << 50, -(1 << 50)])),
        tw.causal(offset=torch.tensor([(1 << 31) - 1], dtype=torch.int32)),
        tw.causal(offset=1 << 50) & tw.key_padding([5, 9]),
        tw.window(3, None, offset=-(1 << 50)) & tw.key_padding([5, 9]),
        tw.window(3, 3, offset=-(1 << 50)) & tw.key_padding([5, 9]),
    ],
)
def test_offsets_that_no_storage_reaches(mask: Mask) -> None:
    """Unbounded stays so whatever the offset."""
    assert_table(mask, Positions(2, 1, 5, 9))


UNIFORM_CALLS: dict[str, tuple[Mask, Positions]] = {
    "full": (tw.full(), Positions(2, 1, 5, 9)),
    "causal": (tw.causal(), Positions(2, 1, 5, 9)),
    "window, M > N": (tw.window(3, 2), Positions(2, 1, 9, 5)),
    "own offset": (tw.window(3, 2, offset=-4), Positions(2, 1, 5, 9)),
    "own offset, the op's": (tw.causal() & tw.window(3, None, offset=4), Positions(2, 1, 5, 9)),
    "piece": (tw.window(2, 1), Positions(2, 1, 5, 9, q_start=7, k_start=3)),
    "piece with an offset": (tw.causal(offset=2), Positions(2, 1, 5, 9, q_start=7, k_start=3)),
    "piece from one start": (tw.causal(), Positions(2, 1, 5, 9, k_start=3)),
    "huge offset, bounded": (tw.window(3, 3, offset=1 << 50), Positions(2, 1, 5, 9)),
    "huge offset": (tw.causal(offset=1 << 50), Positions(2, 1, 5, 9)),
    "huge negative offset": (tw.window(3, None, offset=-(1 << 50)), Positions(2, 1, 5, 9)),
    "huge window": (tw.window(1 << 50, 1 << 39), Positions(2, 1, 5, 9)),
}


@pytest.mark.parametrize(("mask", "at"), UNIFORM_CALLS.values(), ids=UNIFORM_CALLS.keys())
def test_numbers_serve_every_batch_row_where_no_length_is_a_tensor(
    mask: Mask, at: Positions
) -> None:
    call = make_call(mask, at)
    assert call.place_kind == UNIFORM
    offset = at.N - at.M
    band = Band.of(mask, offset)
    if Band.of(mask) is None and band is not None:
        # One window of the op's offset, as the call reads it.
        mask = tw.window(band.left, band.right)
    for by_rows in (True, False):
        for place in find_places(call, by_rows, 8, 16):
            expected = Twin(mask, at).fields(place.seq.batch)
            assert place.seq.index == place.seq.batch
            assert {name: getattr(place.seq, name) for name in expected} == expected


# ---------------------------------------------------------------- who owns what


def assert_owned_once(call: TritonCall, blocks: tuple[int, int]) -> None:
    """Every stored row of every query head is one program's, and every key of every kv head."""
    for by_rows in (True, False):
        rows, heads = (call.M, call.H) if by_rows else (call.N, call.G)
        block = blocks[0 if by_rows else 1]
        owners = torch.zeros(call.B, heads, rows + block, dtype=torch.int64)
        for place in find_places(call, by_rows, *blocks):
            seq = place.seq
            first, stored = (seq.q_first, seq.q_stored) if by_rows else (seq.k_first, seq.k_stored)
            start = first + place.tile * block
            owners[seq.batch, place.h, start : min(start + block, first + stored)] += 1
        assert torch.equal(owners[..., :rows], torch.ones_like(owners[..., :rows]))
        assert not bool(owners[..., rows:].any())


CALLS: dict[str, tuple[Mask, Positions, int]] = {
    "uniform": (tw.causal(), Positions(2, 4, 17, 30), UNIFORM),
    "padded": (tw.key_padding([3, 0]), Positions(2, 4, 17, 30), PADDED),
    "packed": (
        tw.causal(),
        Positions(
            4, 4, 33, 26,
            cu_seqlens_q=torch.tensor([0, 9, 9, 30, 31]),
            cu_seqlens_k=torch.tensor([0, 0, 8, 24, 25]),
        ),
        PACKED,
    ),
    "no documents": (
        tw.full(),
        Positions(0, 4, 17, 9, cu_seqlens_q=torch.tensor([0]), cu_seqlens_k=torch.tensor([0])),
        PACKED,
    ),
    "used lengths": (
        tw.chunked(5),
        Positions(2, 4, 17, 30, seqused_q=torch.tensor([3, 0]), seqused_k=torch.tensor([0, 30])),
        PADDED,
    ),
    "documents": (tw.documents([0, 3, 3, 30]), Positions(2, 4, 17, 30), DOCUMENTS),
    "documents a row": (
        tw.documents([[0, 12, 20], [0, 0, 44]]) & tw.causal(), Positions(2, 4, 30, 17), DOCUMENTS,
    ),
    "documents of a piece": (
        tw.documents([0, 25, 33]), Positions(2, 4, 20, 18, q_start=9, k_start=20), DOCUMENTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "at", "kind"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("group", [1, 2, 4])
def test_every_row_and_key_has_one_owner(mask: Mask, at: Positions, kind: int, group: int) -> None:
    call = make_call(mask, at, (4, 4 // group))
    assert call.place_kind == kind
    assert_owned_once(call, (8, 16))


@pytest.mark.parametrize("edges", [[90, 10, 149], [7, 7, 7], [149, 0, 3], [-5, 200, 60]])
def test_every_row_has_an_owner_whatever_is_claimed(edges: list[int]) -> None:
    cu_seqlens = torch.tensor(edges)
    at = Positions(2, 1, 149, 149, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    for by_rows in (True, False):
        rows = torch.zeros(149, dtype=torch.bool)
        for place in find_places(make_call(tw.full(), at), by_rows, 16, 16):
            seq = place.seq
            first, stored = (seq.q_first, seq.q_stored) if by_rows else (seq.k_first, seq.k_stored)
            assert 0 <= first <= first + stored <= 149
            rows[first + 16 * place.tile : first + min(stored, 16 * place.tile + 16)] = True
        assert bool(rows.all())


@pytest.mark.parametrize(("count", "length"), [(300, 1), (300, 3), (127, 1), (128, 1), (17000, 1)])
def test_more_documents_than_are_looked_at_at_once(count: int, length: int) -> None:
    """The table is written, and searched, some sequences at a time."""
    lengths = torch.full((count,), length)
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(torch.int32)
    total = int(cu_seqlens[-1])
    at = Positions(count, 1, total, total, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    step = 11 if count < 1000 else 1999
    for by_rows in (True, False):
        for place in find_places(make_call(tw.causal(), at), by_rows, 2, 2, step=step):
            seq = place.seq
            assert seq.q_first == seq.k_first == int(cu_seqlens[seq.index])
            if seq.index < count:
                assert seq.q_stored == length
                # Two tiles a document of three.
                assert 0 <= place.tile < -(-length // 2)


def test_late_tiles_run_first() -> None:
    """Of the rows, since those see most under a causal mask; keys keep their order."""
    call = make_call(tw.causal(), Positions(1, 1, 32, 32))
    assert [place.tile for place in find_places(call, True, 8, 8)] == [3, 2, 1, 0]
    assert [place.tile for place in find_places(call, False, 8, 8)] == [0, 1, 2, 3]


def test_heads_take_turns_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every tile all heads of a group, which is smaller where it comes last."""
    at = Positions(1, 3, 16, 16)
    turns = [(place.h, place.tile) for place in find_places(make_call(tw.causal(), at), True, 8, 8)]
    assert turns == [(0, 1), (1, 1), (2, 1), (0, 0), (1, 0), (2, 0)]
    # 16 rows of K and V, 32 columns in fp32, of two heads.
    monkeypatch.setattr("tilewise.dense.triton_call.L2_BYTES", 2 * 16 * 32 * 4)
    for by_rows, tiles in ((True, [1, 0]), (False, [0, 1])):
        places = find_places(make_call(tw.causal(), at), by_rows, 8, 8)
        expected = [(h, tile) for tile in tiles for h in (0, 1)] + [(2, tile) for tile in tiles]
        assert [(place.h, place.tile) for place in places] == expected
    # Where all tiles are alike, head by head.
    places = find_places(make_call(tw.full(), at), True, 8, 8)
    assert [place.h for place in places] == [0, 0, 1, 1, 2, 2]
