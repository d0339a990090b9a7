"""Prefills over a cache on Hopper: the kernels' own source run on the CPU, and what is launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tilewise as tw
from tilewise.core.tolerance import assert_lse_within_budget, assert_within_budget
from tilewise.decode import choice, warm
from tilewise.decode.reference import cache_eager, cache_reference
from tilewise.dense import choice as dense_choice

pytest.importorskip("triton")

from tests.gpu.hopper_caches import PREFILLS, HopperCase, call_of, draw
from tests.helpers import UNDER_TEST
from tests.hopper_emulator import emulated

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UNDER_TEST.device == "cuda", reason="emulated, on the CPU"),
]

PREFILL, DENSE = "_cache_prefill_fwd_hopper_kernel", "_attention_fwd_hopper_kernel"
SPLIT, COMBINE = "_cache_attention_fwd_kernel", "_cache_combine_kernel"


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a Hopper GPU with three processors, where the kernel runs."""
    from tilewise.decode import triton_call
    from tilewise.dense import hopper_call
    from tilewise.kernels import launch

    for module in (choice, dense_choice):
        monkeypatch.setattr(module, "triton_problem", lambda device: "")
        monkeypatch.setattr(module, "hopper_problem", lambda device: "")
    monkeypatch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
    for module in (hopper_call, triton_call):
        monkeypatch.setattr(module, "_multiprocessors", lambda device: 3)
    warm._kept.clear()
    yield
    warm._kept.clear()


def is_few(case: HopperCase) -> torch.Tensor:
    """Which rows of packed queries are the split-KV kernel's."""
    assert isinstance(case.queries, tuple)
    counts = torch.tensor(case.queries)
    of_row = counts.repeat_interleave(counts)
    return torch.cat([of_row < choice.LEAST_QUERIES, torch.tensor([True, True])])


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.name)
def test_a_prefill_is_within_its_budget(case: HopperCase) -> None:
    from tilewise.decode.hopper_prefill_call import PrefillForward

    q, cache, options = draw(case)
    call = call_of(q, cache, options)
    assert choice.why_not_hopper(call) == "" and choice.is_prefill(call)
    exact, eager = cache_reference(call), cache_eager(call)
    # A partial may be asked for in fp32.
    dtype = torch.float32 if "sinks" in case.name else q.dtype
    out = torch.full(exact.out.shape, float("nan"), dtype=dtype)
    lse = torch.full(exact.lse.shape, float("nan"))
    with emulated(seed=1, skip=(SPLIT, COMBINE)) as names:
        PrefillForward(call, out, lse).run_first()
    is_dense = "contiguous" in case.name and not call.is_packed
    assert names[:2] == ["place_prefill", DENSE if is_dense else PREFILL]
    if len(names) > 2:
        # Those rows nobody else may write.
        few = is_few(case)
        assert names[2:] == [SPLIT, COMBINE]
        assert out[few].isnan().all() and lse[:, few].isnan().all()
        out[few], lse[:, few] = exact.out[few].to(dtype), exact.lse[:, few].float()
    assert_within_budget(out, exact.out, eager.out)
    assert_lse_within_budget(lse, exact.lse, q.dtype)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_roles_and_copies_gives_the_same_bits(seed: int) -> None:
    from tilewise.decode.hopper_prefill_call import PrefillForward

    case = next(x for x in PREFILLS if x.name.endswith("left padding, window"))
    results = []
    for order in (0, seed + 1):
        q, cache, options = draw(case)
        call = call_of(q, cache, options)
        out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        with emulated(seed=order):
            PrefillForward(call, out, lse).run_first()
        results.append((out, lse))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("layout", ["pages", "rows", "contiguous"])
