"""Bad arguments: exit code 2, one sentence on stderr, nothing on stdout, and nothing run."""

import sys
from pathlib import Path

import pytest

from tilewise.cli import bench, main, options


def complaint(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert found.err.endswith(".\n")
    return found.err.strip()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["verify", "attenton"], "op must be one of attention, attention_partial, "),
        (["verify", "--dtype", "int8"], "dtype must be all or some of float32, "),
        (["verify", "--dtype", ""], "got ''"),
        (["verify", "--dtype", "float32,,float64"], "got ''"),
        (["verify", "--backend", "warp"], "no backend 'warp' for attention"),
        (["verify", "merge", "--backend", "tiled"], "no backend 'tiled' for merge"),
        (["verify", "--all", "merge"], "--all means every op"),
        (["verify", "--all", "--dtype", "float32"], "--all means every op"),
        (["verify", "merge", "--part", "4/3"], "--part must be one such as 2/3, got '4/3'"),
        (["verify", "--device", "toaster"], "device must be auto, cpu or cuda, got 'toaster'"),
        (["verify", "--device", "meta"], "device must be auto, cpu or cuda, got 'meta'"),
        (["verify", "--device", "cuda:99"], "device 'cuda:99' is not here"),
        (["verify", "--frobnicate"], "unrecognized arguments: --frobnicate"),
        (
            ["bench", "--device", "cpu", "--grid", "sparse"],
            "grid must be one of dense, window, memory",
        ),
        (["bench", "--device", "cpu", "--grid", "dense,sparse"], "memory, got 'sparse'"),
        (["bench", "--device", "cpu", "--minutes", "5"], "--minutes is for a run on a GPU"),
        (["bench", "--device", "cpu", "--backend", "tiled"], "--backend is for a run on a GPU"),
        (["bench", "--device", "cpu", "--without", "flex"], "--without is for a run on a GPU"),
        (["bench", "--device", "cpu", "--resume", "x"], "--resume is for a run on a GPU"),
        (["bench", "decode", "--device", "cpu", "--resume", "x"], "--resume is for another bench"),
        (["bench", "--lengths", "0"], "lengths must be integers from 1 on, got '0'"),
        (["bench", "--lengths", "64", "4k"], "lengths must be integers from 1 on, got '4k'"),
        (["bench", "--lengths", "64,-1"], "got '-1'"),
        (["bench", "--lengths", "²"], "got '²'"),
        (["bench", "--dtype", "bf16"], "got 'bf16'"),
        (["bench", "--dtype", ""], "got ''"),
        (["bench", "--output", ""], "cannot be written"),
        (["bench", "--threads", "0"], "threads must be at least 1, got 0"),
        (["bench", "--threads", "two"], "invalid int value: 'two'"),
        (["bench", "--output", "no/such/folder/x.json"], "output 'no/such/folder/x.json'"),
        (["report", "--output", "no/such/folder/x.html"], "cannot be written: No such file"),
        (["report", "--output", "."], "cannot be written: Is a directory"),
        (["report", "--plots", "README.md/x"], "output 'README.md/x' cannot be written"),
        (["report", "--device", "xpu"], "device must be auto, cpu or cuda"),
        (["doctor", "me"], "unrecognized arguments: me"),
        (["explode"], "invalid choice: 'explode'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_one_sentence(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    said = complaint(capsys, *argv)
    assert words in said
    assert said.startswith("tilewise")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--grid", "memory"], "grid must be one of dense, headdims, window, documents, features"),
        (["--grid", ""], "got ''"),
        (["--backend", "tiled,warp"], "backend must be one of auto, reference, tiled"),
        (["--minutes", "0"], "minutes must be above 0, got 0"),
        (["--minutes", "nan"], "minutes must be above 0, got nan"),
    ],
)
def test_one_sentence_on_a_gpu(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    words: str,
) -> None:
    monkeypatch.setattr(bench, "_run_on_cpu", bench._run_on_gpu)
    assert words in complaint(capsys, "bench", "--device", "cpu", *argv)


def test_missing_extras_are_named_with_what_brings_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("matplotlib", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    said = complaint(capsys, "report")
    assert "matplotlib, transformers are not installed" in said
    assert "pip install 'tilewise[bench,hf]'" in said


def test_output_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old = tmp_path / "new.html", tmp_path / "old.html"
    old.write_text("as it was")
    assert [options.read_output("x", str(path)) for path in (new, old)] == [new, old]
    assert not new.exists()
    assert old.read_text() == "as it was"


def test_dtypes_and_lengths_in_order_without_repeats() -> None:
    dtypes = options.read_dtypes("x", "float64,float32,float64")
    assert [str(dtype) for dtype in dtypes] == ["torch.float64", "torch.float32"]
    assert len(options.read_dtypes("x", "all")) == 4
    assert options.read_lengths("x", ["64,128", "32"]) == [64, 128, 32]
    assert options.read_lengths("x", ()) == []


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["report", "--help"]])
def test_help_and_version_leave_with_0(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 0
    assert "tilewise" in capsys.readouterr().out


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewise.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "tilewise: interrupted.\n"
