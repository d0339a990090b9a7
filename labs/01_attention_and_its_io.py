# %% [markdown]
# # Lab 1: attention and its IO
#
# Attention is two matrix products with a softmax between them. On a modern GPU it is slow for a
# reason that its FLOPs do not show: the scores, one number for every pair of a query and a key,
# travel to memory and back several times. This lab counts those bytes, puts them on a roofline,
# and measures what three older remedies (mixed precision, operator fusion, activation
# checkpointing) save and what they leave. What they leave is the reason for labs 2 and 3.
#
# Letters: `B` batch, `H` heads, `M` query length, `N` key length, `D` query/key dim, `E` value
# dim. Tensors here are `[B, H, M, D]`, the order that PyTorch's
# `scaled_dot_product_attention` takes.
#
# Everything runs on a CPU in seconds, because bytes and FLOPs are counted and not timed. A claim
# that code can check is an `assert`: if a cell runs, what it says is so.

# %%
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from lab_tools import ByteMeter, Traffic, mark, peak_bytes, prove, table
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(0)

# %% [markdown]
# ## 1. A meter we can trust
#
# `ByteMeter` (in `lab_tools.py`) looks at every operation PyTorch runs. For each it notes the
# bytes read and the bytes written, every operand once, and it follows which tensors are alive.
# Before we use it, we hold it against a case small enough to count by hand.

# %%
x = torch.ones(1000)
with ByteMeter() as meter:
    # Reads x (4000 bytes) and writes y (4000 bytes): y is alive, 4000 bytes.
    y = x * 2
    # A view moves nothing and makes nothing.
    z = y.view(10, 100)
    # Reads y and writes y: nothing new is alive.
    y.add_(1)
    # Reads z and writes 100 sums: 400 more bytes are alive.
    total = z.sum(dim=0)
    # The last two names for the 4000 bytes go away; the 400 bytes stay.
    del y, z

assert meter.log == [
    Traffic("mul", read=4000, written=4000),
    Traffic("add_", read=4000, written=4000),
    Traffic("sum", read=4000, written=400),
]
assert meter.peak_bytes == 4400
assert meter.live_bytes == 400

# %% [markdown]
# ## 2. Where the bytes go
#
# Here is attention as the formula says it,
# $O = \mathrm{softmax}(\mathrm{scale}\; Q K^T + \mathrm{bias})\, V$,
# one operation a line. The bias is `[M, N]` and holds the causal mask: 0 where a query may look,
# `-inf` where it may not.


# %%
def plain_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scale = q.shape[-1] ** -0.5
    s = q @ k.transpose(-1, -2)
    s = s * scale
    s = s + bias
    p = torch.softmax(s, dim=-1)
    return p @ v


def causal_bias(m: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    hidden = torch.ones(m, n, dtype=torch.bool).triu(n - m + 1)
    return torch.zeros(m, n, dtype=dtype).masked_fill(hidden, float("-inf"))


B, H, M, N, D, E = 2, 4, 192, 256, 64, 32
q, k, v = torch.randn(B, H, M, D), torch.randn(B, H, N, D), torch.randn(B, H, N, E)
bias = causal_bias(M, N)

# %% [markdown]
# Now the bytes of each step by formula. `matrix` is the size of one score matrix for all heads,
# $B H M N$ elements. Count how often it appears: written by the first product, read and written
# by the scale, by the bias, by the softmax, and read by the second product: 8 times. Everything
# else, the inputs and the output, appears once.


# %%
@dataclass(frozen=True)
class Step:
    """One operation of plain attention: elements read and written, floating-point operations."""

    name: str
    read: int
    written: int
    flops: int


def plain_steps(B: int, H: int, M: int, N: int, D: int, E: int) -> list[Step]:
    matrix = B * H * M * N
    return [
        Step("S = Q K^T", B * H * (M * D + N * D), matrix, 2 * matrix * D),
        Step("scale", matrix, matrix, matrix),
        Step("bias", matrix + M * N, matrix, matrix),
        # Maximum, subtraction, exponential, sum and division: about five operations an element.
        Step("softmax", matrix, matrix, 5 * matrix),
        Step("O = P V", matrix + B * H * N * E, B * H * M * E, 2 * matrix * E),
    ]


steps = plain_steps(B, H, M, N, D, E)
with ByteMeter() as meter, FlopCounterMode(display=False) as counter:
    out = plain_attention(q, k, v, bias)

table(
    ["step", "op seen", "read", "written"],
    [
        [step.name, seen.op, seen.read, seen.written]
        for step, seen in zip(steps, meter.log, strict=True)
    ],
)

# The formula is the measurement, byte for byte (float32: 4 bytes an element).
for step, seen in zip(steps, meter.log, strict=True):
    assert (4 * step.read, 4 * step.written) == (seen.read, seen.written)
# The counter knows matrix products only: 2 M N D and 2 M N E for each head.
assert counter.get_total_flops() == 2 * B * H * M * N * (D + E)
# PyTorch's fused attention gives the same numbers.
torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))

