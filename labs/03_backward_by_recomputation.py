# %% [markdown]
# # Lab 3: the backward pass by recomputation
#
# Lab 2 computes attention without ever holding the score matrix. Training seems to bring it back:
# the chain rule needs the probabilities P, one for every pair of a query and a key. This lab
# derives the gradients, finds that a single number a row (the LSE) is enough to rebuild any tile
# of P when it is needed, and writes the backward pass as loops over tiles. It then measures what
# that saves, counts what it costs, and treats the LSE as an output with a gradient of its own.
#
# Letters: `B` batch, `H` heads, `M` query length, `N` key length, `D` query/key dim, `E` value
# dim; tensors are `[B, H, M, D]`. The gradient of the loss with respect to `x` is written `dx`.

# %%
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from lab_tools import ByteMeter, mark, prove, table
from rounding import exact_scores, gradient_bounds
from tiles import FULL, NEG_INF, Mask, Partial, bottom_right, finite_or_zero, spans
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)

# %% [markdown]
# ## 1. The gradients, line by line
#
# Forward, for one head:
#
# $$ S = \mathrm{scale}\; Q K^T, \qquad P_{mn} = \frac{e^{S_{mn}}}{\sum_j e^{S_{mj}}}, \qquad
#    O = P V $$
#
# Given $dO$, we go back through the three steps.
#
# *The second product.* $O = P V$, so $dV = P^T dO$ and $dP = dO\, V^T$.
#
# *The softmax.* Within a row, $\partial P_n / \partial S_j = P_n (1_{n=j} - P_j)$. So
#
# $$ dS_j = \sum_n dP_n \frac{\partial P_n}{\partial S_j}
#         = P_j \Big(dP_j - \sum_n P_n\, dP_n\Big) $$
#
# *The first product.* $dQ = \mathrm{scale}\; dS\, K$ and $dK = \mathrm{scale}\; dS^T Q$.
#
# The sum in the middle runs over a whole row of P and dP. A tile cannot see it. But
#
# $$ \sum_n P_n\, dP_n = \sum_n P_n \sum_e dO_e V_{ne} = \sum_e dO_e \sum_n P_n V_{ne}
#    = \sum_e dO_e\, O_e $$
#
# so it is a dot product of two rows that are at hand anyway. It is called *delta*:
# `delta = rowsum(dO * O)`, one number a row. This identity is what makes a tiled backward
# possible. Here is every line against autograd.

# %%
M, N, D, E = 7, 9, 5, 4
scale = D**-0.5
q, k, v = (
    torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    for rows, width in ((M, D), (N, D), (N, E))
)
s = scale * q @ k.T
p = torch.softmax(s, dim=-1)
out = p @ v
for intermediate in (s, p):
    intermediate.retain_grad()
dout = torch.randn_like(out)
out.backward(dout)

with torch.no_grad():
    dv = p.T @ dout
    dp = dout @ v.T
    delta = (dout * out).sum(dim=-1, keepdim=True)
    ds = p * (dp - delta)
    dq = scale * ds @ k
    dk = scale * ds.T @ q

torch.testing.assert_close(delta, (p * dp).sum(dim=-1, keepdim=True))
for ours, autograd in ((dv, v), (dp, p), (ds, s), (dq, q), (dk, k)):
    torch.testing.assert_close(ours, autograd.grad)
# Softmax does not change when a row of scores shifts, so the rows of dS sum to 0.
torch.testing.assert_close(ds.sum(dim=-1), torch.zeros(M).double())

# %% [markdown]
# ## 2. One number a row is enough
#
# The five lines need P. Autograd keeps all of it, `M N` numbers. But P is a function of the
# scores and one number a row:
#
# $$ P_{mn} = e^{S_{mn} - \mathrm{lse}_m}, \qquad \mathrm{lse}_m = \log \sum_j e^{S_{mj}} $$
#
# Any tile of S can be computed again from a tile of Q and a tile of K. With the LSE, a tile of P
# follows at once, already normalised: no running maximum, no second look at the row. The maximum
# and the sum would do as well, but they are two numbers where one is enough.

