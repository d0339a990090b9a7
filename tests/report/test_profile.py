"""What is read from a profiler's trace, and a call traced on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise.cli import main
from tilewise.report import profile
from tilewise.report.explain import mask_text
from tilewise.report.explain.request import Request
from tilewise.report.profile import MASK, PRODUCT, SOFTMAX, VALUES, read_parts


def ask(**changes: Any) -> Request:
    sizes = {"B": 1, "M": 96, "N": 96, "H": 4, "G": 2, "D": 32, "E": 16, "dtype": torch.float32}
    text = "causal()"
    return Request(mask=mask_text.read(text), mask_text=text, **{**sizes, **changes})


def event(cat: str, name: str, ts: float, dur: float, correlation: int = 0) -> dict[str, Any]:
    args = {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_belong_to_the_part_that_launched_them() -> None:
    trace = {
        "traceEvents": [
            event("user_annotation", "forward", 0, 100),
            event("user_annotation", "backward", 200, 100),
            event("cuda_driver", "cuLaunchKernelEx", 10, 2, 1),
            event("cuda_runtime", "cudaLaunchKernel", 20, 2, 2),
            # Another thread launches the backward.
            event("cuda_driver", "cuLaunchKernelEx", 250, 2, 3),
            event("kernel", "_attention_fwd_kernel", 150, 40, 2),
            event("kernel", "place_sequences", 140, 5, 1),
            event("kernel", "_attention_bwd_rows_kernel", 320, 60, 3),
            event("kernel", "of nobody", 400, 7, 9),
            {"ph": "i", "name": "mark"},
        ]
    }
    forward, backward = read_parts(trace, ("forward", "backward"))
    assert [kernel.role for kernel in forward.kernels] == ["prepare", "main"]
    assert forward.device_us == 45
    assert forward.by_role() == {"prepare": 5, "main": 40}
    assert (forward.host_us, backward.device_us) == (100, 60)


def test_a_call_on_the_cpu_has_its_parts_and_no_kernels(tmp_path: Path) -> None:
    found = profile.run(ask(), torch.device("cpu"), tmp_path, "tiled")
    assert [part.title for part in found.tiled] == ["forward", "backward"]
    assert [part.title for part in found.plain] == [PRODUCT, MASK, SOFTMAX, VALUES]
    assert all(part.host_us > 0 and part.kernels == [] for part in (*found.tiled, *found.plain))
    assert found.softmax_shares is None
    assert all(path.exists() for path in found.traces)
    assert found.as_json()["softmax_share_of_time"] is None


def test_plain_steps_are_attention() -> None:
    from tests.helpers import OPS
    from tilewise.core.case import Case
    from tilewise.core.tolerance import assert_within_budget

    request = ask()
    q, k, v = (torch.randn(1, 96, heads, dim) for heads, dim in ((4, 32), (2, 32), (2, 16)))
    state: dict[str, torch.Tensor] = {}
    for step in profile.plain_steps(request, q, k, v).values():
        step(state)
    tensors = {"q": q, "k": k, "v": v}
    case = Case("attention", "plain", tensors, {"mask": request.mask})
    exact = OPS["attention"].load("exact")(case, {name: x.double() for name, x in tensors.items()})
    eager = OPS["attention"].load("eager")(case, tensors)
    assert_within_budget(state["o"].transpose(1, 2), exact["out"], eager["out"])


def test_softmax_has_a_percent_of_the_work_and_its_share_of_time() -> None:
    kernels = [profile.Kernel("k", 0.0, us) for us in (10.0, 30.0, 10.0)]
    titles = (PRODUCT, SOFTMAX, VALUES)
    plain = [
        profile.Part(title, 1.0, [kernel]) for title, kernel in zip(titles, kernels, strict=True)
    ]
    tiled = [profile.Part("forward", 1.0, [profile.Kernel("_attention_fwd_kernel", 0.0, 5.0)])]
    found = profile.Profile(ask(D=128, E=128), "triton", tiled, plain, "", [])
    assert found.softmax_shares == (0.6, 5 / (512 + 5))
    first, second = profile.sentences(found)
    assert first == "Plain attention's softmax is 1.0 % of its FLOPs and 60 % of its time."
    assert second == "Forward: plain 50 µs, tiled 5 µs on the triton backend."
    kernels_table, parts = profile.tabulate(found)
    assert len(kernels_table.rows) == len(parts.rows) == 4
    assert parts.columns[2:] == ["prepare", "main", "combine", "other", "device", "host"]
    assert parts.rows[0] == ["tiled", "forward", "0.0", "5.0", "0.0", "0.0", "5.0", "1.0"]


@pytest.mark.parametrize("argv", [["--device", "cpu"], []])
def test_without_a_gpu_it_says_what_it_needs(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    if not argv and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    assert main(["profile", *argv]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1
    assert "tilewise profile: needs a GPU that the kernels run on." in found.err
