"""Train a small byte-level language model, with plain attention and with Tilewise.

    python examples/train_lm.py
    python examples/train_lm.py --device cuda

Two minutes on two idle cores; where others run beside it, `OMP_NUM_THREADS=1` is faster.
The text is what ships with Python: the sources of its standard library, a document each, packed
one after the other into one row. Every run is a process of its own. At a short context both forms
train and their loss curves agree; at a long one the memory given does not hold the matrix of
scores, so plain attention stops and Tilewise goes on.

Dims: T packed bytes of a step (the context), H heads, D head dim.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise.bench import environment
from tilewise.flash_attn.layers.rotary import apply_rotary_emb

GIB = 2**30
# Bytes of a document that are read, at most.
LONGEST = 4096
# Steps until the learning rate is reached.
WARM_UP = 10
Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """One training run. memory_gib: what it may take beyond what it has at its start; 0: any."""

    attention: str
    context: int
    steps: int
    device: str = "cpu"
    dtype: str = "float32"
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    memory_gib: float = 0.0


# By device: steps and contexts, short ones and a long one, and the memory of the long one.
PLANS = {
    "cpu": [Run("", 1024, 60), Run("", 8192, 8, memory_gib=0.75)],
    "cuda": [
        # Without the rounding of 16 bits, which grows from step to step, the curves are one.
        Run("", 2048, 50, "cuda", "float32", 4, 8, 64),
        Run("", 2048, 100, "cuda", "bfloat16", 4, 8, 64),
        Run("", 65536, 20, "cuda", "bfloat16", 4, 8, 64, memory_gib=24.0),
    ],
}


# ---------------------------------------------------------------- text


def read_documents() -> list[Tensor]:
    """The standard library's modules as bytes, in an order that is always the same."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_bytes()[:LONGEST] for path in paths]
    documents = [torch.tensor(list(text)) for text in texts if len(text) > 1]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(documents), generator=generator, device="cpu")
    return [documents[i] for i in order]


def pack(documents: list[Tensor], context: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless rows of bytes `[context]` and where their documents start, `[documents + 1]`."""
    at = 0
    while True:
        parts: list[Tensor] = []
        room = context
        while room > 0:
            parts.append(documents[at % len(documents)][:room])
            room -= parts[-1].numel()
            at += 1
        lengths = torch.tensor([0, *(part.numel() for part in parts)])
        yield torch.cat(parts), lengths.cumsum(0).to(torch.int32)


# ---------------------------------------------------------------- model


def plain_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`[T, H, D]`, with all scores at once."""
    T = q.shape[0]
    place = torch.arange(T, device=q.device)
    document = torch.searchsorted(cu_seqlens, place, right=True)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~seen, -math.inf).softmax(-1, dtype=_wide(q.dtype))
    return torch.einsum("hmn,nhd->mhd", p.to(v.dtype), v)


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return tw.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, mask=tw.causal())


