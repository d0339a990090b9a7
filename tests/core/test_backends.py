"""Which backend runs, and the reasons that are given for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tilewise.core import backends
from tilewise.core.backends import (
    BackendChoice,
    check_backend_name,
    describe_device,
    hopper_problem,
    triton_problem,
)
from tilewise.core.positions import Positions
from tilewise.dense import choice
from tilewise.dense.piece import Piece, Terms

from .brute import assert_one_sentence

QKV = (torch.zeros(1, 3, 2, 4), torch.zeros(1, 5, 1, 4), torch.zeros(1, 5, 1, 4))


def test_choice_prints_every_reason() -> None:
    made = BackendChoice("tiled", "it is here", {"fast": "no GPU", "exact": "too slow"})
    assert str(made).splitlines() == [
        "tiled: it is here",
        "not fast: no GPU",
        "not exact: too slow",
    ]
    assert str(BackendChoice("tiled", "it is here")) == "tiled: it is here"


def test_backend_names() -> None:
    check_backend_name("op", "auto", ("one",))
    check_backend_name("op", "two", ("one", "two"))
    for name in ("three", "", "Auto"):
        with pytest.raises(ValueError) as caught:
            check_backend_name("op", name, ("one", "two"))
        assert_one_sentence(caught, "op: backend must be one of auto, one, two")
        assert repr(name) in str(caught.value)


def test_device_in_words() -> None:
    assert describe_device(torch.device("cpu")) == "cpu"
    assert describe_device(torch.device("meta")) == "meta"


@pytest.mark.gpu
def test_gpu_in_words() -> None:
    assert torch.cuda.get_device_name(0) in describe_device(torch.device("cuda", 0))


# ---------------------------------------------------------------- where Triton runs

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Triton is there, and kernels are compiled."""
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends._gpu_problem.cache_clear()
    return monkeypatch


