# %% [markdown]
# # Lab 5: schedules from 1 to 4
#
# Labs 1 to 3 built the algorithm. The four generations of FlashAttention compute the same sums and
# differ in *schedule*: which loop is outside, who owns what, when the numerator is rescaled, what
# overlaps. This lab counts what each choice moves and how often each rule rescales, and lets two
# units of a multiprocessor work beside each other in a small simulation.
#
# Letters: `M` query length, `N` key length, `D` head dim; tiles are `BLOCK` x `BLOCK`.

# %%
import math
from collections.abc import Callable

import torch
from lab_tools import mark, prove, table
from tiles import NEG_INF, spans
from torch import Tensor

torch.manual_seed(0)
M = N = 1024
D, BLOCK, SIZE = 64, 128, 2

# %% [markdown]
# ## 1. Which loop is outside
#
# The first FlashAttention walks over keys outside and queries inside. K and V are read once, but
# the unfinished output of *every* query tile, with its maximum and sum, is read and written once
# for each key tile. The second exchanges the loops: the output stays in registers, and K and V are
# read once for each query tile. Nothing but reading can be shared by programs that run together,
# which is what an L2 cache is for.

# %%
STATE = 4 * D + 8  # bytes of a row's fp32 output, maximum and sum


def keys_outside(rows: int, keys: int) -> dict[str, int]:
    moved = {"K and V": 0, "Q": 0, "state": 0}
    for n0, n1 in spans(keys, BLOCK):
        moved["K and V"] += (n1 - n0) * 2 * D * SIZE
        for m0, m1 in spans(rows, BLOCK):
            moved["Q"] += (m1 - m0) * D * SIZE
            moved["state"] += 2 * (m1 - m0) * STATE
    return moved


def queries_outside(rows: int, keys: int) -> dict[str, int]:
    moved = {"K and V": 0, "Q": 0, "state": 0}
    for m0, m1 in spans(rows, BLOCK):
        moved["Q"] += (m1 - m0) * D * SIZE
        for n0, n1 in spans(keys, BLOCK):
            moved["K and V"] += (n1 - n0) * 2 * D * SIZE
        moved["state"] += (m1 - m0) * STATE
    return moved


