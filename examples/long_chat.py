"""Read a long text, then write on: a paged cache beside the way without one.

    python examples/long_chat.py
    python examples/long_chat.py --steps 20 --prompt 1000 --tokens 50

A small byte-level model is trained for a minute on what ships with Python (examples/train_lm.py).
Then it reads the start of a module and continues it, greedily, twice: with `tilewise.KVCache` in
pages and `attention_with_cache`, and with plain attention over keys and values that are put one
behind the other, as eager models do. Both write the same bytes.

Dims: N bytes read, L bytes written, H heads, D head dim.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise as tw
from tilewise.bench.memory import observe
from tilewise.flash_attn.layers.rotary import apply_rotary_emb

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_lm as lm


@dataclass
class Written:
    """What one way gave: the bytes, seconds to read and to write, memory while reading."""

    text: list[int]
    read_s: float
    write_s: float
    peak_bytes: int
    cache_bytes: int


class Paged:
    """A cache for each layer, in pages."""

    def __init__(self, model: Any, capacity: int, page_size: int) -> None:
        block = model.blocks[0]
        heads, D = model.embed.embedding_dim // block.head_dim, block.head_dim
        weight = model.embed.weight
        self.caches = [
            tw.KVCache.allocate(
                1, capacity, heads, D, page_size=page_size, dtype=weight.dtype, device=weight.device
            )
            for _ in model.blocks
        ]

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: Any) -> Tensor:
        cache, first = self.caches[layer], int(self.caches[layer].lengths[0])
        cache.append(k, v, rotary=tw.Rotary(*tables))
        q = apply_rotary_emb(q, *tables, seqlen_offsets=first)
        return tw.attention_with_cache(q, cache, mask=tw.causal())


class Joined:
    """Keys and values put one behind the other, and all scores at once."""

    def __init__(self, model: Any) -> None:
        self.held: list[tuple[Tensor, Tensor] | None] = [None] * len(model.blocks)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.held if pair is not None for x in pair)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: Any) -> Tensor:
        before = self.held[layer]
        first = 0 if before is None else before[0].shape[1]
        q, k = (apply_rotary_emb(x, *tables, seqlen_offsets=first) for x in (q, k))
        if before is not None:
            k, v = (torch.cat(pair, 1) for pair in zip(before, (k, v), strict=True))
        self.held[layer] = (k, v)
        M, N = q.shape[1], k.shape[1]
        s = torch.einsum("bmhd,bnhd->bhmn", q, k) * q.shape[-1] ** -0.5
        hidden = torch.ones(M, N, dtype=torch.bool, device=q.device).triu(N - M + 1)
        return torch.einsum("bhmn,bnhd->bmhd", s.masked_fill(hidden, float("-inf")).softmax(-1), v)


def next_logits(model: Any, text: Tensor, way: Paged | Joined, tables: Any) -> Tensor:
    """Of the byte behind `text` `[1, M]`, which continues what the way holds."""
    x = model.embed(text)
    for layer, block in enumerate(model.blocks):
        q, k, v = block.qkv(block.norms[0](x)).unflatten(-1, (3, -1, block.head_dim)).unbind(2)
        x = x + block.out(way.attend(layer, q, k, v, tables).flatten(2))
        x = x + block.mlp(block.norms[1](x))
    logits: Tensor = model.head(model.norm(x[:, -1]))
    return logits


@torch.no_grad()
def write(model: Any, prompt: Tensor, tokens: int, make: Callable[[], Any]) -> Written:
    """Read the prompt and write so many bytes."""
    tables = _tables(model, prompt.shape[1] + tokens)
    spare = make()
    seen = observe(lambda: next_logits(model, prompt, spare, tables), prompt.device)
    way = make()
    start = time.perf_counter()
    logits = next_logits(model, prompt, way, tables)
    read_s = time.perf_counter() - start
    text = []
    start = time.perf_counter()
    for _ in range(tokens):
        last = logits.argmax(-1, keepdim=True)
        text.append(int(last))
        logits = next_logits(model, last, way, tables)
    write_s = time.perf_counter() - start
    return Written(text, read_s, write_s, seen.peak_bytes, way.nbytes)


def _tables(model: Any, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of as many positions as are needed."""
    D = model.blocks[0].head_dim
    angles = torch.outer(torch.arange(length), 1e4 ** (-torch.arange(0, D, 2) / D))
    weight = model.embed.weight
    return angles.cos().to(weight), angles.sin().to(weight)


def train(steps: int) -> Any:
    run = lm.Run("tilewise", 1024, steps)
    print(f"training {steps} steps first, a second each on two idle cores", flush=True)
    torch.manual_seed(0)
    model = lm.Model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = lm.pack(lm.read_documents(), run.context)
    losses: list[float] = []
    said = time.perf_counter()
    for _ in range(steps):
        text, cu_seqlens = next(rows)
        loss = lm.next_byte_loss(model(text, cu_seqlens), text, cu_seqlens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        said = lm.say_progress(run, losses, said)
    print(f"trained {steps} steps: {loss.item():.2f} nats a byte")
    return model.eval()


def compare(model: Any, prompt: int, tokens: int, page_size: int) -> dict[str, Written]:
    text = torch.cat(lm.read_documents())[:prompt].unsqueeze(0)
    capacity = text.shape[1] + tokens
    return {
        f"pages of {page_size}": write(
            model, text, tokens, lambda: Paged(model, capacity, page_size)
        ),
        "eager": write(model, text, tokens, lambda: Joined(model)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=100, help="of training")
    parser.add_argument("--prompt", type=int, default=3000, help="bytes that are read")
    parser.add_argument("--tokens", type=int, default=200, help="bytes that are written")
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args(arguments)
    model = train(options.steps)
    found = compare(model, options.prompt, options.tokens, options.page_size)
    row = "{:<14} {:>12} {:>12} {:>14} {:>12}"
    print(row.format("", "read, ms", "tokens/s", "peak, MB", "cache, MB"))
    for name, way in found.items():
        print(
            row.format(
                name,
                f"{1e3 * way.read_s:.0f}",
                f"{len(way.text) / way.write_s:.0f}",
                f"{way.peak_bytes / 1e6:.1f}",
                f"{way.cache_bytes / 1e6:.2f}",
            )
        )
    paged, eager = (way.text for way in found.values())
    print(f"The same bytes: {paged == eager}. They are:")
    print(bytes(paged).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
