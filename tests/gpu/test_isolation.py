"""What a call does not own: it is not read, and not written; and all that it returns is written."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.gpu import common
from tests.gpu.common import (
    BACKEND,
    are_equal,
    attention,
    attention_varlen,
    ints,
    normal,
    packed_qkv,
    qkv,
    run,
    synchronize,
)
from tests.gpu.fences import fences, nan_in_new_buffers
from tilewise.core.tolerance import assert_within_budget

pytestmark = pytest.mark.gpu
NAN = float("nan")
DIMS = [(16, 16), (59, 37), (64, 64), (80, 96), (128, 128), (192, 128), (256, 256)]
dims = pytest.mark.parametrize("dims", DIMS, ids=lambda d: f"{d[0]}-{d[1]}")


@pytest.fixture(autouse=True)
def nothing_is_left_from_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with nan_in_new_buffers(monkeypatch):
        yield


def walled(x: Tensor) -> Tensor:
    """The same values as a slice, in every dim, of a larger buffer of NaN."""
    buffer = x.new_full([size + 3 for size in x.shape], NAN)
    view = buffer[tuple(slice(1, 1 + size) for size in x.shape)]
    view.copy_(x.detach())
    return view.requires_grad_()


@dims
@pytest.mark.parametrize("form", ["padded", "packed"])
def test_nan_around_every_input_reaches_nothing(form: str, dims: tuple[int, int]) -> None:
    """Bit for bit what comes of contiguous copies: every dim ends where NaN begins."""
    D, E = dims
    if form == "padded":
        leaves = qkv(2, 67, 149, D=D, E=E)
        options: dict[str, Any] = {"mask": tw.causal()}
        call = attention
    else:
        leaves = packed_qkv(149, 149, D=D, E=E)
        options = {"mask": tw.window(70, 0), "cu_seqlens_q": ints(0, 67, 67, 149)}
        call = attention_varlen
    dout = normal(*leaves[0].shape[:-1], E, seed=5)
    plain = run(lambda *x: call(*x, **options), leaves, dout)
    assert all(bool(x.isfinite().all()) for x in plain)
    inside = run(lambda *x: call(*x, **options), [walled(x) for x in leaves], walled(dout).detach())
    assert are_equal(inside, plain)


def spoiled(leaves: list[Tensor], used_q: Tensor, used_k: Tensor, value: float) -> list[Tensor]:
    """Copies with `value` where a row is not used: bool masks over all but the last two dims."""
    q, k, v = (x.detach().clone() for x in leaves)
    q[~used_q] = value
    k[~used_k] = value
    v[~used_k] = value
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("value", [NAN, float("inf"), 1e30])
@pytest.mark.parametrize("form", ["padding", "left padding", "used", "past the end"])
def test_what_no_query_may_see_reaches_nothing(form: str, value: float) -> None:
    m, n = (torch.arange(size).to(common.DEVICE) for size in (149, 149))
    if form in ("padding", "left padding"):
        leaves, call = qkv(2, 149, 149), attention
        used_q = torch.ones(2, 149, dtype=torch.bool).to(common.DEVICE)
        lengths = ints(140, 3)
        if form == "padding":
            used_k = n < lengths.unsqueeze(1)
            options: dict[str, Any] = {"mask": tw.key_padding(lengths)}
        else:
            used_k = n >= lengths.unsqueeze(1)
            options = {"mask": tw.left_padding(lengths)}
    else:
        leaves, call = packed_qkv(149, 149), attention_varlen
        options = {"mask": tw.causal(), "cu_seqlens_q": ints(0, 70, 130)}
        used_q = m < 130
        if form == "used":
            options |= {"seqused_q": ints(31, 60), "seqused_k": ints(65, 9)}
            used_q = (m < 31) | ((m >= 70) & (m < 130))
            used_k = (n < 65) | ((n >= 70) & (n < 79))
        else:
            used_k = n < 130
    upstream = normal(*leaves[0].shape, seed=5)
    results = []
    for content in (0.0, value):
        inputs = spoiled(leaves, used_q, used_k, content)
        dout = upstream.clone()
        dout[~used_q] = content
        results.append(run(lambda *x: call(*x, **options), inputs, dout))
    clean, dirty = results
    assert are_equal(dirty, clean)
    out, dq, dk, dv = dirty
    assert not out[~used_q].any() and not dq[~used_q].any()
    assert not dk[~used_k].any() and not dv[~used_k].any()


def beyond(n: int) -> tw.Mask:
    """The first n queries see no key, and the last keys are seen by no query."""
    return tw.causal(offset=-n)


# As a band, as intervals and as bits.
UNSEEN: dict[str, Callable[[], tw.Mask]] = {
    "top left": lambda: beyond(0),
    "band": lambda: beyond(20),
    "padded band": lambda: beyond(20) & tw.key_padding(ints(40, 11)),
    "intervals": lambda: beyond(20) | tw.prefix(ints(0, 0)),
    "bits": lambda: beyond(20) & tw.from_function(lambda b, h, m, n: (m + 2 * n + h) % 3 != 0),
}


@pytest.mark.parametrize("value", [NAN, float("inf")])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("form", UNSEEN)
def test_what_a_mask_hides_from_all_reaches_nothing(
    form: str, softcap: float | None, value: float
) -> None:
    """In tiles of which other keys are seen, and rows that see none beside rows that do."""
    M, N = 67, 149
    mask, leaves = UNSEEN[form](), qkv(2, M, N)
    visible = mask.dense(2, 4, M, N, device=common.DEVICE)
    rows, keys = visible.any(3).any(1), visible.any(2).any(1)
    assert bool(keys.any()) and not bool(keys.all())
    assert bool(rows.all()) == (form == "top left")
    upstream = normal(2, M, 4, 64, seed=5)
    results = []
    for content in (0.0, value):
        inputs = spoiled(leaves, rows, keys, content)
        call = run(lambda *x: attention(*x, mask=mask, softcap=softcap), inputs, upstream)
        results.append(call)
    clean, dirty = results
    assert all(bool(x.isfinite().all()) for x in dirty)
    assert are_equal(dirty, clean)
    out, dq, dk, dv = dirty
    assert not out[~rows].any() and not dq[~rows].any()
    assert not dk[~keys].any() and not dv[~keys].any()


def terms(M: int, N: int) -> dict[str, Tensor]:
    made = {
        "bias": normal(1, 4, M, N, dtype=torch.float32, seed=7),
        "alibi_slopes": normal(4, dtype=torch.float32, seed=8).abs(),
        "sinks": normal(4, dtype=torch.float32, seed=9),
    }
    return {name: x.requires_grad_() for name, x in made.items()}


FENCED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": tw.causal()},
    "checkered": {"mask": tw.from_function(lambda b, h, m, n: (m + n + h) % 3 != 0)},
    "window": {"mask": tw.window(20, 3)},
    "prefix-LM": {"mask": tw.causal() | tw.prefix(50)},
    "dropout": {"mask": tw.causal(), "dropout_p": 0.2},
}


@dims
@pytest.mark.parametrize("form", [*FENCED, "terms", "packed", "used"])
def test_nothing_is_written_beside_outputs_and_gradients(
    form: str, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    D, E = dims
    options = dict(FENCED.get(form, {}))
    is_packed = form in ("packed", "used")
    if is_packed:
        leaves = packed_qkv(149, 149, D=D, E=E)
        options = {"mask": tw.causal(), "cu_seqlens_q": ints(0, 67, 67, 130)}
        if form == "used":
            options["seqused_k"] = ints(60, 0, 50)
    else:
        leaves = qkv(2, 67, 149, D=D, E=E)
    learned = terms(67, 149) if form == "terms" else {}
    op = tw.attention_varlen_partial if is_packed else tw.attention_partial
    with fences(monkeypatch) as made:
        out, lse = op(*leaves, **learned, **options, backend=BACKEND)
        before = len(made)
        upstream = [torch.ones_like(out), torch.ones_like(lse)]
        gradients = torch.autograd.grad([out, lse], [*leaves, *learned.values()], upstream)
        synchronize()
        # Out and lse; and at least a gradient for each of q, k and v.
        assert before >= 2 and len(made) >= before + 3
        assert made.broken() == []
    assert not any(bool(x.isnan().any()) for x in (out, lse, *gradients))


@pytest.mark.parametrize("lengths", [(0, 100, 5000), (-70, 20, 149), (90, 10, 149), (7, 7, 7)])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_unchecked_lengths_leave_everything_else_alone(
    name: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths on a device are not read before the launch, so kernels keep to what is stored: what
    comes of wrong ones is of no use, but finite, with NaN all around q, k and v and in what was
    there before."""
    cu = {"cu_seqlens_q": ints(0, 60, 149), "cu_seqlens_k": ints(0, 60, 149), name: ints(*lengths)}
    leaves = [walled(x) for x in packed_qkv(149, 149)]
    with fences(monkeypatch) as made:
        out = attention_varlen(*leaves, mask=tw.causal(), **cu)
        gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
        synchronize()
        assert made.broken() == []
    assert all(bool(x.isfinite().all()) for x in (out, *gradients))


