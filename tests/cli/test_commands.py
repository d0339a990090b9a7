"""The commands at work: exit codes, JSON alone on stdout, what a broken backend leads to."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.bench.gpu.fakes import Meter
from tilewise.bench.cases import Case
from tilewise.catalog import OPS
from tilewise.cli import bench as cli_bench
from tilewise.cli import console, main
from tilewise.dense import api

ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


def refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def read_json(capsys: Capture) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out, parse_constant=refuse_constant)
    return document


def slightly_wrong(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: attention(*args, **kwargs) * 0.99


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled backend off by a percent; the oracle right."""
    right = api.attention_varlen

    def attention_varlen(*args: Any, backend: str = "auto", **kwargs: Any) -> Tensor:
        out = right(*args, backend=backend, **kwargs)
        return out if backend == "reference" else out * 0.99

    monkeypatch.setattr(api, "attention_varlen", attention_varlen)
    monkeypatch.setattr("tilewise.bench.peers.attention", slightly_wrong(api.attention))


def test_verify_as_a_table(capsys: Capture) -> None:
    assert main(["verify", "merge", "--dtype", "float32"]) == 0
    found = capsys.readouterr()
    rows = [line for line in found.out.splitlines() if "merge" in line]
    # out, lse, dout and dlse.
    assert len(rows) == 4
    assert "outputs and gradients of 4 calls are within budget. (cpu" in found.out
    assert "verify merge float32 (4 steps)" in found.err


def test_verify_as_json(capsys: Capture) -> None:
    assert main(["verify", "attention_varlen", "--dtype", "bfloat16", "--json"]) == 0
    found = read_json(capsys)
    assert found["command"] == "verify"
    assert found["rows"] == found["within_budget"] == sum(g["cases"] for g in found["groups"])
    assert found["failures"] == []
    assert {g["tensor"] for g in found["groups"]} >= {"out", "dq", "dk", "dv", "dsinks", "dbias"}
    assert {(g["op"], g["dtype_name"], g["backend"]) for g in found["groups"]} == {
        ("attention_varlen", "bfloat16", "tiled")
    }


@pytest.mark.usefixtures("broken")
def test_verify_finds_a_broken_backend(capsys: Capture) -> None:
    assert main(["verify", "attention_varlen", "--dtype", "float32", "--json"]) == 1
    found = read_json(capsys)
    assert found["within_budget"] < found["rows"]
    assert len(found["failures"]) == found["rows"] - found["within_budget"]
    assert {"op", "case", "dtype", "tensor", "problem"} <= set(found["failures"][0])


@pytest.mark.usefixtures("broken")
def test_failures_are_listed_in_full(capsys: Capture) -> None:
    assert main(["verify", "attention_varlen", "--dtype", "float32"]) == 1
    said = capsys.readouterr().out
    assert "FAILED attention_varlen [full] tiled float32 out: max error" in said
    assert "are within budget," in said


