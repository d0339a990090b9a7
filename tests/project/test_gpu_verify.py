"""The kernels here are those that passed on a GPU, or a page says which are not and why."""

import json
from pathlib import Path

import pytest

from tools import gpu_test

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "tilewise/kernels/masks.py": "mask = 1\n",
    "tilewise/dense/triton_forward.py": "forward = 1\n",
    "tilewise/dense/hopper_forward.py": "forward = 2\n",
    "tilewise/dense/config.py": "tiles = {}\n",
    "tilewise/dense/tiled.py": "no kernel\n",
}
KERNELS = [
    "tilewise/dense/config.py",
    "tilewise/dense/hopper_forward.py",
    "tilewise/dense/triton_forward.py",
    "tilewise/kernels/masks.py",
]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Kernels, and the record of a run on just these."""
    for name, text in FILES.items():
        write(tmp_path, name, text)
    write(tmp_path, gpu_test.RECORD, json.dumps({"sources": gpu_test.hash_sources(tmp_path)}))
    return tmp_path


def test_kernels_are_as_they_were_verified() -> None:
    problem = gpu_test.describe_problem(ROOT)
    assert not problem, problem


def test_every_kernel_source_counts_and_nothing_else(checkout: Path) -> None:
    hashes = gpu_test.hash_sources(checkout)
    assert list(hashes) == [*KERNELS, "all"]
    assert gpu_test.describe_problem(checkout) == ""
    write(checkout, "tilewise/dense/tiled.py", "changed")
    assert gpu_test.hash_sources(checkout) == hashes


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
    for name in KERNELS[2:]:
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
<testcase classname="tests.gpu.test_x" name="test_two"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def test_report_of_the_tests_is_read(tmp_path: Path) -> None:
    write(tmp_path, "tests.xml", REPORT)
    found = gpu_test.read_tests(tmp_path / "tests.xml")
    assert found.cases == ["C078", "C237", "C239"]
    assert (len(found.passed), len(found.failed)) == (3, 2)
    assert found.skipped == {"one GPU": 1}


def test_a_report_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    assert gpu_test.read_tests(tmp_path / "tests.xml") == gpu_test.Tests()