# %%
lse = torch.logsumexp(s, dim=-1)
torch.testing.assert_close((s - lse.unsqueeze(-1)).exp(), p)
tile_of_p = (scale * q[2:5] @ k[3:8].T - lse[2:5].unsqueeze(-1)).exp()
torch.testing.assert_close(tile_of_p, p[2:5, 3:8])

# One head, 8192 tokens, E = 128, in bf16: P is 134 MB, the output and an fp32 LSE are 2 MB.
assert 2 * 8192**2 > 60 * (2 * 8192 * 128 + 4 * 8192)

# %% [markdown]
# ### Empty rows
#
# A row without a visible key has the LSE `-inf`. Recomputing it as `exp(-inf - (-inf))` gives
# NaN, so we subtract 0 instead, as in lab 2, and P is 0. That matters more than it did in the
# forward pass: there, an empty row spoiled itself. In the backward pass every key sums over all
# queries, so one empty row turns all of dK and dV into NaN. Autograd through the plain formula
# does just that.

# %%
# Query 2 sees nothing.
masked = torch.zeros(M, N).double().index_fill(0, torch.tensor(2), NEG_INF)
masked_out = torch.softmax(scale * q @ k.T + masked, dim=-1) @ v
for gradient in torch.autograd.grad(masked_out, (k, v), dout):
    assert torch.isnan(gradient).all()

# %% [markdown]
# ## 3. The forward pass, with its LSE
#
# This is lab 2's tiled attention in short form. It returns the output and the LSE. The mask is
# `Mask` in `tiles.py`: causal at the bottom right, as in lab 2, or full.


# %%
BLOCK_M, BLOCK_N = 32, 48


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Partial:
    scale = q.shape[-1] ** -0.5
    out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
    for m_start, m_stop in spans(q.shape[-2], BLOCK_M):
        q_tile = scale * q[..., m_start:m_stop, :]
        row_max = q.new_full(q_tile.shape[:-1], NEG_INF)
        row_sum, acc = torch.zeros_like(row_max), torch.zeros_like(out[..., m_start:m_stop, :])
        for n_start, n_stop in spans(k.shape[-2], BLOCK_N):
            if not mask.sees_any(m_stop, n_start):
                break
            s = q_tile @ k[..., n_start:n_stop, :].transpose(-1, -2)
            s = mask.apply(s, m_start, n_start)
            new_max = torch.maximum(row_max, s.amax(dim=-1))
            subtract = finite_or_zero(new_max)
            correction, p = (row_max - subtract).exp(), (s - subtract.unsqueeze(-1)).exp()
            row_sum = row_sum * correction + p.sum(dim=-1)
            acc = acc * correction.unsqueeze(-1) + p @ v[..., n_start:n_stop, :]
            row_max = new_max
        divisor = row_sum.masked_fill(row_sum == 0, 1.0)
        out[..., m_start:m_stop, :] = acc / divisor.unsqueeze(-1)
        lse[..., m_start:m_stop] = row_max + row_sum.log()
    return Partial(out, lse)


# %% [markdown]
# ## 4. The backward pass in tiles
#
# For one tile of queries and one tile of keys, P and dS take two products: S again, and dP. Then
# the tile adds its share to three gradients:
#
# - dV and dK of its *keys*: sums over queries;
# - dQ of its *queries*: a sum over keys.
#
# No order of loops suits all three. With keys outside, dK and dV stay on the chip, and dQ comes
# and goes: every tile of keys adds to it. That takes five products a tile: S, dP, dV, dK, dQ.


# %%
class Saved(NamedTuple):
    """What the backward pass knows: all of it O(M + N)."""

    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    dout: Tensor
    delta: Tensor
    mask: Mask