def test_without_triton_it_says_how_to_install_it(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(backends, "find_spec", lambda name: None)
    for interpret in ("0", "1"):
        installed.setenv("TRITON_INTERPRET", interpret)
        assert "pip install 'tilewise[gpu]'" in triton_problem(GPU)
        # Without a GPU, Triton alone would help nobody.
        expected = "pip install 'tilewise[gpu]'" if interpret == "1" else "needs a GPU"
        assert expected in triton_problem(CPU)


def test_the_interpreter_is_for_the_cpu_and_for_nothing_else(
    installed: pytest.MonkeyPatch,
) -> None:
    assert "TRITON_INTERPRET=1" in triton_problem(CPU)
    # As Triton itself reads it.
    for yes in ("1", "true", "on"):
        installed.setenv("TRITON_INTERPRET", yes)
        assert triton_problem(CPU) == ""
        assert "on the CPU only" in triton_problem(GPU)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (SimpleNamespace(__version__="3.2.0"), "needs Triton 3.6 or newer, and this is 3.2.0"),
        (ImportError("no libcuda"), "does not import: no libcuda"),
    ],
)
def test_a_triton_that_does_not_serve_is_refused(
    module: Any, words: str, installed: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> Any:
        if isinstance(module, Exception):
            raise module
        return module

    backends._triton_fault.cache_clear()
    installed.setattr(backends, "import_module", load)
    assert words in triton_problem(GPU)
    installed.setenv("TRITON_INTERPRET", "1")
    assert words in triton_problem(CPU)
    backends._triton_fault.cache_clear()


def test_a_device_that_no_kernel_is_made_for(installed: pytest.MonkeyPatch) -> None:
    assert triton_problem(torch.device("xpu", 0)).endswith("the device xpu")


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [((9, 0), None, True), ((8, 0), None, True), ((7, 5), None, False), ((0, 0), "7.0", True)],
)
def test_a_gpu_of_ampere_or_later_or_of_amd(
    capability: tuple[int, int], hip: str | None, runs: bool, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    installed.setattr(torch.version, "hip", hip)
    problem = triton_problem(GPU)
    backends._gpu_problem.cache_clear()
    if runs:
        assert problem == ""
    else:
        assert "sm_80" in problem and "sm_75" in problem


@pytest.mark.parametrize(
    ("capability", "hip", "problem"),
    [
        ((9, 0), None, ""),
        ((8, 0), None, "this one is sm_80"),
        ((10, 0), None, "this one is sm_100"),
        ((9, 0), "7.0", "this one is AMD's"),
        ((7, 5), None, "needs sm_80"),
    ],
)
def test_hopper_is_one_generation(
    capability: tuple[int, int], hip: str | None, problem: str, installed: pytest.MonkeyPatch
) -> None:
    installed.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    installed.setattr(torch.version, "hip", hip)
    backends._not_hopper.cache_clear()
    found = hopper_problem(GPU)
    backends._not_hopper.cache_clear()
    backends._gpu_problem.cache_clear()
    assert problem in found if problem else found == ""
    assert "this device is cpu" in hopper_problem(CPU)


# ---------------------------------------------------------------- what is chosen


# More keys than Hopper's kernels are too slow for.
LONG = 1 + choice.SHORT_KEYS


def call(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, M: int = 3, D: int = 64, E: int = 64,
    mask: tw.Mask | None = None, packed: bool = False, B: int = 1, **terms: Any,
) -> Piece:  # fmt: skip
    """What a choice looks at, with tensors that need not be there."""
    shapes = ((B, M, 2, D), (B, M, 1, D), (B, M, 1, E))
    q, k, v = (
        SimpleNamespace(device=device, dtype=dtype, shape=torch.Size(s[packed:])) for s in shapes
    )
    cu_seqlens = torch.tensor([0, M]) if packed else None
    positions = Positions(
        B=B, H=2, M=M, N=M, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens
    )  # fmt: skip
    fakes: Any = (q, k, v)
    return Piece(
        *fakes, tw.full() if mask is None else mask, positions, Terms(**{"scale": 0.125, **terms})
    )


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a GPU, in the CPU's case with the interpreter on."""
    monkeypatch.setattr(choice, "triton_problem", lambda device: "")
    monkeypatch.setattr(choice, "hopper_problem", lambda device: "needs a Hopper GPU")
    monkeypatch.setattr(choice, "describe_device", str)


@pytest.fixture
def on_hopper(kernels_run: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on an H100."""
    monkeypatch.setattr(
        choice, "hopper_problem", lambda device: "" if device.type == "cuda" else "needs a GPU"
    )


@pytest.mark.usefixtures("kernels_run")
def test_auto_takes_triton_on_a_gpu_and_tiled_on_the_cpu() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert choice.choose("attention", "auto", call(GPU, dtype)) == "triton"
        assert choice.choose("attention", "auto", call(CPU, dtype)) == "tiled"
    explained = choice.explain("attention", "auto", call(GPU))
    assert explained.name == "triton" and "cuda:0" in explained.reason
    assert set(explained.rejected) == {"reference", "tiled", "hopper"}
    assert explained.rejected["hopper"] == "needs a Hopper GPU"
    assert "interprets" in choice.explain("attention", "auto", call(CPU)).rejected["triton"]


NO_KERNEL: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float64}, "not float64"),
    ({"D": 257}, "up to 256, got 257 and 64"),
    ({"E": 300}, "up to 256, got 64 and 300"),
    ({"M": 1 << 28}, "counts rows up to 268435456"),
]


@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize(("changes", "message"), NO_KERNEL, ids=[m for _, m in NO_KERNEL])
def test_what_the_kernels_cannot_do_auto_gives_to_tiled(
    changes: dict[str, Any], message: str
) -> None:
    piece = call(GPU, **changes)
    assert choice.choose("attention", "auto", piece) == "tiled"
    explained = choice.explain("attention", "auto", piece)
    assert explained.name == "tiled" and message in explained.rejected["triton"]
    with pytest.raises(NotImplementedError) as caught:
        choice.choose("attention", "triton", piece)
    assert_one_sentence(caught, "attention: backend 'triton' ")
    assert message in str(caught.value) and "backend='tiled'" in str(caught.value)


@pytest.mark.usefixtures("kernels_run")
def test_the_largest_that_the_kernels_take() -> None:
    piece = call(GPU, M=(1 << 28) - 1, D=256, E=256)
    assert choice.choose("attention", "triton", piece) == "triton"


@pytest.mark.usefixtures("kernels_run")
def test_a_named_triton_on_a_gpu_is_the_callers() -> None:
    explained = choice.explain("attention", "triton", call(GPU))
    assert explained.name == "triton" and "named by the caller" in explained.reason


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [1, 16, 64, 80, 128, 192, 256])
def test_auto_takes_hopper_where_it_is(D: int, dtype: torch.dtype) -> None:
    masks = (tw.full(), tw.causal(), tw.window(3, 1), tw.causal(offset=-2))
    documents = tw.causal() & tw.documents([0, 1, 3])
    for mask in (*masks, documents, tw.causal() & tw.key_padding([2])):
        assert (
            choice.choose("attention", "auto", call(GPU, dtype, LONG, D=D, mask=mask)) == "hopper"
        )
    terms = {"softcap": 3.0, "alibi_slopes": torch.ones(2), "sinks": torch.ones(2), "scale": -1.0}
    for changes in ({"packed": True}, terms):
        assert (
            choice.choose("attention", "auto", call(GPU, dtype, LONG, D=D, **changes)) == "hopper"
        )
    assert choice.choose("attention", "auto", call(CPU, dtype, D=D)) == "tiled"
    explained = choice.explain("attention", "auto", call(GPU, dtype, LONG, D=D))
    assert explained.name == "hopper" and "cuda:0" in explained.reason
    assert set(explained.rejected) == {"reference", "tiled", "triton"}
    assert "named" in choice.explain("attention", "hopper", call(GPU, dtype, LONG, D=D)).reason
    assert choice.choose("attention", "triton", call(GPU, dtype, LONG, D=D)) == "triton"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("D", "E"), [(64, 64), (40, 8)])
def test_short_calls_are_for_triton_unless_hopper_is_named(D: int, E: int) -> None:
    most = choice.SHORT_KEYS
    piece = call(GPU, M=most, D=D, E=E)
    assert choice.choose("attention", "auto", piece) == "triton"
    assert choice.choose("attention", "hopper", piece) == "hopper"
    explained = choice.explain("attention", "auto", piece)
    assert explained.name == "triton" and explained.rejected["hopper"].startswith("is slower")
    elsewhere = choice.explain_elsewhere(piece, "sm_90", "an H200")
    assert elsewhere.name == "triton" and elsewhere.rejected["hopper"].startswith("is slower")
    assert choice.choose("attention", "auto", call(GPU, M=most + 1, D=D, E=E)) == "hopper"
    assert choice.choose("attention", "auto", call(GPU, D=128, E=E)) == "hopper"
    assert choice.choose("attention", "auto", call(GPU, M=most, D=D, E=E, B=40)) == "hopper"


NOT_ON_HOPPER: list[tuple[dict[str, Any], str]] = [
    ({"dtype": torch.float32}, "not float32"),
    ({"bias": torch.zeros(1)}, "adds no bias"),
    ({"dropout_p": 0.1}, "dropout_p"),
    ({"mask": ~tw.window(1, 1)}, "as a mask"),
    ({"mask": tw.from_function(lambda b, h, m, n: m != n)}, "as a mask"),
]


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("changes", "message"), NOT_ON_HOPPER, ids=[m for _, m in NOT_ON_HOPPER])
def test_what_hopper_does_not_do_auto_gives_to_triton(
    changes: dict[str, Any], message: str
) -> None:
    piece = call(GPU, **changes)
    assert choice.choose("attention", "auto", piece) == "triton"
    assert message in choice.explain("attention", "auto", piece).rejected["hopper"]
    with pytest.raises(NotImplementedError) as caught:
        choice.choose("attention", "hopper", piece)
    assert_one_sentence(caught, "attention: backend 'hopper' ")
    assert message in str(caught.value) and str(caught.value).endswith("use backend='triton'.")


@pytest.mark.usefixtures("on_hopper")
def test_pieces_that_are_not_known_yet_are_not_for_hopper() -> None:
    tensors = [getattr(call(GPU), name) for name in "qkv"]
    assert choice.choose_for_pieces("ring", "auto", *tensors) == "triton"
    with pytest.raises(NotImplementedError, match=r"^ring: backend 'hopper' .*'triton'\.$"):
        choice.choose_for_pieces("ring", "hopper", *tensors)


@pytest.mark.usefixtures("on_hopper")
def test_what_neither_does_is_for_tiled() -> None:
    piece = call(GPU, torch.float64)
    assert choice.choose("attention", "auto", piece) == "tiled"
    with pytest.raises(NotImplementedError, match="not float64; use backend='tiled'"):
        choice.choose("attention", "hopper", piece)


def test_shapes_alone_need_no_device() -> None:
    """Traces go over meta tensors: a backend is named there, and not tried."""
    meta = torch.device("meta")
    assert choice.choose("attention", "triton", call(meta)) == "triton"
    assert choice.choose("attention", "auto", call(meta)) == "tiled"


# ---------------------------------------------------------------- what is explained


def test_auto_says_what_and_why_and_why_not() -> None:
    explained = tw.explain_backend(*QKV)
    assert isinstance(explained, BackendChoice)
    assert explained.name == "tiled"
    assert "cpu" in explained.reason
    assert "oracle" in explained.rejected["reference"]
    assert set(explained.rejected) == {"reference", "triton", "hopper"}
    assert explained.rejected["hopper"].endswith("this device is cpu")


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_named_backend_is_the_callers(backend: str) -> None:
    explained = tw.explain_backend(*QKV, backend=backend)
    assert explained.name == backend
    assert "named by the caller" in explained.reason


@pytest.mark.parametrize("call", [tw.attention, tw.attention_partial, tw.explain_backend])
def test_unknown_backend(call: Any) -> None:
    with pytest.raises(ValueError) as caught:
        call(*QKV, backend="fast")
    assert_one_sentence(caught, "attention")
    for known in ("auto", "reference", "tiled", "triton", "hopper", "'fast'"):
        assert known in str(caught.value)


def test_explained_options_are_those_of_a_call() -> None:
    options = {
        "mask": tw.causal(),
        "scale": 0.5,
        "softcap": 3.0,
        "alibi_slopes": torch.ones(2),
        "bias": torch.zeros(3, 5),
        "sinks": torch.zeros(2),
        "dropout_p": 0.1,
        "deterministic": True,
    }
    tw.attention(*QKV, **options)
    assert tw.explain_backend(*QKV, **options).name == "tiled"


@pytest.mark.parametrize(
    "options",
    [
        {"scale": float("nan")},
        {"softcap": -1.0},
        {"dropout_p": 1.0},
        {"sinks": torch.zeros(3)},
        {"bias": torch.zeros(4, 4)},
        {"mask": "causal"},
    ],
)
def test_what_a_call_refuses_is_refused_when_explained(options: dict[str, Any]) -> None:
    raised = []
    for call in (tw.attention, tw.explain_backend):
        with pytest.raises(ValueError) as caught:
            call(*QKV, **options)
        raised.append(str(caught.value))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("options", [{"scael": 0.5}, {"causal": True}])
def test_an_option_that_no_call_knows(options: dict[str, Any]) -> None:
    for call in (tw.attention, tw.explain_backend):
        with pytest.raises(TypeError):
            call(*QKV, **options)


def test_packed_calls_are_explained() -> None:
    q, k, v = (x[0] for x in QKV)
    lengths: dict[str, Tensor] = {
        "cu_seqlens_q": torch.tensor([0, 1, 3]),
        "cu_seqlens_k": torch.tensor([0, 5, 5]),
    }
    assert tw.explain_backend(q, k, v, **lengths).name == "tiled"
    with pytest.raises(ValueError):
        tw.explain_backend(q, k, v, **{**lengths, "cu_seqlens_k": torch.tensor([0, 5])})
