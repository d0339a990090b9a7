"""A whole bench run on tiny lengths: header, rows, words."""

import json
from pathlib import Path

import pytest
import torch

from tilewise import __version__
from tilewise.bench import environment, run
from tilewise.bench.cases import Case
from tilewise.bench.harness import NOT_RUN, REFUSED, WEIGHED, Row, Timing
from tilewise.bench.progress import Silent
from tilewise.bench.stored import write_whole

REQUEST = run.Request(
    torch.device("cpu"), ("dense", "window"), [64], [torch.float32], is_quick=True
)


@pytest.fixture(scope="module")
def result() -> run.Result:
    return run.run(REQUEST, Silent())


def test_document_is_json_with_a_header_and_every_row(result: run.Result) -> None:
    document = json.loads(json.dumps(result.as_json(), allow_nan=False))
    header = document["header"]
    assert header["tilewise"] == __version__
    assert header["threads"] == torch.get_num_threads()
    assert header["rounds"] == 3
    assert header["matrix_product_tflops"]["float32"] > 0
    assert {"date", "cpu", "cores", "torch", "commit"} <= set(header)
    # Four dense cases with four contestants, and a window with three.
    assert len(document["rows"]) == 4 * 5 + 3
    assert {row["grid"] for row in document["rows"]} == {"dense", "window"}
    for row in document["rows"]:
        times = row["time_ms"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
        assert row["tflops"] > 0
        assert row["ratio_to_sdpa"] > 0
        assert row["extra_peak_bytes"] > 0
    assert "FlexAttention" in document["missing_peers"]
    assert result.refused == []


def test_both_directions_are_charged_differently(result: run.Result) -> None:
    flops = {row.case.direction: row.case.flops() for row in result.rows["dense"]}
    assert flops["forward+backward"] == 3.5 * flops["forward"]


def test_row_in_words() -> None:
    row = Row(Case("window", 64), "Tilewise", True, "timed", "tiled", "", Timing(0.5, 0.25, 1.0))
    row.tflops, row.ratio_to_sdpa, row.extra_peak_bytes = 0.25, 1.5, 2_000_000
    words = dict(zip(run.COLUMNS, run.describe_row(row), strict=True))
    assert words["mask"] == "causal window 512"
    assert words["contestant"] == "Tilewise: tiled"
    assert words["median ms"] == "500.00"
    assert words["min..max"] == "250.00..1000.00"
    assert words["x SDPA"] == "1.50x"
    assert words["extra MB"] == "2.0"
    assert words["of matmul"] == words["resident MB"] == ""


@pytest.mark.parametrize("status", [REFUSED, NOT_RUN])
def test_row_without_figures_says_why(status: str) -> None:
    row = Row(Case("full", 64), "eager", False, status, note="out is wrong")
    words = run.describe_row(row)
    assert len(words) == len(run.COLUMNS)
    assert f"{status}: out is wrong" in words
    assert run.Result({}, {"dense": [row]}).refused == ([row] if status == REFUSED else [])


def test_weighed_row_in_words() -> None:
    row = Row(Case("full", 64), "SDPA", False, WEIGHED, extra_peak_bytes=0)
    assert run.describe_row(row)[-2] == "0.0"


def test_environment_outside_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path_factory.mktemp("site") / "tilewise")
    assert environment.describe(torch.device("cpu"))["commit"] is None


def test_version_of_what_is_not_installed() -> None:
    assert environment.version_of("no-such-package-here") is None
    assert environment.version_of("torch") is not None


def test_a_stored_run_is_whole_at_every_moment(tmp_path: Path) -> None:
    path, link = tmp_path / "run.json", tmp_path / "link.json"
    write_whole(path, {"rows": [1]})
    link.symlink_to(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_whole(path, {"rows": [float("nan")]})
    assert json.loads(path.read_text()) == {"rows": [1]}
    write_whole(link, {"rows": [2]})
    assert link.is_symlink() and json.loads(path.read_text()) == {"rows": [2]}
    assert sorted(x.name for x in tmp_path.iterdir()) == ["link.json", "run.json"]