@pytest.mark.parametrize("is_fixed", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_wild_indices_stay_inside(layout: str, is_fixed: bool, seed: int) -> None:
    """Not what they should be, and nobody checked: the result may be anything."""
    from tilewise.decode.hopper_prefill_call import PrefillForward

    page = 16 if layout == "pages" else None
    case = HopperCase("", 2, (70, 3, 0, 129), (99, 64, 5, 130), page, G=1, D=64)
    q, cache, options = draw(case)
    if layout == "rows":
        cache = tw.KVCache(cache.k, cache.v, cache.lengths, batch_index=torch.zeros(4).int())
    terms = {"alibi_slopes": torch.rand(4, 2), "batch_invariant": is_fixed}
    call = call_of(q, cache, {**options, **terms})
    generator = torch.Generator().manual_seed(seed)

    def fill(x: torch.Tensor | None) -> None:
        if x is not None:
            high = (1 << 31) - 1 if seed % 2 else 400
            x.copy_(torch.randint(-high, high, x.shape, generator=generator))

    for x in (cache.lengths, cache.block_table, cache.batch_index, call.cu_seqlens_q):
        fill(x)
    lse = torch.empty(2, q.shape[0])
    # A pointer that leaves its tensor is an error there.
    with emulated(seed=seed, skip=(SPLIT, COMBINE)):
        PrefillForward(call, torch.empty_like(q), lse).run_first()


# ---------------------------------------------------------------- which kernel, and its launches

BF16 = torch.bfloat16


def call_over(
    M: int = 512, *, H: int = 32, D: int = 128, page: int | None = 16, packed: bool = False,
    dtype: torch.dtype = BF16, **options: Any,
) -> Any:  # fmt: skip
    cache = tw.KVCache.allocate(1, 600, 8, D, page_size=page, dtype=dtype)
    q = torch.zeros(*((M,) if packed else (1, M)), H, D, dtype=BF16)
    given = {"mask": tw.causal(), "scale": None, **options}
    if packed:
        given["cu_seqlens_q"] = torch.tensor([0, M], dtype=torch.int32)
    return call_of(q, cache, given)


def test_auto_takes_prefills_where_it_may() -> None:
    for call, expected in (
        (call_over(), True),
        (call_over(packed=True), True),
        (call_over(page=8), True),
        (call_over(D=256), True),
        # What others do better: contiguous keys dense attention's kernels, in the order of q.
        (call_over(63), False),
        (call_over(H=8), False),
        (call_over(num_splits=2), False),
        (call_over(batch_invariant=True), False),
        # And what it does not do.
        (call_over(page=12), False),
        (call_over(64, mask=tw.tree(torch.ones(64, dtype=torch.int64))), False),
        (call_over(dtype=torch.float8_e4m3fn), False),
    ):
        found = choice.is_faster_on_hopper(call) and not choice.why_not_hopper(call)
        assert found == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page": 12}, "pages of multiples of 8"),
        ({"dtype": torch.float8_e4m3fn}, "float16 and bfloat16"),
        ({"D": 264}, "head dims up to 256"),
        ({"D": 100, "page": 8}, "multiples of 16 bytes"),
        ({"mask": tw.tree(torch.ones(64, dtype=torch.int64))}, "windows and key ranges"),
    ],
)
def test_what_the_named_backend_does_not_take(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NotImplementedError, match=message):
        choice.choose("test", "hopper", call_over(**options))


def flat(x: Any, given: set[int]) -> list[Any]:
    """A launch's arguments as the launcher takes them: addresses in place of tensors, and nothing
    in place of what is described and was not given."""
    if isinstance(x, tuple):
        return [y for item in x for y in flat(item, given)]
    if hasattr(x, "base"):
        address = x.base.data_ptr()
        of = address if address in given else None
        return [of, tuple(x.shape), tuple(x.strides), tuple(x.block_shape)]
    return [x.data_ptr() if isinstance(x, torch.Tensor) else x]


