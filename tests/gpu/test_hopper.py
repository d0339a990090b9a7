"""The hopper backend on its GPU: ragged shapes, hard inputs, isolation, layouts, graphs, streams.

`python -m pytest --device cuda tests/gpu/test_hopper.py`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.cases.common import alibi, formula
from tests.gpu.common import DEVICE, are_equal, ints, normal
from tests.gpu.hopper import (
    CU_K,
    CU_Q,
    HIDING,
    NEEDS_HOPPER,
    RAGGED,
    WINDOWS,
    band,
    compiled,
    draw,
    no_hang,
)
from tests.helpers import check_call
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.dense import warm
from tilewise.report.verify import poisoned_memory

pytestmark = [pytest.mark.gpu, NEEDS_HOPPER]
__all__ = ["compiled", "no_hang"]
BF16, FP16 = torch.bfloat16, torch.float16


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tw.Partial:
    with torch.no_grad():
        return tw.attention_partial(q, k, v, backend="hopper", **options)


def check(x: list[Tensor], visible: Tensor, **options: Any) -> None:
    """Out and lse within the error budget, into memory that was NaN."""
    terms = {name: options[name] for name in ("softcap", "sinks", "scale") if name in options}
    with poisoned_memory():
        out, lse = attend(*x, **options)
    exact, exact_lse = formula(*(t.double() for t in x), visible, **terms)
    eager, _ = formula(*x, visible, **terms)
    assert_within_budget(out, exact, eager, name="out")
    assert_lse_within_budget(lse, exact_lse, x[0].dtype)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("M", RAGGED)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_ragged_lengths(D: int, M: int) -> None:
    for N in RAGGED:
        x = draw(2, M, N, D=D, seed=N)
        check(x, band(M, N, None, None))
        check(x, band(M, N, None, 0), mask=tw.causal())


@pytest.mark.parametrize("D", [64, 128, 256])
def test_windows(D: int) -> None:
    for M, N, left, right in WINDOWS:
        shift = min(right, 0)
        mask = tw.window(left + shift, right - shift, offset=N - M + shift)
        check(draw(1, M, N, (3, 3), D=D), band(M, N, left, right), mask=mask)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("D", [64, 128])
def test_long_rows(D: int, dtype: torch.dtype) -> None:
    x = draw(1, 2100, 4000, (4, 2), D=D, dtype=dtype)
    check(x, band(2100, 4000, None, 0), mask=tw.causal())


@pytest.mark.parametrize(
    ("D", "E"), [(16, 16), (59, 37), (80, 80), (64, 128), (192, 128), (96, 256)]
)
def test_other_head_dims(D: int, E: int) -> None:
    x = draw(2, 130, 300, D=D, E=E)
    check(x, band(130, 300, None, 0), mask=tw.causal())


def test_batch_times_heads_of_70000() -> None:
    x = draw(7000, 3, 5, (10, 5), D=64)
    check(x, band(3, 5, None, 0), mask=tw.causal())


@pytest.mark.parametrize(("B", "M", "N"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)])
def test_nothing_to_do(B: int, M: int, N: int) -> None:
    x = draw(B, M, N)
    out, lse = attend(*x)
    assert out.shape == x[0].shape and lse.shape == (B, 2, M)
    assert not bool(out.any()) and bool(lse.isneginf().all())
    sinks = normal(2, dtype=torch.float32)
    out, lse = attend(*x, sinks=sinks)
    assert not bool(out.any())
    if N == 0:
        expected = sinks.double()[None, :, None].expand_as(lse)
        assert_lse_within_budget(lse, expected, BF16)


def test_fp32_partials_merge_to_the_whole() -> None:
    x = draw(2, 300, 700, D=128)
    q, k, v = x
    halves = [
        attend(q, k[:, span], v[:, span], mask=tw.causal(), q_start=400, k_start=span.start,
               out_dtype=torch.float32)
        for span in (slice(0, 350), slice(350, 700))
    ]  # fmt: skip
    out, lse = tw.merge(halves)
    seen = band(300, 700, None, 0)
    exact, exact_lse = formula(*(t.double() for t in x), seen)
    eager, _ = formula(*x, seen)
    assert_within_budget(out.to(BF16), exact, eager, name="out")
    assert_lse_within_budget(lse, exact_lse, BF16)


def test_gradients() -> None:
    tensors = dict(zip("qkv", draw(2, 200, 300, (4, 2), D=64), strict=True))
    check_call("attention_partial", tensors, backend="hopper", mask=tw.causal())


def test_auto_takes_it() -> None:
    x = draw(1, 65, 300, D=128)
    assert tw.explain_backend(*x).name == "hopper"
    assert tw.explain_backend(*x, dropout_p=0.5).name == "triton"
    assert are_equal(tw.attention_partial(*x), attend(*x))


# ---------------------------------------------------------------- hard inputs

S = 1000


def rise(nats_a_block: float) -> Callable[..., None]:
    """Logits that rise from one visited block of 128 keys to the next: the last come first."""

    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        q[..., 0] = q.shape[-1] ** 0.5
        ramp = torch.arange(S - 1, -1, -1, device=DEVICE) * (nats_a_block / 128)
        k[..., 0] = ramp.to(k.dtype)[:, None]

    return change


def large_key(at: int) -> Callable[..., None]:
    return lambda q, k, v: k[:, at].mul_(100)


def shift(nats: float) -> Callable[..., None]:
    def change(q: Tensor, k: Tensor, v: Tensor) -> None:
        q[..., 0], k[..., 0] = 16.0, nats / 16 * q.shape[-1] ** 0.5

    return change


def large(q: Tensor, k: Tensor, v: Tensor) -> None:
    q.mul_(8)
    k.mul_(8)


HARD: dict[str, Callable[..., None]] = {
    "3 nats a block": rise(3),
    "30 nats a block": rise(30),
    "300 nats a block": rise(300),
    "a large key visited last": large_key(3),
    "a large key visited first": large_key(-3),
    "q and k x8": large,
    # What fp16 products hold of 1e5.
    "shifted up": shift(3e3),
    "shifted down": shift(-3e3),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize(
    ("D", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (64, FP16), (128, FP16)]
)
def test_hard_inputs(D: int, dtype: torch.dtype, name: str) -> None:
    x = draw(1, S, S, (6, 6), D=D, dtype=dtype)
    HARD[name](*x)
    check(x, band(S, S, None, None))
    check(x, band(S, S, None, 0), mask=tw.causal())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_shift_of_1e5_changes_what_its_rounding_does(D: int, sign: int) -> None:
    """Every product holds 1e5 nats, of which each row's softmax knows nothing; S in fp32 does."""
    x = draw(1, S, S, (2, 2), D=D)
    shift(sign * 1e5)(*x)
    check(x, band(S, S, None, 0), mask=tw.causal())


