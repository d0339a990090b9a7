"""What is measured over a cache, and how one case is drawn.

Dims: B sequences of N tokens each, M queries a sequence, H query heads on G kv heads, D key dim, E
value dim, pages of P slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...decode.cache import KVCache

_F8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class DecodeCase:
    """One cell. is_cold: caches take turns until together they exceed the last cache by far.

    storage: of the cache; q is in bf16 (fp32 on the CPU) for float8. is_latent: values are the
    first E columns of the keys.
    """

    B: int
    N: int
    H: int = 32
    G: int = 8
    D: int = 128
    E: int = 128
    M: int = 1
    page: int | None = None
    is_cold: bool = True
    storage: torch.dtype = torch.bfloat16
    is_latent: bool = False

    def __str__(self) -> str:
        parts = [f"B {self.B}", f"N {self.N}", f"H {self.H} G {self.G}", f"D {self.D}"]
        parts += [f"M {self.M}"] if self.M > 1 else []
        parts += [f"pages of {self.page}"] if self.page else []
        parts += ["float8"] if self.storage == _F8 else []
        return ", ".join([*parts, "cold" if self.is_cold else "warm"])

    @property
    def dtype(self) -> torch.dtype:
        """Of the queries."""
        return torch.bfloat16 if self.storage == _F8 else self.storage

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, all of which are read."""
        width = self.D if self.is_latent else self.D + self.E
        return self.B * self.N * self.G * width * self.storage.itemsize

    @property
    def flops(self) -> float:
        """Of the visible pairs: the last of M queries sees all keys, each other one fewer."""
        pairs = self.M * self.N - self.M * (self.M - 1) / 2
        return 2.0 * self.B * self.H * pairs * (self.D + self.E)

    def verified_form(self) -> DecodeCase:
        """Short enough for the oracle, with the same configuration."""
        return replace(self, B=min(self.B, 2), N=min(self.N, max(200, self.M + 100)))

    def draw(self, device: torch.device, seed: int = 0) -> tuple[Tensor, KVCache]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(self.dtype)

        q = normal(self.B, self.M, self.H, self.D)
        if self.is_latent:
            cache = KVCache.latent(
                self.B, self.N, rank=self.E, rope_dim=self.D - self.E, page_size=self.page,
                dtype=self.storage, device=device,
            )  # fmt: skip
        else:
            cache = KVCache.allocate(
                self.B, self.N, self.G, self.D, self.E, page_size=self.page, dtype=self.storage,
                device=device,
            )  # fmt: skip
        if cache.block_table is not None:
            pages = torch.randperm(cache.block_table.numel(), generator=generator, device=device)
            cache.block_table = pages.to(torch.int32).reshape(cache.block_table.shape)
        for x in (cache.k,) if self.is_latent else (cache.k, cache.v):
            # One sequence's worth at a time: a whole cache in fp32 would need twice its memory.
            for row in x.split(max(1, (1 << 26) // max(1, x[0].numel()))):
                row.copy_(torch.randn(row.shape, generator=generator, device=device))
        cache.lengths.fill_(self.N)
        return q, cache


_HEADS = ((32, 32), (64, 4))


def decode_cases(on_gpu: bool, is_quick: bool) -> list[DecodeCase]:
    if not on_gpu:
        small = DecodeCase(2, 512, 8, 2, 64, 64, is_cold=False, storage=torch.float32)
        found = [small, replace(small, page=16), replace(small, M=4), replace(small, storage=_F8)]
        return found[:2] if is_quick else [*found, replace(small, B=8, N=2048)]
    one = DecodeCase(1, 8192)
    found = [
        replace(one, is_cold=False),
        one,
        replace(one, N=131072),
        replace(one, B=16),
        replace(one, B=64),
        DecodeCase(128, 4096, 64, 8),
        DecodeCase(16, 32768, 64, 1),
    ]
    if is_quick:
        return found[:4]
    found += [replace(one, B=64, page=P) for P in (16, 64, 256, 1)]
    found += [replace(one, B=64, storage=_F8), DecodeCase(1, 32768, M=512)]
    found += [replace(one, B=16, M=M) for M in (4, 16)]
    found += [DecodeCase(16, 8192, H, G) for H, G in _HEADS]
    return [*found, DecodeCase(1, 32768, M=512, page=64)]


def mla_cases(on_gpu: bool, is_quick: bool) -> list[DecodeCase]:
    base = DecodeCase(128, 8192, 16, 1, 576, 512, page=64, is_latent=True)
    if not on_gpu:
        small = replace(base, B=2, N=256, is_cold=False, storage=torch.float32)
        return [small] if is_quick else [small, replace(small, H=128, M=2)]
    found = [base, replace(base, H=128, M=2), replace(base, H=128), replace(base, B=16, N=32768)]
    return found[:2] if is_quick else [*found, replace(base, storage=_F8), replace(base, page=None)]
