# %% [markdown]
# # Lab 7: linear attention
#
# Softmax needs every score of a row before it can weigh one. Leave the softmax out, and the order
# of the products is free: `(Q K^T) V = Q (K^T V)`. What is then kept is no cache of keys but a
# *state* of `D x E` numbers, however long the text. This lab writes it as a recurrence and in
# chunks, adds a gate, and then the delta rule, which overwrites instead of adding.
#
# Letters: `N` length, `D` key dim, `E` value dim, `C` chunk; tensors are `[N, D]`, one head.

# %%
from collections.abc import Callable

import torch
from lab_tools import mark, prove, table
from tiles import spans
from torch import Tensor

torch.manual_seed(0)
N, D, E, C = 256, 16, 24, 32
q, k = (torch.nn.functional.normalize(torch.randn(N, D, dtype=torch.float64), dim=-1) for _ in "qk")
v = torch.randn(N, E, dtype=torch.float64)


def same(got: Tensor, want: Tensor) -> bool:
    """Within the rounding of sums of a few hundred terms."""
    return bool((got - want).abs().max() <= 1e-12 * want.abs().max())


# %% [markdown]
# ## 1. A state in place of scores
#
# Causally, token t reads what all tokens up to it wrote: `state += k v^T`, then `out = q state`.


# %%
def as_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.T).tril() @ v


