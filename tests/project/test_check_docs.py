from pathlib import Path

import pytest

from tools import check_docs


def check(root: Path, text: str, **others: str) -> list[str]:
    """The failures of a README of this text, in a checkout with these other files."""
    for name, content in others.items():
        (root / name.replace("_", ".")).write_text(content)
    (root / "README.md").write_text(text)
    return check_docs.check(root, [root / "README.md"])


def fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```\n"


def test_shell_block_runs_in_a_copy(tmp_path: Path) -> None:
    assert check(tmp_path, fence("bash", "cat here.txt\necho x > made.txt"), here_txt="x") == []
    assert not (tmp_path / "made.txt").exists()


def test_shell_block_keeps_its_state(tmp_path: Path) -> None:
    text = fence("bash", "export A=1\n# a comment\nfor i in 1 2; do\n  test $A = 1\ndone")
    assert check(tmp_path, text) == []


def test_failing_line_is_found_wherever_it_stands(tmp_path: Path) -> None:
    (failure,) = check(tmp_path, "# Title\n\n" + fence("bash", "echo said; false\ntrue"))
    assert failure.startswith("README.md:4: exit code 1")
    assert "said" in failure


def test_commands_come_from_this_environment(tmp_path: Path) -> None:
    text = fence("bash", "python -c 'import torch'\n.venv/bin/python -c 'import pytest'")
    assert check(tmp_path, text) == []


def test_console_block_runs_prompts_only(tmp_path: Path) -> None:
    assert check(tmp_path, fence("console", "$ echo \\\n> x\nnot a command\n$ true")) == []
    assert len(check(tmp_path, fence("console", "$ false\noutput"))) == 1


def test_make_is_a_dry_run_of_a_target_that_exists(tmp_path: Path) -> None:
    makefile = "run:\n\tfalse\n"
    assert check(tmp_path, fence("bash", "make run ARGS=--quick"), Makefile=makefile) == []
    assert len(check(tmp_path, fence("bash", "make nothing"))) == 1


@pytest.mark.parametrize(
    "command",
    [
        "git clone https://example.org/tilewise.git",
        "cd tilewise",
        "pip install .",
        "python -m pip install 'tilewise[hf]'  # with a model",
        "python3 -m venv .venv",
        "source .venv/bin/activate",
        ".venv/bin/pip install .",
        ".venv/bin/pre-commit install",
        "tilewise report",
        "tilewise report --output build/report.html",
    ],
)
def test_known_command_is_not_run(command: str) -> None:
    assert check_docs.known_elsewhere(command)


@pytest.mark.parametrize(
    "command", ["tilewise report --quick", "tilewise verify", "cd tilewise/core", "python x.py"]
)
def test_other_command_is_run(command: str) -> None:
    assert not check_docs.known_elsewhere(command)


def test_here_document_is_one_command() -> None:
    block = check_docs.Block("bash", "cat > x <<'EOF'\npip install y\nEOF\ncat x", 1)
    assert check_docs.logical_lines(block) == ["cat > x <<'EOF'\npip install y\nEOF", "cat x"]


def test_skip_needs_a_reason(tmp_path: Path) -> None:
    block = fence("bash", "false")
    assert check(tmp_path, f"<!-- docs: skip (needs a GPU) -->\n{block}") == []
    assert len(check(tmp_path, f"<!-- docs: skip -->\n{block}")) == 1
    assert len(check(tmp_path, f"<!-- docs: skip (far) -->\n\nText.\n\n{block}")) == 1


def test_python_blocks_share_a_namespace(tmp_path: Path) -> None:
    text = fence("python", "x = 1") + "\nText.\n\n" + fence("python", "assert x == 1")
    assert check(tmp_path, text) == []


def test_python_failure_names_the_documents_line(tmp_path: Path) -> None:
    (failure,) = check(tmp_path, "Text.\n\n" + fence("python", "x = 1\n\nassert x == 2"))
    assert 'File "README.md", line 6' in failure


def test_python_warning_is_a_failure(tmp_path: Path) -> None:
    assert len(check(tmp_path, fence("python", "import warnings\nwarnings.warn('old')"))) == 1


def test_pycon_block_is_a_doctest(tmp_path: Path) -> None:
    assert check(tmp_path, fence("pycon", ">>> x = 1\n>>> x + 1\n2") + fence("python", "x")) == []
    assert len(check(tmp_path, fence("pycon", ">>> 1 + 1\n3"))) == 1


def test_other_languages_are_left_alone(tmp_path: Path) -> None:
    assert check(tmp_path, fence("text", "false") + fence("", "false")) == []


@pytest.mark.parametrize(
    "link",
    [
        "[a](other.md)",
        "[a](other.md#two-words)",
        "[a](other.md#two-words-1)",
        "[a](other.md#a-b)",
        "[a](other.md#named)",
        "[a](#here)",
        "[a][b]\n\n[b]: other.md",
        '<a href="other.md">a</a>',
        "![a](other.md)",
        "[a](https://example.org/x?y#z)",
        "[a](mailto:a@example.org)",
        "`[a](nowhere.md)`",
    ],
)
def test_good_link(tmp_path: Path, link: str) -> None:
    other = '# Two words\n\n## Two words\n\n## `a`-b!\n\n<a id="named"></a>\n'
    assert check(tmp_path, f"# Here\n\n{link}\n", other_md=other) == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[a](nowhere.md)", "nothing there"),
        ("[a](other.md#three)", "no such heading"),
        ("[a](#there)", "no such heading"),
        ("[a](/other.md)", "a link is relative"),
        ("[a](../other.md)", "the link leaves the checkout"),
        ("[a](https:///x)", "no host"),
        ('<img src="nowhere.png">', "nothing there"),
        ("![a](nowhere.png)", "nothing there"),
    ],
)
def test_bad_link(tmp_path: Path, link: str, problem: str) -> None:
    (failure,) = check(tmp_path, f"# Here\n\n{link}\n", other_md="# Two\n")
    assert failure.startswith("README.md:3: ")
    assert problem in failure
