"""Multi-head latent attention in both of its forms, shown to be one function.

    python examples/mla.py [--heads 16] [--tokens 300] [--page-size 64]

Prefill expands the latent to keys of 192 and values of 128 dims for each head and runs
`tilewise.attention`; decode leaves it as it is and runs `tilewise.mla_with_cache` over a paged
cache of 576 elements a token. Runs on the CPU.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tilewise as tw
from tilewise.core.tolerance import measure_budget


@dataclass(frozen=True)
class Sizes:
    """DeepSeek-V3's of a head; heads and hidden size are the example's."""

    hidden: int = 256
    heads: int = 16
    rank: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128


class LatentAttention(nn.Module):
    """One layer: `prefill` expands keys and values, `decode` absorbs that into q and out."""

    def __init__(self, sizes: Sizes, page_size: int, *, max_tokens: int = 4096) -> None:
        super().__init__()
        self.sizes, self.page_size = sizes, page_size
        heads, key = sizes.heads, sizes.nope + sizes.rope
        self.to_q = nn.Linear(sizes.hidden, heads * key, bias=False)
        self.to_latent = nn.Linear(sizes.hidden, sizes.rank + sizes.rope, bias=False)
        scale = sizes.rank**-0.5
        self.up_k = nn.Parameter(scale * torch.randn(heads, sizes.nope, sizes.rank))
        self.up_v = nn.Parameter(scale * torch.randn(heads, sizes.value, sizes.rank))
        self.to_out = nn.Linear(heads * sizes.value, sizes.hidden, bias=False)
        rates = 1e4 ** (-torch.arange(sizes.rope // 2) / (sizes.rope // 2))
        self.register_buffer("angles", torch.outer(torch.arange(max_tokens), rates))

    @property
    def scale(self) -> float:
        """Of keys as the model defines them. With the cache's 576 in place of 192 both forms would
        still agree with themselves, and with no trained model."""
        return float((self.sizes.nope + self.sizes.rope) ** -0.5)

    def prefill(self, x: Tensor) -> Tensor:
        """`[B, N, hidden]`, causal, from position 0."""
        sizes = self.sizes
        q_nope, q_rope, latent, k_rope = self._project(x, torch.arange(x.shape[1]))
        k_nope = torch.einsum("bnr,hdr->bnhd", latent, self.up_k)
        v = torch.einsum("bnr,hdr->bnhd", latent, self.up_v)
        k_rope = k_rope.unsqueeze(2).expand(-1, -1, sizes.heads, -1)
        out = tw.attention(
            torch.cat([q_nope, q_rope], -1), torch.cat([k_nope, k_rope], -1), v,
            mask=tw.causal(), scale=self.scale,
        )  # fmt: skip
        return self.to_out(out.flatten(2))

    def decode(self, x: Tensor, cache: tw.KVCache) -> Tensor:
        """`[B, M, hidden]` behind what is cached; the new tokens go into the cache."""
        first = int(cache.lengths[0])
        at = torch.arange(first, first + x.shape[1], device=x.device)
        q_nope, q_rope, latent, k_rope = self._project(x, at)
        cache.append(torch.cat([latent, k_rope], -1).unsqueeze(2))
        q_latent = torch.einsum("bmhd,hdr->bmhr", q_nope, self.up_k)
        out = tw.mla_with_cache(q_latent, q_rope, cache, scale=self.scale, mask=tw.causal())
        return self.to_out(torch.einsum("bmhr,hdr->bmhd", out, self.up_v).flatten(2))

    def new_cache(self, B: int, tokens: int, dtype: torch.dtype) -> tw.KVCache:
        sizes = self.sizes
        return tw.KVCache.latent(
            B, tokens, rank=sizes.rank, rope_dim=sizes.rope, page_size=self.page_size, dtype=dtype,
            device=self.up_k.device,
        )  # fmt: skip

    def _project(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q_nope and q_rope of every head, the latent, and its rotated key."""
        sizes = self.sizes
        q = self.to_q(x).unflatten(2, (sizes.heads, -1))
        q_nope, q_rope = q.split([sizes.nope, sizes.rope], -1)
        latent, k_rope = self.to_latent(x).split([sizes.rank, sizes.rope], -1)
        return q_nope, self._turn(q_rope, at.unsqueeze(1)), latent, self._turn(k_rope, at)

    def _turn(self, x: Tensor, at: Tensor) -> Tensor:
        angle = self.angles[at].to(x.dtype)
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


@torch.no_grad()
def compare(sizes: Sizes, tokens: int, page_size: int, B: int = 2) -> dict[str, float]:
    """The outputs of both forms, each against the expanded one in fp64, in shares of the budget."""
    torch.manual_seed(0)
    layer = LatentAttention(sizes, page_size, max_tokens=tokens)
    x = torch.randn(B, tokens, sizes.hidden)
    expanded = layer.prefill(x)
    cache = layer.new_cache(B, tokens, torch.float32)
    steps = [layer.decode(x[:, : tokens // 2], cache)]
    # A prompt, then tokens by one and by three, as decoding and speculation bring them.
    start = tokens // 2
    while start < tokens:
        stop = min(tokens, start + (1 if start % 2 else 3))
        steps.append(layer.decode(x[:, start:stop], cache))
        start = stop
    absorbed = torch.cat(steps, 1)
    exact = layer.double().prefill(x.double())
    used = {}
    for name, got in (("expanded", expanded), ("absorbed", absorbed)):
        report = measure_budget(got, exact, expanded, name=name)
        if not report.is_within:
            raise SystemExit(f"over the error budget: {report}")
        used[name] = report.used
    per_head = 2 * sizes.heads * (sizes.nope + sizes.rope + sizes.value)
    return {
        **used,
        "bytes": cache.nbytes / (B * cache.capacity),
        "ratio": per_head / (2 * (sizes.rank + sizes.rope)),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--page-size", type=int, default=64)
    options = parser.parse_args(arguments)
    found = compare(Sizes(heads=options.heads), options.tokens, options.page_size)
    print(
        f"{options.heads} heads, {options.tokens} tokens in pages of {options.page_size}: "
        f"expanded uses {found['expanded']:.0%} of the error budget, absorbed "
        f"{found['absorbed']:.0%}."
    )
    print(
        f"The latent cache takes {found['bytes']:.0f} bytes a token in fp32; keys and values of "
        f"all heads would take {found['ratio']:.1f} times as much."
    )


if __name__ == "__main__":
    main()