# %% [markdown]
# The share of the traffic that is score matrices grows with the length: inputs and output grow
# as $M + N$, the matrices as $M N$ for every head. (The bias is $M N$ too, but all heads share
# it.)

# %%
rows, shares = [], []
for length in (256, 1024, 4096, 16384):
    moved = sum(s.read + s.written for s in plain_steps(1, 16, length, length, 128, 128))
    share = 8 * 16 * length**2 / moved
    shares.append(share)
    rows.append([length, f"{2 * moved / 1e6:,.0f} MB", f"{share:.1%}"])
table(["M = N  (H 16, D 128, bf16)", "moved", "of it score matrices"], rows)

assert shares == sorted(shares)
assert shares[0] > 0.75
assert shares[-1] > 0.98

# %% [markdown]
# ## 3. The roofline
#
# A GPU can do so many FLOPs a second, and move so many bytes a second. An operation takes at
# least the longer of the two times:
#
# $$ t \ge \max\left(\frac{\mathrm{FLOPs}}{\mathrm{peak}},
# \frac{\mathrm{bytes}}{\mathrm{bandwidth}}\right) $$
#
# The ratio of an operation's FLOPs to its bytes is its *arithmetic intensity*; the ratio of the
# two peaks is the machine's *balance*. Below the balance, memory sets the time, and the tensor
# cores wait. The numbers are NVIDIA's datasheets', for bf16 without structured sparsity. Each
# is a ceiling that no real kernel reaches.


# %%
@dataclass(frozen=True)
class Gpu:
    name: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def balance(self) -> float:
        return self.flops_per_s / self.bytes_per_s

    def seconds(self, flops: float, moved_bytes: float) -> float:
        return max(flops / self.flops_per_s, moved_bytes / self.bytes_per_s)


GPUS = [
    # NVIDIA A100 80GB datasheet: 312 TFLOP/s, 2,039 GB/s.
    Gpu("A100 SXM 80GB", 312e12, 2.039e12),
    # NVIDIA H100 datasheet: 1,979 TFLOP/s with sparsity is 989 without; 3.35 TB/s.
    Gpu("H100 SXM", 989e12, 3.35e12),
    # NVIDIA H200 datasheet: the tensor cores of the H100; 4.8 TB/s.
    Gpu("H200", 989e12, 4.8e12),
]
H100 = GPUS[1]

table(
    ["GPU", "TFLOP/s", "TB/s", "balance, FLOP per byte"],
    [
        [g.name, f"{g.flops_per_s / 1e12:.0f}", f"{g.bytes_per_s / 1e12:.2f}", f"{g.balance:.0f}"]
        for g in GPUS
    ],
)

# %% [markdown]
# From the A100 to the H100 the FLOPs grew three times and the bandwidth 1.6 times, so the
# balance moved up. Now the five steps, for a long sequence in bf16 (2 bytes an element), on an
# H100. We flatter the elementwise steps: their few FLOPs do not run on the tensor cores, yet we
# count them at that rate.

# %%
LENGTH, WIDTH = 8192, 128
steps = plain_steps(1, 16, LENGTH, LENGTH, WIDTH, WIDTH)


def intensity(flops: float, elements: float, element_size: int = 2) -> float:
    return flops / (elements * element_size)


def bar(share: float) -> str:
    return ("#" * max(1, round(30 * share))).ljust(30)


