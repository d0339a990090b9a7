# %% [markdown]
# # Lab 6: split keys and merge
#
# One query and many keys, or one sequence and many GPUs: both cut the keys into parts, attend to
# each by itself, and merge. This lab takes the merge apart, counts what splitting buys when a
# model decodes, and ends with a ring of ranks that live in one process.
#
# Letters: `M` query length, `N` key length, `D` head dim, `R` ranks; tensors are `[M, D]`, one
# head.

# %%
from collections.abc import Callable

import torch
from lab_tools import mark, prove, table
from tiles import NEG_INF, Partial, spans
from torch import Tensor

torch.manual_seed(0)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Partial:
    s = q @ k.T * q.shape[-1] ** -0.5
    if hidden is not None:
        s = s.masked_fill(hidden, NEG_INF)
    lse = s.logsumexp(-1)
    # A row that sees nothing has an LSE of -inf, and gives 0.
    p = (s - lse.masked_fill(lse == NEG_INF, 0.0)[:, None]).exp()
    return Partial(p @ v, lse)


# %% [markdown]
# ## 1. The merge
#
# `lse` says how large the sum in a part's denominator was. Two parts weigh as much as their sums
# do.


# %%
def merge(a: Partial, b: Partial) -> Partial:
    lse = torch.logaddexp(a.lse, b.lse)
    shift = lse.masked_fill(lse == NEG_INF, 0.0)
    weights = [(part.lse - shift).exp()[:, None] for part in (a, b)]
    return Partial(weights[0] * a.out + weights[1] * b.out, lse)


q, k, v = (torch.randn(rows, 32, dtype=torch.float64) for rows in (5, 1000, 1000))
whole = attend(q, k, v)
eps = torch.finfo(torch.float64).eps


def same(got: Partial, want: Partial) -> bool:
    """Within the rounding of sums of a thousand terms of size one."""
    return all(
        ((x - y).abs().max() <= 100 * eps * 8).item() for x, y in zip(got, want, strict=True)
    )


parts = [attend(q, k[a:b], v[a:b]) for a, b in spans(1000, 300)]
left = merge(merge(merge(parts[0], parts[1]), parts[2]), parts[3])
tree = merge(merge(parts[0], parts[1]), merge(parts[2], parts[3]))
assert same(left, whole) and same(tree, whole)
# A part that sees nothing weighs nothing, from either side.
nothing = Partial(torch.zeros_like(whole.out), torch.full_like(whole.lse, NEG_INF))
assert torch.equal(merge(nothing, whole).out, whole.out)
assert torch.isfinite(merge(nothing, nothing).out).all()

# %% [markdown]
# The gradient goes through both results: a part's weight depends on its LSE. Whoever
# differentiates only the outputs gets a wrong gradient.

# %%
leaf = k.clone().requires_grad_()
parts = [attend(q, leaf[a:b], v[a:b]) for a, b in spans(1000, 500)]
(right,) = torch.autograd.grad(attend(q, leaf, v).out.sum(), leaf)
(merged,) = torch.autograd.grad(merge(*parts).out.sum(), leaf, retain_graph=True)
cut = [Partial(part.out, part.lse.detach()) for part in parts]
(wrong,) = torch.autograd.grad(merge(*cut).out.sum(), leaf)
assert (merged - right).abs().max() < 1e-12 < (wrong - right).abs().max()

# %% [markdown]
# ## 2. What splitting buys
#
# A GPU with 132 multiprocessors decodes one query of 8 kv heads over 32768 keys. Without a split,
# 8 programs read everything. With `S` splits there are `8 S`, which run in waves of 132; merging
# costs an output and an LSE for each.

# %%
PROCESSORS, HEADS, KEYS, TILE = 132, 8, 32768, 128


