"""The index of cases is complete, true, and what docs/cases.md shows."""

import re

from tests.cases.index import HUGGING_FACE, INDEX, PAGE, ROOT, case_tests, ids, render


def by_status(status: str) -> set[str]:
    return {case for case, (given, _) in INDEX.items() if given == status}


def test_every_case_is_listed_once() -> None:
    assert len(ids()) == len(set(ids())) == 155
    assert ids()[0] == "C001" and ids()[-1] == "C258"
    assert set(INDEX) == set(ids())
    assert all(reason for _, reason in INDEX.values())


def test_tested_cases_are_those_with_a_test() -> None:
    assert set(case_tests(ROOT / "tests" / "cases")) == by_status("tested")


def test_a_case_runs_on_a_gpu_unless_all_of_it_needs_double() -> None:
    here = case_tests(ROOT / "tests" / "cases")
    on_gpu = case_tests(ROOT / "tests" / "cases", on_gpu=True)
    assert set(on_gpu) == by_status("tested")
    assert "test_bias_sinks.py::test_c165_slopes_under_dropout" in here["C165"]
    assert "test_bias_sinks.py::test_c165_slopes_under_dropout" not in on_gpu["C165"]


def test_cases_tested_elsewhere_are_there() -> None:
    text = (ROOT / HUGGING_FACE).read_text(encoding="utf-8")
    assert by_status("elsewhere") <= {f"C{n}" for n in re.findall(r"(?i)c(\d{3})_", text)}


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m tests.cases.index"
