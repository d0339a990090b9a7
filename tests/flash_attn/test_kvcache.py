"""`flash_attn_with_kvcache` of both releases, held against its description written out."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise.flash_attn as flash_attn
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.flash_attn import flash_attn_3 as fa3

B, N, H, G, D, E = 3, 48, 6, 2, 16, 8
BEFORE = [17, 0, 40]


def turn(x: Tensor, position: int, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary by complex numbers, x `[heads, D]`; in fp64 for an x in fp64, else in fp32."""
    half = cos.shape[1]
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = torch.complex(cos[position].to(wide), sin[position].to(wide))
    part = x[:, : 2 * half].to(wide)
    pair = (part[:, 0::2], part[:, 1::2]) if interleaved else (part[:, :half], part[:, half:])
    z = torch.complex(pair[0].contiguous(), pair[1].contiguous()) * angle
    both = [z.real, z.imag]
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([turned.to(x.dtype), x[:, 2 * half :]], -1)


def one(
    q: Tensor, k: Tensor, v: Tensor, *, softcap: float = 0.0, slopes: Tensor | None = None,
    causal: bool = False, window: tuple[int, int] = (-1, -1), hidden: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q `[M, H, D]` over keys `[n, G, .]`: out `[M, H, E]` and lse `[H, M]`, in q's dtype."""
    M, n = q.shape[0], k.shape[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    s = torch.einsum("mhd,nhd->hmn", q, k).to(wide) * D**-0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    p = torch.arange(M).unsqueeze(1) + n - M
    j = torch.arange(n)
    if slopes is not None:
        s = s - slopes.to(wide).reshape(-1, 1, 1) * (p - j).abs()
    seen = (j >= hidden).expand(M, n)
    left, right = window
    right = 0 if causal else right
    seen = seen & (j >= p - left if left >= 0 else True) & (j <= p + right if right >= 0 else True)
    s = s.masked_fill(~seen, float("-inf"))
    lse = s.logsumexp(-1)
    prob = torch.where(lse.isneginf().unsqueeze(-1), 0.0, torch.softmax(s, -1))
    return torch.einsum("hmn,nhe->mhe", prob.to(q.dtype), v), lse


def make(dtype: torch.dtype, M: int, L: int) -> dict[str, Tensor]:
    """q, new k and v, and contiguous caches whose free slots are NaN."""
    x = {"q": torch.randn(B, M, H, D), "k": torch.randn(B, L, G, D), "v": torch.randn(B, L, G, E)}
    x |= {"k_cache": torch.randn(B, N, G, D), "v_cache": torch.randn(B, N, G, E)}
    x = {name: t.to(dtype) for name, t in x.items()}
    for b, used in enumerate(BEFORE):
        x["k_cache"][b, used:] = float("nan")
        x["v_cache"][b, used:] = float("nan")
    return x


def expected(
    x: dict[str, Tensor], dtype: torch.dtype, rotary: tuple[Any, ...] | None = None,
    hidden: list[int] | None = None, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    outs, lses = [], []
    for b, used in enumerate(BEFORE):
        k_new, v_new, q = (x[name][b].to(dtype) for name in ("k", "v", "q"))
        if rotary is not None:
            k_new = torch.stack([turn(k, used + i, *rotary) for i, k in enumerate(k_new)])
            local = options.get("causal") or options.get("window", (-1, -1)) != (-1, -1)
            q = torch.stack([turn(row, used + i * bool(local), *rotary) for i, row in enumerate(q)])
        keys = torch.cat([x["k_cache"][b, :used].to(dtype), k_new])
        values = torch.cat([x["v_cache"][b, :used].to(dtype), v_new])
        own = {**options, "hidden": 0 if hidden is None else hidden[b]}
        if options.get("slopes") is not None and options["slopes"].dim() == 2:
            own["slopes"] = options["slopes"][b]
        out, lse = one(q.to(dtype), keys.to(dtype), values.to(dtype), **own)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def held(got: Any, x: dict[str, Tensor], **options: Any) -> None:
    out, lse = got
    exact, exact_lse = expected(x, torch.float64, **options)
    eager, _ = expected(x, x["q"].dtype, **options)
    assert_within_budget(out, exact, eager)
    assert_lse_within_budget(lse, exact_lse, x["q"].dtype)


def paged(x: Tensor, size: int, order: Tensor) -> Tensor:
    """A cache `[B, N, ...]` as pages in another order."""
    pages = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -N % size)).unflatten(1, (-1, size))
    shuffled = torch.empty_like(pages.flatten(0, 1))
    shuffled[order] = pages.flatten(0, 1)
    return shuffled


_ANGLES = torch.arange(64).unsqueeze(1) * 0.1 ** torch.arange(4)
TABLES = (_ANGLES.cos(), _ANGLES.sin())
SLOPES = torch.linspace(0.05, 0.9, B * H).reshape(B, H)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "softcap of none": ({"softcap": -1.0}, {}),
    "causal": ({"causal": True}, {"causal": True}),
    "window": ({"window_size": (5, 1)}, {"window": (5, 1)}),
    "causal, window, softcap": (
        {"causal": True, "window_size": (9, -1), "softcap": 2.0},
        {"causal": True, "window": (9, -1), "softcap": 2.0},
    ),
    "ALiBi": ({"causal": True, "alibi_slopes": SLOPES}, {"causal": True, "slopes": SLOPES}),
    "splits": ({"causal": True, "num_splits": 4}, {"causal": True}),
}


