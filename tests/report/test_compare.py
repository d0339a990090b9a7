"""Two reports beside each other: what counts as changed, and what the reader is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from tilewise.cli import main
from tilewise.report import compare


def report(median: float = 10.0, used: float = 0.5, extra: int = 1 << 20, well: bool = True) -> Any:
    timing = {"median": median, "min": 0.9 * median, "max": 1.1 * median}
    row = {"contestant": "Tilewise", "length": 256, "time_ms": timing, "extra_peak_bytes": extra}
    budget = {"op": "attention", "tensor": "out", "dtype_name": "float32", "backend": "tiled"}
    return {
        "command": "report",
        "environment": {"cpu": "a", "torch": "2"},
        "checks": [{"title": "Every op", "is_well": well}],
        "budget": [{**budget, "worst_used": used}],
        "sweep": [{"title": "causal, forward", "rows": [row]}],
    }


def test_rounds_that_overlap_say_nothing() -> None:
    found = compare.compare(report(10.0), report(11.0))
    assert found.counts[compare.SAME] == found.counts["times"] == 1
    assert found.speed.rows == found.memory.rows == found.accuracy.rows == []
    assert found.worse == []


def test_what_changed_is_listed() -> None:
    found = compare.compare(report(10.0, 0.5), report(5.0, 0.8, 1 << 21, False))
    assert found.speed.rows == [
        ["causal, forward", "Tilewise", "256", "10 ms", "5 ms", "2.00 ×", "faster"]
    ]
    assert found.memory.rows[0][3:] == ["1.05 MB", "2.1 MB"]
    assert found.accuracy.rows[0][4:] == ["50 %", "80 %"]
    assert found.worse == ["Every op"]
    assert "FAILED now, and not before: Every op." in found.sentences()
    slower = compare.compare(report(5.0), report(10.0))
    assert slower.counts[compare.SLOWER] == 1


def test_command_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "a.json", tmp_path / "b<b>.json"]
    for file, document in zip(files, (report(10.0), report(5.0)), strict=True):
        file.write_text(json.dumps(document))
    page = tmp_path / "page.html"
    argv = ["report", "--compare", *map(str, files), "--output", str(page)]
    assert main(argv) == 0
    assert "1 are faster, 0 slower" in capsys.readouterr().out
    written = page.read_text()
    assert "b&lt;b&gt;.json" in written and "<b>" not in written
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["speed"][0]["now"] == "faster"
    files[1].write_text(json.dumps(report(well=False)))
    assert main(argv) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "cannot be read"), ("{", "is not JSON"), ('{"command": "bench"}', "is no report that")],
)
def test_one_sentence_for_what_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert main(["report", "--compare", str(path), str(path)]) == 2
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1 and words in found.err
