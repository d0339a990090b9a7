# %% [markdown]
# # Lab 4: the algorithm as Triton kernels, program by program
#
# Labs 2 and 3 wrote attention as loops over tiles in PyTorch. A GPU runs the turns of the outer
# loop at the same time, each as a *program* of its own. This lab writes those programs in Triton,
# forward and backward, and runs them in Triton's interpreter: on the CPU, one after another, with
# every access to memory on record. The kernels do not know it: a GPU takes the same text.
#
# Letters: `H` heads, `M` query length, `N` key length, `D` width of a head; tensors are
# `[H, M, D]`. A batch would be one more stride.

# %%
import os

# Triton looks at it when it is imported and when a kernel is defined.
os.environ["TRITON_INTERPRET"] = "1"

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapreplace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from lab_tools import mark, prove, table
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

import tilewise
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget

# Triton 3.6's interpreter holds a loop's bound as an array of one element, which numpy dislikes.
warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
torch.manual_seed(0)

# %% [markdown]
# ## 1. What a program is
#
# A kernel is a function. A *launch* runs it once for each point of a *grid*, and each run is a
# program. All programs get the same arguments. Only `tl.program_id` tells them apart, so from this
# number a program must work out which part of the data is its own.
#
# A tensor arrives as a pointer, the address of its first element. Shape and strides do not come
# along; what the kernel needs of them are arguments too. Element `[m, d]` is at
# `x_ptr + m * stride + d`. And a program handles tiles, not elements:
# `offs_m[:, None] * stride + offs_d[None, :]` is a tile of offsets, `tl.load` fetches from all
# those addresses, and a mask says which of them exist. The sides of tiles are powers of two, known
# to the compiler (`tl.constexpr`); lengths are any number, known when the kernel runs.


# %%
@triton.jit
def _sums_kernel(x_ptr, sum_ptr, stride, rows, cols, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m < rows)[:, None] & (offs_d < cols)[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride + offs_d[None, :], mask=mask, other=0.0)
    tl.store(sum_ptr + offs_m, tl.sum(x, axis=1), mask=offs_m < rows)


# %% [markdown]
# In the interpreter a tile is a numpy array, and every `tl` operation goes through one object, its
# builder. `Trace` stands in front of three of the builder's methods and writes down which program
# loads or stores which elements of which tensor, and how many FLOPs its products take.

# %%
TRACED = ("create_masked_load", "create_masked_store", "create_dot")


class Access(NamedTuple):
    """One load or store. `offsets`: where in the tensor, -1 for what the mask leaves out."""

    program: int
    action: str
    name: str
    offsets: Tensor
    bytes: int


