"""The kernels here are those that passed on a GPU, or a page says which are not and why."""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tools import gpu_test

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "tilewise/kernels/masks.py": "mask = 1\n",
    "tilewise/dense/triton_forward.py": "forward = 1\n",
    "tilewise/dense/hopper_forward.py": "forward = 2\n",
    "tilewise/dense/config.py": "tiles = {}\n",
    "tilewise/dense/warm.py": "kept = {}\n",
    "tilewise/core/band.py": "band = 1\n",
    "tilewise/decode/triton_split.py": "split = 1\n",
    "tilewise/core/mask.py": "no kernel\n",
    "tilewise/dense/tiled.py": "no kernel\n",
}
DENSE = [
    "tilewise/core/band.py",
    "tilewise/dense/config.py",
    "tilewise/dense/hopper_forward.py",
    "tilewise/dense/triton_forward.py",
    "tilewise/dense/warm.py",
    "tilewise/kernels/masks.py",
]
DECODE = ["tilewise/decode/triton_split.py", "tilewise/kernels/masks.py"]
KERNELS = sorted({*DENSE, *DECODE})


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Kernels, and the record of a run on just these."""
    for name, text in FILES.items():
        write(tmp_path, name, text)
    areas = {area: {"sources": gpu_test.hash_sources(tmp_path, area)} for area in gpu_test.AREAS}
    write(tmp_path, gpu_test.RECORD, json.dumps({"areas": areas}))
    return tmp_path


def test_kernels_are_as_they_were_verified() -> None:
    problem = gpu_test.describe_problem(ROOT)
    assert not problem, problem


def test_every_kernel_source_counts_and_nothing_else(checkout: Path) -> None:
    hashes = {area: gpu_test.hash_sources(checkout, area) for area in gpu_test.AREAS}
    # What all areas share is no area's own.
    expected = {"dense": [*DENSE, "all"], "decode": [*DECODE, "all"], "linear": []}
    assert {area: list(found) for area, found in hashes.items()} == expected
    assert gpu_test.describe_problem(checkout) == ""
    write(checkout, "tilewise/dense/tiled.py", "changed")
    assert gpu_test.hash_sources(checkout, "dense") == hashes["dense"]


@pytest.mark.parametrize(
    ("name", "area"),
    [
        ("tilewise/decode/triton_split.py", "decode"),
        ("tilewise/dense/triton_forward.py", "dense"),
        ("tests.linear.test_decode::test_steps[decode]", "linear"),
        ("tests.gpu.test_decode::test_graphs", "decode"),
        ("tests.cases.test_lse::test_c078[linear]", "dense"),
        ("tests.gpu.test_memory::test_memory_is_linear[forward]", "dense"),
        ("dense.merge_budget:run", "dense"),
        ("linear.budget:run", "linear"),
    ],
)
def test_names_tell_their_area(name: str, area: str) -> None:
    assert gpu_test.area_of(name) == area


def test_tests_are_found_by_area(tmp_path: Path) -> None:
    for name in ("tests/gpu/test_decode.py", "tests/gpu/test_sync.py", "tests/cases/test_lse.py",
                 "tests/linear/test_decode.py", "tests/gpu/common.py"):  # fmt: skip
        write(tmp_path, name, "")
    dense = ["tests/cases/test_lse.py", "tests/gpu/test_sync.py"]
    assert gpu_test.find_tests(tmp_path, ["dense"]) == dense
    found = gpu_test.find_tests(tmp_path, ["decode", "linear"])
    assert found == ["tests/gpu/test_decode.py", "tests/linear/test_decode.py"]


def test_what_is_shared_is_unverified_until_every_area_ran_again(checkout: Path) -> None:
    write(checkout, "tilewise/kernels/masks.py", "changed")
    areas = gpu_test.read_record(checkout / gpu_test.RECORD)
    areas["dense"] = {"sources": gpu_test.hash_sources(checkout, "dense")}
    write(checkout, gpu_test.RECORD, json.dumps({"areas": areas}))
    assert gpu_test.find_unverified(checkout) == ["tilewise/kernels/masks.py"]
    areas["decode"] = {"sources": gpu_test.hash_sources(checkout, "decode")}
    write(checkout, gpu_test.RECORD, json.dumps({"areas": areas}))
    assert gpu_test.find_unverified(checkout) == []


def test_line_endings_do_not_count(checkout: Path) -> None:
    for name, text in FILES.items():
        write(checkout, name, text.replace("\n", "\r\n"))
    assert gpu_test.describe_problem(checkout) == ""


@pytest.mark.parametrize("name", KERNELS)
def test_a_changed_kernel_is_named_with_what_to_do(checkout: Path, name: str) -> None:
    write(checkout, name, "changed")
    problem = gpu_test.describe_problem(checkout)
    assert problem.startswith(f"{name}: not as in ")
    assert "make gpu-test" in problem and gpu_test.EXCUSES in problem


def test_new_and_gone_and_moved_kernels_are_changes(checkout: Path) -> None:
    (checkout / KERNELS[0]).rename(checkout / "tilewise/kernels/tiles.py")
    assert gpu_test.find_unverified(checkout) == [KERNELS[0], "tilewise/kernels/tiles.py"]


def test_without_a_record_every_kernel_is_unverified(checkout: Path) -> None:
    (checkout / gpu_test.RECORD).unlink()
    assert gpu_test.find_unverified(checkout) == KERNELS


def test_a_page_excuses_what_it_names_with_a_reason(checkout: Path) -> None:
    changed = ("tilewise/dense/triton_forward.py", "tilewise/kernels/masks.py")
    for name in changed:
        write(checkout, name, "changed")
    for lines, left in (
        ("", 2),
        ("- `tilewise/kernels/masks.py`: no GPU was to be had\n", 1),
        # A reason is asked for.
        ("- `tilewise/kernels/masks.py`:\n- `tilewise/dense/triton_forward.py`: \n", 2),
        ("- `tilewise/kernels/*.py`: none\n- `tilewise/dense/triton_*.py`: none\n", 0),
        ("- `tilewise/*/config.py`: none\n", 2),
    ):
        write(checkout, gpu_test.EXCUSES, f"# Not run\n\n{lines}")
        problem = gpu_test.describe_problem(checkout)
        assert problem.partition(": not")[0].count(".py") == left, lines


REPORT = """<testsuites><testsuite>
<testcase classname="tests.cases.test_lse" name="test_c078_lse[a_c001_b]"/>
<testcase classname="tests.cases.test_lse" name="test_c077_one[triton]"/>
<testcase classname="tests.cases.test_lse" name="test_c077_one[tiled]"><failure/></testcase>
<testcase classname="tests.cases.test_lse" name="test_c172_c173_both"><error/></testcase>
<testcase classname="tests.cases.test_lse" name="test_c237_c239_vmap"/>
<testcase classname="tests.gpu.test_fuzz" name="test_random_calls[0]">
<properties><property name="calls" value="31"/><property name="other" value="x"/></properties>
</testcase>
<testcase classname="tests.gpu.test_fuzz" name="test_random_calls[1]">
<properties><property name="calls" value="20"/></properties></testcase>
<testcase classname="tests.gpu.test_x" name="test_two"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def test_report_of_the_tests_is_read(tmp_path: Path) -> None:
    write(tmp_path, "tests.xml", REPORT)
    found = gpu_test.read_tests(tmp_path / "tests.xml")
    assert found.cases == ["C078", "C237", "C239"]
    assert (len(found.passed), len(found.failed)) == (5, 2)
    assert found.skipped == {"one GPU": 1}
    assert found.calls == 51
    assert gpu_test.read_tests(tmp_path / "tests.xml", "dense") == found
    assert gpu_test.read_tests(tmp_path / "tests.xml", "decode") == gpu_test.Tests()


