"""What `tilewise doctor` says of GPUs: none, too old, without Triton, ROCm, and one that serves."""

import pytest
import torch

from tilewise.cli import doctor, options
from tilewise.core import backends


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with Triton and an H100, as far as torch is asked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    backends._gpu_problem.cache_clear()
    monkeypatch.setattr(doctor, "try_backend", lambda name, device: "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return monkeypatch


def triton_row() -> dict[str, str]:
    (row,) = doctor.try_triton()
    return row


def test_a_gpu_that_serves_is_tried_and_taken(gpu: pytest.MonkeyPatch) -> None:
    assert options.why_no_kernels() == ""
    assert options.default_device().type == "cuda"
    assert (triton_row()["device"], triton_row()["status"]) == ("cuda:0", "works")
    gpu.setattr(doctor, "try_backend", lambda name, device: "RuntimeError: no such kernel")
    assert triton_row()["status"] == "broken"


def test_too_old_a_gpu_is_named_with_what_runs_on_it(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 0))
    gpu.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla V100")
    assert options.default_device().type == "cpu"
    row = triton_row()
    assert row["status"] == "absent"
    assert "needs sm_80 (Ampere) or newer, and this GPU is sm_70" in row["why"]
    assert "Tesla V100" in row["why"]
    assert "tiled backend" in row["why"]


def test_without_triton_it_says_what_brings_it(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(backends, "find_spec", lambda name: None if name == "triton" else name)
    assert options.default_device().type == "cpu"
    assert "pip install 'tilewise[gpu]'" in triton_row()["why"]


@pytest.mark.parametrize(
    ("cuda", "words"), [(None, "built without CUDA; install a CUDA build"), ("13.0", "nvidia-smi")]
)
def test_no_gpu(gpu: pytest.MonkeyPatch, cuda: str | None, words: str) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    gpu.setattr(torch.version, "cuda", cuda)
    assert words in triton_row()["why"]
    assert triton_row()["status"] == "absent"


def test_rocm_is_tried_whatever_its_number_and_told_apart(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "7.0")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device=None: (0, 0))
    row = triton_row()
    assert row["status"] == "works"
    assert "on ROCm" in row["why"] and "tilewise verify --all" in row["why"]


def test_interpreter_is_tried_when_it_is_on(gpu: pytest.MonkeyPatch) -> None:
    gpu.setenv("TRITON_INTERPRET", "1")
    on_gpu, on_cpu = doctor.try_triton()
    assert (on_gpu["status"], on_cpu["status"], on_cpu["device"]) == ("absent", "works", "cpu")
    assert "TRITON_INTERPRET is set" in on_gpu["why"]
    assert options.default_device().type == "cpu"
