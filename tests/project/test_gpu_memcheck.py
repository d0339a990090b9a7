"""`make gpu-memcheck` says what memcheck said, and takes no silence for an answer."""

import json
import os
import sys
from pathlib import Path

import pytest

from tilewise.catalog import OPS
from tools import gpu_memcheck
from tools.gpu_memcheck import SWEEP, Check, main, read

ONE = Check("attention", "triton", "1/8")
VERDICT = "All 26 outputs and gradients of 6 calls are within budget. (cuda, 64 s)\n"
CLEAN = f"{VERDICT}========= ERROR SUMMARY: 0 errors\n"


@pytest.mark.parametrize(
    ("code", "text", "said"),
    [
        (0, CLEAN, "clean: All 26 outputs"),
        (0, f"{VERDICT}========= ERROR SUMMARY: 1 error\n", "errors found: 1: All 26"),
        (1, "FAILED attention\n========= ERROR SUMMARY: 0 errors\n", "verify failed: exit code 1"),
        (1, "========= ERROR SUMMARY: 7 errors\n", "errors found: 7"),
        (0, f"{CLEAN}========= ERROR SUMMARY: 5 errors\n", "errors found: 5"),
        (139, CLEAN, "verify failed: exit code 139"),
        (0, CLEAN.replace("26", "0").replace("6", "0"), "verify failed: exit code 0"),
        (139, "verify attention", "not finished: exit code 139"),
        (0, VERDICT, "not finished: exit code 0"),
        (None, CLEAN, "not finished: its time was up"),
    ],
)
def test_only_what_ran_to_its_end_is_clean(code: int | None, text: str, said: str) -> None:
    found = read(ONE, code, text)
    assert said in found.describe()
    assert found.is_clean == (said.startswith("clean"))


def test_the_sweep_is_of_the_catalog_and_of_every_op_with_kernels() -> None:
    backends = {op.name: op.backends for op in OPS}
    assert all(check.backend in backends[check.op] for check in SWEEP)
    asked = [(check.op, check.backend) for check in SWEEP]
    wanted = {(op, name) for op, some in backends.items() for name in some}
    assert sorted(asked) == sorted(x for x in wanted if x[1] in ("triton", "hopper"))


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script")
def test_each_check_is_a_process_with_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        "assert os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] == '1'\n"
        "if 'linear.kda' in sys.argv: time.sleep(60)\n"
        f"print({CLEAN!r} if 'bfloat16' in sys.argv else '')\n"
    )
    tool.chmod(0o755)
    checks = [ONE, Check("linear.kda", "triton", "1/9")]
    monkeypatch.setattr(gpu_memcheck, "sweep_here", lambda: checks)
    output = tmp_path / "found.json"
    arguments = ["--logs", str(tmp_path / "logs"), "--output", str(output), "--seconds", "3"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(arguments) == 1
    printed = capsys.readouterr().out
    assert "1 of 2 clean" in printed and "its time was up" in printed
    stored = json.loads(output.read_text())
    assert [(x["check"]["op"], x["errors"]) for x in stored] == [
        ("attention", 0),
        ("linear.kda", None),
    ]
    checks.pop()
    assert main(arguments) == 0
    assert main([*arguments, "--dtype", "float16"]) == 1

    monkeypatch.setenv("PATH", str(tmp_path / "logs"))
    assert main([]) == 2
    assert "is not on the PATH" in capsys.readouterr().err