@pytest.mark.parametrize("D", [64, 128, 256])
def test_a_row_of_nan_stays_alone(D: int) -> None:
    q, k, v = draw(1, S, S, (2, 2), D=D)
    expected, expected_lse = attend(q, k, v, mask=tw.causal())
    q[:, 77, 1, 5] = float("nan")
    out, lse = attend(q, k, v, mask=tw.causal())
    assert bool(out[:, 77, 1].isnan().all()) and bool(lse[:, 1, 77].isnan().all())
    expected[:, 77, 1], expected_lse[:, 1, 77] = out[:, 77, 1], lse[:, 1, 77]
    assert torch.equal(out.nan_to_num(3.0), expected.nan_to_num(3.0))
    assert torch.equal(lse.nan_to_num(3.0), expected_lse.nan_to_num(3.0))


# ---------------------------------------------------------------- tall tiles, whatever the rows


@contextmanager
def tiles(*, are_short: bool) -> Iterator[None]:
    """Those of narrow heads, whatever the rows."""
    from tilewise.dense import hopper_call

    warm._kept.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_call, "has_short_tiles", lambda rows, *, is_uneven: are_short)
        try:
            yield
        finally:
            warm._kept.clear()


@pytest.fixture
def tall_tiles() -> Iterator[None]:
    with tiles(are_short=False):
        yield


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("M", RAGGED)
def test_ragged_lengths_of_tall_tiles(M: int) -> None:
    test_ragged_lengths(64, M)


