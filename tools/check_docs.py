"""Runs what the documents tell a reader to run, and checks every link.

    python tools/check_docs.py [FILE ...]

Shell: each ```bash block, and the `$ ` lines of each ```console block, run in a scratch copy of
the checkout, with the commands beside the Python that runs this script first on the PATH. A `make`
line is a dry run: the target must exist, and CI runs those that matter. A few other lines are
verified elsewhere and are not run again (KNOWN says where).
Python: the ```python blocks of one document run in order, in one namespace; ```pycon is a doctest.
A block stays out only by a comment right above it: <!-- docs: skip (reason) -->.
Links: a relative link must lead to a file of the checkout, and its anchor to a heading there. A
link to the web must be well formed; nothing is fetched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

DOCUMENTS = ("*.md", "docs/**/*.md", "labs/**/*.md", "tilewise/**/*.md", "benchmarks/**/*.md")
SHELL = ("bash", "console", "sh", "shell")
TIMEOUT_S = 300
LEFT_BEHIND = (".git", ".venv*", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")

# Lines that are not run again. A pattern is matched from the start of the command.
KNOWN = (
    (r"git clone\b", "CI starts from a clone"),
    (r"cd tilewise$", "the checkout is the working folder already"),
    (r"(\S+/)?(python3? -m )?pip install\b", "`make env` installs, from the same pyproject.toml"),
    (r"python3? -m venv\b", "`make env` makes one"),
    (r"(source|\.) \S+/activate$", "the environment's commands are on the PATH"),
    (r"(\S+/)?pre-commit install\b", "it would change this checkout's git hooks"),
    (
        r"(\S+/)?tilewise report(?!.*--(quick|help|compare))",
        "`make run ARGS=--quick` runs its quick form",
    ),
    (r"git (commit|push|switch|checkout)\b", "it would change the checkout"),
)

_SKIP = re.compile(r"^\s*<!--\s*docs:\s*skip\s*\((?P<reason>[^)]+)\)\s*-->\s*$")
_HTML_LINK = re.compile(r"""<(?:a|img)\b[^>]*?\b(?:href|src)\s*=\s*["']([^"']+)""")
_HTML_ANCHOR = re.compile(r"""<\w+\b[^>]*?\b(?:id|name)\s*=\s*["']([^"']+)""")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, first line in the document, and why it is skipped."""

    language: str
    text: str
    line: int
    skip: str = ""


@dataclass(frozen=True)
class Document:
    path: Path
    blocks: list[Block]
    links: list[tuple[int, str]]
    anchors: set[str]


def slugify(heading: str) -> str:
    """GitHub's anchor of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def read_document(path: Path) -> Document:
    text = path.read_text(encoding="utf-8")
    document = Document(path, [], [], set())
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    before: Token | None = None
    slugs: dict[str, int] = {}
    for index, token in enumerate(tokens):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "fence":
            language = (token.info.split() or [""])[0]
            skip = _SKIP.match(before.content) if before and before.type == "html_block" else None
            reason = skip["reason"] if skip else ""
            document.blocks.append(Block(language, token.content, line + 1, reason))
        elif token.type == "heading_open":
            slug = slugify(_plain_text(tokens[index + 1]))
            seen = slugs.get(slug, 0)
            slugs[slug] = seen + 1
            document.anchors.add(f"{slug}-{seen}" if seen else slug)
        elif token.type == "inline":
            document.links.extend((line, link) for link in _inline_links(token))
        if token.type in ("html_block", "inline"):
            document.anchors.update(_HTML_ANCHOR.findall(token.content))
        if token.type == "html_block":
            document.links.extend((line, link) for link in _HTML_LINK.findall(token.content))
        before = token
    return document


def _plain_text(inline: Token) -> str:
    return "".join(t.content for t in inline.children or [] if t.type in ("text", "code_inline"))


def _inline_links(inline: Token) -> Iterator[str]:
    for child in inline.children or []:
        if child.type == "html_inline":
            yield from _HTML_LINK.findall(child.content)
        for name in ("href", "src"):
            target = child.attrGet(name)
            if target is not None:
                yield str(target)


def check_links(document: Document, root: Path) -> Iterator[str]:
    anchors = {document.path.resolve(): document.anchors}
    for line, link in document.links:
        problem = _check_link(document.path, link, root, anchors)
        if problem:
            yield f"{document.path.relative_to(root)}:{line}: {problem}: {link}"


def _check_link(path: Path, link: str, root: Path, anchors: dict[Path, set[str]]) -> str:
    parts = urlsplit(link)
    if parts.scheme in ("http", "https"):
        return "" if re.fullmatch(r"[\w.-]+\.\w+(:\d+)?", parts.netloc) else "no host in the link"
    if parts.scheme == "mailto":
        return "" if "@" in parts.path else "no address in the link"
    if parts.scheme or parts.netloc or parts.path.startswith("/"):
        return "a link is relative, or http(s)"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    if not target.is_relative_to(root.resolve()):
        return "the link leaves the checkout"
    if not target.exists():
        return "nothing there"
    if not parts.fragment or target.suffix != ".md":
        return ""
    if target not in anchors:
        anchors[target] = read_document(target).anchors
    return "" if unquote(parts.fragment) in anchors[target] else "no such heading"


def logical_lines(block: Block) -> list[str]:
    """The commands of a block: continued lines and here-documents joined, output left out."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith(("$ ", "> "))]
    commands: list[str] = []
    until = ""
    for line in lines:
        if until or (commands and commands[-1].endswith("\\")):
            commands[-1] += "\n" + line
            until = "" if line.strip() == until else until
            continue
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        commands.append(line)
        heredoc = re.search(r"<<-?\s*['\"]?(\w+)", line)
        until = heredoc[1] if heredoc else ""
    return commands


def known_elsewhere(command: str) -> str:
    """Why this command is not run again, or nothing."""
    bare = command.split(" #")[0].strip()
    for pattern, why in KNOWN:
        if re.match(pattern, bare):
            return why
    return ""


def shell_script(block: Block) -> tuple[str, list[str]]:
    """(what to run, what was left out and why)."""
    script, left_out = [], []
    for command in logical_lines(block):
        why = known_elsewhere(command)
        if why:
            left_out.append(f"{command.strip()}: {why}")
        elif re.match(r"make\b", command):
            script.append(re.sub(r"^make\b", "make --dry-run > /dev/null", command))
            left_out.append(f"{command.strip()}: a dry run")
        else:
            script.append(command)
    return "\n".join(script), left_out


# Runs the blocks that stand in the file named last, each under the document's name and line
# numbers, so that a traceback points into the document.
_PYTHON_RUNNER = """
import ast, doctest, sys
name, source = sys.argv[1:]
space = {"__name__": "__main__"}
for language, line, text in ast.literal_eval(open(source, encoding="utf-8").read()):
    if language == "pycon":
        test = doctest.DocTestParser().get_doctest(text, space, name, name, line - 1)
        if doctest.DocTestRunner().run(test, clear_globs=False).failed:
            sys.exit(1)
        space.update(test.globs)
    else:
        exec(compile("\\n" * (line - 1) + text, name, "exec"), space)
"""


class Runner:
    """Runs commands in a scratch copy of the checkout."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.root = root
        self.copy = scratch / "checkout"
        shutil.copytree(root, self.copy, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
        # Documents name the environment as `make` makes it.
        (self.copy / ".venv").symlink_to(sys.prefix)
        self.blocks = scratch / "blocks"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "MPLBACKEND": "Agg",
        }

    def run(self, command: list[str]) -> str:
        """Nothing if it went well, else what it printed."""
        try:
            done = subprocess.run(
                command,
                cwd=self.copy,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return f"ran longer than {TIMEOUT_S} s"
        return "" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout}"

    def run_shell(self, script: str) -> str:
        return self.run(["bash", "-euo", "pipefail", "-c", script])

    def run_python(self, name: str, blocks: list[Block]) -> str:
        source = repr([(block.language, block.line, block.text) for block in blocks])
        self.blocks.write_text(source, encoding="utf-8")
        return self.run(
            [sys.executable, "-W", "error", "-c", _PYTHON_RUNNER, name, str(self.blocks)]
        )


def run_blocks(document: Document, runner: Runner) -> Iterator[str]:
    """Run a document's blocks and yield the failures."""
    name = str(document.path.relative_to(runner.root))
    python: list[Block] = []
    for block in document.blocks:
        if block.skip:
            print(f"skip  {name}:{block.line}: {block.skip}")
        elif block.language in ("python", "pycon"):
            python.append(block)
        elif block.language in SHELL:
            script, left_out = shell_script(block)
            for line in left_out:
                print(f"known {name}:{block.line}: {line}")
            if script:
                print(f"run   {name}:{block.line}: {script.splitlines()[0]}", flush=True)
                failure = runner.run_shell(script)
                if failure:
                    yield f"{name}:{block.line}: {failure}"
    if python:
        print(f"run   {name}: {len(python)} Python blocks", flush=True)
        failure = runner.run_python(name, python)
        if failure:
            yield f"{name}: {failure}"


def check(root: Path, paths: list[Path]) -> list[str]:
    """Every failure in these documents."""
    failures: list[str] = []
    documents = [read_document(path) for path in paths]
    for document in documents:
        failures += check_links(document, root)
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(root, Path(scratch))
        for document in documents:
            failures += run_blocks(document, runner)
    return failures


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    found = {path for pattern in DOCUMENTS for path in root.glob(pattern)}
    paths = [Path(a).resolve() for a in arguments] or sorted(found)
    failures = check(root, paths)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    print(f"docs: {len(paths)} documents, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
