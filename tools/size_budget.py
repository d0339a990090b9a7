"""The size budget: prints what is longer than the guideline, fails on what is over the limit.

    python tools/size_budget.py [ROOT]

    what                                         guideline / limit
    lines of a file                                    400 / 700
    lines of a host function                            50 / 80
    lines of a kernel (triton.jit, gluon.jit)          120 / 200
    arguments of a host function                         8 / 12
    arguments of a kernel                               16 / 20
    code that stands elsewhere too (8-line windows)    5 % / 10 %

Covers tilewise/, tools/ and labs/. In tests/ only the length of files and repeated code, as notes.
A function's docstring is not counted: it is its page in the docs. A file that is over a limit for a
reason says so on its first line, as `# size: <reason>` or in its docstring's first line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE_LINES = (400, 700)
HOST_LINES = (50, 80)
KERNEL_LINES = (120, 200)
HOST_ARGUMENTS = (8, 12)
KERNEL_ARGUMENTS = (16, 20)
REPEATED_PERCENT = (5, 10)
WINDOW = 8

CODE = ("tilewise", "tools", "labs")
TESTS = ("tests",)

# Signatures that are given, not chosen: of these only the arguments that every call must pass by
# position are counted, and their text is no repetition.
# (path or folder, start of the function's name): why
GIVEN_SIGNATURES = {
    ("tilewise/dense/api.py", "attention"): "the public op: one keyword per part of the formula",
    ("tilewise/linear/api.py", "delta_rule"): "the public op: one keyword per part of the formula",
    ("tilewise/linear/api.py", "gated_delta_rule"): "the same",
    ("tilewise/linear/api.py", "kda"): "the same",
    ("tilewise/decode/api.py", "attention_with_cache"): "the same, over a cache",
    ("tilewise/parallel/", "context_parallel_"): "the same, and where the tokens are",
    ("tilewise/parallel/", "explain_schedule"): "those of the call that it explains",
    ("tilewise/flash_attn/", "flash_attn_"): "flash-attn's own argument names",
}

_REASON = re.compile(r"""^\s*(?:\#|[rR]?(?:\"\"\"|\"))\s*(?:.*\s)?size:\s*\S""")


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    text: str
    over_limit: bool


@dataclass(frozen=True)
class Source:
    path: str
    lines: list[str]
    tree: ast.Module

    @property
    def gives_reason(self) -> bool:
        return bool(self.lines) and bool(_REASON.match(self.lines[0]))


def read_sources(root: Path, folders: tuple[str, ...]) -> list[Source]:
    sources = []
    for folder in folders:
        for file in sorted((root / folder).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            path = file.relative_to(root).as_posix()
            sources.append(Source(path, text.splitlines(), ast.parse(text, path)))
    return sources


def judge(path: str, line: int, what: str, size: int, budget: tuple[int, int]) -> Iterator[Finding]:
    guideline, limit = budget
    if size > limit:
        yield Finding(path, line, f"{what}: {size} (limit {limit})", True)
    elif size > guideline:
        yield Finding(path, line, f"{what}: {size} (guideline {guideline})", False)


Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_kernel(function: Function) -> bool:
    """Whether a decorator is `jit`, however it was imported, with or without arguments."""
    for decorator in function.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if isinstance(target, (ast.Attribute, ast.Name)):
            name = target.attr if isinstance(target, ast.Attribute) else target.id
            if name == "jit":
                return True
    return False


def is_given(function: Function, path: str) -> bool:
    return any(
        path.startswith(prefix) and function.name.startswith(name)
        for prefix, name in GIVEN_SIGNATURES
    )


def docstring_span(node: ast.AST) -> range:
    """The line numbers of a module's, class's or function's docstring."""
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return range(value.lineno, (value.end_lineno or value.lineno) + 1)
    return range(0)


def count_lines(function: Function) -> int:
    return (
        (function.end_lineno or function.lineno)
        - function.lineno
        + 1
        - len(docstring_span(function))
    )


def count_arguments(function: Function, path: str) -> int:
    arguments = function.args
    positional = [a.arg for a in arguments.posonlyargs + arguments.args]
    if positional and positional[0] in ("self", "cls", "ctx"):
        positional = positional[1:]
    if is_given(function, path):
        return len(positional) - len(arguments.defaults)
    stars = sum(a is not None for a in (arguments.vararg, arguments.kwarg))
    return len(positional) + len(arguments.kwonlyargs) + stars


def check_functions(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if not isinstance(node, Function):
            continue
        kernel = is_kernel(node)
        what = f"{'kernel' if kernel else 'function'} {node.name}"
        lines, arguments = (
            (KERNEL_LINES, KERNEL_ARGUMENTS) if kernel else (HOST_LINES, HOST_ARGUMENTS)
        )
        yield from judge(source.path, node.lineno, f"lines of {what}", count_lines(node), lines)
        yield from judge(
            source.path,
            node.lineno,
            f"arguments of {what}",
            count_arguments(node, source.path),
            arguments,
        )


def code_lines(source: Source) -> list[tuple[int, str]]:
    """The lines that say something: not blanks, comments, docstrings, imports, lone brackets."""
    skip: set[int] = set()
    for node in ast.walk(source.tree):
        skip.update(docstring_span(node))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skip.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, Function) and is_given(node, source.path):
            skip.update(range(node.lineno, node.body[0].lineno))
    numbered = ((number, line.strip()) for number, line in enumerate(source.lines, 1))
    return [
        (number, line)
        for number, line in numbered
        if number not in skip and line.strip("()[]{},:") and not line.startswith("#")
    ]


@dataclass
class Repetition:
    """One run of lines that stands at two places."""

    path: str
    start: int
    end: int
    other_path: str
    other_start: int


def find_repetitions(sources: list[Source]) -> tuple[list[Repetition], int, int]:
    """(runs, lines in some window that stands elsewhere too, all lines of code)."""
    by_path = {source.path: code_lines(source) for source in sources}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in by_path.items():
        for at in range(len(lines) - WINDOW + 1):
            places[tuple(text for _, text in lines[at : at + WINDOW])].append((path, at))

    repeated: set[tuple[str, int]] = set()
    runs: list[Repetition] = []
    open_runs: dict[tuple[str, str, int], tuple[Repetition, int]] = {}
    for path, lines in by_path.items():
        for at in range(len(lines) - WINDOW + 1):
            here = places[tuple(text for _, text in lines[at : at + WINDOW])]
            if len(here) == 1:
                continue
            repeated.update((path, at + step) for step in range(WINDOW))
            first_path, first_at = here[0]
            if (first_path, first_at) == (path, at):
                continue
            # Windows that move in step belong to one run, and share this key.
            key = (path, first_path, at - first_at)
            end = lines[at + WINDOW - 1][0]
            if key in open_runs and open_runs[key][1] == at - 1:
                run = open_runs[key][0]
                run.end = end
            else:
                start = by_path[first_path][first_at][0]
                run = Repetition(path, lines[at][0], end, first_path, start)
                runs.append(run)
            open_runs[key] = (run, at)
    return runs, len(repeated), sum(len(lines) for lines in by_path.values())


def check_repetition(sources: list[Source], where: str) -> Iterator[Finding]:
    runs, repeated, total = find_repetitions(sources)
    for run in sorted(runs, key=lambda run: run.start - run.end):
        text = f"lines {run.start}-{run.end} stand at {run.other_path}:{run.other_start} too"
        yield Finding(run.path, run.start, text, False)
    percent = round(100 * repeated / max(1, total), 1)
    guideline, limit = REPEATED_PERCENT
    text = f"repeated code: {percent} % of {total} lines (guideline {guideline} %, limit {limit} %)"
    if percent > guideline:
        yield Finding(where, 0, text, percent > limit)


def check(root: Path) -> tuple[list[Finding], int]:
    """All findings under root, and how many files were read."""
    code, tests = read_sources(root, CODE), read_sources(root, TESTS)
    findings: list[Finding] = []
    for source in code:
        found = [
            *judge(source.path, 1, "lines of the file", len(source.lines), FILE_LINES),
            *check_functions(source),
        ]
        if source.gives_reason:
            found = [Finding(f.path, f.line, f"{f.text}, with a reason", False) for f in found]
        findings += found
    findings += check_repetition(code, " ".join(CODE))

    in_tests: list[Finding] = []
    for source in tests:
        in_tests += judge(source.path, 1, "lines of the file", len(source.lines), FILE_LINES)
    in_tests += check_repetition(tests, " ".join(TESTS))
    findings += [Finding(f.path, f.line, f.text, False) for f in in_tests]
    return findings, len(code) + len(tests)


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[1]
    findings, files = check(root)
    for finding in sorted(findings, key=lambda f: f.over_limit):
        kind = "error" if finding.over_limit else "note"
        print(f"{kind}: {finding.path}:{finding.line}: {finding.text}")
    errors = sum(f.over_limit for f in findings)
    print(f"size budget: {files} files, {len(findings) - errors} notes, {errors} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
