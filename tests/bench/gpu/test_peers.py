"""Adapters: every peer gives the right result through its adapter, and absence has a reason."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from tilewise.bench import harness
from tilewise.bench.cases import BOTH, FEATURES, FORWARD, HOST_GRAD, Case
from tilewise.bench.gpu import peers
from tilewise.bench.gpu.peers import CUDNN, FA3, FA4, FLASH, FLEX, find_roster
from tilewise.bench.peers import Peer

from .fakes import CPU, flash_attn_module

FULL, CAUSAL = (Case(mask, 40, H=2, D=8, direction=BOTH) for mask in ("full", "causal"))
WINDOW = Case("window", 40, H=2, D=8, window=9)
DOCUMENTS = Case("documents", 40, H=2, D=8, documents=(20, 13, 7), direction=BOTH)


def named(name: str) -> Peer:
    return next(peer for peer in find_roster().peers if peer.name == name)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both FlashAttentions as modules: 3 returns out, 4 a tuple."""
    found = {"fa3_fwd_interface": flash_attn_module(lambda out: out)}
    found["flash_attn.cute"] = flash_attn_module(lambda out: (out, None))
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.parametrize("case", [FULL, CAUSAL, Case("causal", 40, H=4, G=2, D=8, direction=BOTH)])
def test_sdpa_held_to_flash(case: Case) -> None:
    peer = named(FLASH)
    assert peer.serves(case, CPU)
    assert harness.verify(peer, case, CPU) == ""
    assert peer.version == f"torch {torch.__version__}"


def test_a_kernel_that_is_not_here_raises_instead_of_giving_way() -> None:
    assert "raised RuntimeError" in harness.verify(named(CUDNN), CAUSAL, CPU)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_flex_compiles_once_for_both_directions(monkeypatch: pytest.MonkeyPatch, mask: str) -> None:
    compiled: list[Any] = []

    def compile_as_it_is(function: Any, **options: Any) -> Any:
        # Without "dynamic" it is FlexAttention's own call, where it was not compiled.
        if "dynamic" in options:
            assert options["dynamic"] is False
            compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile_as_it_is)
    peers._compile_flex.cache_clear()
    flex = named(FLEX)
    case = Case(mask, 1152, torch.float32, H=1, D=8)
    assert flex.serves(case, CPU) and not flex.serves(Case(mask, 1024), CPU)
    for direction in (FORWARD, "backward"):
        flex.build(Case(mask, 1152, torch.float32, direction, H=1, D=8), CPU)
    assert len(compiled) == 1
    # On a CPU it has no backward.
    assert flex.keeps_grad
    assert harness.verify(replace(flex, keeps_grad=False), case, CPU) == ""
    assert len(compiled) == 2
    peers._compile_flex.cache_clear()


def test_absent_peers_say_why() -> None:
    absent = find_roster().absent
    assert absent[FA3].startswith("package fa3-fwd is not installed")
    assert absent[FA4].startswith("package flash-attn-4 is not installed")


def test_a_broken_package_is_absent_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(peers, "import_module", refuse)
    assert "cannot be imported: OSError: libcudart" in find_roster().absent[FA3]


@pytest.mark.parametrize("case", [FULL, CAUSAL, WINDOW, DOCUMENTS])
@pytest.mark.parametrize("name", [FA3, FA4])
def test_flash_attention(flash_attn: dict[str, Any], name: str, case: Case) -> None:
    peer = named(name)
    assert harness.verify(peer, case, CPU) == ""
    module = flash_attn["fa3_fwd_interface" if name == FA3 else "flash_attn.cute"]
    assert module.calls[0]["causal"] == (case.mask != "full")
    if case is WINDOW:
        assert module.calls[0]["window_size"] == (9, 0)
    if case is DOCUMENTS:
        assert module.calls[0]["cu_seqlens_q"].tolist() == [0, 20, 33, 40]


def test_packed_documents_of_several_rows(flash_attn: dict[str, Any]) -> None:
    """Packed, rows stand one after another, each with its documents."""
    case = replace(DOCUMENTS, B=3)
    starts = [row * 40 + start for row in range(3) for start in (0, 20, 33)]
    assert case.cu_seqlens(CPU).tolist() == [*starts, 120]
    ours = [peer for peer in find_roster(("auto", "tiled")).ours if peer.serves(case, CPU)]
    for peer in (*ours, named(FA3), named(FA4)):
        assert harness.verify(peer, case, CPU) == "", peer.name


def test_what_flash_attention_is_not_asked(flash_attn: dict[str, Any]) -> None:
    third, fourth = named(FA3), named(FA4)
    wide = Case("causal", 64, D=80)
    # Forward only.
    assert not third.serves(CAUSAL, CPU) and third.serves(wide, CPU)
    assert not third.serves(Case("causal", 64, direction=HOST_GRAD), CPU)
    # It would compile for each head dim.
    assert not fourth.serves(wide, CPU) and fourth.serves(Case("causal", 64, D=128), CPU)
    for feature in FEATURES:
        asked = Case("causal", 64, D=64, feature=feature)
        assert not any(peer.serves(asked, CPU) for peer in (third, fourth, named(FLASH)))


def test_ours_by_name_and_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = peers.attention_varlen

    def listening(*tensors: Any, **options: Any) -> Any:
        asked.append(options["backend"])
        return real(*tensors, **options)

    monkeypatch.setattr(peers, "attention_varlen", listening)
    first, second, *packed = find_roster(("auto", "tiled")).ours
    assert (first.name, second.name) == ("Tilewise", "Tilewise, tiled")
    assert [peer.name for peer in packed] == ["Tilewise, packed", "Tilewise, tiled, packed"]
    assert harness.verify(second, CAUSAL, CPU) == ""
    assert [peer.backend for peer in (first, second, *packed)] == ["auto", "tiled"] * 2
    for peer in packed:
        asked.clear()
        assert not peer.serves(CAUSAL, CPU) and peer.serves(DOCUMENTS, CPU)
        assert harness.verify(peer, DOCUMENTS, CPU) == ""
        assert set(asked) == {peer.backend}


def test_only_backends_that_are_named_take_part() -> None:
    """`--backend tiled` times nothing that `auto` would take instead."""
    assert {peer.backend for peer in find_roster(("tiled",)).ours} == {"tiled"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "case",
    [DOCUMENTS, Case("bits", 40, H=2, D=8, direction=BOTH)]
    + [Case("causal", 40, H=2, D=8, direction=BOTH, feature=name) for name in FEATURES],
    ids=str,
)
def test_every_feature_is_verified(case: Case, dtype: torch.dtype) -> None:
    (ours, *_) = find_roster().ours
    assert harness.verify(ours, replace(case, dtype=dtype), CPU) == ""
