"""Writes the pages of the documentation site: those of docs/, and those made from the code.

    python tools/site.py [FOLDER]            (build/site-pages when none is named)
    python tools/site.py --check FOLDER      (of the built site)

Made from the code are a page for each op of the catalog (its docstring, backends and oracle), the
table of what each backend takes, the measured facts (from benchmarks/results), and the labs as
pages. Links from a page to a file of the repository that has no page become plain text.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Documents outside docs/ that are pages too.
PAGES = {
    "tilewise/decode/README.md": "decode.md",
    "tilewise/dense/README.md": "dense.md",
    "tilewise/kernels/README.md": "kernels.md",
    "tilewise/parallel/README.md": "parallel.md",
    "labs/README.md": "labs/index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(^(```|~~~).*?^\2[^\n]*$)", re.DOTALL | re.MULTILINE)
_SKIP = re.compile(r"^<!-- docs: skip .*-->\n", re.MULTILINE)
# Of a docstring's sections.
_SECTION = re.compile(r"^(Args|Returns|Raises|Cost|Deterministic|Source)(?:, [A-Z]\w+)*:", re.M)


def all_pages() -> dict[str, str]:
    """Where a file of the repository is on the site."""
    found = dict(PAGES)
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT / "docs").as_posix()
        found[f"docs/{name}"] = name
    for lab in sorted((ROOT / "labs").glob("[0-9]*.py")):
        found[f"labs/{lab.name}"] = f"labs/{lab.stem}.md"
    return found


def write_all(target: Path) -> list[str]:
    """Write every page; returns their names."""
    shutil.rmtree(target, ignore_errors=True)
    pages = all_pages()
    texts = {}
    for source, name in pages.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        text = lab_page(text) if source.endswith(".py") else text
        texts[name] = relink(_SKIP.sub("", text), source, name, pages)
    texts |= op_pages() | {"support.md": support_page(), "measured.md": measured_page()}
    for name, text in texts.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return sorted(texts)


def relink(text: str, source: str, name: str, pages: dict[str, str]) -> str:
    """Links of a document as its page has them."""

    def change(found: re.Match[str]) -> str:
        words, link = found[1], found[2]
        if re.match(r"[a-z]+:|#", link):
            return found[0]
        path, _, anchor = link.partition("#")
        goal = os.path.normpath(Path(source).parent / path).replace(os.sep, "/")
        if goal not in pages:
            return words
        there = os.path.relpath(pages[goal], Path(name).parent).replace(os.sep, "/")
        return f"[{words}]({there}{'#' + anchor if anchor else ''})"

    parts = _CODE.split(text)
    for i in range(0, len(parts), 3):
        parts[i] = _LINK.sub(change, parts[i])
    return "".join(part for i, part in enumerate(parts) if i % 3 != 2)


# ---------------------------------------------------------------- made from the code


def op_pages() -> dict[str, str]:
    """A page for each op of the catalog."""
    from tilewise.catalog import OPS

    return {f"ops/{op.name}.md": op_page(op) for op in OPS}


def op_page(op: Any) -> str:
    function = op.load("public")
    lines = [f"# tilewise.{op.name}", "", "```text", *signature_of(op.name, function), "```", ""]
    lines += [render_docstring(inspect.getdoc(function) or "")]
    lines += ["", "## Where it runs", ""]
    lines += [f"Verified on: {', '.join(f'`{name}`' for name in op.backends)}."]
    if op.name.startswith("attention") and "cache" not in op.name:
        lines += ["What each backend takes of it: [the table](../support.md)."]
    lines += ["", f"Paper: {op.paper}. To check it on your machine:", ""]
    lines += ["```bash", f"tilewise verify {op.name}", "```"]
    return "\n".join(lines)


def signature_of(name: str, function: Any) -> list[str]:
    """One parameter a line."""
    signature, lines, is_open = inspect.signature(function), [f"{name}("], True
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and is_open:
            lines.append("    *,")
            is_open = False
        default = parameter.default
        value = "" if default is parameter.empty else f" = {default!r}".replace("Full()", "full()")
        lines.append(f"    {parameter.name}: {parameter.annotation}{value},")
    return [*lines, f") -> {signature.return_annotation}"]


def render_docstring(text: str) -> str:
    """Our docstrings as Markdown: sections as headings, arguments as a list."""
    starts = [found.start() for found in _SECTION.finditer(text)]
    if not starts:
        return text
    parts = [text[: starts[0]]]
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        title, _, body = text[start:stop].partition(":")
        indented = re.split(r"\n(?=    \w[\w, ]*: )", body)
        if title == "Args":
            items = [" ".join(item.split()) for item in indented]
            entries = [item for item in items if item]
            body = "\n".join(
                "- " + re.sub(r"^([\w, ]+): ", lambda m: f"**{m[1]}**: ", entry)
                for entry in entries
            )
        else:
            body = " ".join(body.split())
        parts.append(f"## {title}\n\n{body}\n\n")
    return "".join(parts)


def table_of(columns: list[str], rows: list[list[str]]) -> str:
    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *(line(row) for row in rows)])


def support_page() -> str:
    from tilewise.report import support

    table = support.tabulate()
    return f"""# What each backend of dense attention takes

