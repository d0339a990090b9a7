"""The explanation as one HTML file that needs nothing else: an interactive walk, in any browser."""

from __future__ import annotations

import html
import json
from importlib import resources
from typing import Any

from ..tables import Table
from . import explanation, generations, tables, walk
from .explanation import Explanation

_FILES = {"STYLE": "page.css", "SCRIPT": "page.js"}


def render(found: Explanation) -> str:
    """The page."""
    parts = {name: _read(file) for name, file in _FILES.items()}
    request = found.request
    parts |= {
        "TITLE": html.escape(f"Attention on {found.gpu.title}: {request.mask_text}"),
        "HEADLINE": _headline(tables.headline(found)),
        "REFERENCE": _REFERENCE if found.plan.choice.name == "hopper" else "",
        "SUMMARY": "\n".join(f"<li>{html.escape(line)}</li>" for line in tables.sentences(found)),
        "TABLES": "\n".join(table_as_html(table) for table in tables.tabulate(found)),
        "DATA": _embed(
            {
                "explanation": explanation.as_json(found),
                "walk": walk.as_json(found),
                "generations": generations.as_json(found),
            }
        ),
    }
    text = _read("page.html")
    # Markers are of the template alone: what is put in is not looked at again.
    pieces = text.split("@@")
    for i in range(1, len(pieces), 2):
        pieces[i] = parts[pieces[i]]
    return "".join(pieces)


_REFERENCE = (
    '<p class="notes">The recurrence is written with a running maximum. This kernel subtracts a '
    "fixed reference instead and raises it where a row demands it: the same sums, and a rescale "
    "factor of 1 nearly everywhere.</p>"
)


def _headline(lines: list[str]) -> str:
    """The call, the GPU and the backend; why not another on demand."""
    said = [f"<p>{html.escape(line)}</p>" for line in lines]
    why_not = "".join(said[3:])
    details = f"<details><summary>Why not another backend?</summary>{why_not}</details>"
    return "\n".join([*said[:3], details])


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _embed(document: Any) -> str:
    """JSON that ends no script element, whatever is in it."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def table_as_html(table: Table) -> str:
    """With a caption, in a box that scrolls by itself."""

    def cell(tag: str, text: str, index: int, scope: str = "") -> str:
        kind = "" if index < table.texts else ' class="num"'
        return f"<{tag}{scope}{kind}>{html.escape(text)}</{tag}>"

    head = "".join(cell("th", column, i, ' scope="col"') for i, column in enumerate(table.columns))
    rows = []
    for row in table.rows:
        first = cell("th", row[0], 0, ' scope="row"')
        rest = "".join(cell("td", text, i) for i, text in enumerate(row) if i)
        rows.append(f"<tr>{first}{rest}</tr>")
    title = html.escape(table.title)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<caption>{title}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
