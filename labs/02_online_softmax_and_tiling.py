# %% [markdown]
# # Lab 2: online softmax and tiling
#
# Lab 1 ended with a question: how can softmax be fused with the products around it, when it
# needs a whole row of scores before its first probability? The answer has two parts. *Online
# softmax* (Milakov and Gimelshein, 2018) updates a result that is right for the keys seen so far.
# *Tiling* (FlashAttention, Dao et al., 2022) makes those updates a tile of keys at a time, while
# the tile is on the chip, so the score matrix never exists in memory.
#
# Letters: `B` batch, `H` heads, `M` query length, `N` key length, `D` query/key dim, `E` value
# dim; tensors are `[B, H, M, D]`. Softmax state: `row_max`, `row_sum`, `acc`; `s` scores, `p`
# probabilities.

# %%
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from lab_tools import ByteMeter, mark, peak_bytes, prove, table
from rounding import exact_scores, forward_bounds
from tiles import FULL, NEG_INF, Mask, Partial, bottom_right, finite_or_zero, spans
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)

# %% [markdown]
# ## 1. Softmax in three passes, two passes, one pass
#
# The formula $p_n = e^{s_n} / \sum_j e^{s_j}$ cannot be used as it stands: `exp` of a modest
# score is infinite, and infinity over infinity is not a number.

# %%
s = torch.tensor([1.0, 100.0, 99.0])
assert torch.isinf(s.exp()).any()
assert torch.isnan(s.exp() / s.exp().sum()).any()

# %% [markdown]
# *Safe softmax* subtracts the row's maximum first. Numerator and denominator shrink by the same
# factor, so the result is the same, and no exponent is above 0. But now the row is needed three
# times: for the maximum, for the sum, and for the probabilities. A row that is too long for the
# chip is read from memory each time, so we count the passes.


