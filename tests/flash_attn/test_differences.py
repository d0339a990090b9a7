"""What docs/flash_attn.md says of the differences from flash-attn 2, row by row."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
import tilewise.flash_attn as flash_attn
from tests.flash_attn.checks import check, make_call, run, run_with_lse, with_gradients
from tests.flash_attn.formula import Call, formula
from tests.helpers import UNDER_TEST
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flash_attn.md"
TESTED: set[str] = set()
TESTED_ELSEWHERE = {
    "asking for the lse": "test_interface.py",
    "wrong arguments": "test_interface.py",
    "strides": "test_equivalences.py",
    "`window_size` of None": "test_equivalences.py, test_interface.py",
    "which elements dropout drops": "test_equivalences.py: packed and padded batches",
    "`dropout_p`": "tests of core/philox.py, whose mask the formula uses",
}


def row(name: str) -> Callable[[Any], Any]:
    """Marks the test of a row of the page's table."""
    TESTED.add(name)
    return lambda test: test


def test_every_row_has_a_test() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## What differs")[1].split("\n## ")[0]
    first = re.findall(r"^\| (.+?) \|", section, re.MULTILINE)
    rows = [name for name in first if name not in ("what", "---")]
    assert len(rows) == len(set(rows))
    assert set(rows) == TESTED | set(TESTED_ELSEWHERE)


@row("lse of an empty row")
def test_empty_row() -> None:
    call = make_call("flash_attn_func", {"causal": True}, torch.bfloat16, shape=(7, 4))
    out, lse = run_with_lse(call, call.tensors)
    assert torch.equal(lse.isneginf(), (torch.arange(7) < 3).expand_as(lse))
    assert not out[:, :3].any()
    sinks = torch.rand(6)
    out, lse = run(call, call.tensors, sinks=sinks, return_lse=True)
    assert not out[:, :3].any()
    assert torch.equal(lse[:, :, :3], sinks.reshape(1, 6, 1).expand(2, -1, 3))