def as_recurrence(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for t in range(len(q)):
        state = state + torch.outer(k[t], v[t])
        out[t] = q[t] @ state
    return out


assert same(as_recurrence(q, k, v), as_scores(q, k, v))

# %% [markdown]
# The recurrence does `4 D E` operations a token and never looks back, but each waits for the one
# before, and outer products keep no matrix unit busy. The scores are products, but `N^2` of them.
# *Chunks* take the better half of each: scores inside a chunk, the state between chunks.


# %%
def as_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for a, b in spans(len(q), C):
        inside = (q[a:b] @ k[a:b].T).tril() @ v[a:b]
        out[a:b] = q[a:b] @ state + inside
        state = state + k[a:b].T @ v[a:b]
    return out


assert same(as_chunks(q, k, v), as_scores(q, k, v))


def operations(length: int, chunk: int) -> dict[str, int]:
    return {
        "scores": 2 * length * length * (D + E),
        "chunks": length * (2 * chunk * (D + E) + 4 * D * E),
        "recurrence": 4 * length * D * E,
    }


table(
    ["length", "scores", "chunks", "recurrence"],
    [[n, *(f"{x / 1e6:.0f}M" for x in operations(n, C).values())] for n in (256, 4096, 65536)],
)
assert operations(65536, C)["scores"] > 500 * operations(65536, C)["chunks"]

# %% [markdown]
# ## 2. A gate
#
# A state that only adds forgets nothing and drowns. A gate `g <= 0` in log space fades it before
# each write: `state = exp(g) state + k v^T`. Between tokens s <= t inside a chunk the fades
# multiply, and sums of logs say by how much: `exp(G_t - G_s)` with `G` the running sum. It never
# exceeds 1, so nothing overflows; dividing by `exp(G_s)` alone would.

# %%
gates = -torch.rand(N, dtype=torch.float64)


def gated_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for t in range(len(q)):
        state = g[t].exp() * state + torch.outer(k[t], v[t])
        out[t] = q[t] @ state
    return out


def gated_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for a, b in spans(len(q), C):
        total = g[a:b].cumsum(0)
        fade = (total[:, None] - total[None, :]).tril().exp().tril()
        inside = ((q[a:b] @ k[a:b].T) * fade) @ v[a:b]
        out[a:b] = total.exp()[:, None] * (q[a:b] @ state) + inside
        # What a key wrote fades until the chunk's end.
        left = (total[-1] - total).exp()[:, None]
        state = total[-1].exp() * state + (left * k[a:b]).T @ v[a:b]
    return out


assert same(gated_chunks(q, k, v, gates), gated_recurrence(q, k, v, gates))

# %% [markdown]
# ## 3. The delta rule
#
# Adding under a key that was written before leaves a mixture of both values. The delta rule reads
# what is there first, and writes the difference: `state += beta k (v - k^T state)^T`. With `beta =
# 1` and a key of length 1 it overwrites.


# %%
def delta_recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for t in range(len(q)):
        written = beta[t] * (v[t] - k[t] @ state)
        state = state + torch.outer(k[t], written)
        out[t] = q[t] @ state
    return out


twice = k[:1].expand(2, D)
answers = delta_recurrence(twice, twice, v[:2], torch.ones(2, dtype=torch.float64))
assert same(answers, v[:2])
assert not same(as_recurrence(twice, twice, v[:2]), v[:2])

# %% [markdown]
# In chunks, what token t writes depends on what those before it in the chunk wrote. That is a
# triangular system: `written = beta (v - k state) - A written` with `A` the strictly lower part of
# `beta k k^T`, so `written = (I + A)^-1 beta (v - k state)`.


# %%
def delta_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    state, out = q.new_zeros(k.shape[1], v.shape[1]), torch.empty_like(v)
    for a, b in spans(len(q), C):
        keys, factor = k[a:b], beta[a:b, None]
        lower = (factor * (keys @ keys.T)).tril(-1)
        wanted = factor * (v[a:b] - keys @ state)
        written = torch.linalg.solve_triangular(
            lower + torch.eye(b - a, dtype=q.dtype), wanted, upper=False, unitriangular=True
        )
        out[a:b] = q[a:b] @ state + (q[a:b] @ keys.T).tril() @ written
        state = state + keys.T @ written
    return out


betas = torch.rand(N, dtype=torch.float64)
assert same(delta_chunks(q, k, v, betas), delta_recurrence(q, k, v, betas))

# %% [markdown]
# ## Exercises
#
# **Exercise 1: padding.** Which `k`, `v` and `g` make a step of `gated_recurrence` leave the state
# as it was? Give them, so that a batch of texts of unlike lengths can be padded.


# %%
def identity_step() -> tuple[Tensor, Tensor, float]:
    raise NotImplementedError


def check_identity_step(answer: Callable[[], tuple[Tensor, Tensor, float]]) -> None:
    found = answer()
    assert isinstance(found, tuple)
    key, value, gate = found
    ks, vs = torch.cat([k[:9], key[None], k[9:10]]), torch.cat([v[:9], value[None], v[9:10]])
    gs = torch.cat([gates[:9], torch.tensor([gate], dtype=torch.float64), gates[9:10]])
    padded = gated_recurrence(torch.cat([q[:9], q[:1], q[9:10]]), ks, vs, gs)
    assert same(padded[-1], gated_recurrence(q[:10], k[:10], v[:10], gates[:10])[-1])


mark("1", identity_step, check_identity_step)

# %% [markdown]
# **Exercise 2: a state of one's own.** Change `as_chunks` to start from a given state and to
# return the last one, so that a text can go on where it stopped.


# %%
def continued(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


def check_continued(answer: Callable[..., tuple[Tensor, Tensor]]) -> None:
    found = answer(q[:100], k[:100], v[:100], q.new_zeros(D, E))
    assert isinstance(found, tuple)
    first, state = found
    second, _ = answer(q[100:], k[100:], v[100:], state)
    assert same(torch.cat([first, second]), as_scores(q, k, v))


mark("2", continued, check_continued)

# %% [markdown]
# **Exercise 3: the chunk.** For which `C` does `operations` of chunks spend as much inside chunks
# as on the state? Give it as a number, for this `D` and `E`.


# %%
def balanced_chunk() -> float:
    raise NotImplementedError


def check_balanced_chunk(answer: Callable[[], float]) -> None:
    assert abs(2 * answer() * (D + E) - 4 * D * E) < 1e-6


mark("3", balanced_chunk, check_balanced_chunk)

# %% [markdown]
# ### Solutions


# %%
def solved_identity_step() -> tuple[Tensor, Tensor, float]:
    # Nothing is written, and nothing fades: exp(0) is 1.
    return torch.zeros(D, dtype=torch.float64), torch.zeros(E, dtype=torch.float64), 0.0


def solved_continued(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(v)
    for a, b in spans(len(q), C):
        out[a:b] = q[a:b] @ state + (q[a:b] @ k[a:b].T).tril() @ v[a:b]
        state = state + k[a:b].T @ v[a:b]
    return out, state


def solved_balanced_chunk() -> float:
    return 2 * D * E / (D + E)


prove(check_identity_step, solved_identity_step)
prove(check_continued, solved_continued)
prove(check_balanced_chunk, solved_balanced_chunk)

# %% [markdown]
# ## Sources
#
# - Katharopoulos et al., *Transformers are RNNs*, arXiv 2006.16236.
# - Yang et al., *Gated Linear Attention Transformers*, arXiv 2312.06635.
# - Yang et al., *Parallelizing Linear Transformers with the Delta Rule*, arXiv 2406.06484.
# - Yang et al., *Gated Delta Networks*, arXiv 2412.06464.