# %%
class StreamedRow:
    """Numbers that live in slow memory: every loop over them is counted as a pass."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.tolist()
        self.passes = 0

    def __iter__(self) -> Iterator[float]:
        self.passes += 1
        return iter(self.values)


def softmax_three_passes(row: StreamedRow) -> list[float]:
    row_max = NEG_INF
    for s in row:
        row_max = max(row_max, s)
    row_sum = 0.0
    for s in row:
        row_sum += math.exp(s - row_max)
    return [math.exp(s - row_max) / row_sum for s in row]


# %% [markdown]
# Online softmax finds the maximum and the sum in the same pass. When a larger score arrives, the
# sum so far was taken against the wrong maximum. All its terms are wrong by the same factor, so
# one multiplication repairs them all:
#
# $$ m' = \max(m, s), \qquad \ell' = \ell\, e^{m - m'} + e^{s - m'} $$
#
# After every step, $\ell$ is exactly the sum of $e^{s_j - m}$ over the scores seen so far. The
# code asserts this invariant at each step.


# %%
def softmax_two_passes(row: StreamedRow) -> list[float]:
    row_max, row_sum = NEG_INF, 0.0
    for seen, s in enumerate(row, start=1):
        new_max = max(row_max, s)
        row_sum = row_sum * math.exp(row_max - new_max) + math.exp(s - new_max)
        row_max = new_max
        invariant = sum(math.exp(x - row_max) for x in row.values[:seen])
        assert math.isclose(row_sum, invariant, rel_tol=1e-12)
    return [math.exp(s - row_max) / row_sum for s in row]


# %% [markdown]
# The second pass is there because softmax must return a probability for every score, and the
# first of them depends on the last score. Attention does not return probabilities. It returns
# $\sum_n p_n v_n$, one vector, and that sum can be repaired by the same factor as the
# denominator. So keep an unnormalised numerator `acc` beside `row_sum`, and divide once, at the
# end. That is one pass.


# %%
def attention_one_pass(row: StreamedRow, values: Tensor) -> Tensor:
    row_max, row_sum = NEG_INF, 0.0
    acc = torch.zeros_like(values[0])
    for s, value in zip(row, values, strict=True):
        new_max = max(row_max, s)
        correction, p = math.exp(row_max - new_max), math.exp(s - new_max)
        row_sum = row_sum * correction + p
        acc = acc * correction + p * value
        row_max = new_max
    return acc / row_sum


scores = 30 * torch.randn(200, dtype=torch.float64)
values = torch.randn(200, 4, dtype=torch.float64)
expected = torch.softmax(scores, dim=0)

three, two, one = (StreamedRow(scores) for _ in range(3))
for function, row in ((softmax_three_passes, three), (softmax_two_passes, two)):
    torch.testing.assert_close(torch.tensor(function(row), dtype=torch.float64), expected)
torch.testing.assert_close(attention_one_pass(one, values), expected @ values)

for name, row in (("safe", three), ("online", two), ("online, with the values", one)):
    print(f"{name} softmax: {row.passes} passes over the scores")
assert (three.passes, two.passes, one.passes) == (3, 2, 1)

# %% [markdown]
# ## 2. Block by block, live
#
# A chip works on blocks. One step takes a block of scores `[..., m, n]` and of values
# `[..., n, E]` and updates the state of `m` rows. The empty state has seen no key: its maximum
# is `-inf`, its sum and numerator are 0.
#
# One line needs care. If all keys so far are hidden by a mask, `row_max` and `new_max` are both
# `-inf`, and `-inf - (-inf)` is not a number. It would poison `acc` for good, even when visible
# keys follow.

# %%
assert torch.isnan(torch.tensor(NEG_INF) - torch.tensor(NEG_INF))
# NaN survives the multiplication by 0 that was meant to forget it.
assert torch.isnan(torch.tensor(float("nan")) * 0.0)

# %% [markdown]
# The cure is to subtract 0 in place of a maximum of `-inf`: `finite_or_zero` below. Then
# `exp(-inf - 0)` is 0, hidden keys weigh nothing, and the empty state stays empty. At the end
# such a row has `row_sum` 0 and the division would be 0 / 0. Tilewise says that an empty row has
# output 0 and LSE `-inf`.
#
# The LSE (log-sum-exp) is $\log \sum_n e^{s_n} = m + \log \ell$. It is one number a row, and
# it will be enough to merge results (section 5) and for the backward pass (lab 3). `Partial` (in
# `tiles.py`, with `finite_or_zero`) is the pair of an output and its LSE.


# %%
class State(NamedTuple):
    """Softmax over the keys seen so far."""

    # [..., m]: the largest score.
    row_max: Tensor
    # [..., m]: the sum of exp(s - row_max).
    row_sum: Tensor
    # [..., m, E]: the sum of exp(s - row_max) * v.
    acc: Tensor


def empty_state(q: Tensor, v: Tensor) -> State:
    rows = q.shape[:-1]
    return State(q.new_full(rows, NEG_INF), q.new_zeros(rows), q.new_zeros(*rows, v.shape[-1]))


def update(state: State, s: Tensor, v: Tensor) -> State:
    row_max = torch.maximum(state.row_max, s.amax(dim=-1))
    subtract = finite_or_zero(row_max)
    correction = (state.row_max - subtract).exp()
    p = (s - subtract.unsqueeze(-1)).exp()
    return State(
        row_max,
        state.row_sum * correction + p.sum(dim=-1),
        state.acc * correction.unsqueeze(-1) + p @ v,
    )


def finish(state: State) -> Partial:
    # An empty row divides 0 by 1; its LSE is -inf + log(0), which is the -inf that it should be.
    divisor = state.row_sum.masked_fill(state.row_sum == 0, 1.0)
    return Partial(state.acc / divisor.unsqueeze(-1), state.row_max + state.row_sum.log())


# %% [markdown]
# One query, 24 keys in blocks of 4, the first block hidden. Watch `row_max` climb and the factor
# repair what came before. In every line `acc / row_sum` is the exact attention over the keys so
# far: stop early, and the answer is right for what you have seen.

# %%
q = torch.randn(1, 8, dtype=torch.float64)
k, v = (torch.randn(24, 8, dtype=torch.float64) for _ in range(2))
s = q @ k.T
s[:, :4] = NEG_INF

state, rows = empty_state(q, v), []
for start in range(0, 24, 4):
    block = slice(start, start + 4)
    before = state.row_max
    state = update(state, s[:, block], v[block])
    factor = (before - finite_or_zero(state.row_max)).exp()
    out, lse = finish(state)
    rows.append(
        [f"{start:2}..{start + 3}"]
        + [f"{x.item():.3f}" for x in (s[:, block].amax(), state.row_max, factor, state.row_sum)]
        + [f"{x.item():.3f}" for x in (state.acc[0, 0], out[0, 0], lse)]
    )
    seen = slice(0, start + 4)
    # Softmax of nothing is NaN in PyTorch; here it is 0.
    p_seen = torch.softmax(s[:, seen], dim=-1).nan_to_num(nan=0.0)
    torch.testing.assert_close(out, p_seen @ v[seen])
    torch.testing.assert_close(lse, torch.logsumexp(s[:, seen], dim=-1))
table(["keys", "block max", "row_max", "factor", "row_sum", "acc[0]", "out[0]", "lse"], rows)

# %% [markdown]
# How often does the maximum move? For scores in random order, score number $j$ is the largest so
# far with probability $1/j$, so about $1 + 1/2 + \dots + 1/N \approx \ln N + 0.577$ times.
# Most corrections are multiplications by 1. Recent kernels use this: they test whether the
# maximum moved enough to matter, and otherwise skip the rescaling of `acc`.

# %%
LENGTH = 1024
running_max = torch.randn(4000, LENGTH).cummax(dim=-1).values
moves = 1 + (running_max[:, 1:] > running_max[:, :-1]).sum(dim=-1).double().mean().item()
predicted = math.log(LENGTH) + 0.577
print(f"of {LENGTH} scores, {moves:.2f} moved the maximum; predicted {predicted:.2f}")
assert abs(moves - predicted) < 0.2

# %% [markdown]
# ## 3. Tiled attention
#
# Now all of it. The outer loop takes a tile of queries, the inner loop streams tiles of keys and
# values past it. In a kernel each turn of the outer loop is a block of threads of its own (that
# is FlashAttention-2's order of loops), and the state lives in registers.
#
# `watch` stands for the bus of the GPU's memory: what passes through `load` and `store` would cross
# it. Everything else is on the chip. Section 6 reads its tally.
#
# The mask is `Mask` in `tiles.py`. The causal one is aligned at the bottom right: query `m` stands
# at key position `m + offset` with `offset = N - M`, so that the last query sees the last key. A
# tile whose first key is beyond its last query is not computed at all; a tile whose last key is
# beyond its first query is computed and masked; the rest need no mask.


# %%
@dataclass
class Watch:
    """Counts the bytes that a kernel would load and store, and the tiles it meets."""

    loaded: int = 0
    stored: int = 0
    skipped: int = 0
    masked: int = 0
    full: int = 0

    def load(self, tile: Tensor) -> Tensor:
        self.loaded += tile.numel() * tile.element_size()
        return tile

    def store(self, target: Tensor, tile: Tensor) -> None:
        self.stored += tile.numel() * tile.element_size()
        target.copy_(tile)


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = FULL,
    block_m: int = 64,
    block_n: int = 64,
    watch: Watch | None = None,
) -> Partial:
    watch = watch or Watch()
    scale = q.shape[-1] ** -0.5
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for m_start, m_stop in spans(q.shape[-2], block_m):
        q_tile = watch.load(q[..., m_start:m_stop, :]) * scale
        state = empty_state(q_tile, v)
        for n_start, n_stop in spans(k.shape[-2], block_n):
            if not mask.sees_any(m_stop, n_start):
                watch.skipped += 1
                continue
            k_tile, v_tile = (watch.load(x[..., n_start:n_stop, :]) for x in (k, v))
            s = q_tile @ k_tile.transpose(-1, -2)
            if mask.sees_all(m_start, n_stop):
                watch.full += 1
            else:
                watch.masked += 1
                s = mask.apply(s, m_start, n_start)
            state = update(state, s, v_tile)
        partial = finish(state)
        watch.store(out[..., m_start:m_stop, :], partial.out)
        watch.store(lse[..., m_start:m_stop], partial.lse)
    return Partial(out, lse)


# %% [markdown]
# ### Is it equal?
#
# Not bit for bit: sums are taken in another order. But how much difference is rounding, and how
# much would be a bug? We derive a bound. Let $u$ be the unit roundoff (half of epsilon), and
# follow one row, to first order in $u$:
#
# 1. A score is a dot product of `D` terms, scaled: its error is at most
#    $a = (D + 2)\, u\, \mathrm{scale} \sum_d |q_d| |k_d|$. An error $a$ in an exponent is a
#    relative error $a$ in a weight.
# 2. A weight is $e^{s - m}$ times the later corrections. Each subtraction is rounded, an error
#    of $u$ times its size, and the sizes add up to $m_{\mathrm{final}} - s$, at most the range
#    $R$ of the row. Each of the $T$ tiles adds one `exp` (good to $c$ units in the last place,
#    $2 c u$) and one multiplication ($u$): together $R u + (2 c + 1)(T + 1) u$.
# 3. A sum of `N` weights, or of `N` products of a weight and a value, adds at most $(N + 1) u$.
#
# So numerator and denominator have the relative error $a + (R + (2c+1)(T+1) + N + 1)\,u$ each,
# the first one relative to $\sum_n w_n |v_n|$, where $w_n = e^{s_n - m}$. Their quotient has
# twice that, plus $u$ for the division itself, relative to $\sum_n p_n |v_n|$. Any order of tiles
# and sums obeys it. `rounding.py` has this as code, and the bound of the LSE beside it.
#
# We compare with `F.scaled_dot_product_attention`. It is rounded as well, so the difference of
# the two may be the sum of two bounds. We do not know its tiles, so its bound gets one tile a
# key; and PyTorch's vector library for CPUs has a fast `exp` that is good to 20 units in the last
# place, so its bound allows for that one. The lengths are no multiples of the tiles, and 183 puts
# the corner of a tile right on the causal diagonal.
#
# A bound that covers the worst case is far above what happens, because rounding errors mostly
# cancel. So there is a second test, the one that Tilewise uses everywhere: the error against
# fp64 is at most twice that of the plain formula in the same dtype, plus two roundings.


# %%
def compare(dtype: torch.dtype, M: int, N: int, causal: bool) -> list[object]:
    q, k, v = (torch.randn(2, 3, length, 64).to(dtype) for length in (M, N, N))
    mask = bottom_right(q, k, causal)
    got = tiled_attention(q, k, v, mask=mask, block_m=32, block_n=48)

    s = exact_scores(q, k, mask)
    hidden = s == NEG_INF
    reference = F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
    our_bound, lse_bound = forward_bounds(q, k, v, s, tiles=len(spans(N, 48)))
    their_bound, _ = forward_bounds(q, k, v, s, tiles=N, exp_ulps=20)
    error, bound = (got.out - reference).abs(), our_bound + their_bound
    assert (error <= bound).all()
    assert ((got.lse - torch.logsumexp(s, dim=-1)).abs() <= lse_bound).all()

    if dtype == torch.float32:
        exact = torch.softmax(s, dim=-1) @ v.double()
        plain_s = (q @ k.transpose(-1, -2) * 64**-0.5).masked_fill(hidden, NEG_INF)
        plain = torch.softmax(plain_s, dim=-1) @ v
        own_error, plain_error = ((x - exact).abs() for x in (got.out, plain))
        assert (own_error <= our_bound).all()
        two_roundings = 2 * torch.finfo(dtype).eps * exact.abs().max()
        assert own_error.max() <= 2 * plain_error.max() + two_roundings
    shape = f"{M} x {N}{' causal' if causal else ''}"
    return [shape, str(dtype)[6:], f"{error.max():.1e}", f"{bound.max():.1e}"]


table(
    ["M x N", "dtype", "largest difference", "largest bound"],
    [
        compare(dtype, M, N, causal)
        for dtype in (torch.float64, torch.float32)
        for M, N in ((100, 100), (70, 183))
        for causal in (False, True)
    ],
)

# %% [markdown]
# ## 4. Empty rows
#
# With more queries than keys and a causal mask, the first `M - N` queries see nothing. Their
# output is 0, their LSE is `-inf`, and the rows after them are right.

# %%
M, N = 10, 6
q, k, v = torch.randn(M, 8), torch.randn(N, 8), torch.randn(N, 8)
out, lse = tiled_attention(q, k, v, mask=bottom_right(q, k), block_m=4, block_n=4)
assert torch.equal(out[: M - N], torch.zeros(M - N, 8))
assert (lse[: M - N] == NEG_INF).all()
square = F.scaled_dot_product_attention(q[M - N :], k, v, is_causal=True)
torch.testing.assert_close(out[M - N :], square)

# %% [markdown]
# ## 5. Two partial results merge
#
# Cut the keys in two and compute attention over each part. The LSE of a part is the logarithm of
# its denominator, so the whole follows from the two parts, without looking at a single score:
#
# $$ \mathrm{lse} = \log(e^{\mathrm{lse}_1} + e^{\mathrm{lse}_2}), \qquad
#    O = e^{\mathrm{lse}_1 - \mathrm{lse}} O_1 + e^{\mathrm{lse}_2 - \mathrm{lse}} O_2 $$
#
# The update of section 2 is this merge with one side still unnormalised. Again one line needs
# care: where both sides are empty, the difference of two LSEs is `-inf - (-inf)`. A popular
# short form of the weight, `sigmoid(lse_1 - lse_2)`, has that flaw.

# %%
nothing = torch.tensor(NEG_INF)
assert torch.isnan(torch.sigmoid(nothing - nothing))


def merge(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    subtract = finite_or_zero(lse)
    weight_a, weight_b = ((x.lse - subtract).exp().unsqueeze(-1) for x in (a, b))
    return Partial(weight_a * a.out + weight_b * b.out, lse)


# %% [markdown]
# The merge is commutative and associative (up to rounding), and the empty partial is its neutral
# element. So parts may be merged in any order, in any tree, wherever they were computed: by the
# thread blocks that share the keys of one decode step (split-KV), by GPUs in a ring, or from a
# prefix that many requests share.

# %%
M, N, D = 5, 96, 16
q, k, v = (torch.randn(2, length, D, dtype=torch.float64) for length in (M, N, N))
whole = tiled_attention(q, k, v)
# Parts of different sizes; the second one is empty, as a hidden part would be.
hidden = Partial(torch.zeros(2, M, D).double(), torch.full((2, M), NEG_INF).double())
parts = [
    tiled_attention(q, k[:, :10], v[:, :10]),
    hidden,
    tiled_attention(q, k[:, 10:64], v[:, 10:64]),
    tiled_attention(q, k[:, 64:], v[:, 64:]),
]
a, b, c, d = parts

torch.testing.assert_close(merge(merge(merge(a, b), c), d), whole)
torch.testing.assert_close(merge(merge(a, b), merge(c, d)), whole)
torch.testing.assert_close(merge(d, merge(b, merge(c, a))), whole)
for part in parts:
    for merged in (merge(part, hidden), merge(hidden, part)):
        torch.testing.assert_close(merged, part, atol=0, rtol=0)

# %% [markdown]
# ## 6. What the tiles cost and what they save
#
# ### Skipped tiles
#
# With `T` tiles on each side, causal attention computes $T (T + 1) / 2$ of $T^2$, and only the
# `T` on the diagonal need the mask. The rest of the upper half costs nothing: no FLOPs and no
# bytes.

# %%
rows = []
for length in (128, 256, 512):
    q, k, v = (torch.randn(1, 1, length, 64) for _ in range(3))
    watch = Watch()
    with FlopCounterMode(display=False) as counter:
        tiled_attention(q, k, v, mask=bottom_right(q, k), block_m=32, block_n=32, watch=watch)
    T = length // 32
    done = watch.masked + watch.full
    assert [watch.masked, done] == [T, T * (T + 1) // 2]
    assert counter.get_total_flops() == done * 4 * 32 * 32 * 64
    rows.append([length, watch.skipped, watch.masked, watch.full, f"{done / T**2:.1%}"])
table(["M = N", "skipped", "masked", "full", "FLOPs of the square"], rows)

# %% [markdown]
# ### The memory that is not spent
#
# The peak of the plain formula has two score matrices. The peak of the tiled one has its output
# and a few tiles, and those few tiles are the same at every length.


# %%
def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    return torch.softmax(s, dim=-1) @ v


HEADS, D = 4, 64
rows, workspaces, peaks = [], [], []
for length in (256, 512, 1024, 2048):
    q, k, v = (torch.randn(1, HEADS, length, D) for _ in range(3))
    plain, tiled = (peak_bytes(way, q, k, v) for way in (plain_attention, tiled_attention))
    workspace = tiled - 4 * HEADS * length * (D + 1)
    workspaces.append(workspace)
    peaks.append((plain, tiled))
    rows.append([length, *(f"{x / 1e6:.2f}" for x in (plain, tiled, workspace))])
table(["M = N", "plain peak MB", "tiled peak MB", "of it not the result"], rows)

assert len(set(workspaces)) == 1
# Eight times the length: 64 times the plain peak, and the tiled one grows by its result only.
assert peaks[-1][0] > 50 * peaks[0][0]
assert peaks[-1][0] > 40 * peaks[-1][1]

# %% [markdown]
# ### The bytes that cross the bus
#
# Tiling is not free of traffic: every tile of queries streams all of K and V past. With
# $M / \mathrm{block}_m$ tiles of queries that is
# $M D + (M / \mathrm{block}_m)\, N (D + E)$ elements in, and the result out.
#
# The first FlashAttention had the loops the other way round: keys outside, queries inside. Then
# the state of the queries has to leave the chip and come back for every tile of keys.
# FlashAttention-2 swapped the loops. That saves bytes, and every tile of queries became
# independent work, so that a long sequence fills a GPU even with one batch and few heads.


# %%
def keys_outside(q: Tensor, k: Tensor, v: Tensor, *, block: int, watch: Watch) -> Partial:
    """The first FlashAttention's order of loops; the state of all queries is in memory."""
    state = empty_state(q, v)
    scale = q.shape[-1] ** -0.5
    for n_start, n_stop in spans(k.shape[-2], block):
        k_tile, v_tile = (watch.load(x[..., n_start:n_stop, :]) for x in (k, v))
        for m_start, m_stop in spans(q.shape[-2], block):
            q_tile = watch.load(q[..., m_start:m_stop, :]) * scale
            stored = State(
                state.row_max[..., m_start:m_stop],
                state.row_sum[..., m_start:m_stop],
                state.acc[..., m_start:m_stop, :],
            )
            loaded = State(*map(watch.load, stored))
            updated = update(loaded, q_tile @ k_tile.transpose(-1, -2), v_tile)
            for target, tile in zip(stored, updated, strict=True):
                watch.store(target, tile)
    return finish(state)