class Grads(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def tile_p_and_ds(
    x: Saved, m_start: int, m_stop: int, n_start: int, n_stop: int
) -> tuple[Tensor, Tensor]:
    """Two products: S and dP. Returns P and dS of a tile."""
    rows, keys = slice(m_start, m_stop), slice(n_start, n_stop)
    scale = x.q.shape[-1] ** -0.5
    s = scale * x.q[..., rows, :] @ x.k[..., keys, :].transpose(-1, -2)
    s = x.mask.apply(s, m_start, n_start)
    p = (s - finite_or_zero(x.lse[..., rows]).unsqueeze(-1)).exp()
    dp = x.dout[..., rows, :] @ x.v[..., keys, :].transpose(-1, -2)
    return p, p * (dp - x.delta[..., rows].unsqueeze(-1))


def backward_keys_outside(x: Saved, key_order: Sequence[int] | None = None) -> Grads:
    """Five products a tile; dQ is added to by every tile of keys, in `key_order`."""
    scale = x.q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(y) for y in (x.q, x.k, x.v))
    key_tiles = spans(x.k.shape[-2], BLOCK_N)
    for number in key_order or range(len(key_tiles)):
        n_start, n_stop = key_tiles[number]
        for m_start, m_stop in spans(x.q.shape[-2], BLOCK_M):
            if not x.mask.sees_any(m_stop, n_start):
                continue
            p, ds = tile_p_and_ds(x, m_start, m_stop, n_start, n_stop)
            rows, keys = slice(m_start, m_stop), slice(n_start, n_stop)
            dv[..., keys, :] += p.transpose(-1, -2) @ x.dout[..., rows, :]
            dk[..., keys, :] += scale * ds.transpose(-1, -2) @ x.q[..., rows, :]
            dq[..., rows, :] += scale * ds @ x.k[..., keys, :]
    return Grads(dq, dk, dv)


# %% [markdown]
# On a GPU the tiles of keys run at the same time, on different SMs, and add to the same dQ. So
# the additions are atomic, or they wait for their turn.
#
# The other way is two passes: one with keys outside for dK and dV, one with queries outside for
# dQ. Every gradient then has a single owner and is written once. But S and dP are computed in
# both passes: four products in the first, three in the second, seven in all.


# %%
def backward_two_passes(x: Saved) -> Grads:
    """Seven products a tile; every tile of every gradient has one owner."""
    scale = x.q.shape[-1] ** -0.5
    dq, dk, dv = (torch.zeros_like(y) for y in (x.q, x.k, x.v))
    query_tiles, key_tiles = spans(x.q.shape[-2], BLOCK_M), spans(x.k.shape[-2], BLOCK_N)
    for n_start, n_stop in key_tiles:
        keys = slice(n_start, n_stop)
        for m_start, m_stop in query_tiles:
            if x.mask.sees_any(m_stop, n_start):
                p, ds = tile_p_and_ds(x, m_start, m_stop, n_start, n_stop)
                dv[..., keys, :] += p.transpose(-1, -2) @ x.dout[..., m_start:m_stop, :]
                dk[..., keys, :] += scale * ds.transpose(-1, -2) @ x.q[..., m_start:m_stop, :]
    for m_start, m_stop in query_tiles:
        for n_start, n_stop in key_tiles:
            if x.mask.sees_any(m_stop, n_start):
                _, ds = tile_p_and_ds(x, m_start, m_stop, n_start, n_stop)
                dq[..., m_start:m_stop, :] += scale * ds @ x.k[..., n_start:n_stop, :]
    return Grads(dq, dk, dv)


# %% [markdown]
# ### Is it equal?
#
# As in lab 2 we derive what rounding may do, to first order in the unit roundoff $u$. In a row
# whose scores are good to $a$ and range over $R$:
#
# 1. P, recomputed from a rounded LSE or saved by autograd, has at most the relative error
#    $\rho = 2 a + (2 R + 8 N + 8 + 3 |\mathrm{lse}| + 5 \ln N)\, u$: lab 2's error of the
#    softmax, with one tile a key, and the error of the LSE.
# 2. dP is a dot product of `E` terms, $E u$ relative to $|dO| |V|^T$. Delta carries the error of
#    the output too, relative to $\sum_e |dO_e| (P |V|)_e$. So dS is good to
#    $\kappa = 2 \rho + (E + N + 4)\, u$ relative to
#    $G = P \circ (|dO| |V|^T + \mathrm{rowsum}(|dO| \circ P |V|))$.
# 3. The last products sum over `N` or `M`: dQ is good to
#    $\mathrm{scale}\, (\kappa + (N + 3) u)\, G |K|$, dK and dV likewise with `M`.
#
# `rounding.py` has this as code.
#
# Now the loops against autograd, in fp64 and fp32. Both sides are rounded, so their difference may
# be two bounds. In fp32 there is also Tilewise's own test against fp64: an error of at most twice
# that of autograd in the same dtype, plus two roundings.