rows = []
for step in steps:
    flop_per_byte = intensity(step.flops, step.read + step.written)
    share = min(1.0, flop_per_byte / H100.balance)
    time_us = 1e6 * H100.seconds(step.flops, 2 * (step.read + step.written))
    rows.append([step.name, f"{flop_per_byte:.2f}", f"{time_us:.0f}", f"{share:.1%}", bar(share)])
table(["step on an H100, M = N = 8192", "FLOP/byte", "us", "of peak", "reachable"], rows)

# Every step waits for memory, on every one of the three GPUs: the two products as well.
for gpu in GPUS:
    for step in steps:
        assert intensity(step.flops, step.read + step.written) < gpu.balance

# %% [markdown]
# That even the products wait may surprise. A big square product has a huge intensity, but here
# one side is only `D` = 128 wide: $Q K^T$ does $2 D$ FLOPs for every score and then writes that
# score, 2 bytes. So its intensity stays under `D`, however long the sequence.
#
# Now all of attention as one operation that keeps the scores on the chip: it reads Q, K and V
# once and writes O once. With `M = N` and `D = E`, in bf16, that is $4 N^2 D$ FLOPs over
# $8 N D$ bytes: an intensity of $N / 2$, which grows with the length. Plain attention does the
# same FLOPs, but moves more than $8 N^2$ elements of 2 bytes, so it stays under $D / 4$ forever.

# %%
rows = []
for length in (512, 2048, 8192, 32768):
    flops = 4 * 16 * length**2 * WIDTH
    plain_elements = sum(s.read + s.written for s in plain_steps(1, 16, length, length, 128, 128))
    fused_elements = 4 * 16 * length * WIDTH
    plain_intensity, fused_intensity = (
        intensity(flops, elements) for elements in (plain_elements, fused_elements)
    )
    # Both times are the roofline's, so this is the ratio of two lower bounds.
    ratio = H100.seconds(flops, 2 * plain_elements) / H100.seconds(flops, 2 * fused_elements)
    rows.append([length, f"{plain_intensity:.1f}", f"{fused_intensity:.0f}", f"{ratio:.1f}x"])
    assert ratio > 9
    assert plain_intensity < WIDTH / 4
    assert fused_intensity == length / 2
    # Fused attention leaves the memory wall behind at twice the balance: about 600 tokens.
    for gpu in GPUS:
        assert (fused_intensity > gpu.balance) == (length > 2 * gpu.balance)
table(["M = N", "plain FLOP/byte", "fused FLOP/byte", "ratio of times, H100"], rows)

# %% [markdown]
# So the prize, if both kernels reach their rooflines, is an order of magnitude, and it lies in the
# traffic of the scores. The question of labs 2 and 3 is how to fuse across a softmax, which seems
# to need a whole row of scores before it can give its first probability. First, the remedies
# that came before.
#
# ## 4. Remedy one: mixed precision
#
# Store the tensors in 16 bits. Every byte count of section 2 halves, exactly.

# %%
inputs = (q, k, v, bias)
half_inputs = tuple(x.to(torch.bfloat16) for x in inputs)
with ByteMeter() as full_meter:
    out = plain_attention(*inputs)
with ByteMeter() as half_meter:
    half_out = plain_attention(*half_inputs)

assert 2 * half_meter.traffic_bytes == full_meter.traffic_bytes
assert 2 * half_meter.peak_bytes == full_meter.peak_bytes

exact = plain_attention(*(x.double() for x in inputs))
table(
    ["dtype", "moved", "peak", "largest error"],
    [
        [name, m.traffic_bytes, m.peak_bytes, f"{(o.double() - exact).abs().max():.1e}"]
        for name, m, o in (("fp32", full_meter, out), ("bf16", half_meter, half_out))
    ],
)

# %% [markdown]
# It cannot be 16 bits everywhere. bf16 has 8 significant bits, so a running sum of ones in bf16
# stops at 256; fp16 has more bits but ends at 65504, and `exp(12)` is beyond that. Products must
# be accumulated in fp32, which tensor cores do, and softmax must be computed in fp32.

# %%
ones_sum = torch.zeros((), dtype=torch.bfloat16)
for _ in range(1000):
    ones_sum += 1
assert ones_sum == 256
assert torch.tensor(12.0).exp() > torch.finfo(torch.float16).max
assert torch.tensor(12.0).exp().half() == float("inf")