@pytest.mark.parametrize("page", [None, 1, 5, 16])
@pytest.mark.parametrize("name", OPTIONS)
def test_append_and_attend(name: str, page: int | None) -> None:
    given, means = OPTIONS[name]
    x = make(torch.bfloat16, 3, 3)
    caches = {n: x[n].clone() for n in ("k_cache", "v_cache")}
    place: dict[str, Any] = {}
    if page is not None:
        width = -(-N // page)
        order = torch.randperm(B * width)
        caches = {n: paged(t, page, order) for n, t in caches.items()}
        place["block_table"] = order.reshape(B, width).int()
    lengths = torch.tensor(BEFORE, dtype=torch.int32)
    got = flash_attn.flash_attn_with_kvcache(
        x["q"], **caches, k=x["k"], v=x["v"], cache_seqlens=lengths, return_softmax_lse=True,
        **place, **given,
    )  # fmt: skip
    held(got, x, **means)
    # The caller's lengths are those before; the caches hold the new tokens, and nothing else.
    assert lengths.tolist() == BEFORE
    for n, new in (("k_cache", "k"), ("v_cache", "v")):
        whole = caches[n]
        if page is not None:
            whole = whole[place["block_table"].long()].flatten(1, 2)[:, :N]
        for b, used in enumerate(BEFORE):
            assert torch.equal(whole[b, :used], x[n][b, :used])
            assert torch.equal(whole[b, used : used + 3], x[new][b])
            assert bool(whole[b, used + 3 :].isnan().all())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (20, 3)}], ids=str)
def test_rotary_turns_new_keys_and_queries(given: dict[str, Any], interleaved: bool) -> None:
    x = make(torch.float32, 2, 2)
    caches = x["k_cache"].clone(), x["v_cache"].clone()
    got = flash_attn.flash_attn_with_kvcache(
        x["q"], *caches, x["k"], x["v"], *TABLES, torch.tensor(BEFORE), return_softmax_lse=True,
        rotary_interleaved=interleaved, **given,
    )  # fmt: skip
    means = {"window" if n == "window_size" else n: value for n, value in given.items()}
    held(got, x, rotary=(*TABLES, interleaved), **means)


