"""The page and the verdict of reports that went wrong, and of names that would break HTML."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tilewise.bench.cases import Case
from tilewise.bench.harness import NOT_RUN, REFUSED, TIMED, Row, Timing
from tilewise.core.tolerance import BudgetReport
from tilewise.report import model, page, plots, sentences
from tilewise.report.model import ModelResult, PairRow
from tilewise.report.run import Report
from tilewise.report.sweep import Series
from tilewise.report.verify import VerifyRow

WITHIN = BudgetReport("out", 0.5, 1.0, 0.5, 1.0)
OVER = BudgetReport("out", 2.0, 1.0, 0.5, 1.0, "max error over budget at [0]")


def timed(mask: str, contestant: str, seconds: float) -> list[Row]:
    rows = []
    for length in (256, 1024):
        time = Timing(seconds, seconds, seconds)
        row = Row(Case(mask, length), contestant, contestant == "Tilewise", TIMED, timing=time)
        row.extra_peak_bytes, row.ratio_to_sdpa = 4 * length, 2.0
        rows.append(row)
    return rows


@pytest.fixture
def report() -> Report:
    timing = Timing(0.1, 0.1, 0.1)
    embedded = ModelResult(
        name="MiniLM",
        layers=6,
        swapped=6,
        tokens=(3, 9, 40),
        reports={"each sentence alone": WITHIN},
        pairs=[PairRow("Is 1 < 2 & 2 > 1?", '"Yes."', 0.5, 0.5)],
        timings={"eager": timing, "tilewise": timing},
    )
    return Report(
        is_quick=False,
        environment={"date": "2026-01-01", "gpu": None, "cpu": "CPU", "threads": 1, "torch": "2"}
        | {"tilewise": "0.1.0"},
        seconds=12.0,
        verified=[VerifyRow("attention", "bias [<b>]", "tiled", torch.float32, WITHIN)],
        series=[
            Series(
                "causal, forward", timed("causal", "Tilewise", 1.0) + timed("causal", "SDPA", 2)
            ),
            Series("window, forward", timed("window", "Tilewise", 1.0)),
        ],
        model=embedded,
    )


def test_no_speed_is_shown_where_it_means_little(report: Report) -> None:
    """On a busy machine, and where a window hides little of what there is."""
    assert "× SDPA" in page.render(report)
    busy = replace(report, environment={**report.environment, "load": 9.0, "cores": 2})
    assert "× SDPA" not in page.render(busy)
    assert page.render(busy).count("9 threads on 2 cores") == len(report.series)
    short = [replace(one, rows=one.rows[:1]) for one in report.series]
    assert "× SDPA" not in page.render(replace(report, series=short))


def test_all_is_well(report: Report) -> None:
    assert report.is_well
    text = page.render(report)
    assert "All checks passed" in text
    assert "What failed" not in text
    assert "2.0 × SDPA" in text
    assert "scores alone would take 33.6 MB" in text


def test_a_result_over_budget_is_named(report: Report) -> None:
    bad = VerifyRow("attention", "causal", "tiled", torch.float32, OVER)
    failed = replace(report, verified=[*report.verified, bad])
    assert [check.is_well for check in failed.checks()] == [False, True, True]
    assert not failed.is_well
    text = page.render(failed)
    assert "A check failed" in text
    assert "attention [causal] tiled float32 out: max error 2.000e+00" in text
    assert failed.as_json()["failures"][0]["case"] == "causal"


def test_a_refused_contestant_fails_the_report(report: Report) -> None:
    refused = Row(Case("causal", 256), "Tilewise", True, REFUSED, note="dq is wrong")
    series = [replace(report.series[0], rows=[refused, *report.series[0].rows[2:]])]
    failed = replace(report, series=[*series, *report.series[1:]])
    assert [check.is_well for check in failed.checks()] == [True, False, True]
    assert "From length 256 on without Tilewise: dq is wrong." in page.render(failed)


@pytest.mark.parametrize(
    "change",
    [{"swapped": 5}, {"reports": {"each sentence alone": WITHIN, "one padded batch": OVER}}],
)
def test_a_model_that_was_not_swapped_or_is_off_fails(
    report: Report, change: dict[str, object]
) -> None:
    failed = replace(report, model=replace(report.model, **change))  # type: ignore[arg-type]
    assert [check.is_well for check in failed.checks()] == [True, True, False]


def test_no_line_at_all_is_no_error(report: Report) -> None:
    nothing = [Row(Case("causal", 256), "Tilewise", True, NOT_RUN, note="no memory")]
    text = page.render(replace(report, series=[Series("causal, forward", nothing)] * 2))
    assert "From length 256 on without Tilewise: no memory." in text


def test_words_are_escaped(report: Report) -> None:
    text = page.render(report)
    assert "bias [&lt;b&gt;]" in text
    assert "Is 1 &lt; 2 &amp; 2 &gt; 1?" in text
    svg = plots.draw([], str, name="x", alt='a "b" <c> & d')
    assert 'aria-label="a &quot;b&quot; &lt;c> &amp; d"' in svg


def test_plots_are_the_same_each_time_and_their_ids_their_own() -> None:
    lines = [plots.Line("Tilewise", [256, 512], [0.1, 0.2])]
    first, again, other = (
        plots.draw(lines, str, name=name, alt="") for name in ("one", "one", "two")
    )
    assert first == again
    assert 'id="one-' in first
    assert 'id="one-' not in other


def test_labels_keep_apart_and_in_sight() -> None:
    spread = plots._spread([0.1, 0.1, 0.98, 0.99, 1.0], gap=0.1, top=1.0)
    assert spread == sorted(spread)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(spread))
    assert spread[0] == 0.1
    assert spread[-1] <= 1.0
    assert plots._spread([0.2, 0.5]) == [0.2, 0.5]


def test_what_is_beyond_measure_is_over(report: Report) -> None:
    lost = replace(OVER, max_error=math.inf)
    bad = VerifyRow("attention", "causal", "tiled", torch.float32, lost)
    text = page.render(replace(report, verified=[bad]))
    assert ">over" in text.replace(" ", "").replace("\n", "")


def test_pairs_and_quick_texts_are_of_the_sentences() -> None:
    count = len(sentences.SENTENCES)
    assert count == len(set(sentences.SENTENCES)) >= 24
    assert all(0 <= i < count for pair in sentences.PAIRS for i in pair)
    assert set(sentences.QUICK) <= set(range(count))
    assert {i for pair in sentences.QUICK_PAIRS for i in pair} <= set(sentences.QUICK)
    words = [len(text.split()) for text in sentences.SENTENCES]
    assert min(words) == 1
    assert max(words) > 80
    assert model.ALONE != model.PADDED


def test_plots_stand_alone_for_slides(report: Report, tmp_path: Path) -> None:
    paths = page.write_plots(report, tmp_path)
    assert [path.name for path in paths][:2] == [
        "time-causal-forward.svg",
        "extra-memory-causal-forward.svg",
    ]
    for path in paths:
        svg = path.read_text(encoding="utf-8")
        assert "var(--" not in svg
        assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