# %% [markdown]
# Under `torch.autocast` on a GPU softmax is an operation of its own that takes and gives fp32. So
# the scores are converted on the way in and the probabilities on the way out, and the
# conversions are traffic too. They take back nearly all that 16 bits saved.


# %%
def mixed_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The operations that autocast runs: all in the inputs' dtype but the softmax, in fp32."""
    s = q @ k.transpose(-1, -2)
    s = s * q.shape[-1] ** -0.5
    s = s + bias
    p = torch.softmax(s.float(), dim=-1)
    return p.to(v.dtype) @ v


with ByteMeter() as mixed_meter:
    mixed_out = mixed_attention(*half_inputs)

METERS = {"fp32": full_meter, "bf16": half_meter, "bf16, softmax in fp32": mixed_meter}
ratios = {name: m.traffic_bytes / full_meter.traffic_bytes for name, m in METERS.items()}
table(["variant", "moved, relative to fp32"], [[n, f"{r:.2f}"] for n, r in ratios.items()])
assert ratios["bf16"] == 0.5
assert 0.9 < ratios["bf16, softmax in fp32"] < 1

# %% [markdown]
# **Saves:** at best half of the bytes. **Leaves:** the quadratic growth, since half of $N^2$ is
# what one has at 0.7 of the length. And the products run many times faster on tensor cores than
# fp32 did without them, while the bytes only halved: the balance of section 3 is the price.
#
# ## 5. Remedy two: operator fusion
#
# Neighbouring operations can share one pass over the data: read once, do everything, write once.
# We climb a ladder. Its rungs are operations that PyTorch has in eager mode; a compiler such as
# `torch.compile` finds fusions of this kind by itself.


# %%
def attention_by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """No fusion at all: softmax as five operations."""
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + bias
    numerator = (s - s.amax(dim=-1, keepdim=True)).exp()
    return (numerator / numerator.sum(dim=-1, keepdim=True)) @ v