LENGTH, D, BLOCK = 512, 64, 64
q, k, v = (torch.randn(1, 1, LENGTH, D) for _ in range(3))
watch, first_order = Watch(), Watch()
queries_first = tiled_attention(q, k, v, block_m=BLOCK, block_n=BLOCK, watch=watch)
torch.testing.assert_close(keys_outside(q, k, v, block=BLOCK, watch=first_order), queries_first)

T = LENGTH // BLOCK
# Elements in and out, times 4 bytes.
assert watch.loaded == 4 * (LENGTH * D + T * LENGTH * 2 * D)
assert watch.stored == 4 * LENGTH * (D + 1)
assert first_order.loaded == 4 * (LENGTH * 2 * D + T * LENGTH * (2 * D + 2))
assert first_order.stored == 4 * T * LENGTH * (D + 2)

for name, tally in (("keys outside", first_order), ("queries outside", watch)):
    print(f"{name}: {tally.loaded // 1024} KB loaded, {tally.stored // 1024} KB stored")
assert watch.loaded + watch.stored < 0.7 * (first_order.loaded + first_order.stored)

# %% [markdown]
# A larger tile of queries means fewer passes over K and V. In bf16 the inner loop does
# $4\, \mathrm{block}_m\, \mathrm{block}_n D$ FLOPs for $4\, \mathrm{block}_n D$ bytes: an
# intensity of $\mathrm{block}_m$ FLOP per byte. Lab 1 put the balance of an H100 at 295, so a tile
# of 128 queries alone would leave it waiting for memory. What helps is the L2 cache: thread
# blocks that run at the same time stream the same K and V, and only the first of them pays.
#
# What limits the tile is the size of the chip. A Hopper SM has 227 KB of shared memory for one
# thread block. A tile of Q, and two stages each of K and V so that loads overlap with work, must
# fit, and the state must fit in the registers.