`backend="auto"` takes the leftmost that can: `hopper` on a Hopper GPU, `triton` on other GPUs,
`tiled` on the CPU and for the rest; `reference` is the fp64 oracle and runs only when it is named.
Each line is a case of the catalog, which `tilewise verify --all` runs on your machine; a cell says
what the choice of a backend says.

{table_of(table.columns, table.rows)}

Why a call of yours goes where it goes: `tilewise.explain_backend(q, k, v, ...)`.
"""


def measured_page() -> str:
    """Stored runs under benchmarks/results, with what they ran on."""
    lines = ["# Measured facts", ""]
    lines += [
        "Every number here is read from a stored run; nothing is claimed that is not in one. "
        "Times are medians of interleaved rounds, after each contestant was verified.",
        "",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        header, rows = document.get("header"), document.get("rows")
        if header is None or not isinstance(rows, list):
            continue
        lines += [f"## {header.get('gpu') or header.get('cpu')}", ""]
        lines += [
            f"`{path.name}`: {header.get('date')}, torch {header.get('torch')}, commit "
            f"`{header.get('commit')}`; {len(rows)} rows.",
            "",
        ]
        body = [cells for row in rows if (cells := _speeds(row)) is not None]
        columns = ["shape", "mask", "direction", "contestant", "TFLOP/s", "the best peer beside it"]
        lines += [table_of(columns, body), ""]
    return "\n".join(lines)


def _speeds(row: dict[str, Any]) -> list[str] | None:
    """One plain long row: ours, and on a GPU the best of the peers beside it."""
    if row.get("length", 0) < 4096 or row.get("feature") or row.get("dtype") == "float64":
        return None
    where = [str(row.get(name)) for name in ("shape", "mask", "direction")]
    if "ours" not in row:
        if not row.get("tflops") or not row["contestant"].startswith("Tilewise"):
            return None
        ratio = row.get("ratio_to_sdpa")
        best = "-" if ratio is None else f"{row['tflops'] / ratio:.3g} (SDPA)"
        return [*where, row["contestant"], f"{row['tflops']:.3g}", best]
    ours = next((x for x in row["ours"] if x.get("tflops")), None)
    peers = [x for x in row["peers"] if x.get("tflops")]
    if ours is None or not peers:
        return None
    best_peer = max(peers, key=lambda x: x["tflops"])
    name = f"{ours['name']} ({ours['backend']})"
    beside = f"{best_peer['tflops']:.3g} ({best_peer['name']})"
    return [*where, name, f"{ours['tflops']:.3g}", beside]


def lab_page(text: str) -> str:
    """A lab's cells as a page: prose as it is, code in fences."""
    parts = []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip("\n"))
        elif body.strip():
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts)


def find_problems(folder: Path) -> list[str]:
    """What is wrong with the built pages: equations that are not drawn, and what would be loaded
    from elsewhere."""
    problems = []
    for path in sorted(folder.rglob("*.html")):
        text, name = path.read_text(encoding="utf-8"), path.relative_to(folder).as_posix()
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"?([^\s\">]+)", text)
        problems += [f"{name}: loads {url}" for url in loaded if re.match(r"(https?:)?//", url)]
        prose = re.sub(r"<(code|pre|script|style|math)\b.*?</\1>", "", text, flags=re.DOTALL)
        problems += [f"{name}: {tex!r} is not drawn" for tex in re.findall(r"\$[^$<]+\$", prose)]
    source = (ROOT / "docs" / "theory" / "backward.md").read_text(encoding="utf-8")
    drawn = (folder / "theory" / "backward.html").read_text(encoding="utf-8").count("<math")
    expected = len(re.findall(r"\$\$.+?\$\$|\$[^$]+\$", source, re.DOTALL))
    if drawn != expected:
        problems.append(f"theory/backward.html: {drawn} of {expected} equations are drawn")
    return problems


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    if arguments[:1] == ["--check"]:
        problems = find_problems(Path(arguments[1]))
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        return 1 if problems else 0
    target = Path(arguments[0]) if arguments else ROOT / "build" / "site-pages"
    names = write_all(target)
    print(f"site: {len(names)} pages in {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
