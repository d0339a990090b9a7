"""Hopper's kernels for caches compile, fit, and wait for products only where they say so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.compile.offline import compile_call
from tilewise.decode import choice

# At launch, of four warp groups or of two programs of two; they share them out again.
REGISTERS = 128
# Of latents: one for S, one in each of two groups for O. Else one for S and one for O. More is
# ptxas putting products one after the other, for want of registers (its C7512).
WAITS = {"mla_cache_fwd_hopper": 3, "cache_attention_fwd_hopper": 2}
# Of latents: what a unit keeps for its end, and two addresses of Q's loop.
SPILLS = {"mla_cache_fwd_hopper": 208, "cache_attention_fwd_hopper": 0}
# Two programs of the other kernel run on a multiprocessor.
SHARED_KIB = {"mla_cache_fwd_hopper": 227, "cache_attention_fwd_hopper": 112}


def attend(
    heads: int, M: int = 1, *, G: int = 0, D: int = 128, page: int | None = 64,
    dtype: torch.dtype = torch.bfloat16, starts: bool = False, packed: bool = False,
    **options: Any,
) -> Callable[[], None]:  # fmt: skip
    """G: kv heads of D columns; 0 where the cache is latent."""

    def call() -> None:
        if G:
            cache = tw.KVCache.allocate(2, 256, G, D, page_size=page, dtype=dtype)
        else:
            cache = tw.KVCache.latent(2, 256, page_size=page, dtype=dtype)
        if starts:
            cache.starts = torch.zeros(2, dtype=torch.int32)
        rows = (2 * M,) if packed else (2, M)
        given = {"mask": tw.causal(), **options}
        if packed:
            given["cu_seqlens_q"] = torch.tensor([0, M, 2 * M], dtype=torch.int32)
        q = torch.zeros(*rows, heads, cache.k.shape[3], dtype=dtype)
        tw.attention_with_cache_partial(q, cache, backend="hopper", **given)

    return call


VARIANTS: dict[str, Callable[[], None]] = {
    "latent, 128 heads": attend(128, 2),
    "latent, contiguous, window, left padding, sinks": attend(
        32, 3, page=None, starts=True, mask=tw.window(50, 0), sinks=torch.zeros(32)
    ),
    "latent, pages of 32, packed, fp16, batch invariant": attend(
        16, 5, page=32, packed=True, dtype=torch.float16, batch_invariant=True
    ),
    "16 queries": attend(32, 16, G=8),
    "D 64, window, left padding, sinks": attend(
        32, 3, G=4, D=64, starts=True, mask=tw.window(50, 0), sinks=torch.zeros(32)
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_and_fits(name: str, monkeypatch: Any, record_property: Any) -> None:
    for problem in ("triton_problem", "hopper_problem"):
        monkeypatch.setattr(choice, problem, lambda device: "")
    main, combine = compile_call(VARIANTS[name], "sm_90")
    record_property("compiled", [
        (f"hopper cache, {name}", "sm_90", x.name, x.registers, x.spills,
         round(x.shared_bytes / 1024, 1), x.mma)
        for x in (main, combine)
    ])  # fmt: skip
    assert main.name == list(WAITS)[not name.startswith("latent")]
    assert main.mma == "HGMMA" and main.registers == REGISTERS
    assert main.waits == WAITS[main.name]
    assert main.spills <= SPILLS[main.name]
    assert main.shared_bytes <= SHARED_KIB[main.name] * 1024
    assert combine.name == "cache_combine" and combine.spills == 0
