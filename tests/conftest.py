"""What every test stands on: sane threads, a fixed seed, no network, the device under test.

`--device cuda` makes the tensors of the tests on a GPU and runs them on the triton backend;
`--backend triton` alone, with TRITON_INTERPRET=1, runs those marked `interpreter` on the CPU.
"""

import os
import random

import hypothesis
import pytest
import torch

from tests.helpers import UNDER_TEST

# Models come with packages; a test that reaches for a hub fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")

# No deadline: a loaded machine is not a fault. In CI the same examples every time.
hypothesis.settings.register_profile("tilewise", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("tilewise")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tilewise")
    group.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors are")
    group.addoption("--backend", help="under test; triton on cuda when not given")


def pytest_configure(config: pytest.Config) -> None:
    """One thread: the shapes are small, and threads that wait for a busy core cost seconds."""
    torch.set_num_threads(1)
    marker = "interpreter: quick enough for Triton's interpreter, see --backend"
    config.addinivalue_line("markers", marker)
    device, backend = config.getoption("--device"), config.getoption("--backend")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch sees no CUDA GPU here.")
        backend = backend or "triton"
        _run_on_cuda(config)
    elif backend == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            raise pytest.UsageError("--backend triton: on the CPU it needs TRITON_INTERPRET=1.")
        # The interpreter of Triton 3.6 does so, and numpy warns of it.
        numpy_warning = "ignore:Conversion of an array with ndim > 0:DeprecationWarning"
        config.addinivalue_line("filterwarnings", numpy_warning)
    UNDER_TEST.device, UNDER_TEST.backend = device, backend


def _run_on_cuda(config: pytest.Config) -> None:
    torch.set_default_device("cuda")
    # Tests of bad lengths want them read, as on the CPU.
    os.environ["TILEWISE_CHECK"] = "1"
    # What torch's deterministic mode asks of cuBLAS; it is on where buffers are poisoned.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # That mode warns of torch's own ops that the oracles use and that have no fixed order there.
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic implementation:UserWarning")
    # Of torch itself, where the first thing that autograd's thread does is a matrix product.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")
    # Of torch.compile, where a graph of its own has nothing in it.
    config.addinivalue_line("filterwarnings", "ignore:The CUDA Graph is empty:UserWarning")
    # Advice of torch.compile's, not heeded: fp32 products here are fp32.
    config.addinivalue_line("filterwarnings", "ignore:TensorFloat32 tensor cores:UserWarning")
    # Of a model's own softmax where the compiler splits it.
    softmax = "ignore:\\s*Online softmax is disabled:UserWarning"
    config.addinivalue_line("filterwarnings", softmax)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep a failure as soon as it is known: a run that is cut short leaves what it found."""
    path = os.environ.get("TILEWISE_FAILURES")
    # Of several workers, the process that gathers their reports writes.
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-2000:]}\n\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if UNDER_TEST.device == "cpu" and UNDER_TEST.backend == "triton":
        slow = [item for item in items if not item.get_closest_marker("interpreter")]
        items[:] = [item for item in items if item.get_closest_marker("interpreter")]
        config.hook.pytest_deselected(items=slow)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same seed, alone or in any order."""
    random.seed(0)
    torch.manual_seed(0)
    return 0
