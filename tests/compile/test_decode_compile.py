"""The kernels of caches compile for every target, fit there, and are pipelined on Hopper."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise as tw
from tests.compile.offline import TARGETS, compile_call, compiled_stage, recorded
from tilewise.decode import choice, triton_call
from tilewise.decode.config import SplitConfig, split_config

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
G = 8


def attend(
    D: int = 128, E: int | None = None, *, M: int = 1, heads: int = 32, page: int | None = None,
    storage: torch.dtype | None = None, dtype: torch.dtype = BF16, **options: Any,
) -> Callable[[], None]:  # fmt: skip
    def call() -> None:
        cache = tw.KVCache.allocate(2, 256, G, D, E, page_size=page, dtype=storage or dtype)
        q = torch.zeros(2, M, heads, D, dtype=dtype)
        given = {"mask": tw.causal(), **options}
        tw.attention_with_cache_partial(q, cache, backend="triton", **given)

    return call


def latent(heads: int) -> Callable[[], None]:
    def call() -> None:
        cache = tw.KVCache.latent(2, 256, page_size=64)
        q = torch.zeros(2, 1, heads, 576, dtype=BF16)
        tw.attention_with_cache(q, cache, mask=tw.causal(), backend="triton")

    return call


def append() -> None:
    from tilewise.decode.triton_append import append_tokens

    cache = tw.KVCache.allocate(2, 256, G, 128, page_size=16, dtype=F8)
    new = torch.zeros(2, 1, G, 128, dtype=BF16)
    rotary = tw.Rotary(torch.zeros(256, 64), torch.zeros(256, 64))
    append_tokens(cache, new, new, None, rotary)


# name: the call, its targets, bytes a thread that the attention kernel may spill on sm_90.
VARIANTS: dict[str, tuple[Callable[[], None], str, int]] = {
    "one query": (attend(), "*", 0),
    "pages of 16": (attend(page=16), "sm_90 gfx950", 0),
    "pages of 7": (attend(page=7), "sm_90", 0),
    "pages of 16, ALiBi": (attend(page=16, alibi_slopes=torch.zeros(32)), "sm_90", 0),
    "D 64": (attend(64), "sm_90", 0),
    "D 256": (attend(256), "sm_120", 0),
    "D 80": (attend(80), "sm_90", 0),
    "16 queries": (attend(M=16), "sm_90 sm_89", 16),
    "16 queries, pages of 16": (attend(M=16, page=16), "sm_90", 16),
    "512 queries": (attend(M=512, page=64), "sm_90", 0),
    # For sm_89 in a process of its own, below.
    "float8": (attend(storage=F8, page=16), "sm_90 sm_100 sm_120", 0),
    "float8 e5m2": (attend(storage=torch.float8_e5m2), "sm_90 sm_80", 16),
    "float8, 8 queries": (attend(storage=F8, M=8), "sm_90", 0),
    "float8, D 96": (attend(96, storage=F8), "sm_90", 16),
    "pages of 16, tree": (
        attend(M=4, page=16, mask=tw.tree(torch.tensor([1, 3, 5, 9]))), "sm_90", 0
    ),
    "fp32": (attend(dtype=torch.float32), "sm_90", 0),
    "ALiBi, sinks": (attend(alibi_slopes=torch.zeros(32), sinks=torch.zeros(32)), "sm_90", 0),
    "batch invariant": (attend(batch_invariant=True), "sm_90", 0),
    "tree": (attend(M=4, mask=tw.tree(torch.tensor([1, 3, 5, 9]))), "sm_90", 0),
    "latent, 16 heads": (latent(16), "sm_90 sm_120", 16),
    # An accumulator of 64 rows of 512 leaves few registers.
    "latent, 128 heads": (latent(128), "sm_90 sm_89 gfx942", 512),
    # Values wider than keys.
    "D 64, E 512, 16 queries": (attend(64, 512, M=16), "sm_90 sm_89", 128),
    "append": (append, "sm_90", 0),
}  # fmt: skip


# Compiled under `--all-targets` alone: others like them show what theirs would.
RARE = {
    ("pages of 16, ALiBi", "sm_90"), ("pages of 16, tree", "sm_90"), ("float8, D 96", "sm_90"),
    ("16 queries", "sm_89"), ("D 64, E 512, 16 queries", "sm_89"),
}  # fmt: skip


# Whose merge is compiled: those of others differ in how many rows there are, and where.
MERGES = {
    "one query", "16 queries", "D 80", "fp32", "ALiBi, sinks", "batch invariant",
    "latent, 128 heads", "D 64, E 512, 16 queries", "append",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    everything = metafunc.config.getoption("--all-targets", default=False)
    if {"name", "target"} <= set(metafunc.fixturenames):
        pairs = [
            (name, target)
            for name, (_, targets, _) in VARIANTS.items()
            for target in (TARGETS if targets == "*" else targets.split())
        ]
        chosen = [x for x in pairs if everything or x not in RARE]
        metafunc.parametrize(("name", "target"), chosen)


def test_kernels_compile_and_fit(
    name: str, target: str, monkeypatch: Any, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    check(name, target, name in MERGES or pytestconfig.getoption("--all-targets"))


@pytest.mark.parametrize(("D", "E", "is_wide"), [(59, 37, False), (64, 64, True)])
def test_rows_that_begin_anywhere_are_read_by_element(
    D: int, E: int, is_wide: bool, monkeypatch: Any
) -> None:
    """A wide copy of a row of an odd head dim, in small pages, would begin where none may."""
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    cache = tw.KVCache.allocate(2, 256, 1, D, E, page_size=16)
    with recorded("sm_90") as launches:
        q = torch.zeros(2, 2, 7, D, dtype=BF16)
        tw.attention_with_cache(q, cache, mask=tw.causal(), backend="triton")
    text = compiled_stage(launches[0], "sm_90", "ptx")
    assert ("cp.async.cg.shared" in text or "cp.async.ca.shared" in text) == is_wide


def test_float8_compiles_where_bf16_does_not_come_of_fp16() -> None:
    """In a process of its own: Triton 3.6 settles that once, for the first GPU it compiles for."""
    code = (
        "from tests.compile.test_decode_compile import check, choice; "
        "choice.triton_problem = lambda device: ''; check('float8', 'sm_89')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def check(name: str, target: str, with_merge: bool = True) -> None:
    call, _, spills = VARIANTS[name]
    part = "" if with_merge else "cache_attention"
    with pytest.MonkeyPatch.context() as patch:
        chosen: list[SplitConfig] = []
        patch.setattr(triton_call, "split_config", lambda *given: chosen.append(
            split_config(*given)) or chosen[-1])  # fmt: skip
        found = {x.name: x for x in compile_call(call, target, part)}
    names = {"cache_attention_fwd", "cache_combine"} if with_merge else {"cache_attention_fwd"}
    assert set(found) == ({"cache_append"} if name == "append" else names)
    for x in found.values():
        assert x.shared_bytes <= TARGETS[target].shared_kib * 1024, x
        if target == "sm_90":
            assert x.spills <= (spills if x.name == "cache_attention_fwd" else 0), x
    if target == "sm_90" and chosen:
        # Registers are given out by eights; programs that find none wait for the others' end.
        threads = 32 * chosen[0].launch.num_warps * chosen[0].programs
        assert -(-found["cache_attention_fwd"].registers // 8) * 8 * threads <= 65536, name
    main = found.get("cache_attention_fwd")
    if main is not None and name != "fp32":
        assert main.mma, f"{main}: products run on no matrix unit"


def test_many_queries_over_a_contiguous_cache_are_a_dense_call(monkeypatch: Any) -> None:
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    found = {x.name for x in compile_call(attend(M=512), "sm_80")}
    assert found == {"place_sequences", "attention_fwd"}
    monkeypatch.setattr(choice, "hopper_problem", lambda device: "")
    with recorded("sm_90") as launches:
        attend(M=512)()
    assert {x.name for x in launches} == {"place_prefill", "attention_fwd_hopper"}
    with recorded("sm_90") as launches:
        attend(M=512, num_splits=4)()
    assert {x.name for x in launches} == {"cache_attention_fwd", "cache_combine"}


@pytest.mark.parametrize("storage", [F8, torch.float8_e5m2], ids=str)
def test_float8_is_read_from_shared_memory_by_matrices(storage: Any, monkeypatch: Any) -> None:
    """Byte by byte it would take longer than the cache takes to arrive."""
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    with recorded("sm_90") as launches:
        attend(storage=storage)()
    text = compiled_stage(launches[0], "sm_90", "ptx")
    assert text.count("ldmatrix") >= 16
    # What is left are conditions.
    assert len(re.findall(r"ld\.shared\.[bsu]8", text)) < 8


@pytest.mark.parametrize("page", [None, 16, 128])
def test_two_tiles_are_on_their_way(page: int | None, monkeypatch: Any) -> None:
    """Keys and values of 128 slots take 64 KiB, and there are two of them on a multiprocessor: of
    small pages in two programs."""
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    (main,) = compile_call(attend(page=page), "sm_90", "cache_attention")
    programs = 2 if page == 16 else 1
    assert programs * main.shared_bytes >= 2 * 64 * 1024