# %%
def tile_kb(block_m: int, block_n: int, D: int, stages: int = 2, element_size: int = 2) -> float:
    return element_size * D * (block_m + 2 * stages * block_n) / 1024


assert tile_kb(128, 128, 128) == 160
# Neither longer tiles of keys nor a wider head fits without giving way elsewhere.
assert tile_kb(128, 256, 128) > 227
assert tile_kb(128, 128, 256) > 227
assert tile_kb(128, 80, 256) < 227

# %% [markdown]
# ## 7. Exercises
#
# **Exercise 1: a sink is a merge.** An attention sink is one extra logit a head, in the
# denominator only: it has no value vector, so it shrinks the output. Give attention with a sink
# by one call of `merge`, with no new softmax. `sink` is `[H]`.


# %%
def sink_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Partial:
    raise NotImplementedError


def check_sink_attention(answer: Callable[..., Partial]) -> None:
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    sink = torch.randn(3)
    extra = sink.view(1, 3, 1, 1).expand(2, 3, 20, 1).double()
    s = torch.cat([exact_scores(q, k), extra], dim=-1)
    out, lse = answer(q, k, v, sink)
    torch.testing.assert_close(lse.double(), torch.logsumexp(s, dim=-1), atol=1e-5, rtol=0)
    expected = torch.softmax(s, dim=-1)[..., :-1] @ v.double()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


