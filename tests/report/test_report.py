"""The quick report as a user runs it: warnings are errors, every check passes, one HTML file."""

import json
import re
from html.parser import HTMLParser

import pytest

from tests.report.conftest import QuickRun
from tilewise.catalog import OPS
from tilewise.report.compare import compare

pytestmark = pytest.mark.slow

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Elements with their attributes, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.mismatched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.mismatched.append(tag)

    def attributes(self, *names: str) -> list[str]:
        return [found[name] for _, found in self.elements for name in names if name in found]

    def all(self, tag: str) -> list[dict[str, str]]:
        return [found for name, found in self.elements if name == tag]


def test_all_is_well_and_no_warning_was_raised(quick_run: QuickRun) -> None:
    assert quick_run.code == 0, quick_run.stderr
    assert "Warning" not in quick_run.stderr
    # Progress only: no line of a library's own.
    assert [line for line in quick_run.stderr.splitlines() if not line.startswith("[")] == []


def test_document_has_every_part(quick_run: QuickRun) -> None:
    found = quick_run.document
    assert found["is_well"] and found["is_quick"]
    assert [check["is_well"] for check in found["checks"]] == [True] * 3
    assert {group["op"] for group in found["budget"]} == {op.name for op in OPS}
    assert {group["dtype_name"] for group in found["budget"]} == {"float32", "bfloat16"}
    assert len(found["sweep"]) == 3
    for series in found["sweep"]:
        timed = {row["contestant"] for row in series["rows"] if row["time_ms"]}
        assert {"Tilewise", "eager"} < timed
        assert any(name.startswith("SDPA") for name in timed)
    assert found["environment"]["transformers"]
    # Beside itself nothing changed.
    same = compare(found, found)
    assert same.counts["times"] > 10 and same.counts["budgets"] > 20
    assert all(table.rows == [] for table in same.tables)


def test_model_ran_through_tilewise(quick_run: QuickRun) -> None:
    model = quick_run.document["model"]
    assert model["layers_through_tilewise"] == model["layers"] == 6
    assert set(model["checks"]) == {"each sentence alone", "one padded batch"}
    assert all(0 < check["used"] <= 1 for check in model["checks"].values())
    # Sentences that mean the same are more alike than those that do not.
    similar = [pair["tilewise"] for pair in model["pairs"]]
    assert min(similar[:4]) > max(similar[4:])


def test_page_loads_nothing(quick_run: QuickRun) -> None:
    page = Page(quick_run.page)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "img", "object", "embed", "base"}
    for value in page.attributes("src", "srcset", "href", "xlink:href", "data", "action"):
        assert value.startswith("#"), value
    for style in [quick_run.page, *page.attributes("style")]:
        assert "@import" not in style
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", style))


def test_page_is_well_formed_and_its_references_lead_somewhere(quick_run: QuickRun) -> None:
    page = Page(quick_run.page)
    assert page.mismatched == []
    assert page.open == []
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    asked = page.attributes("aria-labelledby")
    asked += [value[1:] for value in page.attributes("href", "xlink:href")]
    asked += re.findall(r"url\(#([^)]*)\)", quick_run.page)
    assert set(asked) <= set(ids)


def test_page_can_be_read_without_seeing_it(quick_run: QuickRun) -> None:
    page = Page(quick_run.page)
    plots = [svg for svg in page.all("svg") if svg.get("role") == "img"]
    assert len(plots) == len(page.all("svg")) == 6
    for plot in plots:
        assert re.search(r"Where the lines end: .*Tilewise [\d.]+ \w+ at \d+", plot["aria-label"])
    assert len(page.all("caption")) == len(page.all("table"))
    assert page.all("html") == [{"lang": "en"}]
    assert {"row", "col"} == set(page.attributes("scope"))
    assert any("width=device-width" in meta.get("content", "") for meta in page.all("meta"))


def test_page_follows_light_and_dark(quick_run: QuickRun) -> None:
    style = quick_run.page[: quick_run.page.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names == set(re.findall(r"(--[\w-]+):", dark))
    # Every colour of the plots is one of the page's: none of matplotlib's own is left.
    plots = quick_run.page[quick_run.page.index("<svg") :]
    assert set(re.findall(r"var\((--[\w-]+)\)", plots)) <= names
    assert re.findall(r"(?:stroke|fill): #\w+", plots) == []


def test_verdict_comes_first(quick_run: QuickRun) -> None:
    body = quick_run.page[quick_run.page.index("<body>") :]
    assert "All checks passed" in body[: body.index("<h2")]
    assert "All checks passed".lower() in quick_run.page[: quick_run.page.index("</title>")].lower()


def test_figures_of_the_page_are_those_of_the_document(quick_run: QuickRun) -> None:
    found = quick_run.document
    (every_op, *_) = found["checks"]
    assert every_op["answer"] in quick_run.page
    assert found["environment"]["torch"] in quick_run.page
    assert json.dumps(found["environment"]["date"])[1:-1] in quick_run.page
