"""The documentation site: every page is written and has its place, links lead to pages, docstrings
become pages."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tilewise.catalog import OPS
from tools import site

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("pages")
    return {name: (target / name).read_text(encoding="utf-8") for name in site.write_all(target)}


def test_every_page_has_its_place(pages: dict[str, str]) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r"([\w/.]+\.md)$", text[text.index("\nnav:") :], re.MULTILINE)
    assert len(listed) == len(set(listed))
    missing, gone = set(pages) - set(listed), set(listed) - set(pages)
    assert not missing, f"no line in the nav of mkdocs.yml: {sorted(missing)}"
    assert not gone, f"in the nav of mkdocs.yml, and nowhere else: {sorted(gone)}"


def test_every_op_has_a_page_made_of_its_docstring(pages: dict[str, str]) -> None:
    for op in OPS:
        page = pages[f"ops/{op.name}.md"]
        assert page.startswith(f"# tilewise.{op.name}\n")
        assert "\n## Where it runs\n" in page
        assert f"tilewise verify {op.name}" in page
    assert "- **mask**: what each query sees" in pages["ops/attention.md"]
    assert "    dropout_p: float = 0.0,\n" in pages["ops/attention.md"]


def test_links_lead_to_pages(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        for link in site._LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            parts = urlsplit(link[1])
            if parts.scheme or not parts.path:
                continue
            target = (Path("/") / name).parent / parts.path
            assert str(target.resolve())[1:] in pages, f"{name}: {link[1]}"


def test_links_that_have_no_page_are_words() -> None:
    pages = site.all_pages()
    text = "[a](../tests/x.py), [b](masks.md#tiles), [c](../labs/README.md), [d](https://a.b)"
    assert site.relink(text, "docs/bench.md", "bench.md", pages) == (
        "a, [b](masks.md#tiles), [c](labs/index.md), [d](https://a.b)"
    )


def test_support_table_is_on_its_page(pages: dict[str, str]) -> None:
    assert (
        "| dropout | drops nothing, and dropout_p is not 0 | yes | yes | yes |"
        in (pages["support.md"])
    )


def test_chapters_have_labs(pages: dict[str, str]) -> None:
    chapters = [name for name in pages if name.startswith("theory/") and "index" not in name]
    assert len(chapters) == 8
    for name in chapters:
        assert re.search(r"\*\*Labs?\*\*: .*?\]\(\.\./labs/\d\d_", pages[name], re.DOTALL), name
