"""The page of `tilewise explain --html`: complete in itself, and what it plays is what the library
computes."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.report.explain import browser
from tests.report.test_report import Page
from tilewise.cli import main
from tilewise.core.tolerance import assert_within_budget
from tilewise.report.explain import explanation, gpus, mask_text, page, walk
from tilewise.report.explain.request import Request


@pytest.fixture(scope="module")
def chromium() -> None:
    if browser.CHROMIUM is None:
        assert not os.environ.get("CI"), "CI has no chromium: apt-get install chromium"
        pytest.skip("no chromium here; Debian and Ubuntu: apt install chromium")


def explained(
    text: str, N: int = 700, gpu: str = "h100", **changes: Any
) -> explanation.Explanation:
    sizes = {"B": 2, "M": N, "N": N, "H": 4, "G": 2, "D": 128, "E": 128, "dtype": torch.bfloat16}
    request = Request(mask=mask_text.read(text), mask_text=text, **{**sizes, **changes})
    return explanation.explain(request, gpus.find(gpu), compiles=False)


def exact_and_eager(request: Request, rows: list[int]) -> tuple[Tensor, Tensor]:
    """out of the rows, by the oracle in fp64 and by plain torch in fp32, from the same inputs."""
    keys = torch.arange(request.N)
    q, k, v = (
        walk.draw(name, at, width)[None, :, None]
        for name, at, width in (
            ("q", torch.arange(request.M), walk.D), ("k", keys, walk.D), ("v", keys, walk.E),
        )
    )  # fmt: skip
    seen = request.lowered.dense(request.B, request.H, request.M, request.N)[0, 0]
    bias = torch.where(seen, 0.0, float("-inf"))
    exact = tw.attention(q, k, v, mask=request.lowered, backend="reference")
    scores = (q[0, :, 0].float() @ k[0, :, 0].float().T) * walk.D**-0.5 + bias
    eager = scores.softmax(-1).nan_to_num() @ v[0, :, 0].float()
    return exact[0, :, 0][rows], eager[rows]


PLAY = """
const said = [];
for (let i = 0; i < passes.length; i++) {
  byId("pass").value = i;
  byId("pass").onchange({ target: byId("pass") });
  byId("speed").value = 6;
  click("play");
  while (!walk.isOver) await wait(50);
  said.push({ verdict: text("library"), words: text("grid-words"), play: text("play"),
    checks: walk.checks, asked: walk.bytes.asked, visited: walk.done.size,
    weights: Object.values(walk.rows).map((state) => state.weight) });
}
return said;
"""


@pytest.mark.usefixtures("chromium")
@pytest.mark.parametrize(
    ("text", "gpu"),
    [("causal()", "h100"), ("documents([0, 200, 700]) & window(90, 40)", "h100"),
     ("chunked(150) | prefix(9)", "a100")],
)  # fmt: skip
def test_plays_to_the_end_and_gives_what_the_library_gives(text: str, gpu: str) -> None:
    made = explained(text, gpu=gpu)
    found = browser.run(page.render(made), PLAY)
    assert found.problems == []
    ways = walk.passes(made)
    assert len(found.result) == len(ways) >= 2
    for played, way in zip(found.result, ways, strict=True):
        assert played["play"] == "Play" and played["words"].startswith("Done: ")
        assert played["visited"] == int((way.kinds > 0).sum())
        if way.owner == "rows" or way.adds_dq:
            assert "all equal the library’s result" in played["verdict"]
            assert played["checks"]["count"] == len(way.edges.rows) - 1
    forward, keys = found.result[:2]
    # Bytes of a head are those of the table, of all heads, with what is written.
    step = made.directions[0].tiled[0]
    assert forward["asked"] * made.scores.heads == step.asked + sum(step.writes.values())
    assert ways[1].owner == "keys"
    rows = sorted(int(row) for row in forward["checks"]["rows"])
    got = torch.tensor([forward["checks"]["rows"][str(row)]["out"] for row in rows])
    assert_within_budget(got, *exact_and_eager(made.request, rows))
    # The weights that the backward makes again from the LSE add up to 1.
    weights = torch.tensor(keys["weights"])
    ones = torch.ones_like(weights, dtype=torch.float64)
    assert_within_budget(weights, ones, weights.new_ones(()).expand_as(weights))


@pytest.mark.usefixtures("chromium")
def test_keys_and_tabs_without_a_mouse() -> None:
    script = """
    const press = (id, key) =>
      byId(id).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    const found = {};
    press("panel-walk", "ArrowRight");
    found.stepped = [walk.at, text("live")];
    press("panel-walk", "ArrowDown");
    found.block = walk.blocks;
    press("panel-walk", "End");
    found.isOver = walk.isOver;
    press("panel-walk", "Home");
    found.restarted = walk.at;
    press("tab-walk", "ArrowLeft");
    found.focus = document.activeElement.id;
    const panels = [...document.querySelectorAll("[role=tabpanel]")];
    found.shown = panels.filter((panel) => !panel.hidden).map((panel) => panel.id);
    press("tab-numbers", "ArrowLeft");
    found.timelines = document.querySelectorAll("#generations-plot svg[role=img]").length;
    found.roofline = document.querySelector("#roofline-plot svg").getAttribute("aria-label");
    found.wide = document.documentElement.scrollWidth - innerWidth;
    return found;
    """
    found = browser.run(page.render(explained("causal()")), script, width=500)
    assert found.problems == []
    assert found.result["stepped"][0] == 1
    assert found.result["stepped"][1].startswith("Queries 640 to 699, keys 640 to 699")
    assert found.result["block"] == 1
    assert found.result["isOver"] and found.result["restarted"] == 0
    assert found.result["focus"] == "tab-numbers"
    assert found.result["shown"] == ["panel-numbers"]
    assert found.result["timelines"] == 4
    assert "tiled forward" in found.result["roofline"]
    # A phone's page is not wider than the phone.
    assert found.result["wide"] <= 0


def test_a_reference_that_stays_is_said_of_hopper_alone() -> None:
    for gpu, is_said in (("h100", True), ("a100", False)):
        assert (
            "a fixed reference instead" in page.render(explained("causal()", gpu=gpu))
        ) == is_said


def test_page_is_complete_in_itself(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    argv = ["explain", "--seqlen", "2000", "--batch", "2", "--heads", "8", "--gpu", "b200"]
    assert main([*argv, "--no-compile", "--html", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_000_000
    parsed = Page(text)
    assert parsed.mismatched == [] and parsed.open == []
    for value in parsed.attributes("src", "srcset", "href", "data", "action"):
        assert value.startswith("#"), value
    style = text[: text.index("</style>")]
    assert "@import" not in style and "url(" not in style
    assert not re.search(r"\b(fetch|XMLHttpRequest|import)\b\s*\(", text)
    light, dark = style.split("prefers-color-scheme: dark")
    names = set(re.findall(r"(--[\w-]+):", light))
    assert names == set(re.findall(r"(--[\w-]+):", dark))
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= names
    ids = parsed.attributes("id")
    assert len(ids) == len(set(ids))
    for name in ("aria-controls", "aria-labelledby"):
        assert {one for value in parsed.attributes(name) for one in value.split()} <= set(ids)
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert parsed.all("html") == [{"lang": "en"}]


def test_what_a_user_types_is_text_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def all_(b, h, m, n):\n    return m >= n\n")
    text = f"{path}:all_"
    made = explained(text, 128)
    strange = explanation.Explanation(**{**vars(made), "request": _renamed(made.request)})
    written = page.render(strange)
    assert "</script><b>" not in written
    data = re.search(r'id="data">(.*?)</script>', written, re.DOTALL)
    assert data is not None
    assert json.loads(data[1])["explanation"]["request"]["mask"] == "</script><b> @@DATA@@"


def _renamed(request: Request) -> Request:
    named = {name: getattr(request, name) for name in request.__dataclass_fields__}
    return Request(**{**named, "mask_text": "</script><b> @@DATA@@"})


def test_traced_rows_of_unlike_lengths_and_of_hidden_rows() -> None:
    made = explained("window(20, 0) & left_padding(30)", 300, M=140)
    rows = walk.traced_rows(made)
    results = walk.library_results(made.request, rows)
    exact, eager = exact_and_eager(made.request, rows)
    assert_within_budget(results["out"].float(), exact, eager)
    hidden = explained("causal(offset=-90)", 200)
    rows = walk.traced_rows(hidden)
    empty = [row for row in rows if not walk.runs(hidden.request, row)]
    assert empty == [row for row in rows if row < 90] != []
    assert walk.as_json(hidden)["traced"][str(empty[0])]["lse"] is None


@pytest.mark.usefixtures("chromium")
def test_page_is_dark_where_the_reader_is(tmp_path: Path) -> None:
    from PIL import Image

    file = tmp_path / "page.html"
    file.write_text(page.render(explained("causal()", 300)), encoding="utf-8")
    style = file.read_text(encoding="utf-8")
    papers = re.findall(r"--paper: (#\w{6});", style)
    for paper, is_dark in zip(papers, (False, True), strict=True):
        picture = tmp_path / f"{is_dark}.png"
        browser.screenshot(file, picture, width=500, height=700, is_dark=is_dark)
        with Image.open(picture) as image:
            assert image.size == (500, 700)
            red, green, blue = image.convert("RGB").getpixel((2, 2))
        assert f"#{red:02x}{green:02x}{blue:02x}" == paper