def test_those_that_failed_and_then_passed_count_as_passed(tmp_path: Path) -> None:
    write(tmp_path, "tests.xml", REPORT)
    first = gpu_test.read_tests(tmp_path / "tests.xml")
    again = gpu_test.Tests([first.failed[0]])
    found = first.after(again)
    assert (len(found.passed), found.failed) == (6, first.failed[1:])
    assert found.cases == ["C077", "C078", "C237", "C239"]
    # One that fails again, and one that was not there any more.
    assert first.after(gpu_test.Tests(failed=first.failed[:1])).failed == first.failed
    ids = [gpu_test.test_id(name) for name in first.failed]
    assert ids[0] == "tests/cases/test_lse.py::test_c077_one[tiled]"


def test_tests_run_again_where_no_kernel_changed(checkout: Path, tmp_path: Path) -> None:
    def describe(*areas: str) -> str:
        sources = {area: gpu_test.hash_sources(checkout, area) for area in gpu_test.AREAS}
        return gpu_test.describe_change(tmp_path, sources, areas)

    assert "holds none" in describe("dense")
    before = {area: gpu_test.hash_sources(checkout, area) for area in gpu_test.AREAS}
    gpu_test.write_run(tmp_path, before, {"dense": [ROWS]})
    assert describe("dense") == ""
    assert "was not of decode" in describe("dense", "decode")
    write(checkout, "tilewise/decode/triton_split.py", "changed")
    assert describe("dense") == ""
    write(checkout, "tilewise/dense/config.py", "changed")
    assert "tilewise/dense/config.py changed, so all of dense has to run" in describe("dense")