class Trace:
    """`with Trace(q=q, ...) as trace:` records what kernels do to these tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors, self.log, self.flops = tensors, [], 0

    def __enter__(self) -> "Trace":
        for name in TRACED:
            method = getattr(interpreter_builder, name)
            setattr(interpreter_builder, name, partial(self._record, name, method))
        return self

    def __exit__(self, *_: object) -> None:
        for name in TRACED:
            delattr(interpreter_builder, name)

    def _record(self, hook: str, method: Callable[..., Any], first: Any, *rest: Any) -> Any:
        if hook == "create_dot":
            self.flops += 2 * math.prod(first.data.shape) * rest[0].data.shape[-1]
        else:
            action, mask = ("load", rest[0]) if "load" in hook else ("store", rest[1])
            self._note(action, first.data, mask.data)
        return method(first, *rest)

    def _note(self, action: str, addresses: Any, mask: Any) -> None:
        for name, x in self.tensors.items():
            offsets = (addresses.astype("int64") - x.data_ptr()) // x.element_size()
            if ((offsets >= 0) & (offsets < x.numel()))[mask].all():
                tile = torch.tensor(offsets).masked_fill(~torch.tensor(mask), -1)
                program, size = interpreter_builder.grid_idx[0], int(mask.sum()) * x.element_size()
                self.log.append(Access(program, action, name, tile, size))
                return
        raise AssertionError(f"a {action} outside of {', '.join(self.tensors)}")

    def of(self, action: str, name: str) -> list[Access]:
        return [x for x in self.log if (x.action, x.name) == (action, name)]

    def bytes(self, action: str, *names: str) -> int:
        return sum(x.bytes for name in names for x in self.of(action, name))


# %% [markdown]
# Ten rows of six numbers take three programs with tiles of 4 x 8. We launch one program, then two,
# then three, and look at the output: a program changes its own rows and no others. Then the tile of
# offsets that program 2 loaded. Two of its rows and two of its columns do not exist.

# %%
x = torch.arange(60.0).view(10, 6)
for programs in (1, 2, 3):
    sums = torch.full((10,), float("nan"))
    with Trace(x=x, sums=sums) as trace:
        _sums_kernel[(programs,)](x, sums, x.stride(0), *x.shape, BLOCK_M=4, BLOCK_D=8)
    print(f"grid ({programs},):", " ".join("  ." if s.isnan() else f"{s:3.0f}" for s in sums))
    assert sums.isfinite().sum() == min(4 * programs, 10)
assert torch.equal(sums, x.sum(dim=1))

print("\nprogram 2 loads")
for row in trace.of("load", "x")[2].offsets.tolist():
    print(" ".join(f"{offset:2}" if offset >= 0 else " ." for offset in row))
# What the masks leave out is not fetched.
assert trace.bytes("load", "x") == 4 * x.numel()

# %% [markdown]
# On a GPU a program is a *thread block*: `num_warps` warps of 32 threads, on one of the H200's 132
# SMs. A tile is spread over the registers of those threads. One of 128 x 128 fp32 numbers takes
# 128 registers in each of 128 threads, and a thread may have 255.
#
# ## 2. One step of the online softmax
#
# The state of a program is lab 2's: for each of its queries the maximum `row_max`, the sum
# `row_sum` and the unnormalised output `acc`. A step takes a tile of scores and a tile of values.
#
# The unit is new. The hardware has an instruction for $2^x$ and none for $e^x$, and
# $e^s = 2^{s \log_2 e}$. So the scale of the scores takes up the factor $\log_2 e$, once, and what
# follows is in base two: `s_log2`, `row_max`, `exp2`. Only at the end does the LSE return to
# natural units: $\mathrm{lse} = (m + \log_2 \ell) / \log_2 e$.

# %%
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load_tile(ptr, stride, offs, length, D: tl.constexpr):
    """Rows `offs` of a `[length, D]` matrix; rows outside of it are 0."""
    pointers = ptr + offs[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(offs < length)[:, None], other=0.0)


@triton.jit
def _store_tile(ptr, stride, offs, length, x, D: tl.constexpr):
    pointers = ptr + offs[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=(offs < length)[:, None])


@triton.jit
def _softmax_step(s_log2, v, row_max, row_sum, acc):
    new_max = tl.maximum(row_max, tl.max(s_log2, axis=1))
    # A row without a visible key so far: -inf - (-inf) would be NaN.
    subtract = tl.where(new_max == float("-inf"), 0.0, new_max)
    correction = tl.exp2(row_max - subtract)
    p = tl.exp2(s_log2 - subtract[:, None])
    row_sum = row_sum * correction + tl.sum(p, axis=1)
    # Tensor cores multiply 16-bit tiles and add in fp32; fp32 tiles would need `input_precision`.
    acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
    return new_max, row_sum, acc


# %% [markdown]
# ## 3. The forward kernel
#
# Program `(i, h)` owns a tile of queries of head `h`. It loads Q once, steps through the tiles of
# keys, and stores the output and the LSE. (`HEAVY_FIRST` is for section 4.)
#
# *Which keys.* Query `m` sees key `n` where `n <= m + len_k - len_q`. The loop ends at what the
# last query of the tile sees. That is all there is to causal skipping: the bound of a loop.
#
# *Which scores.* A tile on the diagonal or at a ragged end is visible in part. `_hide` asks in
# every tile, to keep the loop short to read. A kernel in earnest has two loops: one over tiles that
# are visible whole, without the question, and one over the rest.


# %%
@triton.jit
def _hide(s_log2, offs_m, offs_n, len_q, len_k, CAUSAL: tl.constexpr):
    """Scores of what is hidden or does not exist become -inf."""
    visible = (offs_m < len_q) & (offs_n < len_k)
    if CAUSAL:
        visible = visible & (offs_n <= offs_m + len_k - len_q)
    return tl.where(visible, s_log2, float("-inf"))


@triton.jit
def _attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, out_strides, len_q, len_k, scale_log2,
    D: tl.constexpr, CAUSAL: tl.constexpr, HEAVY_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # 64 bits: tensors of more than 2^31 elements are no rarity.
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if HEAVY_FIRST:
        tile = tl.num_programs(0) - 1 - tile
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load_tile(q_ptr + head * q_strides[0], q_strides[1], offs_m, len_q, D)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)

    n_stop = len_k
    if CAUSAL:
        n_stop = tl.minimum(len_k, (tile + 1) * BLOCK_M + len_k - len_q)
    for n_start in range(0, n_stop, BLOCK_N):
        offs_n = n_start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr + head * k_strides[0], k_strides[1], offs_n, len_k, D)
        v = _load_tile(v_ptr + head * v_strides[0], v_strides[1], offs_n, len_k, D)
        s_log2 = tl.dot(q, tl.trans(k)) * scale_log2
        s_log2 = _hide(s_log2, offs_m[:, None], offs_n[None, :], len_q, len_k, CAUSAL)
        row_max, row_sum, acc = _softmax_step(s_log2, v, row_max, row_sum, acc)

    # An empty row divides 0 by 1, and its LSE is -inf + log2(1), the -inf that it should be.
    row_sum = tl.where(row_sum == 0, 1.0, row_sum)
    lse, out = (row_max + tl.log2(row_sum)) / LOG2_E, acc / row_sum[:, None]
    tl.store(lse_ptr + head * len_q + offs_m, lse, mask=offs_m < len_q)
    _store_tile(out_ptr + head * out_strides[0], out_strides[1], offs_m, len_q, out, D)


BLOCK_M, BLOCK_N = 16, 16
Forward = tuple[Tensor, Tensor, Trace]


def attention_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, heavy: bool = False) -> Forward:
    """Launches the kernel: out `[H, M, D]`, lse `[H, M]` and the record. D's stride must be 1."""
    (H, M, D), N = q.shape, k.shape[1]
    # A forgotten row stays NaN.
    out = torch.full((H, M, D), float("nan"), dtype=q.dtype)
    lse = torch.full((H, M), float("nan"))
    strides = [x.stride()[:2] for x in (q, k, v, out)]
    with Trace(q=q, k=k, v=v, out=out, lse=lse) as trace:
        _attention_fwd_kernel[(triton.cdiv(M, BLOCK_M), H)](
            q, k, v, out, lse, *strides, M, N, D**-0.5 * LOG2_E.value,
            D, causal, heavy, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    return out, lse, trace


# %% [markdown]
# Tilewise decides what is right. Its backend `reference` is exact, in fp64. Its error budget allows
# about twice the error that the plain formula makes with products in the input dtype. Its layout is
# `[B, M, H, D]`, which is a view away.


# %%
def exact_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    q, k, v = (x.double().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    mask = tilewise.causal() if causal else tilewise.full()
    out, lse = tilewise.attention_partial(q, k, v, mask=mask, backend="reference")
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    s = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1) & causal
    # Finite, so that empty rows and their gradients are 0 and not NaN.
    p = torch.softmax(s.masked_fill(hidden, -1e30), dim=-1).masked_fill(hidden, 0.0)
    return p.to(v.dtype) @ v


def random_qkv(H: int, M: int, N: int) -> list[Tensor]:
    return [torch.randn(H, length, 32).half() for length in (M, N, N)]


def check_forward(out: Tensor, lse: Tensor, *call: Any) -> None:
    exact, exact_lse = exact_attention(*call)
    assert_within_budget(out, exact, plain_attention(*call), name="out")
    assert_lse_within_budget(lse, exact_lse, call[0].dtype)


# %% [markdown]
# Lengths that are no multiple of a tile, more keys than queries, more queries than keys (the first
# rows see nothing). In the last case the heads are interleaved in memory, as a model's projection
# leaves them: other strides, the same kernel.

# %%
LENGTHS = ((48, 48), (50, 61), (61, 50), (1, 33))
calls = [(*random_qkv(2, M, N), causal) for M, N in LENGTHS for causal in (False, True)]
interleaved = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in random_qkv(3, 40, 40)]
for call in (*calls, (*interleaved, True)):
    check_forward(*attention_fwd(*call)[:2], *call)