mark("1", sink_attention, check_sink_attention)

# %% [markdown]
# **Exercise 2: the tiles of a sliding window.** Query `m` at position `m + offset` sees the keys
# from `m + offset - left` to `m + offset`. For the queries `m_start <= m < m_stop`, give the first
# tile of keys to visit and the tile at which to stop, as numbers of tiles of `block_n` keys. Visit
# no tile that no query sees. If no query sees any key, return `(0, 0)`.


# %%
def window_tiles(
    m_start: int, m_stop: int, len_n: int, offset: int, left: int, block_n: int
) -> tuple[int, int]:
    raise NotImplementedError


def check_window_tiles(answer: Callable[..., tuple[int, int]]) -> None:
    block_m, block_n = 8, 16
    for len_m, len_n, left in ((64, 64, 0), (64, 64, 20), (33, 90, 5), (50, 20, 7), (8, 100, 999)):
        offset = len_n - len_m
        for m_start, m_stop in spans(len_m, block_m):
            seen = [
                n // block_n
                for n in range(len_n)
                if any(m + offset - left <= n <= m + offset for m in range(m_start, m_stop))
            ]
            expected = (seen[0], seen[-1] + 1) if seen else (0, 0)
            got = answer(m_start, m_stop, len_n, offset, left, block_n)
            assert tuple(got) == expected, (m_start, m_stop, len_n, offset, left, got, expected)