def waves(splits: int) -> float:
    """Time in tiles: the longest program of each wave, and the merge's reads."""
    tiles = -(-KEYS // TILE // splits)
    return -(-HEADS * splits // PROCESSORS) * tiles + splits * HEADS / PROCESSORS / TILE


times = {splits: waves(splits) for splits in (1, 4, 16, 17, 33, 64)}
table(
    ["splits", "programs", "tiles of time", "as fast"],
    [[str(s), str(HEADS * s), f"{t:.1f}", f"{times[1] / t:.1f}x"] for s, t in times.items()],
)
assert times[16] < times[4] < times[1]
# One program too many is a whole wave more.
assert times[17] > 1.5 * times[16]

# %% [markdown]
# ## 3. A ring
#
# `R` ranks each hold a share of queries, keys and values. Keys and values go round; each rank
# attends to what it holds and merges. Under a causal mask most of it is hidden from some and seen
# by others.


# %%
def ring(owned: list[Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Partial, list[int]]:
    """Causal attention with rank r owning the positions `owned[r]`; the result, and each rank's
    visible pairs."""
    R = len(owned)
    state = [Partial(torch.zeros(len(o), q.shape[1], dtype=q.dtype),
                     torch.full((len(o),), NEG_INF, dtype=q.dtype)) for o in owned]  # fmt: skip
    pairs = [0] * R
    for step in range(R):
        for rank in range(R):
            mine, theirs = owned[rank], owned[(rank - step) % R]
            hidden = theirs[None, :] > mine[:, None]
            pairs[rank] += int((~hidden).sum())
            state[rank] = merge(state[rank], attend(q[mine], k[theirs], v[theirs], hidden))
    out, lse = torch.empty_like(q), torch.empty(len(q), dtype=q.dtype)
    for rank in range(R):
        out[owned[rank]], lse[owned[rank]] = state[rank]
    return Partial(out, lse), pairs


def contiguous(length: int, R: int) -> list[Tensor]:
    return list(torch.arange(length).chunk(R))


q, k, v = (torch.randn(1024, 32, dtype=torch.float64) for _ in range(3))
causal = torch.ones(1024, 1024, dtype=torch.bool).triu(1)
result, pairs = ring(contiguous(1024, 4), q, k, v)
assert same(result, attend(q, k, v, causal))
print("pairs by rank, contiguous:", pairs)
assert pairs[3] > 6 * pairs[0]

# %% [markdown]
# The last rank works seven times as much as the first, and all wait for it. The first exercise
# mends that.
#
# ## Exercises
#
# **Exercise 1: zigzag.** Cut the positions into `2 R` runs and give rank r two of them, so that
# every rank sees as many pairs.


# %%
def zigzag(length: int, R: int) -> list[Tensor]:
    raise NotImplementedError


def check_zigzag(answer: Callable[..., list[Tensor]]) -> None:
    owned = answer(1024, 4)
    assert sorted(torch.cat(owned).tolist()) == list(range(1024))
    result, pairs = ring(owned, q, k, v)
    assert same(result, attend(q, k, v, causal))
    assert len(set(pairs)) == 1


mark("1", zigzag, check_zigzag)

# %% [markdown]
# **Exercise 2: a sink.** A sink is one logit more in the denominator, with no value. Give it as a
# `Partial` over one row a query, to be merged with any part.


# %%
def sink_part(sink: float, like: Partial) -> Partial:
    raise NotImplementedError


def check_sink_part(answer: Callable[..., Partial]) -> None:
    whole = attend(q[:8], k, v)
    part = answer(2.0, whole)
    assert isinstance(part, Partial)
    merged = merge(whole, part)
    s = torch.cat([q[:8] @ k.T * 32**-0.5, torch.full((8, 1), 2.0, dtype=q.dtype)], 1)
    assert same(merged, Partial(s.softmax(1)[:, :-1] @ v, s.logsumexp(1)))


mark("2", sink_part, check_sink_part)

# %% [markdown]
# **Exercise 3: a shared prefix.** `count` requests share a prefix of keys and have suffixes of
# their own. Give every request's output, and read the prefix in one `attend`.


# %%
def cascade(
    queries: list[Tensor], prefix: tuple[Tensor, Tensor], suffixes: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    raise NotImplementedError


def check_cascade(answer: Callable[..., list[Tensor]]) -> None:
    queries = [q[i : i + 1] for i in range(4)]
    suffixes = [(k[500 + 50 * i : 550 + 50 * i], v[500 + 50 * i : 550 + 50 * i]) for i in range(4)]
    got = answer(queries, (k[:500], v[:500]), suffixes)
    for one, query, (keys, values) in zip(got, queries, suffixes, strict=True):
        whole = attend(query, torch.cat([k[:500], keys]), torch.cat([v[:500], values]))
        assert same(Partial(one, whole.lse), whole)


mark("3", cascade, check_cascade)

# %% [markdown]
# ### Solutions


# %%
def solved_zigzag(length: int, R: int) -> list[Tensor]:
    runs = torch.arange(length).chunk(2 * R)
    return [torch.cat([runs[r], runs[2 * R - 1 - r]]) for r in range(R)]


def solved_sink_part(sink: float, like: Partial) -> Partial:
    return Partial(torch.zeros_like(like.out), torch.full_like(like.lse, sink))


def solved_cascade(
    queries: list[Tensor], prefix: tuple[Tensor, Tensor], suffixes: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    # All queries in one tile: the prefix is read once for all of them.
    shared = attend(torch.cat(queries), *prefix)
    outs = []
    for i, (query, suffix) in enumerate(zip(queries, suffixes, strict=True)):
        part = Partial(shared.out[i : i + 1], shared.lse[i : i + 1])
        outs.append(merge(part, attend(query, *suffix)).out)
    return outs


prove(check_zigzag, solved_zigzag)
prove(check_sink_part, solved_sink_part)
prove(check_cascade, solved_cascade)

# %% [markdown]
# ## Sources
#
# - Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); Ring Attention, arXiv 2310.01889; Hydragen
#   (shared prefixes), arXiv 2402.05099.