@pytest.mark.parametrize("layout", ["pages", "contiguous", "packed", "rows", "D 40", "fp32"])
def test_a_warm_prefill_launches_what_a_cold_one_does(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilewise.decode import hopper_prefill_call, triton_call
    from tilewise.dense import hopper_call
    from tilewise.kernels import launch

    launches: list[tuple[Any, list[Any]]] = []
    counter = torch.zeros(4, dtype=torch.int32)
    kept: list[torch.Tensor] = []
    given: set[int] = set()
    empty = torch.empty

    def run(kernel: Any, grid: Any, config: Any, arguments: Any) -> Any:
        launches.append((kernel, [*grid, *flat(tuple(arguments), given)]))
        return kernel

    def again(kernel: Any, grid: Any, arguments: Any, device: Any) -> None:
        run(kernel, grid, None, arguments)

    def same_memory(*sizes: Any, **options: Any) -> torch.Tensor:
        # What calls make for themselves lies where it lay.
        kept.append(empty(*sizes, **options))
        wanted = kept[-1].shape, kept[-1].dtype
        return next(x for x in kept if (x.shape, x.dtype) == wanted)

    monkeypatch.setattr(launch, "_run", run)
    for module in (hopper_prefill_call, triton_call):
        monkeypatch.setattr(module, "relaunch", again)
    monkeypatch.setattr(hopper_call, "_counter", lambda device: counter)
    D = 40 if layout == "D 40" else 128
    packed = layout == "packed"
    page = None if layout in ("contiguous", "rows") else 16
    terms = {"sinks": torch.zeros(4), "alibi_slopes": torch.zeros(2, 4)}
    calls = []
    for seed in range(2):
        case = HopperCase("", 4, (70, 3) if packed else 70, (99, 64), page, G=2, D=D)
        q, cache, options = draw(case, seed)
        if layout == "rows":
            cache = tw.KVCache(cache.k, cache.v, cache.lengths, batch_index=torch.tensor([1, 0]))
        mine = {name: x.clone() for name, x in terms.items()}
        out = torch.zeros_like(q, dtype=torch.float32 if layout == "fp32" else None)
        calls.append((call_of(q, cache, {**options, **mine}), out, mine))
    lse = torch.zeros(4, 75) if packed else torch.zeros(2, 4, 70)
    monkeypatch.setattr(torch, "empty", same_memory)
    forward = hopper_prefill_call.PrefillForward(calls[0][0], calls[0][1], lse)
    assert forward.run_first()
    call, out, mine = calls[1]
    given |= {x.data_ptr() for x in (call.q, call.cache.k, call.cache.v, out)}
    launches.clear()
    forward.run(
        call.q, call.cache, call.cu_seqlens_q, mine["alibi_slopes"], mine["sinks"], out, lse
    )
    warm_launches = list(launches)
    launches.clear()
    hopper_prefill_call.PrefillForward(call, out, lse).run_first()
    assert warm_launches == launches and len(launches) == (4 if packed else 2)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"mask": tw.window(40, 0)}])
def test_many_queries_over_contiguous_keys_leave_a_warm_call(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense attention's kernel runs them, whichever backend of kernels was named."""
    from tilewise.decode.ops import run_kernels
    from tilewise.kernels import launch

    names: list[str] = []

    def run(kernel: Any, grid: Any, config: Any, arguments: Any) -> Any:
        names.append(kernel.__name__)
        return kernel

    monkeypatch.setattr(launch, "_run", run)
    call = call_over(page=None, **options)
    assert choice.choose("test", "auto", call_over(page=None)) == "tiled"
    for backend in ("triton", "hopper"):
        names.clear()
        forward = run_kernels(backend, call, torch.empty_like(call.q), torch.empty(0))
        assert names == ["place_prefill", DENSE] and forward is not None


def test_what_only_dense_kernels_take_is_a_cold_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.decode import dense_call
    from tilewise.kernels import launch

    monkeypatch.setattr(launch, "_run", lambda kernel, *rest: kernel)
    call = call_over(page=None, mask=tw.documents(torch.tensor([0, 300, 600])))
    assert dense_call.takes(call)
    assert dense_call.dense_forward(call, torch.empty_like(call.q), torch.empty(0)) is None