ATTENTIONS: dict[str, Attention] = {"plain": plain_attention, "tilewise": tilewise_attention}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class Block(nn.Module):
    def __init__(self, run: Run) -> None:
        super().__init__()
        width = run.heads * run.head_dim
        self.attend, self.head_dim = ATTENTIONS[run.attention], run.head_dim
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, cu_seqlens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q, k = (apply_rotary_emb(t, cos, sin, cu_seqlens=cu_seqlens) for t in (q, k))
        x = x + self.out(self.attend(q, k, v, cu_seqlens).flatten(1))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    """Bytes in, logits of the next byte out; positions restart with each document."""

    cos: Tensor
    sin: Tensor

    def __init__(self, run: Run) -> None:
        super().__init__()
        width = run.heads * run.head_dim
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([Block(run) for _ in range(run.layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        frequency = 1e4 ** (-torch.arange(0, run.head_dim, 2) / run.head_dim)
        angles = torch.outer(torch.arange(LONGEST), frequency)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, text: Tensor, cu_seqlens: Tensor) -> Tensor:
        x = self.embed(text)
        for block in self.blocks:
            x = block(x, cu_seqlens, self.cos, self.sin)
        return self.head(self.norm(x))


def next_byte_loss(logits: Tensor, text: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Of every byte that has a next one in its document."""
    target = text.roll(-1)
    target[cu_seqlens[1:].long() - 1] = -100
    return F.cross_entropy(logits.to(_wide(logits.dtype)), target)


# ---------------------------------------------------------------- training


def train(run: Run) -> dict[str, object]:
    """Train, and say the loss of every step (nats a byte), bytes a second and the peak memory."""
    torch.manual_seed(0)
    dtype, device = getattr(torch, run.dtype), torch.device(run.device)
    is_mixed = dtype == torch.bfloat16
    model = Model(run).to(device, None if is_mixed else dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Steps that overshoot would blow up the rounding in which the two forms differ.
    rates = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM_UP)
    rows = pack(read_documents(), run.context)
    losses: list[float] = []
    start_bytes = limit_memory(run)
    started, said = 0.0, time.perf_counter()
    try:
        for step in range(run.steps):
            # The first step also compiles kernels.
            started = time.perf_counter() if step == 1 else started
            text, cu_seqlens = (x.to(device) for x in next(rows))
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_mixed):
                loss = next_byte_loss(model(text, cu_seqlens), text, cu_seqlens)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()
            losses.append(loss.item())
            said = say_progress(run, losses, said)
    except RuntimeError as error:
        # torch.OutOfMemoryError is one too; the CPU's allocator has no class of its own.
        if "memory" not in str(error):
            raise
        return {"run": asdict(run), "stopped": str(error).splitlines()[0], "losses": losses}
    seconds = max(time.perf_counter() - started, 1e-9)
    rate = (run.steps - 1) * run.context / seconds
    peak = peak_bytes(device) - start_bytes
    return {"run": asdict(run), "losses": losses, "bytes_per_s": rate, "peak_bytes": peak}


def say_progress(run: Run, losses: list[float], said: float) -> float:
    """A line on stderr every ten seconds. said: when the last one was; returned anew."""
    now = time.perf_counter()
    if now - said < 10:
        return said
    print(
        f"    {run.attention}, step {len(losses)} of {run.steps}: {losses[-1]:.4f}", file=sys.stderr
    )
    return now


def limit_memory(run: Run) -> int:
    """Hold the process to the memory of the run from here on; what it has already."""
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        if run.memory_gib:
            whole = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction((held + run.memory_gib * GIB) / whole)
        return held
    if run.memory_gib:
        limit = status_bytes("VmData") + int(run.memory_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # Imports may have held more than training will: the peak starts anew.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return status_bytes("VmRSS")


def peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A figure of this process as Linux has it; there is no other that says peaks and limits."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def train_apart(run: Run) -> dict[str, object]:
    """`train` in a process of its own, so that peaks and limits are its own."""
    command = [sys.executable, __file__, "--run", json.dumps(asdict(run))]
    # What it says meanwhile goes to this process's own stderr.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(
            f"the run {run} failed with {done.returncode}; its last words are above."
        )
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---------------------------------------------------------------- what is printed


def describe(result: dict[str, object]) -> str:
    run = Run(**result["run"])  # type: ignore[arg-type]
    head = f"  {run.attention:9}"
    losses: list[float] = result["losses"]  # type: ignore[assignment]
    if "stopped" in result:
        return f"{head} stopped after {len(losses)} steps: {result['stopped']}"
    every = max(1, len(losses) // 6)
    curve = " ".join(f"{loss:.4f}" for loss in losses[::every])
    rate, peak = float(result["bytes_per_s"]), float(result["peak_bytes"])  # type: ignore[arg-type]
    return (
        f"{head} {rate:9.0f} bytes/s, peak {peak / GIB:6.2f} GiB, loss {curve} .. {losses[-1]:.4f}"
    )


def compare(plan: Run) -> list[dict[str, object]]:
    itemsize = getattr(torch, plan.dtype).itemsize
    matrix = plan.heads * plan.context**2 * itemsize / GIB
    given = f"{plan.memory_gib:g} GiB given" if plan.memory_gib else "any memory"
    print(f"context {plan.context}, {plan.dtype}: scores of a layer {matrix:.2f} GiB, {given}")
    results = []
    for attention in ATTENTIONS:
        run = Run(**(asdict(plan) | {"attention": attention}))
        results.append(train_apart(run))
        print(describe(results[-1]), flush=True)
    curves: list[list[float]] = [r["losses"] for r in results]  # type: ignore[misc]
    if all("stopped" not in result for result in results):
        apart = max(abs(a - b) for a, b in zip(*curves, strict=True))
        print(f"  the curves differ by at most {apart:.1e}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=PLANS, default="cpu")
    parser.add_argument("--output", type=Path, help="write all losses and figures as JSON")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(train(Run(**json.loads(arguments.run)))))
        return
    made = {"environment": environment.describe(torch.device(arguments.device))}
    results: list[dict[str, object]] = []
    for plan in PLANS[arguments.device]:
        results += compare(plan)
        if arguments.output:
            text = json.dumps(made | {"runs": results}, indent=1)
            arguments.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