# %% [markdown]
# On a GPU the state is in registers, out of sight. Here we can look: a kernel finds `_softmax_step`
# by its name, so for a moment we put a spy in its place. One program, 16 queries, 60 keys: four
# steps. Of the last tile four keys do not exist; their scores are `-inf`, since a score of 0 would
# count. After each step the state is the exact attention over the keys so far.

# %%
q, k, v = random_qkv(1, 16, 60)
softmax_step, rows = _softmax_step, []


def spy(s_log2: Any, v_tile: Any, *state: Any) -> Any:
    new_state = softmax_step(s_log2, v_tile, *state)
    before = float(state[0].handle.data[0])
    row_max, row_sum, acc = (torch.tensor(x.handle.data) for x in new_state)
    out, lse = acc / row_sum[:, None], (row_max + row_sum.log2()) / LOG2_E.value
    figures = (before, row_max[0], 2 ** (before - row_max[0]), row_sum[0], out[0, 0], lse[0])
    rows.append([len(rows), *(f"{float(x):.3f}" for x in figures)])
    seen = slice(0, 16 * len(rows))
    check_forward(out.half().unsqueeze(0), lse.unsqueeze(0), q, k[:, seen], v[:, seen], False)
    return new_state


_softmax_step = spy
attention_fwd(q, k, v, False)
_softmax_step = softmax_step
table(["step, row 0", "row_max before", "after", "factor", "row_sum", "out[0]", "lse"], rows)

