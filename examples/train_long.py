"""Train a small causal language model on sequences that are dealt to ranks.

    python examples/train_long.py                                    # one rank
    torchrun --nproc-per-node 4 examples/train_long.py               # four, gloo or NCCL

Every rank holds its tokens of each sequence, runs the whole model on them, and meets the others in
attention alone. The loss is the same curve on any number of ranks: `--save` writes it, `--check`
trains on one rank too and compares. The text is real: the documents of this repository, byte by
byte, or any files given by `--text`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilewise as tw
from tilewise import parallel
from tilewise.core.tolerance import assert_within_budget

ROOT = Path(__file__).resolve().parents[1]
BYTES = 256


@dataclass(frozen=True)
class Settings:
    """What is trained. length: tokens of a sequence, over all ranks."""

    length: int = 512
    steps: int = 30
    batch: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    layers: int = 2
    rate: float = 3e-3
    dtype: torch.dtype = torch.float32
    schedule: str = "auto"


class Rotary(nn.Module):
    """Rotates pairs of features by an angle that grows with the position."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.to(torch.float64).unsqueeze(-1) * self.frequencies.to(x.device)
        cos, sin = (f(angle).unsqueeze(1).to(x.dtype) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    """Attention over the ranks' tokens together; everything else over this rank's."""

    def __init__(self, settings: Settings, where: dict[str, Any]) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.where = settings.heads, settings.kv_heads, where
        width, dim = settings.width, settings.width // settings.heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, (settings.heads + 2 * settings.kv_heads) * dim)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.rotary = Rotary(dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        projected = self.project(self.norm_a(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        q, k, v = projected.split([self.heads, self.kv_heads, self.kv_heads], 2)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if self.where:
            mixed = tw.context_parallel_attention(q, k, v, mask=tw.causal(), **self.where)
        else:
            mixed = tw.attention(q, k, v, mask=tw.causal())
        x = x + self.out(mixed.flatten(2))
        return x + self.mlp(self.norm_b(x))


class Model(nn.Module):
    def __init__(self, settings: Settings, where: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, settings.width)
        self.blocks = nn.ModuleList(Block(settings, where) for _ in range(settings.layers))
        self.norm, self.head = nn.LayerNorm(settings.width), nn.Linear(settings.width, BYTES)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def read_text(paths: Sequence[Path]) -> Tensor:
    """The bytes of some files, one after the other."""
    paths = paths or sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in paths)), dtype=torch.uint8)


def train(text: Tensor, settings: Settings, group: Any = None, device: str = "cpu") -> list[float]:
    """The loss of each step; the same on every rank.

    group: the ranks that share each sequence; None for one rank, which then uses
        `tilewise.attention`.
    """
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
    layout = parallel.zigzag(settings.length, ranks)
    where = {"group": group, "layout": layout, "schedule": settings.schedule} if group else {}
    torch.manual_seed(0)
    model = Model(settings, where).to(device, settings.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate)
    positions = layout.positions(rank, device)
    generator = torch.Generator("cpu").manual_seed(1)
    losses = []
    for _ in range(settings.steps):
        # Alike on every rank; each label is the next byte, wherever that is held.
        starts = torch.randint(
            text.numel() - settings.length - 1, (settings.batch,), generator=generator, device="cpu"
        )
        rows = torch.stack([text[s : s + settings.length + 1] for s in starts.tolist()])
        rows = rows.to(device, torch.int64)
        tokens, labels = layout.shard(rows[:, :-1], rank), layout.shard(rows[:, 1:], rank)
        logits = model(tokens, positions)
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # This rank's share: the shares of all ranks add up to the mean over the sequence.
        loss = total / (settings.batch * settings.length)
        optimizer.zero_grad()
        loss.backward()
        found = loss.detach()
        if group:
            for x in (found, *(p.grad for p in model.parameters())):
                dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(float(found))
    return losses


def compare(got: list[float], text: Tensor, settings: Settings) -> None:
    """Raise unless the curve is as near to one rank's in fp64 as one rank's in fp32 is."""
    one = {
        dtype: torch.tensor(
            train(text, Settings(**{**vars(settings), "dtype": dtype})), dtype=torch.float64
        )
        for dtype in (torch.float64, torch.float32)
    }
    curve = torch.tensor(got, dtype=torch.float64).to(torch.float32)
    assert_within_budget(curve, one[torch.float64], one[torch.float32], name="loss curve")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", nargs="*", type=Path, default=[], help="files to learn from")
    parser.add_argument("--length", type=int, default=Settings.length)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument(
        "--schedule",
        default=Settings.schedule,
        choices=("auto", "ring", "all_gather", "ulysses"),
    )
    parser.add_argument("--save", type=Path, help="write the losses as JSON")
    parser.add_argument("--check", action="store_true", help="train on one rank too, and compare")
    arguments = parser.parse_args(argv)
    settings = Settings(arguments.length, arguments.steps, schedule=arguments.schedule)
    text = read_text(arguments.text)
    # A sequence, the byte after it, and one place to choose.
    if text.numel() < settings.length + 2:
        parser.error(
            f"the text has {text.numel()} bytes, and --length {settings.length} takes "
            f"{settings.length + 2}: name longer files with --text, or a smaller --length."
        )
    group, device = None, "cpu"
    if "RANK" in os.environ:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            device = "cuda"
        dist.init_process_group("nccl" if on_gpu else "gloo")
        group = dist.group.WORLD
    losses = train(text, settings, group, device)
    if group is None or dist.get_rank() == 0:
        ranks = dist.get_world_size() if group else 1
        print(f"{ranks} ranks, {settings.length} tokens: loss", end=" ")
        print(" ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 8)]))
        if arguments.save:
            arguments.save.write_text(json.dumps(losses))
        if arguments.check:
            compare(losses, text, settings)
            print("The curve is that of one rank, within the error budget.")
    if group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
