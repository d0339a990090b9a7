"""Hopper's kernels for caches compile, fit, and wait for products only where they say so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

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


# ---------------------------------------------------------------- prefills

PREFILL = "cache_prefill_fwd_hopper"
# At launch, of two consumers and of three.
PREFILL_REGISTERS = {2: 168, 3: 128}
# As of dense attention's forward, whose consumers these are.
PREFILL_WAITS, WAITS_OF_A_THIRD_LOOP = 7, 2
_SCORES = {"softcap": 3.0, "alibi_slopes": torch.zeros(4), "sinks": torch.zeros(4)}

# name: the call, bytes that Triton 3.6 and later ones spill of a thread.
PREFILLS: dict[str, tuple[Callable[[], None], tuple[int, int]]] = {
    "pages of 16": (attend(4, 256, G=2, page=16), (0, 32)),
    "pages of 256": (attend(4, 256, G=2, page=256), (0, 0)),
    "pages of 8, window, left padding": (
        attend(4, 256, G=2, page=8, starts=True, mask=tw.window(50, 0)), (0, 32)
    ),
    "packed, pages of 16": (attend(4, 256, G=2, page=16, packed=True), (8, 32)),
    "packed, contiguous, fp16": (
        attend(4, 256, G=2, page=None, packed=True, dtype=torch.float16), (0, 0)
    ),
    "packed, pages of 48, softcap, ALiBi, sinks": (
        attend(4, 256, G=2, page=48, packed=True, **_SCORES), (56, 112)
    ),
    "D 64, pages of 16": (attend(4, 256, G=2, D=64, page=16), (64, 88)),
    "D 64, packed, pages of 64": (attend(4, 256, G=2, D=64, packed=True), (80, 104)),
    "D 256, pages of 16": (attend(4, 256, G=2, D=256, page=16), (0, 208)),
    "D 256, packed, pages of 64": (attend(4, 256, G=2, D=256, packed=True), (0, 88)),
}  # fmt: skip


# Compiled under `--all-targets` alone: others like them show what theirs would.
RARE = {
    "pages of 256", "packed, pages of 16", "D 64, pages of 16", "D 256, packed, pages of 64"
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--all-targets", default=False)
    if "prefill" in metafunc.fixturenames:
        metafunc.parametrize("prefill", [x for x in PREFILLS if everything or x not in RARE])


def test_a_prefill_compiles_and_fits(prefill: str, monkeypatch: Any, record_property: Any) -> None:
    for problem in ("triton_problem", "hopper_problem"):
        monkeypatch.setattr(choice, problem, lambda device: "")
    call, spills = PREFILLS[prefill]
    found = compile_call(call, "sm_90")
    record_property("compiled", [
        (f"hopper cache, prefill, {prefill}", "sm_90", x.name, x.registers, x.spills,
         round(x.shared_bytes / 1024, 1), x.mma)
        for x in found
    ])  # fmt: skip
    assert [x.name for x in found[:2]] == ["place_prefill", PREFILL]
    assert [x.name for x in found[2:]] == ["cache_attention_fwd", "cache_combine"] * (
        "packed" in prefill
    )
    main, n_consumers = found[1], 3 if prefill.startswith("D 64") else 2
    assert main.mma == "HGMMA" and main.registers == PREFILL_REGISTERS[n_consumers]
    each = PREFILL_WAITS + (WAITS_OF_A_THIRD_LOOP if "window" in prefill else 0)
    assert main.waits == n_consumers * each
    assert main.shared_bytes <= 227 * 1024
    assert main.spills <= spills[triton.__version__ != "3.6.0"]
