"""The hopper backend's way from a call to its launches, with the launches recorded, not made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise.dense import choice, warm

pytest.importorskip("triton")

Records = list[tuple[str, tuple[int, ...], tuple[Any, ...]]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    """As on a Hopper GPU with 132 processors: names, grids and arguments."""
    from tilewise.dense import hopper_call
    from tilewise.kernels import launch

    records: Records = []

    def record(kernel: Any, grid: tuple[int, ...], config: Any, arguments: Any) -> None:
        records.append((kernel.__name__, grid, tuple(arguments)))

    monkeypatch.setattr(launch, "_run", record)
    monkeypatch.setattr(launch, "_gpu_architecture", lambda device: "sm_90")
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    monkeypatch.setattr(choice, "hopper_problem", lambda device: "")
    monkeypatch.setattr(hopper_call, "_multiprocessors", lambda device: 132)
    warm._kept.clear()
    yield records
    warm._kept.clear()


def qkv(B: int = 2, M: int = 5, N: int = 7, D: int = 64) -> list[Tensor]:
    shapes = ((B, M, 4, D), (B, N, 2, D), (B, N, 2, D))
    return [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]


def names(records: Records) -> list[str]:
    return [name for name, _, _ in records]


FORWARD = "_attention_fwd_hopper_kernel"


def test_the_forward_is_hoppers_and_the_backward_tritons(launches: Records) -> None:
    x = qkv()
    out = tw.attention(*x, mask=tw.causal(), backend="hopper")
    assert names(launches) == [FORWARD]
    torch.autograd.grad(out, x, torch.zeros_like(out))
    assert len(launches) > 1 and all("_bwd_" in name for name in names(launches)[1:])
    assert not any("hopper" in name for name in names(launches)[1:])


_KEYS, _WIDE = "_attention_bwd_hopper_kernel", "_attention_bwd_hopper_wide_kernel"
_PREPARE, _FINISH, _QUERY = (
    f"_attention_bwd_hopper_{name}_kernel" for name in ("prepare", "finish", "query")
)


@pytest.mark.parametrize(
    ("D", "options", "expected"),
    [
        (64, {}, (_KEYS, _FINISH)),
        (128, {"softcap": 3.0}, (_KEYS, _FINISH)),
        (128, {"alibi_slopes": torch.zeros(4)}, (_KEYS, _FINISH)),
        (128, {"scale": -1.0}, (_KEYS, _FINISH)),
        (128, {"sinks": torch.zeros(4)}, (_KEYS, _FINISH)),
        (64, {"deterministic": True}, (_KEYS, _QUERY)),
        (64, {"sinks": torch.zeros(4).requires_grad_()}, (_KEYS, _QUERY)),
        (129, {}, (_WIDE, _QUERY)),
        (256, {"deterministic": True}, (_WIDE, _QUERY)),
    ],
)
def test_which_kernels_make_gradients(
    D: int, options: dict[str, Any], expected: tuple[str, str], launches: Records
) -> None:
    """dQ is added up in any order where nothing asks for more."""
    x = qkv(N=300, D=D)
    out = tw.attention(*x, backend="hopper", **options)
    torch.autograd.grad(out, x, torch.zeros_like(out))
    assert names(launches) == [FORWARD, _PREPARE, *expected]
    build = launches[2][2][-1]
    assert build.has_dq == (expected[1] == _FINISH)


@pytest.mark.parametrize("N", [128, 300])
def test_slopes_that_learn_and_few_keys_are_tritons(N: int, launches: Records) -> None:
    x, slopes = qkv(N=N), torch.zeros(4).requires_grad_(N > 128)
    out = tw.attention(*x, backend="hopper", alibi_slopes=slopes)
    torch.autograd.grad(out, x, torch.zeros_like(out))
    assert not any("bwd_hopper" in name for name in names(launches))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pieces_backward_repeats_where_it_must(deterministic: bool, launches: Records) -> None:
    q, k, v = (x.detach() for x in qkv(N=200))
    buffers = {f"d{name}": torch.zeros(x.shape) for name, x in zip("qkv", (q, k, v), strict=True)}
    rows = torch.zeros(2, 4, 5)
    tw.attention_partial_backward(
        q, q, k, v, rows, rows, **buffers, deterministic=deterministic, backend="hopper"
    )
    assert names(launches)[-1] == (_QUERY if deterministic else _FINISH)


def test_the_second_call_is_warm(launches: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    x = qkv()
    tw.attention(*x, backend="hopper")
    cold = launches[0][2]

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a warm call was checked again")

    monkeypatch.setattr("tilewise.dense.api.check_call", refuse)
    out = tw.attention(*x, backend="hopper")
    assert names(launches) == [FORWARD] * 2
    # All but the tensors is what it was.
    assert launches[1][2][-3] == cold[-3] and launches[1][2][-1] == cold[-1]
    torch.autograd.grad(out, x, torch.zeros_like(out))
    assert all("_bwd_" in name for name in names(launches)[2:])


def test_backends_are_kept_apart(launches: Records) -> None:
    x = qkv()
    for backend in ("hopper", "triton", "hopper", "triton"):
        tw.attention(*x, backend=backend)
    assert len(warm._kept) == 2
    assert [name == FORWARD for name in names(launches)] == [True, False] * 2


@pytest.mark.parametrize(("B", "M", "N"), [(0, 5, 7), (2, 0, 7), (0, 0, 0)])
def test_nothing_to_do_launches_nothing(B: int, M: int, N: int, launches: Records) -> None:
    out, lse = tw.attention_partial(*qkv(B, M, N), backend="hopper")
    assert not launches
    assert out.shape == (B, M, 4, 64) and lse.shape == (B, 4, M)


def test_no_keys_still_make_rows(launches: Records) -> None:
    tw.attention_partial(*qkv(N=0), backend="hopper")
    ((name, grid, arguments),) = launches
    assert name == FORWARD and grid == (8, 1, 1)
    # A descriptor of one row that the call does not count.
    assert arguments[1].shape == [2, 2, 1, 64]


def test_what_tma_cannot_describe_is_copied(launches: Records) -> None:
    q, k, v = (x.detach() for x in qkv(D=60))
    tw.attention(q, k[:1].expand(2, -1, -1, -1), v, backend="hopper")
    descriptors = launches[0][2][:4]
    for descriptor in descriptors:
        assert descriptor.strides[-1] == 1 and descriptor.shape[-1] == 64
        assert all(stride > 0 and stride % 8 == 0 for stride in descriptor.strides[:-1])
        assert descriptor.base.data_ptr() % 16 == 0


def test_other_dtypes_leave_without_a_descriptor(launches: Records) -> None:
    """Where something learns, out leaves as it does elsewhere, and what rounding took off it beside
    it."""
    learning = qkv()
    assert tw.attention(*learning, backend="hopper").dtype == torch.bfloat16
    arguments = launches.pop()[2]
    assert arguments[3] is not None and arguments[5].ptr.dtype == torch.bfloat16
    x = [t.detach() for t in learning]
    for dtype in (torch.bfloat16, torch.float32):
        tw.attention_partial(*x, backend="hopper", out_dtype=dtype)
    staged, direct = (arguments for _, _, arguments in launches)
    assert staged[3] is not None and direct[3] is None
    assert direct[4].ptr.dtype == torch.float32
    assert staged[5].ptr is direct[5].ptr is None


@pytest.mark.parametrize(("D", "E"), [(1, 256), (64, 64), (65, 17), (129, 128), (256, 1)])
def test_tiles_cover_head_dims(D: int, E: int, launches: Records) -> None:
    q, k, _ = qkv(D=D)
    tw.attention(q, k, torch.zeros(2, 7, 2, E, dtype=torch.bfloat16), backend="hopper")
    build = launches[0][2][-1]
    for dim, tile in ((D, build.dim), (E, build.value_dim)):
        assert dim <= tile and tile in (64, 128, 256)


def test_what_outlives_a_call_is_not_made_in_its_modes() -> None:
    """torch.compile's graphs hand out again what this thread allocates while they warm up, and
    what inference mode makes serves no training."""
    from tilewise.dense import hopper_call

    made: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.inference_mode(), Record():
        counters = hopper_call._lasting_zeros(3, torch.device("cpu"))
    assert not made and not counters.is_inference()
    assert torch.equal(counters, torch.zeros(3, 4, dtype=torch.int32))


def test_each_call_describes_its_own_tensors(launches: Records) -> None:
    first, second = qkv(), qkv()
    for x in (first, second, first):
        launches.clear()
        tw.attention(*x, mask=tw.causal(), backend="hopper")
        (_, _, arguments), *rest = launches
        assert not rest
        assert [a.base.data_ptr() for a in arguments[:3]] == [t.data_ptr() for t in x]
    wider = qkv(D=128)
    launches.clear()
    tw.attention(*wider, mask=tw.causal(), backend="hopper")
    assert launches[0][2][0].shape[-1] == 128


def test_packed_calls_write_one_table_each_way(launches: Records) -> None:
    q, k, v = (x.detach()[0].requires_grad_() for x in qkv(N=5))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    for is_warm in (False, True):
        launches.clear()
        out = tw.attention_varlen(q, k, v, cu_seqlens_q=cu, mask=tw.causal(), backend="hopper")
        # What is kept of the first call wrote one more.
        assert is_warm or names(launches) == ["place_sequences", FORWARD, "place_sequences"]
        del launches[2:]
        assert names(launches) == ["place_sequences", FORWARD]
        # Its kernel runs on the table that was written for it.
        table = launches[0][2][0]
        assert launches[1][2][7].place.table is table
        launches.clear()
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        assert names(launches).count("place_sequences") == 1 and len(launches) == 4
    assert len(warm._kept) == 1


def test_a_warm_call_copies_what_the_first_had_to(launches: Records) -> None:
    """Rows that are not aligned, keys that repeat in memory, no keys at all."""
    q, k, v = (x.detach() for x in qkv(D=40))
    wide = [x.detach() for x in qkv()]
    repeated = wide[1][:, :1].expand(-1, 7, -1, -1)
    empty = [wide[0], *(x[:, :0] for x in wide[1:])]
    for x in ([q, k, v], [wide[0], repeated, wide[2]], empty):
        given = {t.data_ptr() for t in x if t.numel()}
        seen = []
        for _ in range(3):
            launches.clear()
            tw.attention(*x, mask=tw.causal(), backend="hopper")
            (_, _, arguments) = launches[0]
            seen.append([a.base.data_ptr() in given for a in arguments[:3]])
            assert all(all(s * 2 % 16 == 0 and s for s in a.strides[:-1]) for a in arguments[:3])
        assert seen[0] == seen[1] == seen[2] and not all(seen[0])
    assert len(warm._kept) == 3


def test_a_warm_call_places_its_own_documents(
    launches: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = qkv(N=300)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a warm call was checked again")

    for turn, edges in enumerate(([0, 2, 300], [0, 299, 300], [0, 2, 300])):
        cu = torch.tensor(edges, dtype=torch.int32)
        launches.clear()
        out = tw.attention(*x, mask=tw.causal() & tw.documents(cu), backend="hopper")
        # What is kept of the first call wrote one more.
        del launches[2:]
        assert names(launches) == ["place_documents", FORWARD]
        table, given = launches[0][2][:2]
        assert torch.equal(given, cu) and launches[1][2][7].place.table is table
        launches.clear()
        torch.autograd.grad(out, x, torch.zeros_like(out))
        assert names(launches).count("place_documents") == 1 and len(launches) == 4
        assert torch.equal(launches[0][2][1], cu)
        if turn == 0:
            monkeypatch.setattr("tilewise.dense.api.check_call", refuse)
    assert len(warm._kept) == 1


@pytest.mark.parametrize(
    ("rows", "mask", "rows_of_tile"),
    [
        (384, tw.full(), 192), (512, tw.full(), 128), (1024, tw.full(), 128),
        (1280, tw.full(), 192), (384, tw.causal(), 128), (1024, tw.causal(), 128),
        (1025, tw.causal(), 192), (1000, tw.window(100, 0), 128), (16384, tw.causal(), 192),
    ],
)  # fmt: skip
def test_few_rows_have_short_tiles(
    launches: Records, rows: int, mask: tw.Mask, rows_of_tile: int
) -> None:
    q, k, v = qkv(1, rows, rows)
    with torch.no_grad():
        tw.attention(q, k, v, mask=mask, backend="hopper")
    ((_, _, arguments),) = launches
    assert arguments[-1].tile.block_m == rows_of_tile


def test_a_backward_takes_tile_after_tile(launches: Records) -> None:
    """As many programs as processors, or as tiles of keys."""
    for n_keys, n_programs in ((1000, 2 * 8 * 2), (20000, 132)):
        x = qkv(2, 300, n_keys)
        out = tw.attention(*x, backend="hopper")
        launches.clear()
        torch.autograd.grad(out, x, torch.zeros_like(out))
        grids = {name: grid for name, grid, _ in launches}
        assert grids["_attention_bwd_hopper_kernel"] == (n_programs,)