@pytest.mark.usefixtures("tall_tiles")
def test_windows_of_tall_tiles() -> None:
    test_windows(64)


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_hard_inputs_of_tall_tiles(dtype: torch.dtype, name: str) -> None:
    test_hard_inputs(64, dtype, name)


# ---------------------------------------------------------------- what else a score is made of


def check_terms(D: int, dtype: torch.dtype, factor: float, **options: Any) -> None:
    """causal, with logits that a softcap bends, against the formula."""
    q, k, v = draw(2, 300, 500, (4, 2), D=D, dtype=dtype)
    q.mul_(factor)
    visible, terms = band(300, 500, None, 0), dict(options)
    slopes = terms.pop("alibi_slopes", None)
    if slopes is not None:
        rows = torch.arange(300, device=DEVICE)[:, None] + 200
        added = alibi(slopes.double(), rows, torch.arange(500, device=DEVICE)[None])
        terms["bias"] = added if slopes.dim() == 2 else added[None]
    with poisoned_memory():
        out, lse = attend(q, k, v, mask=tw.causal(), **options)
    exact, exact_lse = formula(*(x.double() for x in (q, k, v)), visible, **terms)
    eager, _ = formula(q, k, v, visible, **terms)
    assert_within_budget(out, exact, eager, name="out")
    assert_lse_within_budget(lse, exact_lse, dtype)


def slopes_of(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.float32, seed=8).abs()


TERMS: dict[str, Callable[[], dict[str, Any]]] = {
    "softcap": lambda: {"softcap": 5.0},
    "wide softcap": lambda: {"softcap": 50.0},
    "ALiBi [H]": lambda: {"alibi_slopes": slopes_of(4)},
    "ALiBi [B, H]": lambda: {"alibi_slopes": slopes_of(2, 4)},
    "steep ALiBi": lambda: {"alibi_slopes": 100 * slopes_of(4)},
    "ALiBi upwards": lambda: {"alibi_slopes": -slopes_of(4)},
    "sinks": lambda: {"sinks": normal(4, dtype=torch.float32, seed=9)},
    "scale below 0": lambda: {"scale": -0.2},
    "scale 0": lambda: {"scale": 0.0},
    "all": lambda: {
        "softcap": 8.0, "alibi_slopes": slopes_of(4), "scale": 0.3,
        "sinks": normal(4, dtype=torch.float32, seed=9),
    },
}  # fmt: skip


# All of them compile to one kernel; those of one alone are tried at one head dim.
WITH_TERMS = [
    *((128, BF16, name) for name in TERMS),
    *((D, dtype, "all") for D, dtype in ((64, BF16), (256, BF16), (128, FP16))),
]


@pytest.mark.parametrize(("D", "dtype", "name"), WITH_TERMS)
def test_terms(D: int, dtype: torch.dtype, name: str) -> None:
    check_terms(D, dtype, 1.0, **TERMS[name]())
    check_terms(D, dtype, 8.0, **TERMS[name]())


def test_gradients_of_terms() -> None:
    tensors = dict(zip("qkv", draw(2, 200, 300, (4, 2), D=64), strict=True))
    tensors |= {"alibi_slopes": slopes_of(4), "sinks": normal(4, dtype=torch.float32, seed=9)}
    check_call("attention", tensors, backend="hopper", mask=tw.causal(), softcap=8.0)