mark("2", window_tiles, check_window_tiles)

# %% [markdown]
# **Exercise 3: base two.** GPUs have an instruction for $2^x$ and none for $e^x$. Kernels fold
# `scale * log2(e)` into one factor and use `exp2` everywhere. Given unscaled scores `[m, N]` and
# a scale, return the natural-log LSE, streaming blocks of 16 keys, with `exp2` and `log2` only.


# %%
def base_two_lse(scores: Tensor, scale: float) -> Tensor:
    raise NotImplementedError


def check_base_two_lse(answer: Callable[[Tensor, float], Tensor]) -> None:
    scores = 20 * torch.randn(7, 80, dtype=torch.float64)
    with ByteMeter() as meter:
        lse = answer(scores, 0.25)
    torch.testing.assert_close(lse, torch.logsumexp(0.25 * scores, dim=-1))
    used = {t.op for t in meter.log}
    assert "exp2" in used
    assert not used & {"exp", "log", "logsumexp"}


mark("3", base_two_lse, check_base_two_lse)

# %% [markdown]
# ### Solutions


# %%
def solved_sink_attention(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Partial:
    # A key with the score `sink` and the value 0 is a partial: its softmax is 1, its LSE is sink.
    partial = tiled_attention(q, k, v)
    lse = sink.unsqueeze(-1).expand_as(partial.lse)
    return merge(partial, Partial(torch.zeros_like(partial.out), lse))


def solved_window_tiles(
    m_start: int, m_stop: int, len_n: int, offset: int, left: int, block_n: int
) -> tuple[int, int]:
    # The first query reaches furthest back, the last one furthest ahead.
    first = max(m_start + offset - left, 0)
    last = min(m_stop - 1 + offset, len_n - 1)
    return (first // block_n, last // block_n + 1) if first <= last else (0, 0)


def solved_base_two_lse(scores: Tensor, scale: float) -> Tensor:
    row_max = scores.new_full(scores.shape[:-1], NEG_INF)
    row_sum = torch.zeros_like(row_max)
    for start, stop in spans(scores.shape[-1], 16):
        s_log2 = scores[:, start:stop] * (scale * math.log2(math.e))
        new_max = torch.maximum(row_max, s_log2.amax(dim=-1))
        row_sum = row_sum * (row_max - new_max).exp2()
        row_sum = row_sum + (s_log2 - new_max.unsqueeze(-1)).exp2().sum(dim=-1)
        row_max = new_max
    return (row_max + row_sum.log2()) * math.log(2)


prove(check_sink_attention, solved_sink_attention)
prove(check_window_tiles, solved_window_tiles)
prove(check_base_two_lse, solved_base_two_lse)

# %% [markdown]
# ## Sources
#
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018,
#   arXiv 1805.02867 (section 1: algorithms 1 to 3).
# - M. Rabe, C. Staats, *Self-attention Does Not Need O(n^2) Memory*, 2021, arXiv 2112.05682.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, *FlashAttention: Fast and Memory-Efficient Exact
#   Attention with IO-Awareness*, 2022, arXiv 2205.14135 (algorithm 1: keys outside).
# - T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
#   2023, arXiv 2307.08691 (section 3.1: one division at the end, only the LSE is kept;
#   section 3.2: queries outside).
# - *FlashAttention-4*, 2026, arXiv 2603.05451 (corrections that are skipped).
# - N. Higham, *Accuracy and Stability of Numerical Algorithms*, SIAM, 2002 (chapters 2 and 3:
#   the rounding of sums and dot products).
# - NVIDIA, *CUDA C++ Programming Guide*, compute capability 9.0 (227 KB of shared memory).