def epilogue_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Scale and bias fused into the first product, softmax into one operation."""
    batch, heads = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.baddbmm(bias.unsqueeze(0), q, k.transpose(-1, -2), alpha=q.shape[-1] ** -0.5)
    return (torch.softmax(s, dim=-1) @ v).unflatten(0, (batch, heads))


def fused_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


# The fused CPU operation wants D = E, so from here on both are 64.
N, D = 256, 64
q, k, v = (torch.randn(B, H, N, D) for _ in range(3))
inputs = (q, k, v, causal_bias(N, N))
matrix_bytes = 4 * B * H * N * N

LADDER: list[tuple[str, Callable[..., Tensor]]] = [
    ("softmax by hand", attention_by_hand),
    ("softmax as one op", plain_attention),
    ("scale and bias in the product", epilogue_attention),
    ("all in one op", fused_attention),
]
exact = attention_by_hand(*(x.double() for x in inputs))
passes, peaks = [], []
for _, function in LADDER:
    with ByteMeter() as meter:
        out = function(*inputs)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)
    # Accesses to a whole score matrix: all others together are far smaller than one.
    passes.append(sum(t.read // matrix_bytes + t.written // matrix_bytes for t in meter.log))
    peaks.append(meter.peak_bytes / matrix_bytes)

table(
    ["fused", "passes over a score matrix", "peak, in score matrices"],
    [
        [name, count, f"{peak:.2f}"]
        for (name, _), count, peak in zip(LADDER, passes, peaks, strict=True)
    ],
)
assert passes == [14, 8, 4, 0]
# S and P are alive together until the very last rung.
assert all(peak >= 2 for peak in peaks[:-1])
assert peaks[-1] < 0.3

# %% [markdown]
# The third rung is as far as fusing neighbours goes. Four passes remain: the first product
# writes S, softmax reads S and writes P, the second product reads P. Softmax needs the maximum
# and the sum of a whole row before its first result, and the products on both sides work tile by
# tile, so a compiler that only merges loops stops here. The last rung needs a new algorithm
# (lab 2), not a better compiler.
#
# **Saves:** up to 10 of 14 passes. **Leaves:** four passes and two matrices of $N^2$.
#
# ## 6. Remedy three: activation checkpointing
#
# For training there is a second bill. Autograd keeps P from the forward pass until the backward
# pass has used it, in every layer. Checkpointing keeps only the input of each layer, and runs
# the forward of a layer again when its backward is due.


# %%
LAYERS = 4


def run_layers(
    attention: Callable[..., Tensor], x: Tensor, bias: Tensor, recompute: bool = False
) -> Tensor:
    for _ in range(LAYERS):
        if recompute:
            x = checkpoint(attention, x, x, x, bias, use_reentrant=False)
        else:
            x = attention(x, x, x, bias)
    return x


@dataclass(frozen=True)
class Bill:
    """What a training step costs: bytes kept for backward, peak in backward, traffic, FLOPs."""

    kept: int
    peak: int
    traffic: int
    flops: int
    grad: Tensor


def training_bill(
    attention: Callable[..., Tensor],
    length: int,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
) -> Bill:
    torch.manual_seed(1)
    x = torch.randn(B, H, length, D).to(dtype).requires_grad_()
    bias = causal_bias(length, length, dtype)
    with FlopCounterMode(display=False) as counter, ByteMeter() as meter:
        loss = run_layers(attention, x, bias, recompute).sum()
        kept = meter.live_bytes
        meter.restart_peak()
        loss.backward()
    assert x.grad is not None
    return Bill(kept, meter.peak_bytes, meter.traffic_bytes, counter.get_total_flops(), x.grad)


kept_plain = training_bill(plain_attention, N)
recomputed = training_bill(plain_attention, N, recompute=True)

# The gradient is the same, bit for bit: the same operations run on the same numbers.
assert torch.equal(kept_plain.grad, recomputed.grad)
# Plain autograd keeps one P for every layer; checkpointing keeps none.
assert kept_plain.kept > LAYERS * matrix_bytes
assert recomputed.kept < LAYERS * matrix_bytes / 2
# The price in FLOPs. A layer does 2 products forward and 4 backward. The forward is repeated
# only as far as P, which takes 1 product: 7 instead of 6.
assert 6 * recomputed.flops == 7 * kept_plain.flops
# The price in bytes: more traffic, not less.
assert recomputed.traffic > 1.3 * kept_plain.traffic
# And within one layer nothing has changed: P and its gradient are whole matrices.
assert recomputed.peak > 3 * matrix_bytes

# %% [markdown]
# **Saves:** the P of all layers but the one at work. **Leaves:** the $N^2$ matrices of that one
# layer, and adds a third to the traffic.
#
# Keep the 7/6 in mind. Lab 3 pays the same FLOPs for the same recomputation of P, but tile by
# tile on the chip, where it costs no traffic.
#
# ## 7. The bill
#
# All remedies for a training step of four layers, at one length and at four times that length.

# %%
SHORT, LONG = 256, 1024
VARIANTS = {
    "plain fp32": lambda n: training_bill(plain_attention, n),
    "bf16": lambda n: training_bill(plain_attention, n, torch.bfloat16),
    "fused neighbours": lambda n: training_bill(epilogue_attention, n),
    "checkpointed": lambda n: training_bill(plain_attention, n, recompute=True),
    "one fused op": lambda n: training_bill(fused_attention, n),
}
bills = {name: (bill(SHORT), bill(LONG)) for name, bill in VARIANTS.items()}


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}"


table(
    [f"MB, M = N = {LONG}", "moved", "kept", "peak", f"peak at {SHORT}", "growth of peak"],
    [
        [
            name,
            megabytes(long.traffic),
            megabytes(long.kept),
            megabytes(long.peak),
            megabytes(short.peak),
            f"{long.peak / short.peak:.1f}x",
        ]
        for name, (short, long) in bills.items()
    ],
)

for name, (short, long) in bills.items():
    growth = long.peak / short.peak
    if name == "one fused op":
        # Linear in the length: four times the tokens, four times the bytes.
        assert 3.9 < growth < 4.1
    else:
        # Quadratic, 16 times, less the linear part that is still visible at this length.
        assert growth > 12
plain_bill, fused_bill = (bills[name][1] for name in ("plain fp32", "one fused op"))
assert plain_bill.traffic > 10 * fused_bill.traffic
assert plain_bill.peak > 10 * fused_bill.peak

# %% [markdown]
# Each of the three remedies divides $N^2$ by a constant. Only the last line changes the power.
# Its forward is lab 2 and its backward is lab 3.
#
# One caution. The meter sees a fused operation from outside and counts each operand once. Inside,
# a tiled kernel reads K and V again for every tile of queries. Lab 2 counts those reads.
#
# ## 8. Exercises
#
# Put your code in place of `raise NotImplementedError` and run the cell: its check answers.
# The solutions are in the last cell.
#
# **Exercise 1: decode.** A model writes text one token at a time: `M = 1`, and all of the cache
# is read for a single query. There are `q_heads` query heads that share `kv_heads` key/value
# heads (grouped-query attention). Give the arithmetic intensity in bf16, in FLOP per byte, when
# the two products are the FLOPs and only K and V count as bytes.


# %%
def decode_intensity(q_heads: int, kv_heads: int, length: int, head_dim: int) -> float:
    raise NotImplementedError


def check_decode_intensity(answer: Callable[..., float]) -> None:
    assert answer(32, 32, 8192, 128) == 1
    assert answer(32, 8, 8192, 128) == 4
    # Neither the length of the cache nor the head dim matters.
    assert answer(32, 8, 100, 64) == 4
    # Even when all heads share one, decode waits for memory on every GPU of the table.
    assert all(answer(64, 1, 8192, 128) < gpu.balance for gpu in GPUS)


mark("1", decode_intensity, check_decode_intensity)

# %% [markdown]
# **Exercise 2: the length where fused attention becomes compute-bound.** Give the smallest
# `M = N` at which *causal* fused attention (half of the FLOPs, all of the bytes, bf16, `D = E`)
# has an intensity of at least the balance of `gpu`.


# %%
def causal_crossover(gpu: Gpu) -> int:
    raise NotImplementedError


def check_causal_crossover(answer: Callable[[Gpu], int]) -> None:
    for gpu in GPUS:
        length = answer(gpu)
        at, before = (intensity(2 * n * n * D, 4 * n * D) for n in (length, length - 1))
        assert before < gpu.balance <= at, gpu.name


mark("2", causal_crossover, check_causal_crossover)

# %% [markdown]
# **Exercise 3: lean attention.** `plain_attention` has two score matrices alive at its peak.
# Without gradients nobody needs the old one. Write a version for inference that never has more
# than one, with in-place operations (`mul_`, `add_`, `sub_`, `exp_`, `div_`). Its traffic does
# not shrink: where do you see that?


# %%
def lean_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    raise NotImplementedError


def check_lean_attention(answer: Callable[..., Tensor]) -> None:
    torch.testing.assert_close(answer(*inputs).double(), exact, atol=1e-5, rtol=1e-5)
    assert peak_bytes(answer, *inputs) < 1.5 * matrix_bytes


mark("3", lean_attention, check_lean_attention)

# %% [markdown]
# ### Solutions


# %%
def solved_decode_intensity(q_heads: int, kv_heads: int, length: int, head_dim: int) -> float:
    # Every number read, 2 bytes, serves q_heads / kv_heads queries with one product and one sum.
    flops = 4 * q_heads * length * head_dim
    return flops / (2 * 2 * kv_heads * length * head_dim)


def solved_causal_crossover(gpu: Gpu) -> int:
    # 2 N^2 D FLOPs over 8 N D bytes are N / 4, so the answer is 4 balances, rounded up.
    return -int(-4 * gpu.balance // 1)


def solved_lean_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2)).mul_(q.shape[-1] ** -0.5).add_(bias)
    p = s.sub_(s.amax(dim=-1, keepdim=True)).exp_()
    return (p @ v).div_(p.sum(dim=-1, keepdim=True))


prove(check_decode_intensity, solved_decode_intensity)
prove(check_causal_crossover, solved_causal_crossover)
prove(check_lean_attention, solved_lean_attention)

# %% [markdown]
# ## Sources
#
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Re, *FlashAttention: Fast and Memory-Efficient Exact
#   Attention with IO-Awareness*, 2022, arXiv 2205.14135 (section 2 and theorem 2: the IO of
#   plain attention).
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for
#   multicore architectures*, Communications of the ACM 52(4), 2009.
# - P. Micikevicius et al., *Mixed Precision Training*, 2017, arXiv 1710.03740.
# - T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training Deep Nets with Sublinear Memory Cost*, 2016,
#   arXiv 1604.06174 (activation checkpointing).
# - NVIDIA A100 80GB, H100 and H200 Tensor Core GPU datasheets.