def test_rows_left_padding_and_lengths_as_a_number() -> None:
    x = make(torch.bfloat16, 1, 1)
    rows = torch.tensor([4, 0, 2])
    caches = []
    for name in ("k_cache", "v_cache"):
        cache = torch.full((6, *x[name].shape[1:]), float("nan"), dtype=torch.bfloat16)
        cache[rows] = x[name]
        caches.append(cache)
    hidden = [3, 0, 39]
    got = flash_attn.flash_attn_with_kvcache(
        x["q"], *caches, x["k"], x["v"], cache_seqlens=torch.tensor(BEFORE), cache_batch_idx=rows,
        cache_leftpad=torch.tensor(hidden), causal=True, return_softmax_lse=True,
    )  # fmt: skip
    held(got, x, causal=True, hidden=hidden)
    assert bool(caches[0][[1, 3, 5]].isnan().all())
    # A number serves all sequences; without new tokens nothing is written.
    full = torch.randn(B, N, G, D), torch.randn(B, N, G, E)
    q = torch.randn(B, 1, H, D)
    out = flash_attn.flash_attn_with_kvcache(q, *full, cache_seqlens=9)
    short = flash_attn.flash_attn_with_kvcache(q, full[0][:, :9], full[1][:, :9])
    for b in range(B):
        exact, _ = one(q[b].double(), full[0][b, :9].double(), full[1][b, :9].double())
        eager, _ = one(q[b], full[0][b, :9], full[1][b, :9])
        assert_within_budget(out[b], exact, eager)
        assert_within_budget(short[b], exact, eager)


def test_flash_attn_3_packed_queries_and_new_keys() -> None:
    """Mixed lengths, with rotary at positions of their own, equal each sequence alone."""
    counts = [3, 1, 2]
    cu = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    x = make(torch.float32, 6, 6)
    q, k, v = (x[n][0] for n in ("q", "k", "v"))
    caches = x["k_cache"].clone(), x["v_cache"].clone()
    at = torch.tensor([5, 0, 50])
    out, lse = fa3.flash_attn_with_kvcache(
        q, *caches, k, v, rotary_cos=TABLES[0], rotary_sin=TABLES[1], cu_seqlens_q=cu,
        cu_seqlens_k_new=cu, max_seqlen_q=3, cache_seqlens=torch.tensor(BEFORE), causal=True,
        rotary_seqlens=at, scheduler_metadata=torch.zeros(1), pack_gqa=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for b, (used, count) in enumerate(zip(BEFORE, counts, strict=True)):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        first = int(at[b])
        results = []
        for dtype in (torch.float64, torch.float32):
            turned = [
                torch.stack(
                    [turn(row.to(dtype), first + i, *TABLES, True) for i, row in enumerate(t[rows])]
                )
                for t in (q, k)
            ]
            keys = torch.cat([x["k_cache"][b, :used].to(dtype), turned[1]])
            values = torch.cat([x["v_cache"][b, :used], v[rows]]).to(dtype)
            results.append(one(turned[0], keys, values, causal=True))
        (exact, exact_lse), (eager, _) = results
        assert out[rows].shape[0] == count
        assert_within_budget(out[rows], exact, eager)
        assert_lse_within_budget(lse[:, rows], exact_lse, torch.float32)


def test_flash_attn_3_float8_cache_and_page_table() -> None:
    q = torch.randn(B, 2, H, D)
    k, v = torch.randn(B * 3, 16, G, D), torch.randn(B * 3, 16, G, E)
    table = torch.randperm(B * 3).reshape(B, 3).int()
    descales = [torch.rand(B, G) + 0.5 for _ in range(3)]
    quantised = [t.to(torch.float8_e4m3fn) for t in (q, k, v)]
    out = fa3.flash_attn_with_kvcache(
        *quantised, cache_seqlens=torch.tensor(BEFORE), page_table=table, causal=True,
        q_descale=descales[0], k_descale=descales[1], v_descale=descales[2],
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    for b, used in enumerate(BEFORE):
        wide = [quantised[0][b].double(), *(t.double()[table[b].long()].flatten(0, 1)[:used]
                                            for t in quantised[1:])]  # fmt: skip
        scaled = [
            x * s[b].double().repeat_interleave(x.shape[1] // G).unsqueeze(-1)
            for x, s in zip(wide, descales, strict=True)
        ]
        # q is rounded to bf16 once it is scaled, as the drop-in says.
        scaled[0] = scaled[0].float().bfloat16().double()
        exact, _ = one(*scaled, causal=True)
        eager, _ = one(*(x.bfloat16() for x in scaled), causal=True)
        assert_within_budget(out[b], exact, eager)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_descale": [1.0]}, "k_descale must be a tensor, got list"),
        ({"cu_seqlens_q": [0, 1, 2, 3]}, "cu_seqlens_q must be a tensor, got list"),
        ({"cu_seqlens_k_new": torch.tensor([0, 1, 2, 3])}, "cu_seqlens_k_new says where new keys"),
        ({"num_splits": 1.5}, "num_splits must be an int >= 0, got 1.5"),
    ],
)
def test_flash_attn_3_says_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    q, k, v = torch.randn(B, 1, H, D), torch.randn(B, N, G, D), torch.randn(B, N, G, E)
    if "cu_seqlens_q" in change:
        q = q[:, 0]
    with pytest.raises(ValueError, match=f"flash_attn_with_kvcache: {message}"):
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, **change)


