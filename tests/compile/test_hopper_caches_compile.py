"""Latent attention on Hopper compiles, fits, and waits for products only where it says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.compile.offline import TARGETS, compile_call
from tilewise.decode import choice

# At launch, of four warp groups; they share them out again.
REGISTERS = 128
# One for S, one in each of two groups for O. More is ptxas putting products one after the other,
# for want of registers (its C7512).
WAITS = 3
# What a unit keeps for its end, and a few addresses of Q's loop.
SPILLS = 240


def latent(
    heads: int, M: int = 1, page: int | None = 64, dtype: torch.dtype = torch.bfloat16,
    starts: bool = False, packed: bool = False, **options: Any,
) -> Callable[[], None]:  # fmt: skip
    def call() -> None:
        cache = tw.KVCache.latent(2, 256, page_size=page, dtype=dtype)
        if starts:
            cache.starts = torch.zeros(2, dtype=torch.int32)
        rows = (2 * M,) if packed else (2, M)
        given = {"mask": tw.causal(), **options}
        if packed:
            given["cu_seqlens_q"] = torch.tensor([0, M, 2 * M], dtype=torch.int32)
        q = torch.zeros(*rows, heads, 576, dtype=dtype)
        tw.attention_with_cache_partial(q, cache, backend="hopper", **given)

    return call


VARIANTS: dict[str, Callable[[], None]] = {
    "16 heads": latent(16),
    "128 heads, 2 queries": latent(128, 2),
    "contiguous, fp16": latent(16, page=None, dtype=torch.float16),
    "window, left padding, sinks": latent(
        32, 3, starts=True, mask=tw.window(50, 0), sinks=torch.zeros(32)
    ),
    "packed": latent(16, 5, packed=True),
    "batch invariant": latent(128, batch_invariant=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_and_fits(name: str, monkeypatch: Any, record_property: Any) -> None:
    for problem in ("triton_problem", "hopper_problem"):
        monkeypatch.setattr(choice, problem, lambda device: "")
    main, combine = compile_call(VARIANTS[name], "sm_90")
    record_property("compiled", [
        (f"hopper latent, {name}", "sm_90", x.name, x.registers, x.spills,
         round(x.shared_bytes / 1024, 1), x.mma)
        for x in (main, combine)
    ])  # fmt: skip
    assert main.name == "mla_cache_fwd_hopper" and main.mma == "HGMMA"
    assert main.waits == WAITS and main.registers == REGISTERS
    assert main.spills <= SPILLS
    assert main.shared_bytes <= TARGETS["sm_90"].shared_kib * 1024
    assert combine.name == "cache_combine" and combine.spills == 0