@pytest.mark.parametrize(("code", "is_kept"), [(0, True), (1, True), (2, False), (-9, False)])
def test_a_run_that_was_cut_short_is_none_to_go_on_with(
    code: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests that it did not reach would count as neither failed nor missing."""

    def run_all(areas: Any, *_: Any) -> Any:
        return code, {area: gpu_test.Tests(failed=["x::test"]) for area in areas}, {"dense": [ROWS]}

    monkeypatch.setattr(gpu_test, "_describe_missing", lambda: "")
    monkeypatch.setattr(gpu_test, "_run_all", run_all)
    monkeypatch.setattr(gpu_test, "describe_machine", lambda commit: {})
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    given = ["--areas", "dense", "--output", str(tmp_path / "record.json"), "--logs", str(tmp_path)]
    assert gpu_test.main(given) == 1
    assert (tmp_path / "run.json").exists() == is_kept
    assert not (tmp_path / "record.json").exists()


def test_a_report_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert gpu_test.read_tests(tmp_path / "tests.xml") == gpu_test.Tests()


def test_the_fuzz_counts_its_calls(tmp_path: Path) -> None:
    """From a test's properties, by way of pytest's report and of its workers."""
    write(
        tmp_path,
        "test_counting.py",
        "import pytest\n\n\n@pytest.mark.parametrize('worker', range(3))\n"
        "def test_calls(worker, request):\n"
        "    request.node.user_properties.append(('calls', 10 + worker))\n",
    )
    report = tmp_path / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}"]
    command += ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert gpu_test.read_tests(report).calls == 33


ROWS: dict[str, Any] = {"rows": 4, "within_budget": 4}
PASSED = gpu_test.Tests(passed=["test_one"])


@pytest.mark.parametrize(
    ("code", "tests", "verified", "said"),
    [
        (0, PASSED, [ROWS, ROWS], ""),
        (1, PASSED, [ROWS, ROWS], "Not everything passed"),
        (0, PASSED, [ROWS, None], "Not everything passed"),
        (0, gpu_test.Tests(["test_one"], ["test_two"]), [ROWS], "Not everything passed"),
        # pytest is content with a run of which every test was skipped.
        (0, gpu_test.Tests(skipped=Counter({"no GPU": 9})), [ROWS], "Nothing was tested"),
        (0, PASSED, [ROWS, {"rows": 0, "within_budget": 0}], "Nothing was tested"),
        (0, PASSED, [], "Not everything passed"),
    ],
)
def test_only_a_run_that_tested_something_is_recorded(
    code: int, tests: gpu_test.Tests, verified: list[dict[str, Any] | None], said: str
) -> None:
    assert gpu_test.describe_failure(code, tests, verified) == said


def test_what_must_be_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that docs/testing.md asks for."""
    page = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    asked = page.partition("`GPU_PYTHON` needs ")[2].partition(";")[0]
    for name in gpu_test.NEEDED:
        assert {"xdist": "pytest-xdist"}.get(name, name) in asked
        monkeypatch.setattr(gpu_test, "_is_installed", lambda module, name=name: module != name)
        assert gpu_test._describe_missing().startswith(f"gpu-test: {name} must be installed")
    assert len(gpu_test.NEEDED) + len(("torch", "triton")) == len(re.findall(r"[\w-]+", asked)) - 1


def test_every_case_of_an_op_is_verified_in_one_of_its_parts() -> None:
    from tilewise.catalog import OPS
    from tilewise.cli.options import DTYPES

    for op in OPS:
        parts = gpu_test.find_parts(op)
        assert {dtype for dtype, _ in parts} == set(DTYPES)
        for dtype in DTYPES:
            of = [part for name, part in parts if name == dtype]
            assert of == [f"{i}/{len(of)}" for i in range(1, len(of) + 1)]
            n_cases = len(list(op.load("cases")(op.name, torch.float32, torch.device("cpu"))))
            assert -(-n_cases // len(of)) <= gpu_test._CASES_OF_PART