def test_a_backend_that_raises_is_a_failure_and_not_the_end(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(partials: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("tilewise.dense.merge_budget.merge", fail)
    assert main(["verify", "merge", "--dtype", "float32", "--json"]) == 1
    found = read_json(capsys)
    assert [failure["problem"] for failure in found["failures"]] == [
        "raised RuntimeError: no such kernel"
    ] * 4


CPU_BENCH = ["bench", "--device", "cpu", "--quick", "--grid", "window", "--lengths", "64"]
CPU_BENCH += ["--dtype", "float32"]


def test_bench_as_a_table(capsys: Capture) -> None:
    assert main(CPU_BENCH) == 0
    said = capsys.readouterr().out
    for words in ("Tilewise: tiled", "SDPA, bool mask", "eager", "x SDPA", "min..max", "extra MB"):
        assert words in said
    assert "Not in the table: FlexAttention:" in said


def test_bench_stores_what_it_prints(capsys: Capture, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    assert main([*CPU_BENCH, "--threads", "1", "--json", "--output", str(file)]) == 0
    printed = read_json(capsys)
    assert json.loads(file.read_text()) == printed
    assert printed["header"]["threads"] == 1
    assert [row["length"] for row in printed["rows"]] == [64, 64, 64]


@pytest.mark.usefixtures("broken")
def test_bench_refuses_a_wrong_backend(capsys: Capture) -> None:
    assert main([*CPU_BENCH, "--json"]) == 1
    rows = {row["contestant"]: row for row in read_json(capsys)["rows"]}
    assert rows["Tilewise"]["status"] == "refused"
    assert "out: max error" in rows["Tilewise"]["note"]
    assert rows["Tilewise"]["time_ms"] is None
    assert rows["SDPA, bool mask"]["status"] == "timed"
    assert main(CPU_BENCH) == 1
    assert "REFUSED Tilewise on causal window 512 64 float32" in capsys.readouterr().out


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on a GPU, with a meter in its place, a small anchor and given ceilings."""
    anchor = Case("causal", 16, H=1, D=8)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    ceilings = {"matrix_product_tflops": 800.0, "copy_gbps": 4000.0}
    monkeypatch.setattr(cli_bench, "_run_on_cpu", cli_bench._run_on_gpu)
    monkeypatch.setattr("tilewise.bench.gpu.meter.CudaMeter", lambda device: Meter())
    monkeypatch.setattr("tilewise.bench.gpu.run.anchor", lambda: anchor)
    monkeypatch.setattr("tilewise.bench.gpu.run.measure_ceilings", lambda *_: ceilings)


GPU_BENCH = ["bench", "--device", "cpu", "--quick", "--grid", "host", "--lengths", "16"]


@pytest.mark.usefixtures("gpu_bench")
def test_gpu_bench_as_a_table(capsys: Capture) -> None:
    assert main(GPU_BENCH) == 0
    said = capsys.readouterr().out
    for words in ("Tilewise: tiled", "host with grad", "SDPA us", "ceiling 800 TFLOP/s"):
        assert words in said
    assert "Not in the tables: FA3: package fa3-fwd is not installed" in said


@pytest.mark.usefixtures("gpu_bench")
def test_gpu_bench_stores_what_it_prints(capsys: Capture, tmp_path: Path) -> None:
    assert main([*GPU_BENCH, "--backend", "tiled", "--json", "--output", str(tmp_path)]) == 0
    printed = read_json(capsys)
    # In a folder the file is named after the device and the day.
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(r"cpu-\d{4}-\d\d-\d\d\.json", file.name)
    assert json.loads(file.read_text()) == printed
    assert printed["finished"] is True
    assert [row["grid"] for row in printed["rows"]] == [
        "anchor, start",
        *["host"] * 6,
        "anchor, end",
    ]
    names = {own["name"] for row in printed["rows"] for own in row["ours"]}
    assert names == {"Tilewise, tiled", "Tilewise, tiled, packed"}


@pytest.mark.usefixtures("gpu_bench", "broken")
def test_gpu_bench_refuses_a_wrong_backend(capsys: Capture) -> None:
    # In bfloat16 a percent is within the budget.
    assert main([*GPU_BENCH, "--dtype", "float32", "--json"]) == 1
    for row in read_json(capsys)["rows"]:
        # The packed call is another function, and right.
        first, *packed = row["ours"]
        assert (first["status"], first["time_ms"]) == ("refused", None)
        assert [own["status"] for own in packed] == ["timed"] * ("documents" in row["mask"])
        assert row["ratio_best_peer"] is None


@pytest.mark.usefixtures("gpu_bench")
def test_gpu_bench_without_some_peers(capsys: Capture) -> None:
    assert main([*GPU_BENCH, "--without", "flex,fa4", "--json"]) == 0
    found = read_json(capsys)
    assert found["missing_peers"]["FlexAttention"] == found["missing_peers"]["FA4"]
    assert all(peer["name"] != "FlexAttention" for row in found["rows"] for peer in row["peers"])
    assert main([*GPU_BENCH, "--without", "fa5"]) == 2
    assert "without must be some of fa2, cudnn" in capsys.readouterr().err


@pytest.mark.usefixtures("gpu_bench")
def test_gpu_bench_within_its_minutes(capsys: Capture, tmp_path: Path) -> None:
    path = str(tmp_path / "run.json")
    assert main([*GPU_BENCH, "--minutes", "1e-9", "--output", path]) == 0
    assert "Left out, since the time was up: host: D 64 full 16" in capsys.readouterr().out
    # And what was left out, by another process.
    assert main([*GPU_BENCH, "--resume", path, "--json"]) == 0
    printed = read_json(capsys)
    assert printed == json.loads(Path(path).read_text()) and printed["finished"] is True
    anchors = ["anchor, start", "anchor, end"]
    assert [row["grid"] for row in printed["rows"]] == [
        *anchors, anchors[0], *["host"] * 6, anchors[1]
    ]  # fmt: skip
    assert main([*GPU_BENCH, "--resume", path, "--output", path]) == 2
    assert "--resume stores where it reads" in capsys.readouterr().err
    assert main([*GPU_BENCH, "--resume", "README.md"]) == 2
    assert "resume must name a stored run" in capsys.readouterr().err


def test_doctor(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for words in ("torch", "reference", "tiled", "works", "hopper"):
        assert words in said


def test_doctor_says_what_is_not_installed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["doctor", "--json"]) == 0
    found = read_json(capsys)
    assert found["extras"]["bench"] == {"matplotlib": False, "jinja2": True}
    assert main(["doctor"]) == 0
    assert "pip install 'tilewise[bench,hf]'" in capsys.readouterr().out


def test_doctor_finds_a_broken_backend(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    right = api.attention

    def attention(*args: Any, backend: str = "auto", **kwargs: Any) -> Tensor:
        if backend == "tiled":
            raise RuntimeError("the library is damaged")
        return right(*args, backend=backend, **kwargs)

    monkeypatch.setattr(api, "attention", attention)
    assert main(["doctor", "--json"]) == 1
    status = {
        entry["name"]: (entry["status"], entry["why"]) for entry in read_json(capsys)["backends"]
    }
    assert status["tiled"] == ("broken", "RuntimeError: the library is damaged")
    assert status["reference"][0] == "works"


def test_module_loads_only_what_a_command_needs() -> None:
    code = (
        "import sys; from tilewise.cli import main; code = main(['doctor', '--json']);"
        "heavy = {'transformers', 'matplotlib', 'jinja2'} & set(sys.modules);"
        "sys.exit(f'loaded {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["command"] == "doctor"


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from tilewise import cli; cli._build_parser();"
        "sys.exit('loaded torch' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_json_has_no_number_for_is_null(capsys: Capture) -> None:
    console.print_json({"a": [float("inf"), float("nan"), 1.0], "b": ({"c": -float("inf")},)})
    assert read_json(capsys) == {"a": [None, None, 1.0], "b": [{"c": None}]}


def test_tables_show_brackets_as_they_are(capsys: Capture) -> None:
    console.print_table("title [x]", ["case"], [["bias [b, 1]"], ["[red]"]])
    said = capsys.readouterr().out
    assert "bias [b, 1]" in said
    assert "[red]" in said
    assert "title [x]" in said


def test_progress_in_lines_says_where_it_is(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Lines()
    lines.stage("verify", 3)
    lines.step("a")
    now[0] = 12.0
    lines.step("b")
    lines.step("c")
    assert capsys.readouterr().err.splitlines() == [
        "[   0.0 s] verify (3 steps)",
        "[  12.0 s] verify: 2 of 3, b",
    ]


def test_progress_on_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with console.open_progress() as progress:
        progress.stage("verify", 1)
        progress.step("[a]")
        progress.stage("bench", 2)
        progress.step("b")
    found = capsys.readouterr()
    assert found.out == ""
    assert "verify" in found.err
    assert "bench" in found.err


def test_every_op_of_the_catalog_can_be_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def verify(targets: Any, *_: object, part: tuple[int, int]) -> list[object]:
        assert part == (1, 1)
        asked.extend(target.op.name for target in targets)
        return []

    monkeypatch.setattr("tilewise.report.budget.verify", verify)
    names = [op.name for op in OPS]
    assert main(["verify", *names, "--dtype", "float64"]) == 0
    assert list(dict.fromkeys(asked)) == names
    asked.clear()
    assert main(["verify", "--all"]) == 0
    assert list(dict.fromkeys(asked)) == names
    assert all(asked.count(name) % 4 == 0 for name in names)