first, second = keys_outside(M, N), queries_outside(M, N)
table(
    ["moved, KiB", *first, "all"],
    [
        [name, *(f"{x / 1024:.0f}" for x in moved.values()), f"{sum(moved.values()) / 1024:.0f}"]
        for name, moved in (("keys outside", first), ("queries outside", second))
    ],
)
assert sum(first.values()) > 2 * sum(second.values())
# What is read only is shared in L2; what is written is not.
assert first["state"] == 2 * (N // BLOCK) * second["state"]

# %% [markdown]
# ## 2. How often to rescale
#
# A rescale multiplies the whole numerator, `D` numbers a row. The rule of the first three
# generations is to do it at each tile. But the factor is 1 unless the row's maximum rose, and even
# when it rose a little, sums made under the old one are still good: an fp32 number holds 2^127.
# The fourth rescales only where the maximum passed the last reference by more than a limit.


# %%
def lazy_softmax(s: Tensor, v: Tensor, limit_log2: float) -> tuple[Tensor, int]:
    """The output of rows of scores `[M, N]`, and how many row rescales it took."""
    reference = torch.full((s.shape[0], 1), NEG_INF)
    row_sum, acc = torch.zeros(s.shape[0], 1), torch.zeros(s.shape[0], v.shape[1])
    rescales = 0
    for n0, n1 in spans(s.shape[1], BLOCK):
        tile = s[:, n0:n1]
        top = tile.amax(1, keepdim=True)
        is_first = reference == NEG_INF
        rises = is_first | (top > reference + limit_log2 * math.log(2))
        new = torch.where(rises, torch.maximum(top, reference), reference)
        factor = torch.where(is_first, 0.0, (reference - new).exp())
        rescales += int((rises & ~is_first).sum())
        p = (tile - new).exp()
        row_sum, acc = factor * row_sum + p.sum(1, keepdim=True), factor * acc + p @ v[n0:n1]
        reference = new
    return acc / row_sum, rescales


s, v = 3 * torch.randn(256, N), torch.randn(N, D)
exact = torch.softmax(s.double(), 1) @ v.double()
plain = (torch.softmax(s, 1) @ v - exact).abs().max()
rows = []
for name, limit in (("each rise", 0.0), ("2-fold", 1.0), ("256-fold", 8.0)):
    out, rescales = lazy_softmax(s, v, limit)
    error = (out - exact).abs().max()
    # As good as softmax in one piece: twice its own error, and the rounding of the result.
    assert error <= 2 * plain + 2 * torch.finfo(torch.float32).eps * exact.abs().max()
    rows.append([name, str(rescales), str(256 * (N // BLOCK)), f"{error:.1e}"])
table(["rescales at", "rescales", "tiles x rows", "largest error"], rows)
assert 50 * int(rows[2][1]) < int(rows[1][1]) < int(rows[0][1]) < 256 * (N // BLOCK)

# %% [markdown]
# Nothing is lost: a rescale less is a rounding less. The Hopper forward of Tilewise goes one step
# further and keeps a reference that it looks at only when a sum of probabilities grows large.
#
# ## 3. What overlaps
#
# A multiprocessor has matrix units and special function units, and they are different hardware.
# Take the time of one product as 1. One after the other, a tile takes a product, its exponentials
# and a product. With two groups of warps in turns, the exponentials of one group run under the
# products of the other.


# %%
def one_after_the_other(tiles: int, exps: float) -> float:
    return tiles * (2 + exps)


def in_turns(tiles: int, exps: float) -> float:
    """Two groups; matrix and special units each do one thing at a time."""
    matrix = special = 0.0
    waiting: list[float] = []
    for _ in range(tiles):
        matrix += 1
        special = max(special, matrix) + exps
        if waiting:
            matrix = max(matrix, waiting.pop()) + 1
        waiting.append(special)
    return max(matrix, waiting.pop()) + 1


speedups = {}
for name, exps in (("D 128 on Hopper", 1.0), ("D 64 on Hopper", 2.0), ("D 64 on Blackwell", 4.0)):
    serial, turns = one_after_the_other(64, exps), in_turns(64, exps)
    speedups[name] = serial / turns
    bound = max(2.0, exps) * 64
    print(f"{name:18} in turns {serial / turns:.2f}x as fast, {bound / turns:.0%} of the bound")
    assert turns >= bound
assert 1.4 < speedups["D 128 on Hopper"] <= 1.5
assert 1.8 < speedups["D 64 on Hopper"] < 2.0

# %% [markdown]
# Overlap helps most where both units have as much to do. Where exponentials alone are the bound,
# there is nothing left to hide them under: that is why the fourth generation computes part of them
# as polynomials on a third kind of unit.
#
# ## Exercises
#
# **Exercise 1: causal.** Give the bytes of K and V that `queries_outside` moves under a causal mask
# over `length` queries and keys, where tiles above the diagonal are skipped.


# %%
def causal_key_bytes(length: int) -> int:
    raise NotImplementedError


def check_causal_key_bytes(answer: Callable[..., int]) -> None:
    for length in (BLOCK, 1000, 1024, 4096):
        pairs = [(m1, n0, n1) for _, m1 in spans(length, BLOCK) for n0, n1 in spans(length, BLOCK)]
        assert answer(length) == sum((n1 - n0) * 2 * D * SIZE for m1, n0, n1 in pairs if n0 < m1)


mark("1", causal_key_bytes, check_causal_key_bytes)

# %% [markdown]
# **Exercise 2: emulation.** A fraction `share` of the exponentials is moved to other units, which
# have nothing else to do and take `cost` times as long for each. Which share makes both ends meet?


# %%
def best_share(cost: float) -> float:
    raise NotImplementedError


def check_best_share(answer: Callable[[float], float]) -> None:
    for cost in (1.0, 3.0, 10.0):
        share = answer(cost)
        assert 0 < share < 1
        assert abs((1 - share) - share * cost) < 1e-12


mark("2", best_share, check_best_share)

# %% [markdown]
# **Exercise 3: the order of keys.** From which end should causal rows be walked, so that the
# maximum of a row with growing scores (the nearest keys matter most) rises least often? Give the
# rescales that `lazy_softmax` with a limit of 0 counts on `s` in the better order, without
# changing the output.


# %%
def fewest_rescales(s: Tensor, v: Tensor) -> tuple[Tensor, int]:
    raise NotImplementedError


def check_fewest_rescales(answer: Callable[..., tuple[Tensor, int]]) -> None:
    s = torch.linspace(-8, 8, N).expand(4, N) + 0.01 * torch.randn(4, N)
    v = torch.randn(N, D)
    forwards, many = lazy_softmax(s, v, 0.0)
    backwards, few = answer(s, v)
    torch.testing.assert_close(backwards, forwards)
    assert few == 0 < many


mark("3", fewest_rescales, check_fewest_rescales)

# %% [markdown]
# ### Solutions


# %%
def solved_causal_key_bytes(length: int) -> int:
    ends = (m1 for _, m1 in spans(length, BLOCK))
    # A query tile sees the keys up to the end of the key tile in which its last query stands.
    return sum(min(length, -(-m1 // BLOCK) * BLOCK) for m1 in ends) * 2 * D * SIZE


def solved_best_share(cost: float) -> float:
    return 1 / (1 + cost)


def solved_fewest_rescales(s: Tensor, v: Tensor) -> tuple[Tensor, int]:
    # The nearest keys are the last: from the end on, the first tile has the maximum already.
    return lazy_softmax(s.flip(1), v.flip(0), 0.0)


prove(check_causal_key_bytes, solved_causal_key_bytes)
prove(check_best_share, solved_best_share)
prove(check_fewest_rescales, solved_fewest_rescales)

# %% [markdown]
# ## Sources
#
# - FlashAttention, arXiv 2205.14135; FlashAttention-2, arXiv 2307.08691; FlashAttention-3,
#   arXiv 2407.08608; FlashAttention-4, arXiv 2603.05451.