@row("gradient of the lse")
def test_gradient_of_lse_alone() -> None:
    call = make_call("flash_attn_func", {"causal": True}, torch.float32)

    def gradient(form: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        q = tensors["q"].clone().requires_grad_()
        return torch.autograd.grad(form(call, {**tensors, "q": q})[1].sum(), q)[0]

    wide = {name: x.double() for name, x in call.tensors.items()}
    exact, eager = (gradient(formula, x) for x in (wide, call.tensors))
    assert_within_budget(gradient(run_with_lse, call.tensors), exact, eager)


@row("lse with ALiBi and causal")
def test_lse_of_causal_alibi() -> None:
    """What flash-attn's kernel adds, `slope * j`, gives an lse that is larger by just this."""
    M, N = 5, 9
    call = make_call("flash_attn_func", {"causal": True}, torch.float32, shape=(M, N), heads=(3, 3))
    slopes = torch.rand(3, dtype=torch.float64)
    _, lse = run(call, call.tensors, alibi_slopes=slopes.float(), return_lse=True)
    q, k = (call.tensors[name].double().transpose(1, 2) for name in "qk")
    scores = q @ k.mT * q.shape[-1] ** -0.5 + slopes.reshape(-1, 1, 1) * torch.arange(N)
    hidden = torch.ones(M, N, dtype=torch.bool).triu(N - M + 1)
    theirs = scores.masked_fill(hidden, float("-inf")).logsumexp(-1)
    shift = slopes.unsqueeze(-1) * (torch.arange(M) + N - M)
    assert_lse_within_budget(lse, theirs - shift, torch.float32)


@row("gradient of `alibi_slopes`")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_gradient_of_slopes_has_their_dtype(dtype: torch.dtype) -> None:
    call = make_call("flash_attn_func", {}, torch.float32)
    slopes = torch.rand(6, dtype=dtype, requires_grad=True)
    run(call, call.tensors, alibi_slopes=slopes).sum().backward()
    assert slopes.grad is not None
    assert slopes.grad.dtype == dtype
    assert slopes.grad.all()


@row("softcap with dropout")
def test_softcap_with_dropout() -> None:
    check(make_call("flash_attn_func", {"softcap": 2.0, "dropout_p": 0.25}, torch.bfloat16))


@row("sinks")
def test_sinks_add_to_the_denominator_only() -> None:
    check(make_call("flash_attn_varlen_func", {"sinks": "H"}, torch.float32))


@row("`S_dmask`")
def test_s_dmask() -> None:
    call = make_call("flash_attn_func", {}, torch.float32)
    assert run(call, call.tensors, return_attn_probs=True)[2] is None
    with pytest.raises(NotImplementedError, match=r"no backend ever stores; use return_lse=True"):
        run(call, call.tensors, return_attn_probs=True, dropout_p=0.1)


@row("dtypes")
@row("devices")
def test_double_on_the_cpu_is_computed_in_double() -> None:
    call = make_call("flash_attn_func", {"causal": True}, torch.float64)
    got = with_gradients(run_with_lse, call, call.tensors)
    exact = with_gradients(formula, call, call.tensors)
    single = with_gradients(formula, call, {name: x.float() for name, x in call.tensors.items()})
    assert_lse_within_budget(got.pop("lse"), exact.pop("lse"), torch.float64)
    for name, value in got.items():
        assert value.dtype == torch.float64
        # A thousand times closer than single precision gets.
        eager = exact[name] + (single[name] - exact[name]) / 1000
        assert_within_budget(value, exact[name], eager, name=name)


@row("autocast")
def test_autocast_casts() -> None:
    call = make_call("flash_attn_qkvpacked_func", {}, torch.float32)
    with torch.autocast(UNDER_TEST.device, torch.bfloat16):
        out = run(call, call.tensors)
    call.tensors = {name: x.bfloat16() for name, x in call.tensors.items()}
    assert torch.equal(out, run(call, call.tensors))


@row("head dims")
@pytest.mark.parametrize(("D", "E"), [(1, 3), (7, 5), (256, 192)])
def test_any_head_dims(D: int, E: int) -> None:
    call = Call(
        "flash_attn_func",
        {
            "q": torch.randn(2, 5, 4, D),
            "k": torch.randn(2, 7, 2, D),
            "v": torch.randn(2, 7, 2, E),
        },
    )
    check(call)


@row("unbounded side of a window")
def test_unbounded_side_hides_nothing() -> None:
    """Left 1, right unbounded: query 0 of 4 stands at key -2 and sees both keys."""
    call = make_call("flash_attn_func", {"window_size": (1, -1)}, torch.float32, shape=(4, 2))
    out, lse = run_with_lse(call, call.tensors)
    everything = make_call("flash_attn_func", {}, torch.float32, shape=(4, 2))
    full, full_lse = run_with_lse(everything, call.tensors)
    # Key 0 is more than one before queries 3 and 4 of 4 alone.
    assert torch.equal(out[:, :3], full[:, :3])
    assert torch.equal(lse[..., :3], full_lse[..., :3])


@row("rows past `cu_seqlens[-1]`")
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_what_no_sequence_owns_reaches_nothing(poison: float) -> None:
    call = make_call("flash_attn_varlen_func", {"causal": True}, torch.bfloat16)
    clean = with_gradients(run_with_lse, call, call.tensors)
    slack = 3
    longer = {
        name: torch.cat([x, x.new_full((slack, *x.shape[1:]), poison)])
        for name, x in call.tensors.items()
    }
    leaves = {name: x.requires_grad_() for name, x in longer.items()}
    out, lse = run_with_lse(call, leaves)
    dout = torch.cat([torch.zeros_like(clean["out"]), out.new_full((slack, *out.shape[1:]), 1.0)])
    assert not any(x.any() for x in torch.autograd.grad(out, list(leaves.values()), dout))
    assert torch.equal(out[:-slack], clean["out"])
    assert torch.equal(lse[:, :-slack], clean["lse"])
    assert not out[-slack:].any()
    assert lse[:, -slack:].isneginf().all()


@row("`cu_seqlens`")
def test_cu_seqlens_of_either_width_are_checked() -> None:
    call = make_call("flash_attn_varlen_func", {"causal": True}, torch.bfloat16)
    out = run(call, call.tensors)
    narrow = call.lengths["cu_seqlens_q"]
    call.lengths["cu_seqlens_q"] = narrow.long()
    assert torch.equal(run(call, call.tensors), out)
    for wrong, message in (
        (narrow + 1, "cu_seqlens_q must start at 0, got 1"),
        (narrow * torch.tensor([1, 1, 0, 1, 1]), "cu_seqlens_q must never fall, got 5 then 0"),
        (narrow * torch.tensor([1, 1, 1, 1, 2]), "cu_seqlens_q ends at 28, but only 14 tokens"),
    ):
        call.lengths["cu_seqlens_q"] = wrong.int()
        with pytest.raises(ValueError, match=message):
            run(call, call.tensors)


@row("`max_seqlen`")
def test_max_seqlen_is_an_upper_bound() -> None:
    call = make_call("flash_attn_varlen_func", {"causal": True}, torch.bfloat16)
    out = run(call, call.tensors)
    for longest_q, longest_k in ((None, None), (7, None), (1000, 100000)):
        call.lengths |= {"max_seqlen_q": longest_q, "max_seqlen_k": longest_k}
        assert torch.equal(run(call, call.tensors), out)
    call.lengths["max_seqlen_k"] = 6
    with pytest.raises(ValueError, match="max_seqlen_k is 6, but a sequence has 7 tokens"):
        run(call, call.tensors)


@row("deterministic backward")
@pytest.mark.skipif(UNDER_TEST.device != "cpu", reason="the tiled backend is for the CPU")
def test_backward_is_deterministic_on_tiled_without_the_flag() -> None:
    call = make_call("flash_attn_func", {"causal": True}, torch.float32, shape=(300, 300))
    q, k, v = call.tensors.values()
    assert tilewise.explain_backend(q, k, v).name == "tiled"
    first, second = (with_gradients(run_with_lse, call, call.tensors) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@row("`block_table`")
def test_pages_of_any_size() -> None:
    """Three keys a page, and its keys alone: one result."""
    call = make_call("flash_attn_varlen_func", {"causal": True}, torch.float32)
    q, k, v = (call.tensors[name] for name in "qkv")
    edges = call.edges("k")
    width = max(-(-(b - a) // 3) for a, b in pairwise(edges))
    pages = [torch.full((9 * width, 3, *x.shape[1:]), float("nan")) for x in (k, v)]
    table = torch.randperm(9 * width)[: (len(edges) - 1) * width].reshape(-1, width).int()
    for b, (start, stop) in enumerate(pairwise(edges)):
        for n in range(stop - start):
            for x, page in zip((k, v), pages, strict=True):
                page[table[b, n // 3], n % 3] = x[start + n]
    paged = {"q": q, "k": pages[0], "v": pages[1]}
    got = run(call, paged, block_table=table)
    exact, eager = (formula(call, {n: x.to(d) for n, x in call.tensors.items()})[0]
                    for d in (torch.float64, torch.float32))  # fmt: skip
    assert_within_budget(got, exact, eager)


@row("`flash_attn_with_kvcache`")
def test_mask_of_a_cache_that_learns() -> None:
    """Where gradients are wanted, lengths are a mask of plain attention."""
    call = make_call("flash_attn_func", {"causal": True}, torch.float32, shape=(3, 16))
    q, k_cache, v_cache = call.tensors.values()
    with pytest.raises(NotImplementedError, match="has no gradient"):
        flash_attn.flash_attn_with_kvcache(q.clone().requires_grad_(), k_cache, v_cache)
    lengths = torch.tensor([7, 12])
    mask = tilewise.key_padding(lengths) & tilewise.causal(offset=lengths - q.shape[1])
    out = tilewise.attention(q, k_cache, v_cache, mask=mask)
    cached = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=lengths, causal=True
    )
    for b, length in enumerate(lengths.tolist()):
        own = {
            name: (x if name == "q" else x[:, :length])[b : b + 1]
            for name, x in call.tensors.items()
        }
        wide = {name: x.double() for name, x in own.items()}
        exact, eager = (formula(call, x)[0] for x in (wide, own))
        assert_within_budget(out[b : b + 1], exact, eager)
        assert_within_budget(cached[b : b + 1], exact, eager)