def test_buffers_of_the_caller_are_added_to_and_nothing_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gradients of a piece go into slices of larger buffers."""
    leaves = [x.detach() for x in qkv(2, 67, 149, D=59, E=37)]
    out, lse = tw.attention_partial(*leaves, mask=tw.causal(), backend=BACKEND)
    dout = normal(*out.shape, seed=5)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2).contiguous()
    totals = []
    for start in (0.0, 3.0):
        wide = [torch.full([n + 3 for n in x.shape], 7.0, device=x.device) for x in leaves]
        views = [
            buffer[tuple(slice(1, 1 + n) for n in x.shape)]
            for buffer, x in zip(wide, leaves, strict=True)
        ]
        for view in views:
            view.fill_(start)
        tw.attention_partial_backward(
            dout, *leaves, lse, delta, **dict(zip(("dq", "dk", "dv"), views, strict=True)),
            mask=tw.causal(), backend=BACKEND,
        )  # fmt: skip
        synchronize()
        for buffer, view in zip(wide, views, strict=True):
            total = view.clone()
            view.fill_(7.0)
            assert bool((buffer == 7.0).all())
            totals.append(total)
    for added, once in zip(totals[3:], totals[:3], strict=True):
        assert bool(once.any())
        # Sums of fp32: the same up to where 3 was added.
        assert_within_budget(added, once.double() + 3.0, once + 3.0, floor=1e-5)