def test_packed_function_over_pages() -> None:
    """`flash_attn_varlen_func(block_table=)`: the lengths are those of cu_seqlens_k."""
    k, v = torch.randn(9, 16, G, D), torch.randn(9, 16, G, E)
    table = torch.randperm(9).reshape(3, 3).int()
    cu_q, cu_k = torch.tensor([0, 2, 3, 6]), torch.tensor([0, 17, 17, 57])
    q = torch.randn(6, H, D)
    out, lse, nothing = flash_attn.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 3, 40, causal=True, block_table=table, return_attn_probs=True
    )
    assert nothing is None
    for b in range(3):
        rows, n = slice(int(cu_q[b]), int(cu_q[b + 1])), int(cu_k[b + 1] - cu_k[b])
        own = [t[table[b].long()].flatten(0, 1)[:n] for t in (k, v)]
        exact, exact_lse = one(*(t.double() for t in (q[rows], *own)), causal=True)
        eager, _ = one(q[rows], *own, causal=True)
        assert_within_budget(out[rows], exact, eager)
        assert_lse_within_budget(lse[:, rows], exact_lse, torch.float32)
    with pytest.raises(NotImplementedError, match="dropout_p with block_table"):
        flash_attn.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 3, 40, dropout_p=0.1, block_table=table
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": None}, "k and v must come together"),
        ({"cache_seqlens": [9, 0, 8]}, "cache_seqlens must be an int or a tensor, got list"),
        ({"window_size": (1, 2, 3)}, "window_size must be .left, right."),
        ({"softmax_scale": "1"}, "scale must be a number, got '1'"),
        ({"alibi_slopes": torch.ones(H + 1)}, "alibi_slopes must be floating"),
        ({"q": torch.zeros(B, 3, G + 1, D, dtype=torch.bfloat16)}, "must be a multiple of"),
        ({"softcap": "3"}, "flash_attn_with_kvcache: softcap must be a number or None, got '3'"),
        ({"cache_seqlens": None}, "cache_seqlens must say where new k and v go"),
        ({"rotary_cos": TABLES[0]}, "rotary_cos and rotary_sin must come together"),
        ({"cache_seqlens": torch.tensor([17, 0, 47])}, "would grow to 50 tokens, but the cache"),
        ({"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}, "holds 9 positions"),
        ({"rotary_cos": torch.ones(9, 9), "rotary_sin": torch.ones(9, 9)}, "R <= D = 16"),
        ({"num_splits": -1}, "num_splits must be an int >= 0"),
        ({"q": torch.zeros(B + 1, 3, H, D, dtype=torch.bfloat16), "k": None, "v": None},
         "k_cache must have a row for each of the 4 sequences of q"),
        ({"block_table": torch.zeros(3, 1).int(), "cache_batch_idx": torch.zeros(3).int()},
         "cache_batch_idx must be None beside block_table"),
        ({"k": torch.zeros(B, 3, G, D)}, "k must have the cache's dtype"),
    ],
)  # fmt: skip
def test_mistakes_leave_the_cache_as_it_was(change: dict[str, Any], message: str) -> None:
    x = make(torch.bfloat16, 3, 3)
    before = {n: x[n].clone() for n in ("k_cache", "v_cache")}
    call = {**x, "cache_seqlens": torch.tensor(BEFORE), **change}
    with pytest.raises(ValueError, match=message):
        flash_attn.flash_attn_with_kvcache(**call)
    for n, cache in before.items():
        assert torch.equal(x[n].view(torch.int16), cache.view(torch.int16))