# %%
def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    s = mask.apply((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
    return torch.softmax(s, dim=-1) @ v


def fresh_leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def autograd_of_plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> Grads:
    leaves = fresh_leaves(q, k, v)
    return Grads(*torch.autograd.grad(plain_attention(*leaves, mask), leaves, dout))


def save(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> Saved:
    out, lse = tiled_forward(q, k, v, mask)
    return Saved(q, k, v, lse, dout, (dout * out).sum(dim=-1), mask)


def random_inputs(dtype: torch.dtype, M: int, N: int, D: int = 24, E: int = 16) -> list[Tensor]:
    shapes = ((M, D), (N, D), (N, E), (M, E))
    return [torch.randn(2, 2, *shape, dtype=torch.float64).to(dtype) for shape in shapes]


def compare(dtype: torch.dtype, M: int, N: int, causal: bool) -> list[object]:
    inputs = random_inputs(dtype, M, N)
    mask = bottom_right(*inputs[:2], causal)
    saved = save(*inputs, mask)
    bounds = gradient_bounds(*inputs, exact_scores(*inputs[:2], mask))
    reference = autograd_of_plain(*inputs, mask)
    exact = autograd_of_plain(*(x.double() for x in inputs), mask)
    row: list[object] = [f"{M} x {N}{' causal' if causal else ''}", str(dtype)[6:]]
    for loops in (backward_keys_outside, backward_two_passes):
        worst = 0.0
        for got, eager, right, bound in zip(loops(saved), reference, exact, bounds, strict=True):
            assert ((got - eager).abs() <= 2 * bound).all()
            if dtype == torch.float32:
                own, allowed = (got - right).abs().max(), (eager - right).abs().max()
                assert own <= 2 * allowed + 2 * torch.finfo(dtype).eps * right.abs().max()
            worst = max(worst, (got - eager).abs().max().item())
        row.append(f"{worst:.1e}")
    return [*row, f"{2 * max(b.max().item() for b in bounds):.1e}"]


table(
    ["M x N", "dtype", "difference, five", "difference, seven", "bound"],
    [
        compare(dtype, M, N, causal)
        for dtype in (torch.float64, torch.float32)
        for M, N in ((100, 100), (70, 183))
        for causal in (False, True)
    ],
)

# %% [markdown]
# Empty rows give zeros and spoil nothing. With 60 queries, 40 keys and a causal mask, the first 20
# queries see nothing: leave them out, and the gradients of all others are the same.

# %%
q, k, v, dout = random_inputs(torch.float64, 60, 40)
mask = bottom_right(q, k)
assert torch.isnan(autograd_of_plain(q, k, v, dout, mask).dv).all()
grads = backward_keys_outside(save(q, k, v, dout, mask))
without = (q[:, :, 20:], k, v, dout[:, :, 20:], Mask(causal=True, offset=0))
assert torch.equal(grads.dq[:, :, :20], torch.zeros_like(q[:, :, :20]))
expected = autograd_of_plain(*without)
torch.testing.assert_close(grads.dq[:, :, 20:], expected.dq)
torch.testing.assert_close((grads.dk, grads.dv), (expected.dk, expected.dv))

# %% [markdown]
# ## 5. Four, five or seven products
#
# One product is $2 M N D$ FLOPs (with `D = E`). The forward has 2. Plain autograd has 4 in the
# backward, since it kept P. Recomputation adds one: 5. So flash attention trains with 7 products
# where plain attention takes 6. It is faster all the same, because the plain one waits for memory
# (lab 1), and it is the same 7/6 that checkpointing paid there.

# %%
LENGTH, D = 192, 32
q, k, v, dout = (torch.randn(1, 1, LENGTH, D) for _ in range(4))
PRODUCT = 2 * LENGTH * LENGTH * D
saved = save(q, k, v, dout, FULL)


def products(function: Callable[[], object]) -> float:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / PRODUCT


counts = {
    "forward, tiled": products(lambda: tiled_forward(q, k, v, FULL)),
    "both, plain autograd": products(lambda: autograd_of_plain(q, k, v, dout, FULL)),
    "backward, keys outside": products(lambda: backward_keys_outside(saved)),
    "backward, two passes": products(lambda: backward_two_passes(saved)),
}
table(["work", "products"], list(counts.items()))
assert list(counts.values()) == [2, 6, 5, 7]

# %% [markdown]
# The customary rate of a backward pass counts 5 products, 2.5 times the forward. Seven products
# are 1.4 times as many, so two passes must run at 1.4 times the rate to be even. What do they buy?
#
# - *No traffic for dQ.* With keys outside, each tile adds $\mathrm{block}_m D$ numbers in fp32 to
#   memory for its $10\, \mathrm{block}_m\, \mathrm{block}_n D$ FLOPs. With 128 keys in a tile that
#   is 320 FLOPs for each byte added, close to the balance of an H100 (lab 1). Most additions end
#   in the L2 cache, so it does not decide the matter, but it is not free.
# - *The same bits every time.* Floating-point addition is not associative. Where tiles of keys
#   add to dQ in the order in which they happen to finish, the last bits change from run to run.
#   A fixed order costs waiting. Two passes have an order by construction.

# %%
assert (10 * 64 * 128 * D) / (4 * 64 * D) == 320
assert abs(320 / (989e12 / 3.35e12) - 1) < 0.1

order = range(len(spans(LENGTH, BLOCK_N)))
forwards, backwards = (backward_keys_outside(saved, way) for way in (order, order[::-1]))
# Each tile of keys owns its dK and dV, so their bits do not depend on the order. Those of dQ do.
torch.testing.assert_close(forwards[1:], backwards[1:], atol=0, rtol=0)
changed = (forwards.dq != backwards.dq).double().mean().item()
print(f"another order of the tiles of keys changed {changed:.0%} of the numbers in dQ")
assert changed > 0.1
torch.testing.assert_close(forwards.dq, backwards.dq)


# %% [markdown]
# ## 6. The memory that is not spent
#
# We make the forward and the backward one operation for autograd. It keeps its inputs, its output
# and the LSE. Then we measure it beside plain attention, and beside a tempting third way: let
# autograd go back through the tiled loops of section 3 by itself. That is right, but autograd
# keeps every tile it meets, and the tiles together are the matrix.


# %%
class TiledAttention(torch.autograd.Function):
    """(q, k, v, mask) -> (out, lse), both differentiable."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        out, lse = tiled_forward(q, k, v, mask)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask = mask
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, lse = ctx.saved_tensors
        # Section 7 explains dlse. An empty row has nobody to pass a gradient to, not even NaN.
        delta = ((dout * out).sum(dim=-1) - dlse).masked_fill(lse == NEG_INF, 0.0)
        return *backward_keys_outside(Saved(q, k, v, lse, dout, delta, ctx.mask)), None


def attention_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Partial:
    return Partial(*TiledAttention.apply(q, k, v, mask))


def plain_with_lse(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Partial:
    s = mask.apply((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
    return Partial(torch.softmax(s, dim=-1) @ v, torch.logsumexp(s, dim=-1))


def training_memory(
    attention: Callable[..., Tensor], length: int, heads: int = 2, width: int = 32
) -> tuple[int, int]:
    """Bytes kept for the backward pass, and the peak during it."""
    q, k, v = (torch.randn(1, heads, length, width, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, heads, length, width)
    mask = FULL
    with ByteMeter() as meter:
        out = attention(q, k, v, mask)
        kept = meter.live_bytes
        meter.restart_peak()
        out.backward(dout)
    return kept, meter.peak_bytes


WAYS: dict[str, Callable[..., Tensor]] = {
    "plain autograd": plain_attention,
    "autograd through the tiles": lambda *args: tiled_forward(*args).out,
    "recomputation": lambda *args: attention_with_lse(*args).out,
}
LENGTHS = (192, 384, 768)
memory = {name: [training_memory(way, length) for length in LENGTHS] for name, way in WAYS.items()}
table(
    ["kept and peak, MB", *(f"M = N = {length}" for length in LENGTHS)],
    [
        [name, *(f"{kept / 1e6:.2f}, {peak / 1e6:5.2f}" for kept, peak in measured)]
        for name, measured in memory.items()
    ],
)

one_matrix = [4 * 2 * length**2 for length in LENGTHS]
for name in ("plain autograd", "autograd through the tiles"):
    assert all(kept > size for (kept, _), size in zip(memory[name], one_matrix, strict=True))
workspaces = set()
for length, (kept, peak) in zip(LENGTHS, memory["recomputation"], strict=True):
    row = 4 * 2 * length
    # Out and the LSE, to the byte.
    assert kept == row * (32 + 1)
    # The peak adds dQ, dK, dV, delta, a dLSE and some tiles: the same tiles at every length.
    workspaces.add(peak - kept - row * (3 * 32 + 2))
print(f"tiles of the backward pass: {workspaces.pop():,} bytes at every length")
assert not workspaces
# Four times the length: nearly 16 times the memory, or at most 4 times.
for figure in (0, 1):
    first, *_, last = (measured[figure] for measured in memory["recomputation"])
    assert last <= 4 * first
    first, *_, last = (measured[figure] for measured in memory["plain autograd"])
    assert last > 14 * first

# %% [markdown]
# ## 7. The LSE has a gradient too
#
# In lab 2, partial results merged by their LSE. To train through a merge (a ring of GPUs does),
# the LSE must be a differentiable output. Its derivative is the simplest of all:
#
# $$ \frac{\partial\, \mathrm{lse}}{\partial S_n}
#    = \frac{e^{S_n}}{\sum_j e^{S_j}} = P_n $$
#
# So dLSE adds $P_n\, d\mathrm{lse}$ to $dS_n$, and
#
# $$ dS_n = P_n (dP_n - \mathrm{delta}) + P_n\, d\mathrm{lse}
#        = P_n \big(dP_n - (\mathrm{delta} - d\mathrm{lse})\big) $$
#
# The whole feature is one subtraction from delta, before the loops begin. It costs no product and
# no argument of the kernel. `TiledAttention.backward` above has it.

# %%
for M, N in ((50, 50), (40, 90)):
    for causal in (False, True):
        q, k, v, dout = random_inputs(torch.float64, M, N)
        mask = bottom_right(q, k, causal)
        dlse = torch.randn(2, 2, M, dtype=torch.float64)
        gradients = []
        for attention in (attention_with_lse, plain_with_lse):
            leaves = fresh_leaves(q, k, v)
            gradients.append(torch.autograd.grad(attention(*leaves, mask), leaves, (dout, dlse)))
        torch.testing.assert_close(*gradients)

# Finite differences agree: nothing here relies on autograd's formulas.
small = [torch.randn(1, 1, rows, 3, dtype=torch.float64, requires_grad=True) for rows in (4, 6, 6)]
assert torch.autograd.gradcheck(
    lambda q, k, v: TiledAttention.apply(q, k, v, Mask(causal=True, offset=2)), small
)

# An empty row passes nothing on, even where the gradient of its LSE is NaN.
q, k, v, dout = random_inputs(torch.float64, 60, 40)
leaves, mask = fresh_leaves(q, k, v), bottom_right(q, k)
dlse = torch.zeros(2, 2, 60).double().index_fill(-1, torch.arange(20), float("nan"))
for gradient in torch.autograd.grad(attention_with_lse(*leaves, mask), leaves, (dout, dlse)):
    assert gradient.isfinite().all()

# %% [markdown]
# Now the proof of the pudding. Cut the keys in two, attend to each part, merge, and go backward.
# The gradients must be those of attention over all keys. Each part knows only its own keys: its
# dOut comes scaled by its weight, and its dLSE says how much that weight matters.
#
# The merge of lab 2 needs one more care here. Where both parts are empty, the derivative of a
# logarithm at 0 is infinite, and infinity times 0 is NaN. So we take the logarithm of 1 there and
# replace the result afterwards: a hidden value has to be harmless *before* the function, not only
# after it.


# %%
def merge(a: Partial, b: Partial) -> Partial:
    # A shift that cancels in both results, so it needs no gradient.
    shift = finite_or_zero(torch.maximum(a.lse, b.lse)).detach()
    weight_a, weight_b = (a.lse - shift).exp(), (b.lse - shift).exp()
    total = weight_a + weight_b
    empty = total == 0
    divisor = total.masked_fill(empty, 1.0)
    out = (weight_a / divisor).unsqueeze(-1) * a.out + (weight_b / divisor).unsqueeze(-1) * b.out
    return Partial(out, (shift + divisor.log()).masked_fill(empty, NEG_INF))


def attention_in_two_parts(q: Tensor, k: Tensor, v: Tensor, mask: Mask, cut: int) -> Partial:
    # A key at position n of the second part stands at n + cut, so its mask moves by the cut.
    second_mask = mask._replace(offset=mask.offset - cut)
    first = attention_with_lse(q, k[..., :cut, :], v[..., :cut, :], mask)
    second = attention_with_lse(q, k[..., cut:, :], v[..., cut:, :], second_mask)
    return merge(first, second)


# M > N and causal: some rows are empty in one part, some in both.
for M, N in ((60, 60), (50, 110), (70, 50)):
    q, k, v, dout = random_inputs(torch.float64, M, N)
    mask = bottom_right(q, k, causal=True)
    results = []
    for attend in (attention_with_lse, lambda *args: attention_in_two_parts(*args, cut=35)):
        leaves = fresh_leaves(q, k, v)
        out, lse = attend(*leaves, mask)
        # The loss looks at both outputs, at the LSE only where there is one.
        loss = (out * dout).sum() + lse[lse > NEG_INF].square().sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*results)

# %% [markdown]
# Without the gradient of the LSE the merge would train the wrong model, silently: the outputs
# stay right, and the gradients of Q and K do not. (V does not enter the weights of the parts.)

# %%
q, k, v, dout = random_inputs(torch.float64, 60, 60)
leaves = fresh_leaves(q, k, v)
parts = [
    attention_with_lse(leaves[0], leaves[1][..., keys, :], leaves[2][..., keys, :], FULL)
    for keys in (slice(0, 35), slice(35, None))
]
forgetful = merge(*(Partial(part.out, part.lse.detach()) for part in parts)).out
torch.testing.assert_close(forgetful, plain_attention(q, k, v, FULL))

got, right = torch.autograd.grad(forgetful, leaves, dout), autograd_of_plain(q, k, v, dout, FULL)
errors = [((x - y).norm() / y.norm()).item() for x, y in zip(got, right, strict=True)]
print("relative errors of dQ, dK, dV without dLSE:", *(f"{error:.2f}" for error in errors))
assert min(errors[:2]) > 0.05
assert errors[2] < 1e-12

# %% [markdown]
# ## 8. Exercises
#
# **Exercise 1: grouped-query attention.** `q` and `dout` have `H` heads, `k` and `v` have `G`, and
# query head `h` reads key/value head `h // (H / G)`. Give the gradients with `autograd_of_plain` or
# the loops above. `dk` and `dv` have `G` heads.


# %%
def grouped_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> Grads:
    raise NotImplementedError


def check_grouped_backward(answer: Callable[..., Grads]) -> None:
    B, H, G, M, N = 2, 6, 2, 20, 30
    q, dout = (torch.randn(B, H, M, 8, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(B, G, N, 8, dtype=torch.float64) for _ in range(2))
    leaves = fresh_leaves(q, k, v)
    mask = bottom_right(q, k, causal=True)
    wide = (leaves[0], *(x.repeat_interleave(H // G, dim=1) for x in leaves[1:]))
    expected = torch.autograd.grad(plain_attention(*wide, mask), leaves, dout)
    for got, want in zip(answer(q, k, v, dout, mask), expected, strict=True):
        torch.testing.assert_close(got, want)


mark("1", grouped_backward, check_grouped_backward)

# %% [markdown]
# **Exercise 2: the gradient of a sink.** A sink is one more logit in the denominator of every row
# of its head (lab 2, exercise 1). Its value is 0, so its dP is 0. The `lse` given here includes it.
# From `sink` `[H]`, `lse` and `delta` `[B, H, M]`, give `dsink` `[H]`: no scores are needed.


# %%
def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    raise NotImplementedError


def check_sink_gradient(answer: Callable[..., Tensor]) -> None:
    q, k, v, dout = random_inputs(torch.float64, 20, 30)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    s = torch.cat([s, sink.view(1, 2, 1, 1).expand(2, 2, 20, 1)], dim=-1)
    out = torch.softmax(s, dim=-1)[..., :-1] @ v
    (expected,) = torch.autograd.grad(out, sink, dout)
    lse, delta = torch.logsumexp(s, dim=-1), (dout * out).sum(dim=-1)
    torch.testing.assert_close(answer(sink.detach(), lse.detach(), delta.detach()), expected)


mark("2", sink_gradient, check_sink_gradient)

# %% [markdown]
# **Exercise 3: softcap.** Some models bend the scores before the softmax:
# `s = cap * tanh(raw / cap)`. Given `ds` and `s` of a tile (the bent scores, which the backward
# pass has recomputed), give the gradient of `raw` without calling `tanh` again.


# %%
def softcap_backward(ds: Tensor, s: Tensor, cap: float) -> Tensor:
    raise NotImplementedError


def check_softcap_backward(answer: Callable[..., Tensor]) -> None:
    raw = (20 * torch.randn(8, 8, dtype=torch.float64)).requires_grad_()
    s, ds = 15 * torch.tanh(raw / 15), torch.randn(8, 8, dtype=torch.float64)
    (expected,) = torch.autograd.grad(s, raw, ds)
    with ByteMeter() as meter:
        got = answer(ds, s.detach(), 15.0)
    torch.testing.assert_close(got, expected)
    assert "tanh" not in {t.op for t in meter.log}


mark("3", softcap_backward, check_softcap_backward)

# %% [markdown]
# ### Solutions


# %%
def solved_grouped_backward(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> Grads:
    # A shared head feeds several query heads, so its gradient is the sum of what they send back.
    group = q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    dq, dk, dv = backward_keys_outside(save(q, wide_k, wide_v, dout, mask))
    return Grads(dq, *(x.unflatten(1, (-1, group)).sum(dim=2) for x in (dk, dv)))


def solved_sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    # dS = P (dP - delta) with dP = 0, summed over all rows of the head.
    p = (sink.view(1, -1, 1) - lse).exp()
    return -(p * delta).sum(dim=(0, 2))


def solved_softcap_backward(ds: Tensor, s: Tensor, cap: float) -> Tensor:
    # The derivative of tanh is 1 - tanh^2, and tanh is s / cap.
    return ds * (1 - (s / cap).square())


prove(check_grouped_backward, solved_grouped_backward)
prove(check_sink_gradient, solved_sink_gradient)
prove(check_softcap_backward, solved_softcap_backward)

# %% [markdown]
# ## Sources
#
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, *FlashAttention: Fast and Memory-Efficient Exact
#   Attention with IO-Awareness*, 2022, arXiv 2205.14135 (appendix B: the backward pass, delta).
# - T. Dao, *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
#   2023, arXiv 2307.08691 (algorithm 2: five products, only the LSE is kept).
# - H. Liu, M. Zaharia, P. Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite
#   Context*, 2023, arXiv 2310.01889 (parts that merge across devices).
