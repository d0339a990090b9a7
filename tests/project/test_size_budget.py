from pathlib import Path

import pytest

from tools import size_budget


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int, head: str = "def f():") -> str:
    """A function of so many lines, head included, none of which repeats."""
    return "\n".join([head, *(f"    x{n} = {n}" for n in range(lines - 1))]) + "\n"


def errors(root: Path) -> list[str]:
    return [f.text for f in size_budget.check(root)[0] if f.over_limit]


def notes(root: Path) -> list[str]:
    return [f.text for f in size_budget.check(root)[0] if not f.over_limit]


@pytest.mark.parametrize(("lines", "over"), [(50, ""), (51, "note"), (80, "note"), (81, "error")])
def test_host_function(tmp_path: Path, lines: int, over: str) -> None:
    write(tmp_path, "tilewise/a.py", function(lines))
    assert len(notes(tmp_path)) == (over == "note")
    assert len(errors(tmp_path)) == (over == "error")


@pytest.mark.parametrize(
    "decorator", ["@triton.jit", "@gluon.jit", "@jit", "@triton.jit(noinline=True)"]
)
def test_kernel_has_its_own_budget(tmp_path: Path, decorator: str) -> None:
    write(tmp_path, "tilewise/a.py", f"{decorator}\n{function(120)}")
    assert notes(tmp_path) + errors(tmp_path) == []
    write(tmp_path, "tilewise/a.py", f"{decorator}\n{function(201)}")
    assert errors(tmp_path) == ["lines of kernel f: 201 (limit 200)"]


def test_docstring_is_not_counted(tmp_path: Path) -> None:
    docstring = '    """Long.\n' + "    more\n" * 100 + '    """\n'
    write(tmp_path, "tilewise/a.py", f"def f():\n{docstring}    return 1\n")
    assert notes(tmp_path) + errors(tmp_path) == []


def test_arguments(tmp_path: Path) -> None:
    names = ", ".join(f"a{n}" for n in range(12))
    write(tmp_path, "tilewise/a.py", f"def f({names}, *, one): ...\n")
    assert errors(tmp_path) == ["arguments of function f: 13 (limit 12)"]
    write(tmp_path, "tilewise/a.py", f"class A:\n    def f(self, {names}): ...\n")
    assert errors(tmp_path) == []


def test_given_signature_counts_only_what_every_call_must_pass(tmp_path: Path) -> None:
    keywords = ", ".join(f"a{n}=0" for n in range(20))
    write(tmp_path, "tilewise/dense/api.py", f"def attention(q, k, v, *, {keywords}): ...\n")
    write(tmp_path, "tilewise/flash_attn/a.py", f"def flash_attn_func(q, k, v, {keywords}): ...\n")
    assert errors(tmp_path) + notes(tmp_path) == []
    write(tmp_path, "tilewise/dense/tiled.py", f"def attention(q, k, v, *, {keywords}): ...\n")
    assert errors(tmp_path) == ["arguments of function attention: 23 (limit 12)"]


@pytest.mark.parametrize(
    "first_line",
    ["# size: one schedule, kept whole", '"""size: generated."""', '"""Tables. size: data."""'],
)
def test_first_line_may_give_the_reason(tmp_path: Path, first_line: str) -> None:
    long = "\n".join(f"x{n} = {n}" for n in range(800))
    write(tmp_path, "tilewise/a.py", f"{first_line}\n{long}\n")
    assert errors(tmp_path) == []
    assert notes(tmp_path) == ["lines of the file: 801 (limit 700), with a reason"]


def test_reason_elsewhere_or_empty_does_not_count(tmp_path: Path) -> None:
    long = "\n".join(f"x{n} = {n}" for n in range(800))
    write(tmp_path, "tilewise/a.py", f"x = 0\n# size: too late\n{long}\n")
    write(tmp_path, "tilewise/b.py", f"# size:\n{long.replace('x', 'y')}\n")
    assert len(errors(tmp_path)) == 2


def test_repeated_code_is_found_across_files(tmp_path: Path) -> None:
    shared = "\n".join(f"s{n} = {n}" for n in range(10))
    own = "\n".join(f"t{n} = {n}" for n in range(90))
    write(tmp_path, "tilewise/a.py", f"import os\n{shared}\n{own}\n")
    write(tmp_path, "labs/b.py", f"# a lab\n{shared}\n")
    found, _ = size_budget.check(tmp_path)
    assert [(f.path, f.text) for f in found] == [
        ("labs/b.py", "lines 2-11 stand at tilewise/a.py:2 too"),
        (
            "tilewise tools labs",
            "repeated code: 18.2 % of 110 lines (guideline 5 %, limit 10 %)",
        ),
    ]
    assert [f.over_limit for f in found] == [False, True]


def test_given_signature_is_no_repetition(tmp_path: Path) -> None:
    keywords = ",\n    ".join(f"a{n}=0" for n in range(20))
    one, two = (f"def {name}(\n    q,\n    {keywords}\n): ...\n" for name in ("attention", "other"))
    write(tmp_path, "tilewise/dense/api.py", one + one.replace("attention", "attention_partial"))
    assert notes(tmp_path) == []
    write(tmp_path, "tilewise/dense/tiled.py", two + two)
    assert any("stand at tilewise/dense/tiled.py" in note for note in notes(tmp_path))


def test_seven_lines_alike_are_no_repetition(tmp_path: Path) -> None:
    shared = "\n".join(f"s{n} = {n}" for n in range(7))
    write(tmp_path, "tilewise/a.py", shared)
    write(tmp_path, "tilewise/b.py", shared)
    assert notes(tmp_path) + errors(tmp_path) == []


def test_in_tests_nothing_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "tests/test_a.py", function(900))
    write(tmp_path, "tests/test_b.py", function(900))
    assert errors(tmp_path) == []
    assert len(notes(tmp_path)) == 4


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "tools/a.py", function(60))
    assert size_budget.main([str(tmp_path)]) == 0
    write(tmp_path, "tools/b.py", function(90, "def g():"))
    assert size_budget.main([str(tmp_path)]) == 1
    assert "error: tools/b.py:1: lines of function g: 90 (limit 80)" in capsys.readouterr().out