# ---------------------------------------------------------------- isolation and layouts


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("D", [64, 128, 256])
def test_what_no_query_sees_does_not_exist(D: int, name: str) -> None:
    M, N, mask, edges = HIDING[name]
    q, k, v = draw(1, M, N, (2, 2), D=D)
    hidden = ~band(M, N, *edges).any(0)
    assert bool(hidden.any())
    expected = attend(q, k, v, mask=mask)
    assert bool(expected.out.isfinite().all())
    for value in (float("nan"), float("inf"), 1e30):
        k[:, hidden], v[:, hidden] = value, value
        assert are_equal(attend(q, k, v, mask=mask), expected)


@pytest.mark.parametrize("D", [64, 128])
def test_padding_does_not_exist(D: int) -> None:
    q, k, v = draw(3, 200, 300, D=D)
    lengths = ints(300, 0, 130)
    mask = tw.causal() & tw.key_padding(lengths)
    expected = attend(q, k, v, mask=mask)
    hidden = torch.arange(300, device=DEVICE) >= lengths[:, None]
    for value in (float("nan"), float("inf")):
        k[hidden], v[hidden] = value, value
        assert are_equal(attend(q, k, v, mask=mask), expected)
    seen = band(200, 300, None, 0) & ~hidden[:, None, None]
    check([q, k.masked_fill(hidden[..., None, None], 0), v.masked_fill(hidden[..., None, None], 0)],
          seen, mask=mask)  # fmt: skip


def _fused(D: int) -> list[Tensor]:
    return list(normal(2, 500, 3, 4, D).unbind(2))