# %% [markdown]
# ## 4. Watching the programs
#
# One head, causal, 96 queries and 96 keys: six programs. The record of their loads of K tells what
# each visited, and when. The numbers count the tiles in the order of the visits.


# %%
def show_map(trace: Trace, name: str, owned: str) -> list[list[int]]:
    """A line for each program: the tiles of `name`, numbered in the order of the visits."""
    print(f"program  tile of {owned:3}  tiles of {name}")
    numbers, visits = itertools.count(), []
    for program in range(6):
        visited, (mine,) = (
            [int(x.offsets.flatten()[0]) // 32 // 16 for x in accesses if x.program == program]
            for accesses in (trace.of("load", name), trace.of("store", owned))
        )
        order = {tile: next(numbers) for tile in visited}
        cells = " ".join(f"{order.get(tile, '.'):>2}" for tile in range(6))
        print(f"{program:7}  {mine:11}  {cells}  {'#' * len(visited)}")
        visits.append(visited)
    return visits


q, k, v = random_qkv(1, 96, 96)
light_first, heavy_first = (attention_fwd(q, k, v, True, order) for order in (False, True))
assert torch.equal(light_first[0], heavy_first[0])
assert show_map(light_first[2], "k", "out") == [list(range(i + 1)) for i in range(6)]
assert show_map(heavy_first[2], "k", "out") == [list(range(6 - i)) for i in range(6)]

# %% [markdown]
# The last tile of queries is six times the work of the first. The bits of the result do not depend
# on the order, since no program reads what another writes. The time does. A GPU has more programs
# than SMs; an SM that is done takes the next, roughly by number, axis 0 fastest. (The interpreter
# runs the *last* axis fastest. Neither is promised.) When a heavy program starts last, all wait for
# it. So the heavy ones should start first: those of *all* heads, which puts the heads on axis 0.
# Here are 16 heads, 128 queries a tile, one program an SM, a tile of keys as the unit of time.

# %%
rows = []
for length in (2048, 4096, 8192, 16384):
    light, shares = list(range(1, length // 128 + 1)), []
    heavy = light[::-1]
    for costs in (light * 16, heavy * 16, [cost for cost in heavy for _ in range(16)]):
        busy_until = [0] * 132
        for cost in costs:
            # The SM that is free first takes the next program.
            heapreplace(busy_until, busy_until[0] + cost)
        shares.append(sum(costs) / 132 / max(busy_until))
    rows.append([length, *(f"{share:.0%}" for share in shares)])
    assert shares[0] <= shares[1] < shares[2] > 0.95
table(["SMs busy, M = N", "light first", "heavy first", "and heads on axis 0"], rows)

# %% [markdown]
# The price: programs that run at the same time read K and V of different heads, and the L2 cache
# must hold them all. So kernels in earnest take a few heads at a time, or start one program an SM,
# which fetches tiles from a list (a *persistent* program).
#
# ## 5. Bytes and FLOPs
#
# Every tile of queries streams all of K and V past. For each key it does
# $4\, \mathrm{block}_m D$ FLOPs and loads $4 D$ bytes, so the *arithmetic intensity* is close to
# `BLOCK_M`. The H200 does 989 TFLOP/s in 16 bits and moves 4.8 TB/s, by its datasheet: below its
# *ridge point* of 206 FLOP/byte, memory sets the time.


# %%
RIDGE = 989e12 / 4.8e12
assert round(RIDGE) == 206


def forward_intensity(M: int, D: int, block_m: int) -> float:
    """FLOP/byte of the forward kernel in 16 bits, M = N, if nothing is found in a cache."""
    once, streamed = 2 * 2 * M * D + 4 * M, 2 * 2 * M * D * (M // block_m)
    return 4 * M * M * D / (once + streamed)


# The formula is what the programs did, to the byte.
trace = attention_fwd(*random_qkv(2, 128, 128), False)[2]
moved = trace.bytes("load", "q", "k", "v") + trace.bytes("store", "out", "lse")
assert trace.flops / moved == forward_intensity(128, 32, BLOCK_M)

M, D = 8192, 128
intensities = {
    # At best: S and P are written once and read once each.
    "separate operations": 4 * M * M * D / (8 * M * D + 8 * M * M),
    **{f"tiles of {b} queries": forward_intensity(M, D, b) for b in (16, 64, 128, 256)},
    "K and V loaded once": forward_intensity(M, D, M),
}
rows = [[name, f"{x:.0f}", f"{min(1, x / RIDGE):.0%}"] for name, x in intensities.items()]
table(["M = N = 8192, D = 128", "FLOP/byte", "of the H200's peak, at most"], rows)
# Tiles that are too small move more than no tiles at all.
assert intensities["tiles of 16 queries"] < intensities["separate operations"] < RIDGE / 3
assert intensities["tiles of 128 queries"] < RIDGE < intensities["tiles of 256 queries"]

# %% [markdown]
# Tiles of 128 queries alone would wait for memory. What lifts them: programs of one head run at the
# same time and stream the same K and V. The first to ask brings a tile into the L2 cache, the
# others find it there, and memory sees something near the last line.
#
# ## 6. The backward pass: two kernels
#
# This is lab 3's way of two passes. Who owns a row of a gradient sums it in registers and stores it
# once. The first kernel owns keys and loops over the queries that see them, for dK and dV. The
# second owns queries and loops over the keys that they see, for dQ. Nothing is added in memory, so
# there are no atomics, and every sum has one order and the same bits each time. The price: both
# kernels recompute P (from the LSE) and dP, so a tile takes seven products, not five.
#
# The first kernel holds its tiles transposed, keys down and queries across: `s_t` is K Q^T. So P^T
# and dS^T leave one product in the form in which dV and dK need them in the next.


# %%
@triton.jit
def _p_and_ds(s_log2, dp, lse, delta):
    """P, dS of a tile, normalised at once: the LSE is final, so no maximum and no correction."""
    p = tl.exp2(s_log2 - tl.where(lse == float("-inf"), 0.0, lse * LOG2_E))
    return p, p * (dp - delta)


@triton.jit
def _attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, len_q, len_k, scale,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # Contiguous tensors, so a head starts `length * D` elements after the one before.
    head_q, head_k = head * len_q * D, head * len_k * D
    offs_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = _load_tile(k_ptr + head_k, D, offs_n, len_k, D)
    v = _load_tile(v_ptr + head_k, D, offs_n, len_k, D)
    dk, dv = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)

    m_first = 0
    if CAUSAL:
        # The tile of the first query that sees the first key.
        m_first = tl.maximum(0, tile * BLOCK_N - len_k + len_q) // BLOCK_M * BLOCK_M
    for m_start in range(m_first, len_q, BLOCK_M):
        offs_m = m_start + tl.arange(0, BLOCK_M)
        q = _load_tile(q_ptr + head_q, D, offs_m, len_q, D)
        dout = _load_tile(dout_ptr + head_q, D, offs_m, len_q, D)
        lse = tl.load(lse_ptr + head * len_q + offs_m, mask=offs_m < len_q, other=0.0)
        delta = tl.load(delta_ptr + head * len_q + offs_m, mask=offs_m < len_q, other=0.0)
        s_t = tl.dot(k, tl.trans(q)) * (scale * LOG2_E)
        s_t = _hide(s_t, offs_m[None, :], offs_n[:, None], len_q, len_k, CAUSAL)
        dp_t = tl.dot(v, tl.trans(dout))
        p_t, ds_t = _p_and_ds(s_t, dp_t, lse[None, :], delta[None, :])
        dv = tl.dot(p_t.to(dout.dtype), dout, dv)
        dk = tl.dot(ds_t.to(q.dtype), q, dk)

    _store_tile(dk_ptr + head_k, D, offs_n, len_k, dk * scale, D)
    _store_tile(dv_ptr + head_k, D, offs_n, len_k, dv, D)


@triton.jit
def _attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, len_q, len_k, scale,
    D: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head_q, head_k = head * len_q * D, head * len_k * D
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = _load_tile(q_ptr + head_q, D, offs_m, len_q, D)
    dout = _load_tile(dout_ptr + head_q, D, offs_m, len_q, D)
    lse = tl.load(lse_ptr + head * len_q + offs_m, mask=offs_m < len_q, other=0.0)
    delta = tl.load(delta_ptr + head * len_q + offs_m, mask=offs_m < len_q, other=0.0)
    dq = tl.zeros([BLOCK_M, D], tl.float32)

    n_stop = len_k
    if CAUSAL:
        n_stop = tl.minimum(len_k, (tile + 1) * BLOCK_M + len_k - len_q)
    for n_start in range(0, n_stop, BLOCK_N):
        offs_n = n_start + tl.arange(0, BLOCK_N)
        k = _load_tile(k_ptr + head_k, D, offs_n, len_k, D)
        v = _load_tile(v_ptr + head_k, D, offs_n, len_k, D)
        s_log2 = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        s_log2 = _hide(s_log2, offs_m[:, None], offs_n[None, :], len_q, len_k, CAUSAL)
        dp = tl.dot(dout, tl.trans(v))
        _, ds = _p_and_ds(s_log2, dp, lse[:, None], delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)

    _store_tile(dq_ptr + head_q, D, offs_m, len_q, dq * scale, D)


# %%
def attention_bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool
) -> tuple[list[Tensor], Trace, Trace]:
    """Launches both kernels: dq, dk and dv, and the records of the first and the second."""
    (H, M, D), N = q.shape, k.shape[1]
    out, lse, _ = attention_fwd(q, k, v, causal)
    delta = (dout.float() * out.float()).sum(dim=-1)
    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta}
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    numbers = (M, N, D**-0.5, D, causal, BLOCK_M, BLOCK_N)
    with Trace(**inputs, dk=dk, dv=dv) as first:
        _attention_dkdv_kernel[(triton.cdiv(N, BLOCK_N), H)](*inputs.values(), dk, dv, *numbers)
    with Trace(**inputs, dq=dq) as second:
        _attention_dq_kernel[(triton.cdiv(M, BLOCK_M), H)](*inputs.values(), dq, *numbers)
    return [dq, dk, dv], first, second


def gradients_of(attention: Callable[..., Tensor], dout: Tensor, *qkv: Tensor) -> Sequence[Tensor]:
    leaves = [x.clone().requires_grad_() for x in qkv]
    return torch.autograd.grad(attention(*leaves), leaves, dout)


def check_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    got = attention_bwd(dout, q, k, v, causal)[0]
    doubles = [x.double() for x in (dout, q, k, v)]
    exact = gradients_of(lambda *qkv: exact_attention(*qkv, causal)[0], *doubles)
    eager = gradients_of(lambda *qkv: plain_attention(*qkv, causal), dout, q, k, v)
    for triple in zip(got, exact, eager, strict=True):
        assert_within_budget(*triple)


for call in calls:
    check_backward(torch.randn_like(call[0]), *call)

# %% [markdown]
# The maps. Under a causal mask the *first* keys are seen by most queries, so in the first kernel
# the heavy programs come first by themselves.

# %%
q, k, v = random_qkv(1, 96, 96)
_, first, second = attention_bwd(torch.randn_like(q), q, k, v, True)
show_map(first, "q", "dk")
show_map(second, "k", "dq")
# Every element has one owner, who stores it once.
for trace, name in ((first, "dk"), (first, "dv"), (second, "dq")):
    offsets = torch.cat([x.offsets.flatten() for x in trace.of("store", name)])
    assert torch.equal(offsets.sort().values, torch.arange(96 * 32))
# 21 tiles: four products in each for the first kernel, three for the second.
assert (first.flops, second.flops) == tuple(n * 21 * 2 * 16 * 16 * 32 for n in (4, 3))

# %% [markdown]
# ## 7. What a GPU makes of it
#
# The compiler needs no GPU either. For sm_90 (H100, H200) Triton 3.6.0 makes this of the forward
# kernel: causal, fp16, D = 128, tiles of 128 queries and 64 keys. (A test compiles it.)
#
# | warps | stages | `wgmma` | `cp.async` | shared KB | registers a thread | stack bytes |
# |---|---|---|---|---|---|---|
# | 4 | 2 | 24 | 32 | 96 | 255 | 72 |
# | 8 | 1 | 12 | 0 | 64 | 173 | 0 |
# | 8 | 2 | 12 | 16 | 96 | 178 | 0 |
# | 8 | 3 | 12 | 24 | 128 | 176 | 0 |
#
# - `tl.dot` becomes `wgmma`: four warps (a *warpgroup*) multiply together, asynchronously, and read
#   K and V from shared memory. The results are in registers.
# - `tl.load` in the loop becomes `cp.async`, copies into shared memory that run while the tensor
#   cores work. `num_stages` is how many tiles of K and V are under way or in use. Each pair takes
#   32 KB, and a program may have 227. With one stage, products wait for loads.
# - `num_warps` says how many threads share the tiles. With four warps S (128 x 64) and `acc`
#   (128 x 128) take 192 registers of each thread. With all else that is more than the 255 there
#   are, and the rest *spills* to the stack, which is memory. Eight warps halve it.
#
# The interpreter knows nothing of this. It shows what a kernel computes, not how fast, and not
# whether programs race: it runs one after the other.
#
# ## 8. Exercises
#
# **Exercise 1: a kernel of your own.** Fill `delta` `[rows]`, fp32, with `rowsum(dO * O)` by a
# kernel that loads every element once. `out` and `dout` are `[rows, D]`, D a power of two.


# %%
def fill_delta(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    raise NotImplementedError


def check_fill_delta(answer: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    out, dout = torch.randn(2, 50, 32).half()
    delta = torch.full((50,), float("nan"))
    with Trace(out=out, dout=dout, delta=delta) as trace:
        answer(out, dout, delta)
    exact = (out.double() * dout.double()).sum(dim=-1)
    assert_within_budget(delta, exact, (out.float() * dout.float()).sum(dim=-1))
    assert trace.bytes("load", "out", "dout") == 2 * 2 * out.numel()


mark("1", fill_delta, check_fill_delta)

# %% [markdown]
# **Exercise 2: one K and V for all heads.** In multi-query attention `k` and `v` are `[1, N, D]`
# and `q` is `[H, M, D]`. Return what `attention_fwd`, as it is, makes of them, without a copy.


# %%
def multi_query(q: Tensor, k: Tensor, v: Tensor) -> Forward:
    raise NotImplementedError


def check_multi_query(answer: Callable[[Tensor, Tensor, Tensor], Forward]) -> None:
    q, k, v = random_qkv(4, 40, 40)
    out, _, trace = answer(q, k[:1], v[:1])
    wide = q, *(x[:1].repeat(4, 1, 1) for x in (k, v)), False
    assert_within_budget(out, exact_attention(*wide)[0], plain_attention(*wide))
    assert trace.tensors["k"].data_ptr() == k.data_ptr()


mark("2", multi_query, check_multi_query)

# %% [markdown]
# **Exercise 3: programs of equal work.** Under a causal mask tile `i` of the queries visits `i + 1`
# tiles of keys. Let each program take two tiles, so that all do the same work; `tiles` is even.


# %%
def equal_programs(tiles: int) -> list[tuple[int, int]]:
    raise NotImplementedError


def check_equal_programs(answer: Callable[[int], list[tuple[int, int]]]) -> None:
    for tiles in (2, 6, 128):
        pairs = answer(tiles)
        assert sorted(itertools.chain(*pairs)) == list(range(tiles))
        assert {first + second + 2 for first, second in pairs} == {tiles + 1}


mark("3", equal_programs, check_equal_programs)

# %% [markdown]
# ### Solutions


# %%
@triton.jit
def _delta_kernel(out_ptr, dout_ptr, delta_ptr, rows, D: tl.constexpr, BLOCK_M: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    out = _load_tile(out_ptr, D, offs_m, rows, D).to(tl.float32)
    dout = _load_tile(dout_ptr, D, offs_m, rows, D).to(tl.float32)
    tl.store(delta_ptr + offs_m, tl.sum(out * dout, axis=1), mask=offs_m < rows)


def solved_fill_delta(out: Tensor, dout: Tensor, delta: Tensor) -> None:
    _delta_kernel[(triton.cdiv(len(delta), 16),)](out, dout, delta, *out.shape, BLOCK_M=16)


def solved_multi_query(q: Tensor, k: Tensor, v: Tensor) -> Forward:
    # A stride of 0: every head begins at the same address.
    return attention_fwd(q, *(x.expand(q.shape[0], -1, -1) for x in (k, v)), causal=False)


def solved_equal_programs(tiles: int) -> list[tuple[int, int]]:
    # A light one and its mirror image: (i + 1) + (tiles - i) = tiles + 1.
    return [(i, tiles - 1 - i) for i in range(tiles // 2)]


prove(check_fill_delta, solved_fill_delta)
prove(check_multi_query, solved_multi_query)
prove(check_equal_programs, solved_equal_programs)

# %% [markdown]
# ## Sources
#
# - P. Tillet, H. T. Kung, D. Cox, *Triton*, MAPL 2019 (a language whose values are tiles).
# - T. Dao, *FlashAttention-2*, 2023, arXiv 2307.08691 (algorithms 1 and 2, section 3.2).
# - NVIDIA, *H200 datasheet* (without sparsity); *CUDA C++ Programming Guide* (registers, memory).
