"""Philox4x32-10 against its published vectors and against Python's integers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilewise.core.philox import draw_rng, drop_threshold, keep_mask, keep_tile, philox4x32

WORD = 0xFFFFFFFF

# Random123, kat_vectors: philox4x32 with 10 rounds; counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (WORD, WORD, WORD, WORD),
        (WORD, WORD),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_of_ints(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds, with Python's unbounded integers (Salmon et al., SC 2011, section 3.4)."""
    left0, left1, right0, right1 = counter[0], counter[2], counter[1], counter[3]
    key0, key1 = key
    for step in range(10):
        round0 = (key0 + step * 0x9E3779B9) % 2**32
        round1 = (key1 + step * 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * left0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * left1, 2**32)
        left0, right0 = high1 ^ right0 ^ round0, low1
        left1, right1 = high0 ^ right1 ^ round1, low0
    return left0, right0, left1, right1


def keep_of_ints(seed: int, offset: int, dropout_p: float, row: int, m: int, n: int) -> bool:
    """The design's section 2.9 to the letter: key, counter, lane, threshold."""
    key = (seed % 2**32, (seed >> 32) % 2**32)
    words = philox_of_ints((offset % 2**32, row, m, n // 4), key)
    return words[n % 4] >= round(dropout_p * 2**32)


def words_of(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor(x) for x in counter)
    k0, k1 = (torch.tensor(x) for x in key)
    return [int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1))]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    assert words_of(counter, key) == list(answer)
    assert philox_of_ints(counter, key) == answer


def test_random_counters_equal_integers() -> None:
    words = torch.randint(0, 1 << 32, (6, 200))
    counter, key = tuple(words[:4]), tuple(words[4:])
    got = torch.stack(philox4x32(counter, key), dim=1).tolist()
    for column, answer in zip(words.T.tolist(), got, strict=True):
        assert list(philox_of_ints(column[:4], column[4:])) == answer


RNGS = [
    (0, 0),
    (1, 2),
    # Both are signed on the device: the key is all 64 bits, the counter the low 32.
    (-1, -1),
    (-(1 << 63), (1 << 63) - 1),
    (0x0123456789ABCDEF, 0x7EDCBA9876543210),
]


@pytest.mark.parametrize(("seed", "offset"), RNGS)
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.875])
def test_keep_mask_is_the_design(seed: int, offset: int, dropout_p: float) -> None:
    rows, queries, keys = [0, 5, (1 << 20) + 3], [0, 1, 70000], [0, 1, 2, 3, 4, 7, 130, 131075]
    got = keep_mask(
        torch.tensor([seed, offset]),
        dropout_p,
        torch.tensor(rows).reshape(-1, 1, 1),
        torch.tensor(queries).reshape(1, -1, 1),
        torch.tensor(keys).reshape(1, 1, -1),
    )
    assert got.dtype == torch.bool
    assert got.tolist() == [
        [[keep_of_ints(seed, offset, dropout_p, row, m, n) for n in keys] for m in queries]
        for row in rows
    ]


def axes(rows: range, queries: range) -> tuple[Tensor, Tensor]:
    row = torch.arange(rows.start, rows.stop).reshape(-1, 1, 1)
    return row, torch.arange(queries.start, queries.stop).reshape(1, -1, 1)


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 11])
def test_keep_tile_equals_keep_mask_at_any_alignment(start: int, count: int) -> None:
    rng = torch.tensor([77, -5])
    row, m = axes(range(2, 5), range(6, 8))
    keys = torch.arange(start, start + count)
    expected = keep_mask(rng, 0.4, row, m, keys)
    assert expected.shape == (3, 2, count)
    assert torch.equal(keep_tile(rng, 0.4, row, m, (start, start + count)), expected)


@pytest.mark.parametrize("dropout_p", [0.05, 0.1, 0.5, 0.9])
def test_keep_rate(dropout_p: float) -> None:
    rng = draw_rng(torch.device("cpu"))
    row, m = axes(range(16), range(64))
    keep = keep_tile(rng, dropout_p, row, m, (0, 256))
    # Five standard deviations of a binomial: once in a million seeds, and the seed is fixed.
    spread = 5 * math.sqrt(dropout_p * (1 - dropout_p) / keep.numel())
    assert abs(float(keep.double().mean()) - (1 - dropout_p)) < spread
    # And so for every row, every query and every key by itself.
    for dims in ((1, 2), (0, 2), (0, 1)):
        rates = keep.double().mean(dims)
        size = keep.numel() // rates.numel()
        worst = float((rates - (1 - dropout_p)).abs().max())
        assert worst < 5.5 * math.sqrt(dropout_p * (1 - dropout_p) / size)


def test_rows_queries_seed_and_offset_all_matter() -> None:
    row, m = axes(range(1), range(1))
    base = keep_tile(torch.tensor([3, 4]), 0.5, row, m, (0, 64))
    others = [
        keep_tile(torch.tensor([3, 5]), 0.5, row, m, (0, 64)),
        keep_tile(torch.tensor([2, 4]), 0.5, row, m, (0, 64)),
        keep_tile(torch.tensor([3 + (1 << 32), 4]), 0.5, row, m, (0, 64)),
        keep_tile(torch.tensor([3, 4]), 0.5, row + 1, m, (0, 64)),
        keep_tile(torch.tensor([3, 4]), 0.5, row, m + 1, (0, 64)),
        keep_tile(torch.tensor([3, 4]), 0.5, row, m, (64, 128)),
    ]
    drawn = {tuple(x.flatten().tolist()) for x in (base, *others)}
    assert len(drawn) == 1 + len(others)


def test_threshold() -> None:
    assert drop_threshold(0.0) == 0
    assert drop_threshold(0.5) == 1 << 31
    assert drop_threshold(0.25) == 1 << 30
    for dropout_p in (0.1, 1 / 3, 1 - 2**-33, 2**-33 * 1.5):
        assert drop_threshold(dropout_p) == round(dropout_p * 2**32)


def test_a_word_at_the_threshold_is_kept() -> None:
    word = philox_of_ints((4, 1, 2, 0), (3, 0))[3]
    row, m, rng = torch.tensor(1), torch.tensor([2]), torch.tensor([3, 4])
    for threshold, kept in ((word, True), (word + 1, False)):
        dropout_p = threshold / 2**32
        assert keep_mask(rng, dropout_p, row, m, torch.tensor([3])).tolist() == [kept]
        assert keep_tile(rng, dropout_p, row, m.unsqueeze(-1), (3, 4)).tolist() == [[kept]]


def test_probability_zero_keeps_all() -> None:
    row, m = axes(range(4), range(16))
    assert bool(keep_tile(torch.tensor([1, 2]), 0.0, row, m, (0, 64)).all())


def test_draw_rng_follows_the_seed_and_moves_on() -> None:
    cpu = torch.device("cpu")
    torch.manual_seed(11)
    first = [draw_rng(cpu) for _ in range(3)]
    torch.manual_seed(11)
    again = [draw_rng(cpu) for _ in range(3)]
    torch.manual_seed(12)
    other = draw_rng(cpu)
    assert all(x.dtype == torch.int64 and x.shape == (2,) for x in first)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    drawn = {tuple(x.tolist()) for x in (*first, other)}
    assert len(drawn) == 4


def test_draw_rng_takes_all_64_bits() -> None:
    drawn = torch.stack([draw_rng(torch.device("cpu")) for _ in range(64)])
    for bit in (0, 31, 32, 62, 63):
        assert len(set(((drawn >> bit) & 1).flatten().tolist())) == 2