LAYOUTS: dict[str, Callable[[int], list[Tensor]]] = {
    "fused qkv": _fused,
    "heads first": lambda D: [normal(2, 4, 500, D, seed=i).transpose(1, 2) for i in range(3)],
    "sliced": lambda D: [normal(3, 501, 4, D, seed=i)[1:, 1:] for i in range(3)],
    "batches and heads repeat": lambda D: [
        normal(2, 500, 4, D),
        normal(1, 500, 4, D, seed=1).expand(2, -1, -1, -1),
        normal(2, 500, 1, D, seed=2).expand(-1, -1, 4, -1),
    ],
    "last dim strided": lambda D: [
        normal(2, 500, D, 4, seed=i).transpose(2, 3) for i in range(3)
    ],
    "unaligned": lambda D: [normal(2, 500, 4, D + 1, seed=i)[..., 1:] for i in range(3)],
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("D", [64, 128])
def test_strides_change_no_bit(D: int, name: str) -> None:
    x = LAYOUTS[name](D)
    expected = attend(*(t.contiguous() for t in x), mask=tw.causal())
    assert are_equal(attend(*x, mask=tw.causal()), expected)


@pytest.mark.parametrize("heads", [(8, 1), (6, 3), (8, 2)])
def test_grouped_heads_are_repeated_heads(heads: tuple[int, int]) -> None:
    q, k, v = draw(2, 700, 900, heads, D=128)
    wide = [x.repeat_interleave(heads[0] // heads[1], 2) for x in (k, v)]
    for mask in (tw.causal(), tw.full()):
        assert are_equal(attend(q, k, v, mask=mask), attend(q, *wide, mask=mask))


# ---------------------------------------------------------------- launches


@pytest.mark.parametrize("D", [64, 128, 256])
def test_every_run_gives_the_same_bits(D: int) -> None:
    x = draw(2, 1000, 1500, (6, 2), D=D)
    rise(30)(*(t[:, :S] for t in x))
    first = attend(*x, mask=tw.causal())
    for _ in range(1000):
        assert are_equal(attend(*x, mask=tw.causal()), first)


def test_graphs_replay_with_the_contents_of_the_moment() -> None:
    """Two graphs, replayed side by side and in turn with eager calls."""
    x = draw(2, 500, 700, (4, 2), D=128)
    masks = (tw.causal(), tw.full())
    attend(*x, mask=masks[0])
    graphs, results = [], []
    for mask in masks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([attend(*x, mask=mask) for _ in range(3)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for seed in range(3):
        for i, t in enumerate(x):
            t.copy_(normal(*t.shape, seed=10 * seed + i))
        torch.cuda.synchronize()
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(5):
                    graph.replay()
        torch.cuda.synchronize()
        for mask, found in zip(masks, results, strict=True):
            expected = attend(*x, mask=mask)
            assert all(are_equal(one, expected) for one in found)


def test_streams_side_by_side() -> None:
    inputs = [draw(2, 900, 900, (4, 4), D=128, seed=10 * i) for i in range(4)]
    expected = [attend(*x, mask=tw.causal()) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[tw.Partial]] = [[] for _ in inputs]
    for _ in range(20):
        for stream, x, kept in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attend(*x, mask=tw.causal()))
    torch.cuda.synchronize()
    for kept, one in zip(found, expected, strict=True):
        assert all(are_equal(x, one) for x in kept)


def test_a_call_waits_for_its_own_stream() -> None:
    """The stream is kept busy and then writes the inputs: a call on another would read zeros."""
    x = draw(2, 300, 300, D=64)
    expected = attend(*x)
    late = [torch.zeros_like(t) for t in x]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for t, value in zip(late, x, strict=True):
            t.copy_(value)
        found = attend(*late)
    torch.cuda.synchronize()
    assert are_equal(found, expected)


# ---------------------------------------------------------------- documents


def packed(D: int, T: int, S: int, **options: Any) -> list[Tensor]:
    return [x[0] for x in draw(1, T, S, D=D, **options)]


def attend_packed(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tw.Partial:
    with torch.no_grad():
        return tw.attention_varlen_partial(q, k, v, backend="hopper", **options)


PACKED_MASKS = {"full": tw.full(), "causal": tw.causal(), "window": tw.window(40, 3)}


@pytest.mark.parametrize("name", PACKED_MASKS)
@pytest.mark.parametrize(("D", "are_short"), [(64, False), (64, True), (128, False), (256, False)])
def test_a_document_is_what_it_is_alone(D: int, are_short: bool, name: str) -> None:
    """To the bit by tiles of one size, whatever stands in other documents and in rows of none."""
    with tiles(are_short=are_short):
        _check_documents_alone(D, name)


def _check_documents_alone(D: int, name: str) -> None:
    mask = PACKED_MASKS[name]
    q, k, v = packed(D, 1400, 1500)
    lengths = {"cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K)}
    for value in (1.0, float("nan"), float("inf")):
        q[CU_Q[-1] :], k[CU_K[-1] :], v[CU_K[-1] :] = value, value, value
        with poisoned_memory():
            out, lse = attend_packed(q, k, v, mask=mask, **lengths)
        assert not bool(out[CU_Q[-1] :].any()) and bool(lse[:, CU_Q[-1] :].isneginf().all())
        for rows, keys in zip(pairwise(CU_Q), pairwise(CU_K), strict=True):
            m, n = slice(*rows), slice(*keys)
            alone = attend(q[None, m], k[None, n], v[None, n], mask=mask)
            assert torch.equal(out[m], alone.out[0]) and torch.equal(lse[:, m], alone.lse[0])


@pytest.mark.parametrize("D", [64, 128])
def test_what_is_in_one_document_reaches_no_other(D: int) -> None:
    q, k, v = packed(D, 1320, 1465)
    lengths = {"cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K), "mask": tw.causal()}
    expected = attend_packed(q, k, v, **lengths)
    for x, cu in ((q, CU_Q), (k, CU_K), (v, CU_K)):
        x[cu[4] : cu[5]] = float("nan")
    out, lse = attend_packed(q, k, v, **lengths)
    rows = torch.ones(1320, dtype=torch.bool, device=DEVICE)
    rows[CU_Q[4] : CU_Q[5]] = False
    assert bool(out[~rows].isnan().any())
    assert torch.equal(out[rows], expected.out[rows])
    assert torch.equal(lse[:, rows], expected.lse[:, rows])


@pytest.mark.parametrize("D", [64, 128])
def test_rows_past_a_used_length_do_not_exist(D: int) -> None:
    used_q, used_k = (1, 0, 60, 3, 128, 999, 0, 63), (7, 5, 0, 0, 150, 1000, 3, 65)
    q, k, v = packed(D, 1320, 1465)
    lengths = {
        "cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K), "mask": tw.causal(),
        "seqused_q": ints(*used_q), "seqused_k": ints(*used_k),
    }  # fmt: skip
    expected = attend_packed(q, k, v, **lengths)
    for i in range(8):
        q[CU_Q[i] + used_q[i] : CU_Q[i + 1]] = float("nan")
        k[CU_K[i] + used_k[i] : CU_K[i + 1]] = float("nan")
        v[CU_K[i] + used_k[i] : CU_K[i + 1]] = float("inf")
    found = attend_packed(q, k, v, **lengths)
    assert are_equal(found, expected)
    for i in range(8):
        m = slice(CU_Q[i], CU_Q[i] + used_q[i])
        n = slice(CU_K[i], CU_K[i] + used_k[i])
        alone = attend(q[None, m], k[None, n], v[None, n], mask=tw.causal())
        assert torch.equal(found.out[m], alone.out[0])
        assert not bool(found.out[m.stop : CU_Q[i + 1]].any())


def test_many_short_documents() -> None:
    """More than one look of the search, some empty, against documents that a mask makes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 9, (1000,), generator=generator)
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).to(DEVICE, torch.int32)
    total = int(cu[-1])
    q, k, v = packed(64, total, total)
    out, lse = attend_packed(q, k, v, cu_seqlens_q=cu, mask=tw.causal())
    index = torch.repeat_interleave(torch.arange(1000), sizes).to(DEVICE)
    visible = band(total, total, None, 0) & (index[:, None] == index)
    x = [t[None] for t in (q, k, v)]
    exact, exact_lse = formula(*(t.double() for t in x), visible)
    eager, _ = formula(*x, visible)
    assert_within_budget(out[None], exact, eager, name="out")
    assert_lse_within_budget(lse[None], exact_lse, BF16)
    masked = attend(*x, mask=tw.causal() & tw.documents(cu))
    assert_within_budget(masked.out, exact, eager, name="out of a mask")
    assert_lse_within_budget(masked.lse, exact_lse, BF16)


def test_rows_that_start_elsewhere() -> None:
    """Pieces whose starts, and windows whose offsets, are on the device, one a batch row."""
    q, k, v = draw(2, 130, 300, D=128)
    q_start, k_start = ints(200, 30), ints(0, 90)
    out, lse = attend(q, k, v, mask=tw.window(99, 0), q_start=q_start, k_start=k_start)
    offsets = (q_start - k_start).tolist()
    visible = torch.stack([band(130, 300, 99, 0, offset) for offset in offsets])[:, None]
    exact, exact_lse = formula(*(x.double() for x in (q, k, v)), visible)
    eager, _ = formula(q, k, v, visible)
    assert_within_budget(out, exact, eager, name="out")
    assert_lse_within_budget(lse, exact_lse, BF16)
    mask = tw.window(99, 0, offset=q_start - k_start)
    assert are_equal(attend(q, k, v, mask=mask), (out, lse))


def test_packed_fp32_partials() -> None:
    q, k, v = packed(128, 1320, 1465)
    lengths = {"cu_seqlens_q": ints(*CU_Q), "cu_seqlens_k": ints(*CU_K)}
    out, lse = attend_packed(q, k, v, out_dtype=torch.float32, **lengths)
    rounded, same_lse = attend_packed(q, k, v, **lengths)
    assert torch.equal(out.to(BF16), rounded) and torch.equal(lse, same_lse)
